"""The block tables of one stage, for the whole life of a worker process.

Whoever leads, every stage keeps its own tables: `apply` is all that a follower does with a batch, and the leader does
the same for its own layers. Sequence ids are unique over the cluster, so the tables outlive every change of group.

Stages take batches in the order in which the leader formed them, and a batch frees before it covers. A block that
batch k frees was therefore last touched by a batch before k, and whoever gets it does so in batch k or later: no
stage, however far behind the others, can see it used by two.
"""

from collections.abc import Iterable, Sequence

from ballast.common.errors import InvariantViolation
from services.worker.core.batch import Batch, SequenceId
from services.worker.core.blocks import BlockBook

Table = tuple[int, ...]


class StageBook:
    def __init__(self, block_count: int, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._book = BlockBook(block_count, block_tokens)

    @property
    def block_count(self) -> int:
        return self._book.block_count

    @property
    def free_count(self) -> int:
        return self._book.free_count

    @property
    def used_count(self) -> int:
        return self._book.used_count

    @property
    def sequence_ids(self) -> Sequence[SequenceId]:
        """Those that hold blocks."""
        return self._book.sequence_ids

    def table(self, sequence_id: SequenceId) -> Table:
        return self._book.table(sequence_id)

    def apply(self, batch: Batch) -> tuple[Table, ...]:
        """The tables of the batch's slices, each covering its slice; the same object as long as a table is the same."""
        for sequence_id in batch.removed:
            self._book.free(sequence_id)
        return self._book.cover_all(batch.slices)

    def hold(self, sequence_id: SequenceId, token_count: int) -> Table:
        """Blocks for KV that is going to arrive. What the sequence holds here already, for other layers, it keeps:
        a block id means the same place in every layer. To be called between two batches, none of which is on its way.
        """
        return self._book.cover(sequence_id, token_count)

    def trim(self, sequence_id: SequenceId, token_count: int) -> None:
        """What was held beyond so many tokens is free."""
        self._book.trim(sequence_id, token_count)

    def release(self, sequence_id: SequenceId) -> int:
        """The sequence has left this stage: its KV has been sent away. Returns the number of its blocks."""
        return self._book.free(sequence_id)

    def copy(self) -> "StageBook":
        """Another book that says the same, for layers whose blocks go ways of their own."""
        other = StageBook(0, self._block_tokens)
        other._book = self._book.copy()
        return other

    @property
    def used_end(self) -> int:
        """Behind the last block that is held."""
        return self._book.used_end

    def grow(self, added_block_count: int) -> None:
        """The cache got so many more blocks, at its end."""
        self._book.grow(added_block_count)

    def compaction_plan(self, to_block_count: int) -> tuple[tuple[int, int], ...]:
        """(from, to) for every block that must be copied before the cache can end at `to_block_count`.

        Valid until the next batch; to be carried out between two batches and confirmed with `compacted`.
        """
        return self._book.tail_moves(to_block_count)

    def compacted(self, moves: Sequence[tuple[int, int]]) -> None:
        self._book.move(moves)

    def shrink(self, to_block_count: int) -> None:
        """The cache ends there now. What is cut off holds nothing: see `compaction_plan`."""
        self._book.shrink(to_block_count)

    # ------------------------------------------------------------ divided, while a restore copies KV

    @property
    def split(self) -> int | None:
        """Blocks before it are for sequences that stay here; None: the book is not divided."""
        return self._book.split

    def divide(self, split: int) -> None:
        """Some layers are going to have blocks before the split only."""
        self._book.divide(split)

    def confine(self) -> None:
        """Whoever needs blocks from now on stays here, and gets none behind the split."""
        self._book.confine()

    def rejoin(self) -> None:
        """All layers are about to have as many blocks. Nobody may hold one that some of them do not have."""
        split = self._book.split
        if split is not None and self._book.used_end > split:
            raise InvariantViolation(f"block {self._book.used_end - 1} is held, and some layers end at {split}")
        self._book.undivide()

    def undivide(self) -> None:
        """The restore is given up."""
        self._book.undivide()

    def favour(self, sequence_ids: Iterable[SequenceId]) -> None:
        """These stay here."""
        self._book.favour(sequence_ids)

    def before_split(self, sequence_id: SequenceId) -> int:
        """So many of its first blocks lie there."""
        return self._book.before_split(sequence_id)

    def next_moves(self, sequence_ids: Iterable[SequenceId], *, evacuate: bool) -> tuple[tuple[int, int], ...]:
        """(from, to): blocks of these to places before the split; with `evacuate` also those of all that do not stay
        away from there, which must not be being sent then. To be copied and confirmed with `compacted`, until there
        are none.
        """
        return self._book.next_moves(sequence_ids, evacuate=evacuate)

    def check(self) -> None:
        """Raise InvariantViolation unless every block is either free or in exactly one table (I3)."""
        self._book.check()
