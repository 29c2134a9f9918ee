"""The webhook: its content and signature, how often it is sent, and retries while the receiver fails."""

import asyncio
import time
from collections.abc import Callable

import pytest

from ballast.common.addresses import split_address
from ballast.common.errors import InvalidRequest, Unauthenticated
from ballast.common.wanted import SIGNATURE, Wanted, sign, verify
from services.planner.shell.webhook import Webhook, post
from tests.support.network import needs_ipv6
from tools.local.scaling import hearing

SECRET = b"0123456789abcdef"


def wanted(count: int, reason: str = "") -> Wanted:
    return Wanted(count, tuple(f"w{i}" for i in range(count)), ("w9",), reason)


def test_a_signed_message_is_accepted() -> None:
    one = wanted(3, "one less: P99 TTFT 0.2 s")
    assert Wanted.read(one.body()) == one
    for body in (b"", b"[]", b'{"wanted": -1, "serving": [], "parked": []}', b'{"wanted": 1, "serving": "w"}'):
        with pytest.raises(InvalidRequest, match="is not what a planner sends"):
            Wanted.read(body)


def test_messages_without_the_secret_or_too_late_are_refused() -> None:
    body, now_s = wanted(2).body(), 1_800_000_000.0
    verify(SECRET, body, sign(SECRET, body, now_s), now_s + 5)
    for secret, told, at_s in ((b"another" * 3, body, now_s), (SECRET, wanted(3).body(), now_s)):
        with pytest.raises(Unauthenticated, match="does not fit"):
            verify(secret, told, sign(SECRET, body, at_s), now_s)
    for at_s in (now_s - 400, now_s + 400):
        with pytest.raises(Unauthenticated, match="repeated"):
            verify(SECRET, body, sign(SECRET, body, at_s), now_s)
    for signature in ("", "t=,v1=", f"v1={'0' * 64}", "t=1,v1=é"):
        with pytest.raises(Unauthenticated):
            verify(SECRET, body, signature, now_s)


class Receiver:
    """Refuses the first `refuses` calls, then records (time, wanted instance count)."""

    def __init__(self, refuses: int = 0) -> None:
        self.heard: list[tuple[float, int]] = []
        self.refused = refuses

    async def take(self, url: str, body: bytes, signature: str) -> None:
        verify(SECRET, body, signature, time.time())
        if self.refused:
            self.refused -= 1
            raise OSError("refused")
        self.heard.append((time.monotonic(), Wanted.read(body).wanted))


async def told(hook: Webhook, story: Callable[[], None] | None, for_s: float) -> None:
    running = asyncio.create_task(hook.run())
    if story is not None:
        story()
    await asyncio.sleep(for_s)
    running.cancel()
    await asyncio.wait([running])


def test_only_the_newest_number_is_sent_and_not_too_often() -> None:
    receiver = Receiver()

    async def story() -> None:
        hook = Webhook("http://nowhere", SECRET, every_s=0.4, send=receiver.take)
        hook.offer(wanted(1))
        loop = asyncio.get_running_loop()
        for i, count in enumerate((2, 3, 4), 1):
            loop.call_later(0.05 * i, hook.offer, wanted(count))
        loop.call_later(0.2, hook.offer, wanted(4, "another reason for the same"))
        await told(hook, None, 1.0)

    asyncio.run(story())
    assert [count for _, count in receiver.heard] == [1, 4]
    assert receiver.heard[1][0] - receiver.heard[0][0] >= 0.4


def test_undelivered_messages_are_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.planner.shell.webhook._BACK_OFF_S", 0.05)
    receiver = Receiver(refuses=2)

    async def story() -> None:
        hook = Webhook("http://nowhere", SECRET, every_s=0.0, send=receiver.take)
        hook.offer(wanted(1))
        asyncio.get_running_loop().call_later(0.08, hook.offer, wanted(2))  # while the first is refused
        await told(hook, None, 0.6)

    asyncio.run(story())
    assert [count for _, count in receiver.heard] == [2]


