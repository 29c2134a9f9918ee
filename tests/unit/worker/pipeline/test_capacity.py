"""What a leader counts on of its stages."""

from types import SimpleNamespace
from typing import Any, cast

from ballast.common.ids import Epoch, GroupId, Incarnation, WorkerId
from ballast.common.layout import Group, Member
from services.worker.core.events import CapacityChanged
from services.worker.core.room import RoomSizes
from services.worker.pipeline.capacity import Capacities
from services.worker.pipeline.context import MemberContext
from services.worker.pipeline.events import CapacityTold
from services.worker.pipeline.role import Role

ME, STAGE = WorkerId("w0"), WorkerId("w1")
SIZES = RoomSizes(leaving=8, home=12, host=5)


def leader(told: list[CapacityChanged]) -> Capacities:
    role = Role(ME, 4)
    members = [Member(worker, Incarnation(1), worker, 2 * i, 2 * i + 2) for i, worker in enumerate((ME, STAGE))]
    role.take_up(Epoch(2), Group(GroupId(ME), tuple(members)))
    context = SimpleNamespace(
        role=role,
        links=None,
        published=SimpleNamespace(stale_total=0),
        memory=SimpleNamespace(leaving_block_count=8, home_block_count=12),
        answers=SimpleNamespace(tell=told.append),
        now=lambda: 0.0,
        book=SimpleNamespace(block_count=20),
        core=SimpleNamespace(swap_block_count=7),
    )
    return Capacities(cast(MemberContext, cast(Any, context)))


def has(stage: WorkerId, block_count: int, withdrawn: int) -> CapacityTold:
    return CapacityTold(Epoch(2), stage, block_count, SIZES, Epoch(withdrawn))


def test_what_a_stage_has_said_before_it_heard_of_a_restores_end_does_not_count() -> None:
    told: list[CapacityChanged] = []
    capacities = leader(told)
    capacities.begin()
    capacities.told(has(STAGE, 18, 0))
    capacities.limit(Epoch(3), 8)
    capacities.tell_leader(Epoch(3))  # the leader has given it up, and has all its blocks again
    capacities.told(has(STAGE, 18, 0))  # was on its way; the stage has made room since
    assert told[-1].block_count == 8
    capacities.told(has(STAGE, 18, 3))
    assert told[-1].block_count == 18


def test_a_group_swaps_as_much_as_the_stage_with_the_least_host_memory_until_it_makes_room() -> None:
    told: list[CapacityChanged] = []
    capacities = leader(told)
    capacities.begin()
    capacities.tell_leader(Epoch(0))
    assert told[-1].swap_block_count == 0, "the other stage has said nothing yet"
    capacities.told(has(STAGE, 18, 0))
    assert told[-1].swap_block_count == 5
    capacities.limit(Epoch(3), 8)
    assert told[-1].swap_block_count == 0
    capacities.tell_leader(Epoch(3))
    capacities.told(has(STAGE, 18, 3))
    assert told[-1].swap_block_count == 5
    capacities.tell_core(ends=True)
    assert told[-1].swap_block_count == 0


def test_each_member_goes_home_to_as_many_blocks_as_it_has_itself() -> None:
    capacities = leader([])
    capacities.begin()
    larger = RoomSizes(leaving=8, home=30, host=5)
    capacities.told(CapacityTold(Epoch(2), STAGE, 18, larger, Epoch(0)))
    assert capacities.homes == {ME: 12, STAGE: 30}
