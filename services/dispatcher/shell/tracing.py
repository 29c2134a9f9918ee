"""Traces of requests, sent to a collector by OTLP over HTTP in its JSON form, which Jaeger, Tempo and others take.

A trace is made of what is remembered of a request when it ends: a span for the whole, one for each stay on a worker and
each wait between, and an event for each first token after a change. Nothing is spent on it while tokens flow. Traces
that cannot be sent are dropped and counted; a slow collector holds nobody up.
"""

import asyncio
import json
import re
import secrets
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ballast import __version__
from ballast.common.clock import Clock
from ballast.service.logs import get_logger
from services.dispatcher.core.story import Moment, What
from services.dispatcher.shell.chronicle import Account

_MAX_QUEUED: Final = 2048
_BATCH: Final = 256
_EVERY_S: Final = 1.0
_TIMEOUT_S: Final = 5.0
_PARENT: Final = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_SERVER, _INTERNAL, _ERROR = 2, 1, 2  # kinds of spans; the status of one that failed
_ON_WORKER: Final = (What.PLACED, What.MOVED)
_OFF_WORKER: Final = (What.LOST, What.SENT_BACK, What.RECALLED, What.MOVING)

Json = dict[str, Any]  # Any: what the json module takes


@dataclass(frozen=True, slots=True)
class Stay:
    """Where a request was from one moment to another, on the dispatcher's clock."""

    name: str
    worker_id: str
    begin_s: float
    end_s: float


class Tracer:
    """`run` sends; `ended` only takes note. `wall_s`: the time of day, which collectors want."""

    def __init__(self, endpoint: str, instance: str, clock: Clock, wall_s: Callable[[], float]) -> None:
        self.dropped_count = 0
        self._url = endpoint.rstrip("/") + ("" if endpoint.rstrip("/").endswith("/v1/traces") else "/v1/traces")
        self._instance = instance
        self._clock = clock
        self._wall_s = wall_s
        self._queue: deque[tuple[Account, float]] = deque()
        self._complained = False

    def ended(self, account: Account) -> None:
        """Of a request that was accepted and has ended just now."""
        found = _PARENT.fullmatch(account.facts.traceparent)
        if found is not None and not int(found[3], 16) & 1:
            return  # whoever began the trace does not want it recorded
        if len(self._queue) >= _MAX_QUEUED:
            self.dropped_count += 1
            return
        self._queue.append((account, self._wall_s() - self._clock.now_s()))

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(_EVERY_S)
            while self._queue:
                batch = [self._queue.popleft() for _ in range(min(_BATCH, len(self._queue)))]
                spans = [span for account, offset_s in batch for span in spans_of(account, offset_s)]
                await self._send(spans, len(batch))

    async def _send(self, spans: Sequence[Json], count: int) -> None:
        body = json.dumps(self._envelope(spans)).encode()
        try:
            await asyncio.to_thread(_post, self._url, body)
        except OSError as error:
            self.dropped_count += count
            if not self._complained:
                get_logger().warning("traces are dropped", collector=self._url, why=str(error))
            self._complained = True
        else:
            self._complained = False

    def _envelope(self, spans: Sequence[Json]) -> Json:
        resource = {"service.name": "ballast-dispatcher", "service.instance.id": self._instance}
        return {
            "resourceSpans": [
                {
                    "resource": {"attributes": _attributes({**resource, "service.version": __version__})},
                    "scopeSpans": [{"scope": {"name": "ballast", "version": __version__}, "spans": spans}],
                }
            ]
        }


def spans_of(account: Account, offset_s: float) -> list[Json]:
    """The trace of one request. `offset_s`: from the dispatcher's clock to the one on the wall."""
    facts = account.facts
    found = _PARENT.fullmatch(facts.traceparent)
    trace_id, parent_id = (found[1], found[2]) if found is not None else (secrets.token_hex(16), "")

    def span(name: str, kind: int, begin_s: float, end_s: float, attributes: Mapping[str, object], parent: str) -> Json:
        made: Json = {
            "traceId": trace_id,
            "spanId": secrets.token_hex(8),
            "name": name,
            "kind": kind,
            "startTimeUnixNano": _nanoseconds(begin_s + offset_s),
            "endTimeUnixNano": _nanoseconds(end_s + offset_s),
            "attributes": _attributes(attributes),
        }
        return {**made, "parentSpanId": parent} if parent else made

    end_s = facts.arrived_at_s + facts.e2e_s
    whole = span("request", _SERVER, facts.arrived_at_s, end_s, _facts(account), parent_id)
    whole["events"] = [_event(moment, offset_s) for moment in facts.story.moments]
    if account.error:
        whole["status"] = {"code": _ERROR, "message": account.error}
    stays = stays_of(facts.story.moments, facts.arrived_at_s, end_s)
    inner = [
        span(stay.name, _INTERNAL, stay.begin_s, stay.end_s, {"ballast.worker_id": stay.worker_id}, whole["spanId"])
        for stay in stays
    ]
    return [whole, *inner]


def stays_of(moments: Sequence[Moment], begin_s: float, end_s: float) -> list[Stay]:
    """One behind the other, without gaps, from arrival to end."""
    stays: list[Stay] = []
    name, worker_id, since_s = "backlog", "", begin_s
    for moment in moments:
        if moment.what in _ON_WORKER:
            following = (f"on {moment.worker_id}", moment.worker_id)
        elif moment.what in _OFF_WORKER:
            following = ("between workers" if moment.what is What.MOVING else "backlog", "")
        else:
            continue
        if moment.at_s > since_s:
            stays.append(Stay(name, worker_id, since_s, moment.at_s))
        (name, worker_id), since_s = following, moment.at_s
    return [*stays, Stay(name, worker_id, since_s, end_s)]


def _facts(account: Account) -> dict[str, object]:
    facts = account.facts
    return {
        "ballast.request_id": account.request_id,
        "ballast.ending": account.state,
        "ballast.priority": facts.priority.value,
        "ballast.queue_s": facts.queue_s,
        "ballast.ttft_s": facts.ttft_s,
        "ballast.tpot_s": facts.tpot_s,
        "ballast.moves": facts.move_count,
        "ballast.replays": facts.replay_count,
        "gen_ai.usage.input_tokens": facts.prompt_token_count,
        "gen_ai.usage.output_tokens": facts.completion_token_count,
    }


def _event(moment: Moment, offset_s: float) -> Json:
    told = {
        "ballast.worker_id": moment.worker_id,
        "ballast.detail": moment.detail,
        "ballast.tokens": moment.token_count,
    }
    return {
        "name": moment.what.value,
        "timeUnixNano": _nanoseconds(moment.at_s + offset_s),
        "attributes": _attributes({**told, "ballast.gap_s": moment.gap_s or None}),
    }


def _attributes(values: Mapping[str, object]) -> list[Json]:
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


def _nanoseconds(at_s: float) -> str:
    return str(int(at_s * 1e9))


def _post(url: str, body: bytes) -> None:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="POST")
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
        answer.read()
