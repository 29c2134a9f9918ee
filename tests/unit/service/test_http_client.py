"""HTTP calls between services, against well-behaved and faulty servers."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from ballast.common.errors import ConfigError, Unavailable
from ballast.service import http_forward
from ballast.service.http_client import BrokenCall, HttpClient
from ballast.service.http_server import HttpServer
from tools.local.ports import free_port

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def answering(serve: Serve) -> AsyncGenerator[HttpClient, None]:
    """Yield a client of a server that runs `serve` on each connection."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        yield client
    finally:
        client.close()
        server.close()
        await server.wait_closed()
        await asyncio.sleep(0.01)  # let connections close


def saying(*answers: bytes) -> tuple[Serve, list[bytes]]:
    """A server that sends one answer per request and then closes; and the list of the request heads that it has
    read.
    """
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            for answer in answers:
                heads.append(await reader.readuntil(b"\r\n\r\n"))
                writer.write(answer)
                await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    return serve, heads


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-A: b\r\n\r\nok"


def test_a_connection_serves_calls_one_after_the_other_and_a_dead_one_is_replaced() -> None:
    async def check() -> None:
        serve, heads = saying(OK, OK)
        async with answering(serve) as client:
            for _ in range(3):  # the third call finds the connection closed and opens another
                async with client.call("GET", "/x?y=1", {"accept": "*/*"}) as response:
                    assert (response.status, response.header("x-a")) == (200, "b")
                    assert await response.read(10) == b"ok"
                await asyncio.sleep(0.05)
        assert len(heads) == 3
        assert heads[0].startswith(b"GET /x?y=1 HTTP/1.1\r\nHost: 127.0.0.1:")
        assert b"accept: */*" in heads[0]

    asyncio.run(check())


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n",
        b"no http at all\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n" + b"x" * 20,  # longer than the client accepts
    ],
)
def test_a_truncated_answer_is_an_error(answer: bytes) -> None:
    async def check() -> None:
        serve, _ = saying(answer)
        async with answering(serve) as client:
            with pytest.raises(BrokenCall):
                async with client.call("POST", "/", body=b"{}") as response:
                    await response.read(10)

    asyncio.run(check())


def test_an_unreachable_server_differs_from_a_broken_call() -> None:
    async def check() -> None:
        client = HttpClient(f"http://127.0.0.1:{free_port()}", connect_timeout_s=1.0)
        with pytest.raises(Unavailable):
            async with client.call("GET", "/"):
                pass

    asyncio.run(check())


def test_bodies_are_sent_in_pieces_and_a_server_may_answer_before_their_end() -> None:
    async def echo(scope: dict[str, object], receive: Callable[[], Awaitable[dict[str, object]]], send: object) -> None:
        body = b""
        while scope["path"] == "/echo":
            message = await receive()
            body += bytes(message.get("body", b""))  # type: ignore[arg-type]
            if not message.get("more_body"):
                break
        status = 200 if scope["path"] == "/echo" else 413
        await send({"type": "http.response.start", "status": status, "headers": []})  # type: ignore[operator]
        await send({"type": "http.response.body", "body": body})  # type: ignore[operator]

    async def pieces(count: int) -> AsyncIterator[bytes]:
        for number in range(count):
            yield b"%06d" % number * 5000
            await asyncio.sleep(0)

    async def check() -> None:
        server = HttpServer(echo, host="127.0.0.1", port=0, shutdown_timeout_s=1, client_stall_timeout_s=5)  # type: ignore[arg-type]
        stopping = asyncio.Event()
        await server.start()
        serving = asyncio.create_task(server.serve(stopping))
        client = HttpClient(f"http://127.0.0.1:{server.port}")
        async with client.call("POST", "/echo", body=pieces(20)) as response:
            assert await response.read(1 << 20) == b"".join(b"%06d" % n * 5000 for n in range(20))
        async with client.call("POST", "/refuse", body=pieces(2000)) as response:
            assert response.status == 413
        async with client.call("POST", "/echo", body=b"after it") as response:
            assert await response.read(100) == b"after it"
        client.close()
        stopping.set()
        await serving

    asyncio.run(check())


def test_leaving_a_call_closes_its_connection() -> None:
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read()  # until the client is gone
        closed.set()
        writer.close()

    async def check() -> None:
        async with answering(serve) as client:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1), client.call("GET", "/"):
                    pass
            await asyncio.wait_for(closed.wait(), 5)

    asyncio.run(check())


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://a:1", "http://", "http://a:x", "http://a:80/v1"])
def test_invalid_addresses_are_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        HttpClient(url)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nab"])
def test_a_server_that_falls_silent_ends_a_forwarded_call(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_forward, "IDLE_S", 0.2)
    sent: list[Any] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await reader.read()
        writer.close()

    async def receive() -> Any:
        return await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    async def check() -> None:
        async with answering(serve) as client, asyncio.timeout(20):
            with pytest.raises(BrokenCall, match=r"0\.2 s"):
                await http_forward.forward(
                    client, {"type": "http", "method": "GET", "path": "/", "headers": []}, receive, send
                )

    asyncio.run(check())
    assert len(sent) == (2 if answer else 0)


def test_the_response_to_a_head_has_no_body() -> None:
    """A response to HEAD has the headers of the response to GET, with the length of the body, but no body."""

    async def check() -> None:
        serve, _ = saying(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n")
        async with answering(serve) as client, asyncio.timeout(5), client.call("HEAD", "/x") as response:
            assert (response.status, response.header("content-length")) == (200, "2")
            assert await response.read(10) == b""

    asyncio.run(check())
