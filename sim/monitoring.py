"""Monitors in virtual time, and the workers' reports to them."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, Protocol

from ballast.common.ids import DispatcherId, Incarnation, WorkerId
from ballast.common.layout import Place
from ballast.common.load import HASTY_REPORT_S, LoadReport
from ballast.common.traffic import Pace, Traffic
from services.monitor.core import messages as m
from services.monitor.core.machine import MonitorCore, MonitorRules
from services.monitor.policy.pressure import Signal
from services.planner.core.messages import ClusterLoad
from sim.clock import Clock
from sim.process import Process
from sim.state import Candidacy, SimStateServer, Site, lead_for_ever

_LOOK_S = 0.2
LEADERSHIP_TTL_S = 3.0

Hear = Callable[[m.Change | None, str], None]
Listens = Callable[[WorkerId, Incarnation], bool]


class MonitorNode:
    def __init__(
        self,
        site: Site,
        rules: MonitorRules,
        tick_interval_s: float,
        listens: Listens,
        *,
        name: str = "m0",
        elected: bool = False,
    ) -> None:
        """`listens`: True if that incarnation of a worker is at its address. `elected`: there are several monitors or
        planners.
        """
        self.name = name
        self.process = Process(name)
        self.core = MonitorCore(rules)
        self.signals: list[tuple[float, Signal]] = []
        self.touched = True  # the core has handled an event since this was reset
        self._clock = clock = site.clock
        self._state = state = site.state
        self._delays = site.delays
        self._listens = listens
        self._lines = site.lines
        self._watchers: dict[str, Hear] = {}
        self._reporters: dict[int, Reporter] = {}
        self._stream_count = 0
        self._numbers = 0
        if elected:
            Candidacy(clock, state, self.process, "monitor", LEADERSHIP_TTL_S, self._lead)
        else:
            self._lead(lead_for_ever(state, "monitor", name))
        clock.every(tick_interval_s / 2, b"monitor looks around", self._look_around, first_s=site.delays.state_s)
        clock.every(tick_interval_s, b"monitor ticks", lambda: self.process.run_due("tick", self._tick))

    def _lead(self, token: int | None) -> None:
        self.feed(m.LeadershipChanged(self._clock.now_s, "lease", token))

    def _tick(self) -> None:
        self.feed(m.Ticked(self._clock.now_s, self._cause("tick")))

    def _look_around(self) -> None:
        if not self._state.reaches(self.name) or self.process.paused or self.process.crashed:
            return
        words, layout = tuple(self._state.backlogs.values()), self._state.contents.layout
        self.feed(m.SurroundingsRead(self._clock.now_s, self._cause("state"), layout, words))

    def _cause(self, what: str) -> str:
        self._numbers += 1
        return f"{what}-{self._numbers}"

    def tell(self, event: Callable[[float], m.Event]) -> None:
        """Feed an event; `event` is called with the time at which the process handles it."""
        self.process.run(lambda: self.feed(event(self._clock.now_s)))

    def feed(self, event: m.Event) -> None:
        self.touched = True
        for command in self.core.handle(event):
            match command:
                case m.Publish(change, cause_id):
                    if isinstance(change, m.Raised):
                        self.signals.append((self._clock.now_s, change.signal))
                    for told in self._watchers.values():
                        told(change, cause_id)
                case m.ForgetBacklogs(dispatcher_ids):
                    for name in dispatcher_ids:
                        self._state.backlogs.pop(name, None)
                case m.CloseStream(stream_id):
                    if (reporter := self._reporters.pop(stream_id, None)) is not None:
                        reporter.closed(self, stream_id)
                case m.ProbeAddress(instance, cause_id):
                    self._clock.after(
                        2 * self._delays.rpc_s, b"monitor probes", partial(self._probed, instance, cause_id)
                    )
                case m.DismissWatchers():
                    self._watchers.clear()
                case _:
                    pass  # commands for the registry, which is not simulated

    def _probed(self, instance: m.Instance, cause_id: str) -> None:
        worker_id, life = instance.worker_id, instance.incarnation
        reached = not self._lines.troubled or not (
            self._lines.is_cut(self.process.name, worker_id) or self._lines.is_cut(worker_id, self.process.name)
        )
        if reached and not self._listens(worker_id, life):
            self.tell(lambda now_s: m.ConnectionRefused(now_s, cause_id, worker_id, life))

    def open_stream(self, reporter: "Reporter") -> int:
        self._stream_count += 1
        self._reporters[self._stream_count] = reporter
        return self._stream_count

    def follow(self, name: str, told: Hear) -> None:
        """Add a watcher, which first gets None and then the snapshot. No effect at a standby."""
        if not self.core.active:
            return
        told(None, "snapshot")
        for change in self.core.snapshot():
            told(change, "snapshot")
        self._watchers[name] = told

    def leave(self, name: str) -> None:
        self._watchers.pop(name, None)

    def tells(self, name: str) -> bool:
        return not self.process.crashed and name in self._watchers

    def load(self) -> ClusterLoad:
        workers = {name: entry.load for name, entry in sorted(self.core.entries.items()) if entry.load is not None}
        traffic, fresh = self.core.traffic(self._clock.now_s)
        return ClusterLoad(workers, traffic, self.core.pace(), self.core.slowness(), fresh)


class Reporting(Protocol):
    """A worker's process."""

    crashed: bool
    paused: bool

    def load(self) -> LoadReport: ...


