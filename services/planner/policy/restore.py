"""Restore plans: which pipelines to dissolve into full replicas, and the source of each missing layer."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ballast.common.ids import GroupId, WorkerId
from services.planner.policy.snapshot import GroupState, ModelShape, Snapshot

SOURCE_CHOICES = 8  # number of holders considered for each layer
RESTORE_USAGE_LIMIT = 0.85  # maximum fraction of the remaining KV in use, because demand may rise again


@dataclass(frozen=True, slots=True)
class Pull:
    worker_id: WorkerId
    layer: int
    size_bytes: int
    source: WorkerId | None  # None: no reachable peer holds it, so it is read from the host copy or the checkpoint
    others: tuple[WorkerId, ...]  # further holders, used if the checksum is wrong


@dataclass(frozen=True, slots=True)
class Dissolution:
    """A pipeline whose members become lone instances."""

    group_id: GroupId
    members: tuple[WorkerId, ...]  # in stage order
    block_counts: tuple[int, ...]  # blocks of each member with a full replica
    pulls: tuple[Pull, ...]

    @property
    def pull_bytes(self) -> int:
        return sum(pull.size_bytes for pull in self.pulls)


@dataclass(frozen=True, slots=True)
class RestorePlan:
    dissolutions: tuple[Dissolution, ...]  # the least used first
    kept: tuple[tuple[GroupId, str], ...]  # pipelines that stay, and why

    @property
    def pull_bytes(self) -> int:
        return sum(d.pull_bytes for d in self.dissolutions)


def plan_restore(
    snapshot: Snapshot,
    *,
    usage_limit: float = RESTORE_USAGE_LIMIT,
    only: Collection[GroupId] | None = None,
    longest_tokens: Mapping[GroupId, int] | None = None,
) -> RestorePlan:
    """Dissolve pipelines, the least used first, while demand stays within `usage_limit` of the remaining capacity.

    The limit applies to the demand of each group relative to the KV of its members as full replicas, which keep its
    requests, and to the total demand relative to the total capacity, because a remaining pipeline relieves the others.
    `only`: the pipelines to consider; None: all. `longest_tokens`: tokens of each group's longest request, which must
    fit into a single member.
    """
    model = snapshot.model
    choice = _SourceChoice(snapshot, usage_limit)
    kept: list[tuple[GroupId, str]] = []
    chosen: list[tuple[GroupState, tuple[int, ...]]] = []
    pipelines = [g for g in snapshot.groups if len(g.members) > 1 and (only is None or g.group_id in only)]
    blocks = {g.group_id: _full_copy_blocks(g, model) for g in pipelines}
    for group in sorted(pipelines, key=lambda g: (g.load_blocks / max(1, sum(blocks[g.group_id])), g.group_id)):
        longest = (longest_tokens or {}).get(group.group_id, 0)
        why_not = _too_long(longest, min(blocks[group.group_id]) * model.block_tokens)
        why_not = why_not or choice.refusal(group, blocks[group.group_id])
        if why_not is None:
            choice.take(group, blocks[group.group_id])
            chosen.append((group, blocks[group.group_id]))
        else:
            kept.append((group.group_id, why_not))
    sources = _Sources(snapshot)
    pulls = sources.assign([group for group, _ in chosen])
    dissolutions = [
        Dissolution(group.group_id, tuple(m.worker_id for m in group.members), counts, tuple(pulls[group.group_id]))
        for group, counts in chosen
    ]
    return RestorePlan(tuple(dissolutions), tuple(kept))


def _too_long(longest_tokens: int, alone_tokens: int) -> str | None:
    """Return the reason why a pipeline's longest request does not fit into a single member; None: it fits. The leader
    makes the same check: a batch in flight may append a token, and the next one needs room for one more.
    """
    if longest_tokens + 2 <= alone_tokens or alone_tokens < 1:
        return None
    return f"a request of {longest_tokens} tokens runs there, but a member alone holds {alone_tokens}"


def _full_copy_blocks(group: GroupState, model: ModelShape) -> tuple[int, ...]:
    return tuple(model.at(m.extent_bytes).block_count(m.budget_bytes, 0, model.layer_count) for m in group.members)


class _SourceChoice:
    """Total demand, and total capacity with the groups chosen so far dissolved."""

    def __init__(self, snapshot: Snapshot, usage_limit: float) -> None:
        self.usage_limit = usage_limit
        self.demand_blocks = sum(group.load_blocks for group in snapshot.groups)
        self.capacity_blocks = sum(group.block_count for group in snapshot.groups)

    def refusal(self, group: GroupState, blocks: Sequence[int]) -> str | None:
        percent = f"{self.usage_limit:.0%}"
        if min(blocks) < 1:
            return "a member's memory does not hold a full copy and KV"
        if group.load_blocks > self.usage_limit * sum(blocks):
            return f"its demand of {group.load_blocks} blocks exceeds {percent} of {sum(blocks)} un-dropped ones"
        after_blocks = self.capacity_blocks - group.block_count + sum(blocks)
        if self.demand_blocks > self.usage_limit * after_blocks:
            return f"all demand, {self.demand_blocks} blocks, would exceed {percent} of {after_blocks} left"
        return None

    def take(self, group: GroupState, blocks: Sequence[int]) -> None:
        self.capacity_blocks += sum(blocks) - group.block_count


class _Sources:
    """Holders of each layer, and the bytes requested from each holder so far."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.model = snapshot.model
        self.asked_bytes: dict[WorkerId, int] = {}
        self.holders: list[list[WorkerId]] = [[] for _ in range(snapshot.model.layer_count)]
        members = [m for g in snapshot.groups for m in g.members]
        for member in sorted(members, key=lambda m: m.worker_id):
            self.asked_bytes[member.worker_id] = 0
            for layer in member.held_layers:
                self.holders[layer].append(member.worker_id)
        self._turn = 0

    def assign(self, groups: Sequence[GroupState]) -> Mapping[GroupId, list[Pull]]:
        """Return the pulls of all missing layers by group. Layers with the fewest holders are assigned first, each to
        the holder from which the fewest bytes have been requested so far.
        """
        wanted = [
            (len(self.holders[layer]), layer, member.worker_id, group.group_id)
            for group in groups
            for member in group.members
            for layer in sorted(set(range(self.model.layer_count)) - set(member.held_layers))
        ]
        pulls: dict[GroupId, list[Pull]] = {group.group_id: [] for group in groups}
        for _, layer, worker_id, group_id in sorted(wanted):
            pulls[group_id].append(self._pull(worker_id, layer))
        for planned in pulls.values():
            planned.sort(key=lambda pull: (pull.layer, pull.worker_id))
        return pulls

    def _pull(self, worker_id: WorkerId, layer: int) -> Pull:
        size_bytes = self.model.layer_parameter_bytes[layer]
        holders = self.holders[layer]
        begin = self._turn % max(1, len(holders))
        self._turn += SOURCE_CHOICES
        window = (holders[begin:] + holders[:begin])[:SOURCE_CHOICES]
        by_load = sorted(window, key=lambda w: (self.asked_bytes[w], w))
        if not by_load:
            return Pull(worker_id, layer, size_bytes, None, ())
        self.asked_bytes[by_load[0]] += size_bytes
        return Pull(worker_id, layer, size_bytes, by_load[0], tuple(by_load[1:]))
