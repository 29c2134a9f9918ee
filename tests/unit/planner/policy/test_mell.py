"""MELL's packing: theorem 1 fails as printed and holds with our repair; no operation moves more than ten items."""

import random
from collections.abc import Iterator

import pytest

from ballast.common.errors import InvariantViolation
from services.planner.policy.mell import MOST_MOVES, Book, Exceptions, MellSize, sends_kv, size_of

CAPACITY = 1_000_000


def first_fit_decreasing(amounts: list[int]) -> int:
    rooms: list[int] = []
    for amount in sorted(amounts, reverse=True):
        place = next((i for i, room in enumerate(rooms) if room >= amount), None)
        if place is None:
            rooms.append(CAPACITY - amount)
        else:
            rooms[place] -= amount
    return len(rooms)


def large_after_tiny(count: int, *, repaired: bool) -> Book:
    """Twice as many tiny requests as large ones; two tiny ones nearly fill the space that a large one leaves."""
    book = Book(CAPACITY, repaired=repaired)
    for number in range(2 * count):
        book.allocate(("tiny", number), CAPACITY // 5)
    for number in range(count):
        book.allocate(("large", number), 51 * CAPACITY // 100)
    return book


@pytest.mark.parametrize("count", [5, 40])
def test_the_counterexample_to_property_5_as_printed(count: int) -> None:
    """As printed, tiny requests never move next to large ones: MELL uses over 4/3 of the bins needed, and every bin
    with a large request stays partly empty.
    """
    amounts = [CAPACITY // 5] * (2 * count) + [51 * CAPACITY // 100] * count
    assert first_fit_decreasing(amounts) == count
    printed, repaired = (large_after_tiny(count, repaired=repaired) for repaired in (False, True))
    assert len(printed.bins) > 4 / 3 * count
    assert printed.check().hollow == count
    assert len(repaired.bins) == count
    assert repaired.check() == Exceptions(medium=0, small=0, tiny=0, alone=0, hollow=0)


def operations(seed: int, count: int) -> Iterator[tuple[Book, dict[int, int]]]:
    """Yield a repaired book and its expected contents after each of `count` random operations."""
    rng = random.Random(seed)
    low, high = rng.choice(((0.02, 0.7), (0.2, 0.9), (0.002, 0.03), (0.1, 0.5)))
    book, amounts, number = Book(CAPACITY, repaired=True), dict[int, int](), 0
    for _ in range(count):
        act = rng.random()
        if act < 0.35 or len(amounts) < 5:
            amounts[number] = int(CAPACITY * rng.uniform(low, high))
            book.allocate(number, amounts[number])
            number += 1
        elif act < 0.5:
            gone = rng.choice(sorted(amounts))
            book.depart(gone)
            del amounts[gone]
        else:
            grown = rng.choice(sorted(amounts))
            amounts[grown] = min(CAPACITY, int(amounts[grown] * rng.uniform(1.01, 1.3)) + 1000)
            book.update(grown, amounts[grown])
        yield book, amounts


@pytest.mark.rotating
def test_repaired_all_properties_hold_through_a_thousand_random_sequences() -> None:
    """At most one bin of each kind is an exception, no request is lost, no bin overflows (`check`), and at most ten
    items move.
    """
    for seed in range(1000):
        where: dict[object, int] = {}
        for book, amounts in operations(seed, 40):
            found = book.check()
            assert max(found.medium, found.small, found.tiny) <= 1, (seed, found)
            assert (found.alone, found.hollow) == (0, 0), (seed, found)
            assert book.moved_count <= MOST_MOVES, seed
            for move in book.take_moves():
                assert where[move.request] == move.source, seed
                assert book.bin_number(move.request) == move.target, seed
            now = {request: book.bin_number(request) for request in amounts}
            assert sum(one.used for one in book.bins) == sum(amounts.values()), seed
            where = {**now}


def test_moves_of_an_epoch_are_merged() -> None:
    """Merging the moves of all operations needs fewer moves than making each operation's moves right after it."""
    single = together = 0
    for seed in range(20):
        rng = random.Random(seed)
        one, all_ = Book(CAPACITY, repaired=True), Book(CAPACITY, repaired=True)
        amounts = [int(CAPACITY * rng.uniform(0.05, 0.6)) for _ in range(30)]
        for number, amount in enumerate(amounts):
            for book in (one, all_):
                book.allocate(number, amount)
        one.take_moves()
        all_.take_moves()
        for number in range(0, 30, 3):
            for book in (one, all_):
                book.depart(number)
            single += len(one.take_moves())
        together += len(all_.take_moves())
    assert 0 < together < single


@pytest.mark.parametrize(
    ("amount", "size"),
    [
        (501, MellSize.LARGE),
        (500, MellSize.MEDIUM),
        (334, MellSize.MEDIUM),
        (333, MellSize.SMALL),
        (251, MellSize.SMALL),
        (250, MellSize.TINY),
    ],
)
def test_classes_are_those_of_the_paper(amount: int, size: MellSize) -> None:
    assert size_of(amount, 1000) is size


def test_small_requests_are_moved_in_bags() -> None:
    book = Book(CAPACITY, repaired=False)
    for number in range(40):
        book.allocate(number, CAPACITY // 20)
    assert len(book.bins) == 2
    assert all(len(one.items) <= 5 for one in book.bins)
    book.update(0, CAPACITY // 3)  # it has outgrown its bag
    assert book.check().medium == 0


def test_a_request_larger_than_an_instance_is_refused() -> None:
    book = Book(CAPACITY, repaired=True)
    book.allocate("a", CAPACITY)
    with pytest.raises(InvariantViolation, match="larger than an instance"):
        book.update("a", CAPACITY + 1)


def test_a_slow_link_moves_tokens_and_a_fast_one_kv() -> None:
    """With 512 KiB of KV per token and 0.1 ms to compute it, the break-even is at 5.2 GB/s."""
    assert sends_kv(1000, 524_288, 10e9, 1e-4)
    assert not sends_kv(1000, 524_288, 1.25e9, 1e-4)
