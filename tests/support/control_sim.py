"""The cores of monitors and planners in virtual time, on a network and a state server that misbehave.

Everything random comes from one seed. What the world records is judged by the tests: every layout that was written,
when each life of a worker began and ended.
"""

import hashlib
import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

from ballast.common.ids import Epoch, Incarnation, WorkerId
from ballast.common.layout import Layout
from ballast.common.load import LoadReport
from services.monitor.core import messages as m
from services.monitor.core.machine import MonitorCore, MonitorRules
from services.monitor.policy.pressure import Signal
from services.planner.core import messages as p
from services.planner.core.machine import PlannerCore, PlannerRules
from tests.support.pressure import RULES
from tests.support.reporting_worker import load_report, model_info

LEASE_S = 1.5
TTL_S = 1.2
TICK_S = 0.1
REPORT_S = 0.2
MODEL = model_info(4)


@dataclass(frozen=True, slots=True)
class Faults:
    """Probabilities per message or operation, and how long what is delayed may take."""

    lost: float = 0.0
    doubled: float = 0.0
    delay_s: float = 0.02
    answer_lost: float = 0.0  # of the state server, after it has done what it was asked
    stream_breaks_per_s: float = 0.0  # monitor -> planner


class World:
    """Discrete events; what was scheduled first runs first."""

    def __init__(self, seed: int, faults: Faults) -> None:
        self.now_s = 0.0
        self.rng = random.Random(seed)
        self.faults = faults
        self.trace = hashlib.sha256()
        self._queue: list[tuple[float, int, str, Callable[[], None]]] = []
        self._serial = itertools.count()

    def after(self, delay_s: float, what: str, act: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now_s + delay_s, next(self._serial), what, act))

    def every(self, interval_s: float, what: str, act: Callable[[], None], alive: Callable[[], bool]) -> None:
        def step() -> None:
            if alive():
                act()
                self.after(interval_s, what, step)

        self.after(self.rng.uniform(0, interval_s), what, step)

    def send(self, what: str, act: Callable[[], None]) -> None:
        """One message: lost, doubled, late, out of order."""
        if self.rng.random() < self.faults.lost:
            return
        for _ in range(2 if self.rng.random() < self.faults.doubled else 1):
            self.after(self.rng.uniform(0.001, self.faults.delay_s), what, act)

    def run(self, until_s: float) -> None:
        while self._queue and self._queue[0][0] <= until_s:
            self.now_s, _, what, act = heapq.heappop(self._queue)
            self.trace.update(f"{self.now_s!r} {what}\n".encode())
            act()
        self.now_s = until_s


@dataclass(slots=True)
class Written:
    at_s: float
    by: str
    layout: Layout


