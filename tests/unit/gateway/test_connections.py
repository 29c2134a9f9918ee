"""HTTP connections over real sockets: who reads nothing is given up."""

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry

from services.gateway.app import Bounds, Door
from services.gateway.endpoints import Call, Reply
from services.gateway.metrics import GatewayMetrics
from services.gateway.server import HttpServer
from tests.support.dispatchers import until

PATH, STALL_S = "/v1/completions", 0.3
PIECE = b"data: " + b"x" * 4000 + b"\n\n"


class Parts:
    """A server whose answers never end by themselves."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.ended = asyncio.Event()
        bounds = Bounds(max_concurrent_requests=4, max_body_bytes=100, body_timeout_s=5.0)
        door = Door(GatewayMetrics(self.registry), bounds, is_stopping=lambda: False)
        app = door.endpoint(PATH, "cmpl", self._endless)
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

    def count(self, status: int) -> float | None:
        labels = {"route": PATH, "status": str(status)}
        return self.registry.get_sample_value("ballast_gateway_requests_total", labels)


@asynccontextmanager
async def served() -> AsyncGenerator[tuple[Parts, asyncio.StreamReader], None]:
    """A client whose request has been sent, and which has read nothing yet."""
    parts, stopping = Parts(), asyncio.Event()
    await parts.server.start()
    serving = asyncio.create_task(parts.server.serve(stopping))
    client = socket.create_connection(("127.0.0.1", parts.server.port))
    client.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=client, limit=1 << 18)
    try:
        writer.write(f"POST {PATH} HTTP/1.1\r\nhost: here\r\ncontent-length: 2\r\n\r\n{{}}".encode())
        yield parts, reader
    finally:
        writer.close()
        stopping.set()
        await serving


async def test_who_reads_nothing_is_given_up() -> None:
    async with served() as (parts, _), asyncio.timeout(20 * STALL_S):
        await parts.ended.wait()
        await until(lambda: parts.count(499), "its end to be counted", str)


async def test_who_reads_slowly_is_not() -> None:
    async with served() as (parts, reader):
        loop = asyncio.get_running_loop()
        until_s = loop.time() + 4 * STALL_S
        while loop.time() < until_s:
            await asyncio.sleep(STALL_S / 5)
            assert await reader.read(1 << 20)  # all that has come meanwhile
        assert not parts.ended.is_set()
