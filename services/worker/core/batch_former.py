"""Forms batches of running online sequences: decodes and prompt chunks."""

from ballast.common.errors import InvariantViolation
from ballast.common.record import record
from services.worker.core.limits import WorkerLimits
from services.worker.core.sequence import Sequence
from services.worker.core.swapping import NOTHING, SwapOrders
from services.worker.policy.batching import PrefillView, chunk_prefills
from services.worker.policy.microbatching import MicrobatchCandidate, Microbatching, PipelineView

_FEW = 0.25  # leftover decodes count as few up to this fraction of a microbatch's decodes
_LIMITED_BATCHES = 4  # waiting prompts are spread over at most this many batches, even if the limit is smaller


@record()
class BatchPlan:
    """What the next step computes."""

    decodes: list[Sequence]  # one token each
    chunks: list[tuple[Sequence, int]]  # (sequence, number of prompt tokens, at least 1)
    preempted: list[Sequence]  # back in the waiting queue
    begun: list[Sequence]  # sequences that hold blocks on the stages from this step on, even if not in its batch
    swaps: SwapOrders = NOTHING  # copies that overlap with the step, never of blocks that it writes
    safepoint_layers: int = 0  # see `Batch`


Share = tuple[list[Sequence], list[tuple[Sequence, int]]]  # decodes; chunks, with their number of tokens


def ready_alone(running: list[Sequence], completed_step_id: int) -> list[Sequence]:
    """Running sequences that are in no batch after `completed_step_id` and have the blocks they need."""
    return [s for s in running if s.step_id <= completed_step_id and s.token_count <= s.reserved_tokens]


def ready_ahead(running: list[Sequence], completed_step_id: int) -> list[Sequence]:
    """Running sequences that may be in the batch that follows the one in flight, and have the blocks they need."""
    return [
        s
        for s in running
        if (
            s.token_count <= s.reserved_tokens
            if s.step_id <= completed_step_id or s.dispatched_tokens < s.token_count
            else s.token_count < s.reserved_tokens and s.token_count in s.ahead
        )
    ]


def growing_ahead(running: list[Sequence], completed_step_id: int) -> list[Sequence]:
    """Running sequences that need another block for the batch that follows the one in flight."""
    return [
        s
        for s in running
        if s.token_count > s.reserved_tokens
        or (
            s.token_count == s.reserved_tokens
            and s.step_id > completed_step_id
            and s.dispatched_tokens == s.token_count
            and s.token_count in s.ahead
        )
    ]


