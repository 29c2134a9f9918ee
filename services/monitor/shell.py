"""Drives the monitor's core: streams and watchers in, events out, registry writes."""

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from prometheus_client import Counter, Gauge
from structlog.typing import FilteringBoundLogger

from ballast.common.errors import BallastError, NotActive, Overloaded, StaleEpoch, Unavailable, broken_core
from ballast.common.ids import DispatcherId, WorkerId
from ballast.common.layout import Layout
from ballast.common.load import LoadReport
from ballast.common.traffic import Traffic
from ballast.service.logs import get_logger
from ballast.service.metrics import REGISTRY
from ballast.service.tasks import Work
from services.monitor.core.machine import TICK_S, MonitorCore
from services.monitor.core.messages import (
    BacklogWord,
    Change,
    CloseReason,
    CloseStream,
    Command,
    ConnectionRefused,
    DismissWatchers,
    Event,
    ForgetBacklogs,
    Instance,
    InstanceDraining,
    InstanceLost,
    InstanceUp,
    LeadershipChanged,
    LoadRegistry,
    ProbeAddress,
    Publish,
    Raised,
    RegistryLoaded,
    SnapshotEnd,
    StreamId,
    SurroundingsRead,
    Ticked,
    WholeMemory,
    WriteRegistry,
)
from services.monitor.policy.demand import ClusterDemand, GroupDemand
from services.monitor.policy.pressure import LongRequest, Overload, Relief, Signal

_INSTANCES = Gauge("ballast_instances", "Instances that report to the monitor and count as alive", registry=REGISTRY)
_KV_USAGE = Gauge(
    "ballast_instance_kv_usage_fraction",
    "Fraction of the instance's KV blocks in use, 0 to 1",
    ["worker"],
    registry=REGISTRY,
)
_REPORT_AGE = Gauge(
    "ballast_instance_report_age_seconds", "Time since the instance's last report", ["worker"], registry=REGISTRY
)
_LOST = Counter(
    "ballast_instances_lost_total",
    "Instances declared lost because they were silent or closed their stream",
    registry=REGISTRY,
)
_STALE = Counter(
    "ballast_monitor_stale_announcements_total",
    "Refused announcements of an earlier incarnation of a worker",
    registry=REGISTRY,
)
_SENT_AWAY = Counter(
    "ballast_monitor_watchers_sent_away_total",
    "Event watchers that were disconnected because they were too slow",
    registry=REGISTRY,
)
_KV_DEMAND = Gauge(
    "ballast_kv_demand_bytes",
    "KV memory needed by the requests of a group, including queued ones",
    ["leader"],
    registry=REGISTRY,
)
_KV_CAPACITY = Gauge("ballast_kv_capacity_bytes", "KV memory of a group", ["leader"], registry=REGISTRY)
_CLUSTER_DEMAND = Gauge(
    "ballast_cluster_kv_demand_bytes",
    "KV memory needed by all requests, including those in backlogs",
    registry=REGISTRY,
)
_CLUSTER_CAPACITY = Gauge("ballast_cluster_kv_capacity_bytes", "KV memory of all groups", registry=REGISTRY)
_CLUSTER_UNDROPPED = Gauge(
    "ballast_cluster_kv_undropped_bytes", "KV memory of all instances without dropped parameters", registry=REGISTRY
)
_OVERLOADS = Counter(
    "ballast_overloads_total",
    "Overload signals: KV memory was short or about to be",
    registry=REGISTRY,
)
_RELIEFS = Counter(
    "ballast_reliefs_total", "Relief signals: demand was low enough to restore parameters", registry=REGISTRY
)
_LONG = Counter(
    "ballast_long_request_signals_total",
    "Seconds in which a request waited for a group that can hold it, or was about to outgrow its instance",
    registry=REGISTRY,
)

_MAX_WATCHERS = 64  # maximum concurrent streams of events
_WATCHER_QUEUE_LENGTH = 4096  # pending events after which a watcher is dismissed
_GROUP_GAUGES_INTERVAL_S, _GROUPS_INTERVAL_S_EACH = 1.0, 1e-3

