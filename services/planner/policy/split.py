"""Splits the layers among the members of one group: order of the stages and contiguous ranges.

A member can only execute layers that it still holds, which restricts merges of pipelines. The optimum, in this order:

1. complete and feasible: every layer once, every member at least one layer, at least one KV block on every stage;
2. the longest stage, in time, takes at most `balance` longer than in the most balanced split; or, with unlike members,
   a bound that `toward_memory` interpolates: at 1.0 the stages have the most memory, at 0.0 they are balanced;
3. the smallest KV capacity of a stage, which limits admission, is at most `capacity` below the largest that 2 allows;
4. the least KV to send (no parameters move), then the most even times, then a leader with the most KV, so that the
   fewest sequences change leaders.

The search is exact, by dynamic programming over (members used, last layer), with members of equal memory and layers as
one kind, or by counting if all members hold every layer. With more than `STATE_LIMIT` combinations of kinds, the held
layers determine the order of stages, which does not restrict feasibility unless one member's layers lie strictly inside
another's. With more than `STATE_LIMIT` combinations of kinds and loads, 4 is decided kind by kind and then by load.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from services.planner.policy.snapshot import InstanceState, ModelShape

STATE_LIMIT = 256
TOWARD_MEMORY = (0.0, 0.5, 1.0)  # values of `toward_memory` that are tried for unlike members
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitTolerance:
    balance: float = 0.1
    capacity: float = 0.02

    def longest(self, layers: float) -> float:
        """Return the longest stage allowed if the longest stage of the most balanced split is `layers`."""
        return layers * (1.0 + self.balance) + _ROUNDING


class SplitMember(NamedTuple):
    """A future member, with its KV of running sequences."""

    instance: InstanceState
    kv_bytes_per_layer: int


class SplitStage(NamedTuple):
    candidate: SplitMember
    first_layer: int
    last_layer: int


class MemberKind(NamedTuple):
    """Members that are equal in everything on which feasibility, balance and capacity depend."""

    held_layers: tuple[int, ...]
    budget_bytes: int
    first_layer: int  # layers currently executed: [first_layer, last_layer)
    last_layer: int
    extent_bytes: int
    slowness: float


class SplitBounds(NamedTuple):
    """Bounds of conditions 1 to 3."""

    reach: "Reach"
    block_count: int  # minimum KV blocks of the smallest stage
    longest: float  # maximum time of a stage: layers times the slowdown of its member


class Aftermath(NamedTuple):
    dropped_layers: tuple[int, ...]
    freed_bytes: int
    block_count: int  # KV blocks after the exchange


Kinds = tuple[tuple[MemberKind, int], ...]  # each kind with its number of members, in order
Reach = list[list[int]]  # largest last layer of a stage, by kind and first layer


class Splitter:
    """Splitter for one model. Results that depend only on kinds of members are cached."""

    def __init__(self, model: ModelShape, tolerance: SplitTolerance | None = None) -> None:
        self.model = model
        self.tolerance = tolerance or SplitTolerance()
        self._searches: dict[Kinds, _Search] = {}
        self._bounds: dict[tuple[Kinds, float], SplitBounds | None] = {}
        self._aftermath: dict[tuple[tuple[int, ...], int, int, int, int], Aftermath] = {}
        self._blocks: dict[tuple[int, int], list[int]] = {}

    def split(
        self, candidates: Sequence[SplitMember], toward_memory: float | None = None, at_least: int = 0
    ) -> list[SplitStage] | None:
        """Return the stages in pipeline order, or None if these members cannot form a pipeline.

        Args:
            candidates: The future members.
            toward_memory: From the balanced split (0.0) to the one with most memory (1.0). None: as needed for
                `at_least`.
            at_least: Minimum blocks of the smallest stage.
        """
        if len(candidates) > self.model.layer_count:
            return None
        kinds = kinds_of([c.instance for c in candidates])
        wanted = TOWARD_MEMORY if toward_memory is None else (toward_memory,)
        bounds = None
        for toward in wanted if is_unlike(kinds) else wanted[:1]:
            bounds = self.bounds(kinds, toward)
            if bounds is None:
                return None
            if bounds.block_count >= at_least:
                break
        if bounds is None:
            return None
        if self._are_whole(kinds):
            most = {_memory(kind): reach[0] for (kind, _), reach in zip(kinds, bounds.reach, strict=True)}
            ordered = sorted(candidates, key=lambda c: (-c.kv_bytes_per_layer, c.instance.worker_id))
            return _deal_out(ordered, self.model.layer_count, [most[_memory(c.instance)] for c in ordered])
        ordered = sorted(candidates, key=lambda c: (_kind(c.instance), -c.kv_bytes_per_layer, c.instance.worker_id))
        return _cheapest_exchange(ordered, kinds, bounds.reach, self.model)

    def bounds(self, kinds: Kinds, toward_memory: float) -> SplitBounds | None:
        """Return the bounds of a pipeline of these members; None if there is none."""
        key = (kinds, toward_memory)
        if key not in self._bounds:
            self._bounds[key] = self._bounds_of(kinds, toward_memory)
        return self._bounds[key]

    def _bounds_of(self, kinds: Kinds, toward_memory: float) -> SplitBounds | None:
        if kinds not in self._searches:
            self._searches[kinds] = self._search(kinds)
        search = self._searches[kinds]
        if search.even is None:
            return None
        longest = search.even + _ROUNDING
        if toward_memory and is_unlike(kinds):
            longest += (max(search.even, search.most) - search.even) * toward_memory
        enough = max(1, int(search.most_blocks(longest) * (1.0 - self.tolerance.capacity)))
        reach = self._reach(kinds, longest, enough)
        layers = [max([last - first for first, last in enumerate(row)]) for row in reach]
        longest = max(most * kind.slowness for most, (kind, _) in zip(layers, kinds, strict=True))
        return SplitBounds(reach, enough, longest)

    def _search(self, kinds: Kinds) -> "_Search":
        layer_count = self.model.layer_count
        speeds = {kind.slowness for kind, _ in kinds}
        times = sorted([layers * slowness for slowness in speeds for layers in range(1, layer_count + 1)])
        if not self._are_whole(kinds):
            most = max(kind.budget_bytes for kind, _ in kinds) // self.model.block_bytes + 1

            def completes(longest: float, blocks: int) -> bool:
                return _completes(kinds, self._reach(kinds, longest, blocks), layer_count)

            return _Search(times, range(1, most + 1), completes, self.tolerance)
        members = [(self._blocks_of(kind), kind.slowness, count) for kind, count in kinds]

        def complete(longest: float, blocks: int) -> bool:
            total = 0
            for table, slowness, count in members:
                layers = bisect_right(table, -blocks)
                if layers > longest / slowness:
                    layers = int(longest / slowness)
                if not layers:
                    return False
                total += layers * count
            return total >= layer_count

        # The smallest stage's capacity is the capacity of one member with some number of layers.
        blocks = sorted([-count for table, _, _ in members for count in table if count < 0])
        return _Search(times, blocks, complete, self.tolerance)

    def _are_whole(self, kinds: Kinds) -> bool:
        """True if all members hold and execute every layer, and layers are equal. This is the usual case, which needs
        no search.
        """
        layer_count = self.model.layer_count
        return self.model.is_uniform and all(kind.last_layer - kind.first_layer == layer_count for kind, _ in kinds)

    def _reach(self, kinds: Kinds, longest: float, blocks: int) -> "Reach":
        """Return the largest last layer of a stage on held layers, by kind and first layer, within the bounds of time
        and blocks, or the first layer itself if there is none. For full replicas this is computed only for the first
        layer.
        """
        if self._are_whole(kinds):
            return [[min(bisect_right(self._blocks_of(k), -blocks), int(longest / k.slowness))] for k, _ in kinds]
        return [_reach(kind, self.model.at(kind.extent_bytes), longest, blocks) for kind, _ in kinds]

    def _blocks_of(self, kind: MemberKind) -> list[int]:
        """Return the negated KV blocks for 1, 2 ... layers, which ascend."""
        key = kind.budget_bytes, kind.extent_bytes
        if key not in self._blocks:
            own, layers = self.model.at(kind.extent_bytes), range(1, self.model.layer_count + 1)
            self._blocks[key] = [-own.block_count(kind.budget_bytes, 0, count) for count in layers]
        return self._blocks[key]

    def aftermath(self, instance: InstanceState, first_layer: int, last_layer: int) -> Aftermath:
        """Return a member's memory when it keeps only these layers."""
        key = (instance.held_layers, instance.budget_bytes, instance.extent_bytes, first_layer, last_layer)
        model = self.model.at(instance.extent_bytes)
        if key not in self._aftermath:
            kept_extents = model.extents_before[last_layer] - model.extents_before[first_layer]
            freed_bytes = model.occupied_bytes(instance.held_layers) - kept_extents * model.extent_bytes
            self._aftermath[key] = Aftermath(
                tuple(layer for layer in instance.held_layers if not first_layer <= layer < last_layer),
                freed_bytes,
                model.block_count(instance.budget_bytes, first_layer, last_layer),
            )
        return self._aftermath[key]

    def is_feasible(self, instances: Sequence[InstanceState]) -> bool:
        return len(instances) <= self.model.layer_count and self.bounds(kinds_of(instances), 0.0) is not None


