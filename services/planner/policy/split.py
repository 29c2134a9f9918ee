"""The split of the layers over the members of one group: order of the stages and contiguous ranges.

A member can only execute what it still holds, so pipelines that merge restrict the choice. The answer is the best in
this order:

1. complete and feasible: every layer once, every member at least one layer, at least one KV block on every stage;
2. the longest stage has at most `balance_tolerance` more layers than in the most balanced split;
3. the smallest KV capacity of a stage, which is what admission counts with, is at most `capacity_tolerance` below the
   largest that 2 allows;
4. least KV to send (no parameters move: everybody keeps what it has); then the most even times; then the member with
   most KV leads, because then fewest sequences change hands.

Exact by dynamic programmes over (members used, last layer), where members with the same memory and layers count as
one kind. With more than `STATE_LIMIT` combinations of kinds the order of stages is fixed beforehand, by held layers
(for feasibility no restriction unless one member's layers lie strictly inside another's), and with more than
`STATE_LIMIT` combinations of kinds and loads 4 is decided kind by kind and then by load.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from services.planner.policy.snapshot import InstanceState, ModelShape

STATE_LIMIT = 256
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitTolerance:
    balance: float = 0.1
    capacity: float = 0.02

    def longest(self, layer_count: int) -> int:
        """Layers of a stage where `layer_count` would be the most balanced."""
        return int(layer_count * (1.0 + self.balance) + _ROUNDING)


class Candidate(NamedTuple):
    """A member to be, with the KV that it holds of running sequences."""

    instance: InstanceState
    kv_bytes_per_layer: int


class Stage(NamedTuple):
    candidate: Candidate
    first_layer: int
    last_layer: int


class Kind(NamedTuple):
    """Members that differ in nothing that feasibility, balance or capacity depend on."""

    held_layers: tuple[int, ...]
    budget_bytes: int
    first_layer: int  # executed today
    last_layer: int
    extent_bytes: int


class Aftermath(NamedTuple):
    dropped_layers: tuple[int, ...]
    freed_bytes: int
    block_count: int  # KV blocks, once the exchange is over


Kinds = tuple[tuple[Kind, int], ...]  # with the number of members of each, in order
Reach = list[list[int]]  # by kind and first layer: the largest last layer of a stage that begins there


class Splitter:
    """Splits for one model; what depends on kinds of members only is worked out once."""

    def __init__(self, model: ModelShape, tolerance: SplitTolerance | None = None) -> None:
        self.model = model
        self.tolerance = tolerance or SplitTolerance()
        self._bounds: dict[Kinds, Reach | None] = {}
        self._feasible: dict[Kinds, bool] = {}
        self._aftermath: dict[tuple[tuple[int, ...], int, int, int, int], Aftermath] = {}

    def split(self, candidates: Sequence[Candidate]) -> list[Stage] | None:
        """Stages in pipeline order, or None if these members cannot form a pipeline."""
        if len(candidates) > self.model.layer_count:
            return None
        alike = self._is_alike(candidates)
        if alike:
            ordered = sorted(candidates, key=lambda c: (-c.kv_bytes_per_layer, c.instance.worker_id))
            kinds: Kinds = ((_kind(ordered[0].instance), len(ordered)),)
        else:
            ordered = sorted(candidates, key=lambda c: (_kind(c.instance), -c.kv_bytes_per_layer, c.instance.worker_id))
            kinds = tuple(Counter(_kind(c.instance) for c in ordered).items())
        if kinds not in self._bounds:
            self._bounds[kinds] = _bounds(kinds, self.model, self.tolerance)
        bounds = self._bounds[kinds]
        if bounds is None:
            return None
        if alike:
            return _deal_out(ordered, self.model.layer_count, bounds[0][0])
        return _cheapest_exchange(ordered, kinds, bounds, self.model)

    def _is_alike(self, candidates: Sequence[Candidate]) -> bool:
        """Equal members that hold every layer, and equal layers: the usual case, which needs no search."""
        budget_bytes, extent_bytes = candidates[0].instance.budget_bytes, candidates[0].instance.extent_bytes
        return self.model.is_uniform and all(
            c.instance.last_layer - c.instance.first_layer == self.model.layer_count
            and c.instance.budget_bytes == budget_bytes
            and c.instance.extent_bytes == extent_bytes
            for c in candidates
        )

    def aftermath(self, instance: InstanceState, first_layer: int, last_layer: int) -> Aftermath:
        """What becomes of a member's memory when it keeps these layers only."""
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
        if len(instances) > self.model.layer_count:
            return False
        kinds = tuple(sorted(Counter(_kind(i) for i in instances).items()))
        if kinds not in self._feasible:
            reach = _reach(kinds, self.model, self.model.layer_count, 1)
            self._feasible[kinds] = _completes(kinds, reach, self.model.layer_count)
        return self._feasible[kinds]


