"""The layout of the cluster and how it changes (pure; `handle` is the only door).

One store operation is under way at a time. Every plan is written with a compare-and-set on the epoch that was read
and with the fencing token of the lease; whatever the answer, the core ends up with what is stored: a conflict or an
unknown outcome leads to a new read, a lost lease to standing by (I5). Joins that come together share an
epoch; a loss is planned at once. While the state server is away the newest change is kept and written when it is back.

An epoch never goes back and is never used twice: a state server that has lost the layout gets it again under the next
epoch. The number of a write whose outcome is unknown counts as used. A new leader that finds the layout lost
cannot know the last epochs of the one before: it waits for the monitor's snapshot and goes on from the number of
seconds in its token, which no earlier leader can have reached. Only if all planners and the state server are lost at
once do epochs begin anew; those of transitions go on from the highest that an instance has heard of. The groups are
then made again from what their members say (`claims`).

While a transition (the conductor's) is not decided, the layout stays as it is; joins and losses are written afterwards.
Of a pipeline that has lost a member the others leave the layout too, and come back once they have all layers.
"""

import math
from dataclasses import dataclass, field

from ballast.common.errors import InvariantViolation
from ballast.common.ids import Epoch, Incarnation, WorkerId
from ballast.common.layout import Group, Layout, worker_ids
from ballast.common.model import ModelInfo
from services.planner.core.claims import newer, rebuild
from services.planner.core.conductor import Conductor, ConductorRules, LayoutContext
from services.planner.core.drains import Drains
from services.planner.core.evictions import Suspects
from services.planner.core.inconsistent import Inconsistent
from services.planner.core.kept_out import KeptOut
from services.planner.core.membership import Membership, difference
from services.planner.core.messages import (
    AnswerDrain,
    AskWorkerToDrain,
    ChangeRefusal,
    Command,
    DrainRefusal,
    DrainRequested,
    DropRequested,
    Event,
    FollowMonitor,
    IgnoreStale,
    InstanceDraining,
    InstanceLost,
    InstanceProbed,
    InstanceUp,
    JournalSettled,
    LayoutLoaded,
    LeadershipChanged,
    LeaveMonitor,
    LoadFailed,
    LoadLayout,
    LoadsRead,
    LongRequestRaised,
    MemberAnswered,
    OverloadRaised,
    Publish,
    RefuseChange,
    RefuseDrain,
    RejectInstance,
    ReliefRaised,
    RestoreRequested,
    SetTimer,
    SnapshotBegan,
    SnapshotEnded,
    StandingRequested,
    TimerFired,
    WriteJournal,
    WriteLayout,
    WriteOutcome,
    WriteSettled,
)
from services.planner.core.reason import explain
from services.planner.core.record import TransitionRecord
from services.planner.core.stages import Stage
from services.planner.core.standings import Standings
from services.planner.core.transition import Journal
from services.planner.policy.replicate import Partial, keep_pipelines

NO_LAYOUT = Layout(Epoch(0), 0, (), "nothing planned yet")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerRules:
    coalesce_s: float = 0.1  # joins within this time share an epoch: who starts a cluster starts all at once
    verify_interval_s: float = 1.0  # between two looks at what is stored: nobody but a second leader changes it
    retry_s: float = 0.5  # after the state server gave no answer
    max_drains: int = 1000  # whose answers are remembered
    disagree_s: float = 2.0  # what an instance says of itself for so long counts, whatever the layout says
    transitions: ConductorRules = field(default_factory=ConductorRules)


