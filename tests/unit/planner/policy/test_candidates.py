"""The candidate merges, and their inputs to the fluid model."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ballast.common.ids import GroupId, WorkerId
from services.planner.policy.candidates import MOST_STAGES, Candidate, Candidates, Running
from services.planner.policy.merged import group_plan
from services.planner.policy.snapshot import GroupState, InstanceState, ModelShape, Snapshot
from services.planner.policy.split import Splitter, SplitTolerance

LAYERS = 24
SHAPE = ModelShape(
    layer_parameter_bytes=(560 << 20,) * LAYERS,
    other_parameter_bytes=3 << 30,
    block_tokens=64,
    block_bytes=256 << 10,
    extent_bytes=16 << 20,
)
BUDGET_BYTES = 19 << 30


def pipeline(name: str, stages: int, used: int = 10, budget_bytes: int = BUDGET_BYTES) -> GroupState:
    bounds = [i * LAYERS // stages for i in range(stages + 1)]
    members = tuple(
        InstanceState(WorkerId(f"{name}{i}"), budget_bytes, bounds[i], bounds[i + 1], tuple(range(*bounds[i : i + 2])))
        for i in range(stages)
    )
    blocks = min(SHAPE.block_count(budget_bytes, m.first_layer, m.last_layer) for m in members)
    return GroupState(GroupId(f"{name}0"), members, blocks, used, 3, running_count=used + 1, uncomputed_tokens=used * 2)


def groups(*stages: int) -> Snapshot:
    return Snapshot(SHAPE, tuple(pipeline(f"g{i:02}m", count, used=20 + i) for i, count in enumerate(stages)))


def candidates(snapshot: Snapshot) -> dict[str, Candidate]:
    return {one.name: one for one in Candidates(snapshot, Running(256, 0)).all()}


@pytest.mark.parametrize(
    ("stages", "wanted"),
    [
        ((1, 1), {"1 pair"}),
        ((1,) * 3, {"1 pair", "1 of 3"}),
        ((1,) * 4, {"1 pair", "2 pairs", "1 of 4"}),
        ((1,) * 5, {"1 pair", "2 pairs", "1 of 3 + 1 pair", "1 of 5", "1 of 4"}),
        ((1,) * 7, {"3 pairs", "1 of 3 + 2 pairs", "1 of 4 + 1 of 3", "1 of 4", "1 of 7"}),
        ((1,) * 8, {"4 pairs", "2 of 4", "1 of 8"}),
        ((1,) * 12, {"6 pairs", "3 of 4", "4 of 3"}),
        ((2, 1), {"1 of 2 + 1"}),
        ((2, 3), {"1 of 3 + 2"}),
        ((2, 2, 2), {"1 of 2 + 2"}),
        ((3, 3), {"1 of 3 + 3"}),
        ((4, 4), {"1 of 4 + 4"}),
        ((2, 2, 1, 1, 1), {"1 of 2 + 2", "1 of 2 + 1", "2 of 2 + 1", "1 pair", "1 of 3"}),
    ],
)
def test_groups_of_any_sizes_may_be_merged(stages: Sequence[int], wanted: set[str]) -> None:
    assert wanted | {"nothing"} <= candidates(groups(*stages)).keys()


def test_no_group_has_more_stages_than_eight_or_than_layers() -> None:
    assert candidates(groups(5, 4)).keys() == {"nothing"}
    assert not any("of 9" in name for name in candidates(groups(*(1,) * 9)))


def test_the_most_loaded_group_is_merged_with_the_least_loaded_one() -> None:
    found = candidates(groups(1, 1, 1, 1, 1))  # later groups have more load
    assert found["2 pairs"].merges == (("g04m0", "g00m0"), ("g03m0", "g01m0"))
    assert found["1 of 3 + 1 pair"].merges == (("g04m0", "g00m0", "g01m0"), ("g03m0", "g02m0"))
    assert candidates(groups(2, 2, 1, 1))["1 of 2 + 1"].merges == (("g01m0", "g02m0"),)


def test_groups_with_little_memory_may_merge_with_each_other_only() -> None:
    large = [pipeline(f"l{i}", 1, budget_bytes=2 * BUDGET_BYTES) for i in range(2)]
    small = [pipeline(f"s{i}", 1) for i in range(3)]
    board = Candidates(Snapshot(SHAPE, (*large, *small)), Running(256, 0))
    three = next(one for one in board.all() if one.name == "1 of 3 of little memory")
    assert sorted(three.merges[0]) == ["s00", "s10", "s20"]
    left, merged = board.kinds(three)
    assert left.capacity_tokens == 64 * sum(group.block_count for group in large)
    assert (left.group_count, merged.group_count, merged.stages, merged.slowness) == (2, 1, 3, 1.0)


def test_a_stage_longer_than_the_others_makes_a_pipeline_slower() -> None:
    """With 24 layers, one stage of five executes five layers: 25/24 of an equal share."""
    board = Candidates(groups(1, 1, 1, 1, 1), Running(256, 0))
    five = next(one for one in board.all() if one.name == "1 of 5")
    (kind,) = board.kinds(five)
    assert kind.slowness == pytest.approx(5 * 5 / LAYERS)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=9),
    st.lists(st.integers(0, 40), min_size=9, max_size=9),
    st.lists(st.sampled_from([0, 0, 0, 64 << 20]), min_size=9, max_size=9),
)
def test_every_candidate_has_all_groups_once_and_all_that_runs(
    stages: list[int], used: list[int], more: list[int]
) -> None:
    """A candidate's totals equal the sums over its groups, and its capacity is that of the resulting plan."""
    snapshot = Snapshot(
        SHAPE, tuple(pipeline(f"g{i}m", n, used[i], BUDGET_BYTES + more[i]) for i, n in enumerate(stages))
    )
    board = Candidates(snapshot, Running(256, 0))
    by_id = {group.group_id: group for group in snapshot.groups}
    for one in board.all():
        merged = [group_id for merge in one.merges for group_id in merge]
        assert len(set(merged)) == len(merged)
        assert all(len(merge) > 1 for merge in one.merges)
        assert one.change_count == len(merged) - len(one.merges)
        kinds = board.kinds(one)
        assert sum(kind.stages * kind.group_count for kind in kinds) == sum(stages)
        assert max(kind.stages for kind in kinds) <= MOST_STAGES
        assert math.fsum(kind.running_count for kind in kinds) == sum(g.running_count for g in snapshot.groups)
        assert math.fsum(kind.used_tokens for kind in kinds) == 64 * sum(used[: len(stages)])
        plans = [
            group_plan([by_id[i] for i in merge], Splitter(SHAPE, SplitTolerance(capacity=0.0))) for merge in one.merges
        ]
        left = sum(g.block_count for g in snapshot.groups if g.group_id not in set(merged))
        capacity = 64 * (left + sum(plan.block_count for plan in plans))
        assert math.fsum(kind.capacity_tokens for kind in kinds) == pytest.approx(capacity, rel=0.02)