# An exiting process closes its sockets one by one, so probe again before trusting a listener.
_PROBE_DELAYS_S = (0.0, 0.1, 0.3)


@dataclass(frozen=True, slots=True)
class InstanceRow:
    """One instance in the registry."""

    instance: Instance
    draining: bool
    load: LoadReport | None
    report_age_s: float
    whole: WholeMemory | None = None  # memory sizes with all layers


class RegistryStore(Protocol):
    """The registry in the state server. Every call ends within seconds, and raises Unavailable if the state server does
    not answer.
    """

    async def write(self, rows: list[InstanceRow], forget: set[WorkerId]) -> None: ...

    async def read(self) -> list[InstanceRow]: ...


class MonitorEnvironment(Protocol):
    """Entries of other services in the state server. Every call ends within seconds, and raises Unavailable if the
    state server does not answer.
    """

    @property
    def monitor_addresses(self) -> tuple[str, ...]:
        """Addresses of all running monitors, as last read."""
        ...

    async def read(self) -> tuple[Layout | None, tuple[BacklogWord, ...]]: ...

    async def forget(self, dispatcher_ids: tuple[DispatcherId, ...]) -> None: ...


class ReportStream:
    """One Report stream. When the core closes it, the reason is in `error` and the reading task is cancelled."""

    def __init__(self, stream_id: StreamId) -> None:
        self.stream_id = stream_id
        self.error: BallastError | None = None
        self.reader: asyncio.Task[object] | None = None  # the task that waits for a message

    def close(self, error: BallastError) -> None:
        self.error = error
        if self.reader is not None:
            self.reader.cancel()


class Watcher:
    """A watcher's pending events, ordered and bounded."""

    def __init__(self, first: list[tuple[Change, str]], limit: int) -> None:
        self._pending = deque(first)
        self._limit = limit + len(first)
        self._wake = asyncio.Event()
        self._error: BallastError | None = None

    def push(self, change: Change, cause_id: str) -> bool:
        """Append an event. Returns False if the watcher is too far behind and therefore dismissed."""
        if len(self._pending) >= self._limit:
            self.dismiss(Overloaded(f"{self._limit} events behind; watch again for a new snapshot", 0.1))
            return False
        self._pending.append((change, cause_id))
        self._wake.set()
        return True

    def dismiss(self, error: BallastError) -> None:
        self._pending.clear()
        self._error = error
        self._wake.set()

    async def next(self) -> tuple[Change, str]:
        """Wait for the next event and return it with its cause. Raises the error with which the watcher was
        dismissed.
        """
        while not self._pending:
            if self._error is not None:
                raise self._error
            self._wake.clear()
            await self._wake.wait()
        return self._pending.popleft()


