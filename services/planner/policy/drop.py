"""Drop plans: which groups to merge and which layers each member gives up, so that so many bytes become free.

`Method.AUTO` is exact where that is affordable (see `services.planner.policy.exact`): always for units of equal size
and weight, up to `EXACT_LIMIT` groups otherwise. Beyond, the cheaper of figure 6 and of an even partition with the
heaviest groups in the shortest pipelines is taken. A plan that exact methods find but no split of the layers allows
(pipelines whose members hold too little in common) is replaced by figure 6, which passes such merges over.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf

from ballast.common.errors import InvariantViolation
from ballast.common.ids import GroupId, WorkerId
from services.planner.policy.cost import WEIGHT_UNIT, StageCost
from services.planner.policy.exact import cheapest, evened, is_exact, lower_bound
from services.planner.policy.greedy import figure6, memory_greedy
from services.planner.policy.snapshot import GroupState, ModelShape, Snapshot
from services.planner.policy.split import Candidate, Splitter, SplitTolerance, Stage
from services.planner.policy.units import Partition, Units
from services.planner.policy.usable import blocks_by_size, cheapest_by_count, useful_sizes

EXACT_LIMIT = 128  # groups of different load: 4 ms
_USABLE_ATTEMPTS = 8


class Method(StrEnum):
    AUTO = "auto"
    FIGURE6 = "figure6"
    EXACT = "exact"
    SEARCH = "search"  # cuts and local search: more groups of different sizes than can be solved exactly
    EVEN = "even"
    MEMORY_GREEDY = "memory-greedy"
    USABLE = "usable"  # of plans with `count_usable`


@dataclass(frozen=True, slots=True)
class MemberPlan:
    worker_id: WorkerId
    first_layer: int  # executes and keeps [first_layer, last_layer)
    last_layer: int
    dropped_layers: tuple[int, ...]
    freed_bytes: int
    block_count: int  # its own KV blocks, once the exchange is over


@dataclass(frozen=True, slots=True)
class GroupPlan:
    group_id: GroupId  # the leader's worker id
    merged: tuple[GroupState, ...]  # by id
    members: tuple[MemberPlan, ...]  # stage order
    freed_bytes: int
    exchange_bytes: int  # KV of running sequences that changes its holder
    block_count_before: int  # of all that was merged
    block_count: int  # the minimum over the stages


@dataclass(frozen=True, slots=True, kw_only=True)
class DropPlan:
    method: Method  # that found it
    needed_bytes: int
    freed_bytes: int
    shortfall_bytes: int  # 0: the need is met
    usable_bytes: int  # KV that admission can count with beyond today's; less than freed where layers split unevenly
    exchange_bytes: int
    cost_before: float
    cost_after: float
    cost_bound: float | None  # no plan with as many merges costs less; None: not known for so many groups
    groups: tuple[GroupPlan, ...]  # those that change, by id
    unchanged: tuple[GroupState, ...]

    @property
    def is_optimal(self) -> bool:
        return self.cost_bound is not None and self.cost_after <= self.cost_bound * (1.0 + 1e-9)


def plan(
    snapshot: Snapshot,
    needed_bytes: int,
    method: Method = Method.AUTO,
    *,
    cost: StageCost | None = None,
    tolerance: SplitTolerance | None = None,
    count_usable: bool = False,
    most_stages: int | None = None,
) -> DropPlan:
    """The snapshot is consistent (`Snapshot.check`). Existing groups may be merged, none is split.
    `most_stages`: of a group, at least as many as the deepest one has; None: as many as there are layers.

    `count_usable`: the need is met by KV that admission can count with, not by freed bytes; where layers do not
    divide evenly over the members, that takes more merges.
    """
    if tolerance is None:
        tolerance = SplitTolerance(capacity=0.0) if count_usable else SplitTolerance()
    planning = _Planning(snapshot, needed_bytes, cost or StageCost(), tolerance, most_stages)
    return planning.until_usable(method) if count_usable else planning.with_merges(method, planning.least_merges)


def plan_shallow(
    snapshot: Snapshot,
    needed_bytes: int,
    method: Method = Method.AUTO,
    *,
    tolerable_shortfall: float,
    count_usable: bool = False,
) -> DropPlan:
    """Pairs, and groups no deeper than there are already, unless these leave the need unmet by more than this share
    of all KV that they give.

    What does not fit waits for others to end, a share of them about as large as what is missing. Each stage more has
    its price too, in computing (bubbles, and the fixed part of a step once more), which everybody in the group pays,
    and who waits pays it in a longer burst.
    """
    model = snapshot.model
    stages = [len(group.members) for group in snapshot.groups]
    merges = len(stages) - -(-sum(stages) // max([2, *stages]))
    surplus = sum(surplus_bytes(group, model) for group in snapshot.groups)
    most_bytes = merges * model.copy_bytes + surplus  # that shallow groups could free
    now_bytes = sum(group.block_count for group in snapshot.groups) * model.block_bytes * model.layer_count
    if needed_bytes - most_bytes <= tolerable_shortfall * (now_bytes + most_bytes):
        shallow = plan(snapshot, needed_bytes, method, count_usable=count_usable, most_stages=2)
        if shallow.shortfall_bytes <= tolerable_shortfall * (now_bytes + shallow.usable_bytes):
            return shallow
    return plan(snapshot, needed_bytes, method, count_usable=count_usable)


class _Planning:
    """One plan in the making."""

    def __init__(
        self,
        snapshot: Snapshot,
        needed_bytes: int,
        cost: StageCost,
        tolerance: SplitTolerance,
        most_stages: int | None,
    ) -> None:
        self.model = snapshot.model
        self.needed_bytes = max(0, needed_bytes)
        self.splitter = Splitter(self.model, tolerance)
        self._group_plans: dict[tuple[int, ...], GroupPlan] = {}
        self.groups = sorted(snapshot.groups, key=lambda group: group.group_id)
        stages = [len(group.members) for group in self.groups]
        layer_count = self.model.layer_count
        deepest = layer_count if most_stages is None else min(layer_count, max(most_stages, *stages, 1))
        self.units = Units(stages, cost.weights(self.groups), cost.factors(sum(stages)), deepest)
        self.surplus_bytes = [surplus_bytes(group, self.model) for group in self.groups]
        self.is_full_copy = [len(g.members) == 1 for g in self.groups]
        self.trimmed = self._trims()
        left_bytes = self.needed_bytes - sum(self.surplus_bytes[i] for i in self.trimmed)
        self.most_merges = len(stages) - max(1, -(-sum(stages) // deepest)) if stages else 0
        self.least_merges = min(max(0, -(-left_bytes // self.model.copy_bytes)), self.most_merges)

    def until_usable(self, method: Method) -> DropPlan:
        """Sizes of groups that are of use (equal single instances), or merge more by as much as is still missing."""
        if method in (Method.AUTO, Method.USABLE) and self._are_equal_singles():
            return _judged_by_usable(self._assemble(self._usable_groups(), Method.USABLE))
        merges = self.least_merges
        best = _judged_by_usable(self.with_merges(method, merges))
        for _ in range(_USABLE_ATTEMPTS):
            if best.shortfall_bytes == 0 or merges == self.most_merges:
                break
            merges = min(self.most_merges, merges + max(1, best.shortfall_bytes // self.model.copy_bytes))
            more = _judged_by_usable(self.with_merges(method, merges))
            best = min(best, more, key=_preference)
        return best if best.shortfall_bytes == 0 else self._with_fewer(method, best)

    def _with_fewer(self, method: Method, best: DropPlan) -> DropPlan:
        """Too deep a pipeline has less room than two: where the need is not met, fewer merges may meet more of it."""
        merges = self.least_merges
        for _ in range(_USABLE_ATTEMPTS):
            if merges == 0:
                break
            merges //= 2
            best = min(best, _judged_by_usable(self.with_merges(method, merges)), key=_preference)
        return best

    def _are_equal_singles(self) -> bool:
        budgets = {member.budget_bytes for group in self.groups for member in group.members}
        return (
            len(budgets) == 1 and all(self.is_full_copy) and self.model.is_uniform and len(self.groups) <= EXACT_LIMIT
        )

    def _usable_groups(self) -> Partition:
        """For each number of groups the cheapest; of these the cheapest with enough blocks, else the most blocks."""
        most = min(len(self.groups), self.units.max_stages)
        blocks = blocks_by_size(self.model, self.groups[0].members[0].budget_bytes, most)
        block_bytes = self.model.block_bytes * self.model.layer_count
        wanted = sum(group.block_count for group in self.groups) + -(-self.needed_bytes // block_bytes)
        found = [p for p in cheapest_by_count(self.units, useful_sizes(blocks)) if p is not None]

        def demerits(partition: Partition) -> tuple[int, float]:
            missing = max(0, wanted - sum(blocks[len(members)] for members in partition))
            return missing, self.units.cost(partition)

        return min(found, key=demerits)

    def with_merges(self, method: Method, merge_count: int) -> DropPlan:
        if merge_count == 0 or not self.groups:
            found_by = Method.EXACT if method is Method.AUTO else method
            return self._assemble([[i] for i in range(len(self.groups))], found_by)
        return self._assemble(*self._group(method, merge_count))

    def _trims(self) -> list[int]:
        """Pipelines that hold layers which they do not execute give these first: that costs nothing."""
        trimmed: list[int] = []
        freed_bytes = 0
        for i in sorted(range(len(self.groups)), key=lambda i: (-self.surplus_bytes[i], i)):
            if freed_bytes >= self.needed_bytes or self.surplus_bytes[i] == 0:
                break
            trimmed.append(i)
            freed_bytes += self.surplus_bytes[i]
        return trimmed

    def _group(self, method: Method, merge_count: int) -> tuple[Partition, Method]:
        if method is Method.MEMORY_GREEDY:
            kv_bytes = sum(g.block_count for g in self.groups) * self.model.block_bytes * self.model.layer_count
            return memory_greedy(self.units, kv_bytes // self.model.copy_bytes + 1, self._can_merge), method
        if method is Method.FIGURE6:
            return figure6(self.units, merge_count, self._can_merge), method
        if method is not Method.EVEN and self._is_affordable():
            found, found_by = self._cheapest(merge_count), Method.EXACT if is_exact(self.units) else Method.SEARCH
        else:
            found, found_by = evened(self.units, len(self.groups) - merge_count), Method.EVEN
        if found is not None and all(len(members) == 1 or self._can_merge(members) for members in found):
            greedy = figure6(self.units, merge_count, self._can_merge) if found_by is Method.EVEN else None
            if greedy is None or method is Method.EVEN or self.units.cost(found) <= self.units.cost(greedy):
                return found, found_by
        return figure6(self.units, merge_count, self._can_merge), Method.FIGURE6

    def _is_affordable(self) -> bool:
        is_uniform = len(set(self.units.stages)) == len(set(self.units.weights)) == 1
        return is_uniform or len(self.groups) <= EXACT_LIMIT

    def _cheapest(self, merge_count: int) -> Partition | None:
        """With as many merges as the number of layers allows (pipelines do not fill groups evenly)."""
        for merges in range(merge_count, 0, -1):
            found = cheapest(self.units, len(self.groups) - merges)
            if found is not None:
                return found
        return None

    def _can_merge(self, members: Sequence[int]) -> bool:
        if sum(self.units.stages[i] for i in members) > self.units.max_stages:
            return False
        if all(self.is_full_copy[i] for i in members):
            return True
        return self.splitter.is_feasible([instance for i in members for instance in self.groups[i].members])

    def _group_plan(self, members: Sequence[int]) -> GroupPlan:
        key = tuple(sorted(members))
        if key not in self._group_plans:
            self._group_plans[key] = group_plan([self.groups[i] for i in key], self.splitter)
        return self._group_plans[key]

    def _assemble(self, partition: Partition, method: Method) -> DropPlan:
        changing = {i for members in partition if len(members) > 1 for i in members} | set(self.trimmed)
        changed = [self._group_plan(members) for members in partition if changing.issuperset(members)]
        freed_bytes = sum(group.freed_bytes for group in changed)
        added_blocks = sum(group.block_count - group.block_count_before for group in changed)
        units = range(len(self.groups))
        return DropPlan(
            method=method,
            needed_bytes=self.needed_bytes,
            freed_bytes=freed_bytes,
            shortfall_bytes=max(0, self.needed_bytes - freed_bytes),
            usable_bytes=added_blocks * self.model.block_bytes * self.model.layer_count,
            exchange_bytes=sum(group.exchange_bytes for group in changed),
            cost_before=self._scaled(self.units.cost([[i] for i in units])),
            cost_after=self._scaled(self.units.cost(partition)),
            cost_bound=self._bound(partition, method),
            groups=tuple(sorted(changed, key=lambda group: group.group_id)),
            unchanged=tuple(self.groups[i] for i in units if i not in changing),
        )

    def _bound(self, partition: Partition, method: Method) -> float | None:
        is_exact_here = method is Method.EXACT and len(set(self.units.stages)) == 1
        if not self.groups or is_exact_here:
            return self._scaled(self.units.cost(partition))
        bound = lower_bound(self.units, len(partition)) if self._is_affordable() else inf
        return None if bound == inf else self._scaled(bound)

    def _scaled(self, cost: float) -> float:
        return cost / WEIGHT_UNIT


def _preference(plan: DropPlan) -> tuple[int, float]:
    return plan.shortfall_bytes, plan.cost_after


def _judged_by_usable(plan: DropPlan) -> DropPlan:
    return replace(plan, shortfall_bytes=max(0, plan.needed_bytes - plan.usable_bytes))


def surplus_bytes(group: GroupState, model: ModelShape) -> int:
    """Parameters in the memory of a group's members beyond one copy of all layers."""
    if len(group.members) == 1:
        return 0
    return sum(model.occupied_bytes(member.held_layers) for member in group.members) - model.copy_bytes


