"""Tracks which tokens' activations are in a stage's activation log, and where (pure).

A log row belongs to a slot of the stage's KV cache: `block * block_tokens + offset`. It is valid as long as the token's
KV, and is overwritten with it. A sequence is logged from its first token without gaps, or not at all. Prefix blocks
that it reuses count as logged if they were logged when computed.
"""

from collections.abc import Iterable, Sequence
from itertools import chain, takewhile

from services.worker.core.batch import Batch, BlockNumber, NumberRuns, SequenceId, row_order
from services.worker.core.blocks import BlockBook


class LoggedTokens:
    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._counts: dict[SequenceId, int] = {}  # sequence -> number of its first tokens that are logged
        self._token_ids: dict[int, int] = {}  # slot -> token id
        self._numbers: set[BlockNumber] = set()  # numbers of logged blocks
        self._book: BlockBook | None = None
        self._compaction_count = 0

    def covers(self, book: BlockBook, sequence_id: SequenceId, token_count: int) -> bool:
        """True if the sequence's first `token_count` tokens are logged. `book`: the current block tables."""
        return self._is_of(book) and self._counts.get(sequence_id, 0) >= token_count

    def _is_of(self, book: BlockBook) -> bool:
        return book is self._book and book.compaction_count == self._compaction_count

    def clear(self) -> None:
        self._counts.clear()
        self._numbers.clear()

    def forget_numbers(self) -> None:
        """Forget the numbers of blocks, because the next leader assigns its own."""
        self._numbers.clear()

    def follow(self, batch: Batch, book: BlockBook) -> None:
        """Apply the batch's changes of blocks, before its slices run. If blocks were moved, the whole log is
        forgotten.
        """
        if not self._is_of(book):
            self.clear()
            self._book, self._compaction_count = book, book.compaction_count
        for sequence_id, first_block, first_number, count in batch.named:
            if self.covers(book, sequence_id, (first_block + count) * self._block_tokens):
                self._numbers.update(range(first_number, first_number + count))
        for sequence_id in batch.removed:
            self._counts.pop(sequence_id, None)
        self._numbers.difference_update(_numbers(batch.forgotten))
        for sequence_id, runs in batch.taken:
            numbers = [*_numbers(runs)]
            if self._numbers.issuperset(numbers):
                self._counts[sequence_id] = len(numbers) * self._block_tokens

    def take(self, batch: Batch, tables: Sequence[Sequence[int]], slot_count: int) -> tuple[list[int], list[int]]:
        """Record the batch's tokens as logged. Returns the rows of its activations to store and their slots.
        `slot_count`: size of the log; all slots are below it.
        """
        rows, slots, row = list[int](), list[int](), 0
        for index in row_order(batch.slices):
            (sequence_id, first, token_ids, _), table = batch.slices[index], tables[index]
            count = len(token_ids)
            if first <= self._counts.get(sequence_id, 0):
                found = [*takewhile(slot_count.__gt__, self.slots(table, first, count))]
                rows += range(row, row + len(found))
                slots += found
                self._token_ids.update(zip(found, token_ids, strict=False))
                self._counts[sequence_id] = first + len(found)
            row += count
        return rows, slots

    def token_ids(self, slots: Iterable[int]) -> tuple[int, ...]:
        return tuple([self._token_ids[slot] for slot in slots])

    def slots(self, table: Sequence[int], first: int, count: int) -> list[int]:
        """Slots of the positions `[first, first + count)` of a sequence with this block table."""
        size = self._block_tokens
        return [table[position // size] * size + position % size for position in range(first, first + count)]


def _numbers(runs: NumberRuns) -> Iterable[BlockNumber]:
    return chain.from_iterable(range(first, first + count) for first, count in runs)
