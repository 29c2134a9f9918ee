"""Runs the cluster's transitions one at a time: decides when they begin or abort, and records their history (pure).

Rule 1: a transition begins only when the layout is at rest. Until it is committed or aborted, no other change of the
layout is made. Rule 2: the last journal is authoritative. A new leader completes or aborts the transition that it
describes.
"""

import dataclasses
import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from ballast.common.errors import InvariantViolation
from ballast.common.ids import Epoch, GroupId, WorkerId
from ballast.common.layout import Layout, Member
from ballast.common.model import ModelInfo
from ballast.common.overload import OverloadPolicy
from ballast.common.transition import TransitionKind
from services.planner.core import messages as p
from services.planner.core.change_requests import (
    Approved,
    DesiredChange,
    DropRequest,
    Planning,
    Rejected,
    RestoreRequest,
    SizeRequest,
    complete,
    decide,
)
from services.planner.core.kept_out import KeptOut
from services.planner.core.prediction_log import Predicted, PredictionLog
from services.planner.core.record import TransitionRecord
from services.planner.core.sizing import Sizing, SizingRules
from services.planner.core.stages import CoordinatorRules, Stage
from services.planner.core.standings import Standings
from services.planner.core.survey import pipelined
from services.planner.core.transition import (
    AbortWanted,
    Coordinator,
    Ended,
    Journal,
    Journaled,
    JournalRefused,
    MemberLost,
    PlannerTick,
    Poll,
    SendAbort,
    SendCommit,
    SendPrepare,
)
from services.planner.core.transition import Command as Step
from services.planner.core.transition import Event as StepEvent
from services.planner.policy.long_request import LongNeed

_STAGES = tuple(Stage)
_KEPT_RECORDS = 32
_KEPT_REQUESTS = 1000
# After an overload without a worthwhile drop, the planner re-evaluates until the monitor may raise the next one. It
# does so less often with more instances, because each evaluation takes longer.
_LOOK_AGAIN_S, _LOOK_AGAIN_S_EACH, _LOOK_FOR_S = 0.1, 1e-4, 2.6


@dataclass(frozen=True, slots=True, kw_only=True)
class ConductorRules:
    policy: OverloadPolicy = OverloadPolicy.DROP  # with any other policy, overloads are only counted
    pipeline_degree: int = 2  # instances of a static pipeline
    restores: bool = True  # True: layers are restored when demand has fallen
    sizing: SizingRules = field(default_factory=SizingRules)
    planning: Planning = field(default_factory=Planning)
    coordinator: CoordinatorRules = field(default_factory=CoordinatorRules)
    request_timeout_s: float = 5.0  # time after which a pending request is rejected
    retry_s: float = 2.0  # wait after a failed transition that the planner itself began


@dataclass(frozen=True, slots=True)
class LayoutContext:
    """State of the layout in which a transition begins."""

    layout: Layout
    model: ModelInfo | None
    epoch: Epoch  # epoch of the transition
    stranded: tuple[Member, ...]  # instances that hold only some layers and are not in any group
    kept_out: KeptOut


@dataclass(slots=True)
class _OperatorRequest:
    """An operator's request, stored so that a repetition gets the same answer."""

    what: tuple[object, ...]
    epoch: Epoch | None = None
    lines: tuple[str, ...] = ()


