"""The layout of the cluster and its changes (pure; `handle` is the only entry).

`store_sync` reads and writes the layout. Joins at about the same time share an epoch, while a loss leads to a new epoch
at once. While the state server is unreachable, the newest change is remembered and written later.

Epochs never decrease or repeat. A state server that has lost the layout gets it again under the next epoch. A new
leader that finds the layout lost cannot know the last epochs, so it waits for the monitor's snapshot and continues from
the time (in seconds) of its fencing token, which no epoch of an earlier leader can have reached. Only if all planners
and the state server are lost at once do epochs restart; epochs of transitions continue from the highest that an
instance has reported. Groups are then rebuilt from their members' reports (`claims`).

Until a transition (see `conductor`) is committed or aborted, the layout does not change; joins and losses are written
afterwards. If a pipeline loses a member, the others also leave the layout, and return once they hold all layers.
"""

import math
from dataclasses import dataclass, field

from ballast.common.errors import InvariantViolation
from ballast.common.ids import Epoch, Incarnation, WorkerId
from ballast.common.layout import Group, Layout, Member, worker_ids
from ballast.common.model import ModelInfo
from services.planner.core import messages as p
from services.planner.core.change_requests import DropRequest
from services.planner.core.claims import newer, rebuild
from services.planner.core.conductor import Conductor, ConductorRules, LayoutContext
from services.planner.core.drains import Drains
from services.planner.core.evictions import Suspects
from services.planner.core.inconsistent import Inconsistent
from services.planner.core.kept_out import KeptOut
from services.planner.core.membership import Membership, difference
from services.planner.core.reason import explain
from services.planner.core.record import TransitionRecord
from services.planner.core.stages import Stage
from services.planner.core.stand_in import StandIns, lost_followers, plan_stand_in
from services.planner.core.standings import Standings
from services.planner.core.store_sync import StoreSync
from services.planner.core.transition import Journal
from services.planner.policy.replicate import Partial, keep_pipelines

NO_LAYOUT = Layout(Epoch(0), 0, (), "nothing planned yet")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerRules:
    coalesce_s: float = 0.1  # joins within this time share an epoch, for example at the start of a cluster
    verify_interval_s: float = 1.0  # interval of reads of the stored layout, which only a second leader would change
    retry_s: float = 0.5  # wait before the next attempt if the state server did not answer
    max_drains: int = 1000  # number of drains whose answers are remembered
    disagree_s: float = 2.0  # time for which a report must contradict the layout before it takes precedence
    transitions: ConductorRules = field(default_factory=ConductorRules)


