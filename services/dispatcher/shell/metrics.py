"""Prometheus metrics of a dispatcher. Gauges and totals are read from the core on scrape."""

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from ballast.service.metrics import E2E_BUCKETS_S, TTFT_BUCKETS_S
from services.dispatcher.core.dispatcher import DispatcherCore
from services.dispatcher.core.events import Facts
from services.dispatcher.core.relay import GAP_BOUNDS_S

_WORKER_GAUGES = (
    ("ballast_worker_connected", "1 if this dispatcher has a stream to the worker, a group leader"),
    ("ballast_worker_placed_requests", "Requests of this dispatcher on the worker"),
    ("ballast_worker_running_requests", "Running requests on the worker, from all dispatchers"),
    ("ballast_worker_waiting_requests", "Waiting requests at the worker, from all dispatchers"),
    ("ballast_worker_kv_usage_fraction", "Fraction of the worker's KV blocks in use, 0 to 1"),
)


class DispatcherMetrics(Collector):
    """Metrics; registers itself. Labels: `worker` (those of the layout), `ending` and `how` (closed sets)."""

    def __init__(self, core: DispatcherCore, registry: CollectorRegistry) -> None:
        self.invalid_count = 0  # number of requests refused as invalid
        self._core = core
        self._queue_s = _histogram("queue_time", "Time a request waited in the backlog", TTFT_BUCKETS_S, registry)
        self._ttft_s = _histogram("ttft", "Time from a request's arrival to its first token", TTFT_BUCKETS_S, registry)
        self._tpot_s = _histogram("tpot", "Mean time per output token after the first", GAP_BOUNDS_S, registry)
        self._e2e_s = _histogram("e2e", "Time from a request's arrival to its end", E2E_BUCKETS_S, registry)
        self._gap_s = _histogram("longest_gap", "Longest time between two tokens of a request", GAP_BOUNDS_S, registry)
        registry.register(self)

    def observe(self, facts: Facts) -> None:
        """Record the latencies of an ended request, if it is online."""
        if facts.priority.offline:
            return
        self._queue_s.observe(facts.queue_s)
        self._e2e_s.observe(facts.e2e_s)
        if facts.ttft_s is not None:
            self._ttft_s.observe(facts.ttft_s)
        if (tpot_s := facts.tpot_s) is not None:
            self._tpot_s.observe(tpot_s)
            self._gap_s.observe(facts.longest_gap_s)

    def collect(self) -> Iterator[Metric]:
        core = self._core
        for name, text, value in (
            ("ballast_backlog_requests", "Requests in the dispatcher's backlog", len(core.backlog)),
            ("ballast_backlog_tokens", "Prompt tokens of the requests in the backlog", core.backlog.token_count),
            ("ballast_offline_requests_queued", "Offline requests that wait at the dispatcher", len(core.feed)),
            ("ballast_placed_requests", "Requests of this dispatcher placed on workers", core.fleet.placed_count),
        ):
            yield GaugeMetricFamily(name, text, value)
        for name, text, total in (
            ("ballast_replays", "Replays of requests whose worker was lost", core.replay_count),
            ("ballast_recalls", "Requests recalled from a full worker because another one had room", core.recall_count),
            ("ballast_taken_over", "Requests taken over from another dispatcher", core.taken_over_count),
            ("ballast_relayed_tokens", "Tokens of online answers received from workers", core.relay.token_count),
            (
                "ballast_relayed_offline_tokens",
                "Tokens of offline answers received from workers",
                core.relay.offline_token_count,
            ),
            (
                "ballast_stale_messages",
                "Messages of workers about requests that had ended or moved",
                core.relay.stale_count,
            ),
        ):
            yield CounterMetricFamily(name, text, total)
        text = "Requests moved to another worker: at_once, waited (for the stream to it), or replayed"
        moves = CounterMetricFamily("ballast_moves", text, labels=["how"])
        for how in ("at_once", "replayed", "waited"):
            moves.add_metric([how], core.move_counts[how])
        yield moves
        text = "Waiting requests by caller (name of the token, or address), for the callers with the most"
        callers = GaugeMetricFamily("ballast_backlog_caller_requests", text, labels=["caller"])
        for caller, count in core.backlog.most_of(_MOST_CALLERS):
            callers.add_metric([caller], count)
        yield callers
        bounds = [*map(str, GAP_BOUNDS_S), "+Inf"]
        buckets = list(zip(bounds, accumulate(core.relay.gap_counts), strict=True))
        text = "Time between consecutive tokens of a request that arrived in separate messages"
        yield HistogramMetricFamily("ballast_inter_token_seconds", text, buckets, core.relay.gap_total_s)
        yield self._collect_endings()
        yield from self._collect_workers()

    def _collect_endings(self) -> Metric:
        text = "Requests by ending; refused: overload or draining, invalid: invalid request"
        endings = CounterMetricFamily("ballast_requests", text, labels=["ending"])
        counts = {**dict.fromkeys(_ENDINGS, 0), **self._core.endings, "invalid": self.invalid_count}
        for ending, count in sorted(counts.items()):
            endings.add_metric([ending], count)
        return endings

    def _collect_workers(self) -> Iterator[Metric]:
        families = [GaugeMetricFamily(name, text, labels=["worker"]) for name, text in _WORKER_GAUGES]
        for worker in self._core.fleet:
            load = worker.load
            values = (
                worker.connected,
                len(worker.placed),
                load.running_count if load else 0,
                load.waiting_count if load else 0,
                load.kv_usage_fraction if load else 0.0,
            )
            for family, value in zip(families, values, strict=True):
                family.add_metric([worker.key.worker_id], value)
        yield from families


_MOST_CALLERS = 10
_ENDINGS = ("stop", "length", "cancelled", "deadline", "error", "refused", "invalid")


def _histogram(name: str, text: str, buckets: tuple[float, ...], registry: CollectorRegistry) -> Histogram:
    return Histogram(f"ballast_request_{name}_seconds", text, buckets=buckets, registry=registry)
