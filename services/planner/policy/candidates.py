"""Candidate layouts for an overload: which groups merge, and the fluid model's input for them (pure).

To add a candidate, yield it from `Candidates.all`. Groups of equal depth on machines of similar speed form a pool,
ordered by load. A candidate merges groups of one or two pools, and each merge combines the most loaded groups with the
least loaded ones. All sums are differences of prefix sums, so a candidate costs as much for a thousand groups as for
two.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from operator import add
from typing import NamedTuple

from ballast.common.ids import GroupId
from services.planner.policy.fluid_model import GroupKind
from services.planner.policy.merged import group_plan
from services.planner.policy.snapshot import Columns, GroupState, ModelShape, Snapshot, columns_of
from services.planner.policy.split import TOWARD_MEMORY, Splitter, SplitTolerance, kinds_of

MOST_STAGES = 8  # maximum stages of a group formed by a comparison
_LIKE_SPEED = 1.5  # machine speeds are rounded to powers of this
_LIKE_MEMORY = 1.5  # groups with more than this multiple of the next smaller number of blocks count as another size
# A drop stalls moved sequences for this time plus the time to exchange their KV over a 200 Gbps NIC, both directions at
# once.
_STALL_S, _EXCHANGED_BYTES_PER_S = 0.3, 25e9
# As in `services.worker.policy.leaving`: a draining pipeline runs for DISSOLVES_S, and until its blocks take at most
# ROOM_SHARE of the members' memory. It reserves KEPT_SHARE of its blocks for growth, and releases memory in KEPT_STEPS.
DISSOLVES_S, ROOM_SHARE, KEPT_SHARE, KEPT_STEPS = 10.0, 0.75, 0.5, 8
_MOST_LIVES, _HALVINGS = 16.0, 12  # horizon for draining as a multiple of the mean remaining time of running requests
_SAMPLED = 8  # number of merges of unlike members whose capacity is computed; others are assumed to have its mean


@dataclass(frozen=True, slots=True)
class Running:
    """Running and waiting requests of a snapshot's groups."""

    max_running_count: int  # maximum for an instance that does not report its own
    waiting_count: int  # requests in the workers' waiting queues


class _Sums(NamedTuple):
    """Sums over some groups."""

    block_count: int = 0
    running_count: int = 0
    used_block_count: int = 0
    uncomputed_tokens: int = 0
    max_running_count: int = 0

    def plus(self, other: "_Sums", sign: int = 1) -> "_Sums":
        return _Sums(*(mine + sign * its for mine, its in zip(self, other, strict=True)))


class Pool:
    """Groups of equal depth on similar machines, fullest first, with prefix sums over them."""

    def __init__(self, stages: int, groups: Sequence[GroupState], running: Running, size: str = "") -> None:
        """`size`: describes the memory of its groups, if others have more or less."""
        self.stages = stages
        self.size = size
        self.groups = groups
        self.columns = columns = columns_of(groups)
        self.slowness = 1.0
        if groups and _differ_in_speed(columns):
            self.slowness = math.fsum(map(_slowness, groups)) / len(groups)
        self.order = sorted(range(len(groups)), key=columns.group_ids.__getitem__)
        loads = list(map(add, columns.used, columns.waiting))
        full = [load / blocks if blocks else math.inf for load, blocks in zip(loads, columns.blocks, strict=True)]
        self.order.sort(key=full.__getitem__, reverse=True)  # stable sort: ties stay sorted by name
        places = [most or running.max_running_count * stages for most in columns.max_running]
        summed = (columns.blocks, columns.running, columns.used, columns.uncomputed, places)  # in the order of `_Sums`
        self._sums = [list(accumulate(map(column.__getitem__, self.order), initial=0)) for column in summed]

    def __len__(self) -> int:
        return len(self.order)

    def between(self, first: int, last: int) -> _Sums:
        """Sums over the groups [first, last) in order of load."""
        return _Sums(*[column[last] - column[first] for column in self._sums])

    def kind(self, sums: _Sums, group_count: int, block_tokens: int) -> GroupKind:
        return GroupKind(
            stages=self.stages,
            group_count=group_count,
            capacity_tokens=float(sums.block_count * block_tokens),
            running_count=float(sums.running_count),
            used_tokens=float(sums.used_block_count * block_tokens),
            uncomputed_tokens=float(sums.uncomputed_tokens),
            max_running_count=float(sums.max_running_count),
            slowness=self.slowness,
        )

    @property
    def label(self) -> str:
        """Description with the slowdown of its machines, if that is not 1, and the size of their memory."""
        return (f" {self.slowness:.1f} x as slow" if self.slowness != 1.0 else "") + self.size

    def by_size(self, running: Running) -> "list[Pool]":
        """Return this pool or, if memories differ greatly, one pool of the groups with little memory and one of those
        with much, because the small groups fill up first and gain most by merging with each other.
        """
        blocks = self.columns.blocks
        if len(self.columns.members) == 1:
            return [self]
        ratio, limit = max(((b / max(1, a), b) for a, b in pairwise(sorted(set(blocks)))), default=(0.0, 0))
        if ratio <= _LIKE_MEMORY:
            return [self]
        parts = [[i for i, count in enumerate(blocks) if (count >= limit) is large] for large in (False, True)]
        names = (" of little memory", " of much memory")
        return [
            Pool(self.stages, [self.groups[i] for i in p], running, name) for p, name in zip(parts, names, strict=True)
        ]