def test_a_planner_that_leads_again_sends_its_number() -> None:
    receiver = Receiver()

    async def story() -> None:
        hook = Webhook("http://nowhere", SECRET, every_s=0.0, send=receiver.take)
        loop = asyncio.get_running_loop()
        hook.offer(wanted(1))
        loop.call_later(0.1, hook.offer, wanted(1))
        loop.call_later(0.2, hook.offer, None)
        loop.call_later(0.3, hook.offer, wanted(1))
        await told(hook, None, 0.5)

    asyncio.run(story())
    assert [count for _, count in receiver.heard] == [1, 1]


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_only_a_receiver_with_the_secret_accepts_the_number_over_http(host: str) -> None:
    heard: list[Wanted] = []

    async def story() -> None:
        async with hearing(SECRET, heard.append, host) as url:
            hook = Webhook(url, SECRET, every_s=0.0)
            hook.offer(wanted(5, "why"))
            await told(hook, None, 0.3)
            body = wanted(7).body()
            for secret, sent in ((b"x" * 16, body), (SECRET, b"{}")):
                with pytest.raises(OSError, match=r"HTTP Error 40[01]"):
                    await post(url, sent, sign(secret, sent, time.time()))
            reader, writer = await asyncio.open_connection(host, split_address(url.split("/")[2])[1])
            writer.write(f"POST / HTTP/1.1\r\ncontent-length: 99999999\r\n{SIGNATURE}: t=1\r\n\r\n".encode())
            assert (await reader.readline()).startswith(b"HTTP/1.1 413")
            writer.close()

    asyncio.run(story())
    assert heard == [wanted(5, "why")]


def test_a_number_is_sent_again_if_a_failed_call_may_have_delivered_another() -> None:
    heard: list[int] = []

    async def take(url: str, body: bytes, signature: str) -> None:
        heard.append(Wanted.read(body).wanted)
        if heard[-1] == 2:
            raise TimeoutError("the response was lost")

    async def story() -> None:
        hook = Webhook("http://nowhere", SECRET, every_s=0.0, send=take)
        hook.offer(wanted(1))
        loop = asyncio.get_running_loop()
        loop.call_later(0.1, hook.offer, wanted(2))
        loop.call_later(0.2, hook.offer, wanted(1))
        await told(hook, None, 1.4)

    asyncio.run(story())
    assert heard == [1, 2, 1]


def test_a_call_that_ends_after_the_lead_was_lost_does_not_count_as_delivered() -> None:
    heard: list[int] = []

    async def take(url: str, body: bytes, signature: str) -> None:
        await asyncio.sleep(0.1)
        heard.append(Wanted.read(body).wanted)

    async def story() -> None:
        hook = Webhook("http://nowhere", SECRET, every_s=0.0, send=take)
        hook.offer(wanted(1))
        loop = asyncio.get_running_loop()
        loop.call_later(0.05, hook.offer, None)
        loop.call_later(0.2, hook.offer, wanted(1))
        await told(hook, None, 0.5)

    asyncio.run(story())
    assert heard == [1, 1]


@pytest.mark.parametrize("status", [301, 302, 303, 307])
def test_a_redirect_is_no_delivery(status: int) -> None:
    """If the redirect were followed, the receiver would get a GET without the body."""
    lines: list[bytes] = []

    async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines.append(await reader.readline())
        said = f"{status} Moved\r\nLocation: /" if lines[-1].startswith(b"POST") else "200 OK"
        writer.write(f"HTTP/1.1 {said}\r\nContent-Length: 0\r\n\r\n".encode())
        writer.close()
        await writer.wait_closed()

    async def story() -> None:
        server = await asyncio.start_server(redirect, "127.0.0.1", 0)
        async with server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
            with pytest.raises(OSError, match=f"HTTP Error {status}"):
                await post(url, b"{}", "")

    asyncio.run(story())
    assert [line.split()[0] for line in lines] == [b"POST"]


def test_an_endless_response_does_not_delay_the_next_call() -> None:
    heard: list[bytes] = []

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(12):
            writer.write(b"x")
            await asyncio.sleep(0.1)
        writer.close()
        await asyncio.wait([asyncio.ensure_future(writer.wait_closed())])

    async def story() -> None:
        server = await asyncio.start_server(drip, "127.0.0.1", 0)
        async with server:
            hook = Webhook(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", SECRET, every_s=0.0)
            hook.offer(wanted(1))
            asyncio.get_running_loop().call_later(0.2, hook.offer, wanted(2))
            await told(hook, None, 1.0)

    asyncio.run(story())
    assert len(heard) == 2


def test_a_receiver_that_sends_endless_headers_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.planner.shell.webhook._TIMEOUT_S", 0.3)

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n")
        while not writer.is_closing():
            writer.write(b"X-More: y\r\n")
            await asyncio.sleep(0.02)
        writer.close()
        gone.set()

    gone = asyncio.Event()

    async def story() -> None:
        async with await asyncio.start_server(drip, "127.0.0.1", 0) as server:
            began_s = time.monotonic()
            with pytest.raises(TimeoutError):
                await post(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", b"{}", "")
            assert time.monotonic() - began_s < 1.0
            await asyncio.wait_for(gone.wait(), 5)

    asyncio.run(story())
