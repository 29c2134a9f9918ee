"""The longest context that instances can hold, and the group for a request that is too long for one instance."""

from ballast.common.ids import GroupId
from ballast.common.load import MemoryReport
from ballast.common.reach import Reach, read_reach, write_reach
from services.planner.policy.long_request import LongNeed, group_for, held_by
from services.planner.policy.reach import reach_of
from services.planner.policy.restore import plan_restore
from services.planner.policy.snapshot import Snapshot
from tests.support.drop_plans import group, model, singles, stage

# One of these instances holds 50 blocks of 16 tokens, a pair 200, three 300 (limited by the largest stage), four 500.
SHAPE = model(8)


def need(blocks: int, **changes: object) -> LongNeed:
    return LongNeed(blocks * 16, blocks * 16, **changes)  # pyright: ignore[reportArgumentType]


def reach(count: int, max_model_len: int) -> Reach:
    memory = MemoryReport(budget_bytes=12_500, parameter_bytes=8_500, kv_bytes=4_000, free_bytes=0)
    return reach_of(SHAPE, [memory] * count, max_model_len)


def test_the_reach_is_that_of_the_smallest_group_with_the_largest_capacity() -> None:
    assert reach(4, 1 << 20) == Reach(800, 8000, 4, 4)
    assert reach(4, 2000) == Reach(800, 2000, 2, 4)
    assert reach(1, 1 << 20) == Reach(800, 800, 1, 1)


def test_a_reach_survives_a_round_trip() -> None:
    reach = Reach(800, 5600, 4, 4)
    assert read_reach(write_reach(reach)) == reach
    assert reach.told() == "up to 800 tokens here alone, 5,600 with 4 of 4 members"


def test_the_least_loaded_instances_form_the_smallest_group_that_holds_it() -> None:
    snapshot = singles(5, SHAPE, [40, 2, 30, 1, 20])
    made = group_for(snapshot, need(60))
    assert made is not None
    assert made.ids == ("w3", "w1")
    larger = group_for(snapshot, need(190))
    assert larger is not None
    assert larger.stages == 3
    assert group_for(snapshot, need(1000)) is None


def test_a_pipeline_that_is_too_small_gets_another_member() -> None:
    pair = group(SHAPE, stage("a", 0, 4, SHAPE), stage("b", 4, 8, SHAPE))
    lone = group(SHAPE, stage("c", 0, 8, SHAPE))
    snapshot = Snapshot(SHAPE, (pair, lone))
    assert held_by(snapshot, need(100)) == "a"
    made = group_for(snapshot, need(220))
    assert made is not None
    assert set(made.ids) == {"a", "c"}


def test_the_group_for_an_outgrown_request_includes_its_instance() -> None:
    snapshot = singles(4, SHAPE, [0, 0, 48, 0])
    grown = need(75, group_id=GroupId("w2"), held_tokens=47 * 16)
    assert held_by(snapshot, grown) is None
    made = group_for(snapshot, grown)
    assert made is not None
    assert "w2" in made.ids
    assert made.stages == 2


def test_a_restore_leaves_a_group_whose_request_no_member_holds() -> None:
    pair = group(SHAPE, stage("a", 0, 4, SHAPE), stage("b", 4, 8, SHAPE), used=52)
    snapshot = Snapshot(SHAPE, (pair,))
    assert plan_restore(snapshot, longest_tokens={GroupId("a"): 50 * 16 - 2}).dissolutions
    ((_, why),) = plan_restore(snapshot, longest_tokens={GroupId("a"): 50 * 16 - 1}).kept
    assert "a member alone holds 800" in why
