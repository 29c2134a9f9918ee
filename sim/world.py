"""A cluster in one process and one thread: real dispatchers, monitor, planner and workers in virtual time.

Rule 1: only the services' own code makes their decisions.
Rule 2: the same arguments produce the same run, bit by bit.
"""

import gc
import math
import random
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from ballast.common.errors import ConfigError, InvariantViolation
from ballast.common.ids import DispatcherId, Epoch, Incarnation, WorkerId
from ballast.common.load import LoadReport
from ballast.common.model import ModelInfo
from ballast.common.sampling import PriorityClass
from ballast.common.targets import for_all
from ballast.common.traffic import Pace
from ballast.service.logs import silence
from services.monitor.core.messages import Instance as Announcement
from services.planner.core.standings import is_away
from services.worker.core.blocks import BlockBook
from services.worker.core.limits import WorkerLimits
from services.worker.core.worker import WorkerCore
from services.worker.emulation.runner import Marks
from services.worker.pipeline.context import MemberEnvironment
from services.worker.pipeline.hub import Hub
from services.worker.pipeline.member import GroupMember
from services.worker.pipeline.planner_side import Transitions
from services.worker.policy.harvest import Harvest
from services.worker.policy.lookahead import lookahead
from services.worker.policy.microbatching import by_token_count
from services.worker.policy.token_target import TokenTarget
from sim.clients import Arrival, Clients
from sim.clock import Clock
from sim.cost import ExecutionModel, SimRoofline, fitted
from sim.dispatcher import DispatcherNode
from sim.engine import SimBackground, SimCopier, SimEngine, disk_of
from sim.faults import Fault, FaultKind
from sim.hardware import ELEMENT_BYTES, Cluster, ModelSpec, Timings
from sim.instance import SimInstance
from sim.lines import Lines
from sim.links import SimLinks, SimPlane, Wires
from sim.memory import Geometry, SimMemory
from sim.monitoring import MonitorNode, Monitors, Reporter, share_traffic
from sim.network import Network, NetworkEndpoint
from sim.offline import OfflineClients, OfflineLoad
from sim.pages import HugePages
from sim.planning import Peer, PlannerNode
from sim.process import SimTimer
from sim.processors import Contention, Processors
from sim.results import SimRun, SimSample
from sim.rules import ClusterRules
from sim.state import Delays, SimStateServer, Site

_SETTLE_S = 2.0  # time after the monitor's warm-up, for the first layout and the streams
_SAMPLE_INTERVAL_S = 0.5
_PROGRESS_EVENTS = 4096
_PAGES = HugePages()
_LINE = WorkerId("w")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldOptions:
    model: ModelSpec
    cluster: Cluster
    timings: Timings
    rules: ClusterRules
    execution: ExecutionModel | None = None  # cost of batches; None: from the catalogue
    # Geometries of the devices' memory, assigned to the instances in turn; empty: those of GPUs with large pages.
    geometries: Sequence[Geometry] = ()
    dispatcher_count: int = 1
    monitor_count: int = 1  # one is active, the others are standbys
    planner_count: int = 1
    seed: int = 0
    deadline_s: float = 3600.0  # deadline of each request
    check_every: int = 0  # check all invariants after this many events; 0: never
    contention: Contention | None = None  # None: unlimited processors
    marks: bool = False  # mark KV and layers, and verify the marks when batches read them
    fast_forwards: bool = True  # combine decode-only steps: the same run in less time
    faults: Sequence[Fault] = ()
    stop_after_s: float | None = None  # time in the trace; later requests stay open
    offline: OfflineLoad | None = None  # load in addition to the trace
    classes: Sequence[PriorityClass] = (PriorityClass.DEFAULT,)  # assigned to the trace's requests in turn


