"""Instances that could serve but do not, and the fluid model's group kinds with some of them (pure)."""

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ballast.common.traffic import Traffic
from services.planner.policy.candidates import NOTHING, Candidate, Candidates
from services.planner.policy.fluid_model import GroupKind
from services.planner.policy.snapshot import GroupState, Snapshot, columns_of

FEWER = Candidate("one less", added=-1)
_PEAK_S = 60.0
_MOST_LEARNT = 1e6  # limit on learned numbers of instances or seconds
_SPAN_S, _SPANS, _LEARNS = (
    30.0,
    10,
    2,
)  # jumps are remembered per span: duration of a span, number of spans, and spans needed before any result


@dataclass(frozen=True, slots=True)
class Reserve:
    """Lone instances that do not serve, and the demand that may need them."""

    leaving: tuple[GroupState, ...] = ()  # most loaded first; cancelling a leave is immediate
    parked_count: int = 0
    waking_s: tuple[float, ...] = ()  # seconds until each waking instance serves
    wake_s: float = 0.0  # time to wake another instance
    peak: float = 0.0  # maximum memory demand of the last minute, in instances
    recent_peak_count: int = 0  # maximum number of arrivals within RECENT_S in the last minute
    gain: float = 1.0  # factor of KV capacity if two instances share one copy of the parameters; 1: not allowed
    jump: float = math.inf  # possible rise of demand before an instance serves, in instances; infinity: unknown

    @property
    def count(self) -> int:
        """Number of instances that could be woken or kept."""
        return len(self.leaving) + self.parked_count


def more(reserve: Reserve) -> list[Candidate]:
    """Return the candidates in which 1, 2, 4, ... or all instances of the reserve serve."""
    counts = {min(1 << doublings, reserve.count) for doublings in range(reserve.count.bit_length() + 1)} - {0}
    return [Candidate(f"{count} more", added=count) for count in sorted(counts)]


def home_tokens(snapshot: Snapshot) -> float:
    """Return the KV tokens of an instance with all layers: the mean of those that serve alone or, if there are none,
    computed from memory sizes.
    """
    columns, model = columns_of(snapshot.groups), snapshot.model
    alone = [blocks for blocks, stages in zip(columns.blocks, columns.stages, strict=True) if stages == 1]
    if alone:
        return max(1.0, sum(alone) / len(alone) * model.block_tokens)
    budget, extent, _ = max(columns.members)
    return max(1.0, float(model.at(extent).block_count(budget, 0, model.layer_count) * model.block_tokens))