class BatchFormer:
    def __init__(self, limits: WorkerLimits, microbatching: Microbatching) -> None:
        self.prefill_limit: int | None = None  # maximum prompt tokens in a batch that has decodes
        self._limits = limits
        self._microbatching = microbatching
        self._limits_always = False  # the limit applies to batches without decodes, too
        self._limited_count: int | None = None  # number of further batches to limit; None: all
        self._limited_tokens = 0  # largest number of waiting prompt tokens since the limit was set; 0 once none wait

    @property
    def ahead_count(self) -> int:
        """Microbatches in flight beyond one per stage."""
        return self._microbatching.ahead

    def batch(self, running: list[Sequence], completed_step_id: int, *, all_ready: bool, ahead: bool) -> Share:
        """Form a batch of an instance that serves alone. `all_ready`: no running sequence is in flight, and all have
        the blocks they need; `ahead`: a batch is in flight.
        """
        if ahead:
            found = ready_ahead(running, completed_step_id)
            decodes = [s for s in found if s.left_tokens == 1]
        else:
            found = running if all_ready else ready_alone(running, completed_step_id)
            decodes = [s for s in found if s.token_count - s.computed_tokens == 1]
        prefills = [] if len(decodes) == len(found) else [s for s in found if s.left_tokens != 1]
        prompt_tokens = sum(s.left_tokens for s in prefills) if self.prefill_limit else 0
        budget = min(
            self._limits.max_batch_tokens, len(decodes) + self._most_prompt_tokens(len(decodes), prompt_tokens)
        )
        return decodes, self._chunks(len(decodes), prefills, budget)

    def microbatch(
        self,
        running: list[Sequence],
        completed_step_id: int,
        *,
        stage_count: int,
        waiting_count: int,
        in_flight_count: int,
        lacks_room: bool,
    ) -> Share:
        """Form a microbatch of a pipeline. The counts are those of `PipelineView`."""
        candidates = [
            MicrobatchCandidate(
                s.rank,
                s.computed_tokens,
                s.dispatched_tokens if s.step_id > completed_step_id else s.computed_tokens,
                s.token_count,
                s.step_id,
                s.token_count <= s.reserved_tokens,
            )
            for s in running
        ]
        limited = self.prefill_limit is not None
        prompts = [c for c in candidates if c.token_count - c.computed_tokens != 1] if limited else []
        decode_count = len(candidates) - len(prompts) if limited else 0
        prompt_tokens = sum(c.token_count - c.dispatched_tokens for c in prompts)
        view = PipelineView(
            stage_count,
            completed_step_id,
            self._limits.max_batch_tokens,
            waiting_count,
            candidates,
            in_flight_count,
            self._most_prompt_tokens(decode_count, prompt_tokens),
            lacks_room,
        )
        decodes, chunks = list[Sequence](), list[tuple[Sequence, int]]()
        for index, count in self._microbatching(view):
            sequence, candidate = running[index], candidates[index]
            left = candidate.token_count - candidate.dispatched_tokens
            if not (0 < count <= left and candidate.has_room):
                raise InvariantViolation(f"a chunk of {count} tokens, but {left} remain", sequence.story())
            if candidate.token_count - candidate.computed_tokens == 1:
                decodes.append(sequence)
            else:
                chunks.append((sequence, count))
        if limited and decodes:
            self._add_leftover_decodes(decodes, chunks, ready_alone(running, completed_step_id))
        return decodes, chunks

    def _add_leftover_decodes(
        self, decodes: list[Sequence], chunks: list[tuple[Sequence, int]], ready: list[Sequence]
    ) -> None:
        """Add leftover decodes to this microbatch if there are few. Deferring them to the next one costs half a
        pipeline round, and rounds take longer while a transition is being prepared.
        """
        taken = {s.sequence_id for s in decodes}
        left = [s for s in ready if s.token_count - s.computed_tokens == 1 and s.sequence_id not in taken]
        room = self._limits.max_batch_tokens - len(decodes) - sum(count for _, count in chunks)
        if len(left) <= min(room, max(1, int(len(decodes) * _FEW))):
            decodes.extend(left)

    def limit_prefill(self, token_count: int | None, *, always: bool = False, count: int | None = None) -> None:
        """Limit the prompt tokens of batches. `count`: how many batches with prompts are limited; None: all."""
        self.prefill_limit, self._limits_always = token_count, always
        self._limited_tokens, self._limited_count = 0, count

    def _most_prompt_tokens(self, decode_count: int, prompt_tokens: int) -> int:
        """Maximum prompt tokens of a batch, given its number of decodes and the number of waiting prompt tokens."""
        limit = self.prefill_limit
        if limit is None or not (decode_count or self._limits_always):
            return self._limits.max_batch_tokens
        if not limit:
            return 0
        self._limited_tokens = max(self._limited_tokens, prompt_tokens) if prompt_tokens else 0
        most = max(limit, -(-self._limited_tokens // _LIMITED_BATCHES))
        if prompt_tokens and self._limited_count is not None:
            self._limited_count -= 1
            if not self._limited_count:
                self.limit_prefill(None)
        return most

    def _chunks(self, decode_count: int, prefills: list[Sequence], budget_tokens: int) -> list[tuple[Sequence, int]]:
        if not prefills:
            return []
        views = [PrefillView(s.rank, s.planned_tokens, s.left_tokens, s.caller) for s in prefills]
        counts = chunk_prefills(decode_count, views, budget_tokens)
        return [(sequence, count) for sequence, count in zip(prefills, counts, strict=True) if count]
