"""Drives the planner's core: listens to the monitor while it is the active one, writes layouts, tells watchers."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable
from typing import Protocol

from prometheus_client import Counter, Gauge, Histogram

from ballast.common.errors import (
    AlreadyExists,
    BallastError,
    DeadlineExceeded,
    NotActive,
    NotFound,
    NotPossible,
    Overloaded,
    Unavailable,
)
from ballast.common.ids import Epoch, Incarnation, WorkerId
from ballast.common.layout import Layout
from ballast.common.load import LoadReport
from ballast.service.logs import get_logger
from ballast.service.metrics import REGISTRY
from services.planner.core.machine import PlannerCore
from services.planner.core.messages import (
    AnswerChange,
    AnswerDrain,
    AskWorkerToDrain,
    Call,
    CallMember,
    ChangeRefusal,
    ChangeRequest,
    Command,
    DrainRefusal,
    DrainRequested,
    Event,
    FollowMonitor,
    IgnoreStale,
    JournalSettled,
    LayoutLoaded,
    LeadershipChanged,
    LeaveMonitor,
    LoadFailed,
    LoadLayout,
    LoadsRead,
    MemberAnswered,
    MonitorEvent,
    NothingDone,
    Publish,
    ReadLoads,
    RefuseChange,
    RefuseDrain,
    RejectInstance,
    SetTimer,
    StoredLayout,
    TimerFired,
    TransitionMoved,
    WriteJournal,
    WriteLayout,
    WriteOutcome,
    WriteSettled,
)
from services.planner.core.record import TransitionRecord
from services.planner.core.transition import MemberSaid, Stage

_EPOCH = Gauge("ballast_layout_epoch", "Epoch of the layout", registry=REGISTRY)
_GROUPS = Gauge("ballast_layout_groups", "Groups in the layout", registry=REGISTRY)
_CHANGES = Counter("ballast_layout_changes_total", "Layouts this planner has seen take effect", registry=REGISTRY)
_WRITES = Counter("ballast_layout_writes_total", "Layout writes by outcome", ["outcome"], registry=REGISTRY)
_REJECTED = Counter(
    "ballast_instances_rejected_total", "Instances kept out because they serve another model", registry=REGISTRY
)
_STALE = Counter("ballast_planner_stale_events_total", "News of an old life of a worker, ignored", registry=REGISTRY)
_TRANSITIONS = Counter(
    "ballast_transitions_total", "Drops and restores that have ended", ["kind", "ending"], registry=REGISTRY
)
_DURATIONS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_PHASES = Histogram(
    "ballast_transition_phase_seconds",
    "Time in a phase of transitions that took effect",
    ["kind", "phase"],
    buckets=_DURATIONS_S,
    registry=REGISTRY,
)
_FREED = Counter("ballast_freed_parameter_bytes_total", "Parameter memory that was dropped", registry=REGISTRY)
_AHEAD = Counter(
    "ballast_copied_ahead_kv_bytes_total", "KV that went to another member before a restore's commit", registry=REGISTRY
)
_EXCHANGED = Counter("ballast_exchanged_kv_bytes_total", "KV that went to another member", registry=REGISTRY)
_PULLED = Counter("ballast_pulled_parameter_bytes_total", "Parameters that came back", registry=REGISTRY)
_VICTIMS = Counter(
    "ballast_transition_victims_total", "Requests that ran during a transition", ["fate"], registry=REGISTRY
)
_STALL = Histogram(
    "ballast_transition_stall_seconds",
    "Longest wait of a request for its KV, per transition",
    buckets=_DURATIONS_S,
    registry=REGISTRY,
)
_GROUP_SIZES = Gauge("ballast_layout_group_size", "Groups by number of members", ["members"], registry=REGISTRY)
_NOTHING_DONE = Counter(
    "ballast_plans_insufficient_total", "Times that no plan met what was asked for", ["asked_by"], registry=REGISTRY
)
_SHORTFALL = Gauge(
    "ballast_plan_shortfall_bytes",
    "What the newest plan for an overload lacked; more instances help",
    registry=REGISTRY,
)

_MOST_GROUPS_LOGGED = 16
_LOADS_TIMEOUT_S = 2.0
_CALL_TIMEOUT_S = 2.0  # of a call to a member; it is repeated until the transition ends
_DRAIN_DELAYS_S = (0.0, 0.5, 2.0)
_DRAIN_CALL_TIMEOUT_S = 3.0


class LayoutStore(Protocol):
    """The layout in the state server. Every call ends within seconds."""

    async def load(self) -> StoredLayout | None: ...

    async def write(self, command: WriteLayout) -> WriteOutcome: ...

    async def write_journal(self, command: WriteJournal) -> WriteOutcome: ...


class MonitorPort(Protocol):
    def events(self) -> AsyncGenerator[MonitorEvent, None]: ...

    async def loads(self, timeout_s: float) -> dict[WorkerId, LoadReport]: ...


class MembersPort(Protocol):
    """Calls to members of transitions. None: no answer that could be used."""

    async def call(self, command: CallMember, timeout_s: float) -> MemberSaid | None: ...

    async def close(self) -> None: ...


class DrainWorker(Protocol):
    """Asks a worker to take nothing new; gives its number of running requests."""

    def __call__(
        self, address: str, worker_id: WorkerId, incarnation: Incarnation, timeout_s: float
    ) -> Awaitable[int]: ...


class LayoutWatcher:
    """Holds the newest layout that one watcher has not been told; older ones are dropped."""

    def __init__(self, first: Layout) -> None:
        self._newest: Layout | None = first
        self._error: BallastError | None = None
        self._wake = asyncio.Event()

    def offer(self, layout: Layout) -> None:
        self._newest = layout
        self._wake.set()

    def dismiss(self, error: BallastError) -> None:
        self._error = error
        self._wake.set()

    async def next(self) -> Layout:
        """The next layout. Raises the error with which the watcher was dismissed."""
        while self._newest is None:
            if self._error is not None:
                raise self._error
            self._wake.clear()
            await self._wake.wait()
        layout, self._newest = self._newest, None
        return layout


class PlannerShell:
    """`feed` is synchronous, so nothing interleaves with a decision; what takes time runs in the shell's own tasks."""

    def __init__(
        self,
        core: PlannerCore,
        store: LayoutStore,
        monitor: MonitorPort,
        drain_worker: DrainWorker,
        members: MembersPort,
        *,
        planner_id: str,
        max_watchers: int,
    ) -> None:
        self.core = core
        self.planner_id = planner_id
        self._store = store
        self._monitor = monitor
        self._drain_worker = drain_worker
        self._members = members
        self._calls: set[tuple[WorkerId, Call]] = set()  # one of a kind at a time
        self._changes: dict[str, list[asyncio.Future[AnswerChange]]] = {}  # request id -> those who wait
        self._sizes: set[str] = set()  # of groups, that the gauge has labels for
        self._max_watchers = max_watchers
        self._tasks = asyncio.TaskGroup()
        self._listening: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._last_number = 0
        self._watchers: set[LayoutWatcher] = set()
        self._drains: dict[str, list[asyncio.Future[Epoch]]] = {}  # request id -> those who wait for its answer
        self._bug: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Until cancelled. A broken invariant, even one found in a timer, is raised from here."""
        async with self._tasks:
            self._bug = asyncio.get_running_loop().create_future()
            self.feed(TimerFired(time.monotonic(), self.next_cause("start")))
            try:
                await self._bug
            finally:
                if self._timer is not None:
                    self._timer.cancel()
                for watcher in self._watchers:
                    watcher.dismiss(Unavailable(self.planner_id, "stopping"))
                await self._members.close()

    def feed(self, event: Event) -> None:
        for command in self.core.handle(event):
            self._execute(command)
        self.core.check()

    def next_cause(self, what: str) -> str:
        self._last_number += 1
        return f"{self.planner_id}/{what}-{self._last_number}"

    def change_leadership(self, token: int | None) -> None:
        self.feed(LeadershipChanged(time.monotonic(), self.next_cause("lease"), token))

    # ------------------------------------------------------------ for the servicer

    def watch(self) -> LayoutWatcher:
        """
        Raises:
            Overloaded: as many watchers as the planner takes.
        """
        if len(self._watchers) >= self._max_watchers:
            raise Overloaded(f"{self._max_watchers} watchers are connected already", 1.0)
        watcher = LayoutWatcher(self.core.layout)
        self._watchers.add(watcher)
        return watcher

    def unwatch(self, watcher: LayoutWatcher) -> None:
        self._watchers.discard(watcher)

    async def drain(self, request_id: str, worker_id: WorkerId, timeout_s: float) -> Epoch:
        """Takes a worker out of routing; gives the epoch from which on it gets nothing new."""
        answer: asyncio.Future[Epoch] = asyncio.get_running_loop().create_future()
        waiting = self._drains.setdefault(request_id, [])
        waiting.append(answer)
        try:
            self.feed(DrainRequested(time.monotonic(), f"{self.planner_id}/{request_id}", request_id, worker_id))
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"draining {worker_id}: no new layout within {timeout_s:.1f} s (is the state server away?);"
                " it stays planned, ask again with the same request id"
            ) from error
        finally:
            waiting.remove(answer)
            if not waiting and self._drains.get(request_id) is waiting:
                del self._drains[request_id]

    async def change(self, event: ChangeRequest, timeout_s: float) -> AnswerChange:
        """A drop or restore by hand; returns once the plan is journaled."""
        answer: asyncio.Future[AnswerChange] = asyncio.get_running_loop().create_future()
        waiting = self._changes.setdefault(event.request_id, [])
        waiting.append(answer)
        try:
            self.feed(event)
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"no plan was journaled within {timeout_s:.1f} s (is the state server away?);"
                " ask again with the same request id"
            ) from error
        finally:
            waiting.remove(answer)
            if not waiting and self._changes.get(event.request_id) is waiting:
                del self._changes[event.request_id]

    async def loads(self) -> dict[WorkerId, LoadReport]:
        """Raises BallastError: the monitor does not answer."""
        return await self._monitor.loads(_LOADS_TIMEOUT_S)

    # ------------------------------------------------------------ commands

    def _execute(self, command: Command) -> None:
        match command:
            case LoadLayout():
                self._tasks.create_task(self._load(), name="load layout")
            case WriteLayout():
                self._tasks.create_task(self._write(command), name="write layout")
            case Publish(layout, cause_id):
                self._publish(layout, cause_id)
            case FollowMonitor():
                self._listening = self._tasks.create_task(self._listen(), name="listen to the monitor")
            case LeaveMonitor():
                if self._listening is not None:
                    self._listening.cancel()
            case AskWorkerToDrain():
                self._tasks.create_task(self._ask_to_drain(command), name=f"drain {command.worker_id}")
            case AnswerDrain(request_id, epoch):
                for answer in self._drains.pop(request_id, []):
                    if not answer.done():
                        answer.set_result(epoch)
            case RefuseDrain(request_id, why):
                for answer in self._drains.pop(request_id, []):
                    if not answer.done():
                        answer.set_exception(self._error(why, request_id))
            case RejectInstance(worker_id, incarnation, why, cause_id):
                _REJECTED.inc()
                get_logger().error(
                    "instance kept out: it serves another model than the cluster",
                    worker=worker_id,
                    incarnation=incarnation,
                    why=why,
                    cause_id=cause_id,
                )
            case IgnoreStale(worker_id, have, want, cause_id):
                _STALE.inc()
                get_logger().warning(
                    "news of an old life ignored", worker=worker_id, incarnation=have, newest=want, cause_id=cause_id
                )
            case SetTimer(at_s):
                self._set_timer(at_s)
            case ReadLoads(cause_id):
                self._tasks.create_task(self._read_loads(cause_id), name="read loads")
            case WriteJournal():
                self._tasks.create_task(self._write_journal(command), name="write journal")
            case CallMember():
                self._call_member(command)
            case AnswerChange(request_id):
                for answer in self._changes.pop(request_id, []):
                    if not answer.done():
                        answer.set_result(command)
            case RefuseChange(request_id, refusal, why):
                for answer in self._changes.pop(request_id, []):
                    if not answer.done():
                        answer.set_exception(self._change_error(refusal, why))
            case TransitionMoved(record, cause_id):
                self._note_transition(record, cause_id)
            case NothingDone(what, why, shortfall_bytes, cause_id):
                self._note_nothing(what, why, shortfall_bytes, cause_id)

    def _set_timer(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(0.0, at_s - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        try:
            self.feed(TimerFired(time.monotonic(), self.next_cause("timer")))
        except BallastError as error:
            # The loop would swallow it: hand it to `run`.
            if self._bug is not None and not self._bug.done():
                self._bug.set_exception(error)

    async def _load(self) -> None:
        try:
            stored = await self._store.load()
        except Unavailable:
            self.feed(LoadFailed(time.monotonic(), self.next_cause("load")))
        else:
            self.feed(LayoutLoaded(time.monotonic(), self.next_cause("load"), stored))

    async def _write(self, command: WriteLayout) -> None:
        outcome = await self._store.write(command)
        _WRITES.labels(outcome.name.lower()).inc()
        if outcome in (WriteOutcome.CONFLICT, WriteOutcome.FENCED):
            get_logger().warning(
                "layout refused by the state server",
                epoch=command.layout.epoch,
                expected=command.expected_epoch,
                outcome=outcome.name.lower(),
                cause_id=command.cause_id,
            )
        self.feed(WriteSettled(time.monotonic(), command.cause_id, command.layout.epoch, command.token, outcome))

    async def _read_loads(self, cause_id: str) -> None:
        try:
            loads, failure = await self.loads(), ""
        except BallastError as error:
            loads, failure = {}, str(error)
        self.feed(LoadsRead(time.monotonic(), cause_id, loads, failure))

    async def _write_journal(self, command: WriteJournal) -> None:
        outcome = await self._store.write_journal(command)
        journal = command.journal
        if outcome in (WriteOutcome.CONFLICT, WriteOutcome.FENCED):
            get_logger().warning(
                "journal refused by the state server",
                epoch=journal.epoch,
                stage=journal.stage,
                outcome=outcome.name.lower(),
                cause_id=command.cause_id,
            )
        at_s = time.monotonic()
        self.feed(JournalSettled(at_s, command.cause_id, journal.epoch, journal.stage, command.token, outcome))

    def _call_member(self, command: CallMember) -> None:
        key = (command.member.worker_id, command.call)
        if key in self._calls:
            return
        self._calls.add(key)
        self._tasks.create_task(self._ask_member(command), name=f"{command.call.name} {key[0]}")

    async def _ask_member(self, command: CallMember) -> None:
        try:
            said = await self._members.call(command, _CALL_TIMEOUT_S)
        finally:
            self._calls.discard((command.member.worker_id, command.call))
        if said is not None:
            self.feed(MemberAnswered(time.monotonic(), command.cause_id, command.journal.epoch, said))

    async def _listen(self) -> None:
        async with contextlib.aclosing(self._monitor.events()) as events:
            async for event in events:
                self.feed(event)

    async def _ask_to_drain(self, command: AskWorkerToDrain) -> None:
        log = get_logger().bind(worker=command.worker_id, cause_id=command.cause_id)
        why = ""
        for delay_s in _DRAIN_DELAYS_S:
            await asyncio.sleep(delay_s)
            try:
                running = await self._drain_worker(
                    command.address, command.worker_id, command.incarnation, _DRAIN_CALL_TIMEOUT_S
                )
            except BallastError as error:
                why = str(error)
            else:
                log.info("worker drains", running_requests=running)
                return
        log.warning("worker not told to drain; it is out of routing all the same", why=why)

    def _publish(self, layout: Layout, cause_id: str) -> None:
        _EPOCH.set(layout.epoch)
        _GROUPS.set(len(layout.groups))
        self._count_sizes(layout)
        _CHANGES.inc()
        get_logger().info(
            "layout", epoch=layout.epoch, reason=layout.reason, groups=describe(layout), cause_id=cause_id
        )
        for watcher in self._watchers:
            watcher.offer(layout)

    def _count_sizes(self, layout: Layout) -> None:
        sizes = [str(len(group.members)) for group in layout.groups]
        for gone in self._sizes - set(sizes):
            _GROUP_SIZES.remove(gone)
        self._sizes = set(sizes)
        for size in self._sizes:
            _GROUP_SIZES.labels(size).set(sizes.count(size))

    def _note_transition(self, record: TransitionRecord, cause_id: str) -> None:
        journal = record.journal
        log = get_logger().bind(epoch=journal.epoch, kind=str(journal.kind), cause_id=cause_id)
        if not journal.stage.over:
            log.info("transition", stage=str(journal.stage), by=record.by, why=journal.why or journal.failure)
            return
        _TRANSITIONS.labels(str(journal.kind), str(journal.stage)).inc()
        if journal.stage is not Stage.DONE:
            log.warning("transition taken back", summary=record.summary, seconds=round(record.prepare_s, 3))
            return
        for phase, seconds in (
            ("prepare", record.prepare_s),
            ("commit", record.seconds_in(Stage.COMMITTING)),
            ("exchange", record.seconds_in(Stage.EXCHANGING)),
            ("remap", record.longest_s("remap_s")),
        ):
            _PHASES.labels(str(journal.kind), phase).observe(seconds)
        recomputed = record.total("victims_recomputed")
        _FREED.inc(record.total("freed_parameter_bytes"))
        _EXCHANGED.inc(record.total("kv_bytes_sent"))
        _AHEAD.inc(record.total("kv_bytes_copied_ahead"))
        _PULLED.inc(record.total("parameter_bytes_pulled"))
        _VICTIMS.labels("recomputed").inc(recomputed)
        _VICTIMS.labels("kept").inc(max(0, record.victim_count - recomputed))
        _STALL.observe(record.longest_s("max_stall_s"))
        log.info(
            "transition ended",
            summary=record.summary,
            prepare_s=round(record.prepare_s, 3),
            commit_s=round(record.seconds_in(Stage.COMMITTING), 3),
            exchange_s=round(record.seconds_in(Stage.EXCHANGING), 3),
            remap_s=round(record.longest_s("remap_s"), 4),
        )

    def _note_nothing(self, what: str, why: str, shortfall_bytes: int, cause_id: str) -> None:
        _NOTHING_DONE.labels(what).inc()
        log = get_logger().bind(asked_by=what, why=why, cause_id=cause_id)
        if what != "overload":
            log.info("no transition")
            return
        _SHORTFALL.set(shortfall_bytes)
        log.warning("memory is short and stays so", shortfall_bytes=shortfall_bytes)

    def _change_error(self, refusal: ChangeRefusal, why: str) -> BallastError:
        match refusal:
            case ChangeRefusal.STANDBY:
                return NotActive(self.planner_id)
            case ChangeRefusal.BUSY | ChangeRefusal.NOT_POSSIBLE:
                return NotPossible(why)
            case ChangeRefusal.NO_LOADS:
                return Unavailable("monitor", why)
            case ChangeRefusal.ID_REUSED:
                return AlreadyExists(why)

    def _error(self, why: DrainRefusal, request_id: str) -> BallastError:
        match why:
            case DrainRefusal.STANDBY:
                return NotActive(self.planner_id)
            case DrainRefusal.NO_SUCH_WORKER:
                return NotFound("no such worker; `ballast status` names those that are there")
            case DrainRefusal.NOT_READY:
                return Unavailable(self.planner_id, "has just become active and does not know all workers yet")
            case DrainRefusal.ID_REUSED:
                return AlreadyExists(f"request id {request_id!r} was given for another worker")
            case DrainRefusal.FULL:
                return Overloaded("too many drains are under way", 1.0)


def describe(layout: Layout) -> str:
    """For example "w1[0:8] | w2[0:4]+w3[4:8] draining"."""

    def stage(worker_id: str, first: int, last: int, draining: bool) -> str:
        return f"{worker_id}[{first}:{last}]" + (" draining" if draining else "")

    groups = [
        "+".join(stage(m.worker_id, m.first_layer, m.last_layer, m.draining) for m in group.members)
        for group in layout.groups[:_MOST_GROUPS_LOGGED]
    ]
    more = len(layout.groups) - len(groups)
    return " | ".join(groups) + (f" and {more} more" if more else "")
