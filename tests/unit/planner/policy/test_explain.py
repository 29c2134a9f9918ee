from dataclasses import replace

from services.planner.policy.drop import by_need, plan_of
from services.planner.policy.explain import (
    MOST_GROUPS,
    explain,
    explain_restore,
    group_line,
)
from services.planner.policy.restore import plan_restore
from tests.support.drop_plans import after, model, singles

SHAPE = model(8, layer_parameter_bytes=(1_575_000,) * 8, block_bytes=1_250, other_parameter_bytes=0)
SNAPSHOT = singles(2, SHAPE, used=[10, 10], kv_bytes=970_000)


def test_one_line_per_group() -> None:
    (pair,) = by_need(SNAPSHOT, 1).groups
    assert (
        group_line(pair, SHAPE)
        == "group {w0,w1}: dropped layers 4-7 of w0, 0-3 of w1, +12.0 MiB KV (3.1k -> 23.3k tokens)"
    )


def test_need_moves_and_groups_are_stated() -> None:
    done = by_need(SNAPSHOT, 5_000_000)
    assert explain(done, SHAPE)[:2] == [
        "needed 4.8 MiB, the plan frees 12.0 MiB and meets it",
        "97.7 KiB of KV to move",
    ]
    assert explain(done, SHAPE)[2].startswith("group {w0,w1}")


def test_a_shortfall_is_stated() -> None:
    assert "falls short by 7.1 MiB" in explain(by_need(SNAPSHOT, 20_000_000), SHAPE)[0]


def test_memory_that_admission_cannot_use_is_stated() -> None:
    shape = model(4)
    snapshot = singles(3, shape, kv_bytes=1000)
    lines = explain(plan_of(snapshot, [[group.group_id for group in snapshot.groups]], 8_000), shape)
    assert "count for admission" in lines[2]


def test_nothing_to_do_is_stated() -> None:
    assert explain(by_need(SNAPSHOT, 0), SHAPE)[-1] == "nothing changes"


def test_unchanged_groups_are_counted() -> None:
    snapshot = singles(5, model(8))
    assert explain(by_need(snapshot, 8_000), model(8))[-1] == "unchanged: 3 of 5 groups"


def test_a_few_of_many_groups_are_named_and_the_others_counted() -> None:
    snapshot = singles(100, model(8))
    lines = explain(by_need(snapshot, 45 * 8_000), model(8))
    groups = len(by_need(snapshot, 45 * 8_000).groups)
    assert groups > MOST_GROUPS
    assert sum(line.startswith("group {") for line in lines) == MOST_GROUPS
    assert f"and {groups - MOST_GROUPS} groups more" in lines


def test_a_restore_is_described() -> None:
    dropped = after(SNAPSHOT, by_need(SNAPSHOT, 1))
    assert explain_restore(plan_restore(dropped)) == [
        "group {w0,w1}: dissolved, 12.0 MiB of parameters to pull from w0, w1"
    ]
    busy = replace(dropped, groups=tuple(g._replace(used_block_count=190) for g in dropped.groups))
    (line,) = explain_restore(plan_restore(busy))
    assert line.startswith("group w0 stays: its demand of 190 blocks exceeds 85% of")
    assert explain_restore(plan_restore(SNAPSHOT)) == ["no group is a pipeline: nothing to restore"]
