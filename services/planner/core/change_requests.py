"""Change requests, and decisions about them: a target layout, or the reason for a rejection (pure)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from ballast.common.ids import Epoch, GroupId, WorkerId
from ballast.common.layout import Layout, Member
from ballast.common.model import ModelInfo
from ballast.common.transition import TransitionKind
from ballast.common.units import human_bytes
from services.planner.core.messages import ClusterLoad, Sources
from services.planner.core.survey import (
    Loads,
    NoSurvey,
    Survey,
    completed,
    demand_bytes,
    dissolved,
    dropped,
    merged_by_hand,
    running_of,
    shape_of,
    sources_of,
    survey,
)
from services.planner.core.transition import changed_members
from services.planner.policy.compare import Comparison, ComparisonTargets, compare, compare_long, compare_restore
from services.planner.policy.drop import by_need, plan_of
from services.planner.policy.explain import explain, explain_restore
from services.planner.policy.long_request import LongNeed, group_for, held_by
from services.planner.policy.restore import RESTORE_USAGE_LIMIT, RestorePlan, plan_restore
from services.planner.policy.snapshot import ModelShape, Snapshot, columns_of
from services.planner.policy.split import is_unlike, kinds_of

# A drop whose predicted gain is at least this factor starts at the first evaluation; a smaller gain must be confirmed
# by a second one.
_CLEAR = 1.5
# If data for a comparison has been missing for this many seconds, an overload causes a drop by need, provided that it
# needs at least this fraction of the KV memory.
_BLIND_S, _BLIND_NEED = 10.0, 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """Policy for overloads."""

    targets: ComparisonTargets = field(default_factory=ComparisonTargets)
    compares: bool = True  # True: compare candidates by predicted loss; False, or without the data: drop by need
    # By need, groups become deeper than pairs only if pairs would leave more than this fraction of the needed KV unmet.
    tolerable_shortfall: float = 0.65


@dataclass(frozen=True, slots=True)
class DropRequest:
    by: str  # cause: overload, long request, operator, loss or policy
    cause_id: str
    request_id: str = ""  # id of an operator's request; empty: the planner's own request
    required_bytes: int | None = None
    worker_ids: tuple[WorkerId, ...] = ()
    again: bool = False  # True: a re-evaluation of the same overload
    blind_s: float = 0.0  # seconds for which data for a comparison has been missing
    hold_s: float = 0.0  # seconds after the change without automatic restores
    long: LongNeed | None = None  # set for a request that needs a larger group


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    by: str  # cause: relief, operator, drain or loss
    cause_id: str
    request_id: str = ""
    only: tuple[GroupId, ...] | None = None  # pipelines to restore; None: as many as the load allows
    regardless_of_load: bool = False


@dataclass(frozen=True, slots=True)
class SizeRequest:
    """Evaluate how many instances should serve. Any other change request replaces it."""

    cause_id: str
    by: str = "look"
    request_id: str = ""


DesiredChange = DropRequest | RestoreRequest | SizeRequest


@dataclass(frozen=True, slots=True)
class Approved:
    kind: TransitionKind
    target: Layout
    shape: ModelShape | None
    lines: tuple[str, ...]
    shortfall_bytes: int = 0
    sources: Mapping[WorkerId, Sources] = field(default_factory=dict[WorkerId, Sources])
    gives_way: bool = False  # True: may be aborted in favour of other requests while it is prepared
    compared: Comparison | None = None  # comparison on which the decision is based


@dataclass(frozen=True, slots=True)
class Rejected:
    why: str
    shortfall_bytes: int = 0
    for_now: bool = False  # True: not worthwhile at present, and will be evaluated again soon
    compared: Comparison | None = None
    blind: bool = False  # True: data for a comparison is missing


@dataclass(frozen=True, slots=True)
class Explained:
    lines: tuple[str, ...]
    required_bytes: int
    freed_bytes: int
    shortfall_bytes: int
    layout: Layout


def decide(
    change: DropRequest | RestoreRequest,
    base: Layout,
    model: ModelInfo | None,
    load: ClusterLoad,
    epoch: Epoch,
    planning: Planning | None = None,
) -> Approved | Rejected:
    """Return the target layout of a drop or restore, or the reason for a rejection. Operators' requests are executed as
    requested. `planning`: policy for overloads.
    """
    planning = planning or Planning(compares=False, tolerable_shortfall=0.0)
    try:
        if isinstance(change, DropRequest):
            return _drop(change, base, model, load, epoch, planning)
        surveyed = survey(base, model, load.workers, load.slowness, draining=True)
        return _restore(change, base, model, surveyed, load, epoch, planning)
    except NoSurvey as reason:
        return Rejected(str(reason))


def complete(base: Layout, members: tuple[Member, ...], epoch: Epoch, why: str) -> Approved:
    """Return a restore plan for instances that lack layers. Each loads its layers from the host copy or disk and then
    serves alone. Survivors of a pipeline load missing layers without a plan.
    """
    layers = range(base.layer_count)
    sources: dict[WorkerId, Sources] = {m.worker_id: tuple((layer, None) for layer in layers) for m in members}
    return Approved(TransitionKind.RESTORE, completed(base, members, epoch, why), None, (), sources=sources)


def explain_now(
    base: Layout,
    model: ModelInfo | None,
    load: ClusterLoad,
    required_bytes: int | None,
    targets: ComparisonTargets,
) -> Explained:
    """Explain what `ballast drop` would do now, with the predictions for the layouts that an overload would choose
    from.

    Raises:
        NoSurvey: too little is known about the cluster.
    """
    surveyed = survey(base, model, load.workers, load.slowness)
    snapshot = surveyed.snapshot
    needed = demand_bytes(snapshot) if required_bytes is None else required_bytes
    found = by_need(snapshot, needed)
    compared = _compared(surveyed, load, model, targets)
    told = () if compared is None else ("an overload now would choose from (as predicted):", *compared.lines())
    target = dropped(base, found, Epoch(base.epoch + 1), "explained") if found.groups else base
    lines = (*told, *explain(found, snapshot.model))
    return Explained(lines, found.needed_bytes, found.freed_bytes, found.shortfall_bytes, target)


def _drop(
    change: DropRequest,
    base: Layout,
    model: ModelInfo | None,
    load: ClusterLoad,
    epoch: Epoch,
    planning: Planning,
) -> Approved | Rejected:
    loads = load.workers
    if change.worker_ids:
        return _by_hand(change, base, model, load, epoch)
    surveyed = survey(base, model, loads, load.slowness)
    snapshot = surveyed.snapshot
    if change.long is not None:
        return _for_long(change, change.long, base, model, surveyed, load, epoch, planning)
    needed = change.required_bytes
    if needed is None:
        needed = demand_bytes(snapshot)
        if not needed:
            return Rejected(
                "demand fits into the KV memory, nothing lacks; specify the bytes to free, or the workers to merge"
            )
    by_comparison = planning.compares and not change.request_id
    compared = _compared(surveyed, load, model, planning.targets) if by_comparison else None
    why = f"{change.by}: {human_bytes(needed)} of KV needed"
    if compared is None and by_comparison and not _must_act_blind(change, snapshot, needed):
        why = f"not known yet {_unknown(load, model)}: nothing is dropped until then"
        return Rejected(why, needed, for_now=True, blind=True)
    if compared is None:
        tolerable = 0.0 if change.request_id else planning.tolerable_shortfall
        found = by_need(snapshot, needed, tolerable_shortfall=tolerable)
        lines = tuple(explain(found, snapshot.model))
    elif not compared.chosen.merges:
        why = "; ".join(("no possible drop is better", *compared.lines()))
        return Rejected(why, needed, for_now=True, compared=compared)
    elif not change.again and compared.gain < _CLEAR:
        why = "; ".join(("a drop may be slightly better, to be evaluated again", *compared.lines()))
        return Rejected(why, needed, for_now=True)
    else:
        chosen = compared.chosen.candidate
        found = plan_of(snapshot, chosen.merges, needed, chosen.toward_memory)
        lines = (*compared.lines(), *explain(found, snapshot.model))
        why = f"{why}; predicted {compared.chosen.told()} ({compared.candidates[0].told()})"
    if not found.groups:
        return Rejected("there are no groups left whose merge would be worthwhile", found.shortfall_bytes)
    target = dropped(base, found, epoch, why)
    if not changed_members(base, target):
        return Rejected("nothing would change", found.shortfall_bytes)
    return Approved(TransitionKind.DROP, target, snapshot.model, lines, found.shortfall_bytes, compared=compared)


def _for_long(
    change: DropRequest,
    need: LongNeed,
    base: Layout,
    model: ModelInfo | None,
    surveyed: Survey,
    load: ClusterLoad,
    epoch: Epoch,
    planning: Planning,
) -> Approved | Rejected:
    """Plan the smallest group with room for the request in addition to its running requests, if the latencies of other
    requests remain acceptable.
    """
    snapshot, led = surveyed
    if (holder := held_by(snapshot, need)) is not None:
        return Rejected(f"{holder} can already hold {need.need_tokens} tokens", for_now=True)
    for group_id, load_of_leader in zip(columns_of(snapshot.groups).group_ids, led, strict=True):
        if group_id == need.group_id:
            need = replace(need, held_tokens=load_of_leader.longest_token_count)
    made = group_for(snapshot, need)
    if made is None:
        why = f"no possible group has room for {need.need_tokens} tokens in addition to its running requests"
        return Rejected(why, for_now=True)
    compared = None
    if planning.compares and load.pace is not None and not _unknown(load, model):
        targets = planning.targets
        compared = compare_long(snapshot, running_of(led), load.traffic, load.pace, made, need, targets)
        if compared.chosen is compared.candidates[0]:
            why = "; ".join((f"{made.name} would cost the others too much", *compared.lines()))
            return Rejected(why, for_now=True, compared=compared)
    found = plan_of(snapshot, [made.ids], 0, made.toward_memory)
    if not found.groups:
        return Rejected(f"{' + '.join(made.ids)} cannot be merged", for_now=True)
    why = f"{change.by}: {need.need_tokens} tokens need {made.stages} instances"
    lines = (*(() if compared is None else compared.lines()), *explain(found, snapshot.model))
    target = dropped(base, found, epoch, why)
    return Approved(TransitionKind.DROP, target, snapshot.model, lines, compared=compared)


def _by_hand(change: DropRequest, base: Layout, model: ModelInfo | None, load: ClusterLoad, epoch: Epoch) -> Approved:
    """Form one group of these members in this order. Layers are split as evenly as possible, or according to capacity
    if memories differ.
    """
    names, why = change.worker_ids, f"{change.by}: {'+'.join(change.worker_ids)}"
    target, lines = merged_by_hand(base, names, epoch, why), (f"merged: {' '.join(names)}",)
    try:
        snapshot = survey(base, model, load.workers, load.slowness).snapshot
    except NoSurvey:
        return Approved(TransitionKind.DROP, target, _shape(model, load.workers), lines)
    merged = [group for group in snapshot.groups if group.group_id in names]
    if len(merged) == len(names) and is_unlike(kinds_of([group.members[0] for group in merged])):
        found = plan_of(snapshot, [[group.group_id for group in merged]], 0, insists=True)
        target, lines = dropped(base, found, epoch, why), (*lines, *explain(found, snapshot.model))
    return Approved(TransitionKind.DROP, target, snapshot.model, lines)


def _must_act_blind(change: DropRequest, snapshot: Snapshot, needed_bytes: int) -> bool:
    """Return True if the shortfall has lasted so long, and is so large, that a drop is better than waiting for the
    missing data.
    """
    model = snapshot.model
    capacity_bytes = sum(columns_of(snapshot.groups).blocks) * model.block_bytes * model.layer_count
    return change.blind_s >= _BLIND_S and needed_bytes > _BLIND_NEED * capacity_bytes


def _unknown(load: ClusterLoad, model: ModelInfo | None) -> str:
    """Return text that names the data missing for a comparison; empty: no data is missing."""
    if load.pace is None or not load.pace.is_believable:
        return "how fast instances are"
    traffic, longest = load.traffic, model.max_model_len if model is not None else 0
    if not traffic.known_s or (longest and not traffic.is_believable(longest)):
        return "what clients want"
    return ""


def _compared(
    surveyed: Survey,
    load: ClusterLoad,
    model: ModelInfo | None,
    targets: ComparisonTargets,
    restored: Mapping[GroupId, Sequence[int]] | None = None,
) -> Comparison | None:
    """Compare layouts by prediction. None: data is missing; see `_unknown`. `restored`: see `compare_restore`."""
    if load.pace is None or _unknown(load, model):
        return None
    snapshot, led = surveyed
    running = running_of(led)
    if restored is not None:
        return compare_restore(snapshot, running, load.traffic, load.pace, restored, targets)
    compared = compare(snapshot, running, load.traffic, load.pace, targets)
    fresh = load.fresh_traffic
    if fresh is None or not compared.chosen.merges:
        return compared
    # A silent dispatcher may be paused, or it may be dead and its clients connected to other dispatchers. The choice
    # must be right in both cases.
    if not fresh.known_s:
        fresh = replace(load.traffic, queued_count=0, queued_tokens=0, oldest_wait_s=0.0)
    without = compare(snapshot, running, fresh, load.pace, targets)
    return compared if without.chosen.merges else without


def _restore(
    change: RestoreRequest,
    base: Layout,
    model: ModelInfo | None,
    surveyed: Survey,
    load: ClusterLoad,
    epoch: Epoch,
    planning: Planning,
) -> Approved | Rejected:
    snapshot, led = surveyed
    waiting = load.traffic.long
    if waiting.count and not change.regardless_of_load:
        return Rejected(f"requests of up to {waiting.need_tokens} tokens wait for a group that holds them")
    found = plan_restore(
        snapshot,
        usage_limit=inf if change.regardless_of_load else RESTORE_USAGE_LIMIT,
        only=change.only,
        longest_tokens={
            name: one.longest_token_count for name, one in zip(columns_of(snapshot.groups).group_ids, led, strict=True)
        },
    )
    lines = tuple(explain_restore(found))
    chosen = [dissolution.group_id for dissolution in found.dissolutions]
    if not chosen:
        return Rejected("; ".join(lines))
    compared = None
    if planning.compares and not change.regardless_of_load:
        compared = _compared(
            surveyed, load, model, planning.targets, {d.group_id: d.block_counts for d in found.dissolutions}
        )
        if compared is not None and compared.chosen is compared.candidates[0]:
            return Rejected(
                "; ".join(("a restore would be worse, or take too long", *compared.lines())), compared=compared
            )
    return Approved(
        TransitionKind.RESTORE,
        dissolved(base, chosen, epoch, f"{change.by}: restore"),
        snapshot.model,
        lines,
        sources=_sources(found),
        gives_way=not change.regardless_of_load,
        compared=compared,
    )


def _sources(found: RestorePlan) -> dict[WorkerId, Sources]:
    names = sorted({pull.worker_id for d in found.dissolutions for pull in d.pulls})
    return {name: sources_of(found, name) for name in names}


def _shape(model: ModelInfo | None, loads: Loads) -> ModelShape | None:
    try:
        return shape_of(model, loads)
    except NoSurvey:
        return None
