"""The HTTP door without a network: the size of input is limited, disconnects are noticed, and failures are reported."""

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from ballast.common.errors import Overloaded, Unauthenticated
from services.gateway.app import Bounds, Door, Handler
from services.gateway.endpoints import Call, Reply
from services.gateway.metrics import GatewayMetrics

PATH = "/v1/chat/completions"


@dataclass
class Client:
    """One ASGI client. `receive` returns `messages` in order, then waits for `leave` and disconnects."""

    messages: list[dict[str, Any]] = field(default_factory=lambda: [{"type": "http.request", "body": b"{}"}])
    headers: dict[str, str] = field(default_factory=dict[str, str])
    reads: bool = True
    sent: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    leave: asyncio.Event = field(default_factory=asyncio.Event)

    async def receive(self) -> dict[str, Any]:
        if self.messages:
            return self.messages.pop(0)
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if not self.reads and message["type"] == "http.response.body":
            await asyncio.Event().wait()
        self.sent.append(message)

    @property
    def status(self) -> int:
        return self.sent[0]["status"]

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent[1:])

    @property
    def error(self) -> Any:
        return json.loads(self.body)["error"]


class Parts:
    """A door with its metrics registry."""

    def __init__(self, **bounds: Any) -> None:
        self.registry = CollectorRegistry()
        given: dict[str, Any] = {
            "max_concurrent_requests": 4,
            "max_body_bytes": 100,
            "body_timeout_s": 5.0,
        }
        self.door = Door(
            GatewayMetrics(self.registry),
            Bounds(**{**given, **bounds}),
            is_stopping=lambda: self.stopping,
            admit=self.admit,
        )
        self.stopping = False
        self.asked: list[str] = []

    async def admit(self, metadata: Mapping[str, str]) -> None:
        self.asked.append(metadata.get("authorization", ""))
        if self.asked[-1] != "Bearer good":
            raise Unauthenticated("the token is not known here")

    async def serve(self, client: Client, act: Handler, kind: str = "chatcmpl") -> None:
        scope: Any = {"type": "http", "headers": [(k.encode(), v.encode()) for k, v in client.headers.items()]}
        send: Any = client.send
        await self.door.endpoint(PATH, kind, act)(scope, client.receive, send)

    def count(self, status: int) -> float | None:
        labels = {"route": PATH, "status": str(status)}
        return self.registry.get_sample_value("ballast_gateway_requests_total", labels)

    @property
    def in_flight(self) -> float | None:
        return self.registry.get_sample_value("ballast_gateway_requests_in_flight")


async def echo(call: Call) -> Reply:
    return {"id": call.request_id, "metadata": dict(call.metadata)}


async def test_headers_are_forwarded_and_ids_are_returned() -> None:
    parts = Parts()
    client = Client(
        headers={
            "x-request-id": "abc",
            "authorization": "Bearer t",
            "traceparent": "00-1",
            "cookie": "c",
            "x-ballast-tpot-target-s": "0.1",
        }
    )
    await parts.serve(client, echo)
    answer = json.loads(client.body)
    passed_on = {"authorization": "Bearer t", "traceparent": "00-1", "x-ballast-tpot-target-s": "0.1"}
    assert answer["metadata"] == passed_on
    assert answer["id"].startswith("chatcmpl-abc-")
    assert (b"x-request-id", b"abc") in client.sent[0]["headers"]
    odd = Client(headers={"x-request-id": "two words\t"})
    await parts.serve(odd, echo)
    assert "two" not in json.loads(odd.body)["id"]
    assert (parts.count(200), parts.in_flight) == (2, 0)


async def test_anthropics_clients_use_another_key_header_and_error_format() -> None:
    parts = Parts(max_concurrent_requests=1)
    client = Client(headers={"x-api-key": "secret"})
    await parts.serve(client, echo)
    assert json.loads(client.body)["metadata"] == {"authorization": "Bearer secret"}

    async def full(_: Call) -> Reply:
        raise Overloaded("full", 2.0)

    client = Client()
    scope: Any = {"type": "http", "headers": []}
    send: Any = client.send
    await parts.door.endpoint(PATH, "msg", full)(scope, client.receive, send)
    assert (client.status, client.error["type"]) == (529, "overloaded_error")


async def test_bodies_may_be_compressed_and_their_decompressed_size_is_limited() -> None:
    async def told(call: Call) -> Reply:
        return {"body": call.body.decode()}

    for pack, name in ((gzip.compress, "gzip"), (zlib.compress, "deflate")):
        packed = pack(b'{"a": 1}')
        halves = [{"body": packed[:9], "more_body": True}, {"body": packed[9:], "more_body": False}]
        client = Client([{"type": "http.request", **half} for half in halves], {"content-encoding": name})
        await (parts := Parts()).serve(client, told)
        assert json.loads(client.body) == {"body": '{"a": 1}'}
        for body, status in ((pack(b"a" * 101), 413), (pack(bytes(1 << 20)), 413), (packed[:-9], 400), (b"no", 400)):
            client = Client([{"type": "http.request", "body": body}], {"content-encoding": name})
            await parts.serve(client, told)
            assert client.status == status
    client = Client(headers={"content-encoding": "br"})
    await parts.serve(client, told)
    assert (client.status, client.error["code"]) == (415, "unsupported_encoding")


async def test_long_answers_are_compressed_for_clients_that_accept_it() -> None:
    async def long(_: Call) -> Reply:
        return {"text": "ship " * 10_000}

    for accepted, packs in (
        ("gzip, deflate", True),
        ("identity", False),
        ("gzip;q=0, br", False),
        ("gzip;q=0.5", True),
    ):
        client = Client(headers={"accept-encoding": accepted})
        await Parts().serve(client, long)
        body = gzip.decompress(client.body) if packs else client.body
        assert len(json.loads(body)["text"]) == 50_000
        assert ((b"content-encoding", b"gzip") in client.sent[0]["headers"]) is packs
        assert (b"vary", b"accept-encoding") in client.sent[0]["headers"]
        assert (b"content-length", b"%d" % len(client.body)) in client.sent[0]["headers"]


