"""Spans are sent with unchanged ids, or dropped, whatever the collector answers."""

import asyncio
import time

import pytest

from ballast.service import otlp
from ballast.service.otlp import Context, Exporter, Span, SpanEvent
from deploy.observability.traced_drop import attributes, collecting

A_SPAN = Span(
    "decode",
    Context("a" * 32, "b" * 16),
    "c" * 16,
    1.5,
    2.0,
    {"tokens": 3, "gap_s": 0.5, "reason": "stop", "none": None, "empty": ""},
    links=[Context("d" * 32, "e" * 16)],
    events=[SpanEvent("first token", 1.75, {"worker": "w"})],
    error="lost",
)


def test_a_span_arrives_unchanged() -> None:
    with collecting() as collector:
        exporter = Exporter(collector.url, "dispatcher", "d-1")
        exporter.put([A_SPAN, Span("request", Context("f" * 32, "1" * 16), "", 1.0, 2.0, {}, is_server=True)])
        asyncio.run(exporter.close())
        child, first = sorted(collector.spans(), key=lambda one: str(one["name"]))
    assert (child["service"], child["instance"]) == ("ballast-dispatcher", "d-1")
    assert (child["traceId"], child["spanId"], child["parentSpanId"]) == ("a" * 32, "b" * 16, "c" * 16)
    assert (child["startTimeUnixNano"], child["endTimeUnixNano"]) == ("1500000000", "2000000000")
    assert attributes(child) == {"tokens": "3", "gap_s": 0.5, "reason": "stop"}
    assert [(link["traceId"], link["spanId"]) for link in child["links"]] == [("d" * 32, "e" * 16)]
    assert [(one["name"], one["timeUnixNano"]) for one in child["events"]] == [("first token", "1750000000")]
    assert child["status"] == {"message": "lost", "code": "STATUS_CODE_ERROR"}
    assert (first["traceId"], first["spanId"]) == ("f" * 32, "1" * 16)
    assert "parentSpanId" not in first
    assert first["kind"] == "SPAN_KIND_SERVER"


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\x00\xff garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\ncut off",
        b"HTTP/1.1 500 No\r\n\r\n",
    ],
)
def test_a_faulty_collector_delays_nothing(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "_TIMEOUT_S", 1.0)

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async def story() -> None:
        server = await asyncio.start_server(reply, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()[:2]
        exporter = Exporter(f"http://{host}:{port}", "dispatcher", "d")
        async with server:
            began_s = time.perf_counter()
            for _ in range(3000):
                exporter.put([A_SPAN])
            assert time.perf_counter() - began_s < 5.0
            await exporter.close()
            assert time.perf_counter() - began_s < 15.0

    asyncio.run(story())
