import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast.common.errors import InvariantViolation
from services.worker.core.blocks import BlockBook, blocks_for


def test_blocks_for_rounds_up() -> None:
    assert [blocks_for(n, 16) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_a_table_grows_by_whole_blocks_and_stays_the_same_object_until_then() -> None:
    book = BlockBook(8, 4)
    table = book.hold(1, 5)
    assert table == (0, 1)
    assert book.hold(1, 8) is table
    assert book.hold(1, 9) == (0, 1, 2)
    assert (book.used_count, book.free_count) == (3, 5)
    book.check()


def test_the_lowest_free_ids_are_allocated_first_so_that_the_tail_stays_empty() -> None:
    book = BlockBook(8, 1)
    book.hold(1, 2)
    book.hold(2, 3)
    book.hold(3, 2)
    assert book.release(2) == 3
    assert book.hold(3, 4) == (5, 6, 2, 3)
    assert book.hold(4, 2) == (4, 7)
    book.check()


def test_freed_blocks_become_free_exactly_once() -> None:
    book = BlockBook(4, 1)
    book.hold(1, 3)
    assert book.release(1) == 3
    assert book.release(1) == 0
    assert book.table(1) == ()
    assert book.free_count == 4
    book.check()


def test_allocating_more_than_the_free_blocks_is_a_bug_of_the_caller() -> None:
    book = BlockBook(2, 4)
    with pytest.raises(InvariantViolation, match="sequence 7 needs 3 blocks, but 2 of 2 are free"):
        book.hold(7, 9)


def test_growing_appends_ids_at_the_end() -> None:
    book = BlockBook(2, 1)
    book.hold(1, 2)
    book.grow(3)
    assert book.hold(2, 3) == (2, 3, 4)
    assert book.block_count == 5
    book.check()


@pytest.mark.parametrize(
    ("free", "tables", "why"),
    [
        ([0, 1, 2, 3], {1: (0,)}, "block 0 belongs to both the free list and sequence 1"),
        ([1, 2], {1: (0,)}, "1 of 4 blocks are lost"),
        ([2, 3], {1: (0, 1), 2: (0,)}, "block 0 belongs to both sequence 1 and sequence 2"),
        ([1, 2, 3, 4], {1: (0,)}, "the free list holds block 4, outside of 0 to 3"),
    ],
)
def test_check_detects_damage(free: list[int], tables: dict[int, tuple[int, ...]], why: str) -> None:
    book = BlockBook(4, 1)
    book._fresh, book._returned, book._tables = 4, free, tables
    with pytest.raises(InvariantViolation, match=why):
        book.check()


@pytest.mark.parametrize(
    ("table", "why"),
    [((0, 1), "block 0 belongs to"), ((3, 9), "holds block 9, outside of 0 to 7"), ((3,), "1 of 8 blocks are lost")],
)
def test_a_second_check_finds_damage_to_changed_tables(table: tuple[int, ...], why: str) -> None:
    book = BlockBook(8, 1)
    book.hold(1, 3)
    book.check()
    book.hold(2, 2)
    book._tables[2] = table
    with pytest.raises(InvariantViolation, match=why):
        book.check()


def test_an_unchecked_book_forgets_removed_sequences() -> None:
    book = BlockBook(8, 1)
    for sequence_id in range(100):
        book.hold(sequence_id, 3)
        book.release(sequence_id)
    assert not book._changed


@given(st.lists(st.tuples(st.sampled_from(["cover", "free", "grow"]), st.integers(1, 4), st.integers(1, 12))))
def test_books_balance_after_any_history(history: list[tuple[str, int, int]]) -> None:
    book = BlockBook(6, 3)
    for action, sequence_id, amount in history:
        if action == "free":
            held = len(book.table(sequence_id))
            assert book.release(sequence_id) == held
        elif action == "grow":
            book.grow(amount)
        elif blocks_for(amount, 3) - len(book.table(sequence_id)) <= book.free_count:
            before = book.table(sequence_id)
            assert book.hold(sequence_id, amount)[: len(before)] == before
            assert len(book.table(sequence_id)) == max(len(before), blocks_for(amount, 3))
        book.check()


actions = st.sampled_from(["cover", "cover", "free", "trim", "grow", "shrink"])


@given(st.lists(st.tuples(actions, st.integers(1, 4), st.integers(0, 30)), max_size=40))
def test_the_lowest_free_ids_are_allocated_in_any_history(history: list[tuple[str, int, int]]) -> None:
    """Compares the book with a plain set of free ids."""
    book, free, tables = BlockBook(12, 3), set(range(12)), dict[int, tuple[int, ...]]()
    for action, sequence_id, amount in history:
        table = tables.get(sequence_id, ())
        if action == "cover" and (missing := max(0, blocks_for(amount, 3) - len(table))) <= len(free):
            taken = sorted(free)[:missing]
            free.difference_update(taken)
            tables[sequence_id] = (*table, *taken)
            assert book.hold(sequence_id, amount) == tables[sequence_id]
        elif action in ("free", "trim"):
            kept = min(len(table), blocks_for(amount, 3)) if action == "trim" else 0
            free.update(table[kept:])
            tables[sequence_id] = table[:kept]
            if action == "trim":
                book.trim(sequence_id, amount)
            else:
                book.release(sequence_id)
        elif action == "grow":
            free.update(range(book.block_count, book.block_count + amount))
            book.grow(amount)
        elif action == "shrink" and book.used_count <= (end := min(amount, book.block_count)):
            held = sorted(b for each in tables.values() for b in each if b >= end)
            moved = dict(zip(held, sorted(free), strict=False))
            assert book.compaction_plan(end) == tuple(moved.items())
            free = {*free, *held}.difference(moved.values(), range(end, book.block_count))
            book.compacted(book.compaction_plan(end))
            book.shrink(end)
            tables = {i: tuple(moved.get(b, b) for b in each) for i, each in tables.items()}
        book.check()
        assert book.free_count == len(free)
        assert all(book.table(i) == each for i, each in tables.items())


def test_a_large_book_with_few_used_blocks_is_small() -> None:
    book = BlockBook(10**9, 16)
    book.hold(1, 1000)
    book.release(1)
    assert book.hold(2, 16) == (0,)
    assert book.free_count == 10**9 - 1


def test_trim_releases_blocks_beyond_the_length() -> None:
    book = BlockBook(10, 4)
    book.hold(1, 20)
    book.check()
    book.trim(1, 9)
    book.check()
    assert book.table(1) == (0, 1, 2)
    assert book.hold(2, 12) == (3, 4, 5)
    book.trim(2, 12)
    book.trim(1, 0)
    book.check()
    assert book.sequence_ids == (2,)
    assert book.free_count == 7


@given(st.data())
def test_no_block_is_lost_in_any_history(data: st.DataObject) -> None:
    block_count, first, next_id = data.draw(st.integers(1, 24)), data.draw(st.sampled_from([0, 1000])), 0
    book, held = BlockBook(block_count, 1, first), dict[int, int]()
    for _ in range(data.draw(st.integers(0, 30))):
        match data.draw(st.sampled_from(["new", "grow", "free", "less", "more"])):
            case "new" if book.free_count:
                next_id += 1
                held[next_id] = data.draw(st.integers(1, book.free_count))
                book.hold(next_id, held[next_id])
            case "grow" if held and book.free_count:
                one = data.draw(st.sampled_from(sorted(held)))
                held[one] += data.draw(st.integers(1, book.free_count))
                book.hold(one, held[one])
            case "free" if held:
                one = data.draw(st.sampled_from(sorted(held)))
                assert book.release(one) == held.pop(one)
            case "less":
                block_count = data.draw(st.integers(book.used_count, block_count))
                book.compacted(book.compaction_plan(block_count))
                book.shrink(block_count)
                assert book.used_end <= block_count == book.block_count
            case "more":
                book.grow(1)
                block_count += 1
            case _:
                pass
        book.check()
        assert {i: len(book.table(i)) for i in held} == held
        assert all(first <= block < first + block_count for i in held for block in book.table(i))
        assert book.free_count == block_count - sum(held.values())
