"""What Prometheus gets to see of a dispatcher. Gauges and totals are read from the core when they are asked for."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ballast.service.metrics import E2E_BUCKETS_S, TOKEN_BUCKETS_S, TTFT_BUCKETS_S
from services.dispatcher.core.dispatcher import DispatcherCore
from services.dispatcher.core.events import Facts

_WORKER_GAUGES = (
    ("ballast_worker_connected", "Whether this dispatcher has a stream to the worker"),
    ("ballast_worker_placed_requests", "Requests this dispatcher has on the worker"),
    ("ballast_worker_running_requests", "Requests that run on the worker, of all dispatchers"),
    ("ballast_worker_waiting_requests", "Requests that wait in the worker, of all dispatchers"),
    ("ballast_worker_kv_usage_fraction", "Used KV blocks of the worker"),
)


class DispatcherMetrics(Collector):
    """Registers itself. Labels: `worker` (those of the layout), `ending` and `how` (closed sets)."""

    def __init__(self, core: DispatcherCore, registry: CollectorRegistry) -> None:
        self._core = core
        self._queue_s = _histogram("queue_time", "Time in the backlog", TTFT_BUCKETS_S, registry)
        self._ttft_s = _histogram("ttft", "From arrival to the first token", TTFT_BUCKETS_S, registry)
        self._tpot_s = _histogram("tpot", "Time for each token after the first", TOKEN_BUCKETS_S, registry)
        self._e2e_s = _histogram("e2e", "From arrival to the ending", E2E_BUCKETS_S, registry)
        registry.register(self)

    def observe(self, facts: Facts) -> None:
        """At the end of a request."""
        self._queue_s.observe(facts.queue_s)
        self._e2e_s.observe(facts.e2e_s)
        if facts.ttft_s is not None:
            self._ttft_s.observe(facts.ttft_s)
            if facts.completion_token_count > 1:
                self._tpot_s.observe((facts.e2e_s - facts.ttft_s) / (facts.completion_token_count - 1))

    def collect(self) -> Iterator[Metric]:
        core = self._core
        yield GaugeMetricFamily("ballast_backlog_requests", "Requests that no worker has", len(core.backlog))
        yield GaugeMetricFamily("ballast_backlog_tokens", "Their tokens", core.backlog.token_count)
        yield GaugeMetricFamily("ballast_placed_requests", "Requests on workers", core.fleet.placed_count)
        yield CounterMetricFamily("ballast_replays", "Requests started anew after a loss", core.replay_count)
        yield CounterMetricFamily("ballast_recalls", "Requests that waited on a worker and went on", core.recall_count)
        yield CounterMetricFamily("ballast_stale_messages", "Messages for what had ended", core.stale_count)
        moves = CounterMetricFamily("ballast_moves", "Requests handed over to another worker", labels=["how"])
        for how, count in sorted(dict(core.move_counts).items()):
            moves.add_metric([how], count)
        yield moves
        endings = CounterMetricFamily("ballast_requests", "Requests by how they ended", labels=["ending"])
        for ending, count in sorted(dict(core.endings).items()):
            endings.add_metric([ending], count)
        yield endings
        yield from self._collect_workers()

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


def _histogram(name: str, text: str, buckets: tuple[float, ...], registry: CollectorRegistry) -> Histogram:
    return Histogram(f"ballast_request_{name}_seconds", text, buckets=buckets, registry=registry)