def pair_gain(snapshot: Snapshot) -> float:
    """Return the factor by which KV capacity grows if two instances hold one copy of the parameters together."""
    model = snapshot.model
    if model.layer_count < 2:
        return 1.0
    budget, extent, _ = max(columns_of(snapshot.groups).members)
    blocks = [model.at(extent).block_count(budget, 0, layers) for layers in (model.layer_count, model.layer_count // 2)]
    return max(1.0, blocks[1] / 2 / max(1, blocks[0]))


def wanted_memory(snapshot: Snapshot, reserve: Reserve, traffic: Traffic) -> float:
    """Return the memory demand of running and waiting requests, in instances."""
    columns, leaving = columns_of(snapshot.groups), columns_of(reserve.leaving)
    blocks = sum([*columns.used, *columns.waiting, *leaving.used, *leaving.waiting])
    return (blocks * snapshot.model.block_tokens + traffic.queued_tokens) / home_tokens(snapshot)


@dataclass(frozen=True, slots=True)
class Learnt:
    """Data about parking that a planner has learned, for the next planner."""

    jumps: tuple[float, ...] = ()  # the largest rise of demand in each span, in instances; newest last
    dwell_s: float = 0.0

    @property
    def is_believable(self) -> bool:
        return all(0.0 <= value <= _MOST_LEARNT for value in (*self.jumps, self.dwell_s))


class Jumps:
    """Learns the size of bursts: the maximum of the last minute, and the largest rise within a short time."""

    def __init__(self) -> None:
        self._seen = deque[tuple[float, float, int]]()  # samples of the last minute: (time, instances, requests)
        self._largest = deque[float](maxlen=_SPANS)  # largest rise of demand in each span
        self._span_ends_s = -math.inf

    @property
    def known(self) -> bool:
        """True if demand has been observed for long enough to know its jumps."""
        return len(self._largest) > _LEARNS

    @property
    def largest(self) -> tuple[float, ...]:
        """Return the largest rise of each span, newest last."""
        return tuple(self._largest)

    def begin(self, before: Sequence[float]) -> None:
        """Continue from the rises that the previous planner observed."""
        self._largest = deque([*before, *self._largest], maxlen=_SPANS)

    def look(self, reserve: Reserve, wanted: float, recent_count: int, within_s: float, at_s: float) -> Reserve:
        """Record the demand, and return the reserve with the statistics of bursts.

        Args:
            wanted: Memory demand, in instances.
            recent_count: Arrivals within RECENT_S.
            within_s: A rise within this time is a jump.
        """
        while self._seen and self._seen[0][0] < at_s - _PEAK_S:
            self._seen.popleft()
        self._seen.append((at_s, wanted, recent_count))
        if at_s >= self._span_ends_s:
            self._span_ends_s = at_s + _SPAN_S
            self._largest.append(0.0)
        rise = wanted - min([before for since_s, before, _ in self._seen if since_s >= at_s - within_s])
        self._largest[-1] = max(self._largest[-1], rise)
        return replace(
            reserve,
            jump=max(self._largest) if self.known else math.inf,
            peak=max([before for _, before, _ in self._seen]),
            recent_peak_count=max([count for _, _, count in self._seen]),
        )


def kinds(candidates: Candidates, snapshot: Snapshot, reserve: Reserve, added: int, places: int) -> list[GroupKind]:
    """Return the group kinds with `added` more instances of the reserve, leaving ones first, or (-1) with one fewer. A
    leaving instance has no room and completes its requests. A waking one has room and starts later.

    Args:
        places: Maximum running requests of an instance.
    """
    home = home_tokens(snapshot)
    found = candidates.kinds(NOTHING)
    if added < 0:
        found = _one_less(found, home, places)
    undone = max(0, min(added, len(reserve.leaving)))
    found += _loaded(snapshot, reserve.leaving[:undone], home, places)
    found += _loaded(snapshot, reserve.leaving[undone:], 0.0, places)
    stalls = Counter([*reserve.waking_s, *[reserve.wake_s] * max(0, added - undone)])
    return found + [
        GroupKind(
            stages=1,
            group_count=count,
            capacity_tokens=count * home,
            running_count=0.0,
            used_tokens=0.0,
            max_running_count=float(count * places),
            stall_s=stall_s,
        )
        for stall_s, count in sorted(stalls.items())
    ]


def _one_less(found: Sequence[GroupKind], home: float, places: int) -> list[GroupKind]:
    """Return the kinds with one fewer instance of the lone kind that has most instances. If it was the only one, its
    requests move to the next kind.
    """
    alone = sorted((kind for kind in found if kind.stages == 1), key=lambda kind: kind.group_count)
    largest = alone[-1]
    if largest.group_count > 1:
        left = replace(
            largest,
            group_count=largest.group_count - 1,
            capacity_tokens=largest.capacity_tokens - home,
            max_running_count=largest.max_running_count - places,
        )
        return [left if kind is largest else kind for kind in found]
    heir = alone[-2]
    fuller = replace(
        heir,
        running_count=heir.running_count + largest.running_count,
        used_tokens=heir.used_tokens + largest.used_tokens,
        uncomputed_tokens=heir.uncomputed_tokens + largest.uncomputed_tokens,
    )
    return [fuller if kind is heir else kind for kind in found if kind is not largest]


def _loaded(snapshot: Snapshot, groups: Sequence[GroupState], each_tokens: float, places: int) -> list[GroupKind]:
    if not groups:
        return []
    columns = columns_of(groups)
    used = float(sum(columns.used) * snapshot.model.block_tokens)
    return [
        GroupKind(
            stages=1,
            group_count=len(groups),
            capacity_tokens=max(used, len(groups) * each_tokens),
            running_count=float(sum(columns.running)),
            used_tokens=used,
            uncomputed_tokens=float(sum(columns.uncomputed)),
            max_running_count=float(len(groups) * places),
        )
    ]