@dataclass(slots=True)
class Conductor:
    rules: ConductorRules
    standings: Standings
    coordinator: Coordinator | None = None
    record: TransitionRecord | None = None  # record of the current transition
    history: deque[TransitionRecord] = field(default_factory=lambda: deque[TransitionRecord](maxlen=_KEPT_RECORDS))
    to_write: Journal | None = None  # journal whose write is pending or unconfirmed
    newest: Journal | None = None  # newest journal known to be, or to have been, stored
    failed: tuple[WorkerId, ...] = ()  # members that failed in the last transition, to be handled by the core
    prediction_log: PredictionLog = field(default_factory=PredictionLog)  # predictions and outcomes of decisions
    sizing: Sizing = field(init=False)
    _change: DesiredChange | None = None
    _requested_at_s: float = 0.0
    _load: p.ClusterLoad | None = None  # loads for the pending change
    _sources: dict[WorkerId, p.Sources] = field(default_factory=dict[WorkerId, p.Sources])
    _began_by_planner: bool = False  # True: the transition may be aborted for other requests while it is prepared
    _requests: OrderedDict[str, _OperatorRequest] = field(default_factory=OrderedDict[str, _OperatorRequest])
    _own_at_s: float = 0.0  # earliest time at which the planner may begin another transition by itself
    _again_at_s: float = math.inf  # time at which an overload is evaluated again
    _again_bytes: int = 0  # shortfall of that overload
    _again_until_s: float = -math.inf  # time until which that overload is evaluated again
    _blind_s: tuple[float, float] | None = None  # times of the first and last rejection of an overload for missing data
    _held_until_s: float = 0.0  # earliest time of an automatic restore
    _dropped_at_s: dict[GroupId, float] = field(default_factory=dict[GroupId, float])

    def __post_init__(self) -> None:
        self.sizing = Sizing(dataclasses.replace(self.rules.sizing, drops=self.rules.policy is OverloadPolicy.DROP))

    @property
    def busy(self) -> bool:
        return self.coordinator is not None

    @property
    def changing(self) -> tuple[WorkerId, ...]:
        """The members whose groups change."""
        return () if self.coordinator is None else self.coordinator.members

    @property
    def holds_layout(self) -> bool:
        """True while no other change of the layout is allowed, because a transition based on it is neither committed
        nor aborted.
        """
        return self.coordinator is not None and not self.coordinator.decided

    @property
    def due_at_s(self) -> float:
        """Time at which `tick` must be called."""
        if self.coordinator is not None:
            own_s = self.coordinator.tick_at_s if self.to_write is None else math.inf
        else:
            own_s = (
                self._requested_at_s + self.rules.request_timeout_s
                if self._change is not None
                else min(self._again_at_s, self.sizing.look_at_s)
            )
        return min(own_s, self.prediction_log.due_at_s)

    @property
    def own_at_s(self) -> float:
        return self._own_at_s

    def held_s(self, at_s: float) -> float:
        """Return the seconds for which automatic restores remain suspended at an operator's request."""
        return max(0.0, self._held_until_s - at_s)

    def records(self) -> list[TransitionRecord]:
        """Return the records of transitions, newest first."""
        return ([self.record] if self.record is not None else []) + list(reversed(self.history))

    # ------------------------------------------------------------ change requests

    def overload(self, event: p.OverloadRaised) -> list[p.Command]:
        if self.rules.policy is not OverloadPolicy.DROP:
            why = f"the policy is {self.rules.policy}"
            return [p.NothingDone("overload", why, event.required_bytes, event.cause_id)]
        if self._reduces_memory:
            self._again_until_s, self._again_bytes = event.at_s + _LOOK_FOR_S, event.required_bytes
            if self._must_end and self.holds_layout:
                return []
            return self._steps(AbortWanted(event.at_s, "demand is back"), event.at_s, event.cause_id)
        if self.busy or isinstance(self._change, DropRequest) or (self._change is not None and self._change.request_id):
            return []
        self._again_until_s, self._again_bytes = event.at_s + _LOOK_FOR_S, event.required_bytes
        return self._take(DropRequest("overload", event.cause_id, required_bytes=event.required_bytes), event.at_s)

    def long_request(self, event: p.LongRequestRaised) -> list[p.Command]:
        """Request a group for a long request. A restore that is still being prepared is aborted first, because it might
        take the memory. The event is repeated each second, so a change that is impossible now is evaluated again.
        """
        if self.rules.policy is not OverloadPolicy.DROP or self._has_change:
            return []
        if self.busy:
            may = self._is_preemptible
            return (
                self._steps(AbortWanted(event.at_s, "a long request waits"), event.at_s, event.cause_id) if may else []
            )
        need = LongNeed(event.need_tokens, event.prompt_tokens, GroupId(event.leader_id) if event.leader_id else None)
        return self._take(DropRequest("long request", event.cause_id, long=need), event.at_s)

    @property
    def _must_end(self) -> bool:
        """True for a restore that a draining member waits for. Rising demand does not abort such a restore."""
        return self.record is not None and self.record.by == "drain"

    @property
    def _reduces_memory(self) -> bool:
        """True for a restore that reduces KV memory. A restore of stranded survivors adds KV memory instead."""
        if self.coordinator is None or self.coordinator.journal.kind is TransitionKind.DROP:
            return False
        journal = self.coordinator.journal
        return any(len(group.members) > 1 and group not in journal.target.groups for group in journal.base.groups)

    def relief(self, event: p.ReliefRaised) -> list[p.Command]:
        if self.busy or self._has_change or event.at_s < self._held_until_s:
            return []
        if self.rules.policy is not OverloadPolicy.DROP or not self.rules.restores:
            return []
        return self._take(RestoreRequest("relief", event.cause_id), event.at_s)

    def requested(self, event: p.ChangeRequest) -> list[p.Command]:
        change: DesiredChange
        if isinstance(event, p.DropRequested):
            change = DropRequest(
                "operator",
                event.cause_id,
                event.request_id,
                event.required_bytes,
                event.worker_ids,
                hold_s=event.hold_s,
            )
        else:
            change = RestoreRequest("operator", event.cause_id, event.request_id, regardless_of_load=True)
        what = dataclasses.astuple(dataclasses.replace(change, cause_id=""))
        earlier = self._requests.get(event.request_id)
        if earlier is not None:
            if earlier.what != what:
                why = f"request id {event.request_id!r} was already used for another change"
                return [p.RefuseChange(event.request_id, p.ChangeRefusal.ID_REUSED, why)]
            return [] if earlier.epoch is None else [p.AnswerChange(event.request_id, earlier.epoch, earlier.lines)]
        if self._has_change or (self.busy and not self._is_preemptible):
            return [p.RefuseChange(event.request_id, p.ChangeRefusal.BUSY, self._why_busy())]
        if isinstance(change, RestoreRequest) and self.rules.policy is OverloadPolicy.STATIC_PIPELINE:
            why = "pipelines are permanent, as the policy is static-pipeline"
            return [p.RefuseChange(event.request_id, p.ChangeRefusal.NOT_POSSIBLE, why)]
        if isinstance(change, RestoreRequest):
            self._held_until_s = 0.0
        self._requests[event.request_id] = _OperatorRequest(what)
        while len(self._requests) > _KEPT_REQUESTS:
            self._requests.popitem(last=False)
        given_up = self._steps(AbortWanted(event.at_s, "an operator wants another change"), event.at_s, event.cause_id)
        return given_up + self._take(change, event.at_s)

    @property
    def _has_change(self) -> bool:
        """True if a change other than a size evaluation is pending."""
        return self._change is not None and not isinstance(self._change, SizeRequest)

    @property
    def _is_preemptible(self) -> bool:
        """True while a restore that the planner itself began is being prepared, so that other requests may preempt
        it.
        """
        return self.coordinator is not None and self._began_by_planner and self.coordinator.stage is Stage.PREPARING

    def dissolve_draining(self, layout: Layout, at_s: float, cause_id: str) -> list[p.Command]:
        """Request a restore of the groups that have a draining member, if any."""
        groups = _draining(layout)
        if not groups or self.busy or self._has_change or at_s < self._own_at_s:
            return []
        self._own_at_s = at_s + self.rules.retry_s
        return self._take(RestoreRequest("drain", cause_id, only=groups, regardless_of_load=True), at_s)

    def _take(self, change: DesiredChange, at_s: float) -> list[p.Command]:
        self._change, self._requested_at_s, self._load, self._again_at_s = change, at_s, None, math.inf
        return [p.ReadLoads(change.cause_id)]

    def _why_busy(self) -> str:
        if self.record is not None:
            return f"the transition to epoch {self.record.epoch} ({self.record.journal.kind}) is under way"
        return "another change is about to begin"

    def loads_read(self, event: p.LoadsRead) -> list[p.Command]:
        change = self._change if self._change is not None and self._change.cause_id == event.cause_id else None
        if isinstance(change, SizeRequest) and event.failure:
            return self._looked(event.at_s)
        if event.failure:
            return [] if change is None else self._deny(p.ChangeRefusal.NO_LOADS, Rejected(event.failure))
        if change is not None:
            self._load = event.load
        return _told(self.prediction_log.settle(event.load.traffic, event.at_s))

    # ------------------------------------------------------------ beginning

    @property
    def wants_to_begin(self) -> bool:
        return not self.busy and self._change is not None and self._load is not None

    def begin(self, context: LayoutContext, at_s: float, cause_id: str) -> list[p.Command]:
        """Plan the pending request and begin its transition, if possible. The layout must be at rest."""
        change, load = self._change, self._load
        if change is None or load is None:
            return []
        sizes = isinstance(change, SizeRequest) or (self.rules.sizing.parks and not change.request_id)
        if sizes and (moved := self._size(context, load, at_s)):
            return moved  # the pending request waits until the new layout is stored
        if isinstance(change, SizeRequest):
            return self._looked(at_s)
        if isinstance(change, DropRequest):
            if why := context.kept_out.why_not_together(change.worker_ids):
                return self._defer(change, Rejected(why), context.layout, at_s)
            load = load if change.worker_ids else load.without(context.kept_out.why(at_s))
            change = dataclasses.replace(change, blind_s=self._blind_for_s(at_s))
        approved = decide(change, context.layout, context.model, load, context.epoch, self.rules.planning)
        epoch = None if isinstance(approved, Rejected) else context.epoch
        told: list[p.Command] = [] if epoch is None else _told(self.prediction_log.overtake(load.traffic, at_s))
        if approved.compared is not None:
            self.prediction_log.note(approved.compared, load.traffic, at_s, epoch)
        if isinstance(approved, Rejected):
            if approved.blind:
                self._blind_s = (at_s - self._blind_for_s(at_s), at_s)
            return self._defer(change, approved, context.layout, at_s)
        self._change = self._load = None
        if isinstance(change, DropRequest):
            self._held_until_s = max(self._held_until_s, at_s + change.hold_s)
        if approved.shortfall_bytes:
            why = "the plan frees less than is needed"
            told.append(p.NothingDone(change.by, why, approved.shortfall_bytes, change.cause_id))
        if change.request_id:
            self._requests[change.request_id].lines = approved.lines
        return told + self.start(approved, context, at_s, change)

    def _blind_for_s(self, at_s: float) -> float:
        """Seconds since the first overload that could not be compared because data was missing; 0 if the last one is
        not recent.
        """
        if self._blind_s is None or at_s - self._blind_s[1] > 2 * _LOOK_FOR_S:
            return 0.0
        return at_s - self._blind_s[0]

    def _size(self, context: LayoutContext, load: p.ClusterLoad, at_s: float) -> list[p.Command]:
        """Evaluate how many instances should serve, and park or wake instances accordingly."""
        load, targets = load.without(context.kept_out.of_another_protocol()), self.rules.planning.targets
        may_shrink = isinstance(self._change, SizeRequest)
        away, compared = self.sizing.look(context.layout, context.model, load, targets, at_s, may_shrink=may_shrink)
        changed = [w for w, is_away in away.items() if self.standings.put(w, away=is_away)]
        if not changed or compared is None:
            return []
        if isinstance(self._change, SizeRequest):
            self._looked(at_s)
        return [p.Sized(tuple(changed), tuple(compared.lines()), "size")]

    def _looked(self, at_s: float) -> list[p.Command]:
        self._change = self._load = None
        self.sizing.later(at_s)
        return []

    def _defer(self, change: DesiredChange, rejected: Rejected, layout: Layout, at_s: float) -> list[p.Command]:
        """Reject a change. If it is only not worthwhile at present, schedule another evaluation. An overload is
        reported once, no matter how often it is evaluated.
        """
        told = self._deny(p.ChangeRefusal.NOT_POSSIBLE, rejected)
        if not rejected.for_now:
            return told
        again_at_s = at_s + _LOOK_AGAIN_S + _LOOK_AGAIN_S_EACH * len(layout.groups)
        if again_at_s < self._again_until_s:
            self._again_at_s = again_at_s
        return [] if isinstance(change, DropRequest) and change.again else told

    def begin_completion(self, context: LayoutContext, at_s: float, cause_id: str) -> list[p.Command]:
        """Begin a restore in which stranded instances load their missing layers."""
        if self.busy or not context.stranded or at_s < self._own_at_s:
            return []
        self._own_at_s = at_s + self.rules.retry_s
        names = " ".join(m.worker_id for m in context.stranded)
        approved = complete(context.layout, context.stranded, context.epoch, f"loss: {names} remained of a group")
        return self.start(approved, context, at_s, RestoreRequest("loss", cause_id))

    def begin_pipelines(self, context: LayoutContext, at_s: float, cause_id: str) -> list[p.Command]:
        """Begin a drop that merges instances that serve alone into as many complete static pipelines as possible."""
        if self.rules.policy is not OverloadPolicy.STATIC_PIPELINE or self.busy or at_s < self._own_at_s:
            return []
        degree = self.rules.pipeline_degree
        target = pipelined(context.layout, degree, context.epoch, "static pipelines", context.kept_out.why(at_s))
        if target is None:
            return []
        self._own_at_s = at_s + self.rules.retry_s
        return self.start(
            Approved(TransitionKind.DROP, target, None, ()), context, at_s, DropRequest("policy", cause_id)
        )

    def start(self, approved: Approved, context: LayoutContext, at_s: float, change: DesiredChange) -> list[p.Command]:
        journal = Journal(approved.kind, context.layout, approved.target, Stage.PREPARING, approved.target.reason)
        self.coordinator = Coordinator(journal, at_s, self.rules.coordinator)
        self.record = TransitionRecord(journal, at_s, change.by, change.request_id, approved.shape)
        self._sources, self._began_by_planner, self._again_at_s = dict(approved.sources), approved.gives_way, math.inf
        stay = set(approved.target.groups)
        gone = [g for g in context.layout.groups if g not in stay]
        if approved.kind is TransitionKind.RESTORE:
            since = [self._dropped_at_s[g.group_id] for g in gone if g.group_id in self._dropped_at_s]
            self.record.dropped_at_s = min(since, default=None)
        return self._carry_out(self.coordinator.begin(), at_s, change.cause_id)

    def _deny(self, refusal: p.ChangeRefusal, rejected: Rejected) -> list[p.Command]:
        change, self._change, self._load = self._change, None, None
        if change is None:
            raise InvariantViolation("a change was rejected that is not pending")
        if change.request_id:
            self._requests.pop(change.request_id, None)
            return [p.RefuseChange(change.request_id, refusal, rejected.why)]
        return [p.NothingDone(change.by, rejected.why, rejected.shortfall_bytes, change.cause_id)]

    # ------------------------------------------------------------ progress

    def journaled(self, journal: Journal, at_s: float, cause_id: str) -> list[p.Command]:
        self.newest = journal
        if self.to_write == journal:
            self.to_write = None
        if self.coordinator is None or self.coordinator.journal.epoch != journal.epoch:
            return []
        return self._steps(Journaled(at_s, journal.stage), at_s, cause_id)

    def journal_refused(self, journal: Journal, at_s: float, cause_id: str) -> list[p.Command]:
        if self.to_write == journal:
            self.to_write = None
        return self._steps(JournalRefused(at_s, journal.stage, "the layout has changed meanwhile"), at_s, cause_id)

    def member_answered(self, event: p.MemberAnswered) -> list[p.Command]:
        if self.coordinator is None or self.coordinator.journal.epoch != event.epoch:
            return []
        return self._steps(event.said, event.at_s, event.cause_id)

    def members_lost(self, lost: dict[WorkerId, str], at_s: float, cause_id: str) -> list[p.Command]:
        commands: list[p.Command] = []
        for worker_id, why in sorted(lost.items()):
            commands += self._steps(MemberLost(at_s, worker_id, why), at_s, cause_id)
        return commands

    def yield_to_changes(self, layout: Layout, at_s: float, cause_id: str, *, changes: bool) -> list[p.Command]:
        """Abort a restore that the planner itself began if the layout must change or a member drains."""
        if not self._is_preemptible or not (changes or _draining(layout)):
            return []
        return self._steps(AbortWanted(at_s, "the layout has to change"), at_s, cause_id)

    def abort_restore(self, why: str, at_s: float, cause_id: str) -> list[p.Command]:
        """Abort a running restore so that the layout can change."""
        if self.coordinator is None or self.coordinator.journal.kind is TransitionKind.DROP:
            return []
        return self._steps(AbortWanted(at_s, why), at_s, cause_id)

    def tick(self, at_s: float, cause_id: str) -> list[p.Command]:
        if self._change is not None and at_s >= self._requested_at_s + self.rules.request_timeout_s:
            if isinstance(self._change, SizeRequest):
                return self._looked(at_s)
            return self._deny(p.ChangeRefusal.NOT_POSSIBLE, Rejected("the layout did not come to rest in time"))
        if self._change is None and not self.busy and at_s >= self._again_at_s:
            return self._take(DropRequest("overload", cause_id, required_bytes=self._again_bytes, again=True), at_s)
        if self._change is None and not self.busy and at_s >= self.sizing.look_at_s:
            return self._take(SizeRequest(cause_id), at_s)
        asked: list[p.Command] = [p.ReadLoads(cause_id)] if self.prediction_log.asks(at_s) else []
        return asked + self._steps(PlannerTick(at_s), at_s, cause_id)

    def _steps(self, event: StepEvent, at_s: float, cause_id: str) -> list[p.Command]:
        if self.coordinator is None:
            return []
        return self._carry_out(self.coordinator.handle(event), at_s, cause_id)

    def _carry_out(self, steps: list[Step], at_s: float, cause_id: str) -> list[p.Command]:
        if self.coordinator is None or self.record is None:
            raise InvariantViolation("steps without a transition")
        journal, record = self.coordinator.journal, self.record
        commands: list[p.Command] = []
        record.statuses = dict(self.coordinator.statuses)
        if journal.stage not in record.reached_at_s and self.to_write is None and self.newest == journal:
            record.journal = journal
            record.reached_at_s[journal.stage] = at_s
            if not journal.stage.over:
                commands.append(p.TransitionMoved(record, cause_id))
            commands += self._answer(journal)
        for step in steps:
            commands += self._carry_out_one(step, at_s, cause_id)
        return commands

    def _answer(self, journal: Journal) -> list[p.Command]:
        assert self.record is not None
        request = self._requests.get(self.record.request_id)
        if request is None or request.epoch is not None or journal.stage is not Stage.PREPARING:
            return []
        request.epoch = journal.epoch
        return [p.AnswerChange(self.record.request_id, journal.epoch, request.lines)]

    def _carry_out_one(self, step: Step, at_s: float, cause_id: str) -> list[p.Command]:
        match step:
            case Journal():
                self.to_write = step
                return []
            case SendPrepare(worker_id):
                sources = self._sources.get(worker_id, ())
                return [self._call(p.WorkerCall.PREPARE, worker_id, cause_id, sources=sources)]
            case SendCommit(worker_id):
                return [self._call(p.WorkerCall.COMMIT, worker_id, cause_id)]
            case SendAbort(worker_id, why):
                return [self._call(p.WorkerCall.ABORT, worker_id, cause_id, why=why)]
            case Poll(worker_id):
                return [self._call(p.WorkerCall.POLL, worker_id, cause_id)]
            case Ended():
                return self._ended(step, at_s, cause_id)

    def _call(
        self, call: p.WorkerCall, worker_id: WorkerId, cause_id: str, *, sources: p.Sources = (), why: str = ""
    ) -> p.CallMember:
        assert self.coordinator is not None
        journal = self.coordinator.journal
        member = next(m for g in journal.target.groups for m in g.members if m.worker_id == worker_id)
        return p.CallMember(call, member, journal, cause_id, sources, why)

    def _ended(self, step: Ended, at_s: float, cause_id: str) -> list[p.Command]:
        assert self.coordinator is not None
        assert self.record is not None
        record, journal = self.record, self.coordinator.journal
        record.journal, record.lost = journal, step.lost
        record.reached_at_s.setdefault(journal.stage, at_s)
        self.history.append(record)
        if journal.kind is TransitionKind.RESTORE and at_s < self._again_until_s:  # evaluate a pending overload now
            self._again_at_s = at_s
        given_up = tuple(sorted(self.coordinator.given_up))
        self.coordinator = self.record = None
        commands: list[p.Command] = [p.TransitionMoved(record, cause_id)]
        if journal.stage is Stage.DONE:
            self.failed = step.lost
            self._remember_drops(record, at_s)
        else:
            self.failed = given_up
            self.prediction_log.forget(journal.epoch)
            self._own_at_s = at_s + self.rules.retry_s
        request = self._requests.get(record.request_id)
        if request is not None and request.epoch is None:
            del self._requests[record.request_id]
            commands.append(p.RefuseChange(record.request_id, p.ChangeRefusal.NOT_POSSIBLE, step.why))
        return commands

    def age_s(self, group_id: GroupId, at_s: float) -> float:
        """Return the seconds since a group was merged; infinity if unknown."""
        return at_s - self._dropped_at_s.get(group_id, -math.inf)

    def _remember_drops(self, record: TransitionRecord, at_s: float) -> None:
        there = {g.group_id for g in record.journal.target.groups if len(g.members) > 1}
        self._dropped_at_s = {g: since for g, since in self._dropped_at_s.items() if g in there}
        if record.journal.kind is TransitionKind.DROP:
            began = record.reached_at_s.get(Stage.COMMITTING, at_s)
            self._dropped_at_s |= {
                g.group_id: began for g in record.changed_groups if g.group_id not in self._dropped_at_s
            }

    # ------------------------------------------------------------ leadership

    def take_over(self, stored: Journal | None, at_s: float, cause_id: str) -> list[p.Command]:
        """Continue with the newer of the stored and the remembered journal: the state server may have lost writes."""
        journal = self._latest(stored, self.newest)
        self._give_up()
        self.newest = journal
        if journal is None or journal.stage.over:
            return []
        self.record = TransitionRecord(journal, at_s, "previous planner", "")
        self.coordinator, steps = Coordinator.resume(journal, at_s, self.rules.coordinator)
        return self._carry_out(steps, at_s, cause_id)

    def observe(self, stored: Journal | None) -> None:
        """Follow the stored journal as a standby."""
        self.newest = self._latest(stored, self.newest)

    def stand_by(self) -> list[p.Command]:
        waiting = [request_id for request_id, request in self._requests.items() if request.epoch is None]
        self._give_up()
        self.__post_init__()  # drops pending evaluations; learned data is stored
        for request_id in waiting:
            del self._requests[request_id]
        return [p.RefuseChange(request_id, p.ChangeRefusal.STANDBY, "") for request_id in waiting]

    def _give_up(self) -> None:
        self.coordinator = self.record = self.to_write = self._change = self._load = None
        self._again_at_s = math.inf
        self.prediction_log.open.clear()

    @staticmethod
    def _latest(one: Journal | None, other: Journal | None) -> Journal | None:
        if one is None or other is None:
            return one or other
        return max(one, other, key=lambda journal: (journal.epoch, _STAGES.index(journal.stage)))

    def check(self) -> None:
        if (self.coordinator is None) != (self.record is None):
            raise InvariantViolation("a transition without a record, or the reverse")
        if self.to_write is not None and self.coordinator is None:
            raise InvariantViolation(f"epoch {self.to_write.epoch} is journaled without a transition")


def _told(settled: list[Predicted]) -> list[p.Command]:
    return [p.PredictionSettled(one) for one in settled]


def _draining(layout: Layout) -> tuple[GroupId, ...]:
    """Groups with a draining member."""
    return tuple(g.group_id for g in layout.groups if len(g.members) > 1 and any(m.draining for m in g.members))