class _Search:
    """Searches for feasible stages of members of some kinds."""

    def __init__(
        self,
        times: Sequence[float],
        blocks: Sequence[int],
        completes: Callable[[float, int], bool],
        tolerance: SplitTolerance,
    ) -> None:
        """Prepare a search.

        Args:
            times: Possible stage times, ascending.
            blocks: Possible KV blocks of the smallest stage, ascending.
            completes: Returns True if the members, in some order, can cover all layers within a stage time and blocks.
            tolerance: Maximum difference of the stages of a balanced split.
        """
        self._times, self._blocks, self._completes = times, blocks, completes
        self._tolerance = tolerance

    @cached_property
    def even(self) -> float | None:
        """The longest stage of a balanced split; None: there is no split."""
        times = self._times
        shortest = _first_true(len(times), lambda i: self._completes(times[i], 1))
        return self._tolerance.longest(times[shortest]) if shortest < len(times) else None

    @cached_property
    def most(self) -> float:
        """The longest stage of the split with the largest minimum of KV."""
        times, blocks = self._times, self.most_blocks(self._times[-1])
        return times[_first_true(len(times) - 1, lambda i: self._completes(times[i], blocks))]

    def most_blocks(self, longest: float) -> int:
        """Return the most KV blocks that every stage can have if none takes longer than `longest`; 0: no such split."""
        blocks = self._blocks
        count = _first_true(len(blocks), lambda i: not self._completes(longest, blocks[i]))
        return blocks[count - 1] if count else 0


