"""A proxy that drops or delays data, or resets connections."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from tools.local.proxy import Proxy


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(100):
        writer.write(piece)
    writer.close()


def beside_an_echo(story: Callable[[Proxy], Awaitable[None]]) -> None:
    async def run() -> None:
        server = await asyncio.start_server(_echo, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()[:2]
        async with asyncio.timeout(20), server, Proxy(f"{host}:{port}") as proxy:
            await story(proxy)

    asyncio.run(run())


async def connect(proxy: Proxy) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = proxy.address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


@pytest.mark.parametrize("way", ["to_server", "to_client"])
def test_dropped_data_never_arrives_and_no_connection_ends(way: str) -> None:
    async def story(proxy: Proxy) -> None:
        reader, writer = await connect(proxy)
        writer.write(b"one")
        assert await reader.readexactly(3) == b"one"
        getattr(proxy, way).swallows = True
        writer.write(b"two")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await reader.read(3)
        getattr(proxy, way).swallows = False
        writer.write(b"six")
        assert await reader.readexactly(3) == b"six"
        writer.close()

    beside_an_echo(story)


def test_a_delay_applies_to_both_directions() -> None:
    async def story(proxy: Proxy) -> None:
        proxy.to_server.delay_s = proxy.to_client.delay_s = 0.1
        reader, writer = await connect(proxy)
        began_s = time.monotonic()
        writer.write(b"one")
        assert await reader.readexactly(3) == b"one"
        assert time.monotonic() - began_s >= 0.2
        writer.close()

    beside_an_echo(story)


def test_a_reset_ends_all_connections_and_new_ones_are_accepted() -> None:
    async def story(proxy: Proxy) -> None:
        reader, writer = await connect(proxy)
        writer.write(b"one")
        assert await reader.readexactly(3) == b"one"
        assert proxy.reset() == 1
        with pytest.raises(ConnectionResetError):
            await reader.read(1)
        writer.close()
        again, writer = await connect(proxy)
        writer.write(b"two")
        assert await again.readexactly(3) == b"two"
        writer.close()

    beside_an_echo(story)


@pytest.mark.parametrize("way", ["to_server", "to_client"])
def test_held_data_arrives_later_and_complete(way: str) -> None:
    async def story(proxy: Proxy) -> None:
        reader, writer = await connect(proxy)
        getattr(proxy, way).holds = True
        for piece in (b"one", b"two"):
            writer.write(piece)
            await asyncio.sleep(0.02)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await reader.read(1)
        getattr(proxy, way).holds = False
        assert await reader.readexactly(6) == b"onetwo"
        writer.close()

    beside_an_echo(story)
