import random

import pytest

from ballast.common.errors import InvariantViolation
from services.worker.core.batch import Batch, Slice
from services.worker.core.blocks import BlockBook


def batch(*slices: tuple[int, int, int], removed: tuple[int, ...] = ()) -> Batch:
    """A batch of slices (sequence id, first position, token count)."""
    return Batch(1, removed, (), tuple(Slice(s, first, (7,) * count, False) for s, first, count in slices))


def test_a_batch_frees_before_it_covers() -> None:
    book = BlockBook(4, 4)
    assert book.apply(batch((1, 0, 16))) == ((0, 1, 2, 3),)
    assert book.apply(batch((2, 0, 5), (3, 0, 4), removed=(1,))) == ((0, 1), (2,))
    assert (book.used_count, book.free_count) == (3, 1)
    book.check()


def test_a_table_is_the_same_object_until_it_grows() -> None:
    book = BlockBook(4, 4)
    (table,) = book.apply(batch((1, 0, 5)))
    assert book.apply(batch((1, 5, 3)))[0] is table
    assert book.apply(batch((1, 8, 1)))[0] == (*table, 2)


def test_removing_an_unknown_sequence_has_no_effect() -> None:
    book = BlockBook(2, 4)
    assert book.apply(batch(removed=(9,))) == ()
    book.check()


def test_blocks_wait_for_kv_and_a_stage_keeps_its_own_layers() -> None:
    book = BlockBook(6, 4)
    (own,) = book.apply(batch((1, 0, 8)))
    assert book.hold(1, 8) is own
    assert book.hold(2, 9) == (2, 3, 4)
    assert book.apply(batch((2, 9, 1))) == ((2, 3, 4),)
    assert (book.release(2), book.release(2)) == (3, 0)
    assert list(book.sequence_ids) == [1]


def test_compaction_moves_only_the_tail_onto_the_lowest_free_blocks() -> None:
    book = BlockBook(8, 1)
    for sequence_id, count in ((1, 2), (2, 2), (3, 3)):
        book.hold(sequence_id, count)
    book.release(1)
    assert book.compaction_plan(5) == ((5, 0), (6, 1))
    book.compacted(book.compaction_plan(5))
    assert (book.table(2), book.table(3)) == ((2, 3), (4, 0, 1))
    book.shrink(5)
    book.check()
    assert (book.block_count, book.free_count) == (5, 0)
    book.grow(2)
    assert book.hold(4, 2) == (5, 6)


def test_a_cache_cannot_shrink_below_its_used_blocks() -> None:
    book = BlockBook(8, 1)
    book.hold(1, 5)
    with pytest.raises(InvariantViolation, match="5 held blocks do not fit into 4"):
        book.compaction_plan(4)
    with pytest.raises(InvariantViolation, match="are held"):
        book.shrink(4)
    with pytest.raises(InvariantViolation, match="a source is not held or a target is not free"):
        book.compacted(((0, 1),))
    book.check()


@pytest.mark.parametrize("seed", range(20))
def test_compaction_keeps_every_token_in_its_place(seed: int) -> None:
    rng = random.Random(seed)
    book = BlockBook(40, 1)
    content: dict[int, tuple[int, int]] = {}  # block -> (sequence, index in its table)
    for sequence_id in range(12):
        for place, block in enumerate(book.hold(sequence_id, rng.randrange(1, 5))):
            content[block] = (sequence_id, place)
        if rng.random() < 0.5:
            book.release(rng.randrange(sequence_id + 1))
    target = rng.randrange(book.used_count, 41)
    moves = book.compaction_plan(target)
    for source, to in moves:
        content[to] = content[source]
    book.compacted(moves)
    book.shrink(target)
    book.check()
    for sequence_id in book.sequence_ids:
        table = book.table(sequence_id)
        assert [content[block] for block in table] == [(sequence_id, place) for place in range(len(table))]