def _kind(instance: InstanceState) -> Kind:
    return Kind(
        instance.held_layers, instance.budget_bytes, instance.first_layer, instance.last_layer, instance.extent_bytes
    )


def _free_extents(kind: Kind, model: ModelShape) -> int:
    """Extents that a stage has for layers and their KV."""
    return kind.budget_bytes // model.extent_bytes - -(-model.other_parameter_bytes // model.extent_bytes)


def _bounds(kinds: Kinds, model: ModelShape, tolerance: SplitTolerance) -> Reach | None:
    """How far a stage may extend under conditions 1 to 3, or None if there is no split at all."""
    layer_count, least = model.layer_count, 1  # block of KV in each layer
    if len(kinds) == 1 and kinds[0][0].last_layer - kinds[0][0].first_layer == layer_count and model.is_uniform:
        stages = kinds[0][1]
        size = -(-layer_count // stages)
        own = model.at(kinds[0][0].extent_bytes)
        per_layer = (_free_extents(kinds[0][0], own) - own.extents_before[size]) // size
        per_layer = per_layer * own.extent_bytes // own.block_bytes
        enough = max(least, int(per_layer * (1.0 - tolerance.capacity)))
        return _reach(kinds, model, tolerance.longest(size), enough) if per_layer >= least else None
    if not _completes(kinds, _reach(kinds, model, layer_count, least), layer_count):
        return None
    shorter = _first_true(layer_count - 1, lambda i: _completes(kinds, _reach(kinds, model, 1 + i, least), layer_count))
    longest = tolerance.longest(1 + shorter)
    # Blocks: the most that every stage can give to each of its layers.
    most = max(kind.budget_bytes for kind, _ in kinds) // model.block_bytes + 1
    too_many = _first_true(
        most - least, lambda i: not _completes(kinds, _reach(kinds, model, longest, least + 1 + i), layer_count)
    )
    enough = max(least, int((least + too_many) * (1.0 - tolerance.capacity)))
    return _reach(kinds, model, longest, enough)


def _first_true(count: int, holds: Callable[[int], bool]) -> int:
    """The first number below `count` for which a condition holds that goes on holding, or `count`."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _reach(kinds: Kinds, model: ModelShape, longest: int, blocks: int) -> Reach:
    """How far a stage may go on layers that it holds, by kind and first layer: at most so many, and leaving so much
    memory for the KV of each of its layers. The first layer itself where there is no such stage."""
    reach: Reach = []
    for kind, _ in kinds:
        own = model.at(kind.extent_bytes)
        extents_per_layer = -(-blocks * own.block_bytes // own.extent_bytes)
        needs = [extents + extents_per_layer * layer for layer, extents in enumerate(own.extents_before)]
        free = _free_extents(kind, own)
        held = set(kind.held_layers)
        held_end, row = model.layer_count, [0] * model.layer_count
        for layer in range(model.layer_count - 1, -1, -1):
            if layer not in held:
                held_end = row[layer] = layer
                continue
            row[layer] = max(layer, min(held_end, layer + longest, bisect_right(needs, needs[layer] + free) - 1))
        reach.append(row)
    return reach


def _completes(kinds: Kinds, reach: Reach, layer_count: int) -> bool:
    """Whether all members can stand in some order so that their stages make up all layers."""
    ends = {(0,) * len(kinds): 1}  # by members used: a bit for each layer at which the stages so far can end
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
    """The kinds that may stand at each stage: any, or, where that is too much to try, in order of held layers."""
    stages = sum(count for _, count in kinds)
    if prod(count + 1 for _, count in kinds) <= STATE_LIMIT:
        return [range(len(kinds))] * stages
    return [(k,) for k, (_, count) in enumerate(kinds) for _ in range(count)]


def _deal_out(ordered: Sequence[Candidate], layer_count: int, longest: int) -> list[Stage]:
    """Equal layers, equal members that hold all of them: those with most KV take as many layers as conditions allow."""
    counts: list[int] = []
    left = layer_count
    loads = [candidate.kv_bytes_per_layer for candidate in ordered]
    while len(counts) < len(ordered):
        members = loads.count(loads[len(counts)])  # as loaded as this one: they share evenly
        behind = len(ordered) - len(counts) - members
        here = min(members * longest, left - behind)
        size, larger = divmod(here, members)
        counts += [size + 1] * larger + [size] * (members - larger)
        left -= here
    stages: list[Stage] = []
    first = 0
    for candidate, count in zip(ordered, counts, strict=True):
        stages.append(Stage(candidate, first, first + count))
        first += count
    return stages


class _Path(NamedTuple):
    """The best way to some (members used, last layer); compared by its first fields."""

    kept_bytes: float  # negative: less is better
    uneven: int
    leader_bytes: float  # negative
    stages: tuple[tuple[int, int, int], ...]  # kind, first layer, last layer


def _cheapest_exchange(
    ordered: Sequence[Candidate], kinds: Kinds, reach: Reach, model: ModelShape
) -> list[Stage] | None:
    by_kind = {kind: k for k, (kind, _) in enumerate(kinds)}
    finer = Counter((_kind(c.instance), c.kv_bytes_per_layer) for c in ordered)
    if prod(count + 1 for count in finer.values()) <= STATE_LIMIT:
        groups = [(kind, load, count) for (kind, load), count in finer.items()]
    else:
        loads = Counter[Kind]()
        for c in ordered:
            loads[_kind(c.instance)] += c.kv_bytes_per_layer
        groups = [(kind, loads[kind] / count, count) for kind, count in kinds]
    path = _best_path(groups, [reach[by_kind[kind]] for kind, _, _ in groups], model.layer_count)
    return None if path is None else _name_members(ordered, groups, path)


def _best_path(groups: Sequence[tuple[Kind, float, int]], reach: Reach, layer_count: int) -> _Path | None:
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
                # What the members that are left can still take at most, and take at least.
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


def _overlap(first: int, last: int, kind: Kind) -> int:
    return max(0, min(last, kind.last_layer) - max(first, kind.first_layer))


def _name_members(ordered: Sequence[Candidate], groups: Sequence[tuple[Kind, float, int]], path: _Path) -> list[Stage]:
    """Members of a kind take its ranges: most KV where most of the layers are that they execute today."""
    merged_loads = len({kind for kind, _, _ in groups}) == len(groups)
    stages: list[Stage] = []
    for g, (kind, load, _) in enumerate(groups):
        members = [c for c in ordered if _kind(c.instance) == kind and (merged_loads or c.kv_bytes_per_layer == load)]
        ranges = [(first, last) for h, first, last in path.stages if h == g]
        ranges.sort(key=lambda layers, kind=kind: (-_overlap(*layers, kind), layers))
        stages += [Stage(member, *layers) for member, layers in zip(members, ranges, strict=True)]
    return sorted(stages, key=lambda stage: stage.first_layer)
