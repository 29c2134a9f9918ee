"""Several decode-only steps at once, for the simulator.

While every running sequence is past its prompt and before its last token, blocks are free, and no sequence can be
admitted, a step appends one token to each sequence and changes nothing else. The simulator asks how many such steps
follow (`foresee`) and later reports them as run (`take`). The state is then the same as if each step had been
requested. Tests of `sim` compare whole histories, including load reports, with and without this shortcut.
"""

from collections.abc import Iterable, Sequence

from services.worker.core.group_scheduler import GroupScheduler
from services.worker.core.sequence import Sequence as Running


class PlainSteps:
    """The decode-only steps of a group between two steps; valid until its worker handles an event."""

    __slots__ = ("_early", "_growth", "block_tokens", "context_tokens", "limit", "sequences")

    def __init__(
        self, sequences: tuple[Running, ...], limit: int, block_tokens: int, growth: list[int], early: list[int]
    ) -> None:
        self.sequences = sequences  # in the order of their slices
        self.limit = limit  # maximum number of steps
        self.block_tokens = block_tokens
        self.context_tokens = sum([s.token_count for s in sequences])  # context of the first step, including its inputs
        self._growth = growth  # step number modulo block size -> blocks reserved before that step
        self._early = early  # step numbers, one per sequence that does not need its block at that step yet

    def growth(self, step: int) -> int:
        """Number of blocks to be reserved before this step (counted from 0)."""
        block_count = self._growth[step % self.block_tokens]
        if step < 2 and self._early:
            block_count -= self._early.count(step)
        return block_count


def foresee(group_scheduler: GroupScheduler) -> PlainSteps | None:
    """Return the decode-only steps that follow; None if the next step may not be decode-only."""
    scheduler, batches_in_flight = group_scheduler.scheduler, group_scheduler.batches_in_flight
    if not scheduler.decides_nothing or len(batches_in_flight) or batches_in_flight.carries_changes:
        return None
    if scheduler.has_limit:  # a target limits running sequences, and the limit changes with each step
        return None
    block_tokens = scheduler.block_tokens
    limit = ceiling_tokens = scheduler.ceiling_tokens
    growth, early = [0] * block_tokens, list[int]()
    for sequence in scheduler.running:
        token_count = sequence.token_count
        first = sequence.reserved_tokens - token_count + 1  # before this step it needs a block
        if (
            token_count - sequence.computed_tokens != 1
            or not sequence.in_engine
            or sequence.first_token_at_s is None
            or sequence.sampling.logprobs is not None
            or not 0 <= first <= block_tokens + 1
        ):
            return None
        growth[first % block_tokens] += 1
        if first >= block_tokens:
            early.append(first - block_tokens)
        unwatched = sequence.stop.watched_from - 1 - len(sequence.output_token_ids)
        room = ceiling_tokens - token_count + 1
        limit = unwatched if unwatched < limit else limit
        limit = room if room < limit else limit
    if limit < 1:
        return None
    return PlainSteps(tuple(scheduler.running), limit, block_tokens, growth, early)


def take(plain: PlainSteps, token_ids: Iterable[Sequence[int]], count: int, group_scheduler: GroupScheduler) -> None:
    """Record the first `count` steps as run. `token_ids[i]`: the tokens of sequence i, one per step."""
    block_tokens, scheduler, book = plain.block_tokens, group_scheduler.scheduler, group_scheduler.book
    taken: list[tuple[int, int, Running]] = []  # (step, index in the batch) is the order in which blocks are reserved
    step_id = group_scheduler.batches_in_flight.record_completed(count)
    for place, (sequence, new_ids) in enumerate(zip(plain.sequences, token_ids, strict=True)):
        before = sequence.token_count
        sequence.output_token_ids.extend(new_ids)
        sequence.token_count = before + count
        sequence.computed_tokens = sequence.dispatched_tokens = before + count - 1
        sequence.step_id = step_id
        if sequence.computed_tokens > sequence.reserved_tokens:
            scheduler.reserve_for(sequence, sequence.computed_tokens)
        first = len(book.table(sequence.sequence_id)) * block_tokens - before + 1
        if first < count:
            taken += [(step, place, sequence) for step in range(first, count, block_tokens)]
    taken.sort(key=_when)
    group_scheduler.give_up_retained()
    for step, _, sequence in taken:
        book.hold(sequence.sequence_id, sequence.token_count - count + step)


def _when(taken: tuple[int, int, Running]) -> tuple[int, int]:
    return taken[:2]
