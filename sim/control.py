"""Monitor and planner in virtual time, and the state server between them. One of each is active from the beginning."""

import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from ballast.common.ids import DispatcherId, Epoch, WorkerId
from ballast.common.layout import Layout
from ballast.common.load import HASTY_REPORT_S, LoadReport
from ballast.common.transition import Phase
from services.monitor.core import messages as m
from services.monitor.core.machine import MonitorCore, MonitorRules
from services.monitor.policy.demand import Backlog
from services.monitor.policy.pressure import Overload, Relief, Signal
from services.planner.core import messages as p
from services.planner.core.machine import PlannerCore, PlannerRules
from services.planner.core.record import TransitionRecord
from services.planner.core.stages import Stage
from services.planner.core.transition import Journal, MemberSaid
from services.worker.core import plan as wp
from services.worker.core.transition_messages import AbortRequested, CommitRequested
from sim.clock import Clock
from sim.member import Peer, Sources

_TOKEN = 1  # of both leases, which nobody contends for


@dataclass(frozen=True, slots=True)
class Delays:
    """Of one call between services, and of one to the state server."""

    rpc_s: float
    state_s: float


class StateServer:
    """Layout, journal and backlogs, with the rules of the real scripts."""

    def __init__(self, clock: Clock, delays: Delays) -> None:
        self._clock = clock
        self._delays = delays
        self.stored: p.StoredLayout | None = None
        self.backlogs: dict[DispatcherId, m.BacklogWord] = {}
        self._watchers: list[Callable[[Layout], None]] = []

    def watch(self, told: Callable[[Layout], None]) -> None:
        self._watchers.append(told)

    def write(self, command: p.WriteLayout) -> p.WriteOutcome:
        if self._epoch != command.expected_epoch:
            return p.WriteOutcome.CONFLICT
        journal = self.stored.journal if self.stored is not None else None
        self._put(p.StoredLayout(command.layout, command.model, command.partial, journal))
        return p.WriteOutcome.WRITTEN

    def write_journal(self, command: p.WriteJournal) -> p.WriteOutcome:
        journal = command.journal
        if journal.stage in (Stage.PREPARING, Stage.COMMITTING) and self._epoch != command.expected_epoch:
            return p.WriteOutcome.CONFLICT
        assert self.stored is not None, "a transition has a layout to begin with"
        if journal.stage is Stage.COMMITTING:
            self._put(p.StoredLayout(journal.target, command.model, command.partial, journal))
        else:
            self.stored = p.StoredLayout(self.stored.layout, self.stored.model, self.stored.partial, journal)
        return p.WriteOutcome.WRITTEN

    @property
    def _epoch(self) -> Epoch | None:
        return self.stored.layout.epoch if self.stored is not None else None

    def _put(self, stored: p.StoredLayout) -> None:
        """Whoever watches gets a hint, and reads."""
        self.stored = stored
        for told in self._watchers:
            self._clock.after(3 * self._delays.state_s, b"layout", partial(told, stored.layout))