def group_plan(merged: Sequence[GroupState], splitter: Splitter) -> GroupPlan:
    """One pipeline of all their members. Raises InvariantViolation if there is none (ask `is_feasible` before)."""
    model = splitter.model
    candidates = [Candidate(i, group.used_block_count * model.block_bytes) for group in merged for i in group.members]
    stages = splitter.split(candidates)
    if stages is None:
        raise InvariantViolation(f"no pipeline of {', '.join(c.instance.worker_id for c in candidates)} is complete")
    members = tuple(_member_plan(stage, splitter) for stage in stages)
    block_count = min(member.block_count for member in members)
    used_count = sum(group.used_block_count for group in merged)
    kept_bytes = sum(stage.candidate.kv_bytes_per_layer * _kept_layers(stage) for stage in stages)
    return GroupPlan(
        group_id=GroupId(members[0].worker_id),
        merged=tuple(merged),
        members=members,
        freed_bytes=sum(member.freed_bytes for member in members),
        exchange_bytes=used_count * model.block_bytes * model.layer_count - kept_bytes,
        block_count_before=sum(group.block_count for group in merged),
        block_count=block_count,
    )


def _member_plan(stage: Stage, splitter: Splitter) -> MemberPlan:
    instance, first_layer, last_layer = stage.candidate.instance, stage.first_layer, stage.last_layer
    aftermath = splitter.aftermath(instance, first_layer, last_layer)
    return MemberPlan(instance.worker_id, first_layer, last_layer, *aftermath)


def _kept_layers(stage: Stage) -> int:
    instance = stage.candidate.instance
    return max(0, min(stage.last_layer, instance.last_layer) - max(stage.first_layer, instance.first_layer))
