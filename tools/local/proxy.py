"""A TCP proxy that injects faults: it drops, holds back or delays data in one direction, or cuts connections.

Unlike network namespaces, it needs no privileges: clients are given the proxy's address instead of the server's.
"""

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import Awaitable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

_PIECE_BYTES = 1 << 16
_RESET = struct.pack("ii", 1, 0)  # value of SO_LINGER with which closing sends a reset


@dataclass(slots=True)
class Way:
    """One direction of all connections, and its faults. `swallows`: data is dropped, and the end of a connection is not
    passed on. `holds`: data and ends of connections are held back until this is False again. `delay_s`: delay of each
    piece of data.
    """

    swallows: bool = False
    holds: bool = False
    delay_s: float = 0.0


class Proxy:
    """A proxy for the server `target`: `async with Proxy("127.0.0.1:6379") as proxy:` listens at `proxy.address`."""

    def __init__(self, target: str, tls: ssl.SSLContext | None = None, listen: str = "127.0.0.1:0") -> None:
        """`tls`: TLS with clients (none with the target); None: no TLS. `listen`: host:port to listen on."""
        self.to_server, self.to_client = Way(), Way()
        self._target = target
        self._listen = listen
        self._tls = tls
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        assert self._server is not None, "not entered"
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"{host}:{port}"

    @property
    def connection_count(self) -> int:
        return len(self._writers) // 2

    def reset(self) -> int:
        """Cut all connections, with a reset to both ends. Returns their number."""
        count = self.connection_count
        for writer in list(self._writers):
            found: socket.socket | None = writer.get_extra_info("socket")
            if found is not None:
                with contextlib.suppress(OSError, ValueError):  # it is closed already; uvloop raises ValueError
                    found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()
        return count

    async def __aenter__(self) -> Self:
        host, _, port = self._listen.rpartition(":")
        self._server = await asyncio.start_server(self._accept, host, int(port), ssl=self._tls)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.reset()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "asyncio makes one for each connection"
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        host, _, port = self._target.rpartition(":")
        try:
            there, back = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, back}
        self._writers |= ends
        try:
            await _either(_pass_on(reader, back, self.to_server), _pass_on(there, writer, self.to_client))
        finally:
            self._writers -= ends
            for end in ends:
                end.transport.abort()


async def _either(*ways: Awaitable[None]) -> None:
    """Run both directions until one has ended, then cancel the other, so that no connection is left half-open."""
    tasks = [asyncio.ensure_future(way) for way in ways]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Way) -> None:
    with contextlib.suppress(OSError):
        while piece := await reader.read(_PIECE_BYTES):
            if way.delay_s:
                await asyncio.sleep(way.delay_s)
            await _unless(way, "holds")
            if not way.swallows:
                writer.write(piece)
                await writer.drain()
        await _unless(way, "swallows")
        await _unless(way, "holds")


async def _unless(way: Way, fault: str) -> None:
    """Wait until the flag `fault` of a direction is False."""
    while getattr(way, fault):  # noqa: ASYNC110 - a flag that any thread may set
        await asyncio.sleep(0.05)