class MonitorNode:
    def __init__(
        self,
        clock: Clock,
        rules: MonitorRules,
        state: StateServer,
        delays: Delays,
        tick_interval_s: float,
        crashed: Set[WorkerId],
    ) -> None:
        """`crashed`: workers at whose addresses nobody listens any more."""
        self.core = MonitorCore(rules)
        self.signals: list[tuple[float, Signal]] = []
        self.touched = True  # the core was told something since somebody set it back
        self._clock = clock
        self._state = state
        self._delays = delays
        self._crashed = crashed
        self._watcher: Callable[[m.Change | None, str], None] | None = None
        self._numbers = 0
        self.feed(m.LeadershipChanged(clock.now_s, "lease", _TOKEN))
        clock.every(tick_interval_s, b"monitor looks around", self._look_around, first_s=delays.state_s)
        clock.every(tick_interval_s, b"monitor ticks", self._tick)

    def _tick(self) -> None:
        self.feed(m.Ticked(self._clock.now_s, self._cause("tick")))

    def _look_around(self) -> None:
        stored = self._state.stored
        words = tuple(self._state.backlogs.values())
        layout = stored.layout if stored is not None else None
        self.feed(m.SurroundingsRead(self._clock.now_s, self._cause("state"), layout, words))

    def _cause(self, what: str) -> str:
        self._numbers += 1
        return f"{what}-{self._numbers}"

    def feed(self, event: m.Event) -> None:
        self.touched = True
        for command in self.core.handle(event):
            match command:
                case m.Publish(change, cause_id):
                    if isinstance(change, m.Raised):
                        self.signals.append((self._clock.now_s, change.signal))
                    if self._watcher is not None:
                        self._watcher(change, cause_id)
                case m.ForgetBacklogs(dispatcher_ids):
                    for name in dispatcher_ids:
                        self._state.backlogs.pop(name, None)
                case m.ProbeAddress(instance, cause_id):
                    self._clock.after(
                        2 * self._delays.rpc_s, b"monitor probes", partial(self._probed, instance, cause_id)
                    )
                case _:
                    pass  # registry, standby: of a monitor that may be lost

    def _probed(self, instance: m.Instance, cause_id: str) -> None:
        if instance.worker_id in self._crashed:
            now_s = self._clock.now_s
            self.feed(m.ConnectionRefused(now_s, cause_id, instance.worker_id, instance.incarnation))

    def follow(self, told: Callable[[m.Change | None, str], None]) -> None:
        """None: a snapshot begins."""
        told(None, "snapshot")
        for change in self.core.snapshot():
            told(change, "snapshot")
        self._watcher = told

    def loads(self) -> dict[WorkerId, LoadReport]:
        return {name: entry.load for name, entry in sorted(self.core.entries.items()) if entry.load is not None}


class Reporter:
    """A worker's reports to the monitor."""

    def __init__(
        self,
        clock: Clock,
        monitor: MonitorNode,
        instance: m.Instance,
        load: Callable[[], LoadReport],
        delays: Delays,
        *,
        stream_id: int,
        interval_s: float,
        first_s: float,
        crashed: Set[WorkerId],
    ) -> None:
        self._worker_id = instance.worker_id
        self._crashed = crashed
        self._ended = False
        self._clock = clock
        self._monitor = monitor
        self._load = load
        self._delays = delays
        self._stream_id = stream_id
        self._label = f"{instance.worker_id} reports".encode()
        self._cause = f"report of {instance.worker_id}"
        self._told: LoadReport | None = None
        self._told_at_s = -math.inf
        self._hastens = False
        clock.after(first_s, self._label, lambda: self._announce(instance))
        clock.every(interval_s, self._label, self._report, first_s=first_s + delays.rpc_s)

    def _announce(self, instance: m.Instance) -> None:
        self._monitor.feed(m.Announced(self._clock.now_s, self._cause, self._stream_id, instance))

    def _report(self) -> None:
        """It was sent a moment ago, and says what was then."""
        if self._worker_id in self._crashed:
            if not self._ended:
                self._ended = True
                now_s = self._clock.now_s
                self._monitor.feed(m.StreamEnded(now_s, self._cause, self._stream_id, said_goodbye=False))
            return
        self._told = load = self._load()
        self._told_at_s = self._clock.now_s
        self._clock.after(self._delays.rpc_s, self._label, lambda: self._arrive(load))

    def requests_came(self, load: LoadReport) -> None:
        """As the real one: where demand jumps, the monitor hears of it at once."""
        if self._told is None or self._hastens or not load.has_jumped(self._told):
            return
        self._hastens = True
        wait_s = self._told_at_s + HASTY_REPORT_S - self._clock.now_s
        self._clock.after(max(0.0, wait_s), self._label, self._hasten)

    def _hasten(self) -> None:
        self._hastens = False
        self._report()

    def _arrive(self, load: LoadReport) -> None:
        self._monitor.feed(m.LoadReported(self._clock.now_s, self._cause, self._stream_id, load))


class Workers(Protocol):
    """Where the planner finds the members of transitions."""

    def __getitem__(self, worker_id: WorkerId) -> Peer: ...


