"""What a group has room for while KV is copied."""

from fractions import Fraction

import pytest

from ballast.common.restoring import narrow_part, room_while_copying


def test_a_share_has_more_room_than_an_equal_one_and_a_lone_instance_all() -> None:
    assert [narrow_part(count) for count in (1, 2, 4)] == [1, Fraction(3, 5), Fraction(3, 10)]


@pytest.mark.parametrize(
    ("members", "room", "of_all"), [(1, 1.0, 1.0), (2, 1.25, 0.62), (3, 1.67, 0.56), (8, 3.90, 0.49)]
)
def test_a_group_has_room_for_about_half_of_what_its_members_have(members: int, room: float, of_all: float) -> None:
    assert room_while_copying(members) == pytest.approx(room, abs=0.01)
    assert room_while_copying(members) / members == pytest.approx(of_all, abs=0.01)
