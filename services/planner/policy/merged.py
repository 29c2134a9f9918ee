"""The result of merging groups: one pipeline of all their members, and the layers that each member drops."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from ballast.common.errors import InvariantViolation
from ballast.common.ids import GroupId, WorkerId
from services.planner.policy.snapshot import GroupState, ModelShape
from services.planner.policy.split import Aftermath, SplitMember, SplitStage, Splitter


@dataclass(frozen=True, slots=True)
class MemberPlan:
    worker_id: WorkerId
    first_layer: int  # executes and keeps [first_layer, last_layer)
    last_layer: int
    dropped_layers: tuple[int, ...]
    freed_bytes: int
    block_count: int  # its KV blocks after the exchange


@dataclass(frozen=True, slots=True)
class GroupPlan:
    group_id: GroupId  # the leader's worker id
    merged: tuple[GroupState, ...]  # merged groups, by id
    members: tuple[MemberPlan, ...]  # in stage order
    freed_bytes: int
    exchange_bytes: int  # KV of running sequences that changes its holder
    block_count_before: int  # blocks of all merged groups
    block_count: int  # the minimum over the stages


class _MergedCut(NamedTuple):
    """The stages of equal members, largest KV first: ranges of layers with their aftermath."""

    parts: tuple[tuple[int, int, Aftermath], ...]  # first layer, layer after the last, aftermath
    freed_bytes: int
    block_count: int


class GroupPlanner:
    """Plans merged groups. `equal_singles`: all groups are single instances with equal memory and equal layers, so that
    the split depends only on the members' amounts of KV and is cached.
    """

    def __init__(self, splitter: Splitter, *, equal_singles: bool, toward_memory: float | None = None) -> None:
        self._splitter = splitter
        self._toward_memory = toward_memory
        self._equal_singles = equal_singles
        self._cuts: dict[tuple[bool, ...], _MergedCut] = {}

    def plan(self, merged: Sequence[GroupState]) -> GroupPlan:
        """Return the plan of one pipeline of all members; see `group_plan`."""
        if not self._equal_singles:
            return group_plan(merged, self._splitter, self._toward_memory)
        ordered = sorted(merged, key=_by_load)
        alike = tuple([one.used_block_count == other.used_block_count for one, other in pairwise(ordered)])
        cut = self._cuts.get(alike)
        if cut is None:
            cut = self._cuts[alike] = _cut_of(group_plan(merged, self._splitter))
        return self._applied(cut, ordered, merged)

    def _applied(self, cut: _MergedCut, ordered: Sequence[GroupState], merged: Sequence[GroupState]) -> GroupPlan:
        model = self._splitter.model
        members: list[MemberPlan] = []
        sent = before = 0  # sent: blocks times layers; before: blocks
        for group, (first, last, aftermath) in zip(ordered, cut.parts, strict=True):
            members.append(MemberPlan(group.members[0].worker_id, first, last, *aftermath))
            sent += group.used_block_count * (model.layer_count - last + first)
            before += group.block_count
        return GroupPlan(
            group_id=GroupId(members[0].worker_id),
            merged=tuple(merged),
            members=tuple(members),
            freed_bytes=cut.freed_bytes,
            exchange_bytes=sent * model.block_bytes,
            block_count_before=before,
            block_count=cut.block_count,
        )


def _by_load(group: GroupState) -> tuple[int, WorkerId]:
    return -group.used_block_count, group.members[0].worker_id


def _cut_of(plan: GroupPlan) -> _MergedCut:
    parts = tuple(
        (m.first_layer, m.last_layer, Aftermath(m.dropped_layers, m.freed_bytes, m.block_count)) for m in plan.members
    )
    return _MergedCut(parts, plan.freed_bytes, plan.block_count)


def surplus_bytes(group: GroupState, model: ModelShape) -> int:
    """Return the parameter bytes of a group's members beyond one copy of all layers."""
    if len(group.members) == 1:
        return 0
    surplus = 0
    for member in group.members:
        own = model.at(member.extent_bytes)
        executed = own.extents_before[member.last_layer] - own.extents_before[member.first_layer]
        surplus += own.occupied_bytes(member.held_layers) - executed * own.extent_bytes
    return surplus


def group_plan(merged: Sequence[GroupState], splitter: Splitter, toward_memory: float | None = None) -> GroupPlan:
    """Plan one pipeline of all members. Raises InvariantViolation if there is none (see `is_feasible`).

    `toward_memory`: see `Splitter.split`. None: only as far as needed to hold the members' current KV.
    """
    model = splitter.model
    block_count_before = sum(group.block_count for group in merged)
    candidates = [SplitMember(i, group.used_block_count * model.block_bytes) for group in merged for i in group.members]
    stages = splitter.split(candidates, toward_memory, block_count_before)
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
        block_count_before=block_count_before,
        block_count=block_count,
    )


def _member_plan(stage: SplitStage, splitter: Splitter) -> MemberPlan:
    instance, first_layer, last_layer = stage.candidate.instance, stage.first_layer, stage.last_layer
    aftermath = splitter.aftermath(instance, first_layer, last_layer)
    return MemberPlan(instance.worker_id, first_layer, last_layer, *aftermath)


def _kept_layers(stage: SplitStage) -> int:
    instance = stage.candidate.instance
    return max(0, min(stage.last_layer, instance.last_layer) - max(stage.first_layer, instance.first_layer))
