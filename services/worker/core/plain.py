"""Steps in which nothing is decided, taken together.

As long as all that runs is past its prompt, none of it is at its last token, blocks are free and nothing new can be let
in, a step gives every running sequence one token, and that is all. Who asks for step after step gets such steps one by
one. A simulation, to which a token is a number, may ask how many of them follow (`foresee`), and say later that they
have been run (`take`): the books are then as if every step had been asked for. Of that, and of what the load reports
say in between, the tests of `sim` make sure by comparing whole histories.
"""

from collections.abc import Iterable, Sequence

from services.worker.core.group_scheduler import GroupScheduler
from services.worker.core.sequence import Sequence as Running


class PlainSteps:
    """Steps of a group as it is between two of them; good until its worker is told anything else."""

    __slots__ = ("_early", "_growth", "block_tokens", "context_tokens", "limit", "sequences")

    def __init__(
        self, sequences: tuple[Running, ...], limit: int, block_tokens: int, growth: list[int], early: list[int]
    ) -> None:
        self.sequences = sequences  # in the order of their slices
        self.limit = limit  # so many steps at most
        self.block_tokens = block_tokens
        self.context_tokens = sum([s.token_count for s in sequences])  # that the first step reads, its own included
        self._growth = growth  # step number, modulo the tokens of a block -> blocks reserved before it
        self._early = early  # numbers of steps before which a sequence does not need one yet, once for each

    def growth(self, step: int) -> int:
        """Blocks that are reserved before this step (counted from 0)."""
        block_count = self._growth[step % self.block_tokens]
        if step < 2 and self._early:
            block_count -= self._early.count(step)
        return block_count


def foresee(group_scheduler: GroupScheduler) -> PlainSteps | None:
    """None: the next step may be another one."""
    scheduler, batches_in_flight = group_scheduler.scheduler, group_scheduler.batches_in_flight
    if not scheduler.decides_nothing or len(batches_in_flight) or batches_in_flight.has_news:
        return None
    if scheduler.has_limit:  # how many may run is another number after each of them, and is told
        return None
    block_tokens = scheduler.block_tokens
    limit = scheduler.ceiling_tokens
    growth, early = [0] * block_tokens, list[int]()
    for sequence in scheduler.running:
        token_count = sequence.token_count
        first = sequence.reserved_tokens - token_count + 1  # the step before which it needs a block
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
        limit = min(
            limit,
            sequence.stop.watched_from - 1 - len(sequence.output_token_ids),
            scheduler.ceiling_tokens - token_count + 1,
        )
    if limit < 1:
        return None
    return PlainSteps(tuple(scheduler.running), limit, block_tokens, growth, early)


def take(plain: PlainSteps, token_ids: Iterable[Sequence[int]], count: int, group_scheduler: GroupScheduler) -> None:
    """The first `count` of these steps have been run. `token_ids`: of each sequence, as many as steps."""
    block_tokens, scheduler, book = plain.block_tokens, group_scheduler.scheduler, group_scheduler.book
    taken: list[tuple[int, int, Running]] = []  # step, place in the batch: the order in which blocks are taken
    step_id = group_scheduler.batches_in_flight.record_completed(count)
    for place, (sequence, new_ids) in enumerate(zip(plain.sequences, token_ids, strict=True)):
        before = sequence.token_count
        sequence.output_token_ids.extend(new_ids)
        sequence.token_count = before + count
        sequence.computed_tokens = sequence.dispatched_tokens = before + count - 1
        sequence.step_id = step_id
        scheduler.reserve_for(sequence, before + count - 1)
        first = len(book.table(sequence.sequence_id)) * block_tokens - before + 1
        if first < count:
            taken += [(step, place, sequence) for step in range(first, count, block_tokens)]
    taken.sort(key=_when)
    group_scheduler.give_up_retained()
    for step, _, sequence in taken:
        book.hold(sequence.sequence_id, sequence.token_count - count + step)


def _when(taken: tuple[int, int, Running]) -> tuple[int, int]:
    return taken[:2]
