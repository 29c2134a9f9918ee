"""Drives the planner's core: follows the monitor while leading, writes layouts, notifies watchers."""

import asyncio
import contextlib
import math
import time

from ballast.common.errors import BallastError, InvariantViolation, NotPossible, Unavailable, broken_core
from ballast.common.ids import Epoch, WorkerId
from ballast.common.layout import Layout
from ballast.common.model import ModelInfo
from ballast.common.overload import OverloadPolicy
from ballast.service.logs import get_logger
from ballast.service.tasks import Work, note_failure, unless_it_fails
from services.planner.core import messages as p
from services.planner.core.machine import PlannerCore
from services.planner.core.record import TransitionRecord
from services.planner.policy.migrate import MigrationRules
from services.planner.policy.reserve import Learnt
from services.planner.shell import notes
from services.planner.shell.answers import Answers, change_error, drain_error
from services.planner.shell.balancing import Balancing
from services.planner.shell.partners import AtRest, PartnerNaming
from services.planner.shell.ports import Counting, LayoutStore, MembersPort, MonitorPort
from services.planner.shell.reaching import ReachTelling
from services.planner.shell.watchers import LayoutWatcher, Watchers
from services.planner.shell.webhook import Webhook

_MAX_WATCHERS = 64  # maximum concurrent streams of layouts
_LOADS_TIMEOUT_S = 2.0
_LEARNT_S = 10.0  # minimum interval of writes of learned data
_CALL_TIMEOUT_S = 2.0  # timeout of a call to a member; the call is repeated until the transition ends
_DRAIN_DELAYS_S = (0.0, 0.5, 2.0)
_DRAIN_CALL_TIMEOUT_S = 3.0


