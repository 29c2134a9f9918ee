"""Where the KV of layers given up lies until it has been sent: tables of their own (pure).

In the layers that a stage keeps, its sequences go on and others come; in those that it has given up, sequences only
go. What is left moves together now and then, so that the end can be given back.
"""

from collections.abc import Iterable

from services.worker.core.batch import SequenceId
from services.worker.core.blocks import BlockBook, Table


class RetiredTables:
    def __init__(self, book: BlockBook) -> None:
        """`book` as it is when the layers are given up; it goes on without this."""
        self._book = book.copy()

    @property
    def used_end(self) -> int:
        """The first block behind the last one that is needed."""
        return self._book.used_end

    def table(self, sequence_id: SequenceId) -> Table:
        return self._book.table(sequence_id)

    def forget(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Their KV has been sent, or nobody wants it."""
        for sequence_id in sequence_ids:
            self._book.release(sequence_id)

    def compact(self) -> tuple[tuple[int, int], ...]:
        """(from, to) of blocks that are to be copied, in every layer given up: all then lie side by side. What is
        being sent must not move: to be called when nothing is.
        """
        moves = self._book.compaction_plan(self._book.used_count)
        self._book.compacted(moves)
        self._book.shrink(self._book.used_count)
        return moves

    def check(self) -> None:
        self._book.check()
