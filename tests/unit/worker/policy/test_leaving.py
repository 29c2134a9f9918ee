import pytest

from services.worker.policy.leaving import over_at_s, tightened


@pytest.mark.parametrize(
    ("limit", "reserved", "running", "kept"),
    [
        (80, 80, 4, 80),  # all of it is held: nothing is given up
        (80, 64, 4, 80),  # what is held and what it grows into takes the eighth that was about to go
        (80, 62, 4, 70),
        (70, 62, 4, 70),  # no other step before something ends
        (70, 1, 1, 10),
        (10, 0, 0, 0),
        (40, 60, 4, 40),  # never more than it had
    ],
)
def test_a_group_keeps_what_it_holds_and_a_little_to_grow_in_eighths(
    limit: int, reserved: int, running: int, kept: int
) -> None:
    assert tightened(limit, 80, reserved, running, 128) == kept


def test_the_smallest_group_gives_up_block_by_block() -> None:
    assert [tightened(5, 5, reserved, 1, 128) for reserved in (3, 2, 1)] == [5, 4, 3]


@pytest.mark.parametrize(
    ("reserved", "stages", "at_s"),
    [
        (0, 2, 110.0),
        (750, 2, 110.0),  # 375 for each of two members, beside 375 that it gives; a fourth is for what it runs already
        (751, 2, 170.0),
        (2000, 2, 170.0),
        (1500, 4, 110.0),
    ],
)
def test_what_has_no_room_in_the_members_goes_on_while_requests_leave(reserved: int, stages: int, at_s: float) -> None:
    assert over_at_s(100.0, 140.0, reserved, home_blocks=1000, stage_count=stages) == at_s
