"""Prometheus metrics: one registry per process, served over HTTP on its own port. Names are `ballast_*`, in base units.

The output adds two things to the registry: each `ballast_*` metric has the label `model_name` once the model is known,
and the core metrics appear a second time under vLLM's names.
"""

import contextlib
import platform
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Metric, MetricsHandler, disable_created_metrics
from prometheus_client.gc_collector import GCCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

import ballast
from ballast.common.addresses import is_ipv6
from ballast.common.errors import ConfigError

# vLLM's histogram buckets, so that dashboards are comparable.
TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
E2E_BUCKETS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_OURS: Final = "ballast_"
_MAX_SCRAPES = 16  # concurrent scrapes
_SCRAPE_S = 5.0

# Metric family -> vLLM's names, including those of older versions. Two families may share a name, one of dispatchers
# and one of workers, if vLLM's metric is their sum.
VLLM_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "ballast_requests_running": ("vllm:num_requests_running",),
    "ballast_requests_waiting": ("vllm:num_requests_waiting",),
    "ballast_backlog_requests": ("vllm:num_requests_waiting",),
    "ballast_kv_cache_usage_fraction": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "ballast_kv_cache_info": ("vllm:cache_config_info",),
    "ballast_preemptions": ("vllm:num_preemptions",),
    "ballast_prompt_tokens": ("vllm:prompt_tokens",),
    "ballast_prefix_cache_queries": ("vllm:prefix_cache_queries",),
    "ballast_prefix_cache_hits": ("vllm:prefix_cache_hits",),
    "ballast_generation_tokens": ("vllm:generation_tokens",),
    "ballast_request_ttft_seconds": ("vllm:time_to_first_token_seconds",),
    "ballast_inter_token_seconds": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    "ballast_request_tpot_seconds": ("vllm:request_time_per_output_token_seconds",),
    "ballast_request_e2e_seconds": ("vllm:e2e_request_latency_seconds",),
    "ballast_request_queue_time_seconds": ("vllm:request_queue_time_seconds",),
    "ballast_requests": ("vllm:request_success",),
}
# Values of the label `ending` of `ballast_requests` -> vLLM's `finished_reason`; other endings are not exported.
_VLLM_REASONS: Final[Mapping[str, str]] = {"stop": "stop", "length": "length", "cancelled": "abort"}

disable_created_metrics()
REGISTRY = CollectorRegistry()
GCCollector(registry=REGISTRY)
ProcessCollector(registry=REGISTRY)

INVARIANT_VIOLATIONS = Counter(
    "ballast_invariant_violations_total",
    "Broken invariants in this process; any value but 0 is a bug in Ballast",
    registry=REGISTRY,
)
_BUILD = Gauge(
    "ballast_build_info",
    "Always 1; the labels identify the build and the process",
    ["version", "python", "service", "instance_id"],
    registry=REGISTRY,
)
LOST_LOG_LINES = Counter(
    "ballast_log_lines_lost_total", "Log lines that could not be written completely", registry=REGISTRY
)
CALL_FAILURES = Counter(
    "ballast_rpc_failures_total",
    "Calls that failed unexpectedly: malformed bytes, a disconnected client, an unhandled exception",
    ["method", "cause"],
    registry=REGISTRY,
)
TASK_FAILURES = Counter(
    "ballast_task_failures_total",
    "Unexpected failures of background tasks, which were restarted or skipped",
    ["task", "cause"],
    registry=REGISTRY,
)


class Exposition(Collector):
    """A registry's output with both additions. `model_name` is called on each scrape; the name is unknown at first."""

    def __init__(self, registry: CollectorRegistry, instance: str = "") -> None:
        self.model_name: Callable[[], str] = str
        self._registry = registry
        self._instance = instance

    def collect(self) -> Iterator[Metric]:
        model_name = self.model_name()
        added = {"model_name": model_name} if model_name else {}
        for metric in self._registry.collect():
            if not metric.name.startswith(_OURS):
                yield metric
                continue
            yield _copy(metric, metric.name, [s._replace(labels={**s.labels, **added}) for s in metric.samples])
            for name in VLLM_NAMES.get(metric.name, ()):
                yield _as_vllm(metric, name, {"model_name": model_name, "engine": self._instance})


def _copy(metric: Metric, name: str, samples: list[Sample]) -> Metric:
    copy = Metric(name, metric.documentation, metric.type, metric.unit if name == metric.name else "")
    copy.samples = samples
    return copy


def _as_vllm(metric: Metric, name: str, added: Mapping[str, str]) -> Metric:
    samples: list[Sample] = []
    for sample in metric.samples:
        labels = {**sample.labels, **added}
        ending = labels.pop("ending", None)
        if ending is not None:
            if ending not in _VLLM_REASONS:
                continue
            labels["finished_reason"] = _VLLM_REASONS[ending]
        samples.append(sample._replace(name=name + sample.name.removeprefix(metric.name), labels=labels))
    return _copy(metric, name, samples)


class _BoundedServer(ThreadingHTTPServer):
    """HTTP server with a thread per connection and a limit on connections. At the limit a new connection replaces the
    oldest if that is slow, and is closed otherwise.
    """

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if is_ipv6(address[0]) else socket.AF_INET
        self._open: dict[socket.socket, float] = {}  # connection -> start time, oldest first
        self._lock = threading.Lock()
        super().__init__(address, handler)

    def process_request(self, request: socket.socket, client_address: tuple[str, int]) -> None:  # type: ignore[override]
        now_s = time.monotonic()
        with self._lock:
            oldest = next(iter(self._open), None)
            full = len(self._open) >= _MAX_SCRAPES
            if full and oldest is not None and now_s - self._open[oldest] > _SCRAPE_S:
                del self._open[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # ends the connection's thread
                full = False
            if not full:
                self._open[request] = now_s
        if full:
            self.shutdown_request(request)
            return
        request.settimeout(_SCRAPE_S)
        super().process_request(request, client_address)

    def shutdown_request(self, request: socket.socket) -> None:  # type: ignore[override]
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore connections that end early."""


class MetricsServer:
    """Serves /metrics in a background thread; does nothing if the port is 0.

    Raises:
        ConfigError: the address cannot be bound.
    """

    def __init__(self, host: str, port: int, *, service: str = "", instance: str = "") -> None:
        _BUILD.labels(ballast.__version__, platform.python_version(), service, instance).set(1)
        self.shown = Exposition(REGISTRY, instance)
        self._stop = None
        if port == 0:
            return
        registry = CollectorRegistry()
        registry.register(self.shown)
        try:
            server = _BoundedServer((host, port), MetricsHandler.factory(registry))
        except OSError as error:
            raise ConfigError("metrics_port", f"cannot listen on {host}:{port}: {error.strerror}") from error
        thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
        thread.start()
        self._stop = (server, thread)

    def close(self) -> None:
        if self._stop is not None:
            server, thread = self._stop
            server.shutdown()
            server.server_close()
            thread.join(timeout=5)
            self._stop = None
