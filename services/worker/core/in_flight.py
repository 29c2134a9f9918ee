"""Batches in flight, and removals that have not been sent to the stages."""

from collections import deque
from collections.abc import Callable

from ballast.common.errors import InvariantViolation
from services.worker.core.batch import IN_FLIGHT, Batch, NewSequence, SequenceId, Slice, StepResult, SwapCopy
from services.worker.core.batch_former import BatchPlan
from services.worker.core.blocks import BlockBook
from services.worker.core.events import Execute, Removed
from services.worker.core.prefixes import PrefixIndex
from services.worker.core.sequence import Sequence, SequenceState
from services.worker.core.swapping import NOTHING, block_copies

# A named tuple's own constructor takes twice as long, and a slice is made for each token.
_New = Callable[[type[Slice], tuple[object, ...]], Slice]
_UNKNOWN = (IN_FLIGHT,)
_new: _New = tuple.__new__  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


class InFlightBatch:
    """A batch dispatched to the stages."""

    __slots__ = ("chunked", "has_safepoints", "sampled_count", "shares", "step_id", "swaps")

    def __init__(self, step_id: int) -> None:
        self.step_id = step_id
        self.shares: list[tuple[Sequence, int, bool]] = []  # (sequence, tokens with KV afterwards, whether it samples)
        self.chunked: list[Sequence] = []  # sequences with a prompt chunk in this batch
        self.sampled_count = 0
        self.has_safepoints = False  # True: may be preempted within its step
        self.swaps = NOTHING  # copies to host memory and back

    def check_result(self, result: StepResult, text_count: int) -> None:
        counts = (len(result.token_ids), len(result.logprobs), text_count)
        if counts != (self.sampled_count,) * 3:
            raise InvariantViolation(
                f"step {self.step_id} samples {self.sampled_count} tokens, but the result has {counts[0]} tokens,"
                f" {counts[1]} logprobs and {counts[2]} texts"
            )


class Steps:
    """Numbers the batches of all groups of a worker."""

    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last = 0

    def next(self) -> int:
        self.last += 1
        return self.last