def kinds_of(instances: Sequence[InstanceState]) -> Kinds:
    if len(instances) == 2:  # a shortcut for the usual case
        first, last = _kind(instances[0]), _kind(instances[1])
        return ((first, 2),) if first == last else ((first, 1), (last, 1)) if first < last else ((last, 1), (first, 1))
    return tuple(sorted(Counter(map(_kind, instances)).items()))


def is_unlike(kinds: Kinds) -> bool:
    """True if members differ in memory or speed."""
    return len(kinds) > 1 and len({_memory(kind) for kind, _ in kinds}) > 1


def _memory(one: MemberKind | InstanceState) -> tuple[int, int, float]:
    """Return the budget, extent size and slowdown of a member."""
    return one.budget_bytes, one.extent_bytes, one.slowness


def _kind(i: InstanceState) -> MemberKind:
    return MemberKind(i.held_layers, i.budget_bytes, i.first_layer, i.last_layer, i.extent_bytes, i.slowness)


def _free_extents(kind: MemberKind, model: ModelShape) -> int:
    """Return the extents of a stage for layers and their KV."""
    return kind.budget_bytes // model.extent_bytes - -(-model.other_parameter_bytes // model.extent_bytes)


def _first_true(count: int, holds: Callable[[int], bool]) -> int:
    """Return the first number below `count` for which a monotonic condition holds, or `count`."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _reach(kind: MemberKind, own: ModelShape, longest: float, blocks: int) -> list[int]:
    extents_per_layer = -(-blocks * own.block_bytes // own.extent_bytes)
    needs = [extents + extents_per_layer * layer for layer, extents in enumerate(own.extents_before)]
    free, most = _free_extents(kind, own), int(longest / kind.slowness)
    held = set(kind.held_layers)
    held_end, row = own.layer_count, [0] * own.layer_count
    for layer in range(own.layer_count - 1, -1, -1):
        if layer not in held:
            held_end = row[layer] = layer
            continue
        row[layer] = max(layer, min(held_end, layer + most, bisect_right(needs, needs[layer] + free) - 1))
    return row


def _completes(kinds: Kinds, reach: Reach, layer_count: int) -> bool:
    """True if an order of all members exists in which their stages cover all layers."""
    ends = {(0,) * len(kinds): 1}  # by members used; a bit for each possible last layer of the stages so far
    for chosen in _turns(kinds):
        longer: dict[tuple[int, ...], int] = {}
        for used, bits in ends.items():
            for k in chosen:
                if used[k] == kinds[k][1]:
                    continue
                after = 0
                for first in _bits(bits, layer_count):
                    after |= (1 << reach[k][first] + 1) - (1 << first + 1)
                if after:
                    key = (*used[:k], used[k] + 1, *used[k + 1 :])
                    longer[key] = longer.get(key, 0) | after
        ends = longer
    return any(bits >> layer_count & 1 for bits in ends.values())


def _bits(bits: int, layer_count: int) -> list[int]:
    return [layer for layer in range(layer_count) if bits >> layer & 1]


def _turns(kinds: Sequence[tuple[tuple[object, ...], int]]) -> list[Sequence[int]]:
    """Return the kinds allowed at each stage: all kinds or, if the search is too large, one kind in order of held
    layers.
    """
    stages = sum(count for _, count in kinds)
    if prod(count + 1 for _, count in kinds) <= STATE_LIMIT:
        return [range(len(kinds))] * stages
    return [(k,) for k, (_, count) in enumerate(kinds) for _ in range(count)]


def _deal_out(ordered: Sequence[SplitMember], layer_count: int, most: Sequence[int]) -> list[SplitStage]:
    """Return the stages of members that all hold every layer. Those with most KV take as many layers as allowed."""
    counts: list[int] = []
    left = layer_count
    loads = [candidate.kv_bytes_per_layer for candidate in ordered]
    while len(counts) < len(ordered):
        first = len(counts)
        limits = most[first : first + loads.count(loads[first])]  # equally loaded members share evenly
        behind = len(ordered) - first - len(limits)
        here = min(sum(limits), left - behind)
        counts += _evenly(here, limits) if len(limits) > 1 else [here]
        left -= here
    stages: list[SplitStage] = []
    first = 0
    for candidate, count in zip(ordered, counts, strict=True):
        stages.append(SplitStage(candidate, first, first + count))
        first += count
    return stages


def _evenly(total: int, limits: Sequence[int]) -> list[int]:
    level = _first_true(max(limits), lambda i: sum(min(limit, i + 1) for limit in limits) > total)
    shares = [min(limit, level) for limit in limits]
    left = total - sum(shares)
    for i, limit in enumerate(limits):
        if left and limit > level:
            shares[i], left = shares[i] + 1, left - 1
    return shares


class _Path(NamedTuple):
    """A best partial solution for (members used, last layer), compared by its first fields."""

    kept_bytes: float  # negated bytes of KV that stay in place, so that less is better
    uneven: int
    leader_bytes: float  # negated KV of the leader per layer
    stages: tuple[tuple[int, int, int], ...]  # kind, first layer, last layer


def _cheapest_exchange(
    ordered: Sequence[SplitMember], kinds: Kinds, reach: Reach, model: ModelShape
) -> list[SplitStage] | None:
    by_kind = {kind: k for k, (kind, _) in enumerate(kinds)}
    finer = Counter((_kind(c.instance), c.kv_bytes_per_layer) for c in ordered)
    if prod(count + 1 for count in finer.values()) <= STATE_LIMIT:
        groups = [(kind, load, count) for (kind, load), count in finer.items()]
    else:
        loads = Counter[MemberKind]()
        for c in ordered:
            loads[_kind(c.instance)] += c.kv_bytes_per_layer
        groups = [(kind, loads[kind] / count, count) for kind, count in kinds]
    path = _best_path(groups, [reach[by_kind[kind]] for kind, _, _ in groups], model.layer_count)
    return None if path is None else _name_members(ordered, groups, path)


def _best_path(groups: Sequence[tuple[MemberKind, float, int]], reach: Reach, layer_count: int) -> _Path | None:
    counts = tuple(count for _, _, count in groups)
    longest = [max(last - first for first, last in enumerate(row)) for row in reach]
    start = (0,) * len(groups)
    paths: dict[tuple[int, ...], dict[int, _Path]] = {start: {0: _Path(0.0, 0, 0.0, ())}}
    for chosen in _turns([((kind,), count) for kind, _, count in groups]):
        longer: dict[tuple[int, ...], dict[int, _Path]] = {}
        for used, ends in paths.items():
            for g in chosen:
                if used[g] == counts[g]:
                    continue
                kind, load, _ = groups[g]
                key = (*used[:g], used[g] + 1, *used[g + 1 :])
                # Maximum and minimum number of layers for the remaining members.
                behind = [count - n for count, n in zip(counts, key, strict=True)]
                least_end = layer_count - sum(n * longest[h] for h, n in enumerate(behind))
                last_end = layer_count - sum(behind)
                row = longer.setdefault(key, {})
                for first, path in ends.items():
                    for last in range(max(first + 1, least_end), min(reach[g][first], last_end) + 1):
                        kept = load * _overlap(first, last, kind)
                        uneven = path.uneven + (last - first) ** 2
                        leader = path.leader_bytes if first else -load
                        found = (path.kept_bytes - kept, uneven, leader)
                        if last not in row or found < row[last][:3]:
                            row[last] = _Path(*found, (*path.stages, (g, first, last)))
        paths = longer
    return paths.get(counts, {}).get(layer_count)


def _overlap(first: int, last: int, kind: MemberKind) -> int:
    return max(0, min(last, kind.last_layer) - max(first, kind.first_layer))


def _name_members(
    ordered: Sequence[SplitMember], groups: Sequence[tuple[MemberKind, float, int]], path: _Path
) -> list[SplitStage]:
    """Assign the ranges of each kind to its members, so that members with most KV keep most of their executed
    layers.
    """
    merged_loads = len({kind for kind, _, _ in groups}) == len(groups)
    stages: list[SplitStage] = []
    for g, (kind, load, _) in enumerate(groups):
        members = [c for c in ordered if _kind(c.instance) == kind and (merged_loads or c.kv_bytes_per_layer == load)]
        ranges = [(first, last) for h, first, last in path.stages if h == g]
        ranges.sort(key=lambda layers, kind=kind: (-_overlap(*layers, kind), layers))
        stages += [SplitStage(member, *layers) for member, layers in zip(members, ranges, strict=True)]
    return sorted(stages, key=lambda stage: stage.first_layer)
