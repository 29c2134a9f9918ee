"""Which room a restore seeks when: for parameters at once, for copies of the KV when what the group wants fits."""

import pytest

from ballast.common.errors import InvariantViolation
from ballast.common.ids import WorkerId
from services.worker.core.blocks import BlockBook
from services.worker.core.room import GroupSizes, Room, RoomKeeper, RoomSizes, lent_count

W0, W1 = WorkerId("w0"), WorkerId("w1")
SIZES = {
    W0: RoomSizes(beside=200, wide=120, narrow=80, home=100),
    W1: RoomSizes(beside=180, wide=140, narrow=90, home=110),
}


def with_layers(*, patient: bool) -> RoomKeeper:
    keeper = RoomKeeper(SIZES, patient=patient)
    assert keeper.seek(150, 10) == 180
    assert keeper.grant() is Room.LAYERS
    keeper.layers_are_back([W0, W1])
    return keeper


def test_parameters_come_whatever_is_wanted_and_leave_what_the_smallest_has() -> None:
    keeper = RoomKeeper(SIZES, patient=True)
    assert keeper.seek(10_000, 10) == 180
    assert keeper.sought is Room.LAYERS
    assert keeper.seek(10_000, 10) is None, "once"
    assert keeper.grant() is Room.LAYERS
    assert keeper.sought is Room.NONE


def test_a_patient_one_makes_room_for_kv_when_what_is_wanted_fits() -> None:
    keeper = with_layers(patient=True)
    assert keeper.waits_for_demand
    assert keeper.seek(121, 10) is None, "the smallest stage counts"
    assert keeper.seek(120, 81) is None, "one alone would find no room where it goes"
    assert keeper.waits_for_demand
    assert keeper.seek(120, 80) == 120
    assert not keeper.waits_for_demand
    assert keeper.seek(0, 10) is None, "once"
    assert keeper.grant() is Room.KV
    assert keeper.seek(0, 10) is None, "there is no third"


def test_an_impatient_one_makes_it_at_once() -> None:
    assert with_layers(patient=False).seek(10_000, 10_000) == 120


def test_nobody_makes_room_for_kv_while_a_stage_lacks_parameters() -> None:
    keeper = RoomKeeper(SIZES, patient=False)
    keeper.seek(0, 10)
    keeper.layers_are_back([W0])  # before it was granted is too early, but it changes nothing
    assert keeper.seek(0, 10) is None
    keeper.grant()
    assert keeper.seek(0, 10) is None
    keeper.layers_are_back([W1])
    assert keeper.seek(0, 10) == 120


def test_nothing_is_granted_that_nobody_seeks() -> None:
    with pytest.raises(InvariantViolation):
        RoomKeeper(SIZES, patient=True).grant()


class Numbers:
    """A memory: two extents of ten blocks for each of four layers at home, two of which are executed here."""

    beside_block_count = 40
    home_block_count = 20

    def divided_extents(self, member_count: int) -> tuple[int, int]:
        return (3, 1) if member_count > 1 else (2, 2)

    def blocks_in(self, extents: int) -> int:
        return 10 * extents


def test_a_leader_knows_the_sizes_of_a_group_when_all_have_told_them() -> None:
    group = GroupSizes(W0, Numbers())
    mine, theirs = RoomSizes(beside=40, wide=30, narrow=10, home=20), SIZES[W1]
    assert group.of([]) == {W0: RoomSizes(beside=40, wide=20, narrow=20, home=20)}
    assert group.of([W0, W1]) is None
    group.told(W1, theirs)
    assert group.of([W0, W1]) == {W0: mine, W1: theirs}
    group.clear()
    assert group.of([W0, W1]) is None


def test_what_others_hold_and_what_layers_still_lack_is_lent() -> None:
    book = BlockBook(30, 1)
    book.hold(1, 4)
    book.hold(2, 3)
    assert lent_count(book, 20, {1}) == 3
    book.divide(10)
    book.favour([1])
    assert lent_count(book, 20, {1}) == 10 + 3
    while moves := book.next_moves([1], evacuate=True):
        book.compacted(moves)
    assert lent_count(book, 20, {1}) == 10
    with pytest.raises(InvariantViolation, match="some layers end at 10"):
        book.rejoin()
    book.release(2)
    book.rejoin()
    assert lent_count(book, 20, {1}) == 0