@dataclass(slots=True)
class PlannerCore:
    rules: PlannerRules
    layout: Layout = NO_LAYOUT  # newest layout known to be stored, now or before the state server lost it
    layout_model: ModelInfo | None = None  # model served by its instances
    membership: Membership = field(default_factory=Membership)
    partial: Partial = ()  # incarnations that hold only some layers, as last written
    suspects: Suspects = field(default_factory=Suspects)  # members that do not report to the monitor
    conductor: Conductor = field(init=False)
    store: StoreSync = field(init=False)
    _drains: Drains = field(init=False)
    standings: Standings = field(init=False)
    _plan_at_s: float = math.inf  # time at which to plan; inf: there are no changes
    _timer_at_s: float = math.inf
    _why_lost: dict[WorkerId, str] = field(default_factory=dict[WorkerId, str])  # reasons for losses not written yet
    inconsistent: Inconsistent = field(init=False)
    kept_out: KeptOut = field(init=False)
    _stand_ins: StandIns = field(default_factory=StandIns)

    def __post_init__(self) -> None:
        self.store = StoreSync(self.rules.verify_interval_s, self.rules.retry_s)
        self._drains = Drains(self.rules.max_drains)
        self.inconsistent = Inconsistent(self.rules.disagree_s)
        self.kept_out, self.standings = KeptOut(self.membership), Standings(self.membership)
        self.conductor = Conductor(self.rules.transitions, self.standings)

    @property
    def active(self) -> bool:
        return self.store.token is not None

    @property
    def in_flight(self) -> Layout | None:
        """The layout being written."""
        return self.store.writing.layout if isinstance(self.store.writing, p.WriteLayout) else None

    @property
    def layout_at_rest(self) -> Layout | None:
        """The layout; None while it is changing or another planner leads."""
        return None if not self.active or self.conductor.busy else self.layout

    @property
    def settled_epoch(self) -> Epoch:
        """The highest epoch up to which no further transition will be committed; 0 if none is certain.

        It is always a stored epoch, because another leader may use a number that was never stored.
        """
        certain = self._may_write and self.store.stored_epoch == self.layout.epoch
        if not certain or self.conductor.busy:
            return Epoch(0)
        newest = self.conductor.newest
        return max(self.layout.epoch, newest.epoch) if newest is not None and newest.stage.over else self.layout.epoch

    def handle(self, event: p.Event) -> list[p.Command]:
        record = self.conductor.record
        commands = self._apply(event)
        if record is not None and not self.conductor.busy:
            self._transition_ended(event.at_s, record)
        self._take_up_claims(event.at_s)
        self._compare(event)
        if self.suspects and self.active:
            commands += self._evict_gone(event)
        if self.active and self.standings.help_out(self.layout, event.at_s):
            self._replan(event.at_s)
        commands += self.standings.due(self.layout, event.at_s, event.cause_id) if self.active else []
        commands += self._act(event.at_s, event.cause_id)
        commands += self._reset_timer(event.at_s)
        return commands

    def _apply(self, event: p.Event) -> list[p.Command]:
        match event:
            case p.LeadershipChanged():
                return self._leadership_changed(event)
            case p.LayoutLoaded():
                return self._layout_loaded(event)
            case p.LoadFailed():
                self.store.load_failed(event.at_s)
                return []
            case p.WriteSettled():
                return self._write_settled(event)
            case p.WorkerDrainRequested():
                return self._drain_requested(event)
            case p.StandingRequested():
                return self._standing_requested(event)
            case p.ParkRefused():
                if self.standings.refused(event):
                    self._replan(event.at_s)
                return []
            case p.DropRequested() | p.RestoreRequested():
                if not self.active:
                    return [p.RefuseChange(event.request_id, p.ChangeRefusal.STANDBY, "")]
                return self.conductor.requested(event)
            case p.LoadsRead():
                heard_of = (load.newest_epoch for load in event.load.workers.values())
                self.store.use(max(heard_of, default=0))
                if self._stand_ins.loads_read(event):
                    self._plan_at_s = min(self._plan_at_s, event.at_s)
                return self.conductor.loads_read(event)
            case p.MemberAnswered():
                return self.conductor.member_answered(event)
            case p.OverloadRaised():
                return self.conductor.overload(event) if self.active else []
            case p.LongRequestRaised():
                return self.conductor.long_request(event) if self.active else []
            case p.ReliefRaised():
                return self.conductor.relief(event) if self.active else []
            case p.TimerFired():
                self._timer_at_s = math.inf
                self._evict_inconsistent(event.at_s)
                return self.conductor.tick(event.at_s, event.cause_id)
            case p.SnapshotBegan() | p.SnapshotEnded() | p.InstanceUp() | p.InstanceLost() | p.InstanceDraining():
                # Late events of a monitor followed in an earlier leadership are ignored.
                return self._heard(event) if self.active else []
            case p.InstanceProbed():
                self.suspects.probed(event)
                return []

    # ------------------------------------------------------------ leadership and store

    def _leadership_changed(self, event: p.LeadershipChanged) -> list[p.Command]:
        was_active = self.active
        self.store.lead(event.token, event.at_s)
        refused: list[p.Command] = [*self.conductor.stand_by()]
        if self.active:
            self._plan_at_s = event.at_s
            return refused if was_active else [*refused, p.FollowMonitor()]
        self.membership.clear()
        self.suspects.keep(set())
        self._why_lost.clear()
        self._plan_at_s = math.inf
        refused += [p.RefuseDrain(request_id, p.DrainRefusal.STANDBY) for request_id in self._drains.give_up()]
        refused += self.standings.give_up()
        return [*refused, p.LeaveMonitor()] if was_active else []

    def _layout_loaded(self, event: p.LayoutLoaded) -> list[p.Command]:
        if not self.store.reading:
            return []
        stored, first = event.stored, not self.store.is_read
        self.store.loaded(stored, self.layout.epoch, event.at_s)
        commands: list[p.Command] = []
        journal = stored.journal if stored is not None else None
        newer = stored is not None and stored.layout.epoch > self.layout.epoch
        if stored is not None and newer:
            if journal is None or journal.epoch != stored.layout.epoch:  # stored outside a transition
                self.kept_out.regrouped(self.layout, stored.layout, self.conductor.age_s, event.at_s)
            self.conductor.failed = ()
            self.layout, self.layout_model, self.partial = stored.layout, stored.model, stored.partial
            commands.append(p.Publish(self.layout, event.cause_id))
        if not self.active:
            self.conductor.observe(journal)
            return commands
        if first and stored is not None:
            self.conductor.sizing.begin(stored.learnt)
        if first and not self.conductor.busy:
            commands += self.conductor.take_over(journal, event.at_s, event.cause_id)
            commands += self._report_lost(event)
        if first or newer:
            self.membership.presume(self.layout, self.layout_model)
        if (self.store.stored_epoch or 0) != self.layout.epoch or self._wanted()[0] != self.layout.groups:
            self._plan_at_s = min(self._plan_at_s, event.at_s)
        return commands

    def _write_settled(self, event: p.WriteSettled) -> list[p.Command]:
        write, is_written = event.write, event.outcome is p.WriteOutcome.WRITTEN
        if not self.store.settled(event):
            return []
        if isinstance(write, p.WriteLayout):
            if is_written:
                return self._written(write, event)
            self._plan_at_s = event.at_s
            return []
        journal, commands = write.journal, list[p.Command]()
        if event.outcome is p.WriteOutcome.CONFLICT:
            return self.conductor.journal_refused(journal, event.at_s, event.cause_id)
        if not is_written:
            return []
        if journal.stage is Stage.COMMITTING and journal.target.epoch >= self.layout.epoch:
            commands = self._stored(journal.target, write.partial, event)
        return commands + self.conductor.journaled(journal, event.at_s, event.cause_id)

    def _written(self, write: p.WriteLayout, event: p.WriteSettled) -> list[p.Command]:
        self.kept_out.regrouped(self.layout, write.layout, self.conductor.age_s, event.at_s)
        self.layout_model, self.conductor.failed = write.model, ()
        members = worker_ids(write.layout)
        self._why_lost = {w: why for w, why in self._why_lost.items() if w in members}
        return self._stored(write.layout, write.partial, event)

    def _stored(self, layout: Layout, partial: Partial, event: p.WriteSettled) -> list[p.Command]:
        self.layout, self.partial = layout, partial
        self.store.stored(layout.epoch, event.at_s)
        if self._wanted()[0] != layout.groups:
            self._plan_at_s = min(self._plan_at_s, event.at_s)
        return [p.Publish(layout, event.cause_id), *self._answer_drains()]

    def _transition_ended(self, at_s: float, ended: TransitionRecord) -> None:
        # After an aborted transition, contradictions that began before it keep their durations.
        before_s = ended.began_at_s if ended.journal.base.groups == self.layout.groups else -math.inf
        self.inconsistent.transition_ended(at_s, before_s)
        self._replan(at_s)
        if self._wanted()[0] == self.layout.groups:
            self.conductor.failed = ()

    def _partial_after(self, journal: Journal) -> Partial:
        served = worker_ids(journal.target)
        return tuple((w, incarnation) for w, incarnation in self.partial if w not in served)

    # ------------------------------------------------------------ instances

    def _heard(
        self, event: p.SnapshotBegan | p.SnapshotEnded | p.InstanceUp | p.InstanceLost | p.InstanceDraining
    ) -> list[p.Command]:
        match event:
            case p.SnapshotBegan():
                self.membership.begin_snapshot()
            case p.SnapshotEnded():
                missing = self.membership.end_snapshot()
                self.suspects.keep(set(missing))
                for worker_id in missing:
                    placeable = self.membership.known[worker_id].placeable
                    self.suspects.add(placeable, "the monitor does not know it", event.at_s)
                self._replan(event.at_s)
                return self._report_lost(event)
            case p.InstanceUp():
                return self._instance_up(event) + self._report_lost(event)
            case p.InstanceLost(worker_id=worker_id, incarnation=incarnation):
                if event.silent and self.membership.has(worker_id, incarnation):
                    self.suspects.add(self.membership.known[worker_id].placeable, event.why, event.at_s)
                else:
                    self._lose(worker_id, incarnation, event.why, event.at_s)
                return self._report_lost(event)
            case p.InstanceDraining(worker_id=worker_id, incarnation=incarnation):
                if self.membership.drain(worker_id, incarnation):
                    self._replan(event.at_s)
        return []

    def _lose(self, worker_id: WorkerId, incarnation: Incarnation, why: str, at_s: float) -> None:
        if self.membership.drop(worker_id, incarnation):
            self.suspects.clear(worker_id)
            self._note_lost(worker_id, why)
            self._replan(at_s)

    def _evict_gone(self, event: p.Event) -> list[p.Command]:
        """Evict the members that do not report to the monitor and are known to have ended."""
        left = self.inconsistent.worker_ids
        gone = self.suspects.gone(len(self.membership.known), self.inconsistent.grouped, left)
        for worker_id, incarnation, why in gone:
            self._lose(worker_id, incarnation, why, event.at_s)
        commands: list[p.Command] = [*self.suspects.due(event.at_s, event.cause_id)]
        return commands + (self._report_lost(event) if gone else [])

    def _instance_up(self, event: p.InstanceUp) -> list[p.Command]:
        before = self.membership.known.get(event.worker_id)
        if not self.membership.up(event):
            newest = self.membership.newest(event.worker_id)
            return [p.IgnoreStale(event.worker_id, event.incarnation, newest, event.cause_id)]
        self.suspects.clear(event.worker_id)
        if self._drains.ordered(event.worker_id, event.incarnation):
            self.membership.drain(event.worker_id, event.incarnation)
        commands: list[p.Command] = []
        known = self.membership.known[event.worker_id]
        same_life = before is not None and before.placeable.incarnation == event.incarnation
        told = same_life and before is not None and before.model == known.model
        if not told and self.membership.serves_another_model(event.worker_id):
            why = difference(event.model, self.membership.model)
            commands.append(p.RejectInstance(event.worker_id, event.incarnation, why, event.cause_id))
        if known.placeable.draining and not event.draining:
            # Its drain was requested, but it did not receive the order, because the previous planner ended or the
            # worker was unreachable.
            commands.append(p.AskWorkerToDrain(event.worker_id, event.incarnation, event.address, event.cause_id))
        self._replan(event.at_s + self.rules.coalesce_s)
        return commands

    def _report_lost(self, event: p.Event) -> list[p.Command]:
        """Report lost members to the current transition, and abort a restore if there are any."""
        coordinator = self.conductor.coordinator
        if coordinator is None:
            return []
        lost: dict[WorkerId, str] = {}
        for member in (m for group in coordinator.journal.target.groups for m in group.members):
            known = self.membership.known.get(member.worker_id)
            there = known is not None and known.placeable.incarnation == member.incarnation
            named = isinstance(event, (p.InstanceUp, p.InstanceLost)) and event.worker_id == member.worker_id
            if not there and (named or self.membership.complete):
                lost[member.worker_id] = self._why_lost.get(member.worker_id, "it has left the cluster")
        commands = self.conductor.members_lost(lost, event.at_s, event.cause_id)
        if lost:
            commands += self.conductor.abort_restore("another instance was lost", event.at_s, event.cause_id)
        return commands

    def _standing_requested(self, event: p.StandingRequested) -> list[p.Command]:
        if not self.active:
            return [p.RefuseChange(event.request_id, p.ChangeRefusal.STANDBY, "")]
        commands = self.standings.requested(event, self.layout, busy=self.conductor.busy)
        self._replan(event.at_s)
        return commands + self.standings.settle(self.layout)

    def _drain_requested(self, event: p.WorkerDrainRequested) -> list[p.Command]:
        if not self.active:
            return [p.RefuseDrain(event.request_id, p.DrainRefusal.STANDBY)]
        all_known = self.store.is_read and self.membership.complete
        commands = self._drains.requested(event, self.membership, all_known=all_known)
        if any(isinstance(command, p.AskWorkerToDrain) for command in commands):
            self._plan_at_s = min(self._plan_at_s, event.at_s)
        return commands

    # ------------------------------------------------------------ planning

    def _replan(self, at_s: float) -> None:
        if self._plan_at_s <= at_s:  # already scheduled, for example by the first of a thousand simultaneous joins
            return
        if self._wanted()[0] != self.layout.groups or self.in_flight is not None:
            self._plan_at_s = at_s

    def _wanted(self) -> tuple[tuple[Group, ...], Partial]:
        """The wanted groups, and the instances left out because they lack layers."""
        return keep_pipelines(self.layout.groups, self.membership.placeable(), self._stranded(), self._layer_count())

    def _stranded(self) -> Partial:
        """Return the incarnations that may lack layers: the stored ones, members of a failed transition, and
        inconsistent ones.
        """
        failed = set(self.conductor.failed)
        if not failed and not self.inconsistent:
            return self.partial
        groups = [g for g in self.layout.groups if any(m.worker_id in failed for m in g.members)]
        lives = {m.worker_id: m.incarnation for group in groups for m in group.members}
        lives |= self.inconsistent.lives(self.layout, self.membership)
        return tuple(sorted({**dict(self.partial), **lives}.items()))

    def _compare(self, event: p.Event) -> None:
        if not self.active:
            self.inconsistent.clear()
        elif self.inconsistent.compare(event, self.layout, self.membership, self._layer_count()):
            self._replan(event.at_s + self.rules.coalesce_s)

    def _evict_inconsistent(self, at_s: float) -> None:
        if self.conductor.busy or not self.membership.complete:
            return
        for worker_id in self.inconsistent.overdue(at_s):
            self._note_lost(worker_id, "its reports contradict the layout")
        self._replan(at_s)

    def _inconsistent_at_s(self) -> float:
        waits = self.active and not self.conductor.busy and self.membership.complete
        return self.inconsistent.due_at_s if waits else math.inf

    def _layer_count(self) -> int:
        return self.membership.model.layer_count if self.membership.model is not None else self.layout.layer_count

    def _act(self, at_s: float, cause_id: str) -> list[p.Command]:
        """Start the operations that are due, at most one store operation at a time: a pending journal write, a read, or
        a change of the layout.
        """
        store, journal = self.store, self.conductor.to_write
        if store.busy:
            return []
        if journal is not None and store.token is not None and store.journal_at_s <= at_s:
            model, partial = self.membership.model or self.layout_model, self._partial_after(journal)
            return [store.write(p.WriteJournal(journal, journal.base.epoch, model, partial, store.token, cause_id))]
        if store.read_at_s <= at_s:
            return [store.read()]
        if not self._may_write:
            return []
        if self.conductor.holds_layout:
            given_way = self.conductor.yield_to_changes(self.layout, at_s, cause_id, changes=self._plan_at_s <= at_s)
            return given_way + (self._act(at_s, cause_id) if self.conductor.to_write not in (None, journal) else [])
        if self._plan_at_s <= at_s:
            return self._stand_in(at_s, cause_id) or self._plan(at_s, cause_id)
        return self._begin_transition(at_s, cause_id)

    def _stand_in(self, at_s: float, cause_id: str) -> list[p.Command]:
        """Replace a lost follower if an instance can take its place. Empty: no follower is lost or replaced now."""
        if self.store.stored_epoch != self.layout.epoch:
            return []
        busy, changing = self.conductor.busy, self.conductor.changing
        at_rest = (group for group in self.layout.groups if group.leader.worker_id not in changing)
        lost = lost_followers(at_rest, self.membership.placeable(), self._stranded())
        due_at_s = self._stand_ins.due_at_s(lost, at_s, busy=busy)
        if due_at_s is None:
            return []
        if due_at_s > at_s:
            self._plan_at_s = due_at_s
            return [p.ReadLoads(cause_id)] if not busy and self._stand_ins.asks() else []
        context, taken = self._context(()), self._stand_ins.take()
        approved = None
        if taken is not None and not busy:
            approved = plan_stand_in(*taken, self.layout, self.layout_model, context.epoch, self.kept_out.why(at_s))
        if approved is None:
            return self._stand_in(at_s, cause_id)  # another follower may be lost, too
        commands = self.conductor.start(approved, context, at_s, DropRequest("loss", cause_id))
        self.store.use(context.epoch)
        return commands + self._act(at_s, cause_id)

    def _context(self, stranded: tuple[Member, ...]) -> LayoutContext:
        return LayoutContext(self.layout, self.layout_model, self._next_epoch(), stranded, self.kept_out)

    def _begin_transition(self, at_s: float, cause_id: str) -> list[p.Command]:
        """Begin a pending transition, if no other work is due and all instances are known."""
        if self.conductor.busy or self._plan_at_s != math.inf or self.store.stored_epoch != self.layout.epoch:
            return []
        groups, partial = self._wanted()
        if groups != self.layout.groups:
            return []
        left_over = [self.membership.known[w].placeable for w, _ in partial if w not in self.suspects]
        stranded = tuple(one.member(0, self._layer_count()) for one in left_over if not one.draining)
        context = self._context(stranded)
        commands = self.conductor.begin_completion(context, at_s, cause_id)
        if not commands and not self.conductor.busy and self.conductor.wants_to_begin:
            commands = self.conductor.begin(context, at_s, cause_id)
            self._replan(at_s)
        if not commands and not self.conductor.busy:
            commands = self.conductor.dissolve_draining(self.layout, at_s, cause_id)
        if not commands and not self.conductor.busy:
            commands = self.conductor.begin_pipelines(context, at_s, cause_id)
        if self._plan_at_s <= at_s:
            return commands + self._act(at_s, cause_id)
        if self.conductor.coordinator is not None:
            self.store.use(context.epoch)
            commands += self._act(at_s, cause_id)
        return commands

    @property
    def _may_write(self) -> bool:
        return self.active and self.store.is_read and not self._awaits_worker_reports()

    def _awaits_worker_reports(self) -> bool:
        """True until worker reports have confirmed the stored layout."""
        if self.membership.complete:
            return False
        return not self.store.has_seen_last or bool(newer(self.layout, self.membership.claims()))

    def _take_up_claims(self, at_s: float) -> None:
        """Rebuild a lost layout from the members' reports, once all instances and the stored state are known."""
        if not (self.active and self.store.is_read and self.membership.complete) or self.in_flight is not None:
            return
        rebuilt = None if self.conductor.busy else rebuild(self.layout, self.membership.claims(), self._layer_count())
        if rebuilt is None:
            return
        self.layout, self.layout_model = rebuilt.layout, self.membership.model
        self.partial = tuple(sorted({**dict(self.partial), **dict(rebuilt.partial)}.items()))
        self._plan_at_s = min(self._plan_at_s, at_s)

    def _plan(self, at_s: float, cause_id: str) -> list[p.Command]:
        if self._plan_at_s > at_s:
            return []
        self._plan_at_s = math.inf
        groups, partial = self._wanted()
        stored_epoch, token = self.store.stored_epoch, self.store.token
        if groups == self.layout.groups and (stored_epoch or 0) == self.layout.epoch:
            return self._answer_drains()
        if token is None:
            raise InvariantViolation("a standby planner plans")
        reason = explain(self.layout.groups, groups, self._why_lost)
        planned = Layout(self._next_epoch(), self._layer_count(), groups, reason)
        planned.check()
        write = p.WriteLayout(planned, self.membership.model, stored_epoch, token, cause_id, partial)
        return [self.store.write(write)]

    def _next_epoch(self) -> Epoch:
        return self.store.next_epoch(self.layout.epoch)

    def _answer_drains(self) -> list[p.Command]:
        answers: list[p.Command] = [
            p.AnswerDrain(request, epoch) for request, epoch in self._drains.settle(self.layout)
        ]
        return answers + self.standings.settle(self.layout)

    def _note_lost(self, worker_id: WorkerId, why: str) -> None:
        if worker_id in worker_ids(self.layout) or (self.in_flight and worker_id in worker_ids(self.in_flight)):
            self._why_lost[worker_id] = why

    def _reset_timer(self, at_s: float) -> list[p.Command]:
        may_plan = (
            self.active and self.store.is_read and not self._awaits_worker_reports() and not self.conductor.holds_layout
        )
        plan_at_s = self._plan_at_s if may_plan else math.inf
        busy = self.store.busy
        due_at_s = math.inf if busy else min(self.store.read_at_s, plan_at_s, self._own_at_s(at_s))
        if not busy and self.conductor.to_write is not None:
            due_at_s = min(due_at_s, self.store.journal_at_s)
        due_at_s = min(due_at_s, self.conductor.due_at_s, self._inconsistent_at_s(), self.suspects.due_at_s)
        due_at_s = min(due_at_s, self.standings.order_at_s)
        if due_at_s == self._timer_at_s or due_at_s == math.inf:
            self._timer_at_s = due_at_s
            return []
        self._timer_at_s = due_at_s
        return [p.SetTimer(due_at_s)]

    def _own_at_s(self, at_s: float) -> float:
        """Return the end of the pause before the planner's next transition of its own; inf if there is no pause."""
        own_at_s = self.conductor.own_at_s
        return own_at_s if self.active and not self.conductor.busy and own_at_s > at_s else math.inf

    def check(self) -> None:
        """Raise InvariantViolation unless layouts are valid, epochs increase, and a leader at rest has the layout it
        wants.
        """
        self.layout.check()
        self.membership.check()
        self.conductor.check()
        if self.in_flight is not None:
            self.in_flight.check()
            if self.in_flight.epoch <= self.layout.epoch:
                raise InvariantViolation(f"epoch {self.in_flight.epoch} is planned after {self.layout.epoch}")
        if not self.active and (self.in_flight is not None or self.membership.known or self.conductor.busy):
            raise InvariantViolation("a standby planner plans, or conducts a transition")
        at_rest = self.active and self.store.is_read and self.in_flight is None and self._plan_at_s == math.inf
        if at_rest and not self.store.reading and self._wanted()[0] != self.layout.groups:
            raise InvariantViolation(f"at rest in epoch {self.layout.epoch}, but {self._wanted()[0]} is wanted")
