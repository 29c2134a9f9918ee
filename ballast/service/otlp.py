"""Spans for a collector: OTLP over HTTP in its JSON form, which Jaeger, Tempo and others take. Off the path of tokens.

Spans are made of what is known when something has ended. Those that cannot be sent are dropped and counted: a slow
collector holds nobody up. Ids that two services have to agree on follow from what both know.
"""

import asyncio
import contextlib
import hashlib
import json
import re
import secrets
import time
import urllib.request
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any, Final, Self

from ballast import __version__
from ballast.common.layout import Layout
from ballast.service.logs import get_logger
from ballast.service.tasks import keep_up

_MAX_QUEUED: Final = 2048
_BATCH: Final = 256
_EVERY_S: Final = 1.0
_TIMEOUT_S: Final = 5.0
_PARENT: Final = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
SERVER, INTERNAL, ERROR = 2, 1, 2  # kinds of spans; the status of one that failed

Json = dict[str, Any]  # Any: what the json module takes


@dataclass(frozen=True, slots=True)
class Context:
    """A span that others refer to."""

    trace_id: str  # 32 hexadecimal digits
    span_id: str  # 16; "": none, a trace begins here
    sampled: bool = True

    @classmethod
    def read(cls, traceparent: str) -> Self | None:
        """What W3C's header of this name says; None for anything else."""
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
        """The span of a request in this trace, known before it is made."""
        return Context(self.trace_id, _digest(self.trace_id, request_id)[:16], sampled=self.sampled)


def transition_context(layout: Layout) -> Context:
    """The span of the transition that led to this layout: planners make it, dispatchers refer to it."""
    members = (f"{m.worker_id} {m.incarnation} {m.address}" for group in layout.groups for m in group.members)
    digest = _digest("transition", str(layout.epoch), *sorted(members))
    return Context(digest[:32], digest[32:48])


def _digest(*words: str) -> str:
    return hashlib.sha256("\n".join(words).encode()).hexdigest()


def span(
    name: str,
    at: Context,
    parent_id: str,
    times_s: tuple[float, float],
    attributes: Mapping[str, object],
    *,
    kind: int = INTERNAL,
    links: Sequence[Context] = (),
    error: str = "",
) -> Json:
    """One span. `times_s`: its begin and end, on the wall's clock; `at`: its own ids."""
    made: Json = {
        "traceId": at.trace_id,
        "spanId": at.span_id or secrets.token_hex(8),
        "name": name,
        "kind": kind,
        "startTimeUnixNano": nanoseconds(times_s[0]),
        "endTimeUnixNano": nanoseconds(times_s[1]),
        "attributes": attributes_of(attributes),
    }
    if parent_id:
        made["parentSpanId"] = parent_id
    if links:
        made["links"] = [{"traceId": link.trace_id, "spanId": link.span_id} for link in links]
    if error:
        made["status"] = {"code": ERROR, "message": error}
    return made


def attributes_of(values: Mapping[str, object]) -> list[Json]:
    """What is None or empty is left out."""
    found: list[Json] = []
    for key, value in values.items():
        match value:
            case None | "":
                continue
            case int():
                found.append({"key": key, "value": {"intValue": str(value)}})
            case float():
                found.append({"key": key, "value": {"doubleValue": value}})
            case _:
                found.append({"key": key, "value": {"stringValue": str(value)}})
    return found


def wall_offset_s() -> float:
    """From `time.monotonic()` of this process to the time of day, which collectors want."""
    return time.time() - time.monotonic()


def nanoseconds(at_s: float) -> str:
    return str(int(at_s * 1e9))


class Exporter:
    """Sends spans. `run` sends; `put` only takes note of what makes them when their turn comes.

    Args:
        endpoint: http://HOST:4318, or its /v1/traces.
        service: Of the resource, without "ballast-".
        instance: Of the resource.
    """

    def __init__(self, endpoint: str, service: str, instance: str) -> None:
        self.dropped_count = 0
        self._url = endpoint.rstrip("/") + ("" if endpoint.rstrip("/").endswith("/v1/traces") else "/v1/traces")
        self._resource = {"service.name": f"ballast-{service}", "service.instance.id": instance}
        self._queue: deque[Callable[[], Sequence[Json]]] = deque()
        self._complained = False

    def put(self, make: Callable[[], Sequence[Json]]) -> None:
        if len(self._queue) >= _MAX_QUEUED:
            self.dropped_count += 1
            return
        self._queue.append(make)

    async def run(self) -> None:
        """Runs until cancelled; what is left then is sent."""
        try:
            while True:
                await asyncio.sleep(_EVERY_S)
                await self._send_all()
        except asyncio.CancelledError:
            await self._send_all()
            raise

    async def _send_all(self) -> None:
        while self._queue:
            batch = [self._queue.popleft() for _ in range(min(_BATCH, len(self._queue)))]
            await self._send([one for make in batch for one in make()], len(batch))

    async def _send(self, spans: Sequence[Json], count: int) -> None:
        body = json.dumps(self._envelope(spans)).encode()
        try:
            await asyncio.to_thread(_post, self._url, body)
        except (OSError, HTTPException) as error:
            self.dropped_count += count
            if not self._complained:
                get_logger().warning("traces are dropped", collector=self._url, why=str(error))
            self._complained = True
        else:
            self._complained = False

    def _envelope(self, spans: Sequence[Json]) -> Json:
        return {
            "resourceSpans": [
                {
                    "resource": {"attributes": attributes_of({**self._resource, "service.version": __version__})},
                    "scopeSpans": [{"scope": {"name": "ballast", "version": __version__}, "spans": spans}],
                }
            ]
        }


@contextlib.asynccontextmanager
async def sending(exporter: Exporter) -> AsyncGenerator[None]:
    """Spans are sent meanwhile, and what is left at the end."""
    task = asyncio.create_task(keep_up(exporter.run, "spans"), name="send spans")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def _post(url: str, body: bytes) -> None:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="POST")
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
        answer.read()
