"""Links between emulated workers, over real sockets."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import cast

import pytest
import torch

from ballast.common.errors import DeadlineExceeded, StaleEpoch, Unavailable
from services.worker.emulation.clock import GpuClock
from services.worker.emulation.connection import EmulatedOpener
from services.worker.emulation.phantom import PhantomBackend, phantom, read_all
from services.worker.emulation.runner import Activation
from services.worker.links.connection import Link
from services.worker.links.pace import StagePace
from services.worker.links.plane import DataPlane
from services.worker.links.ports import LinkEnding, Message
from services.worker.links.traffic import TrafficClass
from services.worker.links.transfer import Opening, Refusal, TransferOutcome

BLOCK_BYTES = 1 << 20
BACKEND = PhantomBackend(BLOCK_BYTES)


class Seen:
    """A `Receiver` that records what arrives."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.endings: list[str] = []
        self.outcomes: list[TransferOutcome] = []
        self.pieces: list[torch.Tensor] | None = None
        self.news = asyncio.Event()

    def device_of(self, topic: int) -> str:
        return "cpu"

    def on_message(self, link: Link, message: Message) -> None:
        self.messages.append(message)
        self.news.set()

    def on_opening(self, link: Link, opening: Opening) -> Sequence[torch.Tensor] | Refusal:
        return Refusal("nobody waits for this") if self.pieces is None else self.pieces

    def on_transfer_end(self, link: Link, opening: Opening, outcome: TransferOutcome) -> None:
        self.outcomes.append(outcome)

    def on_link_end(self, link: Link, ending: LinkEnding) -> None:
        self.endings.append(ending.why)
        self.news.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.messages) + len(self.endings) < count:
                self.news.clear()
                await self.news.wait()


class Pair:
    def __init__(self, bytes_per_s: float) -> None:
        self.seen = (Seen(), Seen())
        one, other = (
            DataPlane(
                name,
                EmulatedOpener(seen, bytes_per_s, GpuClock()),
                host="127.0.0.1",
                pace=StagePace(),
                secret=b"shared",
            )
            for name, seen in zip(("a", "b"), self.seen, strict=True)
        )
        self.planes = (one, other)

    async def connect(self, epoch: int = 1) -> tuple[Link, Link]:
        a, b = self.planes
        return await asyncio.gather(
            asyncio.wrap_future(a.warm("b", b.store_address, epoch, 5.0)),
            asyncio.wrap_future(b.warm("a", a.store_address, epoch, 5.0)),
        )


@asynccontextmanager
async def pair(bytes_per_s: float = 1e12) -> AsyncGenerator[Pair]:
    made = Pair(bytes_per_s)
    await asyncio.sleep(0)
    try:
        yield made
    finally:
        await asyncio.gather(*(asyncio.to_thread(plane.close) for plane in made.planes))


def blocks(count: int, first_mark: int) -> list[torch.Tensor]:
    tensors = [BACKEND.scratch(2 * BLOCK_BYTES) for _ in range(count)]
    for i, tensor in enumerate(tensors):
        phantom(tensor).write([first_mark + 2 * i, first_mark + 2 * i + 1])
    return tensors


def test_messages_arrive_in_order_and_tensors_as_their_size() -> None:
    async def story() -> list[Message]:
        async with pair() as both:
            a, _ = await both.connect()
            a.send(
                TrafficClass.ACTIVATION, 1, meta=b"head", tensor=cast(torch.Tensor, Activation(4096, b"\0\1")), stream=7
            )
            a.send(TrafficClass.CONTROL, 2, tensor=a.as_tensor(b"x" * 5000))
            a.send(TrafficClass.CONTROL, 3)
            await both.seen[1].until(3)
            return both.seen[1].messages

    first, second, third = asyncio.run(story())
    assert first.tensor is not None
    activation = cast(Activation, first.tensor)
    assert (first.meta, first.stream, activation.nbytes, activation.wrong) == (b"head", 7, 4096, b"\0\1")
    assert (second.meta, second.tensor) == (b"x" * 5000, None)
    assert third.topic == 3


async def test_a_short_message_does_not_overtake_a_long_one() -> None:
    """Each short message is sent while a long one is almost complete, so that the short one alone would not have to
    wait.
    """
    async with pair(bytes_per_s=1e7) as both:
        a, _ = await both.connect()
        for topic in range(200):
            long = Activation(10_000, b"") if topic % 50 == 0 else None  # takes a millisecond
            a.send(TrafficClass.ACTIVATION, topic, tensor=cast("torch.Tensor | None", long))
            await asyncio.sleep(0)
        await both.seen[1].until(200)
        assert [message.topic for message in both.seen[1].messages] == list(range(200))