class PlannerNode:
    def __init__(
        self,
        clock: Clock,
        rules: PlannerRules,
        state: StateServer,
        monitor: MonitorNode,
        members: Mapping[WorkerId, Peer],
        delays: Delays,
        crashed: Set[WorkerId],
    ) -> None:
        """`crashed`: workers that answer no call."""
        self.core = PlannerCore(rules)
        self.records: list[TransitionRecord] = []  # of transitions that have ended
        self.touched = True  # as the monitor's
        self.nothing_done: list[tuple[float, p.NothingDone]] = []
        self._clock = clock
        self._state = state
        self._monitor = monitor
        self._members = members
        self._delays = delays
        self._crashed = crashed
        self._calls: set[tuple[WorkerId, p.Call]] = set()  # one of a kind at a time
        self._aborted: dict[WorkerId, Epoch] = {}  # before that member had heard of the epoch
        self._timer = 0
        self._numbers = 0
        self.feed(p.TimerFired(clock.now_s, "start"))
        self.feed(p.LeadershipChanged(clock.now_s, "lease", _TOKEN))

    def feed(self, event: p.Event) -> None:
        self.touched = True
        for command in self.core.handle(event):
            self._execute(command)

    def _execute(self, command: p.Command) -> None:
        match command:
            case p.LoadLayout():
                self._ask_state("load", self._load)
            case p.WriteLayout():
                self._ask_state("write", partial(self._write, command))
            case p.WriteJournal():
                self._ask_state("journal", partial(self._write_journal, command))
            case p.SetTimer(at_s):
                self._set_timer(at_s)
            case p.FollowMonitor():
                self._clock.after(self._delays.rpc_s, b"planner follows", lambda: self._monitor.follow(self._hear))
            case p.ReadLoads(cause_id):
                self._clock.after(self._delays.rpc_s, b"planner asks loads", partial(self._read_loads, cause_id))
            case p.CallMember():
                self._call(command)
            case p.TransitionMoved(record, _):
                if record.journal.stage.over:
                    self.records.append(record)
            case p.NothingDone():
                self.nothing_done.append((self._clock.now_s, command))
            case _:
                pass  # for watchers and operators, whom nobody plays here

    # ------------------------------------------------------------ state server, time, monitor

    def _ask_state(self, what: str, operation: Callable[[], p.Event]) -> None:
        """Done after one delay, answered after another."""

        def arrive() -> None:
            answer = operation()
            self._clock.after(self._delays.state_s, f"planner {what} answered".encode(), lambda: self._answered(answer))

        self._clock.after(self._delays.state_s, f"planner {what}".encode(), arrive)

    def _answered(self, event: p.Event) -> None:
        self.feed(event)

    @property
    def _then_s(self) -> float:
        return self._clock.now_s + self._delays.state_s

    def _load(self) -> p.Event:
        return p.LayoutLoaded(self._then_s, self._cause("load"), self._state.stored)

    def _write(self, command: p.WriteLayout) -> p.Event:
        outcome = self._state.write(command)
        return p.WriteSettled(self._then_s, command.cause_id, command.layout.epoch, command.token, outcome)

    def _write_journal(self, command: p.WriteJournal) -> p.Event:
        outcome, journal = self._state.write_journal(command), command.journal
        return p.JournalSettled(self._then_s, command.cause_id, journal.epoch, journal.stage, command.token, outcome)

    def _set_timer(self, at_s: float) -> None:
        self._timer += 1
        number = self._timer

        def fire() -> None:
            if number == self._timer:
                self.feed(p.TimerFired(self._clock.now_s, self._cause("timer")))

        self._clock.at(max(at_s, self._clock.now_s), b"planner timer", fire)

    def _cause(self, what: str) -> str:
        self._numbers += 1
        return f"{what}-{self._numbers}"

    def _hear(self, change: m.Change | None, cause_id: str) -> None:
        def arrive() -> None:
            event = _translate(change, self._clock.now_s, cause_id)
            if event is not None:
                self.feed(event)

        self._clock.after(self._delays.rpc_s, b"planner hears", arrive)

    def _read_loads(self, cause_id: str) -> None:
        loads = self._monitor.loads()

        def arrive() -> None:
            self.feed(p.LoadsRead(self._clock.now_s, cause_id, loads))

        self._clock.after(self._delays.rpc_s, b"planner has loads", arrive)

    # ------------------------------------------------------------ members

    def _call(self, command: p.CallMember) -> None:
        """The member's engine hears of it at its next step boundary; the answer is how far it is now."""
        worker_id = command.member.worker_id
        key = (worker_id, command.call)
        if key in self._calls:
            return
        self._calls.add(key)
        label = f"planner {command.call.name} {worker_id}".encode()

        def arrive() -> None:
            if worker_id in self._crashed:
                self._calls.discard(key)
                return
            said = self._ask(command)
            self._clock.after(self._delays.rpc_s, label, partial(self._member_said, key, command, said))

        self._clock.after(self._delays.rpc_s, label, arrive)

    def _member_said(self, key: tuple[WorkerId, p.Call], command: p.CallMember, said: MemberSaid) -> None:
        self._calls.discard(key)
        self.feed(p.MemberAnswered(self._clock.now_s, command.cause_id, command.journal.epoch, said))

    def _ask(self, command: p.CallMember) -> MemberSaid:
        worker_id, journal = command.member.worker_id, command.journal
        peer, now_s = self._members[worker_id], self._clock.now_s
        epoch = journal.epoch
        match command.call:
            case p.Call.PREPARE if self._aborted.get(worker_id) != epoch:
                plan, sources = _plan_of(journal), _sources_of(command.sources)
                peer.post(lambda: peer.member.prepare(plan, sources, patient=command.patient))
            case p.Call.COMMIT:
                peer.post(lambda: peer.member.told(epoch, CommitRequested(now_s, epoch)))
            case p.Call.ABORT:
                if epoch not in peer.member.progress:
                    self._aborted[worker_id] = epoch
                peer.post(lambda: peer.member.told(epoch, AbortRequested(now_s, epoch, command.why)))
            case _:
                pass
        progress = peer.member.progress.get(epoch)
        at_s = now_s + self._delays.rpc_s
        if progress is not None:
            return MemberSaid(at_s, worker_id, progress.phase, progress.why, replace(progress))
        phase = Phase.ABORTED if self._aborted.get(worker_id) == epoch else Phase.NONE
        return MemberSaid(at_s, worker_id, phase)