def pools_of(groups: Sequence[GroupState], running: Running) -> list[Pool]:
    columns = columns_of(groups)
    stages, by_speed = set(columns.stages), _differ_in_speed(columns)
    if not by_speed and len(stages) == 1:
        return [Pool(stages.pop(), groups, running)]
    alike: dict[int, dict[int, list[GroupState]]] = {}
    for group in groups:
        speed = round(math.log(_slowness(group), _LIKE_SPEED)) if by_speed else 0
        alike.setdefault(len(group.members), {}).setdefault(speed, []).append(group)
    return [
        Pool(stages, pooled, running)
        for stages, by_speed in sorted(alike.items())
        for pooled in _no_loners([of for _, of in sorted(by_speed.items())])
    ]


def _differ_in_speed(columns: Columns) -> bool:
    return any(slowness != 1.0 for *_, slowness in columns.members)


def _slowness(group: GroupState) -> float:
    """Slowdown of the slowest stage."""
    return max([member.slowness for member in group.members])


def _no_loners(classes: Sequence[list[GroupState]]) -> list[list[GroupState]]:
    """Return the speed classes, with lone machines added to the largest class, because otherwise they could not be
    merged.
    """
    many = [groups for groups in classes if len(groups) > 1]
    loners = [group for groups in classes if len(groups) == 1 for group in groups]
    if not loners:
        return many
    largest = max(many, key=len) if many else loners
    return [[*groups, *loners] if groups is largest else groups for groups in many] or [loners]


@dataclass(frozen=True, slots=True)
class _PoolShare:
    """A pool's part in several merges. Each merge has `heavy` of its most loaded and `light` of its least loaded
    groups.
    """

    pool: Pool
    heavy: int
    light: int
    heavy_from: int = 0  # number of most loaded groups that other merges of the candidate take
    light_from: int = 0

    @property
    def size(self) -> int:
        return self.heavy + self.light

    def sums(self, merge_count: int) -> _Sums:
        first, last = self.heavy_from, len(self.pool) - self.light_from
        heavy = self.pool.between(first, first + self.heavy * merge_count)
        return heavy.plus(self.pool.between(last - self.light * merge_count, last))

    def of(self, number: int, merge_count: int) -> list[int]:
        """Return the pool indices of the groups of merge `number`. The first merge combines the fullest with the
        emptiest groups.
        """
        places = [self.heavy_from + number + merge_count * i for i in range(self.heavy)]
        places += [-1 - self.light_from - number - merge_count * i for i in range(self.light)]
        return [self.pool.order[place] for place in places]


@dataclass(frozen=True, slots=True)
class _Merges:
    """A number of equal merges."""

    count: int
    shares: tuple[_PoolShare, ...]

    @property
    def size(self) -> int:
        """Groups per merge."""
        return sum(share.size for share in self.shares)

    @property
    def stages(self) -> int:
        return sum(share.pool.stages * share.size for share in self.shares)

    def sums(self) -> _Sums:
        sums = _Sums()
        for share in self.shares:
            sums = sums.plus(share.sums(self.count))
        return sums

    def merge(self, number: int) -> list[GroupState]:
        return [share.pool.groups[i] for share in self.shares for i in share.of(number, self.count)]

    def ids(self, number: int) -> tuple[GroupId, ...]:
        return tuple([share.pool.columns.group_ids[i] for share in self.shares for i in share.of(number, self.count)])


