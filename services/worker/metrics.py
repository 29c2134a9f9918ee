"""Prometheus metrics of a worker: its load report, read on scrape."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ballast.common.load import LoadReport
from services.worker.pipeline.progress import DOWNTIME_BOUNDS_S, MigrationTotals
from services.worker.pipeline.stage_clock import StageTimes


class LinkCollector(Collector):
    def __init__(self, refused: Callable[[], Mapping[str, int]]) -> None:
        self._refused = refused

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(
            "ballast_link_callers_refused",
            "Refused connections to the data port by reason: no proof of the cluster's secret, invalid data, timeout",
            labels=["reason"],
        )
        for reason, count in sorted(self._refused().items()):
            family.add_metric([reason], count)
        yield family


class LoadCollector(Collector):
    def __init__(self, load: Callable[[], LoadReport]) -> None:
        self._load = load

    def collect(self) -> Iterable[Metric]:
        load = self._load()
        blocks = GaugeMetricFamily("ballast_kv_blocks", "KV blocks by state", labels=["state"])
        blocks.add_metric(["used"], load.used_block_count)
        blocks.add_metric(["free"], load.block_count - load.used_block_count - load.retained_block_count)
        blocks.add_metric(["retained"], load.retained_block_count)
        yield blocks
        text = "Always 1; the labels have the tokens of a KV block and the number of blocks"
        info = GaugeMetricFamily("ballast_kv_cache_info", text, labels=["block_size", "num_gpu_blocks"])
        info.add_metric([str(load.block_tokens), str(load.block_count)], 1)
        yield info
        memory = GaugeMetricFamily(
            "ballast_device_memory_bytes",
            "Device memory by use; parameters, KV and free add up to the budget",
            labels=["use"],
        )
        memory.add_metric(["parameters"], load.memory.parameter_bytes)
        memory.add_metric(["kv"], load.memory.kv_bytes)
        memory.add_metric(["free"], load.memory.free_bytes)
        yield memory
        for name, text, value in (
            (
                "ballast_kv_cache_usage_fraction",
                "Fraction of the KV blocks in use, 0 to 1",
                load.kv_usage_fraction,
            ),
            (
                "ballast_kv_waiting_blocks",
                "KV blocks needed by the prompts of waiting requests",
                load.waiting_block_count,
            ),
            ("ballast_prefix_cache_host_blocks", "KV blocks cached in host memory", load.host_block_count),
            ("ballast_requests_running", "Running requests", load.running_count),
            ("ballast_requests_waiting", "Requests that wait at the worker", load.waiting_count),
            ("ballast_offline_requests_running", "Running offline requests", load.offline_running_count),
            (
                "ballast_offline_requests_waiting",
                "Offline requests that wait at the worker",
                load.offline_waiting_count,
            ),
            ("ballast_offline_kv_blocks", "KV blocks of offline requests", load.offline_block_count),
            (
                "ballast_offline_wanted_tokens",
                "Offline prompt tokens that the worker could start",
                load.offline_wanted_tokens,
            ),
            (
                "ballast_engine_step_age_seconds",
                "Time since the engine last completed a step or was idle",
                load.step_age_s,
            ),
            ("ballast_draining", "1 while the worker takes no new requests", float(load.draining)),
        ):
            yield GaugeMetricFamily(name, text, value=value)
        for name, text, total in (
            ("ballast_engine_steps", "Batches executed by the engine", load.steps_total),
            (
                "ballast_preemptions",
                "Preemptions: requests that lost their KV blocks to other requests",
                load.preemptions_total,
            ),
            (
                "ballast_prompt_tokens",
                "Prompt tokens of requests that have produced their first token",
                load.prompt_tokens_total,
            ),
            ("ballast_prefix_cache_queries", "Prompt tokens of admitted requests", load.prefix_queries_total),
            (
                "ballast_prefix_cache_hits",
                "Prompt tokens of admitted requests found in the prefix cache",
                load.prefix_hits_total,
            ),
            (
                "ballast_prefix_cache_host_hits",
                "Prompt tokens of admitted requests found in host memory",
                load.prefix_host_hits_total,
            ),
            ("ballast_generation_tokens", "Generated tokens", load.generation_tokens_total),
            ("ballast_offline_tokens", "Tokens computed for offline requests", load.offline_tokens_total),
            (
                "ballast_offline_lost_tokens",
                "Tokens of offline requests recomputed after a preemption",
                load.offline_lost_tokens_total,
            ),
            ("ballast_offline_yields", "Preemptions of offline requests by online requests", load.offline_yields_total),
        ):
            yield CounterMetricFamily(name, text, value=total)


class StageCollector(Collector):
    """Metrics of a stage's time. Its bubble fraction is idle / (busy + idle), as rates."""

    def __init__(self, times: Callable[[], StageTimes]) -> None:
        self._times = times

    def collect(self) -> Iterable[Metric]:
        times = self._times()
        for name, text, total in (
            ("ballast_stage_busy_seconds", "Time in which the worker's stage executed batches", times.busy_s),
            (
                "ballast_stage_idle_seconds",
                "Time in which the stage idled although its leader had work",
                times.idle_s,
            ),
            (
                "ballast_stage_network_wait_seconds",
                "Idle time in which the next batch was still being transferred",
                times.network_s,
            ),
            ("ballast_stage_send_seconds", "Time spent sending activations to the next stage", times.send_s),
        ):
            yield CounterMetricFamily(name, text, value=total)


class MigrationCollector(Collector):
    """Metrics of outgoing migrations."""

    def __init__(self, totals: MigrationTotals) -> None:
        self._totals = totals

    def collect(self) -> Iterable[Metric]:
        totals = self._totals
        ended = CounterMetricFamily(
            "ballast_migrations", "Outgoing migrations of running requests by outcome", labels=["outcome"]
        )
        ended.add_metric(["moved"], totals.moved - totals.recomputed)
        ended.add_metric(["recomputed"], totals.recomputed)
        ended.add_metric(["given_up"], totals.not_moved)
        yield ended
        below = [(str(bound), sum(totals.downtime_counts[: i + 1])) for i, bound in enumerate(DOWNTIME_BOUNDS_S)]
        yield HistogramMetricFamily(
            "ballast_migration_downtime_seconds",
            "Time from a migrating request's last step here until it runs at its target",
            buckets=[*below, ("+Inf", sum(totals.downtime_counts))],
            sum_value=totals.downtime_s,
        )
        yield CounterMetricFamily(
            "ballast_migrated_kv_blocks", "KV blocks sent with migrated requests", value=totals.blocks
        )


def export(
    load: Callable[[], LoadReport],
    registry: CollectorRegistry,
    times: Callable[[], StageTimes] | None = None,
    migrations: MigrationTotals | None = None,
) -> None:
    registry.register(LoadCollector(load))
    if times is not None:
        registry.register(StageCollector(times))
    if migrations is not None:
        registry.register(MigrationCollector(migrations))
