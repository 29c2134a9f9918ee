"""Planners in virtual time, and their calls to workers."""

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Protocol

from ballast.common.errors import InvalidRequest, StaleEpoch
from ballast.common.ids import Epoch, Incarnation, WorkerId
from ballast.common.layout import Layout, Member, Standing
from ballast.common.overload import OverloadPolicy
from ballast.common.reach import Reach
from ballast.common.transition import Phase
from ballast.rpc.fencing import PLANNER_TOKEN, Fence
from ballastpb.worker.v1 import worker_pb2 as pb
from services.monitor.core import messages as m
from services.monitor.policy.pressure import LongRequest, Overload, Relief
from services.planner.core import messages as p
from services.planner.core.machine import PlannerCore, PlannerRules
from services.planner.core.prediction_log import Predicted
from services.planner.core.record import TransitionRecord
from services.planner.core.transition import Journal, MemberSaid
from services.planner.peers import PROBE_TIMEOUT_S
from services.planner.policy.migrate import MigrationRules, Move, is_round_due, migrations
from services.planner.policy.partners import likely_partners
from services.planner.shell.balancing import INTERVAL_S, WITHIN_S, look_interval_s
from services.planner.shell.partners import MOST
from services.planner.shell.reaching import SOON_S, reach_now
from services.worker.core import plan as wp
from services.worker.pipeline.planner_side import HOLD_S, NOT_PREPARED, NOT_TAKEN_UP, Transitions
from sim.monitoring import LEADERSHIP_TTL_S, MonitorNode
from sim.process import Process
from sim.state import Candidacy, Site, lead_for_ever

_CALL_TIMEOUT_S = 2.0
_HELD = {
    p.WorkerCall.PREPARE: NOT_PREPARED,
    p.WorkerCall.COMMIT: NOT_TAKEN_UP,
}  # call -> phases in which its answer waits for the member's progress
_LOOK_S = 0.001  # polling interval while waiting
_LOOK_UP_S = 0.5  # polling interval for a change of the active monitor


class Peer(Protocol):
    """An instance, from the planner's view."""

    crashed: bool
    paused: bool
    incarnation: Incarnation
    transitions: Transitions
    fence: Fence


