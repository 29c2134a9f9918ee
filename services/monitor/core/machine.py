"""Membership of the cluster: which instances are alive, in which incarnation, and their load. Pure; only `handle`
changes it.

An instance counts as lost:
- after `lease_s` without a message. Silence alone does not show that its process has ended, so the planner receives the
  reason and probes the instance itself.
- at once when its worker closes the stream on purpose.
- when its stream is broken and its address refuses connections, which shows that the process has ended. A broken stream
  alone proves nothing, because the network may be at fault.
- while a step of its engine hangs: the process still reports, but does not serve. It is up again with the first report
  after the step.
- when a newer incarnation of the same worker is known. Older incarnations are refused (I5).

A monitor that has just become active knows no instance. For `warmup_s` it sends no SnapshotEnd, so that instances that
have not found the new monitor yet do not count as lost, and it raises no pressure signals.
"""

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field, replace
from operator import itemgetter

from ballast.common.cost import Chunk
from ballast.common.errors import InvariantViolation
from ballast.common.ids import Incarnation, WorkerId
from ballast.common.load import LoadReport
from ballast.common.traffic import Pace, Traffic
from services.monitor.core import messages as m
from services.monitor.core.backlogs import Backlogs
from services.monitor.core.entry import WorkerEntry
from services.monitor.core.groups import Groups
from services.monitor.policy.demand import ClusterDemand, GroupDemand, backlog_bytes, sum_demand
from services.monitor.policy.pressure import TREND_WINDOW_S, LongRequest, Pressure, PressureRules

TICK_S = 0.1  # interval of evaluations, a tenth of the horizon
_TYPICAL = Chunk(1000, 128)  # batch with which the speeds of machines are compared
# Slowdown factors. From the first factor on, an instance counts as another kind of machine, because instances of one
# kind differ by less. Above the second one, the factor is implausible and ignored.
_UNLIKE, _MISTAKEN = 1.25, 30.0
_REPORTS_PER_S = 150.0  # of all instances together, if the lease permits; each report costs a millisecond on both sides
_REPORTS_PER_LEASE = 4
LONG_S = 1.0  # minimum interval of `LongRequest` signals
# A request that fills the first fraction of its instance and may grow further needs a group with room for the second
# factor times its tokens.
_OUTGROWN, _GROWS = 0.9, 1.5
LEAST_LOOK_S = 0.02  # minimum interval between two evaluations of total demand


def sample_count(trend_window_s: float) -> int:
    """Maximum number of samples within the trend's window."""
    return math.ceil(trend_window_s * (1 / TICK_S + 1 / LEAST_LOOK_S)) + 2


