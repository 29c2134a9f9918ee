import pytest

from services.worker.policy.leaving import is_over, looks_again_s, tightened


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


def test_what_has_no_room_in_the_members_goes_on_for_longer() -> None:
    """Of a pair whose members have 1,000 blocks each; a fourth of that is for what they run already."""
    assert not is_over(9.9, reserved_blocks=0, home_blocks=1000, stage_count=2)
    assert is_over(10.0, reserved_blocks=750, home_blocks=1000, stage_count=2)
    assert not is_over(29.9, reserved_blocks=751, home_blocks=1000, stage_count=2)
    assert is_over(30.0, reserved_blocks=2000, home_blocks=1000, stage_count=2)
    assert is_over(10.0, reserved_blocks=1500, home_blocks=1000, stage_count=4)


def test_time_alone_ends_it_twice() -> None:
    assert [looks_again_s(at_s) for at_s in (0.0, 9.9, 10.0, 29.9, 30.0)] == [10.0, 10.0, 30.0, 30.0, None]