@dataclass(slots=True)
class PlannerCore:
    rules: PlannerRules
    token: int | None = None  # of the lease; None: standing by
    layout: Layout = NO_LAYOUT  # the newest known to be stored, now or before the state server lost it
    layout_model: ModelInfo | None = None  # that its instances serve
    in_flight: Layout | None = None  # being written
    _in_flight_partial: Partial = ()  # of that write
    membership: Membership = field(default_factory=Membership)
    partial: Partial = ()  # lives of workers that hold only some layers, as last written
    suspects: Suspects = field(default_factory=Suspects)  # the monitor hears nothing of them
    conductor: Conductor = field(init=False)
    _drains: Drains = field(init=False)
    standings: Standings = field(init=False)
    _journaling: Journal | None = None  # being written
    _journal_at_s: float = 0.0  # when to try again
    _stored_epoch: Epoch | None = None  # as last read or written; None: nothing is stored
    _used_epoch: int = 0  # the highest that may have been written
    _has_seen_last: bool = True  # no epoch was written that this planner does not know
    _read: bool = False  # what is stored is known well enough to write upon
    _reading: bool = False
    _read_at_s: float = 0.0  # when to read next
    _plan_at_s: float = math.inf  # when to plan; inf: nothing has changed
    _timer_at_s: float = math.inf
    _why_lost: dict[WorkerId, str] = field(default_factory=dict[WorkerId, str])  # since the last layout
    inconsistent: Inconsistent = field(init=False)
    kept_out: KeptOut = field(init=False)

    def __post_init__(self) -> None:
        self._drains = Drains(self.rules.max_drains)
        self.inconsistent = Inconsistent(self.rules.disagree_s)
        self.kept_out, self.standings = KeptOut(self.membership), Standings(self.membership)
        self.conductor = Conductor(self.rules.transitions, self.standings)

    @property
    def active(self) -> bool:
        return self.token is not None

    @property
    def layout_at_rest(self) -> Layout | None:
        """The layout; None while it is about to change or another planner leads."""
        return None if not self.active or self.conductor.busy else self.layout

    @property
    def settled_epoch(self) -> Epoch:
        """No transition of this epoch or a lower one will be committed any more; 0 if that is not certain.

        Only of what is known to be stored: a number that was given away and never stored may be another leader's.
        """
        certain = (
            self.active and self._read and not self._awaits_worker_reports() and self._stored_epoch == self.layout.epoch
        )
        if not certain or self.conductor.busy:
            return Epoch(0)
        newest = self.conductor.newest
        return max(self.layout.epoch, newest.epoch) if newest is not None and newest.stage.over else self.layout.epoch

    def handle(self, event: Event) -> list[Command]:
        record = self.conductor.record
        commands = self._apply(event)
        if record is not None and not self.conductor.busy:
            self._transition_ended(event.at_s, record)
        self._take_up_claims(event.at_s)
        self._compare(event)
        if self.suspects and self.active:
            commands += self._evict_gone(event)
        if self.active and self.standings.help_out(self.layout):
            self._replan(event.at_s)
        commands += self.standings.due(self.layout, event.at_s, event.cause_id) if self.active else []
        commands += self._act(event.at_s, event.cause_id)
        commands += self._reset_timer(event.at_s)
        return commands

    def _apply(self, event: Event) -> list[Command]:
        match event:
            case LeadershipChanged():
                return self._leadership_changed(event)
            case LayoutLoaded():
                return self._layout_loaded(event)
            case LoadFailed():
                self._reading, self._read_at_s = False, event.at_s + self.rules.retry_s
                return []
            case WriteSettled():
                return self._write_settled(event)
            case DrainRequested():
                return self._drain_requested(event)
            case StandingRequested():
                return self._standing_requested(event)
            case JournalSettled():
                return self._journal_settled(event)
            case DropRequested() | RestoreRequested():
                if not self.active:
                    return [RefuseChange(event.request_id, ChangeRefusal.STANDBY, "")]
                return self.conductor.requested(event)
            case LoadsRead():
                heard_of = (load.newest_epoch for load in event.load.workers.values())
                self._used_epoch = max(self._used_epoch, *heard_of, 0)
                return self.conductor.loads_read(event)
            case MemberAnswered():
                return self.conductor.member_answered(event)
            case OverloadRaised():
                return self.conductor.overload(event) if self.active else []
            case LongRequestRaised():
                return self.conductor.long_request(event) if self.active else []
            case ReliefRaised():
                return self.conductor.relief(event) if self.active else []
            case TimerFired():
                self._timer_at_s = math.inf
                self._evict_inconsistent(event.at_s)
                return self.conductor.tick(event.at_s, event.cause_id)
            case SnapshotBegan() | SnapshotEnded() | InstanceUp() | InstanceLost() | InstanceDraining():
                # A late word of a monitor that a standby listened to in an earlier life as leader changes nothing.
                return self._heard(event) if self.active else []
            case InstanceProbed():
                self.suspects.probed(event)
                return []

    # ------------------------------------------------------------ leadership and store

    def _leadership_changed(self, event: LeadershipChanged) -> list[Command]:
        was_active, self.token = self.active, event.token
        self._give_up_write()
        self._read, self._read_at_s = False, event.at_s
        self._has_seen_last = self._has_seen_last and self.active
        self._journaling = None
        refused: list[Command] = [*self.conductor.stand_by()]
        if self.active:
            self._plan_at_s = event.at_s
            return refused if was_active else [*refused, FollowMonitor()]
        self.membership.clear()
        self.suspects.keep(set())
        self._why_lost.clear()
        self._plan_at_s = math.inf
        refused += [RefuseDrain(request_id, DrainRefusal.STANDBY) for request_id in self._drains.give_up()]
        refused += self.standings.give_up()
        return [*refused, LeaveMonitor()] if was_active else []

    def _layout_loaded(self, event: LayoutLoaded) -> list[Command]:
        if not self._reading:
            return []
        self._reading, self._read_at_s = False, event.at_s + self.rules.verify_interval_s
        stored, first = event.stored, not self._read
        self._stored_epoch, self._read = (stored.layout.epoch if stored else None), True
        commands: list[Command] = []
        newer = stored is not None and stored.layout.epoch > self.layout.epoch
        if stored is not None and newer:
            self.layout, self.layout_model, self.partial = stored.layout, stored.model, stored.partial
            commands.append(Publish(self.layout, event.cause_id))
        journal = stored.journal if stored is not None else None
        self._used_epoch = max(self._used_epoch, journal.epoch if journal is not None else 0)
        if not self.active:
            self.conductor.observe(journal)
            return commands
        if first and not self.conductor.busy:
            commands += self.conductor.take_over(journal, event.at_s, event.cause_id)
            commands += self._tell_lost(event)
        self._has_seen_last = self._has_seen_last or (stored is not None and stored.layout.epoch >= self.layout.epoch)
        if first or newer:
            self.membership.presume(self.layout, self.layout_model)
        if (self._stored_epoch or 0) != self.layout.epoch or self._wanted()[0] != self.layout.groups:
            self._plan_at_s = min(self._plan_at_s, event.at_s)
        return commands

    def _write_settled(self, event: WriteSettled) -> list[Command]:
        written = self.in_flight
        if written is None or (event.epoch, event.token) != (written.epoch, self.token):
            return []
        if event.outcome is WriteOutcome.UNAVAILABLE:
            self._give_up_write()
        self.in_flight = None
        match event.outcome:
            case WriteOutcome.WRITTEN:
                return self._written(written, event)
            case WriteOutcome.CONFLICT:
                self._read, self._read_at_s, self._plan_at_s = False, event.at_s, event.at_s
            case WriteOutcome.UNAVAILABLE | WriteOutcome.FENCED:  # the owner of the lease tells
                self._read, self._read_at_s, self._plan_at_s = False, event.at_s + self.rules.retry_s, event.at_s
        return []

    def _give_up_write(self) -> None:
        """Nobody will know whether the layout in flight has been written: its number counts as used."""
        if self.in_flight is not None:
            self._used_epoch = max(self._used_epoch, self.in_flight.epoch)
        self.in_flight = None

    def _written(self, layout: Layout, event: WriteSettled) -> list[Command]:
        self.kept_out.regrouped(self.layout, layout, self.conductor.age_s, event.at_s)
        self.layout_model, self.partial = self.membership.model, self._in_flight_partial
        self.layout, self.conductor.failed = layout, ()
        self._stored_epoch, self._read_at_s = layout.epoch, event.at_s + self.rules.verify_interval_s
        self._has_seen_last = True
        members = worker_ids(layout)
        self._why_lost = {w: why for w, why in self._why_lost.items() if w in members}
        if self._wanted()[0] != layout.groups:
            self._plan_at_s = min(self._plan_at_s, event.at_s)
        return [Publish(layout, event.cause_id), *self._answer_drains()]

    def _journal_settled(self, event: JournalSettled) -> list[Command]:
        journal = self._journaling
        if journal is None or (event.epoch, event.stage, event.token) != (journal.epoch, journal.stage, self.token):
            return []
        self._journaling = None
        match event.outcome:
            case WriteOutcome.WRITTEN:
                commands: list[Command] = []
                if journal.stage is Stage.COMMITTING:
                    commands += self._committed(journal, event)
                return commands + self.conductor.journaled(journal, event.at_s, event.cause_id)
            case WriteOutcome.CONFLICT:
                self._read, self._read_at_s = False, event.at_s
                return self.conductor.journal_refused(journal, event.at_s, event.cause_id)
            case WriteOutcome.UNAVAILABLE:
                self._journal_at_s = event.at_s + self.rules.retry_s
            case WriteOutcome.FENCED:
                # The lease's owner will say so, or bring the new token; what is stored is taken up then.
                self._journal_at_s = event.at_s + self.rules.retry_s
        return []

    def _committed(self, journal: Journal, event: JournalSettled) -> list[Command]:
        """The target has become the layout, in the same write."""
        if journal.target.epoch < self.layout.epoch:
            return []
        self.layout, self.partial = journal.target, self._partial_after(journal)
        self._stored_epoch, self._read_at_s = journal.epoch, event.at_s + self.rules.verify_interval_s
        if self._wanted()[0] != self.layout.groups:
            self._plan_at_s = min(self._plan_at_s, event.at_s)
        return [Publish(self.layout, event.cause_id), *self._answer_drains()]

    def _transition_ended(self, at_s: float, ended: TransitionRecord) -> None:
        # What one found that changed nothing stays: an operator may ask again and again for what is taken back.
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
        self, event: SnapshotBegan | SnapshotEnded | InstanceUp | InstanceLost | InstanceDraining
    ) -> list[Command]:
        match event:
            case SnapshotBegan():
                self.membership.begin_snapshot()
            case SnapshotEnded():
                missing = self.membership.end_snapshot()
                self.suspects.keep(set(missing))
                for worker_id in missing:
                    placeable = self.membership.known[worker_id].placeable
                    self.suspects.add(placeable, "the monitor does not know it", event.at_s)
                self._replan(event.at_s)
                return self._tell_lost(event)
            case InstanceUp():
                return self._instance_up(event) + self._tell_lost(event)
            case InstanceLost(worker_id=worker_id, incarnation=incarnation):
                if event.silent and self.membership.has(worker_id, incarnation):
                    self.suspects.add(self.membership.known[worker_id].placeable, event.why, event.at_s)
                else:
                    self._lose(worker_id, incarnation, event.why, event.at_s)
                return self._tell_lost(event)
            case InstanceDraining(worker_id=worker_id, incarnation=incarnation):
                if self.membership.drain(worker_id, incarnation):
                    self._replan(event.at_s)
        return []

    def _lose(self, worker_id: WorkerId, incarnation: Incarnation, why: str, at_s: float) -> None:
        if self.membership.drop(worker_id, incarnation):
            self.suspects.clear(worker_id)
            self._note_lost(worker_id, why)
            self._replan(at_s)

    def _evict_gone(self, event: Event) -> list[Command]:
        """Of those that the monitor does not hear, the ones of whose end there is evidence."""
        left = self.inconsistent.worker_ids
        gone = self.suspects.gone(len(self.membership.known), self.inconsistent.grouped, left)
        for worker_id, incarnation, why in gone:
            self._lose(worker_id, incarnation, why, event.at_s)
        commands: list[Command] = [*self.suspects.due(event.at_s, event.cause_id)]
        return commands + (self._tell_lost(event) if gone else [])

    def _instance_up(self, event: InstanceUp) -> list[Command]:
        before = self.membership.known.get(event.worker_id)
        if not self.membership.up(event):
            newest = self.membership.newest(event.worker_id)
            return [IgnoreStale(event.worker_id, event.incarnation, newest, event.cause_id)]
        self.suspects.clear(event.worker_id)
        if self._drains.ordered(event.worker_id, event.incarnation):
            self.membership.drain(event.worker_id, event.incarnation)
        commands: list[Command] = []
        known = self.membership.known[event.worker_id]
        same_life = before is not None and before.placeable.incarnation == event.incarnation
        told = same_life and before is not None and before.model == known.model
        if not told and self.membership.serves_another_model(event.worker_id):
            why = difference(event.model, self.membership.model)
            commands.append(RejectInstance(event.worker_id, event.incarnation, why, event.cause_id))
        if known.placeable.draining and not event.draining:
            # It was to drain and does not know: the planner before had no time to tell it, or it was not to be reached.
            commands.append(AskWorkerToDrain(event.worker_id, event.incarnation, event.address, event.cause_id))
        self._replan(event.at_s + self.rules.coalesce_s)
        return commands

    def _tell_lost(self, event: Event) -> list[Command]:
        """Tells the transition under way whom it has to do without."""
        coordinator = self.conductor.coordinator
        if coordinator is None:
            return []
        lost: dict[WorkerId, str] = {}
        for member in (m for group in coordinator.journal.target.groups for m in group.members):
            known = self.membership.known.get(member.worker_id)
            there = known is not None and known.placeable.incarnation == member.incarnation
            named = isinstance(event, (InstanceUp, InstanceLost)) and event.worker_id == member.worker_id
            if not there and (named or self.membership.complete):
                lost[member.worker_id] = self._why_lost.get(member.worker_id, "it is not there any more")
        commands = self.conductor.members_lost(lost, event.at_s, event.cause_id)
        if lost:
            commands += self.conductor.make_way("another instance was lost", event.at_s, event.cause_id)
        return commands

    def _standing_requested(self, event: StandingRequested) -> list[Command]:
        if not self.active:
            return [RefuseChange(event.request_id, ChangeRefusal.STANDBY, "")]
        commands = self.standings.requested(event, self.layout, busy=self.conductor.busy)
        self._replan(event.at_s)
        return commands + self.standings.settle(self.layout)

    def _drain_requested(self, event: DrainRequested) -> list[Command]:
        if not self.active:
            return [RefuseDrain(event.request_id, DrainRefusal.STANDBY)]
        all_known = self._read and self.membership.complete
        commands = self._drains.requested(event, self.membership, all_known=all_known)
        if any(isinstance(command, AskWorkerToDrain) for command in commands):
            self._plan_at_s = min(self._plan_at_s, event.at_s)
        return commands

    # ------------------------------------------------------------ planning

    def _replan(self, at_s: float) -> None:
        if self._plan_at_s <= at_s:  # as early anyway: of a thousand that come at once only the first is looked at
            return
        if self._wanted()[0] != self.layout.groups or self.in_flight is not None:
            self._plan_at_s = at_s

    def _wanted(self) -> tuple[tuple[Group, ...], Partial]:
        """The groups, and who stands outside for lack of layers."""
        return keep_pipelines(self.layout.groups, self.membership.placeable(), self._stranded(), self._layer_count())

    def _stranded(self) -> Partial:
        """With those whose transition failed although they live: nobody knows what they hold."""
        failed = set(self.conductor.failed)
        if not failed and not self.inconsistent:
            return self.partial
        groups = [g for g in self.layout.groups if any(m.worker_id in failed for m in g.members)]
        lives = {m.worker_id: m.incarnation for group in groups for m in group.members}
        lives |= self.inconsistent.lives(self.layout, self.membership)
        return tuple(sorted({**dict(self.partial), **lives}.items()))

    def _compare(self, event: Event) -> None:
        if not self.active:
            self.inconsistent.clear()
        elif self.inconsistent.compare(event, self.layout, self.membership, self._layer_count()):
            self._replan(event.at_s + self.rules.coalesce_s)

    def _evict_inconsistent(self, at_s: float) -> None:
        if self.conductor.busy or not self.membership.complete:
            return
        for worker_id in self.inconsistent.overdue(at_s):
            self._note_lost(worker_id, "it says that it is not what the layout has it for")
        self._replan(at_s)

    def _inconsistent_at_s(self) -> float:
        waits = self.active and not self.conductor.busy and self.membership.complete
        return self.inconsistent.due_at_s if waits else math.inf

    def _layer_count(self) -> int:
        return self.membership.model.layer_count if self.membership.model is not None else self.layout.layer_count

    def _act(self, at_s: float, cause_id: str) -> list[Command]:
        """Starts the one store operation that is due, reading before writing."""
        if self._reading or self.in_flight is not None or self._journaling is not None:
            return []
        journal = self.conductor.to_write
        if journal is not None and self.active and self._journal_at_s <= at_s and self.token is not None:
            self._journaling = journal
            model, partial = self.membership.model or self.layout_model, self._partial_after(journal)
            return [WriteJournal(journal, journal.base.epoch, model, partial, self.token, cause_id)]
        if self._read_at_s <= at_s:
            self._reading = True
            return [LoadLayout()]
        if not self.active or not self._read or self._awaits_worker_reports():
            return []
        if self.conductor.holds_layout:
            given_way = self.conductor.give_way(self.layout, at_s, cause_id, changes=self._plan_at_s <= at_s)
            return given_way + (self._act(at_s, cause_id) if self.conductor.to_write not in (None, journal) else [])
        if self._plan_at_s <= at_s:
            return self._plan(cause_id)
        return self._begin_transition(at_s, cause_id)

    def _begin_transition(self, at_s: float, cause_id: str) -> list[Command]:
        """If one is wanted, nothing else is to be done, and everybody is known."""
        if self.conductor.busy or self._plan_at_s != math.inf or self._stored_epoch != self.layout.epoch:
            return []
        groups, partial = self._wanted()
        if groups != self.layout.groups:
            return []
        left_over = [self.membership.known[w].placeable for w, _ in partial if w not in self.suspects]
        stranded = tuple(p.member(0, self._layer_count()) for p in left_over if not p.draining)
        context = LayoutContext(self.layout, self.layout_model, self._next_epoch(), stranded, self.kept_out)
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
            self._used_epoch = max(self._used_epoch, context.epoch)
            commands += self._act(at_s, cause_id)
        return commands

    def _awaits_worker_reports(self) -> bool:
        """Whether what this planner remembers may be older than what was lost, so that only the monitor knows more."""
        if self.membership.complete:
            return False
        return not self._has_seen_last or bool(newer(self.layout, self.membership.claims()))

    def _take_up_claims(self, at_s: float) -> None:
        """Once everybody is known and it is certain what is stored: a layout that was lost is as its members say."""
        if not (self.active and self._read and self.membership.complete) or self.in_flight is not None:
            return
        rebuilt = None if self.conductor.busy else rebuild(self.layout, self.membership.claims(), self._layer_count())
        if rebuilt is None:
            return
        self.layout, self.layout_model = rebuilt.layout, self.membership.model
        self.partial = tuple(sorted({**dict(self.partial), **dict(rebuilt.partial)}.items()))
        self._plan_at_s = min(self._plan_at_s, at_s)

    def _plan(self, cause_id: str) -> list[Command]:
        self._plan_at_s = math.inf
        groups, partial = self._wanted()
        stored_epoch = self._stored_epoch or 0
        if groups == self.layout.groups and stored_epoch == self.layout.epoch:
            return self._answer_drains()
        if self.token is None:
            raise InvariantViolation("a standby planner plans")
        reason = explain(self.layout.groups, groups, self._why_lost)
        self.in_flight = Layout(self._next_epoch(), self._layer_count(), groups, reason)
        self._in_flight_partial = partial
        self.in_flight.check()
        return [WriteLayout(self.in_flight, self.membership.model, self._stored_epoch, self.token, cause_id, partial)]

    def _next_epoch(self) -> Epoch:
        next_epoch = max(self.layout.epoch, self._used_epoch, self._stored_epoch or 0) + 1
        # A token is a time of the state server's clock in milliseconds; plans are rarer than one a second.
        clock = (self.token or 0) // 1000
        return Epoch(next_epoch if self._has_seen_last else max(next_epoch, clock))

    def _answer_drains(self) -> list[Command]:
        answers: list[Command] = [AnswerDrain(request, epoch) for request, epoch in self._drains.settle(self.layout)]
        return answers + self.standings.settle(self.layout)

    def _note_lost(self, worker_id: WorkerId, why: str) -> None:
        if worker_id in worker_ids(self.layout) or (self.in_flight and worker_id in worker_ids(self.in_flight)):
            self._why_lost[worker_id] = why

    def _reset_timer(self, at_s: float) -> list[Command]:
        may_plan = self.active and self._read and not self._awaits_worker_reports() and not self.conductor.holds_layout
        plan_at_s = self._plan_at_s if may_plan else math.inf
        busy = self._reading or self.in_flight is not None or self._journaling is not None
        due_at_s = math.inf if busy else min(self._read_at_s, plan_at_s, self._own_at_s(at_s))
        if not busy and self.conductor.to_write is not None:
            due_at_s = min(due_at_s, self._journal_at_s)
        due_at_s = min(due_at_s, self.conductor.due_at_s, self._inconsistent_at_s(), self.suspects.due_at_s)
        due_at_s = min(due_at_s, self.standings.order_at_s)
        if due_at_s == self._timer_at_s or due_at_s == math.inf:
            self._timer_at_s = due_at_s
            return []
        self._timer_at_s = due_at_s
        return [SetTimer(due_at_s)]

    def _own_at_s(self, at_s: float) -> float:
        """When a transition of the planner's own will, put off before, may begin; inf if it may already."""
        own_at_s = self.conductor.own_at_s
        return own_at_s if self.active and not self.conductor.busy and own_at_s > at_s else math.inf

    def check(self) -> None:
        """Raise InvariantViolation unless layouts are valid, epochs grow, and a leader at rest has what it wants."""
        self.layout.check()
        self.membership.check()
        self.conductor.check()
        if self.in_flight is not None:
            self.in_flight.check()
            if self.in_flight.epoch <= self.layout.epoch:
                raise InvariantViolation(f"epoch {self.in_flight.epoch} is planned after {self.layout.epoch}")
        if not self.active and (self.in_flight is not None or self.membership.known or self.conductor.busy):
            raise InvariantViolation("a standby planner plans, or conducts a transition")
        at_rest = self.active and self._read and self.in_flight is None and self._plan_at_s == math.inf
        if at_rest and not self._reading and self._wanted()[0] != self.layout.groups:
            raise InvariantViolation(f"at rest in epoch {self.layout.epoch}, but {self._wanted()[0]} is wanted")
