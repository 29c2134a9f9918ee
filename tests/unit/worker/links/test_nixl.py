"""Bulk by one-sided reads: with an agent that reads in this process and fails as it is told to, and with NIXL's, where
it is installed.
"""

import ctypes
import importlib.util
import socket
import struct
import time
from collections.abc import Iterator
from threading import Thread

import pytest
import torch

from ballast.common.errors import ConfigError, Unavailable
from services.worker.links.channels.nixl import SLAB_BYTES, NixlTransport, Reading, Reads
from services.worker.links.config import TransportConfig
from services.worker.links.connection import Link
from services.worker.links.copies import HOST, HostCopies
from services.worker.links.open import open_plane
from services.worker.links.ports import ChannelBroken, LinkState
from services.worker.links.traffic import TrafficClass
from services.worker.links.transfer import Outcome
from tests.support.fake_nccl import Fate
from tests.unit.worker.links.processes import CONFIG, PeerProcess
from tests.unit.worker.links.recorder import Recorder, checksum, pattern

KB = 1024


class FakeReading:
    def __init__(self, fate: Fate, into: int, remote: int, size_bytes: int) -> None:
        self.fate = fate
        self._move = (into, remote, size_bytes)
        self._looks = 0

    def is_done(self) -> bool:
        self._looks += 1
        if self.fate is Fate.FAILS:
            raise ChannelBroken("a read has failed")
        if self.fate is Fate.NEVER_ENDS or (self.fate is Fate.LATE and self._looks < 3):
            return False
        ctypes.memmove(*self._move)
        return True

    def release(self) -> None:
        """It reads at once, when it is looked at."""


class FakeAgent:
    def __init__(self, slab: torch.Tensor, fates: list[Fate]) -> None:
        self._slab: torch.Tensor | None = slab
        self._fates = fates
        self.met = b""
        self.closed = False

    def card(self) -> bytes:
        return b"a card"

    def meet(self, card: bytes) -> None:
        self.met = card

    def read(self, into: int, remote: int, remote_device: int, size_bytes: int) -> Reading:
        assert self._slab is not None
        start = self._slab.data_ptr()
        assert start + self._slab.nbytes // 2 <= into <= start + self._slab.nbytes - size_bytes, "outside of the slab"
        return FakeReading(self._fates.pop(0) if self._fates else Fate.FINE, into, remote, size_bytes)

    def close(self) -> None:
        self._slab, self.closed = None, True