def pressure_rules(
    *, overload_threshold_fraction: float, relief_threshold_fraction: float, dwell_s: float
) -> PressureRules:
    """Return the pressure rules for these settings."""
    return PressureRules(
        overload_threshold_fraction=overload_threshold_fraction,
        relief_threshold_fraction=relief_threshold_fraction,
        dwell_s=dwell_s,
        sample_count=sample_count(TREND_WINDOW_S),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorRules:
    lease_s: float  # an instance that is silent for longer counts as lost
    pressure: PressureRules
    registry_interval_s: float = 1.0  # interval of writes of the registry, which standbys display
    max_instances: int = 1 << 16  # bounds memory usage in case peers report invented names
    history_length: int = 50  # load samples per instance, enough for the trend's window at twice the report rate
    backlog_lease_s: float = 1.0  # a dispatcher without a new entry for longer counts as lost
    backlog_forget_s: float = 60.0
    warmup_s: float = 4.0  # time that workers have to find this monitor after it has become active
    step_timeout_s: float = 60.0  # an engine whose step lasts longer counts as lost
    max_remembered: int = 10_000  # number of workers whose newest incarnation is remembered


@dataclass(slots=True)
class MonitorCore:
    rules: MonitorRules
    token: int | None = None  # fencing token of the lease; None: standby
    warm: bool = False  # True: the snapshot for watchers is complete
    entries: dict[WorkerId, WorkerEntry] = field(default_factory=dict[WorkerId, WorkerEntry])
    groups: Groups = field(default_factory=Groups)
    pressure: Pressure = field(init=False)
    _backlogs: Backlogs = field(init=False)
    _wholes: dict[tuple[WorkerId, Incarnation], m.WholeMemory] = (
        field(  # from the previous monitor's registry, for instances that have not reported yet
            default_factory=dict[tuple[WorkerId, Incarnation], m.WholeMemory]
        )
    )
    _streams: dict[m.StreamId, WorkerId] = field(default_factory=dict[m.StreamId, WorkerId])
    # Newest known incarnation of each worker; the most recent reporters are last.
    _newest: OrderedDict[WorkerId, Incarnation] = field(default_factory=OrderedDict[WorkerId, Incarnation])
    _active_since_s: float = 0.0
    _ticked_at_s: float | None = None
    _evaluated_at_s: float = -math.inf  # time of the last evaluation of total demand
    _long_at_s: float = -math.inf  # time of the last `LongRequest` signal
    # Instances with a request that will need a larger group.
    _outgrown: set[WorkerId] = field(default_factory=set[WorkerId])
    _registry_at_s: float = 0.0
    _forget: list[WorkerId] = field(default_factory=list[WorkerId])
    _checked: bool = False  # True: no instance and no stream was added or removed since the last check

    def __post_init__(self) -> None:
        self.pressure = Pressure(self.rules.pressure)
        self._backlogs = Backlogs(self.rules.backlog_lease_s, self.rules.backlog_forget_s)

    @property
    def least_report_interval_s(self) -> float:
        """Minimum interval in seconds between two reports of a worker. It is sent to all workers."""
        return min(len(self.entries) / _REPORTS_PER_S, self.rules.lease_s / _REPORTS_PER_LEASE)

    @property
    def active(self) -> bool:
        return self.token is not None

    def snapshot(self) -> list[m.Change]:
        """Return the initial events for a new watcher."""
        ups: list[m.Change] = [entry.up for _, entry in sorted(self.entries.items()) if not entry.stuck]
        return [*ups, m.SnapshotEnd()] if self.warm else ups

    def handle(self, event: m.Event) -> list[m.Command]:
        match event:
            case m.Announced():
                return self._announced(event)
            case m.LoadReported():
                return self._load_reported(event)
            case m.StreamEnded():
                return self._stream_ended(event)
            case m.ConnectionRefused():
                entry = self.entries.get(event.worker_id)
                if entry is None or entry.instance.incarnation != event.incarnation or entry.stream_id is not None:
                    return []
                return self._lose(event.worker_id, "its process has ended: connection refused", event.cause_id)
            case m.RegistryLoaded():
                return self._registry_loaded(event)
            case m.SurroundingsRead():
                return self._surroundings_read(event)
            case m.LeadershipChanged():
                return self._leadership_changed(event)
            case m.Ticked():
                return self._ticked(event)

    def _announced(self, event: m.Announced) -> list[m.Command]:
        instance, stream_id, self._checked = event.instance, event.stream_id, False
        if not self.active:
            return [m.CloseStream(stream_id, m.CloseReason.STANDBY)]
        newest = self._newest.get(instance.worker_id, instance.incarnation)
        if instance.incarnation < newest:
            return [m.CloseStream(stream_id, m.CloseReason.STALE, have=instance.incarnation, want=newest)]
        commands: list[m.Command] = []
        entry = self.entries.get(instance.worker_id)
        if entry is None and len(self.entries) >= self.rules.max_instances:
            return [m.CloseStream(stream_id, m.CloseReason.FULL)]
        if entry is not None and entry.stream_id not in (None, stream_id):
            commands.append(self._close(entry, m.CloseReason.SUPERSEDED))
        if entry is not None and entry.instance.incarnation < instance.incarnation:
            commands += self._lose(instance.worker_id, "replaced by a newer incarnation of the worker", event.cause_id)
            entry = None
        if entry is None:
            entry = WorkerEntry(instance, event.at_s, stream_id, deque(maxlen=self.rules.history_length))
            entry.whole = self._wholes.pop((instance.worker_id, instance.incarnation), None)
            self.entries[instance.worker_id] = entry
            commands.append(m.Publish(m.InstanceUp(instance, draining=False, place=event.place), event.cause_id))
        elif entry.instance != instance or entry.place != event.place:
            commands.append(m.Publish(replace(entry.up, instance=instance, place=event.place), event.cause_id))
        entry.instance, entry.stream_id, entry.heard_at_s = instance, stream_id, event.at_s
        entry.place = event.place
        self._streams[stream_id] = instance.worker_id
        self._remember(instance.worker_id, instance.incarnation)
        return commands

    def _load_reported(self, event: m.LoadReported) -> list[m.Command]:
        worker_id = self._streams.get(event.stream_id)
        if worker_id is None:  # its stream was closed meanwhile
            return []
        entry = self.entries[worker_id]
        before, place = entry.load, entry.place
        entry.take(event.at_s, event.load, event.place, event.pace)
        (self._outgrown.add if _is_outgrown(event.load) else self._outgrown.discard)(worker_id)
        commands = self._check_step_age(event, entry) + self._check_jump(event, before)
        parks = event.load.parked != (before is not None and before.parked)
        if event.place != place or parks:  # the planner depends on these reports
            commands.append(m.Publish(entry.up, event.cause_id))
        # Draining is irreversible for an incarnation.
        if event.load.draining and not entry.draining:
            entry.draining = True
            commands.append(m.Publish(m.InstanceDraining(worker_id, entry.instance.incarnation), event.cause_id))
        return commands

    def _check_step_age(self, event: m.LoadReported, entry: WorkerEntry) -> list[m.Command]:
        stuck = event.load.step_age_s > self.rules.step_timeout_s
        if stuck == entry.stuck:
            return []
        entry.stuck = stuck
        instance = entry.instance
        if not stuck:
            return [m.Publish(entry.up, event.cause_id)]
        why = f"its engine hangs: a step has lasted {event.load.step_age_s:.1f} s"
        return [m.Publish(m.InstanceLost(instance.worker_id, instance.incarnation, why), event.cause_id)]

    def _check_jump(self, event: m.LoadReported, before: LoadReport | None) -> list[m.Command]:
        """Evaluate demand at once if the load has jumped, because a burst fills the memory within a few ticks."""
        jumped = before is not None and event.load.has_jumped(before)
        return self._evaluate_soon(event.at_s, event.cause_id) if jumped else []

    def _evaluate_soon(self, at_s: float, cause_id: str) -> list[m.Command]:
        """Evaluate the demand now, unless that was done within `LEAST_LOOK_S`."""
        if not self.warm or at_s - self._evaluated_at_s < LEAST_LOOK_S:
            return []
        return self._watch_pressure(at_s, cause_id)

    def _stream_ended(self, event: m.StreamEnded) -> list[m.Command]:
        worker_id, self._checked = self._streams.pop(event.stream_id, None), False
        if worker_id is None:
            return []
        entry = self.entries[worker_id]
        entry.stream_id = None
        if event.announced_exit:
            return self._lose(worker_id, "it left", event.cause_id)
        return [m.ProbeAddress(entry.instance, event.cause_id)]

    def _registry_loaded(self, event: m.RegistryLoaded) -> list[m.Command]:
        commands: list[m.Command] = []
        for worker_id, incarnation, whole in event.wholes if self.active else ():
            entry = self.entries.get(worker_id)
            if entry is None:
                self._wholes[worker_id, incarnation] = whole
            elif entry.instance.incarnation == incarnation:
                entry.learn(whole)
        for worker_id, incarnation in event.incarnations:
            self._remember(worker_id, incarnation)
            entry = self.entries.get(worker_id)
            if entry is not None and entry.instance.incarnation < incarnation:
                commands += self._lose(worker_id, "a newer incarnation of the worker is known", event.cause_id)
        return commands

    def _surroundings_read(self, event: m.SurroundingsRead) -> list[m.Command]:
        if not self.active:
            return []
        self.groups.adopt(event.at_s, event.layout)
        more = self._backlogs.read(event.at_s, event.backlogs)
        silent = self._backlogs.silent(event.at_s)
        forget: list[m.Command] = [m.ForgetBacklogs(silent)] if silent else []
        return forget + (self._evaluate_soon(event.at_s, event.cause_id) if more else [])

    def _leadership_changed(self, event: m.LeadershipChanged) -> list[m.Command]:
        was_active, self.token, self._checked = self.active, event.token, False
        if self.active == was_active:
            return []
        if self.active:
            self._active_since_s = self._registry_at_s = event.at_s
            self.pressure.begin(event.at_s)
            return [m.LoadRegistry()]
        closed: list[m.Command] = [m.CloseStream(s, m.CloseReason.STANDBY) for s in sorted(self._streams)]
        self._streams.clear()
        self.entries.clear()
        self._outgrown.clear()
        self._forget.clear()
        self._wholes.clear()
        self._backlogs.clear()
        self.groups.clear()
        self.warm = False
        return [*closed, m.DismissWatchers()]

    def _ticked(self, event: m.Ticked) -> list[m.Command]:
        self._discount_own_pause(event.at_s)
        if not self.active:
            return []
        commands: list[m.Command] = []
        heard_from_s = event.at_s - self.rules.lease_s
        for worker_id in sorted([name for name, entry in self.entries.items() if entry.heard_at_s < heard_from_s]):
            silent_s = event.at_s - self.entries[worker_id].heard_at_s
            commands += self._lose(worker_id, f"silent for {silent_s:.1f} s", event.cause_id, silent=True)
        if not self.warm and event.at_s - self._active_since_s >= self.rules.warmup_s:
            self.warm = True
            commands.append(m.Publish(m.SnapshotEnd(), event.cause_id))
        if self.warm:
            commands += self._watch_pressure(event.at_s, event.cause_id)
            if event.at_s - self._long_at_s >= LONG_S and (found := self._long_request(event.at_s)) is not None:
                self._long_at_s = event.at_s
                commands.append(m.Publish(m.Raised(found, ()), event.cause_id))
        if event.at_s - self._registry_at_s >= self.rules.registry_interval_s:
            self._registry_at_s = event.at_s
            commands.append(m.WriteRegistry(tuple(sorted(set(self._forget) - set(self.entries)))))
            self._forget.clear()
        return commands

    def _watch_pressure(self, at_s: float, cause_id: str) -> list[m.Command]:
        self._evaluated_at_s = at_s
        sample = self.cluster_demand(at_s)
        signals = self.pressure.observe(sample)
        if not signals:
            return []
        groups = self.group_demands(at_s)
        return [m.Publish(m.Raised(signal, groups), cause_id) for signal in signals]

    def _long_request(self, at_s: float) -> LongRequest | None:
        """Return a request that needs a larger group, or None. Waiting requests precede those that still have room."""
        if (long := self._backlogs.long(at_s)).count:
            return LongRequest(long.need_tokens, long.prompt_tokens)
        for leader_id, load in self.groups.led(self.entries, self._outgrown) if self._outgrown else ():
            need_tokens = min(math.ceil(load.longest_token_count * _GROWS), load.longest_limit_tokens)
            return LongRequest(max(need_tokens, load.block_count * load.block_tokens + 1), leader_id=leader_id)
        return None

    def cluster_demand(self, at_s: float) -> ClusterDemand:
        loads, complete = self.groups.loads(self.entries)
        return sum_demand(at_s, loads, self._backlog_bytes(at_s), complete=complete and self._backlogs.known(at_s))

    def traffic(self, at_s: float) -> tuple[Traffic, Traffic | None]:
        """Return the traffic of all dispatchers according to their last entries, and of live ones only; see
        `Backlogs`.
        """
        return self._backlogs.traffic(at_s)

    def pace(self) -> Pace | None:
        """Return the batch costs of the median instance among those with the most layers, because machines may differ
        and one may report wrong costs.
        """
        known = self._paces()
        most = max((pace.layer_count for _, pace in known), default=0)
        whole = [(pace.cost.chunk_cost_s(_TYPICAL), name, pace) for name, pace in known if pace.layer_count == most]
        return sorted(whole, key=itemgetter(0, 1))[len(whole) // 2][2] if whole else None

    def slowness(self) -> dict[WorkerId, float]:
        """Return the time per layer relative to that of `pace`, for each instance that is clearly slower or faster."""
        middling = self.pace()
        if middling is None:
            return {}
        usual_s = _layer_s(middling)
        told = ((name, _layer_s(pace) / usual_s) for name, pace in self._paces()) if usual_s > 0.0 else ()
        slow = {name: times for name, times in told if times > 0.0}
        return {name: times for name, times in slow.items() if _UNLIKE <= max(times, 1 / times) <= _MISTAKEN}

    def _paces(self) -> list[tuple[WorkerId, Pace]]:
        return [(name, entry.pace) for name, entry in self.entries.items() if entry.pace]

    def group_demands(self, at_s: float) -> tuple[GroupDemand, ...]:
        rules = self.rules.pressure
        return self.groups.demands(at_s, self.entries, window_s=rules.trend_window_s, horizon_s=rules.horizon_s)

    def _backlog_bytes(self, at_s: float) -> int:
        """KV bytes that the dispatchers' backlogs need. Block and token sizes are equal on all instances."""
        backlog = self._backlogs.total(at_s)
        loaded = next(((e, e.load) for e in self.entries.values() if e.load is not None), None)
        if loaded is None or not backlog.request_count:
            return 0
        entry, load = loaded
        return backlog_bytes(backlog, load.block_tokens, entry.instance.model.kv_bytes_per_token)

    def _discount_own_pause(self, at_s: float) -> None:
        """Exclude the time for which this process itself was stopped from the time for which instances have been
        silent.
        """
        last_s, self._ticked_at_s = self._ticked_at_s, at_s
        if last_s is None or at_s - last_s <= self.rules.lease_s / 2:
            return
        for entry in self.entries.values():
            entry.heard_at_s = min(at_s, entry.heard_at_s + at_s - last_s)
        self._active_since_s += at_s - last_s

    def _lose(self, worker_id: WorkerId, why: str, cause_id: str, *, silent: bool = False) -> list[m.Command]:
        entry, self._checked = self.entries.pop(worker_id), False
        self._outgrown.discard(worker_id)
        self._forget.append(worker_id)
        word = m.Publish(m.InstanceLost(worker_id, entry.instance.incarnation, why, silent), cause_id)
        lost: list[m.Command] = [] if entry.stuck else [word]
        return lost if entry.stream_id is None else [self._close(entry, m.CloseReason.SILENT), *lost]

    def _close(self, entry: WorkerEntry, why: m.CloseReason) -> m.CloseStream:
        if entry.stream_id is None:
            raise InvariantViolation(f"{entry.instance.worker_id} has no stream to close")
        stream_id, entry.stream_id = entry.stream_id, None
        del self._streams[stream_id]
        self._checked = False
        return m.CloseStream(stream_id, why)

    def _remember(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        self._checked = False
        self._newest[worker_id] = max(incarnation, self._newest.get(worker_id, incarnation))
        self._newest.move_to_end(worker_id)
        while len(self._newest) > self.rules.max_remembered:
            self._newest.popitem(last=False)

    def check(self) -> None:
        """Raise InvariantViolation unless streams and entries reference each other and every bound holds. Instances are
        checked again only after one of them, or a stream, was added or removed, because there may be thousands.
        """
        self.pressure.check()
        if self._checked:
            return
        for stream_id, worker_id in self._streams.items():
            entry = self.entries.get(worker_id)
            if entry is None or entry.stream_id != stream_id:
                raise InvariantViolation(f"stream {stream_id} belongs to {worker_id}, which has no such stream")
        for worker_id, entry in self.entries.items():
            if entry.stream_id is not None and self._streams.get(entry.stream_id) != worker_id:
                raise InvariantViolation(f"{worker_id} refers to stream {entry.stream_id}, which is not its own")
            if entry.instance.incarnation < self._newest.get(worker_id, entry.instance.incarnation):
                raise InvariantViolation(f"{worker_id} is registered as old incarnation {entry.instance.incarnation}")
        if not self._outgrown <= self.entries.keys():
            raise InvariantViolation(f"{sorted(self._outgrown - self.entries.keys())} are outgrown, but not registered")
        if len(self.entries) > self.rules.max_instances:
            raise InvariantViolation(f"{len(self.entries)} instances, at most {self.rules.max_instances} are allowed")
        if not self.active and (self.entries or self._streams or self.warm):
            raise InvariantViolation("a standby monitor has instances")
        self._checked = True


def _is_outgrown(load: LoadReport) -> bool:
    room_tokens = load.block_count * load.block_tokens
    return 0 < room_tokens < load.longest_limit_tokens and load.longest_token_count >= _OUTGROWN * room_tokens


def _layer_s(pace: Pace) -> float:
    return pace.cost.chunk_cost_s(_TYPICAL) / pace.layer_count
