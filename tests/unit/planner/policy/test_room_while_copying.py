"""What a group has room for while KV is copied."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast.common.restoring import divided_extents, room_while_copying


@pytest.mark.parametrize(
    ("members", "room", "of_all"), [(1, 1.0, 1.0), (2, 1.25, 0.62), (3, 1.67, 0.56), (8, 3.90, 0.49)]
)
def test_a_group_has_room_for_about_half_of_what_its_members_have(members: int, room: float, of_all: float) -> None:
    assert room_while_copying(members) == pytest.approx(room, abs=0.01)
    assert room_while_copying(members) / members == pytest.approx(of_all, abs=0.01)


@given(home=st.integers(1, 500), layers=st.integers(1, 60), members=st.integers(1, 16), part=st.floats(0.0, 1.0))
def test_what_is_divided_is_what_there_is(home: int, layers: int, members: int, part: float) -> None:
    own = max(1, round(part * layers))
    wide, narrow = divided_extents(home, layers, own, members)
    assert wide >= home, "nobody has to hold less than afterwards"
    assert wide * own + narrow * (layers - own) <= home * layers
    assert 0 < narrow <= home
    assert narrow * 5 * members >= min(wide * 6, wide * 5 * members), "a fifth more than an equal share"
    if members == 1:
        assert wide == home