class PlannerShell:
    """Executes the core's commands. `feed` is synchronous, so no other code interleaves with a decision. Slow
    operations run in the shell's own tasks.
    """

    def __init__(
        self,
        core: PlannerCore,
        store: LayoutStore,
        monitor: MonitorPort,
        members: MembersPort,
        counting: Counting,
        *,
        planner_id: str,
        migrations: MigrationRules,
        webhook: Webhook | None = None,
    ) -> None:
        self.core = core
        self.planner_id = planner_id
        self._store = store
        self._monitor = monitor
        self._members = members
        self._counting = counting
        self._webhook = webhook
        self._calls: set[tuple[WorkerId, p.WorkerCall]] = set()  # calls in flight, one of each kind per worker
        self._ordering = set[WorkerId]()  # instances with an order in flight
        self._changes = Answers[p.AnswerChange]()
        self._drains = Answers[Epoch]()
        self._watchers = Watchers(_MAX_WATCHERS)
        self._naming = PartnerNaming(members, self._at_rest)
        self._balancing = Balancing(
            members,
            migrations,
            counting,
            at_rest=lambda: core.layout_at_rest,
            load=self._load_of_equals,
            next_cause=self.next_cause,
        )
        self._reaching = ReachTelling(store, self._leads, self._load_of_equals)
        self._tasks = Work()
        self._listening: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._learnt = Learnt()
        self._wrote_learnt_at_s = -math.inf
        self._last_number = 0
        self._bug: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Run until cancelled. Raises InvariantViolation for a broken invariant, even if a timer's event has broken
        it.
        """
        async with self._tasks:
            self._bug = asyncio.get_running_loop().create_future()
            naming = self._tasks.keep(self._naming.run, "name partners")
            balancing = self._tasks.keep(self._balancing.run, "balance")
            others = [] if self._webhook is None else [self._tasks.keep(self._webhook.run, "tell the webhook")]
            if self.core.conductor.rules.policy is OverloadPolicy.DROP:
                others.append(self._tasks.keep(self._reaching.run, "tell the longest context"))
            self.feed(p.TimerFired(time.monotonic(), self.next_cause("start")))
            try:
                await self._bug
            finally:
                for task in (naming, balancing, *others):
                    task.cancel()
                if self._timer is not None:
                    self._timer.cancel()
                self._watchers.dismiss(Unavailable(self.planner_id, "stopping"))
                await self._members.close()

    def feed(self, event: p.Event) -> None:
        try:
            for command in self.core.handle(event):
                self._execute(command)
            self.core.check()
        except BallastError:
            raise
        except Exception as error:
            raise broken_core(error) from error

    def next_cause(self, what: str) -> str:
        self._last_number += 1
        return f"{self.planner_id}/{what}-{self._last_number}"

    def change_leadership(self, token: int | None) -> None:
        self._members.lead(token)
        self.feed(p.LeadershipChanged(time.monotonic(), self.next_cause("lease"), token))
        self._publish_wanted()

    # ------------------------------------------------------------ called by the servicer

    def watch(self) -> LayoutWatcher:
        """Add a watcher of layouts. Raises Overloaded if there are too many."""
        return self._watchers.add(self.core.layout)

    def unwatch(self, watcher: LayoutWatcher) -> None:
        self._watchers.remove(watcher)

    async def drain(self, request_id: str, worker_id: WorkerId, timeout_s: float) -> Epoch:
        """Drain a worker and return the first epoch in which it gets no new requests."""
        event = p.WorkerDrainRequested(time.monotonic(), f"{self.planner_id}/{request_id}", request_id, worker_id)
        late = (
            f"draining {worker_id}: no new layout within {timeout_s:.1f} s (is the state server away?);"
            " it stays planned, ask again with the same request id"
        )
        return await self._drains.wait(request_id, lambda: self.feed(event), timeout_s, late)

    async def change(self, event: p.ChangeRequest | p.StandingRequested, timeout_s: float) -> p.AnswerChange:
        """Request an operator's drop or restore, and return once its plan is journaled; or park or wake an instance,
        and return once the layout contains the change.
        """
        late = (
            f"no plan was stored within {timeout_s:.1f} s (is the state server away?);"
            " ask again with the same request id"
        )
        return await self._changes.wait(event.request_id, lambda: self.feed(event), timeout_s, late)

    async def load(self) -> p.ClusterLoad:
        """The cluster's load. Raises BallastError if the monitor does not answer."""
        return await self._monitor.load(_LOADS_TIMEOUT_S)

    # ------------------------------------------------------------ commands

    def _execute(self, command: p.Command) -> None:
        match command:
            case p.LoadLayout():
                self._tasks.start(self._load(), "load layout")
            case p.WriteLayout():
                self._tasks.start(self._write(command), "write layout")
            case p.Publish(layout, cause_id):
                self._publish(layout, cause_id)
            case p.FollowMonitor():
                self._listening = self._tasks.keep(self._listen, "listen to the monitor")
            case p.LeaveMonitor():
                if self._listening is not None:
                    self._listening.cancel()
            case p.AskWorkerToDrain():
                self._tasks.start(self._ask_to_drain(command), f"drain {command.worker_id}")
            case p.OrderStanding():
                self._order_standing(command)
            case p.AnswerDrain(request_id, epoch):
                self._drains.settle(request_id, epoch)
            case p.RefuseDrain(request_id, why):
                self._drains.refuse(request_id, drain_error(self.planner_id, why, request_id))
            case p.RejectInstance():
                self._counting.rejected()
                notes.note_rejected(command)
            case p.IgnoreStale():
                self._counting.stale()
                notes.note_stale(command)
            case p.SetTimer(at_s):
                self._set_timer(at_s)
            case p.ReadLoads(cause_id):
                self._tasks.start(self._read_loads(cause_id), "read loads")
            case p.WriteJournal():
                self._tasks.start(self._write_journal(command), "write journal")
            case p.CallMember():
                self._call_member(command)
            case p.ProbeInstance():
                self._tasks.start(self._probe(command), f"probe {command.worker_id}")
            case p.AnswerChange(request_id):
                self._changes.settle(request_id, command)
            case p.RefuseChange(request_id, refusal, why):
                self._changes.refuse(request_id, change_error(self.planner_id, refusal, why))
            case p.TransitionMoved(record, cause_id):
                self._note_transition(record, cause_id)
            case p.NothingDone(what, why, shortfall_bytes, cause_id):
                self._counting.nothing_done(what, shortfall_bytes)
                notes.note_nothing(what, why, shortfall_bytes, cause_id)
            case p.Sized():
                notes.note_sized(command)
            case p.PredictionSettled(predicted):
                self._counting.predicted(predicted)

    def _publish(self, layout: Layout, cause_id: str) -> None:
        self._counting.layout(layout)
        notes.note_layout(layout, cause_id)
        self._watchers.offer(layout)
        there = frozenset(member.address for group in layout.groups for member in group.members)
        self._tasks.start(self._members.keep(there), "close connections")
        self._naming.soon()
        self._reaching.soon()

    def _leads(self) -> tuple[ModelInfo | None, int] | None:
        return None if (token := self.core.store.token) is None else (self.core.layout_model, token)

    def _at_rest(self) -> AtRest | None:
        layout = self.core.layout_at_rest
        self._counting.kept_out(len(self.core.kept_out.why(time.monotonic())))
        return None if layout is None else AtRest(layout, self.core.settled_epoch, self._apart())

    def _apart(self) -> dict[WorkerId, str]:
        return self.core.kept_out.of_another_protocol()

    async def _load_of_equals(self) -> p.ClusterLoad:
        """Read the load, without workers of another protocol version, because requests cannot move between them."""
        return (await self.load()).without(self._apart())

    def _note_transition(self, record: TransitionRecord, cause_id: str) -> None:
        if record.journal.stage.over:
            self._counting.ended(record)
            self._naming.soon()
        notes.note_transition(record, cause_id)

    def _set_timer(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(0.0, at_s - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        try:
            self.feed(p.TimerFired(time.monotonic(), self.next_cause("timer")))
        except Exception as error:  # noqa: BLE001 the loop would swallow the error, so `run` raises it
            if self._bug is not None and not self._bug.done():
                self._bug.set_exception(error)

    async def _load(self) -> None:
        try:
            stored = await self._store.load()
        except Exception as error:  # noqa: BLE001 - the core waits for an answer
            if not isinstance(error, Unavailable):
                note_failure("load layout", error)
            self.feed(p.LoadFailed(time.monotonic(), self.next_cause("load")))
        else:
            self.feed(p.LayoutLoaded(time.monotonic(), self.next_cause("load"), stored))

    async def _write(self, command: p.WriteLayout) -> None:
        outcome = await unless_it_fails(self._store.write(command), p.WriteOutcome.UNAVAILABLE)
        self._counting.write(outcome)
        notes.note_write(command, outcome)
        self.feed(p.WriteSettled(time.monotonic(), command.cause_id, command, outcome))

    async def _read_loads(self, cause_id: str) -> None:
        try:
            load, failure = await self.load(), ""
        except Exception as error:  # noqa: BLE001 - the core waits for an answer
            load, failure = p.ClusterLoad({}), str(error)
            if not isinstance(error, BallastError) or isinstance(error, InvariantViolation):
                note_failure("read loads", error)
        self.feed(p.LoadsRead(time.monotonic(), cause_id, load, failure))
        self._publish_wanted()
        learnt, now_s = self.core.conductor.sizing.learnt, time.monotonic()
        if self.core.active and learnt != self._learnt and now_s - self._wrote_learnt_at_s >= _LEARNT_S:
            self._learnt, self._wrote_learnt_at_s = learnt, now_s
            self._tasks.start(self._write_learnt(learnt), "write what was learnt")

    async def _write_learnt(self, learnt: Learnt) -> None:
        if (token := self.core.store.token) is None:
            return
        try:
            await self._store.write_learnt(learnt, token)
        except BallastError as error:
            get_logger().debug("learned data is not written", why=str(error))

    def _publish_wanted(self) -> None:
        sizing = self.core.conductor.sizing
        wanted = sizing.wanted(self.core.layout) if self.core.active else None
        self._counting.wanted(0 if wanted is None else wanted.wanted)
        if self._webhook is not None and (wanted is None or sizing.wanted_count):
            self._webhook.offer(wanted)

    async def _write_journal(self, command: p.WriteJournal) -> None:
        outcome = await unless_it_fails(self._store.write_journal(command), p.WriteOutcome.UNAVAILABLE)
        notes.note_journal(command, outcome)
        self.feed(p.WriteSettled(time.monotonic(), command.cause_id, command, outcome))

    def _call_member(self, command: p.CallMember) -> None:
        key = (command.member.worker_id, command.call)
        if key in self._calls:
            return
        self._calls.add(key)
        self._tasks.start(self._ask_member(command), f"{command.call.name} {key[0]}")

    async def _ask_member(self, command: p.CallMember) -> None:
        try:
            said = await self._members.call(command, _CALL_TIMEOUT_S)
        finally:
            self._calls.discard((command.member.worker_id, command.call))
        if said is not None:
            self.feed(p.MemberAnswered(time.monotonic(), command.cause_id, command.journal.epoch, said))

    def _order_standing(self, command: p.OrderStanding) -> None:
        """Send an order, unless one to this worker is in flight."""
        if command.member.worker_id not in self._ordering:
            self._ordering.add(command.member.worker_id)
            self._tasks.start(self._send_standing(command), f"order {command.member.worker_id}")

    async def _send_standing(self, command: p.OrderStanding) -> None:
        member = command.member
        try:
            await self._members.order_standing(member, _CALL_TIMEOUT_S, park=command.park)
        except NotPossible as error:
            get_logger().warning("cannot be parked", worker=member.worker_id, why=str(error), cause_id=command.cause_id)
            self.feed(p.ParkRefused(time.monotonic(), command.cause_id, member.worker_id, member.incarnation))
        except BallastError as error:
            what = "not parked" if command.park else "not woken"
            get_logger().info(what, worker=member.worker_id, why=str(error), cause_id=command.cause_id)
        finally:
            self._ordering.discard(member.worker_id)

    async def _probe(self, command: p.ProbeInstance) -> None:
        asked = self._members.probe(command.address, command.worker_id, command.incarnation)
        found = await unless_it_fails(asked, p.Probed.SILENT)
        if found is not command.found:
            notes.note_probe(command, found)
        now_s = time.monotonic()
        self.feed(p.InstanceProbed(now_s, command.cause_id, command.worker_id, command.incarnation, found))

    async def _listen(self) -> None:
        async with contextlib.aclosing(self._monitor.events()) as events:
            async for event in events:
                self.feed(event)

    async def _ask_to_drain(self, command: p.AskWorkerToDrain) -> None:
        log = get_logger().bind(worker=command.worker_id, cause_id=command.cause_id)
        why = ""
        for delay_s in _DRAIN_DELAYS_S:
            await asyncio.sleep(delay_s)
            try:
                running = await self._members.drain(
                    command.address, command.worker_id, command.incarnation, _DRAIN_CALL_TIMEOUT_S
                )
            except BallastError as error:
                why = str(error)
            else:
                log.info("worker drains", running_requests=running)
                return
        log.warning("worker not ordered to drain, but it gets no new requests", why=why)
