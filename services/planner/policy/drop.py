"""Drop plans: which groups to merge and which layers each member gives up, so that so many bytes become free.

`Method.AUTO` is exact where that is affordable (see `services.planner.policy.exact`): always for units of equal size
and weight, up to `EXACT_LIMIT` groups otherwise. Beyond, the cheaper of figure 6 and of an even partition with the
heaviest groups in the shortest pipelines is taken. A plan that exact methods find but no split of the layers allows
(pipelines whose members hold too little in common) is replaced by figure 6, which passes such merges over.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import NamedTuple

from ballast.common.ids import GroupId
from services.planner.policy.cost import WEIGHT_UNIT, factors, weights
from services.planner.policy.exact import cheapest, evened, is_exact, lower_bound
from services.planner.policy.greedy import figure6, memory_greedy
from services.planner.policy.merged import GroupPlan, GroupPlanner, surplus_bytes
from services.planner.policy.snapshot import GroupState, Snapshot
from services.planner.policy.split import Splitter, SplitTolerance
from services.planner.policy.units import Partition, Units
from services.planner.policy.usable import blocks_by_size, cheapest_by_count, even_group_count, useful_sizes

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
    COMPARED = "compared"  # what is predicted of layouts: `services.planner.policy.compare`


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
    count_usable: bool = False,
    most_stages: int | None = None,
) -> DropPlan:
    """The snapshot is consistent (`Snapshot.check`). Existing groups may be merged, none is split.
    `most_stages`: of a group, at least as many as the deepest one has; None: as many as there are layers.

    `count_usable`: the need is met by KV that admission can count with, not by freed bytes; where layers do not
    divide evenly over the members, that takes more merges.
    """
    planning = _Planning(snapshot, needed_bytes, most_stages, count_usable=count_usable)
    return planning.assembled(planning.choose(method))


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
    model, groups = snapshot.model, snapshot.groups
    stages = [len(group.members) for group in groups]
    merges = len(stages) - -(-sum(stages) // max([2, *stages]))
    most_bytes = merges * model.copy_bytes + sum(
        surplus_bytes(g, model) for g in groups
    )  # that shallow groups could free
    now_bytes = sum(group.block_count for group in groups) * model.block_bytes * model.layer_count
    if needed_bytes - most_bytes <= tolerable_shortfall * (now_bytes + most_bytes):
        planning = _Planning(snapshot, needed_bytes, most_stages=2, count_usable=count_usable)
        shallow = planning.choose(method)
        usable_bytes = planning.usable_bytes(shallow.partition)
        if shallow.shortfall_bytes <= tolerable_shortfall * (now_bytes + usable_bytes):
            return planning.assembled(shallow)
    return plan(snapshot, needed_bytes, method, count_usable=count_usable)


def plan_of(
    snapshot: Snapshot,
    merges: Sequence[Sequence[GroupId]],
    needed_bytes: int,
    toward_memory: float | None = None,
    *,
    insists: bool = False,
) -> DropPlan:
    """The plan that makes one group of each of these, and leaves all others as they are.

    `toward_memory`: see `Splitter.split`. `insists`: those that hold less together than apart are made, too.
    """
    planning = _Planning(snapshot, needed_bytes, None, count_usable=True, toward_memory=toward_memory)
    planning.insists |= insists
    index = {group.group_id: i for i, group in enumerate(planning.groups)}
    merged = {group_id for merge in merges for group_id in merge}
    partition = [[index[group_id] for group_id in merge] for merge in merges]
    partition += [[i] for i, group in enumerate(planning.groups) if group.group_id not in merged]
    return planning.assembled(planning.judged(partition, Method.COMPARED))


class _Choice(NamedTuple):
    """A grouping, judged before its plans are worked out."""

    shortfall_bytes: int
    cost: float
    partition: Partition
    method: Method  # that found it


class _Planning:
    """One plan in the making: groupings are chosen by what they are worth, and only the chosen one is worked out."""

    def __init__(
        self,
        snapshot: Snapshot,
        needed_bytes: int,
        most_stages: int | None,
        *,
        count_usable: bool,
        toward_memory: float | None = None,
    ) -> None:
        self.model = snapshot.model
        self.insists = not count_usable  # on merges after which there is less KV than before
        self.needed_bytes = max(0, needed_bytes)
        self.counts_usable = count_usable
        self.splitter = Splitter(self.model, SplitTolerance(capacity=0.0) if count_usable else SplitTolerance())
        self._group_plans: dict[tuple[int, ...], GroupPlan] = {}
        self.groups = sorted(snapshot.groups, key=lambda group: group.group_id)
        stages = [len(group.members) for group in self.groups]
        layer_count = self.model.layer_count
        deepest = layer_count if most_stages is None else min(layer_count, max(most_stages, *stages, 1))
        self.units = Units(stages, weights(self.groups), factors(sum(stages)), deepest)
        self.surplus_bytes = [surplus_bytes(group, self.model) for group in self.groups]
        self.is_full_copy = [count == 1 for count in stages]
        self.all_full_copies = all(self.is_full_copy)
        self.blocks_by_size = self._blocks_by_size()
        self.planner = GroupPlanner(
            self.splitter, equal_singles=self.blocks_by_size is not None, toward_memory=toward_memory
        )
        self.trimmed = self._trims()
        left_bytes = self.needed_bytes - sum(self.surplus_bytes[i] for i in self.trimmed)
        self.most_merges = len(stages) - max(1, -(-sum(stages) // deepest)) if stages else 0
        self.least_merges = min(max(0, -(-left_bytes // self.model.copy_bytes)), self.most_merges)

    def _blocks_by_size(self) -> list[int] | None:
        """Blocks of groups by their size, where that says it: of equal single instances; else None."""
        kinds = {(m.budget_bytes, m.extent_bytes, m.slowness) for group in self.groups for m in group.members}
        if len(kinds) != 1 or not self.all_full_copies or not self.model.is_uniform or not self.counts_usable:
            return None
        budget_bytes, extent_bytes, _ = kinds.pop()
        most = min(len(self.groups), self.units.max_stages)
        return blocks_by_size(self.model.at(extent_bytes), budget_bytes, most)

    # ------------------------------------------------------------ choosing

    def choose(self, method: Method) -> _Choice:
        if not self.counts_usable:
            return self._with_merges(method, self.least_merges)
        return self._until_usable(method)

    def _until_usable(self, method: Method) -> _Choice:
        """Sizes of groups that are of use (equal single instances), or merge more by as much as is still missing."""
        if method in (Method.AUTO, Method.USABLE) and self.blocks_by_size:
            return self._of_singles(method, self.blocks_by_size)
        merges = self.least_merges
        best = self._with_merges(method, merges)
        for _ in range(_USABLE_ATTEMPTS):
            if best.shortfall_bytes == 0 or merges == self.most_merges:
                break
            merges = min(self.most_merges, merges + max(1, best.shortfall_bytes // self.model.copy_bytes))
            best = min(best, self._with_merges(method, merges), key=_preference)
        return best if best.shortfall_bytes == 0 else self._with_fewer(method, best)

    def _with_fewer(self, method: Method, best: _Choice) -> _Choice:
        """Too deep a pipeline has less room than two: where the need is not met, fewer merges may meet more of it."""
        merges = self.least_merges
        for _ in range(_USABLE_ATTEMPTS):
            if merges == 0:
                break
            merges //= 2
            best = min(best, self._with_merges(method, merges), key=_preference)
        return best

    def _of_singles(self, method: Method, blocks: list[int]) -> _Choice:
        block_bytes = self.model.block_bytes * self.model.layer_count
        wanted = sum(group.block_count for group in self.groups) + -(-self.needed_bytes // block_bytes)
        if method is Method.USABLE or len(self.groups) <= EXACT_LIMIT:
            return self.judged(self._usable_groups(blocks, wanted), Method.USABLE)
        group_count = even_group_count(blocks, len(self.groups), wanted)
        return self._with_merges(method, len(self.groups) - group_count)

    def _usable_groups(self, blocks: list[int], wanted: int) -> Partition:
        """The cheapest of each number of groups; of these the cheapest with enough blocks, else the most blocks."""
        found = [p for p in cheapest_by_count(self.units, useful_sizes(blocks)) if p is not None]

        def demerits(partition: Partition) -> tuple[int, float]:
            missing = max(0, wanted - sum(blocks[len(members)] for members in partition))
            return missing, self.units.cost(partition)

        return min(found, key=demerits)

    def _with_merges(self, method: Method, merge_count: int) -> _Choice:
        if merge_count == 0 or not self.groups:
            found_by = Method.EXACT if method is Method.AUTO else method
            return self.judged([[i] for i in range(len(self.groups))], found_by)
        return self.judged(*self._group(method, merge_count))

    def judged(self, partition: Partition, method: Method) -> _Choice:
        partition = [part for members in partition for part in self._worthwhile(members)]
        got_bytes = self.usable_bytes(partition) if self.counts_usable else self._freed_bytes(partition)
        return _Choice(max(0, self.needed_bytes - got_bytes), self.units.cost(partition), partition, method)

    def _worthwhile(self, members: list[int]) -> Partition:
        """These as one group; unless it would hold less KV than they do, and nobody insists: then as they are."""
        if len(members) == 1 or self.insists:
            return [members]
        by_size = self.blocks_by_size
        if by_size is None:
            group = self._group_plan(members)
            gains = group.block_count >= group.block_count_before
        else:
            gains = by_size[len(members)] >= sum([self.groups[i].block_count for i in members])
        return [members] if gains else [[i] for i in members]

    def usable_bytes(self, partition: Partition) -> int:
        """KV that admission can count with beyond today's."""
        by_size, groups = self.blocks_by_size, self.groups
        if by_size is None:
            added = sum(group.block_count - group.block_count_before for group in self._changed(partition))
        else:
            added = sum(by_size[len(m)] - sum(groups[i].block_count for i in m) for m in partition if len(m) > 1)
        return added * self.model.block_bytes * self.model.layer_count

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
            if found_by is not Method.EVEN or method is Method.EVEN:
                return found, found_by
            greedy = figure6(self.units, merge_count, self._can_merge)
            loses_room = self.counts_usable and self.usable_bytes(greedy) < self.usable_bytes(found)
            if loses_room or self.units.cost(found) <= self.units.cost(greedy):
                return found, found_by
            return greedy, Method.FIGURE6
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
        if self.all_full_copies:
            return len(members) <= self.units.max_stages
        if sum(self.units.stages[i] for i in members) > self.units.max_stages:
            return False
        if all(self.is_full_copy[i] for i in members):
            return True
        return self.splitter.is_feasible([instance for i in members for instance in self.groups[i].members])

    def _group_plan(self, members: Sequence[int]) -> GroupPlan:
        key = tuple(sorted(members)) if len(members) > 2 or members[0] > members[-1] else tuple(members)
        if key not in self._group_plans:
            self._group_plans[key] = self.planner.plan([self.groups[i] for i in key])
        return self._group_plans[key]

    def _changed(self, partition: Partition) -> list[GroupPlan]:
        trimmed = set(self.trimmed)
        return [self._group_plan(m) for m in partition if len(m) > 1 or m[0] in trimmed]

    def _freed_bytes(self, partition: Partition) -> int:
        return sum(group.freed_bytes for group in self._changed(partition))

    # ------------------------------------------------------------ working out

    def assembled(self, choice: _Choice) -> DropPlan:
        partition = choice.partition
        changed = self._changed(partition)
        changing = {i for members in partition if len(members) > 1 for i in members} | set(self.trimmed)
        freed_bytes = sum(group.freed_bytes for group in changed)
        added_blocks = sum(group.block_count - group.block_count_before for group in changed)
        usable_bytes = added_blocks * self.model.block_bytes * self.model.layer_count
        got_bytes = usable_bytes if self.counts_usable else freed_bytes
        units = range(len(self.groups))
        return DropPlan(
            method=choice.method,
            needed_bytes=self.needed_bytes,
            freed_bytes=freed_bytes,
            shortfall_bytes=max(0, self.needed_bytes - got_bytes),
            usable_bytes=usable_bytes,
            exchange_bytes=sum(group.exchange_bytes for group in changed),
            cost_before=self.units.cost([[i] for i in units]) / WEIGHT_UNIT,
            cost_after=choice.cost / WEIGHT_UNIT,
            cost_bound=self._bound(choice),
            groups=tuple(sorted(changed, key=lambda group: group.group_id)),
            unchanged=tuple(self.groups[i] for i in units if i not in changing),
        )

    def _bound(self, choice: _Choice) -> float | None:
        is_exact_here = choice.method is Method.EXACT and len(set(self.units.stages)) == 1
        if not self.groups or is_exact_here:
            return choice.cost / WEIGHT_UNIT
        is_asked = choice.method is not Method.COMPARED and self._is_affordable()
        bound = lower_bound(self.units, len(choice.partition)) if is_asked else inf
        return None if bound == inf else bound / WEIGHT_UNIT


def _preference(choice: _Choice) -> tuple[int, float]:
    return choice.shortfall_bytes, choice.cost
