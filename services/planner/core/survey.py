"""Builds the input of plans from the layout and reports, and layouts from plans (pure)."""

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ballast.common.ids import Epoch, GroupId, WorkerId
from ballast.common.layout import Group, Layout, Member, Standing
from ballast.common.load import LoadReport, MemoryReport
from ballast.common.model import ModelInfo
from services.planner.core.messages import Sources
from services.planner.policy.candidates import Running
from services.planner.policy.drop import DropPlan
from services.planner.policy.restore import RestorePlan
from services.planner.policy.snapshot import (
    Columns,
    GroupSnapshots,
    GroupState,
    InstanceState,
    ModelShape,
    Snapshot,
    columns_of,
)

Loads = Mapping[WorkerId, LoadReport]
_Classes = Mapping[tuple[int, int], tuple[int, int]]  # (budget, extent size) -> the values of its memory class
_MARGIN = 1.1  # factor on the demand for which memory is freed
_LIKE_SPEED = 1.1  # speeds are rounded to powers of this
_MOST_SLOWNESS = 1000.0
_ALIKE = 1.02  # memories that differ by a smaller factor form one class, because each class enlarges the search


class NoSurvey(Exception):
    """Too little is known about the cluster to plan."""


def shape_of(model: ModelInfo | None, loads: Loads) -> ModelShape:
    """Return the sizes of the model's layers and blocks. Raises NoSurvey if instances do not report them."""
    if model is None or not loads:
        raise NoSurvey("there is no instance")
    if not model.layer_parameter_bytes or not model.block_bytes:
        raise NoSurvey(f"the workers do not report the layer sizes of {model.name}")
    first = next(iter(loads.values()))
    block_tokens = first.block_tokens
    if min(*model.layer_parameter_bytes, model.block_bytes, block_tokens) < 1 or model.other_parameter_bytes < 0:
        raise NoSurvey(f"the workers report impossible sizes for {model.name}")
    return ModelShape(
        layer_parameter_bytes=model.layer_parameter_bytes,
        other_parameter_bytes=model.other_parameter_bytes,
        block_tokens=block_tokens,
        block_bytes=model.block_bytes,
        extent_bytes=max(1, first.memory.extent_bytes or model.extent_bytes),
    )


class Survey(NamedTuple):
    snapshot: Snapshot
    led: list[LoadReport]  # reports of the snapshot's group leaders


def survey(
    layout: Layout,
    model: ModelInfo | None,
    loads: Loads,
    slowness: Mapping[WorkerId, float] | None = None,
    *,
    draining: bool = False,
) -> Survey:
    """Return the groups that take part in plans. All their members have reported, and none is parked or about to be
    parked. Groups with draining members are included only if `draining` is set.

    Groups with an impossible report are left out, because one instance's error must neither end the planner nor enter a
    plan.
    """
    shape = shape_of(model, loads)
    if layout.layer_count != shape.layer_count:
        raise NoSurvey(f"the layout has {layout.layer_count} layers, but the model has {shape.layer_count}")
    parts = dict[tuple[int, int, int], _LayerRange]()
    begin, end, extent, least_bytes = 0, 0, -1, 0  # values of the last member, which are usually the same for the next
    groups, led, reported = list[Group](), list[LoadReport](), loads.get
    for group in layout.groups:
        leaders = None
        for m in group.members:
            load, first, last = reported(m.worker_id), m.first_layer, m.last_layer
            if load is None or (not m.takes_new and not (draining and m.draining and m.standing is Standing.SERVING)):
                break
            if load.block_count < 0 or load.used_block_count < 0 or load.waiting_block_count < 0:
                break
            if first != begin or last != end or load.memory.extent_bytes != extent:
                begin, end, extent = key = first, last, load.memory.extent_bytes
                if key not in parts:
                    parts[key] = _part(shape.at(extent), first, last)
                least_bytes = parts[key].least_bytes
            if load.memory.budget_bytes < least_bytes:
                break
            if leaders is None:
                leaders = load
        else:
            if leaders is not None:
                groups.append(group)
                led.append(leaders)
    if not groups:
        raise NoSurvey("no group has reported its load")
    alike = memory_classes([load.memory for load in loads.values()])
    slow = {worker_id: _rounded(times) for worker_id, times in (slowness or {}).items() if _rounded(times) != 1.0}
    columns = _columns(groups, led, loads, alike, slow)

    def states(indices: Iterable[int]) -> list[GroupState]:
        made = list[GroupState]()
        ids, _, blocks, used, waiting, running, uncomputed, _, most = columns
        instance, state = InstanceState._make, GroupState._make  # faster than calling the classes, for thousands
        for i in indices:
            stages: list[InstanceState] = []  # `list[..]()` would take a third of the total time
            for m in groups[i].members:
                first, last, memory = m.first_layer, m.last_layer, loads[m.worker_id].memory
                layers = parts[first, last, memory.extent_bytes].layers
                budget_bytes, extent_bytes = alike[memory.budget_bytes, memory.extent_bytes]
                times = slow.get(m.worker_id, 1.0) if slow else 1.0
                stages.append(instance((m.worker_id, budget_bytes, first, last, layers, extent_bytes, times)))
            counts = blocks[i], used[i], waiting[i], running[i], uncomputed[i], most[i]
            made.append(state((ids[i], tuple(stages), *counts)))
        return made

    return Survey(Snapshot(shape, GroupSnapshots(columns, states)), led)


