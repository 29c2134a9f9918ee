"""HTTP over real sockets: connections that read nothing, or do not send a request in time, are closed."""

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry

from ballast.service import http_connections as connections
from ballast.service.http_server import HttpServer
from services.gateway.app import Bounds, Door
from services.gateway.endpoints import Call, Reply
from services.gateway.metrics import GatewayMetrics
from tests.support.dispatchers import until

PATH, STALL_S, HEAD_S = "/v1/completions", 0.3, 0.4
HEAD = f"POST {PATH} HTTP/1.1\r\nhost: here\r\ncontent-length: 2\r\n\r\n".encode()
PIECE = b"data: " + b"x" * 4000 + b"\n\n"


class Parts:
    """A server whose answers are endless or empty."""

    def __init__(self, *, is_endless: bool) -> None:
        self.registry = CollectorRegistry()
        self.ended = asyncio.Event()
        self.bodies: list[bytes] = []
        bounds = Bounds(max_concurrent_requests=4, max_body_bytes=100, body_timeout_s=5.0)
        door = Door(GatewayMetrics(self.registry), bounds, is_stopping=lambda: False)
        app = door.endpoint(PATH, "cmpl", self._endless if is_endless else self._empty)
        self.server = HttpServer(app, host="127.0.0.1", port=0, shutdown_timeout_s=1.0, client_stall_timeout_s=STALL_S)

    async def _endless(self, call: Call) -> Reply:
        async def events() -> AsyncGenerator[bytes, None]:
            try:
                while True:
                    yield PIECE
                    await asyncio.sleep(0)
            finally:
                self.ended.set()

        return events()

    async def _empty(self, call: Call) -> Reply:
        self.bodies.append(call.body)
        return {}

    def count(self, status: int) -> float | None:
        labels = {"route": PATH, "status": str(status)}
        return self.registry.get_sample_value("ballast_gateway_requests_total", labels)


@asynccontextmanager
async def served(
    *, is_endless: bool, request: bytes = HEAD + b"{}"
) -> AsyncGenerator[tuple[Parts, asyncio.StreamReader, asyncio.StreamWriter], None]:
    """Yield the server, and a connection that has sent `request` and read nothing yet."""
    parts, stopping = Parts(is_endless=is_endless), asyncio.Event()
    await parts.server.start()
    serving = asyncio.create_task(parts.server.serve(stopping))
    client = socket.create_connection(("127.0.0.1", parts.server.port))
    client.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=client, limit=1 << 18)
    try:
        writer.write(request)
        yield parts, reader, writer
    finally:
        writer.close()
        stopping.set()
        await serving


async def test_a_connection_that_reads_nothing_is_closed() -> None:
    async with served(is_endless=True) as (parts, _, _), asyncio.timeout(20 * STALL_S):
        await parts.ended.wait()
        await until(lambda: parts.count(499), "its end to be counted")


async def test_a_connection_that_reads_slowly_stays_open() -> None:
    async with served(is_endless=True) as (parts, reader, _):
        loop = asyncio.get_running_loop()
        until_s = loop.time() + 4 * STALL_S
        while loop.time() < until_s:
            await asyncio.sleep(STALL_S / 5)
            assert await reader.read(1 << 20)  # all that has arrived meanwhile
        assert not parts.ended.is_set()


async def test_the_head_of_a_request_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_HEAD_S", HEAD_S)
    async with served(is_endless=False) as (parts, reader, writer), asyncio.timeout(20 * HEAD_S):
        assert (await reader.readuntil(b"{}")).startswith(b"HTTP/1.1 200")
        await asyncio.sleep(2 * HEAD_S)  # longer than a head may take, but between two requests
        writer.write(HEAD[:40])
        await asyncio.sleep(HEAD_S / 4)
        writer.write(HEAD[40:] + b"{}")
        assert (await reader.readuntil(b"{}")).startswith(b"HTTP/1.1 200")
        await asyncio.sleep(2 * HEAD_S)
        writer.write(HEAD[:40])
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await reader.readuntil(b"{}")
        assert parts.count(200) == 2


async def test_a_silent_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_HEAD_S", HEAD_S)
    async with served(is_endless=False) as (parts, _, _), asyncio.timeout(20 * HEAD_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", parts.server.port)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await reader.readexactly(1)
        writer.close()


@pytest.mark.parametrize("word", ["h2c", "H2C"])
async def test_an_upgrade_to_http2_is_ignored_and_the_body_is_read(word: str) -> None:
    upgrade = f"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: {word}\r\nHTTP2-Settings: AAMAAABk\r\n".encode()
    request = HEAD.replace(b"content-length", upgrade + b"content-length") + b"{}"
    async with served(is_endless=False, request=request) as (parts, reader, _):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert parts.bodies == [b"{}"]


async def test_an_answer_to_http_1_0_has_no_chunks_and_ends_with_the_connection() -> None:
    request = HEAD.replace(b"HTTP/1.1", b"HTTP/1.0") + b"{}"
    async with served(is_endless=False, request=request) as (_, reader, _):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert b"chunked" not in head
        assert body == b"{}"
    async with served(is_endless=True, request=request) as (parts, reader, writer):
        assert b"chunked" not in (await reader.readuntil(b"\r\n\r\n")).lower()
        assert (await reader.readexactly(2 * len(PIECE))) == 2 * PIECE
        writer.close()
        await asyncio.wait_for(parts.ended.wait(), 10.0)