@dataclass(frozen=True, slots=True)
class Candidate:
    """A candidate layout, as merges of the current groups. Without merges it is the current layout."""

    name: str
    parts: tuple[_Merges, ...] = ()
    added: int = 0  # number of added reserve instances; see `policy.reserve`
    toward_memory: float = 0.0  # split of layers over unlike members; see `Splitter.split`

    @property
    def change_count(self) -> int:
        """Decrease in the number of groups."""
        return sum(part.count * (part.size - 1) for part in self.parts)

    @property
    def merges(self) -> tuple[tuple[GroupId, ...], ...]:
        """The groups of each merge."""
        return tuple([part.ids(i) for part in self.parts for i in range(part.count)])


NOTHING = Candidate("nothing")
_SPLITS = dict(zip(TOWARD_MEMORY, ("", ", half by memory", ", by memory"), strict=True))
_GAINS = 1.05  # minimum factor by which a split with longer stages must increase the KV capacity


class _Worth(NamedTuple):
    """Capacity and speed of pipelines."""

    block_count: int
    longest: float  # maximum over the members of layers times slowdown: the stage that sets the pace


class Candidates:
    """The candidates for a snapshot."""

    def __init__(self, snapshot: Snapshot, running: Running) -> None:
        self.model = snapshot.model
        self.pools = pools_of(snapshot.groups, running)
        self._sized_pools = [sized for pool in self.pools for sized in pool.by_size(running)]
        self._running = running
        self._splitter = Splitter(snapshot.model, SplitTolerance(capacity=0.0))
        self._groups = snapshot.groups
        self._worths: dict[tuple[_Merges, float], _Worth] = {}
        self._most_stages = min(MOST_STAGES, self.model.layer_count)

    def all(self) -> list[Candidate]:
        """Return all candidates: no change; some pairs and fours of single instances; all single instances in groups of
        two, of three and in one group, and the same groups of only those with little memory; pipelines merged with each
        other and with single instances.
        """
        found = {NOTHING.name: NOTHING}
        small = [pool for pool in self._sized_pools if pool.size and pool.stages == 1][:1]
        for candidate in (*self._of_lone_ones([*self.pools, *small]), *self._of_pipelines()):
            if candidate.name not in found:
                found |= {split.name: split for split in self._splits(candidate)}
        return list(found.values())

    def _splits(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yield splits of the candidate: with balanced stages, with the most memory, and in between, if they have more
        KV than now and differ enough.
        """
        unlike = any(len(share.pool.columns.members) > 1 for part in candidate.parts for share in part.shares)
        most = sum(part.sums().block_count for part in candidate.parts)
        for toward in TOWARD_MEMORY if unlike else TOWARD_MEMORY[:1]:
            blocks = sum(self._worth(part, toward).block_count for part in candidate.parts)
            if blocks >= most:
                yield replace(candidate, name=candidate.name + _SPLITS[toward], toward_memory=toward)
                most = blocks * _GAINS

    def _of_lone_ones(self, pools: Sequence[Pool]) -> Iterator[Candidate]:
        for pool in pools:
            there = len(pool)
            if pool.stages != 1:
                continue
            most = there // 2 if self._most_stages >= 2 else 0
            counts = range(1, most + 1) if most <= 4 else sorted({most >> halvings for halvings in range(4)} - {0})
            layouts = [[2] * count for count in counts]
            if there >= 4:
                layouts.append([4] * (there // 4))
            if there >= 3:
                layouts += [_even_sizes(there, size) for size in (2, 3, there)]
            yield from (_grouped(pool, sizes) for sizes in layouts if max(sizes) <= self._most_stages)

    def _of_pipelines(self) -> Iterator[Candidate]:
        """Yield pairs of groups of which at least one is a pipeline: as many pairs as possible and, for unlike pools,
        also a single pair.
        """
        for i, short in enumerate(self.pools):
            for long in self.pools[i:]:
                if long.stages == 1 or short.stages + long.stages > self._most_stages:
                    continue
                if long is short:
                    shares, counts = (_PoolShare(long, 1, 1),), {len(long) // 2} - {0}
                else:
                    shares, counts = (_PoolShare(long, 1, 0), _PoolShare(short, 0, 1)), {1, min(len(long), len(short))}
                label = long.label or short.label
                for count in sorted(counts):
                    merges = _Merges(count, shares)
                    if self._can_merge(merges):
                        yield Candidate(f"{count} of {long.stages} + {short.stages}{label}", (merges,))

    def _can_merge(self, merges: _Merges) -> bool:
        merged = ([m for group in merges.merge(i) for m in group.members] for i in range(merges.count))
        return all(self._splitter.is_feasible(members) for members in merged)

    @property
    def differ_in_size(self) -> bool:
        """True if some groups have much less memory than others."""
        return len(self._sized_pools) > len(self.pools)

    def kinds(self, candidate: Candidate, *, by_size: bool = False) -> list[GroupKind]:
        """Return the resulting kinds of groups. `by_size`: unmerged groups with little memory are a separate kind,
        which is not possible for candidates that merge groups of a pool with both sizes.
        """
        tokens = self.model.block_tokens
        found: list[GroupKind] = []
        by_size = by_size or any(share.pool.size for part in candidate.parts for share in part.shares)
        for pool in self._sized_pools if by_size else self.pools:
            left, count = pool.between(0, len(pool)), len(pool)
            for part in candidate.parts:
                for share in part.shares:
                    if share.pool is pool:
                        left = left.plus(share.sums(part.count), -1)
                        count -= share.size * part.count
            if count:
                found.append(pool.kind(left, count, tokens))
        return [*found, *(self._merged(part, candidate.toward_memory) for part in candidate.parts)]

    def _merged(self, part: _Merges, toward_memory: float) -> GroupKind:
        """Return the resulting kind of group, whose pace is set by the longest stage."""
        sums, tokens = part.sums(), self.model.block_tokens
        worth = self._worth(part, toward_memory)
        return GroupKind(
            stages=part.stages,
            group_count=part.count,
            capacity_tokens=float(worth.block_count * tokens),
            running_count=float(sums.running_count),
            used_tokens=float(sums.used_block_count * tokens),
            uncomputed_tokens=float(sums.uncomputed_tokens),
            max_running_count=float(sums.max_running_count),
            slowness=worth.longest * part.stages / self.model.layer_count,
            stall_s=self._stall_s(part, sums),
        )

    def _worth(self, part: _Merges, toward_memory: float) -> _Worth:
        """Return capacity and speed of the merges, computed for one merge if all members are equal, otherwise for a
        sample.
        """
        key = part, toward_memory
        if key not in self._worths:
            alike = len({kind for share in part.shares for kind in share.pool.columns.members}) == 1
            count = 1 if alike else min(_SAMPLED, part.count)
            found = [self._worth_of(part.merge(i * part.count // count), toward_memory) for i in range(count)]
            blocks = sum(one.block_count for one in found) * part.count // count
            self._worths[key] = _Worth(blocks, max(one.longest for one in found))
        return self._worths[key]

    def _worth_of(self, merge: Sequence[GroupState], toward_memory: float) -> _Worth:
        members = [member for group in merge for member in group.members]
        bounds = self._splitter.bounds(kinds_of(members), toward_memory)
        if bounds is not None and all(
            member.last_layer - member.first_layer == self.model.layer_count for member in members
        ):
            return _Worth(bounds.block_count, bounds.longest)
        slowness = {member.worker_id: member.slowness for member in members}
        made = group_plan(merge, self._splitter, toward_memory)
        longest = max((m.last_layer - m.first_layer) * slowness[m.worker_id] for m in made.members)
        return _Worth(made.block_count, longest)

    def _stall_s(self, part: _Merges, sums: _Sums) -> float:
        """Return the seconds for which the KV exchange stalls sequences. Each old group keeps its layers of all
        sequences, so it sends all other KV and receives as much.
        """
        return stall_s(self.model, sums.used_block_count, part.size, part.stages * part.count)

    def dissolved(
        self, restored: Mapping[GroupId, Sequence[int]], remaining_s: float, prompt_tokens: float
    ) -> list[GroupKind]:
        """Return the kinds of groups after these pipelines are dissolved. Each member serves alone, with its share of
        their running requests. The pipelines drain gradually, and until then hold more blocks than they use.

        Args:
            restored: Blocks of each member of a pipeline, once it has all layers.
            remaining_s: Mean remaining time of running requests.
            prompt_tokens: Mean prompt tokens of a request.
        """
        pools = pools_of([group for group in self._groups if group.group_id not in restored], self._running)
        gone = pools_of([group for group in self._groups if group.group_id in restored], self._running)
        tokens = self.model.block_tokens
        found = [pool.kind(pool.between(0, len(pool)), len(pool), tokens) for pool in pools]
        blocks = [count for counts in restored.values() for count in counts]
        sums = _Sums()
        for pool in gone:
            sums = sums.plus(pool.between(0, len(pool)))
        alone = Pool(1, (), self._running).kind(sums._replace(block_count=sum(blocks)), len(blocks), tokens)
        slow = [m.slowness for pool in gone for group in pool.groups for m in group.members]
        kept = (sums.used_block_count * KEPT_SHARE + sums.block_count / KEPT_STEPS / 2) * tokens
        times = [
            self._dissolves_s(group, restored[group.group_id], remaining_s, prompt_tokens)
            for pool in gone
            for group in pool.groups
        ]
        return [*found, replace(alone, slowness=math.fsum(slow) / len(slow), kept_tokens=kept, kept_s=max(times))]

    def _dissolves_s(self, group: GroupState, blocks: Sequence[int], remaining_s: float, prompt_tokens: float) -> float:
        """Return the seconds until the members' memory suffices for the pipeline's running requests in addition to
        their own. Until then some of the running requests must end, while the others grow.
        """
        layers = [(m.last_layer - m.first_layer) / self.model.layer_count for m in group.members]
        fits = min(ROOM_SHARE * own / (share + own / sum(blocks)) for share, own in zip(layers, blocks, strict=True))
        used = group.used_block_count
        if used <= fits:
            return DISSOLVES_S
        mean_tokens = used * self.model.block_tokens / max(1, group.running_count)
        growing = max(0.0, 1.0 - prompt_tokens / mean_tokens)  # fraction of the tokens that belong to answers
        low, high = 0.0, _MOST_LIVES
        for _ in range(_HALVINGS):
            lives = (low + high) / 2
            low, high = (lives, high) if used * (1 + growing * lives) * math.exp(-lives) > fits else (low, lives)
        return max(DISSOLVES_S, high * remaining_s)


def stall_s(model: ModelShape, used_block_count: int, size: int, instance_count: int) -> float:
    """Return the seconds for which merges of `size` groups stall the running sequences of these instances."""
    held_bytes = used_block_count * model.block_bytes * model.layer_count
    each_bytes = 2 * held_bytes * (1 - 1 / size) / instance_count
    return max(_STALL_S, each_bytes / _EXCHANGED_BYTES_PER_S)


def _even_sizes(there: int, size: int) -> list[int]:
    """Return the sizes of the groups of all `there` instances: `size` each, with the remainder distributed among
    them.
    """
    groups = max(1, there // size)
    each, larger = divmod(there, groups)
    return [each + 1] * larger + [each] * (groups - larger)


def _grouped(pool: Pool, sizes: Sequence[int]) -> Candidate:
    """Return the candidate with single instances in groups of these sizes, of at most two kinds. Other instances stay
    single.
    """
    parts, heavy, light = list[_Merges](), 0, 0
    for size in sorted(set(sizes), reverse=True):
        count = sizes.count(size)
        share = _PoolShare(pool, size // 2, size - size // 2, heavy, light)
        heavy, light = heavy + share.heavy * count, light + share.light * count
        parts.append(_Merges(count, (share,)))
    return Candidate(" + ".join(_name(part.count, part.size) for part in parts) + pool.label, tuple(parts))


def _name(count: int, size: int) -> str:
    if size == 2:
        return f"{count} pair{'s' if count > 1 else ''}"
    return f"{count} of {size}"