def running_of(led: Sequence[LoadReport]) -> Running:
    """Return limits and waiting requests, from the reports of the leaders of a snapshot's groups."""
    return Running(
        max_running_count=max(1, min([one.max_running_count for one in led])),
        waiting_count=sum([one.waiting_count for one in led]),
    )


def memory_classes(memories: Iterable[MemoryReport]) -> _Classes:
    """Map the budget and extent size of each memory to those of the smallest memory of its class."""
    found, least = dict[tuple[int, int], tuple[int, int]](), (0, 0)
    for one in sorted({(m.budget_bytes, m.extent_bytes) for m in memories}):
        if one[0] > least[0] * _ALIKE:
            least = one
        found[one] = least
    return found


def _rounded(slowness: float) -> float:
    """Round slowness to a power of `_LIKE_SPEED`, because each distinct kind of member enlarges the search. Returns 1
    for an impossible value.
    """
    if not _MOST_SLOWNESS**-1 <= slowness <= _MOST_SLOWNESS:
        return 1.0
    return _LIKE_SPEED ** round(math.log(slowness, _LIKE_SPEED))


def _columns(
    groups: Sequence[Group],
    led: Sequence[LoadReport],
    loads: Loads,
    alike: _Classes,
    slow: Mapping[WorkerId, float],
) -> Columns:
    stages = [len(group.members) for group in groups]
    alone = max(stages) == 1
    reports = led if alone else [loads[m.worker_id] for group in groups for m in group.members]
    kinds = {(load.memory.budget_bytes, load.memory.extent_bytes) for load in reports}
    members = {(*alike[kind], 1.0) for kind in kinds}
    if slow:
        named = [(m.worker_id, loads[m.worker_id].memory) for group in groups for m in group.members]
        members = {(*alike[of.budget_bytes, of.extent_bytes], slow.get(worker_id, 1.0)) for worker_id, of in named}
    return Columns(
        [group.group_id for group in groups],
        stages,
        [load.block_count for load in led],
        [load.used_block_count for load in led],
        [load.waiting_block_count for load in led],
        [load.running_count for load in led],
        [load.prompt_token_count and _uncomputed(load) for load in led],
        members,
        [load.max_running_count for load in led]
        if alone
        else [sum([loads[m.worker_id].max_running_count for m in group.members]) for group in groups],
    )


def _uncomputed(load: LoadReport) -> int:
    """Return the number of prompt tokens of running requests that are not computed yet."""
    return max(0, load.prompt_token_count - load.waiting_block_count * load.block_tokens)


class _LayerRange(NamedTuple):
    layers: tuple[int, ...]
    least_bytes: int  # minimum memory of a member with these layers, without KV


def _part(shape: ModelShape, first: int, last: int) -> _LayerRange:
    layers = tuple(range(first, last))
    return _LayerRange(layers, shape.occupied_bytes(layers) + shape.other_parameter_bytes)


def demand_bytes(snapshot: Snapshot) -> int:
    """Return the KV demand beyond the current capacity, in bytes."""
    model, columns = snapshot.model, columns_of(snapshot.groups)
    wanted = (sum(columns.used) + sum(columns.waiting)) * _MARGIN
    missing = wanted - sum(columns.blocks)
    return max(0, int(missing * model.block_bytes * model.layer_count))


def dropped(base: Layout, plan: DropPlan, epoch: Epoch, why: str) -> Layout:
    """Return the layout in which the plan's groups are merged."""
    of = _members(base)
    merged = {m.worker_id for group in plan.groups for m in group.members}
    made = [
        Group(g.group_id, tuple(_stage(of[m.worker_id], m.first_layer, m.last_layer) for m in g.members))
        for g in plan.groups
    ]
    return _layout(base, merged, made, epoch, why)