class MonitorShell:
    """Executes the core's commands. `feed` is synchronous, so no other code interleaves with a decision. Slow
    operations run in the shell's own tasks.
    """

    def __init__(
        self,
        core: MonitorCore,
        store: RegistryStore,
        environment: MonitorEnvironment,
        *,
        monitor_id: str,
        is_refused: Callable[[str], Awaitable[bool]],
        tick_s: float = TICK_S,
        max_watchers: int = _MAX_WATCHERS,
        watcher_queue_length: int = _WATCHER_QUEUE_LENGTH,
    ) -> None:
        self.core = core
        self.monitor_id = monitor_id
        self._store = store
        self._surroundings = environment
        self._tick_s = tick_s
        self._max_watchers = max_watchers
        self._watcher_queue_length = watcher_queue_length
        self._is_refused = is_refused
        self._tasks = Work()
        self._streams: dict[StreamId, ReportStream] = {}
        self._watchers: set[Watcher] = set()
        self._last_number = 0
        self._forget: set[WorkerId] = set()
        self._registry_due = asyncio.Event()
        self._labelled: set[WorkerId] = set()  # workers with gauges
        self._groups_shown: tuple[GroupDemand, ...] = ()  # groups with gauges
        self._groups_shown_at_s = -math.inf
        self._groups: tuple[GroupDemand, ...] = ()
        self._groups_at_s = -math.inf

    async def run(self) -> None:
        """Run until cancelled."""
        async with self._tasks:
            self._tasks.keep(self._write_registry, "registry")
            self._tasks.keep(self._look_around, "environment")
            self._tasks.keep(self._keep_gauges, "gauges")
            while True:
                self.feed(Ticked(time.monotonic(), self.next_cause("tick")))
                self.core.check()
                await asyncio.sleep(self._tick_s)

    def feed(self, event: Event) -> None:
        try:
            for command in self.core.handle(event):
                self._execute(command)
        except BallastError:
            raise
        except Exception as error:
            raise broken_core(error) from error

    def next_cause(self, what: str) -> str:
        self._last_number += 1
        return f"{self.monitor_id}/{what}-{self._last_number}"

    def change_leadership(self, token: int | None) -> None:
        self.feed(LeadershipChanged(time.monotonic(), self.next_cause("lease"), token))

    # ------------------------------------------------------------ for the servicer

    @property
    def layout_epoch(self) -> int:
        """Epoch of the current layout, as known here."""
        layout = self.core.groups.layout
        return layout.epoch if layout is not None else 0

    @property
    def monitor_addresses(self) -> tuple[str, ...]:
        """Addresses of all running monitors, including this one."""
        return self._surroundings.monitor_addresses

    def open_stream(self) -> ReportStream:
        self._last_number += 1
        stream = ReportStream(self._last_number)
        self._streams[stream.stream_id] = stream
        return stream

    def forget_stream(self, stream: ReportStream) -> None:
        self._streams.pop(stream.stream_id, None)

    def watch(self) -> Watcher:
        """Add a watcher, whose first events are a snapshot. Raises NotActive on a standby, and Overloaded if there are
        too many watchers.
        """
        if not self.core.active:
            raise NotActive(self.monitor_id)
        if len(self._watchers) >= self._max_watchers:
            raise Overloaded(f"{self._max_watchers} watchers are already connected", 1.0)
        cause_id = self.next_cause("snapshot")
        watcher = Watcher([(change, cause_id) for change in self.core.snapshot()], self._watcher_queue_length)
        self._watchers.add(watcher)
        return watcher

    def unwatch(self, watcher: Watcher) -> None:
        self._watchers.discard(watcher)

    async def rows(self) -> list[InstanceRow]:
        """Return the live instances, from memory on the active monitor or from the registry on a standby."""
        return self._current_rows() if self.core.active else await self._store.read()

    def group_demands(self) -> tuple[GroupDemand, ...]:
        """Return the demand of each group. It is cached for a millisecond per group, because the trends of a thousand
        groups take 30 ms.
        """
        now_s = time.monotonic()
        if now_s >= self._groups_at_s + _GROUPS_INTERVAL_S_EACH * len(self._groups):
            self._groups, self._groups_at_s = self.core.group_demands(now_s), now_s
        return self._groups

    def traffic(self) -> tuple[Traffic, Traffic | None]:
        return self.core.traffic(time.monotonic())

    def cluster_demand(self) -> ClusterDemand:
        return self.core.cluster_demand(time.monotonic())

    # ------------------------------------------------------------ commands

    def _execute(self, command: Command) -> None:
        match command:
            case Publish(change, cause_id):
                self._publish(change, cause_id)
            case CloseStream(stream_id, why, have, want):
                stream = self._streams.get(stream_id)
                if stream is not None:
                    stream.close(self._error(why, have, want))
            case ProbeAddress(instance, cause_id):
                self._tasks.start(self._probe(instance, cause_id), f"probe {instance.worker_id}")
            case WriteRegistry(forget):
                self._forget.update(forget)
                self._registry_due.set()
            case LoadRegistry():
                self._tasks.start(self._load_registry(), "load registry")
            case ForgetBacklogs(dispatcher_ids):
                self._tasks.start(self._forget_backlogs(dispatcher_ids), "forget backlogs")
            case DismissWatchers():
                for watcher in self._watchers:
                    watcher.dismiss(NotActive(self.monitor_id))
                self._watchers.clear()

    def _publish(self, change: Change, cause_id: str) -> None:
        log = get_logger().bind(cause_id=cause_id)
        match change:
            case InstanceUp(instance, draining, place, parked):
                log.info(
                    "instance up",
                    worker=instance.worker_id,
                    incarnation=instance.incarnation,
                    address=instance.address,
                    model=instance.model.name,
                    draining=draining,
                    parked=parked,
                    group=" ".join(m.worker_id for m in place.group.members) if place is not None else "",
                )
            case InstanceLost(worker_id, incarnation, why):
                _LOST.inc()
                log.warning("instance lost", worker=worker_id, incarnation=incarnation, why=why)
            case InstanceDraining(worker_id, incarnation):
                log.info("instance draining", worker=worker_id, incarnation=incarnation)
            case SnapshotEnd():
                log.info("warmed up", instances=len(self.core.entries))
            case Raised(signal):
                self._log_signal(signal, log)
        for watcher in list(self._watchers):
            if not watcher.push(change, cause_id):
                _SENT_AWAY.inc()
                log.warning("watcher sent away, it is too slow", limit=self._watcher_queue_length)
                self._watchers.discard(watcher)

    def _log_signal(self, signal: Signal, log: FilteringBoundLogger) -> None:
        match signal:
            case Overload(required_bytes):
                _OVERLOADS.inc()
                log.warning("overload", required_bytes=required_bytes, **self._sums())
            case Relief():
                _RELIEFS.inc()
                log.info("relief", **self._sums())
            case LongRequest(need_tokens, _, leader_id):
                _LONG.inc()
                log.info("long request", need_tokens=need_tokens, worker=leader_id)

    def _error(self, why: CloseReason, have: int, want: int) -> BallastError:
        match why:
            case CloseReason.STANDBY:
                return NotActive(self.monitor_id)
            case CloseReason.STALE:
                _STALE.inc()
                get_logger().warning("announcement of an old incarnation refused", incarnation=have, newest=want)
                return StaleEpoch("incarnation", have, want)
            case CloseReason.SUPERSEDED:
                return Unavailable(self.monitor_id, "the worker has opened a newer stream")
            case CloseReason.SILENT:
                return Unavailable(self.monitor_id, "declared lost; announce again")
            case CloseReason.FULL:
                return Overloaded(f"{self.core.rules.max_instances} instances are registered already", 1.0)

    async def _probe(self, instance: Instance, cause_id: str) -> None:
        for delay_s in _PROBE_DELAYS_S:
            await asyncio.sleep(delay_s)
            if await self._is_refused(instance.address):
                self.feed(ConnectionRefused(time.monotonic(), cause_id, instance.worker_id, instance.incarnation))
                return

    async def _load_registry(self) -> None:
        try:
            rows = await self._store.read()
        except Unavailable as error:
            get_logger().warning("registry of the monitor before cannot be read", why=error.why)
            return
        get_logger().info("registry of the monitor before", instances=[r.instance.worker_id for r in rows][:20])
        incarnations = tuple((r.instance.worker_id, r.instance.incarnation) for r in rows)
        wholes = tuple((r.instance.worker_id, r.instance.incarnation, r.whole) for r in rows if r.whole is not None)
        self.feed(RegistryLoaded(time.monotonic(), self.next_cause("registry"), incarnations, wholes))

    async def _look_around(self) -> None:
        """Read layout and backlogs twice per tick while active."""
        while True:
            if self.core.active:
                try:
                    layout, backlogs = await self._surroundings.read()
                except Unavailable:
                    pass  # the core notices the missing update
                else:
                    self.feed(SurroundingsRead(time.monotonic(), self.next_cause("state"), layout, backlogs))
            await asyncio.sleep(self._tick_s / 2)

    async def _forget_backlogs(self, dispatcher_ids: tuple[DispatcherId, ...]) -> None:
        with contextlib.suppress(Unavailable):  # repeated after the next read
            await self._surroundings.forget(dispatcher_ids)

    async def _write_registry(self) -> None:
        """Write the newest state whenever it is due. While the state server is unreachable, older states are
        dropped.
        """
        reachable = True
        while True:
            await self._registry_due.wait()
            self._registry_due.clear()
            if not self.core.active:
                self._forget.clear()
                continue
            forget, self._forget = self._forget - set(self.core.entries), set()
            try:
                await self._store.write(self._current_rows(), forget)
            except Unavailable as error:
                if reachable:
                    get_logger().warning("registry not written", why=error.why)
                reachable = False
            else:
                reachable = True

    def _current_rows(self) -> list[InstanceRow]:
        now_s = time.monotonic()
        entries = [entry for _, entry in sorted(self.core.entries.items())]
        return [InstanceRow(e.instance, e.draining, e.load, now_s - e.heard_at_s, e.whole) for e in entries]

    def _sums(self) -> dict[str, int]:
        newest = self.core.pressure.history[-1]
        return {
            "wanted_bytes": newest.wanted_bytes,
            "used_bytes": newest.used_bytes,
            "capacity_bytes": newest.capacity_bytes,
            "undropped_bytes": newest.undropped_bytes,
            "groups": len(newest.groups),
        }

    async def _keep_gauges(self) -> None:
        while True:
            self._update_gauges()
            await asyncio.sleep(self._tick_s)

    def _update_gauges(self) -> None:
        _INSTANCES.set(sum(not entry.stuck for entry in self.core.entries.values()))
        now_s = time.monotonic()
        self._update_demand_gauges(now_s)
        there = set(self.core.entries)
        for worker_id in self._labelled - there:
            _KV_USAGE.remove(worker_id)
            _REPORT_AGE.remove(worker_id)
        for worker_id in there - self._labelled:
            _REPORT_AGE.labels(worker_id).set_function(partial(self._report_age_s, worker_id))
            _KV_USAGE.labels(worker_id).set_function(partial(self._kv_usage, worker_id))
        self._labelled = there

    def _report_age_s(self, worker_id: WorkerId) -> float:
        """Seconds since the last report. Called on the thread that serves metrics, like `_kv_usage`."""
        entry = self.core.entries.get(worker_id)
        return 0.0 if entry is None else time.monotonic() - entry.heard_at_s

    def _kv_usage(self, worker_id: WorkerId) -> float:
        entry = self.core.entries.get(worker_id)
        return 0.0 if entry is None or entry.load is None else entry.load.kv_usage_fraction

    def _update_demand_gauges(self, now_s: float) -> None:
        history = self.core.pressure.history if self.core.active else ()
        cluster = history[-1] if history else self.core.cluster_demand(now_s)
        _CLUSTER_DEMAND.set(cluster.wanted_bytes)
        _CLUSTER_CAPACITY.set(cluster.capacity_bytes)
        _CLUSTER_UNDROPPED.set(cluster.undropped_bytes)
        if now_s < self._groups_shown_at_s + _GROUP_GAUGES_INTERVAL_S:
            return
        shown, self._groups_shown, self._groups_shown_at_s = self._groups_shown, self.group_demands(), now_s
        if self._groups_shown is shown:
            return
        for leader_id in {group.leader_id for group in shown} - {group.leader_id for group in self._groups_shown}:
            _KV_DEMAND.remove(leader_id)
            _KV_CAPACITY.remove(leader_id)
        for group in self._groups_shown:
            _KV_DEMAND.labels(group.leader_id).set(group.demand_bytes)
            _KV_CAPACITY.labels(group.leader_id).set(group.capacity_bytes)
