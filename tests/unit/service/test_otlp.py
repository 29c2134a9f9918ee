"""Spans are sent, or dropped and counted, whatever answers at the collector's address."""

import asyncio

import pytest

from ballast.service.otlp import Exporter


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\x00\xff garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\ncut off",
        b"HTTP/1.1 500 No\r\n\r\n",
    ],
)
def test_a_collector_that_answers_nonsense_costs_spans_and_nothing_else(answer: bytes) -> None:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async def story() -> None:
        server = await asyncio.start_server(reply, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()[:2]
        exporter = Exporter(f"http://{host}:{port}", "dispatcher", "d")
        async with server, asyncio.timeout(30):
            running = asyncio.create_task(exporter.run())
            for count in (1, 2):
                exporter.put(lambda: [{"name": "a span"}])
                while exporter.dropped_count < count:
                    assert not running.done(), running.exception()
                    await asyncio.sleep(0.05)
            running.cancel()
            await asyncio.wait([running])

    asyncio.run(story())
