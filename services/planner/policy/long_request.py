"""Finds a group for one long request: which groups merge, and the resulting group (pure)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from ballast.common.ids import GroupId
from ballast.common.reach import MARGIN
from services.planner.policy.candidates import MOST_STAGES, Running, pools_of, stall_s
from services.planner.policy.fluid_model import GroupKind
from services.planner.policy.merged import GroupPlan, group_plan
from services.planner.policy.snapshot import GroupState, Snapshot
from services.planner.policy.split import TOWARD_MEMORY, Splitter, SplitTolerance, is_unlike, kinds_of


@dataclass(frozen=True, slots=True)
class LongNeed:
    """Needs of one long request."""

    need_tokens: int
    prompt_tokens: int  # part of `need_tokens` that is still to be computed
    group_id: GroupId | None = None  # the group in which it runs, with `held_tokens` of KV; None: it waits
    held_tokens: int = 0


@dataclass(frozen=True, slots=True)
class LongGroup:
    """Merged groups that hold the request in addition to their current requests."""

    merged: tuple[GroupState, ...]
    plan: GroupPlan
    toward_memory: float

    @property
    def ids(self) -> tuple[GroupId, ...]:
        return tuple(group.group_id for group in self.merged)

    @property
    def stages(self) -> int:
        return len(self.plan.members)

    @property
    def name(self) -> str:
        return f"a group of {self.stages} for this one"


def held_by(snapshot: Snapshot, need: LongNeed) -> GroupId | None:
    """Return an existing group that is large enough for a request that does not run yet; None: there is none, or the
    request runs.
    """
    wanted = -(-need.need_tokens // snapshot.model.block_tokens)
    found = [group.group_id for group in snapshot.groups if group.block_count >= wanted]
    return min(found) if found and need.group_id is None else None


def group_for(snapshot: Snapshot, need: LongNeed) -> LongGroup | None:
    """Return the merge with the fewest stages that holds the request, from the least loaded groups: extended existing
    pipelines, or lone instances. None: there is none.
    """
    model = snapshot.model
    extra_blocks = -(-(need.need_tokens - need.held_tokens) // model.block_tokens)
    splitter = Splitter(model, SplitTolerance(capacity=0.0))
    best: LongGroup | None = None
    for merge in _merges(snapshot.groups, need.group_id, min(MOST_STAGES, model.layer_count)):
        stages = sum(len(group.members) for group in merge)
        if best is not None and (stages, len(merge)) >= (best.stages, len(best.merged)):
            continue
        wanted = (extra_blocks + sum(group.used_block_count for group in merge)) * MARGIN
        found = _made(merge, splitter)
        if found is not None and found.plan.block_count >= wanted:
            best = found
    return best


def _merges(groups: Sequence[GroupState], first: GroupId | None, most: int) -> Iterator[list[GroupState]]:
    """Yield each initial group with a growing number of the least loaded others."""
    by_load = sorted(groups, key=lambda group: (len(group.members), group.load_blocks, group.group_id))
    begun: list[list[GroupState]] = [[]]
    if first is not None:
        begun = [[group for group in by_load if group.group_id == first]]
    else:
        begun += [[next(alike)] for stages, alike in groupby(by_load, key=lambda g: len(g.members)) if stages > 1]
    for beginning in begun:
        merge = list(beginning)
        for group in by_load:
            if group in beginning:
                continue
            if sum(len(g.members) for g in merge) + len(group.members) > most:
                break
            merge = [*merge, group]
            if len(merge) > 1:
                yield merge


def _made(merge: Sequence[GroupState], splitter: Splitter) -> LongGroup | None:
    members = [member for group in merge for member in group.members]
    if not splitter.is_feasible(members):
        return None
    towards = TOWARD_MEMORY if is_unlike(kinds_of(members)) else TOWARD_MEMORY[:1]
    made = [LongGroup(tuple(merge), group_plan(merge, splitter, toward), toward) for toward in towards]
    return max(made, key=lambda one: one.plan.block_count)


def kinds_with(snapshot: Snapshot, made: LongGroup, need: LongNeed, running: Running) -> list[GroupKind]:
    """Return the groups that serve the other requests: all except the group of the long request, which dispatchers
    avoid during its prefill, or that group if there is no other.
    """
    model, tokens = snapshot.model, snapshot.model.block_tokens
    rest = [group for group in snapshot.groups if group.group_id not in made.ids]
    if rest:
        return [pool.kind(pool.between(0, len(pool)), len(pool), tokens) for pool in pools_of(rest, running)]
    slowness = {member.worker_id: member.slowness for group in made.merged for member in group.members}
    longest = max((m.last_layer - m.first_layer) * slowness[m.worker_id] for m in made.plan.members)
    used_blocks = sum(group.used_block_count for group in made.merged)
    places = sum(g.max_running_count or running.max_running_count * len(g.members) for g in made.merged)
    new = need.group_id is None
    merged = GroupKind(
        stages=made.stages,
        group_count=1,
        capacity_tokens=float(made.plan.block_count * tokens),
        running_count=float(sum(group.running_count for group in made.merged) + new),
        used_tokens=float(used_blocks * tokens + need.need_tokens - need.held_tokens),
        uncomputed_tokens=float(sum(group.uncomputed_tokens for group in made.merged) + need.prompt_tokens),
        max_running_count=float(places),
        slowness=longest * made.stages / model.layer_count,
        stall_s=stall_s(model, used_blocks, len(made.merged), made.stages),
    )
    return [merged]