def _plan_of(journal: Journal) -> wp.Plan:
    return wp.Plan(journal.kind, journal.base, journal.target)


def _sources_of(sources: p.Sources) -> Sources:
    found: Sources = {}
    for layer, holder in sources:
        named = (holder,) if holder is not None else ()
        found[layer] = found.get(layer, ()) + named
    return found


def _translate(change: m.Change | None, at_s: float, cause_id: str) -> p.MonitorEvent | None:
    """None for what the planner has no event for."""
    match change:
        case None:
            return p.SnapshotBegan(at_s, cause_id)
        case m.SnapshotEnd():
            return p.SnapshotEnded(at_s, cause_id)
        case m.InstanceUp(i, draining):
            return p.InstanceUp(
                at_s, cause_id, i.worker_id, i.incarnation, i.address, i.model, draining, i.data_address
            )
        case m.InstanceLost(worker_id, incarnation, why):
            return p.InstanceLost(at_s, cause_id, worker_id, incarnation, why)
        case m.InstanceDraining(worker_id, incarnation):
            return p.InstanceDraining(at_s, cause_id, worker_id, incarnation)
        case m.Raised(Overload(required_bytes=required)):
            return p.OverloadRaised(at_s, cause_id, required)
        case m.Raised(Relief()):
            return p.ReliefRaised(at_s, cause_id)
        case m.Raised():
            return None


def share_backlog(
    clock: Clock,
    state: StateServer,
    dispatcher_id: DispatcherId,
    backlog: Callable[[], tuple[int, int]],
    *,
    interval_s: float,
) -> None:
    """Says for ever how much waits in a dispatcher, and nothing when there is nothing."""
    serial = 0

    def say() -> None:
        nonlocal serial
        request_count, token_count = backlog()
        serial += 1
        if request_count:
            word = m.BacklogWord(dispatcher_id, f"1.{serial}", Backlog(request_count, token_count))
            state.backlogs[dispatcher_id] = word
        else:
            state.backlogs.pop(dispatcher_id, None)

    clock.every(interval_s, f"backlog of {dispatcher_id}".encode(), say)
