"""Which tokens a stage's activation log holds, whatever happens to their blocks."""

from dataclasses import replace

from services.worker.core.batch import Batch, Slice, row_order
from services.worker.core.blocks import BlockBook
from services.worker.core.logged import LoggedTokens

SIZE = 4


def batch(*slices: tuple[int, int, int]) -> Batch:
    """A batch of (sequence, first position, token count). The token at a position is 100 * sequence + position."""
    parts = [
        Slice(s, first, tuple(100 * s + i for i in range(first, first + n)), samples=False) for s, first, n in slices
    ]
    return Batch(1, (), (), tuple(parts))


class Stage:
    def __init__(self, block_count: int = 8, slot_count: int = 1000) -> None:
        self.book = BlockBook(block_count, SIZE)
        self.log = LoggedTokens(SIZE)
        self.slot_count = slot_count
        self.rows: dict[int, int] = {}  # slot -> token, as a log would store it

    def run(self, batch: Batch) -> None:
        tables = self.book.apply(batch)
        self.log.follow(batch, self.book)
        rows, slots = self.log.take(batch, tables, self.slot_count)
        tokens = [token for i in row_order(batch.slices) for token in batch.slices[i].token_ids]
        self.rows |= dict(zip(slots, [tokens[row] for row in rows], strict=True))

    def read(self, sequence: int, count: int) -> list[int] | None:
        if not self.log.covers(self.book, sequence, count):
            return None
        slots = self.log.slots(self.book.table(sequence), 0, count)
        assert self.log.token_ids(slots) == tuple(self.rows[slot] for slot in slots)
        return [self.rows[slot] for slot in slots]


def test_chunks_and_decodes_are_logged_in_their_slots() -> None:
    stage = Stage()
    stage.run(batch((1, 0, 6), (2, 0, 3)))
    stage.run(batch((2, 3, 1), (1, 6, 1)))
    assert stage.read(1, 7) == [*range(100, 107)]
    assert stage.read(2, 4) == [*range(200, 204)]
    assert stage.read(1, 8) is None


def test_rows_are_those_of_the_packed_batch() -> None:
    """Decodes come first, and short contexts before long ones, whatever the order of the slices."""
    log = LoggedTokens(SIZE)
    book = BlockBook(8, SIZE)
    for one in (batch((1, 0, 5), (2, 0, 2), (3, 0, 1)), batch((1, 5, 2), (2, 2, 1), (3, 1, 3))):
        tables = book.apply(one)
        log.follow(one, book)
        rows, slots = log.take(one, tables, 1000)
    assert rows == [*range(6)]
    assert log.token_ids(slots) == (202, 301, 302, 303, 105, 106)


def test_recomputed_tokens_are_logged_again() -> None:
    stage = Stage()
    stage.run(batch((1, 0, 6)))
    stage.run(batch((1, 4, 1)))
    assert stage.read(1, 5) == [*range(100, 105)]
    assert stage.read(1, 6) is None, "the token at position 5 belonged to a batch that was lost"


def test_a_sequence_with_kv_from_elsewhere_is_not_logged() -> None:
    stage = Stage()
    stage.book.hold(1, 8)
    stage.run(batch((1, 8, 1)))
    assert stage.read(1, 1) is None


def test_a_block_of_another_sequence_no_longer_counts() -> None:
    stage = Stage(block_count=2)
    stage.run(batch((1, 0, 8)))
    stage.run(replace(batch((2, 0, 4)), removed=(1,)))
    assert stage.read(1, 1) is None
    assert stage.read(2, 4) == [*range(200, 204)]


def test_reused_blocks_count_if_they_were_logged() -> None:
    stage = Stage()
    stage.run(batch((1, 0, 9)))
    stage.run(replace(batch(), named=((1, 0, 10, 2),)))
    stage.run(replace(batch((2, 8, 2)), taken=((2, ((10, 2),)),)))
    assert stage.read(2, 10) == [*range(100, 108), 208, 209]
    stage.log.forget_numbers()
    stage.run(replace(batch((3, 8, 1)), taken=((3, ((10, 2),)),)))
    assert stage.read(3, 1) is None


def test_forgotten_numbers_may_be_reused() -> None:
    stage = Stage()
    stage.run(batch((1, 0, 5)))
    stage.run(replace(batch(), named=((1, 0, 10, 1),)))
    stage.book.hold(2, 4)  # blocks that an exchange fills
    stage.run(replace(batch(), forgotten=((10, 1),)))
    stage.run(replace(batch(), named=((2, 0, 10, 1),)))
    stage.run(replace(batch((3, 4, 1)), taken=((3, ((10, 1),)),)))
    assert stage.read(3, 1) is None


def test_moved_blocks_are_no_longer_logged() -> None:
    stage = Stage(block_count=4)
    stage.run(batch((1, 0, 4), (2, 0, 4)))
    stage.run(replace(batch(), removed=(1,)))
    stage.book.compacted(stage.book.compaction_plan(1))
    assert stage.read(2, 4) is None
    stage.run(batch((3, 0, 1)))
    assert stage.read(2, 4) is None
    assert stage.read(3, 1) == [300]


def test_another_book_starts_an_empty_log() -> None:
    stage = Stage()
    stage.run(batch((1, 0, 4)))
    stage.book = BlockBook(8, SIZE)
    stage.run(batch((2, 0, 1)))
    assert stage.read(1, 4) is None


def test_tokens_beyond_the_log_are_left_out() -> None:
    stage = Stage(slot_count=6)
    stage.run(batch((1, 0, 8)))
    assert stage.read(1, 6) == [*range(100, 106)]
    assert stage.read(1, 7) is None
    stage.run(batch((1, 8, 1)))
    assert stage.read(1, 9) is None
