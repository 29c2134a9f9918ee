import pytest

from services.planner.policy import candidates
from services.worker.policy import leaving
from services.worker.policy.leaving import over_at_s, tightened


@pytest.mark.parametrize(
    ("limit", "reserved", "running", "kept"),
    [
        (80, 80, 4, 80),  # all blocks are held: none is released
        (80, 48, 4, 80),  # the held blocks and their growth need the eighth that would be next
        (80, 47, 4, 70),
        (80, 30, 25, 80),  # many short sequences grow, too
        (70, 47, 4, 70),  # no further step before a sequence ends
        (70, 1, 1, 10),
        (10, 0, 0, 0),
        (40, 60, 4, 40),  # never more than the limit
    ],
)
def test_a_group_retains_its_held_blocks_and_some_growth_in_eighths(
    limit: int, reserved: int, running: int, kept: int
) -> None:
    assert tightened(limit, 80, reserved, running, 128) == kept


def test_the_smallest_group_releases_memory_block_by_block() -> None:
    assert [tightened(5, 5, reserved, 1, 128) for reserved in (3, 2, 1)] == [5, 4, 3]


@pytest.mark.parametrize(
    ("reserved", "stages", "fits"),
    [
        (0, [(0.5, 1000)] * 2, True),
        # Each of two members holds 375 to send and 375 received; a quarter is for its own requests.
        (750, [(0.5, 1000)] * 2, True),
        (751, [(0.5, 1000)] * 2, False),
        (2000, [(0.5, 1000)] * 2, False),
        (1500, [(0.25, 1000)] * 4, True),
        (1200, [(0.25, 500), (0.75, 2500)], False),  # the smaller one would hold 300 to send and 200 received, of 375
        (840, [(0.25, 500), (0.75, 2500)], True),
        (1200, [(0.5, 1000), (0.5, 2000)], False),
        (900, [(0.5, 1000), (0.5, 2000)], True),
    ],
)
def test_sequences_without_room_on_the_members_leave_earlier_if_memory_is_short(
    reserved: int, stages: list[tuple[float, int]], fits: bool
) -> None:
    assert over_at_s(100.0, 140.0, reserved, stages, is_short=False) == (110.0 if fits else 740.0)
    assert over_at_s(100.0, 140.0, reserved, stages, is_short=True) == (100.0 if fits else 260.0)


def test_the_planner_knows_how_a_pipeline_dissolves() -> None:
    shared = (candidates.DISSOLVES_S, candidates.ROOM_SHARE, candidates.KEPT_SHARE, candidates.KEPT_STEPS)
    assert shared == (leaving.LEAVES_WITHIN_S, leaving.ROOM_SHARE, leaving.AHEAD_SHARE, leaving.STEPS)
