"""Which room a restore seeks when: for parameters at once, for copies of the KV when what the group wants fits."""

import pytest

from ballast.common.errors import InvariantViolation
from ballast.common.ids import WorkerId
from services.worker.core.room import Room, RoomKeeper, RoomSizes

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
