import random

import pytest

from services.worker.core.blocks import BlockBook
from services.worker.core.retired import RetiredTables


def filled(rng: random.Random, sequences: int) -> BlockBook:
    """Interleaved, with gaps."""
    book = BlockBook(200, 16)
    tokens = dict.fromkeys(range(sequences), 0)
    for _ in range(120):
        sequence_id = rng.randrange(sequences)
        tokens[sequence_id] += 16
        book.hold(sequence_id, tokens[sequence_id])
    for sequence_id in rng.sample(range(sequences), sequences // 4):
        book.release(sequence_id)
    return book


def test_the_tables_are_as_they_were_whatever_becomes_of_the_book() -> None:
    book = BlockBook(8, 16)
    before = book.hold(1, 40)
    retired = RetiredTables(book)
    book.release(1)
    book.hold(2, 60)
    assert retired.table(1) == before
    assert retired.table(2) == ()
    assert retired.used_end == 3


@pytest.mark.parametrize("seed", range(10))
def test_what_is_left_lies_side_by_side_and_is_what_it_was(seed: int) -> None:
    rng = random.Random(seed)
    book = filled(rng, 12)
    retired = RetiredTables(book)
    content = {block: block for block in range(200)}  # of the layer: each block knows where it was
    left = set(book.sequence_ids)
    while left:
        gone = rng.sample(sorted(left), min(len(left), 3))
        left -= set(gone)
        retired.forget(gone)
        moves = retired.compact()
        retired.check()
        assert not {source for source, _ in moves} & {to for _, to in moves}
        content.update({to: content[source] for source, to in moves})
        for sequence_id in left:
            assert tuple(content[block] for block in retired.table(sequence_id)) == book.table(sequence_id)
        assert retired.used_end == sum(len(book.table(sequence_id)) for sequence_id in left)