class Ends:
    def __init__(self, fates: list[Fate]) -> None:
        self.agents = list[FakeAgent]()
        self.recorders = Recorder(), Recorder()
        config = TransportConfig(keepalive_s=0.1, send_timeout_s=2.0, silence_timeout_s=20.0)

        def make_agent(slab: torch.Tensor) -> FakeAgent:
            self.agents.append(FakeAgent(slab, fates))
            return self.agents[-1]

        a, b = (
            open_plane(me, recorder, config, "127.0.0.1", NixlTransport(HOST, HostCopies(), make_agent))
            for me, recorder in zip(("w1", "w2"), self.recorders, strict=True)
        )
        self.planes = a, b
        made = a.warm("w2", b.store_address, 1), b.warm("w1", a.store_address, 1)
        self.links: tuple[Link, Link] = made[0].result(30), made[1].result(30)

    def close(self) -> None:
        threads = [Thread(target=plane.close, args=(20.0,)) for plane in self.planes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@pytest.fixture
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    ends = Ends(list(getattr(request, "param", [])))
    yield ends
    ends.close()
    assert all(agent.met == b"a card" and agent.closed for agent in ends.agents)


@pytest.mark.parametrize("ends", [[], [Fate.LATE] * 20], indirect=True)
def test_kv_is_read_from_slots_into_its_place_both_ways(ends: Ends) -> None:
    sources = [pattern(size, seed=size) for size in (9, 70 * KB, 5001 * KB, 999)]
    for link in ends.links:
        link.send(TrafficClass.ACTIVATION, 0, tensor=pattern(200 * KB, seed=2))
        assert link.transfer(TrafficClass.KV, sources).done.result(60).outcome is Outcome.DELIVERED
    for recorder in ends.recorders:
        assert [ended.checksum for ended in recorder.ended] == [checksum(sources)]
        recorder.wait("messages", 1)


@pytest.mark.parametrize("ends", [[Fate.FINE, Fate.FAILS], [Fate.NEVER_ENDS]], indirect=True)
def test_a_read_that_fails_or_never_ends_breaks_the_link_and_delivers_nothing(ends: Ends) -> None:
    link = ends.links[0]
    with pytest.raises(Unavailable):
        link.transfer(TrafficClass.KV, [pattern(5000 * KB, seed=1)]).done.result(60)
    assert link.state is LinkState.BROKEN
    ends.recorders[1].wait("ended", 1)
    assert [ended.outcome for ended in ends.recorders[1].ended] == ["broken"]


@pytest.mark.parametrize("ends", [[Fate.NEVER_ENDS]], indirect=True)
def test_what_is_cut_off_is_not_touched_any_more(ends: Ends) -> None:
    transfer = ends.links[0].transfer(TrafficClass.KV, [source := pattern(5000 * KB, seed=1)])
    ends.recorders[1].wait("openings", 1)
    ends.links[1].give_up("killed")
    with pytest.raises(Unavailable):
        transfer.done.result(60)
    ends.recorders[1].wait("ended", 1)
    source.zero_()  # its owner may do with it what he likes, and with the destination
    assert ends.recorders[1].ended[0].outcome == "broken"


@pytest.mark.skipif(importlib.util.find_spec("nixl") is not None, reason="nixl is installed")
def test_a_peer_that_offers_more_slots_than_it_has_ends_the_link() -> None:
    ours, theirs = socket.socketpair()
    slab = torch.zeros(SLAB_BYTES, dtype=torch.uint8)
    reads = Reads(ours, FakeAgent(slab, []), slab, bytes(16), HostCopies(), "test")
    posted = reads.send(torch.zeros(1, dtype=torch.uint8))
    theirs.sendall(struct.pack("<BBQ", 1, 0, 4 * KB) * 5)  # and nothing is posted that they could be for
    with pytest.raises(ChannelBroken, match="offers more than its 4 slots"):
        reads.wait(posted, 10.0)
    reads.abort()
    reads.destroy()
    theirs.close()


def test_without_the_package_it_is_said_what_to_install() -> None:
    with pytest.raises(ConfigError, match="nixl is not installed"):
        open_plane("w1", Recorder(), TransportConfig(), "127.0.0.1", "nixl")


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="the extra nixl is not installed")
def test_nixl_moves_kv_between_two_processes_and_a_killed_one_ends_its_link() -> None:
    peer, recorder = PeerProcess(), Recorder()
    plane = open_plane("w1", recorder, TransportConfig(**CONFIG), "127.0.0.1", "nixl", b"of this cluster")
    try:
        address = peer.call("open", worker_id="w2", config=CONFIG, transport="nixl")
        peer.begin("connect", peer_id="w1", address=plane.store_address, epoch=1)
        link = plane.connect("w2", address, 1)
        peer.end()
        source = pattern(5000 * KB, seed=7)
        assert link.transfer(TrafficClass.KV, [source], stream=7).done.result(100).outcome is Outcome.DELIVERED
        assert [ended["checksum"] for ended in peer.call("received")["ended"]] == [checksum([source])]
        assert peer.call("transfer", to="w1", size_bytes=3_000_000, seed=8)["outcome"] == "delivered"
        assert [ended.checksum for ended in recorder.ended] == [checksum([pattern(3_000_000, seed=8)])]
        transfer = link.transfer(TrafficClass.KV, [pattern(100_000 * KB, seed=1)])
        time.sleep(0.05)
        peer.process.kill()
        with pytest.raises(Unavailable):
            transfer.done.result(60)
        recorder.wait("endings", 1)
    finally:
        peer.stop()
        plane.close(60.0)