async def test_a_transfer_copies_the_marks_and_takes_as_long_as_its_bytes() -> None:
    async with pair(bytes_per_s=40 * BLOCK_BYTES) as both:
        a, _ = await both.connect()
        both.seen[1].pieces = [BACKEND.scratch(8 * BLOCK_BYTES)]  # the pieces of both sides may differ
        source = blocks(4, first_mark=100)
        transfer = a.transfer(TrafficClass.KV, source, topic=16, meta=b"what")
        report = await asyncio.wait_for(asyncio.wrap_future(transfer.done), 10)
        assert report.outcome is TransferOutcome.DELIVERED
        assert report.sent_bytes == 8 * BLOCK_BYTES
        assert report.duration_s >= 0.2
        assert read_all(both.seen[1].pieces) == read_all(source)
        assert both.seen[1].outcomes == [TransferOutcome.DELIVERED]


async def test_kv_overtakes_parameters() -> None:
    async with pair(bytes_per_s=20 * BLOCK_BYTES) as both:
        a, _ = await both.connect()
        both.seen[1].pieces = [BACKEND.scratch(8 * BLOCK_BYTES)]
        slow = a.transfer(TrafficClass.PARAMETERS, blocks(4, 1))
        urgent = a.transfer(TrafficClass.KV, blocks(4, 1))
        await asyncio.wait_for(asyncio.wrap_future(urgent.done), 10)
        assert not slow.done.done()


async def test_a_transfer_that_is_refused_and_one_that_is_cancelled() -> None:
    async with pair(bytes_per_s=BLOCK_BYTES) as both:
        a, _ = await both.connect()
        refused = await asyncio.wait_for(asyncio.wrap_future(a.transfer(TrafficClass.KV, blocks(1, 1)).done), 10)
        assert (refused.outcome, refused.why) == (TransferOutcome.REFUSED, "nobody waits for this")
        both.seen[1].pieces = blocks(4, 1)
        transfer = a.transfer(TrafficClass.KV, blocks(4, 50))
        await asyncio.sleep(0.05)
        transfer.cancel()
        ended = await asyncio.wait_for(asyncio.wrap_future(transfer.done), 10)
        assert ended.outcome is TransferOutcome.CANCELLED


async def test_a_link_retired_by_the_peer_is_reported_as_ended() -> None:
    async with pair() as both:
        a, b = await both.connect()
        both.planes[1].retire(2)
        await both.seen[0].until(1)
        assert both.seen[0].endings == ["the peer has left its epoch"]
        assert b.retired
        assert not a.is_up
        with pytest.raises(Unavailable):
            a.send(TrafficClass.CONTROL, 1)
        with pytest.raises(StaleEpoch):
            b.send(TrafficClass.CONTROL, 1)
        with pytest.raises(StaleEpoch):
            await asyncio.wrap_future(both.planes[1].warm("a", both.planes[0].store_address, 1, 1.0))


async def test_a_broken_link_ends_its_transfers() -> None:
    async with pair(bytes_per_s=BLOCK_BYTES) as both:
        a, b = await both.connect()
        both.seen[1].pieces = blocks(4, 1)
        transfer = a.transfer(TrafficClass.KV, blocks(4, 50))
        await asyncio.sleep(0.05)
        b.give_up("it could not be said")
        with pytest.raises(Unavailable):
            await asyncio.wait_for(asyncio.wrap_future(transfer.done), 10)
        assert both.seen[1].outcomes == [TransferOutcome.BROKEN]
        assert both.planes[0].link("b", 1) is None


async def test_two_epochs_share_a_connection() -> None:
    async with pair() as both:
        first, _ = await both.connect(1)
        second, _ = await both.connect(2)
        assert first.connection is second.connection
        both.planes[1].retire(2)
        await both.seen[0].until(1)
        assert not first.is_up
        second.send(TrafficClass.CONTROL, 5)
        await both.seen[1].until(2)
        assert [message.topic for message in both.seen[1].messages] == [5]


async def test_a_peer_that_never_connects() -> None:
    async with pair() as both:
        a, b = both.planes
        for caller, peer in ((a, b), (b, a)):
            with pytest.raises(DeadlineExceeded):
                await asyncio.wrap_future(caller.warm(peer.worker_id, peer.store_address, 1, 0.1))
        with pytest.raises(Unavailable):
            await asyncio.wrap_future(b.warm("a", "127.0.0.1:1", 1, 1.0))