class PlannerNode:
    def __init__(
        self,
        site: Site,
        rules: PlannerRules,
        migrations: MigrationRules,
        monitor: Callable[[], MonitorNode | None],
        members: Mapping[WorkerId, Peer],
        *,
        name: str = "p0",
        elected: bool = False,
    ) -> None:
        """`monitor`: returns the active monitor. Stopped members do not answer calls, and handle them once they
        continue. `elected`: there are several planners or monitors.
        """
        self._migrations = migrations
        self.process = Process(name)
        self.core = PlannerCore(rules)
        self.records: list[TransitionRecord] = []  # records of ended transitions
        self.touched = True  # the core has handled an event since this was reset
        self.published: list[Epoch] = []  # epochs of layouts, as seen by watchers
        self.nothing_done: list[tuple[float, p.NothingDone]] = []
        self.predicted: list[Predicted] = []  # predictions whose outcome is known
        self.decides_until_s = math.inf  # load reports are ignored after this time, so that the layout stays as it is
        self.name = name
        self._clock = clock = site.clock
        self._state = state = site.state
        self._monitor = monitor
        self._members = members
        self._delays = site.delays
        self._lines = site.lines
        self._calls: set[tuple[WorkerId, p.WorkerCall]] = set()  # at most one of each kind
        self._followed: MonitorNode | None = None
        self._subscription = 0
        self._token = 0
        self._timer = 0
        self._numbers = 0
        self._candidacy: Candidacy | None = None
        self._reach: Reach | None = None  # last published reach
        self._empties = False  # another balancing round is due
        self.feed(p.TimerFired(clock.now_s, "start"))
        if elected:
            self._candidacy = Candidacy(clock, state, self.process, "planner", LEADERSHIP_TTL_S, self._lead)
            clock.every(_LOOK_UP_S, b"planner looks", lambda: self.process.run_due("look", self._find_monitor))
        else:
            self._lead(lead_for_ever(state, "planner", name))
        if migrations.balances or migrations.relieves:
            interval_s = INTERVAL_S if migrations.balances else look_interval_s(len(members))
            clock.every(interval_s, b"planner balances", lambda: self.process.run_due("balance", self._balance))

    def _lead(self, token: int | None) -> None:
        if token is not None:
            self._token = token
        self.feed(p.LeadershipChanged(self._clock.now_s, "lease", token))

    def feed(self, event: p.Event) -> None:
        self.touched = True
        for command in self.core.handle(event):
            self._execute(command)

    def _execute(self, command: p.Command) -> None:
        match command:
            case p.LoadLayout():
                self._ask_state("load", self._load, self._failed_load)
            case p.WriteLayout():
                self._ask_state("write", partial(self._write, command), partial(self._settled, command, None))
            case p.WriteJournal():
                self._ask_state("journal", partial(self._note, command), partial(self._settled, command, None))
            case p.SetTimer(at_s):
                self._set_timer(at_s)
            case p.FollowMonitor():
                self._clock.after(self._delays.rpc_s, b"planner follows", lambda: self.process.run(self._follow))
            case p.LeaveMonitor():
                self._leave()
            case p.ReadLoads(cause_id):
                self._clock.after(self._delays.rpc_s, b"planner asks loads", partial(self._read_loads, cause_id))
            case p.CallMember():
                self._call(command)
            case p.OrderStanding():
                self._clock.after(
                    self._delays.rpc_s, b"planner orders", partial(self._send_standing, command, self._token)
                )
            case p.ProbeInstance():
                self._probe(command)
            case p.TransitionMoved(record, _):
                if record.journal.stage.over:
                    self.records.append(record)
                    self._clock.after(self._delays.rpc_s, b"planner names", lambda: self.process.run(self._name))
            case p.Publish(layout, _):
                self.published.append(layout.epoch)
                self._empty(layout)
                self._clock.after(self._delays.rpc_s, b"planner names", lambda: self.process.run(self._name))
                if self.core.rules.transitions.policy is OverloadPolicy.DROP:
                    self._publish_reach()
            case p.NothingDone():
                self.nothing_done.append((self._clock.now_s, command))
            case p.PredictionSettled(predicted):
                self.predicted.append(predicted)
            case _:
                pass  # for watchers and operators, which are not simulated

    # ------------------------------------------------------------ state server, time

    def _ask_state(self, what: str, operation: Callable[[], p.Event], failed: Callable[[], p.Event]) -> None:
        def carry_out() -> Callable[[], None]:
            answer = operation()
            return lambda: self.feed(replace(answer, at_s=self._clock.now_s))

        self._state.ask(f"planner {what}", carry_out, lambda: self.feed(failed()), self.process)

    def _load(self) -> p.Event:
        return p.LayoutLoaded(self._clock.now_s, self._cause("load"), self._state.stored)

    def _failed_load(self) -> p.Event:
        return p.LoadFailed(self._clock.now_s, self._cause("load"))

    def _write(self, command: p.WriteLayout) -> p.Event:
        return self._settled(command, self._state.write(command))

    def _settled(self, command: p.Write, outcome: p.WriteOutcome | None) -> p.Event:
        return p.WriteSettled(self._clock.now_s, command.cause_id, command, outcome or p.WriteOutcome.UNAVAILABLE)

    def _note(self, command: p.WriteJournal) -> p.Event:
        return self._settled(command, self._state.write_journal(command))

    def _set_timer(self, at_s: float) -> None:
        self._timer += 1
        number = self._timer

        def fire() -> None:
            if number == self._timer:
                self.process.run(ring)

        def ring() -> None:
            if number == self._timer:
                self.feed(p.TimerFired(self._clock.now_s, self._cause("timer")))

        self._clock.at(max(at_s, self._clock.now_s), b"planner timer", fire)

    def _cause(self, what: str) -> str:
        self._numbers += 1
        return f"{what}-{self._numbers}"

    # ------------------------------------------------------------ monitor

    def _follow(self) -> None:
        monitor = self._monitor()
        if monitor is None or not self.core.active or monitor.process.crashed or monitor.process.paused:
            return
        self._leave()
        self._followed = monitor
        number = self._subscription
        monitor.follow(self.name, partial(self._hear, monitor, number))

    def _leave(self) -> None:
        self._subscription += 1
        if self._followed is not None:
            self._followed.leave(self.name)
        self._followed = None

    def _find_monitor(self) -> None:
        """Replace the stream if it has ended, or if its monitor no longer leads, as a real planner does."""
        followed = self._followed
        if self.core.active and (followed is None or followed is not self._monitor() or not followed.tells(self.name)):
            self._follow()

    def _hear(self, monitor: MonitorNode, subscription: int, change: m.Change | None, cause_id: str) -> None:
        def hear() -> None:
            event = _translate(change, self._clock.now_s, cause_id)
            if event is not None and subscription == self._subscription:
                self.feed(event)

        def arrive() -> None:
            self._lines.bring(monitor.process.name, self.name, lambda: self.process.run(hear))

        self._clock.after(self._delays.rpc_s, b"planner hears", arrive)

    def _read_loads(self, cause_id: str) -> None:
        def hear(load: p.ClusterLoad, why: str) -> None:
            if self._clock.now_s < self.decides_until_s:
                self.feed(p.LoadsRead(self._clock.now_s, cause_id, load, why))

        self._ask_loads(hear)

    def _publish_reach(self) -> None:
        """Publish the reach as `services.planner.shell.reaching` does: after each new layout, and repeatedly while too
        little is known.
        """

        def hear(load: p.ClusterLoad, why: str) -> None:
            reach = None if why else reach_now(self.core.layout_model, load)
            if reach is None:
                if self.core.active:
                    self._clock.after(SOON_S, b"planner tells reach", lambda: self.process.run(self._publish_reach))
            elif reach != self._reach:
                self._reach = reach
                self._state.write_reach(reach)

        self._ask_loads(hear)

    def _ask_loads(self, hear: Callable[[p.ClusterLoad, str], None]) -> None:
        """Ask the active monitor for load reports. `hear` is called with the reports and "", or with no reports and the
        failure.
        """
        monitor, late = self._monitor(), self._lines
        reached = monitor is not None and not (monitor.process.crashed or monitor.process.paused)
        if monitor is None or not reached or late.is_cut(self.name, monitor.process.name):
            wait_s, load, why = _CALL_TIMEOUT_S, p.ClusterLoad({}), "the monitor does not answer"
        else:
            wait_s, load, why = self._delays.rpc_s, monitor.load(), ""

        def arrive() -> None:
            self.process.run(lambda: hear(load, why))

        self._clock.after(wait_s, b"planner has loads", arrive)

    def _name(self) -> None:
        """Send workers their likely partners, as `services.planner.shell.partners` does, but only once per layout."""
        if (layout := self.core.layout_at_rest) is None:
            return
        for member, partners in likely_partners(layout, MOST):
            named = [pb.Partner(worker_id=one.worker_id, data_address=one.data_address) for one in partners]
            request = pb.NamePartnersRequest(partners=named)
            self._send_order(member, lambda peer, to_name=request: peer.transitions.name_partners(to_name), self._token)

    # ------------------------------------------------------------ migrations

    def _balance(self) -> None:
        """Run a round of `services.planner.shell.balancing`."""
        layout = self.core.layout_at_rest
        if layout is None or not is_round_due(layout, self._migrations, looks=True):
            return

        def order(load: p.ClusterLoad, why: str) -> None:
            if not why and self.core.layout_at_rest == layout:
                for move in migrations(layout, load.workers, self._migrations):
                    self._order(layout.epoch, move)

        self._clock.after(self._delays.rpc_s, b"planner asks loads", lambda: self._ask_loads(order))

    def _empty(self, layout: Layout) -> None:
        """Schedule balancing rounds while an instance is leaving, if balancing is otherwise disabled."""
        leaves = any(m.standing is Standing.LEAVING for group in layout.groups for m in group.members)
        if leaves and not (self._empties or self._migrations.balances):
            self._empties = True
            self._clock.after(INTERVAL_S, b"planner empties", self._go_on_emptying)

    def _go_on_emptying(self) -> None:
        self._empties = False
        if not self.process.crashed:
            self.process.run_due("balance", self._balance)
            self._empty(self.core.layout)

    def _order(self, epoch: Epoch, move: Move) -> None:
        """Send an order to all members. Lost orders are repeated by the next round."""
        request = pb.MigrateRequest(
            epoch=epoch,
            source=[_party(member) for member in move.source.members],
            target=[_party(member) for member in move.target.members],
            block_budget=move.block_budget,
            within_s=WITHIN_S,
            cause_id=self._cause("migrate"),
            longest_first=move.longest_first,
        )
        token = self._token
        for member in (*move.target.members, *reversed(move.source.members)):
            migrate = partial(self._send_order, member, lambda peer: peer.transitions.migrate(request), token)
            self._clock.after(self._delays.rpc_s, b"planner orders", migrate)

    def _send_standing(self, command: p.OrderStanding, token: int) -> None:
        member = command.member
        self._send_order(member, lambda peer: peer.transitions.park(member.incarnation, park=command.park), token)

    def _send_order(self, member: Member, give: Callable[[Peer], object], token: int) -> None:
        """Send an order to one worker; a lost order is repeated."""
        peer = self._members[member.worker_id]

        def take() -> None:
            if not peer.crashed:
                with contextlib.suppress(StaleEpoch):
                    peer.fence.take(token)
                    give(peer)

        self._lines.bring(self.name, member.worker_id, take)

    # ------------------------------------------------------------ members

    def _probe(self, command: p.ProbeInstance) -> None:
        """Probe an instance, as in `services.planner.peers.Members.probe`: the host of an ended process refuses at
        once.
        """
        name, lines = command.worker_id, self._lines

        def answered() -> None:
            peer = self._members[name]
            if lines.is_cut(self.name, name) or lines.is_cut(name, self.name) or (peer.paused and not peer.crashed):
                wait_s, found = PROBE_TIMEOUT_S, p.Probed.SILENT
            else:
                is_there = not peer.crashed and peer.incarnation == command.incarnation
                wait_s, found = self._delays.rpc_s, p.Probed.ALIVE if is_there else p.Probed.GONE
            self._clock.after(wait_s, b"planner has probed", lambda: self.process.run(partial(hear, found)))

        def hear(found: p.Probed) -> None:
            now_s = self._clock.now_s
            self.feed(p.InstanceProbed(now_s, command.cause_id, name, command.incarnation, found))

        self._clock.after(self._delays.rpc_s, b"planner probes", answered)

    def _call(self, command: p.CallMember) -> None:
        """Call a member. Its engine handles the call at the next step boundary. The answer contains the member's
        progress and is delayed briefly to wait for it, as on a worker.
        """
        worker_id = command.member.worker_id
        key = (worker_id, command.call)
        if key in self._calls:
            return
        self._calls.add(key)
        label = f"planner {command.call.name} {worker_id}".encode()
        peer, token = self._members[worker_id], self._token
        asked, over = [False], [False]

        def arrive() -> None:
            if peer.crashed:
                self._calls.discard(key)
                return
            if self._lines.troubled and self._lines.holds(self.name, worker_id, take):
                self._clock.after(_CALL_TIMEOUT_S, label, give_up)
                return
            take()

        def take() -> None:
            if peer.crashed or (over[0] and self._lines.forgets):
                return
            said = self._ask(peer, command, token)
            asked[0] = True
            if peer.paused:
                self._clock.after(_CALL_TIMEOUT_S, label, give_up)
                return
            self._hold(peer, command, said, self._clock.now_s + HOLD_S, label, answer)

        def answer(said: MemberSaid | None) -> None:
            def hear() -> None:
                if over[0]:
                    return
                over[0] = True
                self.process.run(lambda: self._on_member_status(key, command, said))

            if self._lines.troubled and self._lines.holds(worker_id, self.name, hear):
                self._clock.after(_CALL_TIMEOUT_S, label, give_up)
                return
            hear()

        def give_up() -> None:
            if not over[0]:
                over[0] = True
                self._calls.discard(key)

        self._clock.after(self._delays.rpc_s, label, arrive)

    def _hold(
        self,
        peer: Peer,
        command: p.CallMember,
        said: MemberSaid | None,
        until_s: float,
        label: bytes,
        answer: Callable[[MemberSaid | None], None],
    ) -> None:
        """Answer when the member has progressed, or after a short timeout."""
        if said is None or said.phase not in _HELD.get(command.call, ()) or self._clock.now_s >= until_s:
            self._clock.after(self._delays.rpc_s, label, lambda: answer(said))
            return

        def look() -> None:
            now = None if peer.crashed else self._status(peer, command)
            self._hold(peer, command, now, until_s, label, answer)

        self._clock.after(_LOOK_S, label, look)

    def _on_member_status(
        self, key: tuple[WorkerId, p.WorkerCall], command: p.CallMember, said: MemberSaid | None
    ) -> None:
        self._calls.discard(key)
        if said is not None:
            told = replace(said, at_s=self._clock.now_s)
            self.feed(p.MemberAnswered(self._clock.now_s, command.cause_id, command.journal.epoch, told))

    def _ask(self, peer: Peer, command: p.CallMember, token: int) -> MemberSaid | None:
        """Execute a call at a member. Returns its status; None: the call was refused."""
        worker_id, journal = command.member.worker_id, command.journal
        epoch, door, now_s = journal.epoch, peer.transitions, self._clock.now_s
        try:
            if command.call is not p.WorkerCall.POLL:
                peer.fence.take(token)
            match command.call:
                case p.WorkerCall.PREPARE:
                    door.take(_plan_of(journal), command.sources)
                case p.WorkerCall.COMMIT:
                    door.commit(epoch)
                case p.WorkerCall.ABORT:
                    door.abort(epoch, command.why)
                case p.WorkerCall.POLL:
                    pass
        except (InvalidRequest, StaleEpoch) as error:
            if self._candidacy is not None and isinstance(error, StaleEpoch) and error.what == PLANNER_TOKEN:
                self._candidacy.floor = max(self._candidacy.floor, error.want)
                return None
            return (
                MemberSaid(now_s, worker_id, Phase.FAILED, str(error)) if command.call is p.WorkerCall.PREPARE else None
            )
        return self._status(peer, command)

    def _status(self, peer: Peer, command: p.CallMember) -> MemberSaid:
        worker_id, now_s = command.member.worker_id, self._clock.now_s
        phase, why, progress = peer.transitions.said(command.journal.epoch)
        return MemberSaid(now_s, worker_id, phase, why, None if progress is None else replace(progress))