class World:
    def __init__(self, options: WorldOptions, arrivals: Sequence[Arrival]) -> None:
        """Raises ConfigError if the model does not fit into the cluster."""
        self.options = options
        self.clock = Clock()
        timings, rules = options.timings, options.rules
        self.network = Network(
            self.clock,
            latency_s=timings.link_latency_s,
            chunk_bytes=timings.chunk_bytes,
            rate_fraction=timings.link_fraction,
            coordinated=rules.coordinated,
        )
        self.lines = Lines(self.clock)
        self.wires = Wires(
            self.clock, self.network, self.lines, latency_s=timings.link_latency_s, connect_s=timings.link_connect_s
        )
        self._random = random.Random(options.seed)
        delays = Delays(timings.rpc_s, timings.state_s)
        count = instance_count(options.model, options.cluster)
        self._kinds = [_EventKind.of(kind, options) for kind in options.cluster.kinds]
        self.geometry, self.execution = self._kinds[0].geometry, self._kinds[0].execution
        self.limits = _limits(options)
        self.model_info = _model_info(options, self.geometry)
        cost = self._cost = self._kinds[0].pace.cost
        self._microbatching = lookahead(lambda: cost) if rules.worker.lookahead else by_token_count
        self.state = SimStateServer(self.clock, delays, self.lines)
        self._site = Site(self.clock, delays, self.lines, self.state)
        self.planes: dict[str, SimPlane] = {}
        self.monitors: dict[str, MonitorNode] = {}
        self.planners: dict[str, PlannerNode] = {}
        for _ in range(options.monitor_count):
            self.add_monitor()
        self.instances: dict[WorkerId, SimInstance] = {}
        self._lives: list[SimInstance] = []  # all incarnations of workers, including ended ones
        self._peers: dict[WorkerId, Peer] = {}
        self._processors = Processors(options.contention) if options.contention is not None else None
        for number in range(count):
            self._add_instance(number, Incarnation(1), self._random.uniform(0.0, rules.worker.report_interval_s))
        for _ in range(options.planner_count):
            self.add_planner()
        self.zero_s = rules.monitor.warmup_s + _SETTLE_S
        self.clients = Clients(
            self.clock,
            arrivals,
            self.zero_s,
            options.deadline_s,
            max_model_len=options.model.max_model_len,
            distinct=options.marks,
            classes=options.classes,
            offline=options.offline
            and OfflineClients(self.clock, options.offline, options.seed, options.deadline_s, self.zero_s),
        )
        self.dispatchers = [self._add_dispatcher(number) for number in range(options.dispatcher_count)]
        self.samples: list[SimSample] = []
        self._full: dict[WorkerId, int] = {}  # worker -> number of requests that were stranded there at the last sample
        self.clock.every(_SAMPLE_INTERVAL_S, b"sample", self._sample, first_s=self.zero_s)
        for fault in options.faults:
            fault.check(count)
            self.clock.at(self.zero_s + fault.at_s, b"fault", partial(self.strike, fault))

    # ------------------------------------------------------------ setting up

    @property
    def monitor(self) -> MonitorNode:
        """The active monitor, or any if none is active."""
        living = [node for node in self.monitors.values() if not node.process.crashed]
        return next((node for node in living if node.core.active), (living or list(self.monitors.values()))[0])

    @property
    def planner(self) -> PlannerNode:
        living = [node for node in self.planners.values() if not node.process.crashed]
        return next((node for node in living if node.core.active), (living or list(self.planners.values()))[0])

    @property
    def _elects(self) -> bool:
        return max(self.options.monitor_count, self.options.planner_count) > 1

    def add_monitor(self) -> None:
        rules, name = self.options.rules, f"m{len(self.monitors)}"
        self.monitors[name] = MonitorNode(
            self._site, rules.monitor, rules.monitor_tick_s, self._listens, name=name, elected=self._elects
        )

    def add_planner(self) -> None:
        rules, name = self.options.rules, f"p{len(self.planners)}"
        self.planners[name] = PlannerNode(
            self._site,
            rules.planner,
            rules.migrations,
            partial(self._leading_monitor, name),
            self._peers,
            name=name,
            elected=self._elects,
        )

    def _leading_monitor(self, by: str) -> MonitorNode | None:
        name = self.state.leader("monitor", by)
        return None if name is None else self.monitors[name]

    def _listens(self, worker_id: WorkerId, incarnation: Incarnation) -> bool:
        instance = self.instances[worker_id]
        return not instance.crashed and instance.incarnation == incarnation

    def _later(self, delay_s: float, act: Callable[[Epoch], None], epoch: Epoch, /) -> SimTimer:
        """Set a timer with which workers detect a silent planner. It fires only in worlds with standbys or marks."""
        timer = SimTimer(act, epoch)
        if self._elects or self.options.marks:
            self.clock.after(delay_s, b"watchdog", timer.ring)
        return timer

    def _place(self, number: int) -> tuple["_EventKind", int]:
        """Kind and host of an instance."""
        before = hosts = 0
        for kind in self._kinds:
            if number < before + kind.instance_count:
                gpus = (number - before) * self.options.model.gpus_per_instance
                return kind, hosts + gpus // kind.cluster.gpus_per_host
            before += kind.instance_count
            hosts += -(-kind.cluster.gpu_count // kind.cluster.gpus_per_host)
        raise InvariantViolation(f"there is no instance {number}")

    def _add_instance(self, number: int, incarnation: Incarnation, first_s: float) -> None:
        options, rules = self.options, self.options.rules.worker
        worker_id, gpus = WorkerId(f"{_LINE}{number}"), options.model.gpus_per_instance
        kind, host = self._place(number)
        gpu, per_host = kind.cluster.gpu, kind.cluster.gpus_per_host
        if incarnation == 1:
            self.network.add(
                NetworkEndpoint(worker_id, host, gpu.nic_bytes_per_s * gpus, gpu.scale_up_bytes_per_s * gpus)
            )
            self.network.add_source(disk_of(worker_id), options.timings.disk_bytes_per_s * max(1, gpus // per_host))
        geometry = _of_device(options, number) or kind.geometry
        memory = SimMemory.of(
            geometry,
            rules.block_tokens,
            remap_s=options.timings.remap_s,
            takes_s=lambda seconds: instance.spend(seconds),
        )
        block_count = memory.kv.block_count
        book = BlockBook(block_count, rules.block_tokens)
        core = WorkerCore(
            self.limits,
            block_count,
            book=book,
            first_sequence_id=((number + 1) << 32) + ((incarnation - 1) << 24),
            microbatching=self._microbatching,
            target=TokenTarget(math.inf, lambda: self._cost),
            harvest=Harvest(
                lambda: self._cost,
                rules.offline_slowdown,
                for_all(rules.ttft_target_s, rules.tpot_target_s),
                options.model.layer_count,
            ),
        )
        instance = SimInstance(
            worker_id,
            incarnation,
            core,
            clock=self.clock,
            execution=kind.execution,
            fast_forwards=options.fast_forwards and not options.marks,
            processors=self._processors,
        )
        hub = Hub(instance.post, instance.now)
        plane = SimPlane(worker_id, self.wires, hub, instance.afterwards)
        token_bytes = options.model.hidden_size * ELEMENT_BYTES
        block_s = geometry.block_bytes / (gpu.host_bytes_per_s * gpus)
        copier = SimCopier(memory if options.marks else None, block_s, instance.now, instance.spend)
        marks = Marks(memory) if options.marks else None
        engine = SimEngine(instance, kind.execution, geometry.layer_count, token_bytes, marks)
        environment = MemberEnvironment(
            plane=plane,
            hub=hub,
            engine=engine,
            background=SimBackground(
                worker_id,
                memory,
                self.clock,
                self.network,
                options.timings.checksum_bytes_per_s,
                gpu.host_bytes_per_s * gpus,
            ),
            now=instance.now,
            post=instance.post,
            links=SimLinks,
            copier=copier,
            activations=engine if rules.activation_log else None,
        )
        member = GroupMember(worker_id, core, book, memory, environment)
        transitions = Transitions(member, incarnation, instance.post, lambda: self.clock.now_s, self._later)
        instance.join(member, transitions, plane.crash, copier, through_member=options.marks)
        self._lives.append(instance)
        self.planes[worker_id] = plane
        self.instances[worker_id] = self._peers[worker_id] = instance
        address = f"{worker_id}:1"
        reporter = Reporter(
            self._site,
            Monitors(partial(self._leading_monitor, worker_id), self.monitors),
            Announcement(worker_id, incarnation, address, self.model_info, address),
            instance,
            interval_s=rules.report_interval_s,
            first_s=first_s,
            place=lambda: member.place,
            pace=kind.pace,
        )
        instance.on_requests(reporter.on_requests_arrived)

    def _add_dispatcher(self, number: int) -> DispatcherNode:
        rules, dispatcher_id = self.options.rules, DispatcherId(f"d{number}")
        node = DispatcherNode(
            dispatcher_id,
            rules.dispatcher,
            self.instances,
            self._site,
            self.clients,
            model=self.model_info,
            max_waiting_count=rules.worker.max_waiting_count,
        )
        self.state.watch(node.adopt, node.name)
        self.state.watch_reach(node.set_reach, node.name)
        share_traffic(self.clock, self.state, dispatcher_id, node.traffic, interval_s=rules.backlog_interval_s)
        return node

    def strike(self, fault: Fault) -> None:
        worker_id = WorkerId(f"{_LINE}{fault.worker}")
        instance = self.instances[worker_id]
        match fault.kind:
            case FaultKind.CRASH if not instance.crashed:
                instance.paused = False
                instance.crash()
                if fault.duration_s is not None:
                    self.clock.after(fault.duration_s, b"restart", partial(self._restart, fault.worker, instance))
            case FaultKind.PAUSE if not (instance.crashed or instance.paused):
                instance.catch_up()
                instance.paused = True
                self.planes[worker_id].stop()
                self.clock.after(fault.duration_s or 0.0, b"pause ends", partial(self._go_on, worker_id, instance))
            case FaultKind.CRASH | FaultKind.PAUSE:
                pass  # crashed or stopped already
            case FaultKind.SLOW:
                instance.slowness = fault.factor
                if fault.duration_s is not None:
                    self.clock.after(fault.duration_s, b"fault ends", lambda: setattr(instance, "slowness", 1.0))

    def _go_on(self, worker_id: WorkerId, instance: SimInstance) -> None:
        if not instance.crashed:
            self.planes[worker_id].go_on()
            instance.go_on()

    def _restart(self, number: int, before: SimInstance) -> None:
        """Start a new incarnation of the worker, with all layers and no requests."""
        self._add_instance(number, Incarnation(before.incarnation + 1), 0.0)

    @property
    def crashed(self) -> set[WorkerId]:
        return {name for name, instance in self.instances.items() if instance.crashed}

    @property
    def silent(self) -> set[WorkerId]:
        """Workers whose processes are stopped."""
        return {name for name, instance in self.instances.items() if instance.paused}

    # ------------------------------------------------------------ running

    def run(self, progress: Callable[[int, float], None] | None = None) -> SimRun:
        """Run until every request has ended. `progress` is called periodically with (requests ended, time in the
        trace).
        """
        with _no_collector(), silence():
            return self._run(progress)

    def _run(self, progress: Callable[[int, float], None] | None) -> SimRun:
        clock, clients, every = self.clock, self.clients, self.options.check_every
        while clock.now_s < self.zero_s - _SAMPLE_INTERVAL_S:
            clock.step()
        self._expect_service()
        clients.begin([node.submit for node in self.dispatchers])
        if self.options.stop_after_s is not None:
            clock.at(self.zero_s + self.options.stop_after_s, b"stop", clients.stop)
        while not clients.stopped:
            clock.run(every or _PROGRESS_EVENTS)
            if every:
                self._check_touched()
            else:
                _PAGES.look()
            if progress is not None:
                progress(clients.ended_count, clock.now_s - self.zero_s)
        for part in (*self.instances.values(), *self.dispatchers):
            part.catch_up()
        self.check()
        return self._result()

    def _expect_service(self) -> None:
        stored = self.state.stored
        groups = stored.layout.groups if stored is not None else ()
        serving = sum(len(group.members) for group in groups)
        usable = min(len(node.core.fleet.usable) for node in self.dispatchers)
        if serving < len(self.instances) or usable < len(groups) or self.planner.core.conductor.busy:
            raise InvariantViolation(
                f"{serving} of {len(self.instances)} instances are in the layout, dispatchers reach {usable} of"
                f" {len(groups)} groups when the trace begins"
            )

    def check(self) -> None:
        """Raise InvariantViolation unless the state of all services and of the world is consistent."""
        for part in (*self.instances.values(), *self.dispatchers, *self.monitors.values(), *self.planners.values()):
            part.touched = True
        self._check_touched()

    def _check_touched(self) -> None:
        """Check services that have handled events since the last check; the others are unchanged."""
        for instance in self.instances.values():
            if instance.touched:
                instance.touched = False
                instance.check()
        for node in (*self.monitors.values(), *self.planners.values()):
            if node.touched and not node.process.crashed:
                node.touched = False
                node.core.check()
        if any(node.touched for node in self.dispatchers):
            for dispatcher in self.dispatchers:
                dispatcher.touched = False
                dispatcher.core.check()
                dispatcher.stepped.clear()
            self.clients.check({request_id for node in self.dispatchers for request_id in node.core.requests})
        for dispatcher in self.dispatchers:
            for key in dispatcher.stepped:
                dispatcher.core.check_step(key)
            dispatcher.stepped.clear()

    def _sample(self) -> None:
        now_s = self.clock.now_s
        demand = self.monitor.core.cluster_demand(now_s)
        layout = self.monitor.core.groups.layout
        alive = [instance for instance in self.instances.values() if not instance.crashed]
        reports = [instance.load() for instance in alive]
        waiting = sum(len(node.core.backlog) + len(node.core.long) for node in self.dispatchers)
        self.samples.append(
            SimSample(
                at_s=now_s - self.zero_s,
                kv_demand_bytes=demand.wanted_bytes,
                kv_capacity_bytes=demand.capacity_bytes,
                kv_used_bytes=demand.used_bytes,
                running_count=sum(report.running_count for report in reports),
                waiting_count=waiting + sum(report.waiting_count for report in reports),
                preemptions_total=sum(instance.load().preemptions_total for instance in self._lives),
                stranded_count=self._stranded([] if layout is None else [g.leader.worker_id for g in layout.groups]),
                epoch=layout.epoch if layout is not None else 0,
                epoch_reason=layout.reason if layout is not None else "",
                group_sizes=tuple(len(group.members) for group in layout.groups) if layout is not None else (),
                on_count=sum(not instance.member.memory.is_parked for instance in alive),
                away_count=sum(is_away(m) for group in (layout.groups if layout else ()) for m in group.members),
            )
        )

    def _stranded(self, leaders: Sequence[WorkerId]) -> int:
        """Count the requests that wait on a full instance, now and at the last sample, while another one has room. The
        present counts are recorded for the next sample.
        """
        before, self._full = self._full, {}
        loads = {name: self.instances[name].load() for name in leaders}
        room = max((_room(load) for load in loads.values() if not load.waiting_count), default=0)
        for name, load in loads.items():
            each = -(-load.waiting_block_count // load.waiting_count) if load.waiting_count else 0
            if each and _room(load) < each <= room:
                self._full[name] = load.waiting_count
        return sum(min(count, before.get(name, 0)) for name, count in self._full.items())

    def _result(self) -> SimRun:
        clients = self.clients
        ends_s = [record.end_s for record in clients.records if record.end_s is not None]
        return SimRun(
            records=clients.records,
            samples=self.samples,
            transitions=[record for node in self.planners.values() for record in node.records],
            predicted=[predicted for node in self.planners.values() for predicted in node.predicted],
            signals=[signal for node in self.monitors.values() for signal in node.signals],
            zero_s=self.zero_s,
            duration_s=max(ends_s, default=0.0),
            event_count=self.clock.event_count,
            step_count=sum(instance.core.totals.steps for instance in self._lives),
            trace_hash=self.clock.trace_hash,
            bubble_fraction=self._bubble_fraction(),
            busy_fraction=self._busy_fraction(max(ends_s, default=0.0)),
            offline_token_count=0 if clients.offline is None else clients.offline.token_count,
            offline_lost_token_count=sum(instance.load().offline_lost_tokens_total for instance in self._lives),
            offline_yield_count=sum(instance.load().offline_yields_total for instance in self._lives),
        )

    def _bubble_fraction(self) -> float | None:
        had_s = math.fsum(instance.pipelined_s for instance in self._lives)
        used_s = math.fsum(instance.pipelined_busy_s for instance in self._lives)
        return max(0.0, 1.0 - used_s / had_s) if had_s else None

    def _busy_fraction(self, duration_s: float) -> float:
        busy_s = math.fsum(instance.busy_s for instance in self._lives)
        return busy_s / (duration_s * len(self.instances)) if duration_s else 0.0


@contextmanager
def _no_collector() -> Generator[None]:
    """Disable the garbage collector, because events create no cycles, and with many objects collections take a tenth of
    the time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _room(load: LoadReport) -> int:
    """Blocks available to the next new request."""
    if load.running_count >= load.max_running_count:
        return 0
    kept = load.kept_block_count if load.running_count else 0
    return load.block_count - load.used_block_count - kept


def instance_count(model: ModelSpec, cluster: Cluster) -> int:
    """Number of instances that the GPUs allow.

    Raises:
        ConfigError: there are too few GPUs for one instance.
    """
    count = cluster.instances_of(model)
    if count < 1:
        raise ConfigError(
            "cluster",
            " and ".join(f"{kind.gpu_count} x {kind.gpu.name}" for kind in cluster.kinds)
            + f" are too few: one instance of {model.name} takes {model.gpus_per_instance} of one kind",
        )
    return count


class _EventKind(NamedTuple):
    """Instances on GPUs of one kind."""

    cluster: Cluster
    instance_count: int
    geometry: Geometry
    execution: ExecutionModel
    pace: Pace

    @classmethod
    def of(cls, cluster: Cluster, options: WorldOptions) -> "_EventKind":
        model = options.model
        execution = options.execution or SimRoofline(model, cluster, options.timings)
        pace = Pace(fitted(execution, model.layer_count), model.layer_count, options.rules.worker.max_batch_tokens)
        geometry = _of_device(options, 0) or _geometry(options, cluster)
        return cls(cluster, cluster.gpu_count // model.gpus_per_instance, geometry, execution, pace)


def _of_device(options: WorldOptions, number: int) -> Geometry | None:
    return options.geometries[number % len(options.geometries)] if options.geometries else None


def _geometry(options: WorldOptions, cluster: Cluster) -> Geometry:
    model, rules = options.model, options.rules.worker
    return Geometry.choose(
        budget_bytes=int(cluster.gpu.memory_bytes * model.gpus_per_instance * options.timings.memory_fraction),
        layer_count=model.layer_count,
        layer_parameter_bytes=model.layer_parameter_bytes,
        other_parameter_bytes=model.other_parameter_bytes,
        block_bytes=model.kv_elements_per_token_layer * model.kv_element_bytes * rules.block_tokens,
    )


def _limits(options: WorldOptions) -> WorkerLimits:
    model, rules = options.model, options.rules.worker
    return WorkerLimits(
        block_tokens=rules.block_tokens,
        max_model_len=model.max_model_len,
        vocab_size=max(model.vocab_size, model.max_model_len + 1),  # a token's id is its position
        max_running_count=rules.max_running_count,
        max_batch_tokens=rules.max_batch_tokens,
        max_waiting_count=rules.max_waiting_count,
        max_waiting_tokens=rules.max_waiting_tokens,
        admission_reserve_fraction=rules.admission_reserve_fraction,
        swap_block_count=rules.swap_space_bytes // (model.kv_bytes_per_token * rules.block_tokens),
        swap_blocks_per_step=rules.swap_blocks_per_step,
        swaps_online=rules.swaps_online,
        prefix_caching=rules.prefix_caching,
    )


def _model_info(options: WorldOptions, geometry: Geometry) -> ModelInfo:
    model = options.model
    layer_bytes, other_bytes = model.layer_parameter_bytes, model.other_parameter_bytes
    if options.geometries:  # the geometry describes another model's layers
        layer_bytes = geometry.layer_parameters * geometry.extent_bytes
        other_bytes = geometry.other_parameters * geometry.extent_bytes
    return ModelInfo(
        name=model.name,
        architecture=model.architecture,
        layer_count=model.layer_count,
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        dtype="bfloat16",
        kv_cache_dtype="" if model.kv_cache_dtype == "auto" else "fp8_e4m3",
        parameter_count=model.parameter_count,
        kv_bytes_per_token=model.kv_bytes_per_token,
        eos_token_ids=(),
        layer_parameter_bytes=(layer_bytes,) * model.layer_count,
        other_parameter_bytes=other_bytes,
        block_bytes=geometry.block_bytes,
    )
