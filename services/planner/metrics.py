"""Prometheus metrics of the planner."""

from collections.abc import Callable

from prometheus_client import Counter, Gauge, Histogram

from ballast.common.layout import Layout, Standing
from ballast.service.metrics import REGISTRY
from services.planner.core.messages import WriteOutcome
from services.planner.core.prediction_log import Predicted
from services.planner.core.record import TransitionRecord
from services.planner.core.stages import Stage

_EPOCH = Gauge("ballast_layout_epoch", "Epoch of the current layout; increases with every change", registry=REGISTRY)
_GROUPS = Gauge(
    "ballast_layout_groups", "Serving groups; fewer than instances while parameters are dropped", registry=REGISTRY
)
_WANTED = Gauge(
    "ballast_instances_wanted",
    "Number of instances that should serve, as predicted; the current number while unknown. 0 on a standby",
    registry=REGISTRY,
)
_STANDINGS = Gauge(
    "ballast_instances_standing",
    "Instances of the layout by state: serving, leaving, parked, waking",
    ["standing"],
    registry=REGISTRY,
)
_CHANGES = Counter("ballast_layout_changes_total", "Changes of the layout observed by this planner", registry=REGISTRY)
_WRITES = Counter(
    "ballast_layout_writes_total",
    "Attempts to write a layout to the state server, by outcome",
    ["outcome"],
    registry=REGISTRY,
)
_REJECTED = Counter(
    "ballast_instances_rejected_total", "Instances excluded because they serve another model", registry=REGISTRY
)
_KEPT_OUT = Gauge(
    "ballast_instances_kept_out",
    "Instances excluded from all groups; `ballast status` shows the reason",
    registry=REGISTRY,
)
_STALE = Counter(
    "ballast_planner_stale_events_total", "Ignored messages about an earlier incarnation of a worker", registry=REGISTRY
)
_TRANSITIONS = Counter(
    "ballast_transitions_total",
    "Drops and restores by ending: done or aborted",
    ["kind", "ending"],
    registry=REGISTRY,
)
_DURATIONS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_PHASES = Histogram(
    "ballast_transition_phase_seconds",
    "Duration of each phase of the drops and restores that took effect",
    ["kind", "phase"],
    buckets=_DURATIONS_S,
    registry=REGISTRY,
)
_FREED = Counter("ballast_freed_parameter_bytes_total", "Parameter memory freed for KV by drops", registry=REGISTRY)
_EXCHANGED = Counter(
    "ballast_exchanged_kv_bytes_total",
    "KV exchanged between members in drops and restores",
    registry=REGISTRY,
)
_PULLED = Counter("ballast_pulled_parameter_bytes_total", "Parameters loaded by restores", registry=REGISTRY)
_VICTIMS = Counter(
    "ballast_transition_victims_total",
    "Requests that were running when a drop or restore took effect, by fate of their KV: kept or recomputed",
    ["fate"],
    registry=REGISTRY,
)
_STALL = Histogram(
    "ballast_transition_stall_seconds",
    "Longest wait of a request for its KV, per transition",
    buckets=_DURATIONS_S,
    registry=REGISTRY,
)
_WAVES = Histogram(
    "ballast_transition_waves",
    "Waves of the KV exchange, per transition",
    buckets=(0, 1, 2, 3, 5, 8, 13, 21, 34),
    registry=REGISTRY,
)
_GROUP_SIZES = Gauge(
    "ballast_layout_group_size",
    "Groups by number of members; groups with more than 1 have dropped parameters",
    ["members"],
    registry=REGISTRY,
)
_NOTHING_DONE = Counter(
    "ballast_plans_insufficient_total", "Plans that freed less memory than requested", ["asked_by"], registry=REGISTRY
)
_ORDERED = Counter(
    "ballast_migrations_ordered_total",
    "Migrations ordered by the planner",
    registry=REGISTRY,
)
_SHORTFALL = Gauge(
    "ballast_plan_shortfall_bytes",
    "KV memory that the latest overload lacked and that its plan does not free",
    registry=REGISTRY,
)

_PREDICTED = Histogram(
    "ballast_prediction_ratio",
    "Predicted over actual value after a decision on a drop or restore: P99 TTFT (from 0.5 s) and TPOT",
    ["what"],
    buckets=(0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0),
    registry=REGISTRY,
)

# Counters start at 0 instead of being absent, because rates and alerts need an initial value.
for _kind in ("drop", "restore"):
    for _ending in ("done", "aborted"):
        _TRANSITIONS.labels(_kind, _ending)
for _fate in ("kept", "recomputed"):
    _VICTIMS.labels(_fate)
_NOTHING_DONE.labels("overload")
for _standing in Standing:
    _STANDINGS.labels(_standing)
for _what in ("ttft_p99", "tpot"):
    _PREDICTED.labels(_what)


_GOOD_S = 0.5  # shorter waits count as equal, as in policy.compare


class PlannerMetrics:
    """Implements the shell's `Counting` with Prometheus metrics. `tell`: also called with ended transitions."""

    def __init__(self, tell: Callable[[TransitionRecord], None] | None = None) -> None:
        self._tell = tell
        self._sizes: set[str] = set()  # label values of the gauge by group size

    def layout(self, layout: Layout) -> None:
        _EPOCH.set(layout.epoch)
        resting = (Standing.PARKED, Standing.WAKING)
        _GROUPS.set(sum(group.leader.standing not in resting for group in layout.groups))
        _CHANGES.inc()
        sizes = [str(len(group.members)) for group in layout.groups]
        for gone in self._sizes - set(sizes):
            _GROUP_SIZES.remove(gone)
        self._sizes = set(sizes)
        standings = [member.standing for group in layout.groups for member in group.members]
        for standing in Standing:
            _STANDINGS.labels(standing).set(standings.count(standing))
        for size in self._sizes:
            _GROUP_SIZES.labels(size).set(sizes.count(size))

    def kept_out(self, count: int) -> None:
        _KEPT_OUT.set(count)

    def wanted(self, count: int) -> None:
        _WANTED.set(count)

    def write(self, outcome: WriteOutcome) -> None:
        _WRITES.labels(outcome.name.lower()).inc()

    def rejected(self) -> None:
        _REJECTED.inc()

    def stale(self) -> None:
        _STALE.inc()

    def ended(self, record: TransitionRecord) -> None:
        if self._tell is not None:
            self._tell(record)
        journal = record.journal
        _TRANSITIONS.labels(str(journal.kind), str(journal.stage)).inc()
        if journal.stage is not Stage.DONE:
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
        _PULLED.inc(record.total("parameter_bytes_pulled"))
        _VICTIMS.labels("recomputed").inc(recomputed)
        _VICTIMS.labels("kept").inc(max(0, record.victim_count - recomputed))
        _STALL.observe(record.longest_s("max_stall_s"))
        _WAVES.observe(record.waves)

    def migrations_ordered(self) -> None:
        _ORDERED.inc()

    def predicted(self, predicted: Predicted) -> None:
        served = predicted.served
        if served is None:
            return
        if served.ttft_p99_s is not None:
            ratio = max(_GOOD_S, predicted.predicted.ttft_p99_s) / max(_GOOD_S, served.ttft_p99_s)
            _PREDICTED.labels("ttft_p99").observe(ratio)
        if served.tpot_s:
            _PREDICTED.labels("tpot").observe(predicted.predicted.tpot_s / served.tpot_s)

    def nothing_done(self, asked_by: str, shortfall_bytes: int) -> None:
        _NOTHING_DONE.labels(asked_by).inc()
        if asked_by == "overload":
            _SHORTFALL.set(shortfall_bytes)
