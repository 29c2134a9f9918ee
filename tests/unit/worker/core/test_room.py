"""The capacity that a leader assumes for its group, and its knowledge of its stages' room for a restore."""

from ballast.common.ids import Epoch, WorkerId
from services.worker.core.room import GroupRoom, RoomSizes

ME, STAGE = WorkerId("w0"), WorkerId("w1")
MINE, SIZES = RoomSizes(leaving=8, home=14, host=7), RoomSizes(leaving=9, home=12, host=5)


def leader() -> GroupRoom:
    room = GroupRoom(ME, lambda: MINE)
    room.begin((ME, STAGE), 20)
    return room


def test_a_leader_knows_the_sizes_of_a_group_once_all_have_reported_them() -> None:
    room = GroupRoom(ME, lambda: MINE)
    assert room.sizes == {ME: MINE}
    room.begin((ME, STAGE), 20)
    assert room.sizes is None
    assert room.homes == {ME: 14, STAGE: 14}
    assert room.told(STAGE, 18, SIZES, Epoch(0))
    assert room.sizes == {ME: MINE, STAGE: SIZES}
    assert room.homes == {ME: 14, STAGE: 12}
    assert room.limit(Epoch(3)) == 8
    room.begin((ME, STAGE), 20)
    assert room.sizes is None


def test_reports_of_a_stage_from_before_a_restores_end_do_not_count() -> None:
    room = leader()
    room.told(STAGE, 18, SIZES, Epoch(0))
    room.limit(Epoch(3))
    assert room.capacity(0.0).before_block_count == 18
    room.told(ME, 20, MINE, Epoch(3))  # the leader has abandoned the restore and has all of its blocks again
    assert not room.told(STAGE, 18, SIZES, Epoch(0))  # sent before the stage learnt of the abort
    assert room.capacity(0.0).block_count == 8
    assert room.told(STAGE, 18, SIZES, Epoch(3))
    assert (room.capacity(0.0).block_count, room.capacity(0.0).before_block_count) == (18, 0)
    assert not room.told(WorkerId("w2"), 18, SIZES, Epoch(3)), "it is not in this group"


def test_a_group_swaps_as_much_as_the_stage_with_the_least_host_memory_until_it_makes_room() -> None:
    room = leader()
    room.told(ME, 20, MINE, Epoch(0))
    assert room.capacity(0.0).swap_block_count == 0, "the other stage has not reported yet"
    room.told(STAGE, 18, SIZES, Epoch(0))
    assert room.capacity(0.0).swap_block_count == 5
    room.limit(Epoch(3))
    assert room.capacity(0.0).swap_block_count == 0
    room.told(ME, 20, MINE, Epoch(3))
    room.told(STAGE, 18, SIZES, Epoch(3))
    assert room.capacity(0.0).swap_block_count == 5
    assert room.capacity(0.0, ends=True).swap_block_count == 0


def test_a_group_stays_for_a_request_that_no_member_could_finish() -> None:
    room = leader()
    room.told(STAGE, 18, SIZES, Epoch(0))
    assert room.why_too_long(12 * 16 - 2, 16) == ""
    assert "a member has room for 192" in room.why_too_long(12 * 16 - 1, 16)


def test_only_a_grant_for_the_newest_restore_counts() -> None:
    room = GroupRoom(STAGE, lambda: SIZES)
    assert room.granted(Epoch(3)) is None
    room.grant(Epoch(3), 8)
    room.grant(Epoch(2), 9)  # of an earlier restore, so it is ignored
    assert (room.granted(Epoch(3)), room.granted(Epoch(2))) == (8, None)
    room.withdraw(Epoch(3))
    room.withdraw(Epoch(1))
    assert room.withdrawn == 3