class Monitors(NamedTuple):
    """Monitors, from a worker's view."""

    leader: Callable[[], MonitorNode | None]  # the leader found in the state server, which the worker polls
    by_name: Mapping[str, MonitorNode]  # known addresses: tried if the leader does not answer


class Reporter:
    """Sends a worker's reports to the active monitor."""

    def __init__(
        self,
        site: Site,
        monitors: Monitors,
        instance: m.Instance,
        worker: Reporting,
        *,
        interval_s: float,
        first_s: float,
        place: Callable[[], Place | None] = lambda: None,
        pace: Pace | None = None,
    ) -> None:
        self._name = instance.worker_id
        self._place, self._pace = place, pace
        self._instance = instance
        self._ended = False
        self._clock = clock = site.clock
        self._leader, self._monitors = monitors
        self._worker = worker
        self._delays = site.delays
        self._lines = site.lines
        self._monitor: MonitorNode | None = None
        self._stream_id = 0
        self._label = f"{instance.worker_id} reports".encode()
        self._cause = f"report of {instance.worker_id}"
        self._told: LoadReport | None = None
        self._told_at_s = -math.inf
        self._hastens = False
        clock.after(first_s, self._label, self._come_back)
        self._interval_s = interval_s
        clock.after(first_s + site.delays.rpc_s, self._label, self._report_regularly)

    # ------------------------------------------------------------ streams

    def _say(self, event: Callable[[MonitorNode, int, float], m.Event]) -> None:
        """Send an event over the open stream, if there is one."""
        monitor, stream_id = self._monitor, self._stream_id
        if monitor is not None and stream_id:
            self._lines.bring(
                self._name,
                monitor.process.name,
                lambda: monitor.tell(lambda now_s: event(monitor, stream_id, now_s)),
            )

    def closed(self, monitor: MonitorNode, stream_id: int) -> None:
        """Handle a stream closed by the monitor; a live worker registers again over a new one."""
        self._lines.bring(monitor.process.name, self._name, lambda: self._hear_closed(monitor, stream_id))

    def _hear_closed(self, monitor: MonitorNode, stream_id: int) -> None:
        if stream_id != self._stream_id or monitor is not self._monitor:
            return
        self._stream_id = 0
        self._clock.after(2 * self._delays.rpc_s, self._label, self._come_back)

    def _find(self) -> MonitorNode | None:
        found = self._leader()
        if found is not None and self._leads(found):
            return found
        return next(filter(self._leads, self._monitors.values()), found)

    def _leads(self, monitor: MonitorNode) -> bool:
        """True if a monitor is reachable, running and active."""
        process, cut = monitor.process, self._lines.is_cut
        reached = not (cut(self._name, process.name) or cut(process.name, self._name))
        return reached and monitor.core.active and not (process.crashed or process.paused)

    def _come_back(self) -> None:
        if self._worker.crashed:
            return
        monitor = self._find()
        if self._worker.paused or monitor is None or monitor.process.crashed:
            self._clock.after(_LOOK_S, self._label, self._come_back)
            return
        self._monitor, self._stream_id = monitor, monitor.open_stream(self)
        place = self._place()
        self._say(lambda _, stream_id, now_s: m.Announced(now_s, self._cause, stream_id, self._instance, place))

    # ------------------------------------------------------------ reports

    def _report_regularly(self) -> None:
        self._report()
        self._clock.after(max(self._interval_s, self._least_s), self._label, self._report_regularly)

    @property
    def _least_s(self) -> float:
        """Minimum report interval, as set by the monitor."""
        return 0.0 if self._monitor is None else self._monitor.core.least_report_interval_s

    def _report(self) -> None:
        """Send a report over the open stream, or end the stream if the worker has crashed."""
        if self._ended:
            return
        if self._worker.crashed:
            self._ended = True
            self._say(lambda _, stream_id, now_s: m.StreamEnded(now_s, self._cause, stream_id, announced_exit=False))
            return
        monitor, stream_id = self._monitor, self._stream_id
        if self._worker.paused or monitor is None or not stream_id or self._switched_monitor():
            return
        self._told = load = self._worker.load()
        place = self._place()
        self._told_at_s = self._clock.now_s
        said = partial(self._arrive, monitor, stream_id, load, place)
        self._clock.after(self._delays.rpc_s, self._label, said)

    def _arrive(self, monitor: MonitorNode, stream_id: int, load: LoadReport, place: Place | None) -> None:
        def come() -> None:
            monitor.tell(lambda now_s: m.LoadReported(now_s, self._cause, stream_id, load, place, self._pace))

        self._lines.bring(self._name, monitor.process.name, come)

    def _switched_monitor(self) -> bool:
        """Open a new stream if the active monitor has changed or ended. Returns True if so."""
        monitor, leader = self._monitor, self._find()
        if leader is monitor and monitor is not None and not monitor.process.crashed:
            return False
        self._say(lambda _, stream_id, now_s: m.StreamEnded(now_s, self._cause, stream_id, announced_exit=False))
        self._stream_id = 0
        self._come_back()
        return True

    def on_requests_arrived(self, load: LoadReport) -> None:
        """Report soon if demand has jumped, as a real worker does."""
        if self._told is None or self._hastens or not load.has_jumped(self._told):
            return
        self._hastens = True
        wait_s = self._told_at_s + max(HASTY_REPORT_S, self._least_s) - self._clock.now_s
        self._clock.after(max(0.0, wait_s), self._label, self._hasten)

    def _hasten(self) -> None:
        self._hastens = False
        self._report()


def share_traffic(
    clock: Clock,
    state: SimStateServer,
    dispatcher_id: DispatcherId,
    traffic: Callable[[], Traffic | None],
    *,
    interval_s: float,
) -> None:
    """Publish a dispatcher's waiting requests and recent traffic as they change; remove its entry while it is idle."""
    serial = 0

    def say() -> None:
        nonlocal serial
        now = traffic()
        serial += 1
        if now is None or not state.reaches(dispatcher_id):
            return
        if not now.is_idle:
            state.backlogs[dispatcher_id] = m.BacklogWord(dispatcher_id, f"1.{serial}", now)
        else:
            state.backlogs.pop(dispatcher_id, None)

    clock.every(interval_s, f"backlog of {dispatcher_id}".encode(), say)