class StateServerModel:
    """Leases and the layout, with the rules of the real scripts."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.up = True
        self.leases: dict[str, tuple[str, int, float]] = {}  # name -> (holder, token, runs out at)
        self.stored: p.StoredLayout | None = None
        self.history: list[Written] = []

    def acquire(self, name: str, holder: str) -> int | None:
        now_s = self.world.now_s
        found = self.leases.get(name)
        if found is not None and found[2] <= now_s:
            found = None
        if found is not None and found[0] != holder:
            return None
        # Like the server's clock: grows over a restart, too.
        token = found[1] if found is not None else int(now_s * 1e6) + 1
        self.leases[name] = (holder, token, now_s + TTL_S)
        return token

    def write(self, command: p.WriteLayout, by: str) -> p.WriteOutcome:
        lease = self.leases.get("planner")
        if lease is None or lease[2] <= self.world.now_s or lease[1] != command.token:
            return p.WriteOutcome.FENCED
        if (self.stored.layout.epoch if self.stored else None) != command.expected_epoch:
            return p.WriteOutcome.CONFLICT
        self.stored = p.StoredLayout(command.layout, command.model)
        self.history.append(Written(self.world.now_s, by, command.layout))
        return p.WriteOutcome.WRITTEN

    def flush(self) -> None:
        self.leases.clear()
        self.stored = None


@dataclass(slots=True)
class WorkerLife:
    instance: m.Instance
    born_at_s: float
    died_at_s: float | None = None


class MonitorNode:
    def __init__(self, cluster: "ClusterModel", name: str) -> None:
        self.cluster, self.world, self.name = cluster, cluster.world, name
        self.alive = True
        self.core = MonitorCore(
            MonitorRules(
                lease_s=LEASE_S,
                warmup_s=LEASE_S + 1.0,
                registry_interval_s=0.5,
                max_instances=100,
                history_length=20,
                pressure=RULES,
                backlog_lease_s=1.0,
            )
        )
        self.closed: set[int] = set()
        self.watchers: dict[tuple[str, int], Callable[[m.Change, str], None]] = {}
        self.world.every(TICK_S, f"{name} ticks", self._tick, lambda: self.alive)
        self.world.every(TTL_S / 3, f"{name} renews", self._renew, lambda: self.alive)

    def _tick(self) -> None:
        state = self.cluster.state
        if state.up:
            layout = state.stored.layout if state.stored else None
            self.feed(m.SurroundingsRead(self.world.now_s, f"{self.name} state", layout, ()))
        self.feed(m.Ticked(self.world.now_s, f"{self.name} tick"))

    def _renew(self) -> None:
        state = self.cluster.state
        if not state.up:
            return
        token = state.acquire("monitor", self.name)
        if token != self.core.token:
            self.feed(m.LeadershipChanged(self.world.now_s, f"{self.name} lease", token))

    def feed(self, event: m.Event) -> None:
        if not self.alive:
            return
        for command in self.core.handle(event):
            match command:
                case m.Publish(change, cause_id):
                    if isinstance(change, m.Raised):
                        self.cluster.raised.append((self.world.now_s, change.signal))
                    for tell in list(self.watchers.values()):
                        tell(change, cause_id)
                case m.CloseStream(stream_id=stream_id):
                    self.closed.add(stream_id)
                case m.ProbeAddress(instance, cause_id):
                    self._probe(instance, cause_id)
                case m.DismissWatchers():
                    self.watchers.clear()
                case m.WriteRegistry() | m.LoadRegistry() | m.ForgetBacklogs():
                    pass
        self.core.check()

    def _probe(self, instance: m.Instance, cause_id: str) -> None:
        life = self.cluster.lives[(instance.worker_id, instance.incarnation)]
        if life.died_at_s is not None:
            refused = m.ConnectionRefused
            self.world.send(
                "probe",
                lambda: self.feed(refused(self.world.now_s, cause_id, instance.worker_id, instance.incarnation)),
            )


class PlannerNode:
    def __init__(self, cluster: "ClusterModel", name: str) -> None:
        self.cluster, self.world, self.name = cluster, cluster.world, name
        self.alive = True
        self._decided = False
        self.core = PlannerCore(
            PlannerRules(coalesce_s=0.05, verify_interval_s=0.5, retry_s=0.2, max_drains=10),
        )
        self._timer = 0
        self._connection = 0
        self._connected_to: MonitorNode | None = None
        self.seen_epochs: list[Epoch] = []
        self.world.every(TTL_S / 3, f"{name} renews", self._renew, lambda: self.alive)
        self.world.every(0.1, f"{name} connects", self._connect, lambda: self.alive)
        self.feed(p.TimerFired(self.world.now_s, f"{name} starts"))

    def _renew(self) -> None:
        state = self.cluster.state
        if not state.up:
            return
        token = state.acquire("planner", self.name)
        if self._decided and self.world.rng.random() < self.world.faults.answer_lost:
            return
        if token != self.core.token or not self._decided:
            self._decided = True
            self.feed(p.LeadershipChanged(self.world.now_s, f"{self.name} lease", token))

    def feed(self, event: p.Event) -> None:
        if not self.alive:
            return
        for command in self.core.handle(event):
            match command:
                case p.LoadLayout():
                    self._load()
                case p.WriteLayout():
                    self._write(command)
                case p.Publish(layout, _):
                    self.seen_epochs.append(layout.epoch)
                case p.SetTimer(at_s):
                    self._set_timer(at_s)
                case p.LeaveMonitor():
                    self._connected_to = None
                    self._connection += 1
                case _:
                    pass
        self.core.check()

    def _set_timer(self, at_s: float) -> None:
        self._timer += 1
        number = self._timer

        def fire() -> None:
            if number == self._timer:
                self.feed(p.TimerFired(self.world.now_s, f"{self.name} timer"))

        self.world.after(max(0.0, at_s - self.world.now_s), f"{self.name} timer", fire)

    def _ask(self, what: str, operation: Callable[[], Callable[[], p.Event]], failed: Callable[[], p.Event]) -> None:
        """Carries out one operation of the state server: late, refused, or done without an answer."""

        def arrive() -> None:
            if not self.cluster.state.up:
                self.world.after(0.1, what, lambda: self.feed(failed()))
                return
            answer = operation()
            if self.world.rng.random() < self.world.faults.answer_lost:
                self.world.after(0.3, what, lambda: self.feed(failed()))
            else:
                self.world.after(self.world.rng.uniform(0.0005, 0.01), what, lambda: self.feed(answer()))

        self.world.after(self.world.rng.uniform(0.0005, 0.01), what, arrive)

    def _load(self) -> None:
        def operation() -> Callable[[], p.Event]:
            stored = self.cluster.state.stored
            return lambda: p.LayoutLoaded(self.world.now_s, f"{self.name} load", stored)

        self._ask("load", operation, lambda: p.LoadFailed(self.world.now_s, f"{self.name} load"))

    def _write(self, command: p.WriteLayout) -> None:
        def settled(outcome: p.WriteOutcome) -> p.Event:
            return p.WriteSettled(self.world.now_s, command.cause_id, command.layout.epoch, command.token, outcome)

        def operation() -> Callable[[], p.Event]:
            outcome = self.cluster.state.write(command, self.name)
            return lambda: settled(outcome)

        self._ask("write", operation, lambda: settled(p.WriteOutcome.UNAVAILABLE))

    def _connect(self) -> None:
        """Keeps one ordered stream from the active monitor, which may break at any time."""
        target = self.cluster.active_monitor()
        broken = self.world.rng.random() < self.world.faults.stream_breaks_per_s * 0.1
        if not self.core.active or target is None:
            return
        if (
            target is self._connected_to
            and (self.name, self._connection) in target.watchers
            and target.alive
            and not broken
        ):
            return
        if self._connected_to is not None:
            self._connected_to.watchers.pop((self.name, self._connection), None)
        self._connection += 1
        number, last_s = self._connection, self.world.now_s
        self._connected_to = target

        def tell(change: m.Change | None, cause_id: str) -> None:
            nonlocal last_s
            last_s = max(last_s, self.world.now_s + self.world.rng.uniform(0.0005, self.world.faults.delay_s))

            def arrive() -> None:
                event = _translate(change, self.world.now_s, cause_id)
                if number == self._connection and event is not None:
                    self.feed(event)

            self.world.after(last_s - self.world.now_s, "event", arrive)

        tell(None, "connect")
        for change in target.core.snapshot():
            tell(change, "snapshot")
        target.watchers[(self.name, number)] = tell


def _translate(change: m.Change | None, at_s: float, cause_id: str) -> p.MonitorEvent | None:
    """None for what the planner has no event for."""
    match change:
        case m.Raised():
            return None
        case None:
            return p.SnapshotBegan(at_s, cause_id)
        case m.SnapshotEnd():
            return p.SnapshotEnded(at_s, cause_id)
        case m.InstanceUp(i, draining):
            return p.InstanceUp(at_s, cause_id, i.worker_id, i.incarnation, i.address, i.model, draining)
        case m.InstanceLost(worker_id, incarnation, why):
            return p.InstanceLost(at_s, cause_id, worker_id, incarnation, why)
        case m.InstanceDraining(worker_id, incarnation):
            return p.InstanceDraining(at_s, cause_id, worker_id, incarnation)


class ClusterModel:
    """Monitors, planners, workers. Names of restarted nodes carry a number, as holders of leases do."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.state = StateServerModel(world)
        self.monitors: list[MonitorNode] = []
        self.planners: list[PlannerNode] = []
        self.lives: dict[tuple[WorkerId, Incarnation], WorkerLife] = {}
        self.load: Callable[[], LoadReport] = lambda: load_report(3)  # of every worker, now
        self.raised: list[tuple[float, Signal]] = []  # by whichever monitor
        self._streams = itertools.count(1)
        self._starts = itertools.count(1)

    def active_monitor(self) -> MonitorNode | None:
        """Whom the state server names; the last one while it is away."""
        lease = self.state.leases.get("monitor")
        found = [n for n in self.monitors if n.alive and n.core.active and (lease is None or lease[0] == n.name)]
        return found[0] if found else None

    def start_monitor(self) -> MonitorNode:
        self.monitors.append(MonitorNode(self, f"m{next(self._starts)}"))
        return self.monitors[-1]

    def start_planner(self) -> PlannerNode:
        self.planners.append(PlannerNode(self, f"p{next(self._starts)}"))
        return self.planners[-1]

    def start_worker(self, worker_id: str) -> WorkerLife:
        incarnation = Incarnation(1 + max((i for w, i in self.lives if w == worker_id), default=0))
        instance = m.Instance(WorkerId(worker_id), incarnation, f"{worker_id}:{incarnation}", MODEL)
        life = WorkerLife(instance, self.world.now_s)
        self.lives[(instance.worker_id, incarnation)] = life
        self._report(life)
        return life

    def kill_worker(self, life: WorkerLife) -> None:
        life.died_at_s = self.world.now_s

    def living(self) -> dict[WorkerId, Incarnation]:
        return {w: i for (w, i), life in self.lives.items() if life.died_at_s is None}

    def _report(self, life: WorkerLife) -> None:
        """The reporter: announces on a new stream whenever the one before was closed or the monitor changed."""
        stream: tuple[MonitorNode, int] | None = None

        def step() -> None:
            nonlocal stream
            target = self.active_monitor()
            if target is None:
                return
            if stream is None or stream[0] is not target or stream[1] in target.closed:
                stream = (target, next(self._streams))
            number = stream[1]
            if life.died_at_s is not None:
                return
            # Announced again with every report: a lost first message must not cost the whole lease.
            self.world.send(
                "announce", lambda: target.feed(m.Announced(self.world.now_s, f"s{number}", number, life.instance))
            )
            self.world.send(
                "report", lambda: target.feed(m.LoadReported(self.world.now_s, f"s{number}", number, self.load()))
            )

        def alive() -> bool:
            if life.died_at_s is None:
                return True
            if stream is not None:
                target, number = stream
                self.world.send(
                    "end", lambda: target.feed(m.StreamEnded(self.world.now_s, f"s{number}", number, False))
                )
            return False

        self.world.every(REPORT_S, f"{life.instance.worker_id} reports", step, alive)
