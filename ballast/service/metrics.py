"""Prometheus metrics: one registry per process, served over HTTP on its own port. Names are `ballast_*`, base units."""

from prometheus_client import CollectorRegistry, Counter, start_http_server

from ballast.common.errors import ConfigError

# The buckets of vLLM's histograms, so that boards can be compared.
TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_BUCKETS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
E2E_BUCKETS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)

REGISTRY = CollectorRegistry()

INVARIANT_VIOLATIONS = Counter(
    "ballast_invariant_violations_total", "Broken invariants; anything but 0 is a bug", registry=REGISTRY
)
LOST_LOG_LINES = Counter(
    "ballast_log_lines_lost_total", "Log lines that could not be written, in whole or in part", registry=REGISTRY
)
CALL_FAILURES = Counter(
    "ballast_rpc_failures_total",
    "Calls that ended by something nobody raised on purpose: malformed bytes, a client that went away, an exception",
    ["method", "cause"],
    registry=REGISTRY,
)


class MetricsServer:
    """Serves /metrics. Port 0 switches it off."""

    def __init__(self, host: str, port: int) -> None:
        self._stop = None
        if port == 0:
            return
        try:
            server, thread = start_http_server(port, addr=host, registry=REGISTRY)
        except OSError as error:
            raise ConfigError("metrics_port", f"cannot listen on {host}:{port}: {error.strerror}") from error
        self._stop = (server, thread)

    def close(self) -> None:
        if self._stop is not None:
            server, thread = self._stop
            server.shutdown()
            server.server_close()
            thread.join(timeout=5)
            self._stop = None