class InFlightBatches:
    """Batches complete in the order of dispatch. A sequence is in flight if its last batch has not completed.

    Several prompt chunks of one sequence may be in flight, because every stage takes batches in order. A slice after a
    sampling slice takes the sampled token as input. A pipeline forms it once the token is known, a lone instance at
    once with a placeholder (`IN_FLIGHT`). If that token ends the sequence, the result of the slice is discarded; it
    only wrote into the sequence's own blocks.
    """

    def __init__(self, book: BlockBook, steps: Steps, prefixes: PrefixIndex) -> None:
        self._book = book
        self._prefixes = prefixes
        self._steps = steps
        self._batches: deque[InFlightBatch] = deque()
        self.completed_step_id = 0
        self.to_remove: list[SequenceId] = []  # sequences that the next batch will remove from the stages

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def next_completion(self) -> int | None:
        """Step id of the oldest batch in flight."""
        return self._batches[0].step_id if self._batches else None

    @property
    def may_be_preempted(self) -> bool:
        """True if the newest batch in flight may be preempted within its step."""
        return bool(self._batches) and self._batches[-1].has_safepoints

    def in_flight(self, sequence: Sequence) -> bool:
        return sequence.step_id > self.completed_step_id

    def forget(self, sequence: Sequence) -> None:
        """Make the stages release the sequence's blocks and state before the next batch runs."""
        if sequence.on_stages:
            sequence.on_stages = sequence.in_engine = False
            self.to_remove.append(sequence.sequence_id)

    def dispatch(self, plan: BatchPlan) -> Execute:
        step_id = self._steps.next()
        in_flight_batch = InFlightBatch(step_id)
        in_flight_batch.swaps, in_flight_batch.has_safepoints = plan.swaps, plan.safepoint_layers > 0
        added = [sequence for sequence in plan.decodes if not sequence.in_engine]
        if self._batches:
            slices = [self._decode(sequence) for sequence in plan.decodes]
        else:
            slices = [
                _new(Slice, (s.sequence_id, s.token_count - 1, ((s.output_token_ids or s.prompt_token_ids)[-1],), True))
                for s in plan.decodes
            ]
        for sequence, part in zip(plan.decodes, slices, strict=True):
            sequence.dispatched_tokens, sequence.step_id = part[1] + 1, step_id
        shares = in_flight_batch.shares = [(sequence, sequence.dispatched_tokens, True) for sequence in plan.decodes]
        in_flight_batch.sampled_count = len(shares)
        for sequence, count in plan.chunks:
            if not sequence.in_engine:
                added.append(sequence)
            first = sequence.dispatched_tokens if self.in_flight(sequence) else sequence.computed_tokens
            samples = first + count == sequence.token_count
            sequence.dispatched_tokens = first + count
            sequence.step_id = step_id
            slices.append(Slice(sequence.sequence_id, first, sequence.token_ids(first, count), samples))
            shares.append((sequence, first + count, samples))
            in_flight_batch.chunked.append(sequence)
            in_flight_batch.sampled_count += samples
        copies = plan.swaps.copies
        batch = self._batch(step_id, tuple(_enter(s) for s in added), tuple(slices), copies, plan.safepoint_layers)
        self._batches.append(in_flight_batch)
        tables, text_wanted = self._book.apply(batch), tuple(s.stop.needs_text for s in added)
        return Execute(batch, tables, text_wanted, block_copies(batch, self._book) if copies else ())

    def _decode(self, sequence: Sequence) -> Slice:
        """Return the slice of the sequence's next decode, which may follow a batch in flight."""
        if sequence.step_id > self.completed_step_id and sequence.dispatched_tokens >= sequence.token_count:
            return _new(Slice, (sequence.sequence_id, sequence.token_count, _UNKNOWN, True))
        token_ids = sequence.output_token_ids or sequence.prompt_token_ids
        return _new(Slice, (sequence.sequence_id, sequence.token_count - 1, (token_ids[-1],), True))

    def release_batch(self, copies: tuple[SwapCopy, ...] = ()) -> Removed:
        """Form a batch that carries only releases and copies to the stages, for when no other batch follows soon."""
        batch = self._batch(self._steps.next(), (), (), copies)
        self._book.apply(batch)
        return Removed(batch, block_copies(batch, self._book))

    def complete(self, step_id: int) -> InFlightBatch:
        if not self._batches or self._batches[0].step_id != step_id:
            running = f"step {self._batches[0].step_id}" if self._batches else "none"
            raise InvariantViolation(f"step {step_id} is reported, but {running} was running")
        self.completed_step_id = step_id
        return self._batches.popleft()

    def record_completed(self, count: int) -> int:
        """Record `count` batches as dispatched and completed. Returns the last step id."""
        self.require_none("steps are skipped")
        self._steps.last += count
        self.completed_step_id = self._steps.last
        return self.completed_step_id

    def lose(self) -> tuple[int, ...]:
        """Drop all batches in flight. Returns their step ids."""
        lost = tuple([batch.step_id for batch in self._batches])
        self._batches.clear()
        self.completed_step_id = self._steps.last
        return lost

    def abandon(self) -> None:
        """Drop all batches in flight and pending removals, because no stage is left."""
        self.lose()
        self.to_remove.clear()

    def require_none(self, why: str) -> None:
        if self._batches:
            raise InvariantViolation(f"{why} while step {self._batches[0].step_id} runs")

    @property
    def needs_release_batch(self) -> bool:
        """True if the stages must release blocks or start tables that no batch has carried to them yet."""
        return bool(self.to_remove) or self._prefixes.needs_release_batch

    @property
    def carries_changes(self) -> bool:
        """True if the next batch carries changes of block tables or block numbers to the stages."""
        return bool(self.to_remove) or self._prefixes.carries_changes

    def _batch(
        self,
        step_id: int,
        added: tuple[NewSequence, ...],
        slices: tuple[Slice, ...],
        copies: tuple[SwapCopy, ...],
        safepoint_layers: int = 0,
    ) -> Batch:
        removed = tuple(self.to_remove)
        self.to_remove.clear()
        news = self._prefixes.drain_changes() if self._prefixes.carries_changes else ((), (), ())
        return Batch(step_id, removed, added, slices, 0.0, False, "", copies, *news, safepoint_layers)

    def check(self) -> None:
        """Raise InvariantViolation unless each sequence in flight runs or has ended, and its slices are contiguous."""
        ends: dict[SequenceId, tuple[int, int]] = {}  # end of the last share, and tokens in flight
        for in_flight_batch in self._batches:
            for sequence, end, samples in in_flight_batch.shares:
                before, awaited_count = ends.get(sequence.sequence_id, (end - 1, 0))
                if end <= before or (awaited_count and (end != before + 1 or not samples)):
                    raise InvariantViolation(f"{sequence.name} is in two batches in flight", sequence.story())
                ends[sequence.sequence_id] = end, awaited_count + samples
                if sequence.state is SequenceState.ENDED:
                    continue
                if sequence.state is not SequenceState.RUNNING:
                    raise InvariantViolation(f"{sequence.name} is in a batch but not running", sequence.story())
                if end <= sequence.computed_tokens or end > sequence.dispatched_tokens:
                    raise InvariantViolation(f"{sequence.name} has a slice that ends at {end}", sequence.story())
                if samples and end != sequence.token_count + awaited_count:
                    raise InvariantViolation(f"{sequence.name} samples before its last token", sequence.story())


def _enter(sequence: Sequence) -> NewSequence:
    sequence.in_engine = sequence.on_stages = True
    return sequence.as_new()
