import pytest

from ballast.common.errors import InvariantViolation
from ballast.common.ids import GroupId
from services.planner.policy.snapshot import GroupState, InstanceState, Snapshot
from tests.support.drop_plans import group, model, singles, stage

SHAPE = model(4)
WHOLE = stage("a", 0, 4, SHAPE)
TWIN = group(SHAPE, stage("b", 0, 4, SHAPE))._replace(group_id=GroupId("a"))


def snapshot(*members: InstanceState, blocks: int = 5) -> Snapshot:
    return Snapshot(SHAPE, (GroupState(GroupId("g"), members, blocks, 0, 0),))


def test_a_valid_snapshot_passes() -> None:
    singles(3, SHAPE).check()
    Snapshot(SHAPE, (group(SHAPE, stage("a", 0, 2, SHAPE), stage("b", 2, 4, SHAPE)),)).check()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (snapshot(), "no members"),
        (snapshot(WHOLE._replace(last_layer=3)), "ends at layer 3 of 4"),
        (snapshot(stage("a", 0, 2, SHAPE), stage("b", 3, 4, SHAPE)), "expected to begin at layer 2"),
        (snapshot(WHOLE._replace(held_layers=(0, 1, 2))), "does not hold what it executes"),
        (snapshot(WHOLE._replace(held_layers=(0, 1, 2, 3, 4))), "layers that the model lacks"),
        (snapshot(WHOLE._replace(held_layers=(1, 0, 2, 3))), "does not hold what it executes"),
        (snapshot(WHOLE._replace(budget_bytes=4499)), "exceed its budget"),
        (snapshot(WHOLE, blocks=-1), "below zero"),
        (Snapshot(SHAPE, (group(SHAPE, WHOLE), group(SHAPE, WHOLE)._replace(group_id=GroupId("b")))), "two places"),
        (
            Snapshot(
                SHAPE, (group(SHAPE, WHOLE), group(SHAPE, stage("b", 0, 4, SHAPE))._replace(group_id=GroupId("a")))
            ),
            "same id",
        ),
        (Snapshot(model(4, block_bytes=0), ()), "sizes are positive"),
    ],
)
def test_errors_of_a_snapshot_are_named(wrong: Snapshot, why: str) -> None:
    with pytest.raises(InvariantViolation, match=why):
        wrong.check()


def test_extents_are_those_of_the_members_own_memory() -> None:
    """Computed by hand: four layers of 1,000 bytes take 16 extents of 64 bytes each, the 500 other bytes take 8."""
    shape = SHAPE.at(64)
    assert shape.at(0) is shape
    assert shape.occupied_bytes((0, 1)) == 2 * 16 * 64
    free = 10_000 // 64 - 8 - 4 * 16
    assert shape.block_count(10_000, 0, 4) == free // 4 * 64 // SHAPE.block_bytes == 134
    assert SHAPE.block_count(10_000, 0, 4) == (10_000 - 4500) // 4 // SHAPE.block_bytes == 137
