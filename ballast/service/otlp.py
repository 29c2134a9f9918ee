"""Sends spans to an OpenTelemetry collector (Jaeger, Tempo ...) as OTLP over HTTP, with OpenTelemetry's SDK.

Spans are created after a request or transition has ended, so they cost nothing while tokens are generated. The SDK
queues them, sends them from its own thread, and drops the oldest if a collector is slow. Its environment variables
apply (`OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_EXPORTER_OTLP_CERTIFICATE`, `OTEL_RESOURCE_ATTRIBUTES` ...). Ids on which two
services have to agree are digests of data that both know.
"""

import asyncio
import hashlib
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Self

from opentelemetry.context import Context as OtelContext
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from ballast import __version__
from ballast.common.layout import Layout

_MAX_QUEUED: Final = 2048
_EVERY_MS: Final = 1000.0
_TIMEOUT_S: Final = 5.0
_PARENT: Final = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


@dataclass(frozen=True, slots=True)
class Context:
    """A reference to a span."""

    trace_id: str  # 32 hexadecimal digits
    span_id: str  # 16 hexadecimal digits; "": there is no span yet, the trace begins here
    sampled: bool = True

    @classmethod
    def read(cls, traceparent: str) -> Self | None:
        """Parse W3C's `traceparent` header; None if it is invalid."""
        found = _PARENT.fullmatch(traceparent)
        if found is None:
            return None
        span_id = "" if set(found[2]) == {"0"} else found[2]
        return cls(found[1], span_id, sampled=bool(int(found[3], 16) & 1))

    @classmethod
    def new(cls) -> Self:
        return cls(secrets.token_hex(16), "")

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id or '0' * 16}-{'01' if self.sampled else '00'}"

    def request(self, request_id: str) -> "Context":
        """The reference to a request's span in this trace, which is known before the span is created."""
        return Context(self.trace_id, _digest(self.trace_id, request_id)[:16], sampled=self.sampled)


def transition_context(layout: Layout) -> Context:
    """The reference to the span of the transition that led to this layout. The planner creates the span, and
    dispatchers link to it.
    """
    members = (f"{m.worker_id} {m.incarnation} {m.address}" for group in layout.groups for m in group.members)
    digest = _digest("transition", str(layout.epoch), *sorted(members))
    return Context(digest[:32], digest[32:48])


def _digest(*words: str) -> str:
    return hashlib.sha256("\n".join(words).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class SpanEvent:
    name: str
    at_s: float
    attributes: Mapping[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True, slots=True)
class Span:
    """A completed span. Times are wall-clock times; attributes that are None or "" are not sent."""

    name: str
    at: Context  # the span's trace and id; if the id is "", the exporter draws one
    parent_id: str  # "" for the root span
    begin_s: float
    end_s: float
    attributes: Mapping[str, object]
    is_server: bool = False
    links: Sequence[Context] = ()
    events: Sequence[SpanEvent] = ()
    error: str = ""


def wall_offset_s() -> float:
    """Wall-clock time, which collectors expect, minus this process's `time.monotonic()`."""
    return time.time() - time.monotonic()


class Exporter:
    """Sends spans from the SDK's thread. `put` may be called from one thread only.

    Args:
        endpoint: http://HOST:4318, with or without /v1/traces.
        service: The resource's `service.name` without "ballast-".
        instance: The resource's `service.instance.id`.
    """

    def __init__(self, endpoint: str, service: str, instance: str) -> None:

        url = endpoint.rstrip("/") + ("" if endpoint.rstrip("/").endswith("/v1/traces") else "/v1/traces")
        names = {"service.name": f"ballast-{service}", "service.instance.id": instance, "service.version": __version__}
        self._ids = _Ids()
        self._provider = TracerProvider(resource=Resource.create(names), id_generator=self._ids, shutdown_on_exit=False)
        self._sender = OTLPSpanExporter(url, timeout=_TIMEOUT_S)
        self._provider.add_span_processor(
            BatchSpanProcessor(self._sender, max_queue_size=_MAX_QUEUED, schedule_delay_millis=_EVERY_MS)
        )
        self._tracer = self._provider.get_tracer("ballast", __version__)

    def put(self, spans: Sequence[Span]) -> None:

        for span in spans:
            self._ids.trace_id, self._ids.span_id = span.at.trace_id, span.at.span_id or secrets.token_hex(8)
            made = self._tracer.start_span(
                span.name,
                _parent(span),
                SpanKind.SERVER if span.is_server else SpanKind.INTERNAL,
                _sent(span.attributes),
                [Link(_span_context(link.trace_id, link.span_id)) for link in span.links],
                _nanoseconds(span.begin_s),
            )
            for event in span.events:
                made.add_event(event.name, _sent(event.attributes), _nanoseconds(event.at_s))
            if span.error:
                made.set_status(Status(StatusCode.ERROR, span.error))
            made.end(_nanoseconds(span.end_s))

    async def close(self) -> None:
        """Send the queued spans, for at most the timeout of one request to the collector."""
        sent = asyncio.ensure_future(asyncio.to_thread(self._provider.force_flush))
        await asyncio.wait([sent], timeout=_TIMEOUT_S)
        self._sender.shutdown()  # prevents retries of a running request


class _Ids(IdGenerator):
    """Gives the SDK the ids of the span that `put` is creating."""

    trace_id = span_id = ""

    def generate_trace_id(self) -> int:
        return int(self.trace_id, 16)

    def generate_span_id(self) -> int:
        return int(self.span_id, 16)


def _span_context(trace_id: str, span_id: str) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _parent(span: Span) -> OtelContext:
    from opentelemetry.context import Context as OtelContext

    if not span.parent_id:
        return OtelContext()
    return set_span_in_context(NonRecordingSpan(_span_context(span.at.trace_id, span.parent_id)), OtelContext())


def _sent(attributes: Mapping[str, object]) -> dict[str, int | float | str]:
    return {
        key: value if isinstance(value, int | float) else str(value)
        for key, value in attributes.items()
        if value is not None and value != ""
    }


def _nanoseconds(at_s: float) -> int:
    return int(at_s * 1e9)
