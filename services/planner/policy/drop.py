"""Drop plans: which groups are merged, and which layers each member drops."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from ballast.common.ids import GroupId
from services.planner.policy.candidates import Candidates, Running
from services.planner.policy.merged import GroupPlan, GroupPlanner, surplus_bytes
from services.planner.policy.snapshot import GroupState, Snapshot
from services.planner.policy.split import Splitter, SplitTolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class DropPlan:
    needed_bytes: int
    freed_bytes: int
    shortfall_bytes: int  # bytes that the plan fails to free; 0: the need is met
    usable_bytes: int  # additional KV that admission can use; less than the freed bytes if layers are split unevenly
    exchange_bytes: int
    groups: tuple[GroupPlan, ...]  # groups that change, by id
    unchanged: tuple[GroupState, ...]


def by_need(snapshot: Snapshot, needed_bytes: int, *, tolerable_shortfall: float = 0.0) -> DropPlan:
    """Return the smallest change that adds `needed_bytes` of usable KV, or the largest one if none does.

    Pipelines deeper than pairs and than existing ones are skipped if less than `tolerable_shortfall` of all KV is
    missing without them, because each stage costs every request of the pipeline time.
    """
    shallow = max([2, *(len(group.members) for group in snapshot.groups)])
    candidates = [
        (max((part.stages for part in one.parts), default=0) > shallow, one.change_count, one.merges, one.toward_memory)
        for one in Candidates(snapshot, Running(max_running_count=1, waiting_count=0)).all()
    ]
    model, best = snapshot.model, plan_of(snapshot, (), needed_bytes)
    kv_bytes = sum(group.block_count for group in snapshot.groups) * model.block_bytes * model.layer_count
    for is_deep, _, merges, toward_memory in sorted(candidates):
        if best.shortfall_bytes <= (tolerable_shortfall * (kv_bytes + best.usable_bytes) if is_deep else 0):
            break
        found = _fewest(snapshot, merges, needed_bytes, toward_memory)
        best = min(best, found, key=lambda plan: plan.shortfall_bytes)
    return best


def _fewest(
    snapshot: Snapshot, merges: Sequence[Sequence[GroupId]], needed_bytes: int, toward_memory: float
) -> DropPlan:
    """Return the plan with the fewest merges that suffice, or with all of them if they do not."""

    def plan_first(count: int) -> DropPlan:
        return plan_of(snapshot, merges[:count], needed_bytes, toward_memory)

    return plan_first(bisect_left(range(len(merges)), True, key=lambda count: plan_first(count).shortfall_bytes == 0))


def plan_of(
    snapshot: Snapshot,
    merges: Sequence[Sequence[GroupId]],
    needed_bytes: int,
    toward_memory: float | None = None,
    *,
    insists: bool = False,
) -> DropPlan:
    """Return the plan of these merges, with all other groups unchanged. Pipelines that hold layers which they do not
    execute also drop these, as far as needed.

    `toward_memory`: see `Splitter.split`. `insists`: include merges that reduce the capacity.
    """
    model, groups = snapshot.model, sorted(snapshot.groups, key=lambda group: group.group_id)
    planner = GroupPlanner(
        Splitter(model, SplitTolerance(capacity=0.0)),
        equal_singles=_are_equal_singles(groups) and model.is_uniform,
        toward_memory=toward_memory,
    )
    of, needed_bytes = {group.group_id: group for group in groups}, max(0, needed_bytes)
    made = [planner.plan(sorted(map(of.__getitem__, merge), key=lambda group: group.group_id)) for merge in merges]
    made = [group for group in made if insists or group.block_count >= group.block_count_before]
    merged = {group.group_id for plan in made for group in plan.merged}
    trimmed_bytes = 0
    for surplus, group_id in sorted((-surplus_bytes(group, model), group.group_id) for group in groups):
        if trimmed_bytes >= needed_bytes or surplus == 0:
            break
        trimmed_bytes -= surplus
        if group_id not in merged:
            made.append(planner.plan([of[group_id]]))
            merged.add(group_id)
    added_blocks = sum(group.block_count - group.block_count_before for group in made)
    usable_bytes = added_blocks * model.block_bytes * model.layer_count
    return DropPlan(
        needed_bytes=needed_bytes,
        freed_bytes=sum(group.freed_bytes for group in made),
        shortfall_bytes=max(0, needed_bytes - usable_bytes),
        usable_bytes=usable_bytes,
        exchange_bytes=sum(group.exchange_bytes for group in made),
        groups=tuple(sorted(made, key=lambda group: group.group_id)),
        unchanged=tuple(group for group in groups if group.group_id not in merged),
    )


def _are_equal_singles(groups: Sequence[GroupState]) -> bool:
    kinds = {(m.budget_bytes, m.extent_bytes, m.slowness) for group in groups for m in group.members}
    return len(kinds) == 1 and all(len(group.members) == 1 for group in groups)
