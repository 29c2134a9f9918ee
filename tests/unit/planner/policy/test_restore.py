from collections import Counter

from ballast.common.ids import GroupId
from services.planner.policy.drop import by_need
from services.planner.policy.restore import RestorePlan, plan_restore
from services.planner.policy.snapshot import Snapshot
from tests.support.drop_plans import after, group, model, singles, stage


def dropped(count: int, copies: int, used: list[int] | None = None) -> Snapshot:
    snapshot = singles(count, model(8), used or [])
    return after(snapshot, by_need(snapshot, copies * 8_000))


def test_an_idle_pipeline_dissolves_and_members_pull_their_missing_layers() -> None:
    restore = plan_restore(dropped(2, 1))
    (pair,) = restore.dissolutions
    assert pair.members == ("w0", "w1")
    assert pair.block_counts == (50, 50)
    assert [(p.worker_id, p.layer, p.source) for p in pair.pulls] == [
        *[("w1", layer, "w0") for layer in range(4)],
        *[("w0", layer, "w1") for layer in range(4, 8)],
    ]
    assert restore.pull_bytes == pair.pull_bytes == 8_000
    assert restore.kept == ()


def test_sources_share_the_work() -> None:
    shape = model(8)
    pair = group(shape, stage("a", 0, 4, shape), stage("b", 4, 8, shape))
    others = [group(shape, stage(f"c{i}", 0, 8, shape)) for i in range(6)]
    restore = plan_restore(Snapshot(shape, (pair, *others)))
    asked = Counter(p.source for d in restore.dissolutions for p in d.pulls)
    assert sum(asked.values()) == 8
    assert max(asked.values()) == 1


def test_without_a_source_layers_come_from_host_or_disk() -> None:
    shape = model(8)
    left = group(shape, stage("a", 0, 4, shape), stage("b", 4, 7, shape))  # the last layer was held by another member
    (restored,) = plan_restore(Snapshot(shape, (left,))).dissolutions
    assert {p.worker_id: p.source for p in restored.pulls if p.layer == 7} == {"a": None, "b": None}


def test_a_second_source_is_named_if_there_is_one() -> None:
    restore = plan_restore(dropped(3, 1))
    for pull in restore.dissolutions[0].pulls:
        assert pull.source is not None
        assert {pull.source, *pull.others} >= {"w1"}
        assert pull.worker_id not in (pull.source, *pull.others)


def test_a_busy_pipeline_stays_and_an_idle_one_dissolves() -> None:
    snapshot = dropped(4, 2, [60, 1, 20, 1])
    assert len(snapshot.groups) == 2
    restore = plan_restore(snapshot, usage_limit=0.5)
    used = {g.group_id: g.used_block_count for g in snapshot.groups}
    assert len(restore.dissolutions) == 1
    assert used[restore.dissolutions[0].group_id] == min(used.values())
    ((kept, why),) = restore.kept
    assert used[kept] == max(used.values())
    assert "exceed" in why


def test_all_demand_must_fit_including_waiting_requests() -> None:
    shape = model(8)
    pair = group(shape, stage("a", 0, 4, shape), stage("b", 4, 8, shape))

    def beside(waiting_blocks: int) -> RestorePlan:
        return plan_restore(Snapshot(shape, (pair, group(shape, stage("c", 0, 8, shape), waiting=waiting_blocks))))

    assert beside(127).dissolutions != ()  # of 150 blocks once restored
    restore = beside(128)
    assert restore.dissolutions == ()
    assert "all demand, 128 blocks" in restore.kept[0][1]


def test_an_operator_names_groups() -> None:
    snapshot = dropped(4, 2)
    _, second = (g.group_id for g in snapshot.groups)
    assert [d.group_id for d in plan_restore(snapshot, only={second}).dissolutions] == [second]
    assert plan_restore(snapshot, only={GroupId("nobody")}).dissolutions == ()


def test_a_pipeline_whose_members_lack_memory_for_full_copies_stays() -> None:
    shape = model(8)
    small = [stage("a", 0, 4, shape, kv_bytes=-3000), stage("b", 4, 8, shape, kv_bytes=-3000)]
    restore = plan_restore(Snapshot(shape, (group(shape, *small),)))
    assert restore.dissolutions == ()
    assert "full copy" in restore.kept[0][1]
