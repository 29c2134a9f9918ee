"""Prometheus metrics of a gateway, and cluster gauges for routers."""

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from ballast.client import AsyncClient, ClusterStatus
from ballast.client.stream import Metadata
from ballast.common.errors import BallastError
from ballast.service.metrics import E2E_BUCKETS_S, TTFT_BUCKETS_S

_FRESH_S = 0.2  # how long values are reused, as routers poll many times a second
_ASK_S = 1.0


class GatewayMetrics:
    """Metrics of this gateway. Labels: `route` (a path template) and `status` (HTTP; 499: the client disconnected)."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "ballast_gateway_requests",
            "HTTP requests that were answered or aborted",
            ["route", "status"],
            registry=registry,
        )
        self.in_flight = Gauge("ballast_gateway_requests_in_flight", "HTTP requests in progress", registry=registry)
        self.generations = Gauge(
            "ballast_gateway_generations_in_flight",
            "Requests in progress at dispatchers, one per choice",
            registry=registry,
        )
        self.ttft_s = Histogram(
            "ballast_gateway_ttft_seconds",
            "Time from a request's headers to its first token",
            ["route"],
            buckets=TTFT_BUCKETS_S,
            registry=registry,
        )
        self.duration_s = Histogram(
            "ballast_gateway_request_seconds",
            "Time from a request's headers to the end of its answer",
            ["route"],
            buckets=E2E_BUCKETS_S,
            registry=registry,
        )


class ClusterGauges(Collector):
    """Gauges that present the whole cluster as one vLLM server, for routers that choose between servers. There are none
    while no dispatcher answers.

    Args:
        client: Client for the calls to dispatchers.
        metadata: Metadata of these calls, with credentials.
    """

    def __init__(self, client: AsyncClient, metadata: Metadata) -> None:
        self._client = client
        self._metadata = metadata
        self._statuses: Sequence[ClusterStatus] = ()
        self._fresh_until_s = 0.0
        self._asking = asyncio.Lock()

    async def refresh(self) -> None:
        """Update the values from all dispatchers unless they are less than 0.2 s old."""
        async with self._asking:
            if time.monotonic() < self._fresh_until_s:
                return
            asked = await asyncio.gather(*map(self._ask, self._client.addresses))
            self._statuses = [status for status in asked if status is not None]
            self._fresh_until_s = time.monotonic() + _FRESH_S

    async def _ask(self, address: str) -> ClusterStatus | None:
        with contextlib.suppress(BallastError, TimeoutError):
            async with asyncio.timeout(_ASK_S):
                return await self._client.status(address, metadata=self._metadata)
        return None

    def collect(self) -> Iterator[Metric]:
        if not self._statuses or (model := self._statuses[0].model) is None:
            return
        loads = [worker.load for worker in self._statuses[0].workers if worker.connected and worker.load is not None]
        backlog = sum(status.backlog_request_count for status in self._statuses)
        blocks = sum(load.block_count for load in loads)
        usage = sum(load.used_block_count for load in loads) / blocks if blocks else 0.0
        running, waiting = "Running requests on all workers", "Waiting requests at dispatchers and workers"
        share = "Fraction of the KV blocks of all groups in use, 0 to 1"
        for name, text, value in (
            ("vllm:num_requests_running", running, sum(load.running_count for load in loads)),
            ("vllm:num_requests_waiting", waiting, backlog + sum(load.waiting_count for load in loads)),
            ("vllm:kv_cache_usage_perc", share, usage),
            ("vllm:gpu_cache_usage_perc", share, usage),
        ):
            family = GaugeMetricFamily(name, text, labels=["model_name", "engine"])
            family.add_metric([model.name, "cluster"], value)
            yield family
        labels = {"block_size": str(loads[0].block_tokens) if loads else "0", "num_gpu_blocks": str(blocks)}
        family = GaugeMetricFamily("vllm:cache_config_info", "Always 1; the KV blocks of all groups")
        family.add_sample(family.name, {"model_name": model.name, "engine": "cluster", **labels}, 1)
        yield family
