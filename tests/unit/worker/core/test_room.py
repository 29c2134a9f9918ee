"""What a leader knows of the room in its group for a restore."""

from ballast.common.ids import WorkerId
from services.worker.core.room import GroupSizes, RoomSizes

W0, W1 = WorkerId("w0"), WorkerId("w1")


class Numbers:
    leaving_block_count = 35
    home_block_count = 20


def test_a_leader_knows_the_sizes_of_a_group_when_all_have_told_them() -> None:
    group = GroupSizes(W0, Numbers())
    mine, theirs = RoomSizes(leaving=35, home=20), RoomSizes(leaving=30, home=22)
    assert group.of([]) == {W0: mine}
    assert group.of([W0, W1]) is None
    group.told(W1, theirs)
    assert group.of([W0, W1]) == {W0: mine, W1: theirs}
    group.clear()
    assert group.of([W0, W1]) is None
