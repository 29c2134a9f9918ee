"""Clusters whose members have different memory sizes and speeds: no plan reduces KV capacity.

BALLAST_MEMBER_SEEDS sets the number of seeds, each with 20 clusters of seven members on average.
"""

import os
import random

import pytest

from ballast.common.ids import WorkerId
from ballast.common.traffic import Traffic
from services.planner.policy.candidates import Running
from services.planner.policy.compare import compare
from services.planner.policy.drop import DropPlan, by_need, plan_of
from services.planner.policy.snapshot import GroupState, InstanceState, ModelShape, Snapshot
from services.planner.policy.split import TOWARD_MEMORY
from tests.support.drop_plans import after, group, model
from tests.support.planner_core import PACE

_BUSY = Traffic(
    queued_count=90, queued_tokens=9000, recent_count=90, minute_count=200, minute_tokens=20_000, known_s=60.0
)


def random_cluster(rng: random.Random) -> Snapshot:
    """Lone instances with different memory, extent size, speed and load."""
    shape = model(rng.randint(2, 24), block_bytes=64)
    spread = rng.choice([1.01, 1.1, 2.0, 4.0])
    groups: list[GroupState] = []
    for i in range(rng.randint(2, 12)):
        extent_bytes = rng.choice([1, 64, 100])
        least = shape.at(extent_bytes).copy_bytes + shape.other_parameter_bytes + 100 * (shape.layer_count + 2)
        budget_bytes = int(least * rng.choice([1.05, 1.3, 2.5]) * rng.uniform(1.0, spread))
        held, slowness = tuple(range(shape.layer_count)), rng.choice([1.0, 1.0, 1.0, 2.14])
        name = WorkerId(f"w{i:02}")
        member = InstanceState(name, budget_bytes, 0, shape.layer_count, held, extent_bytes, slowness)
        groups.append(group(shape, member, used=rng.randint(0, 40), waiting=rng.randint(0, 40)))
    snapshot = Snapshot(shape, tuple(groups))
    snapshot.check()
    return snapshot


def check(snapshot: Snapshot, done: DropPlan) -> Snapshot:
    then = after(snapshot, done)
    then.check()  # groups are complete, and members are within their budgets
    for made in done.groups:
        assert made.block_count >= made.block_count_before
        stages = [(m.first_layer, m.last_layer) for m in made.members]
        assert stages[0][0] == 0
        assert stages[-1][1] == snapshot.model.layer_count
        assert [last for _, last in stages[:-1]] == [first for first, _ in stages[1:]]
    assert sum(g.block_count for g in then.groups) >= sum(g.block_count for g in snapshot.groups)
    return then


@pytest.mark.parametrize("seed", range(int(os.environ.get("BALLAST_MEMBER_SEEDS", "6"))))
def test_no_drop_leaves_less_kv_than_before(seed: int) -> None:
    rng = random.Random(seed)
    merged = 0
    for _ in range(20):
        snapshot = random_cluster(rng)
        for _ in range(2):  # the second time, pipelines are merged further
            needed = rng.randint(0, 4) * snapshot.model.copy_bytes
            check(snapshot, by_need(snapshot, needed))
            check(snapshot, by_need(snapshot, needed, tolerable_shortfall=0.65))
            compared = compare(snapshot, Running(64, 9), _BUSY, PACE)
            for one in compared.candidates:
                candidate = one.candidate
                assert candidate.toward_memory in TOWARD_MEMORY
                check(snapshot, plan_of(snapshot, candidate.merges, 0, candidate.toward_memory))
            chosen = rng.choice(compared.candidates).candidate
            done = plan_of(snapshot, chosen.merges, 0, chosen.toward_memory)
            merged += len(done.groups)
            snapshot = check(snapshot, done)
    assert merged > 3


def test_an_operator_may_insist_on_less() -> None:
    shape = ModelShape(layer_parameter_bytes=(1000,) * 8, other_parameter_bytes=0, block_tokens=16, block_bytes=10)
    budgets = {"a": 8100, "b": 100_000}
    members = [InstanceState(WorkerId(n), b, 0, 8, tuple(range(8))) for n, b in budgets.items()]
    snapshot = Snapshot(shape, tuple(group(shape, member) for member in members))
    names = [g.group_id for g in snapshot.groups]
    for toward in TOWARD_MEMORY:
        assert plan_of(snapshot, [names], 0, toward).groups == ()
    [made] = plan_of(snapshot, [names], 0, insists=True).groups
    assert made.block_count < made.block_count_before
