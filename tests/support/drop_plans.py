"""Snapshots for tests of drop and restore plans, a function that applies a plan to one, and slow but simple oracles."""

import hashlib
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ballast.common.ids import GroupId, WorkerId
from services.planner.policy.drop import DropPlan, by_need
from services.planner.policy.merged import GroupPlan
from services.planner.policy.restore import plan_restore
from services.planner.policy.snapshot import GroupState, InstanceState, ModelShape, Snapshot
from services.planner.policy.split import SplitMember, SplitStage, SplitTolerance


def model(layer_count: int = 8, **changes: object) -> ModelShape:
    shape = ModelShape(
        layer_parameter_bytes=(1000,) * layer_count,
        other_parameter_bytes=500,
        block_tokens=16,
        block_bytes=10,
    )
    return replace(shape, **changes)  # pyright: ignore[reportArgumentType]


def stage(name: str, first_layer: int, last_layer: int, shape: ModelShape, kv_bytes: int = 4000) -> InstanceState:
    """An instance with memory for a full copy of the model and `kv_bytes` of KV, which holds only the layers that it
    executes.
    """
    budget_bytes = shape.copy_bytes + shape.other_parameter_bytes + kv_bytes
    return InstanceState(WorkerId(name), budget_bytes, first_layer, last_layer, tuple(range(first_layer, last_layer)))


def group(shape: ModelShape, *members: InstanceState, used: int = 0, waiting: int = 0) -> GroupState:
    blocks = min(shape.at(m.extent_bytes).block_count(m.budget_bytes, m.first_layer, m.last_layer) for m in members)
    return GroupState(GroupId(members[0].worker_id), members, blocks, used, waiting)


def singles(count: int, shape: ModelShape, used: Sequence[int] = (), kv_bytes: int = 4000) -> Snapshot:
    loads = [*used, *[0] * (count - len(used))]
    names = [f"w{i:0{len(str(count - 1))}d}" for i in range(count)]
    return Snapshot(
        shape,
        tuple(
            group(shape, stage(name, 0, shape.layer_count, shape, kv_bytes), used=load)
            for name, load in zip(names, loads, strict=True)
        ),
    )


def after(snapshot: Snapshot, done: DropPlan) -> Snapshot:
    """The cluster after the plan has been executed."""
    return Snapshot(snapshot.model, (*done.unchanged, *(_as_state(planned) for planned in done.groups)))


def _as_state(planned: GroupPlan) -> GroupState:
    before = {m.worker_id: m for merged in planned.merged for m in merged.members}
    members = tuple(
        before[m.worker_id]._replace(
            first_layer=m.first_layer,
            last_layer=m.last_layer,
            held_layers=tuple(layer for layer in before[m.worker_id].held_layers if layer not in m.dropped_layers),
        )
        for m in planned.members
    )
    used = sum(merged.used_block_count for merged in planned.merged)
    waiting = sum(merged.waiting_block_count for merged in planned.merged)
    return GroupState(planned.group_id, members, planned.block_count, used, waiting)


def parameter_bytes(snapshot: Snapshot) -> int:
    return sum(snapshot.model.occupied_bytes(m.held_layers) for g in snapshot.groups for m in g.members)


def all_splits(candidates: Sequence[SplitMember], shape: ModelShape) -> Iterator[list[SplitStage]]:
    """Every order and every split in which each member executes at least one layer, and only layers that it holds."""
    for order in itertools.permutations(candidates):
        for inner in itertools.combinations(range(1, shape.layer_count), len(candidates) - 1):
            cuts = (0, *inner, shape.layer_count)
            stages = [
                SplitStage(c, first, last) for c, (first, last) in zip(order, itertools.pairwise(cuts), strict=True)
            ]
            if all(set(range(s.first_layer, s.last_layer)) <= set(s.candidate.instance.held_layers) for s in stages):
                yield stages


def longest(stages: Sequence[SplitStage]) -> int:
    return max(s.last_layer - s.first_layer for s in stages)


def blocks_of(stages: Sequence[SplitStage], shape: ModelShape) -> int:
    """KV blocks of the stage with the fewest."""
    members = [(stage.candidate.instance, stage.first_layer, stage.last_layer) for stage in stages]
    return min(shape.at(m.extent_bytes).block_count(m.budget_bytes, first, last) for m, first, last in members)


def kept_bytes(stages: Sequence[SplitStage]) -> int:
    return sum(
        s.candidate.kv_bytes_per_layer
        * len(
            set(range(s.first_layer, s.last_layer))
            & set(range(s.candidate.instance.first_layer, s.candidate.instance.last_layer))
        )
        for s in stages
    )


def acceptable_splits(
    candidates: Sequence[SplitMember], shape: ModelShape, tolerance: SplitTolerance
) -> list[list[SplitStage]]:
    """The splits that satisfy conditions 1 to 3 of `services.planner.policy.split`."""
    feasible = [s for s in all_splits(candidates, shape) if blocks_of(s, shape) >= 1]
    if not feasible:
        return []
    limit = min(longest(s) for s in feasible) * (1.0 + tolerance.balance) * (1.0 + 1e-9)
    quick = [s for s in feasible if longest(s) <= limit]
    best = max(blocks_of(s, shape) for s in quick)
    enough = max(1, int(best * (1.0 - tolerance.capacity)))
    return [s for s in quick if blocks_of(s, shape) >= enough]


def history(seed: int) -> str:
    """A hash of drop and restore plans on many random clusters."""
    rng = random.Random(seed)
    digest = hashlib.sha256()
    for _ in range(30):
        shape = model(rng.randint(3, 12))
        snapshot = singles(rng.randint(2, 20), shape, [rng.randint(0, 40) for _ in range(2)])
        for _ in range(3):
            done = by_need(snapshot, rng.randint(0, 6) * shape.copy_bytes)
            digest.update(repr(done).encode())
            snapshot = after(snapshot, done)
            digest.update(repr(plan_restore(snapshot)).encode())
    return digest.hexdigest()


if __name__ == "__main__":
    print(history(11))
