"""What Prometheus gets to see of a gateway."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ballast.service.metrics import E2E_BUCKETS_S, TTFT_BUCKETS_S


class GatewayMetrics:
    """Labels: `route` (closed set) and `status` (of HTTP; 499: the client went away)."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "ballast_gateway_requests",
            "HTTP requests that have been answered or given up",
            ["route", "status"],
            registry=registry,
        )
        self.in_flight = Gauge("ballast_gateway_requests_in_flight", "HTTP requests being answered", registry=registry)
        self.generations = Gauge(
            "ballast_gateway_generations_in_flight", "Requests at dispatchers: one for each choice", registry=registry
        )
        self.ttft_s = Histogram(
            "ballast_gateway_ttft_seconds",
            "From the head of a request to its first token",
            ["route"],
            buckets=TTFT_BUCKETS_S,
            registry=registry,
        )
        self.duration_s = Histogram(
            "ballast_gateway_request_seconds",
            "From the head of a request to the end of its answer",
            ["route"],
            buckets=E2E_BUCKETS_S,
            registry=registry,
        )