async def test_bodies_are_bounded_in_size_and_time() -> None:
    parts = Parts(body_timeout_s=0.05)
    pieces = [{"type": "http.request", "body": b" " * 60, "more_body": True} for _ in range(3)]
    for client, status, code in (
        (Client(headers={"content-length": "101"}), 413, "body_too_large"),
        (Client(messages=pieces), 413, "body_too_large"),
        (Client(messages=[]), 408, "body_timeout"),
    ):
        await parts.serve(client, echo)
        assert (client.status, client.error["code"]) == (status, code)
    gone = Client(messages=[{"type": "http.disconnect"}])
    await parts.serve(gone, echo)
    assert gone.sent == []
    assert (parts.count(499), parts.in_flight) == (1, 0)


async def test_a_disconnect_cancels_even_while_sending_is_blocked() -> None:
    parts = Parts()
    ended: list[str] = []

    async def endless(call: Call) -> Reply:
        async def events() -> AsyncGenerator[bytes, None]:
            try:
                while True:
                    yield b"data: x\n\n"
                    await asyncio.sleep(0.001)
            finally:
                ended.append("stream")

        return events()

    async def slow(call: Call) -> Reply:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("answer")
        raise AssertionError

    for act, reads in ((endless, True), (slow, True), (endless, False)):
        leaving = Client(reads=reads)
        task = asyncio.create_task(parts.serve(leaving, act))
        await asyncio.sleep(0.02)
        leaving.leave.set()
        await task
    assert ended == ["stream", "answer", "stream"]
    assert (parts.count(499), parts.in_flight) == (3, 0)


async def test_a_cancelled_server_is_not_reported_as_a_client_that_left() -> None:
    parts = Parts()

    async def slow(call: Call) -> Reply:
        await asyncio.Event().wait()
        raise AssertionError

    task = asyncio.create_task(parts.serve(Client(), slow))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (parts.count(499), parts.in_flight) == (None, 0)


async def test_overload_and_timeout_responses_have_a_retry_delay() -> None:
    parts = Parts(max_concurrent_requests=1)
    release = asyncio.Event()

    async def wait(call: Call) -> Reply:
        await release.wait()
        return {}

    first = asyncio.create_task(parts.serve(Client(), wait))
    await asyncio.sleep(0.01)
    second = Client()
    await parts.serve(second, echo)
    assert (second.status, second.error["code"]) == (503, "overloaded")
    assert (b"retry-after", b"1") in second.sent[0]["headers"]
    release.set()
    await first
    parts.stopping = True
    late = Client()
    await parts.serve(late, echo)
    assert (late.status, late.error["code"]) == (503, "stopping")


async def test_failures_are_reported_before_and_after_the_first_byte() -> None:
    parts = Parts()

    async def overloaded(call: Call) -> Reply:
        raise Overloaded("full", 2.5)

    async def bug(call: Call) -> Reply:
        raise KeyError("secret")

    async def late(call: Call) -> Reply:
        async def events() -> AsyncGenerator[bytes, None]:
            yield b"data: {}\n\n"
            raise Overloaded("lost", 1.0)

        return events()

    client = Client()
    await parts.serve(client, overloaded)
    headers = dict(client.sent[0]["headers"])
    assert (client.status, headers[b"retry-after"], headers[b"retry-after-ms"]) == (503, b"3", b"2500")
    client = Client()
    await parts.serve(client, bug)
    assert client.status == 500
    assert b"secret" not in client.body
    client = Client()
    await parts.serve(client, late)
    assert client.status == 200
    last = client.body.decode().split("\n\n")[-2]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "overloaded"
    assert client.sent[-1]["more_body"] is False
    assert parts.count(503) == 2
    client = Client()
    await parts.serve(client, late, "resp")
    kind, _, data = client.body.decode().split("\n\n")[-2].partition("\ndata: ")
    assert (kind, json.loads(data)["type"], json.loads(data)["code"]) == ("event: error", "error", "overloaded")
    assert json.loads(data)["error"]["code"] == "overloaded", "for this OpenAI's SDK raises an exception"


async def test_the_caller_is_authenticated_before_a_large_body_is_read() -> None:
    parts = Parts(max_body_bytes=1 << 20)
    stranger = Client(headers={"authorization": "Bearer bad", "content-length": "100000"})
    await parts.serve(stranger, echo)
    assert (parts.count(401), parts.asked) == (1, ["Bearer bad"])
    assert stranger.messages, "the body was not read"
    known = Client(headers={"authorization": "Bearer good", "content-length": "100000"})
    await parts.serve(known, echo)
    small = Client(headers={"authorization": "Bearer bad", "content-length": "10"})
    await parts.serve(small, echo)
    assert parts.count(200) == 2
    assert parts.asked == ["Bearer bad", "Bearer good"], "only the dispatcher authenticates small requests"


@pytest.mark.parametrize("name", ["traceparent", "tracestate"])
async def test_malformed_headers_are_not_forwarded(name: str) -> None:
    parts = Parts()
    for value in ("caf\u00e9", "x" * 61_440, "a\x01b"):
        client = Client(headers={name: value})
        await parts.serve(client, echo)
        assert name not in json.loads(client.body)["metadata"]
    assert parts.count(200) == 3
    odd = Client(headers={"authorization": "Bearer caf\u00e9"})
    await parts.serve(odd, echo)
    assert parts.count(401) == 1