def merged_by_hand(base: Layout, names: Sequence[WorkerId], epoch: Epoch, why: str) -> Layout:
    """Return the layout in which these instances, each of which holds all layers, form one group in this order, with
    layers split as evenly as possible.

    Raises:
        NoSurvey: the instances cannot form a group.
    """
    of = _members(base)
    strangers = [name for name in names if name not in of]
    if strangers:
        raise NoSurvey(f"not in the layout: {', '.join(strangers)}")
    if len(set(names)) != len(names) or not 1 < len(names) <= base.layer_count:
        raise NoSurvey(f"a group takes 2 to {base.layer_count} different workers, got {', '.join(names)}")
    if away := [f"{w} ({of[w].standing})" for w in names if of[w].standing is not Standing.SERVING]:
        raise NoSurvey(f"not in service: {', '.join(away)}")
    if leave := [w for w in names if of[w].draining]:
        raise NoSurvey(f"about to leave: {', '.join(leave)}")
    parts = [w for w in names if of[w].last_layer - of[w].first_layer < base.layer_count]
    if parts:
        raise NoSurvey(f"not all layers are held by {', '.join(parts)}; restore first")
    bounds = [i * base.layer_count // len(names) for i in range(len(names) + 1)]
    stages = tuple(_stage(of[w], bounds[i], bounds[i + 1]) for i, w in enumerate(names))
    return _layout(base, set(names), [Group(GroupId(names[0]), stages)], epoch, why)


def pipelined(base: Layout, degree: int, epoch: Epoch, why: str, kept_out: Container[WorkerId] = ()) -> Layout | None:
    """Return the layout in which instances that serve alone form pipelines of `degree`, sorted by name. The remaining
    instances stay alone. None: too few instances, or too few layers.
    """
    alone = sorted(
        g.leader.worker_id
        for g in base.groups
        if len(g.members) == 1 and g.leader.takes_new and g.leader.worker_id not in kept_out
    )
    whole = len(alone) // degree * degree
    if not whole or degree > base.layer_count:
        return None
    layout = base
    for first in range(0, whole, degree):
        layout = merged_by_hand(layout, alone[first : first + degree], epoch, why)
    return layout


def dissolved(base: Layout, groups: Sequence[GroupId], epoch: Epoch, why: str) -> Layout:
    """Return the layout in which the members of these groups serve alone."""
    members = [m for group in base.groups if group.group_id in groups for m in group.members]
    return _layout(base, {m.worker_id for m in members}, [_alone(m, base.layer_count) for m in members], epoch, why)


def replaced(base: Layout, group: Group, gone: Member, by: Member, epoch: Epoch, why: str) -> Layout:
    """Return the layout in which `by`, which serves alone, takes the place of `gone` in the group."""
    stage = _stage(by, gone.first_layer, gone.last_layer)
    made = Group(group.group_id, tuple(stage if m.worker_id == gone.worker_id else m for m in group.members))
    return _layout(base, {m.worker_id for m in (*group.members, by)}, [made], epoch, why)


def completed(base: Layout, members: Sequence[Member], epoch: Epoch, why: str) -> Layout:
    """Return the layout in which these stranded instances serve alone."""
    return _layout(base, set(), [_alone(m, base.layer_count) for m in members], epoch, why)


def sources_of(plan: RestorePlan, worker_id: WorkerId) -> Sources:
    """Return the sources of each layer that a worker loads in a restore: first holders in its own group, because links
    to them exist, then other holders, then its host copy or disk.
    """
    found: list[tuple[int, WorkerId | None]] = []
    for dissolution in plan.dissolutions:
        for pull in dissolution.pulls:
            if pull.worker_id != worker_id:
                continue
            holders = [pull.source, *pull.others] if pull.source is not None else []
            holders.sort(key=lambda holder: holder not in dissolution.members)
            found += [(pull.layer, holder) for holder in (*holders, None)]
    return tuple(found)


def _members(layout: Layout) -> dict[WorkerId, Member]:
    return {member.worker_id: member for group in layout.groups for member in group.members}


def _stage(member: Member, first_layer: int, last_layer: int) -> Member:
    return replace(member, first_layer=first_layer, last_layer=last_layer)


def _alone(member: Member, layer_count: int) -> Group:
    return Group(GroupId(member.worker_id), (_stage(member, 0, layer_count),))


def _layout(base: Layout, changed: set[WorkerId], made: Sequence[Group], epoch: Epoch, why: str) -> Layout:
    kept = [group for group in base.groups if not any(m.worker_id in changed for m in group.members)]
    groups = tuple(sorted((*kept, *made), key=lambda group: group.group_id))
    layout = Layout(epoch, base.layer_count, groups, why)
    layout.check()
    return layout
