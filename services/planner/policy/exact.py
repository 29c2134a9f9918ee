"""Grouping at the least cost of stages: exactly `group_count` groups, minimum of sum(weight * factor(stages)).

Merging more than needed never pays (the cost of a merged group is at least that of its parts), so a need for memory
fixes the number of groups. What is exact, with a convex factor:

- Units of equal size and weight, any number of them: an even partition. O(N).
- Units of equal size and any weights: for given group sizes the heaviest units belong into the smallest groups
  (rearrangement inequality), so some optimum is a cut of the units in descending order of weight into consecutive
  runs. The cost of runs satisfies the quadrangle inequality, so a dynamic programme over (group, last unit) with
  Knuth's bounds finds the best cut, whatever the sizes of groups. O(N (N - groups)).
- Units of different sizes (pipelines that are merged further): a dynamic programme over subsets up to
  `SUBSET_LIMIT` units. With more the problem is as hard as bin packing: the best of several cuts, improved by
  moves and swaps, and `lower_bound` says how far it can be from the optimum (0 in many cases).
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import fsum, inf

from services.planner.policy.units import Partition, Units

SUBSET_LIMIT = 8  # 3 ** 8 pairs of subsets per group
_IMPROVEMENT_ROUNDS = 4


def cheapest(units: Units, group_count: int) -> Partition | None:
    """None if the groups cannot take all units (`max_stages`)."""
    if len(set(units.stages)) > 1:
        return _mixed(units, group_count)
    if len(set(units.weights)) == 1:
        return evened(units, group_count)
    return _best_cut(units, sorted(range(len(units.stages)), key=lambda i: (-units.weights[i], i)), group_count)


def is_exact(units: Units) -> bool:
    """Whether `cheapest` gives the optimum, rather than a good partition that `lower_bound` judges."""
    return len(units.stages) <= SUBSET_LIMIT or len(set(units.stages)) == 1


def lower_bound(units: Units, group_count: int) -> float:
    """No partition into so many groups costs less. Equal to the optimum for units of equal size.

    Units of different sizes are taken apart into single stages that share the unit's weight: every partition of the
    units is one of the stages too.
    """
    if len(set(units.stages)) == 1:
        best = cheapest(units, group_count)
        return inf if best is None else units.cost(best)
    stages = sum(units.stages)
    apart = sorted((w / s for w, s in zip(units.weights, units.stages, strict=True) for _ in range(s)), reverse=True)
    cut = _cut([1] * stages, apart, units.factors, units.max_stages, group_count)
    return inf if cut is None else fsum(_run_costs(cut, [1] * stages, apart, units.factors))


def evened(units: Units, group_count: int) -> Partition | None:
    """Groups with as many units in each as in the others, the heaviest in the smaller groups: O(N log N).

    The optimum for units of equal size and weight; otherwise a good plan for more units than `cheapest` can take.
    """
    order = sorted(range(len(units.stages)), key=lambda i: (-units.weights[i], i))
    size, larger = divmod(len(order), group_count)
    ends = list(accumulate([size] * (group_count - larger) + [size + 1] * larger))
    partition = [order[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
    fits = all(sum(units.stages[i] for i in members) <= units.max_stages for members in partition)
    return partition if fits else None


def _best_cut(units: Units, order: Sequence[int], group_count: int) -> Partition | None:
    stages = [units.stages[i] for i in order]
    weights = [units.weights[i] for i in order]
    cut = _cut(stages, weights, units.factors, units.max_stages, group_count)
    if cut is None:
        return None
    return [list(order[begin:end]) for begin, end in pairwise(cut)]


def _run_costs(
    cut: Sequence[int], stages: Sequence[int], weights: Sequence[float], factors: Sequence[float]
) -> list[float]:
    runs = pairwise(cut)
    return [fsum(weights[begin:end]) * factors[sum(stages[begin:end])] for begin, end in runs]


def _cut(
    stages: Sequence[int], weights: Sequence[float], factors: Sequence[float], max_stages: int, group_count: int
) -> list[int] | None:
    """Ends of the cheapest runs (0 first): position i is the boundary before unit i.

    Layer g holds, for each end, the least cost of g runs up to there. The best begin of the last run does not
    decrease with the end nor with the number of runs (Knuth, Yao), which bounds the search.
    """
    count = len(stages)
    slack = count - group_count  # a layer's ends are g .. g + slack: each other run needs a unit
    stages_before = [0, *accumulate(stages)]
    weights_before = [0, *accumulate(weights)]
    costs = [0.0] + [inf] * slack  # by end - g
    begins: list[list[int]] = []
    for g in range(1, group_count + 1):
        below = begins[-1] if begins else [0] * (slack + 1)
        costs, found = _layer(g, costs, below, slack, stages_before, weights_before, factors, max_stages)
        begins.append(found)
    if costs[slack] == inf:
        return None
    cut = [count]
    for g in range(group_count, 0, -1):
        cut.append(begins[g - 1][cut[-1] - g])
    return cut[::-1]


def _layer(
    g: int,
    costs: Sequence[float],  # of layer g - 1, by begin - (g - 1)
    below: Sequence[int],  # best begins of layer g - 1, by end - (g - 1)
    slack: int,
    stages_before: Sequence[int],
    weights_before: Sequence[float],
    factors: Sequence[float],
    max_stages: int,
) -> tuple[list[float], list[int]]:
    least, found = [inf] * (slack + 1), [g - 1] * (slack + 1)
    last = g - 1 + slack
    for end in range(g + slack, g - 1, -1):
        stages_end, weight_end = stages_before[end], weights_before[end]
        best, best_begin = inf, g - 1
        first = max(g - 1, below[end - g + 1]) if end - g + 1 <= slack else g - 1
        for begin in range(min(last, end - 1), first - 1, -1):
            size = stages_end - stages_before[begin]
            if size > max_stages:
                break
            cost = costs[begin - g + 1] + (weight_end - weights_before[begin]) * factors[size]
            if cost < best:
                best, best_begin = cost, begin
        least[end - g] = best
        if best < inf:
            found[end - g] = last = best_begin
    return least, found


def _mixed(units: Units, group_count: int) -> Partition | None:
    if len(units.stages) <= SUBSET_LIMIT:
        return _best_of_subsets(units, group_count)
    count = range(len(units.stages))
    orders = (
        sorted(count, key=lambda i: (-units.weights[i] / units.stages[i], units.stages[i], i)),
        sorted(count, key=lambda i: (-units.weights[i], units.stages[i], i)),
        sorted(count, key=lambda i: (-units.stages[i], -units.weights[i], i)),
    )
    cuts = [_best_cut(units, order, group_count) for order in orders]
    found = [cut for cut in (*cuts, _fill_smallest(units, orders[2], group_count)) if cut is not None]
    if not found:
        return None
    best = min(found, key=units.cost)
    return improve(units, best)


def _fill_smallest(units: Units, order: Sequence[int], group_count: int) -> Partition | None:
    """Units in this order, each into the group with the fewest stages."""
    partition: Partition = [[] for _ in range(group_count)]
    stages = [0] * group_count
    for unit in order:
        smallest = min(range(group_count), key=lambda g: (stages[g], g))
        partition[smallest].append(unit)
        stages[smallest] += units.stages[unit]
    return partition if max(stages) <= units.max_stages else None


def _best_of_subsets(units: Units, group_count: int) -> Partition | None:
    full = (1 << len(units.stages)) - 1
    members = [[i for i in range(len(units.stages)) if mask >> i & 1] for mask in range(full + 1)]
    fits = [sum(units.stages[i] for i in chosen) <= units.max_stages for chosen in members]
    costs = [units.cost_of(chosen) if fit else inf for chosen, fit in zip(members, fits, strict=True)]
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}  # by units that are in groups
    for _ in range(group_count):
        longer: dict[int, tuple[float, tuple[int, ...]]] = {}
        for done, (cost, chosen) in best.items():
            left = full & ~done
            lowest = left & -left
            rest = left ^ lowest
            extra = rest
            while left:
                group = lowest | extra
                candidate = (cost + costs[group], (*chosen, group))
                if candidate[0] < inf and candidate < longer.get(done | group, (inf, ())):
                    longer[done | group] = candidate
                if extra == 0:
                    break
                extra = (extra - 1) & rest
        best = longer
    return [members[group] for group in best[full][1]] if full in best else None


def improve(units: Units, partition: Partition) -> Partition:
    """Move single units and swap pairs between groups while that lowers the cost, for a few rounds."""
    search = _Search(units, partition)
    for _ in range(_IMPROVEMENT_ROUNDS):
        if not (search.move_units() | search.swap_units()):
            break
    return [sorted(members) for members in search.groups]


class _Search:
    """A partition with the sums of its groups, changed in place."""

    def __init__(self, units: Units, partition: Partition) -> None:
        self.units = units
        self.groups = [list(members) for members in partition]
        self.group_of = {unit: g for g, members in enumerate(partition) for unit in members}
        self.stages = [sum(units.stages[i] for i in members) for members in partition]
        self.weights = [sum(units.weights[i] for i in members) for members in partition]

    def move_units(self) -> bool:
        moved = False
        for unit, stages in enumerate(self.units.stages):
            here = self.group_of[unit]
            if len(self.groups[here]) == 1:
                continue
            for there in range(len(self.groups)):
                if there != here and self._gain(here, there, stages, self.units.weights[unit]) > 0.0:
                    self._shift(unit, there)
                    moved = True
                    break
        return moved

    def swap_units(self) -> bool:
        swapped = False
        all_stages, all_weights = self.units.stages, self.units.weights
        for one in range(len(all_stages)):
            for other in range(one + 1, len(all_stages)):
                here, there = self.group_of[one], self.group_of[other]
                stages, weight = all_stages[one] - all_stages[other], all_weights[one] - all_weights[other]
                if here != there and (stages or weight) and self._gain(here, there, stages, weight) > 0.0:
                    self._shift(one, there)
                    self._shift(other, here)
                    swapped = True
        return swapped

    def _gain(self, here: int, there: int, stages: int, weight: int) -> float:
        """What is saved when so many stages and so much weight go from one group to another."""
        factors, most = self.units.factors, self.units.max_stages
        left, joined = self.stages[here] - stages, self.stages[there] + stages
        if max(left, joined) > most:
            return -inf
        before = self.weights[here] * factors[self.stages[here]] + self.weights[there] * factors[self.stages[there]]
        return before - (self.weights[here] - weight) * factors[left] - (self.weights[there] + weight) * factors[joined]

    def _shift(self, unit: int, there: int) -> None:
        here = self.group_of[unit]
        self.groups[here].remove(unit)
        self.groups[there].append(unit)
        self.group_of[unit] = there
        for sums, amount in ((self.stages, self.units.stages[unit]), (self.weights, self.units.weights[unit])):
            sums[here] -= amount
            sums[there] += amount