def _plan_of(journal: Journal) -> wp.Plan:
    return wp.Plan(journal.kind, journal.base, journal.target)


def _translate(change: m.Change | None, at_s: float, cause_id: str) -> p.MonitorEvent | None:
    """The planner's event for a change sent by the monitor (None: the stream begins); None if it has no such event."""
    match change:
        case None:
            return p.SnapshotBegan(at_s, cause_id)
        case m.SnapshotEnd():
            return p.SnapshotEnded(at_s, cause_id)
        case m.InstanceUp(i, draining, place, parked):
            return p.InstanceUp(
                at_s,
                cause_id,
                i.worker_id,
                i.incarnation,
                i.address,
                i.model,
                draining,
                i.data_address,
                place,
                parked=parked,
            )
        case m.InstanceLost(worker_id, incarnation, why, silent):
            return p.InstanceLost(at_s, cause_id, worker_id, incarnation, why, silent)
        case m.InstanceDraining(worker_id, incarnation):
            return p.InstanceDraining(at_s, cause_id, worker_id, incarnation)
        case m.Raised(Overload(required_bytes=required)):
            return p.OverloadRaised(at_s, cause_id, required)
        case m.Raised(Relief()):
            return p.ReliefRaised(at_s, cause_id)
        case m.Raised(LongRequest(need_tokens, prompt_tokens, leader_id)):
            return p.LongRequestRaised(at_s, cause_id, need_tokens, prompt_tokens, leader_id)
        case m.Raised():
            return None


def _party(member: Member) -> pb.MigrationParty:
    return pb.MigrationParty(
        worker_id=member.worker_id, incarnation=member.incarnation, data_address=member.data_address
    )
