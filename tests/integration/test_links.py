"""Links between real processes: this one, and `peer` processes controlled over pipes."""

import gc
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ballast.common.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    StaleEpoch,
    Unavailable,
)
from services.worker.links.config import TransportConfig
from services.worker.links.connection import Link
from services.worker.links.open import open_plane
from services.worker.links.plane import DataPlane
from services.worker.links.ports import LinkEnding, LinkState
from services.worker.links.traffic import TrafficClass
from services.worker.links.transfer import TransferOutcome
from tests.unit.worker.links.processes import CONFIG, PeerProcess
from tests.unit.worker.links.recorder import ECHO, REFUSE, Recorder, checksum, pattern

MB = 1 << 20


class Bench:
    """This process's data plane, and those of the peers linked to it."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.peers: list[PeerProcess] = []
        self.addresses: dict[str, str] = {}
        self.plane: DataPlane | None = None
        self.transport = "tcp"

    def open(self, worker_id: str = "w1", transport: str = "tcp", **settings: Any) -> DataPlane:
        config = TransportConfig(**CONFIG, **settings)
        self.transport = transport
        self.plane = open_plane(worker_id, self.recorder, config, "127.0.0.1", transport, b"of this cluster")
        return self.plane

    def link(self, peer: PeerProcess, peer_id: str, epoch: int = 1, **settings: Any) -> Link:
        """A link to a peer process; opens the peer's plane if necessary."""
        assert self.plane is not None
        if peer_id not in self.addresses:
            self.peers.append(peer)
            self.addresses[peer_id] = peer.call(
                "open", worker_id=peer_id, config={**CONFIG, **settings}, transport=self.transport
            )
        peer.begin("connect", peer_id=self.plane.worker_id, address=self.plane.store_address, epoch=epoch)
        link = self.plane.connect(peer_id, self.addresses[peer_id], epoch)
        peer.end()
        return link

    def close(self) -> None:
        for peer in self.peers:
            if peer.process.poll() is None:
                peer.begin("close")
        if self.plane is not None:
            self.plane.close(60.0)
        for peer in self.peers:
            if peer.process.poll() is None:
                peer.end()


@pytest.fixture(scope="module")
def shared_peer() -> Iterator[PeerProcess]:
    peer = PeerProcess()
    yield peer
    peer.stop()


@pytest.fixture
def doomed_peer() -> Iterator[PeerProcess]:
    peer = PeerProcess()
    yield peer
    peer.stop()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


def test_messages_go_both_ways_in_order(bench: Bench, shared_peer: PeerProcess) -> None:
    bench.open()
    link = bench.link(shared_peer, "w2")
    texts = [f"to-{i}" for i in range(300)]
    shared_peer.begin("send", to="w1", texts=[f"from-{i}" for i in range(300)])
    for text in texts:
        link.send(TrafficClass.ACTIVATION, 0, meta=text.encode(), timeout_s=60)
    shared_peer.end()
    shared_peer.call("wait", what="messages", count=300)
    bench.recorder.wait("messages", 300)
    assert [m["meta"] for m in shared_peer.call("received")["messages"]] == texts
    assert [m.meta.decode() for m in bench.recorder.messages] == [f"from-{i}" for i in range(300)]
    assert link.counts.sent[TrafficClass.ACTIVATION].messages == 300
    assert link.counts.received[TrafficClass.ACTIVATION].messages == 300


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [0, 3, 2048])  # payload: empty, inline in the frame, sent after the frame
def test_a_tensor_returns_bit_for_bit(bench: Bench, shared_peer: PeerProcess, dtype: torch.dtype, rows: int) -> None:
    bench.open("w3")  # the peer has the lower id, so its rendezvous store is used
    link = bench.link(shared_peer, "w2")
    tensor = torch.randn(rows, 64, dtype=torch.float64).to(dtype)
    link.send(TrafficClass.ACTIVATION, ECHO, meta=b"microbatch 4", tensor=tensor, stream=1 << 40).result(60)
    bench.recorder.wait("messages", 1)
    back = bench.recorder.messages[0]
    assert back.tensor is not None
    assert (back.tensor.dtype, back.meta, back.stream) == (dtype, b"microbatch 4", 1 << 40)
    assert torch.equal(back.tensor, tensor)


@pytest.mark.parametrize("bulk_inline_bytes", [4096, 600_000])  # chunks after their frames, chunks inline
def test_a_transfer_is_written_into_the_buffers_of_the_receiver(
    bench: Bench, shared_peer: PeerProcess, bulk_inline_bytes: int
) -> None:
    bench.open(bulk_inline_bytes=bulk_inline_bytes)
    link = bench.link(shared_peer, "w2", bulk_inline_bytes=bulk_inline_bytes)
    sources = [pattern(size, seed=size) for size in (1, 70_000, 3, 2 * MB, 0, 999)]
    total = sum(t.numel() for t in sources)
    cuts = [5, MB, 100, total - MB - 105]
    transfer = link.transfer(TrafficClass.KV, sources, meta=str(cuts).encode(), stream=5)
    report = transfer.done.result(60)
    assert (report.outcome, report.sent_bytes) == (TransferOutcome.DELIVERED, total)
    ended = shared_peer.call("received")["ended"]
    assert [(e["stream"], e["outcome"], e["checksum"]) for e in ended] == [(5, "delivered", checksum(sources))]
    link.connection.check()


def test_whole_blocks_are_sent_and_received_in_place(bench: Bench, shared_peer: PeerProcess) -> None:
    bench.open()
    link = bench.link(shared_peer, "w2")
    cache = torch.arange(8 * 65_536, dtype=torch.float32).view(8, 65_536)
    blocks = [cache[5], cache[2]]
    sizes = [block.numel() * 4 for block in blocks]
    link.transfer(TrafficClass.KV, blocks, meta=str(sizes).encode()).done.result(60)
    assert shared_peer.call("received")["ended"][0]["checksum"] == checksum(blocks)
    assert link.counts.copied_bytes == 0


def test_an_empty_transfer_is_delivered(bench: Bench, shared_peer: PeerProcess) -> None:
    bench.open()
    link = bench.link(shared_peer, "w2")
    assert link.transfer(TrafficClass.KV, []).done.result(60).outcome is TransferOutcome.DELIVERED


def test_activations_overtake_bulk(bench: Bench, shared_peer: PeerProcess) -> None:
    bench.open(rate_bytes_per_s=MB, chunk_bytes=16 * 1024)  # 64 MiB take a minute, and one chunk takes 16 ms
    link = bench.link(shared_peer, "w2")
    transfer = link.transfer(TrafficClass.KV, [torch.zeros(64 * MB, dtype=torch.uint8)], stream=1)
    shared_peer.call("wait", what="openings", count=1)
    for trips in range(1, 11):
        link.send(TrafficClass.ACTIVATION, ECHO, tensor=torch.zeros(4, 256)).result(60)
        bench.recorder.wait("messages", trips)
    assert transfer.cancel(), "ten round trips took longer than 64 MiB of bulk data: nothing was overtaken"
    assert transfer.done.result(60).outcome is TransferOutcome.CANCELLED
    shared_peer.call("wait", what="ended", count=1)
    assert shared_peer.call("received")["ended"][0]["urgent_before"] == 10


def test_a_more_urgent_class_ends_first(bench: Bench, shared_peer: PeerProcess) -> None:
    bench.open(hold_s=60.0)
    link = bench.link(shared_peer, "w2")
    source = pattern(8 * MB, seed=1)
    with link.urgent():  # nothing is sent while the three are submitted
        parameters = link.transfer(TrafficClass.PARAMETERS, [source], stream=1)
        checkpoint = link.transfer(TrafficClass.CHECKPOINT, [source], stream=2)
        kv = link.transfer(TrafficClass.KV, [source], stream=3)
    for transfer in (parameters, checkpoint, kv):
        transfer.done.result(60)
    assert [e["stream"] for e in shared_peer.call("received")["ended"]] == [3, 2, 1]


def test_parameters_are_sent_slowly_unless_memory_is_awaited(bench: Bench, shared_peer: PeerProcess) -> None:
    plane = bench.open(background_share=0.001, chunk_bytes=8 * 1024)  # pauses a thousand times as long as it sends
    link = bench.link(shared_peer, "w2")
    parameters = link.transfer(TrafficClass.PARAMETERS, [pattern(8 * MB, seed=1)], stream=1)
    shared_peer.call("wait", what="openings", count=1)
    kv = link.transfer(TrafficClass.KV, [pattern(MB, seed=2)], stream=2)
    assert kv.done.result(60).outcome is TransferOutcome.DELIVERED
    assert not parameters.done.done(), "8 MiB arrived without a pause"
    assert parameters.cancel()
    assert parameters.done.result(60).outcome is TransferOutcome.CANCELLED
    plane.pace.memory_is_awaited = True
    awaited = link.transfer(TrafficClass.PARAMETERS, [pattern(8 * MB, seed=1)], stream=3)
    assert awaited.done.result(60).outcome is TransferOutcome.DELIVERED


def test_a_transfer_can_be_moved_to_another_class(bench: Bench, shared_peer: PeerProcess) -> None:
    bench.open(hold_s=60.0)
    link = bench.link(shared_peer, "w2")
    source = pattern(8 * MB, seed=1)
    with link.urgent():
        first = link.transfer(TrafficClass.KV, [source], stream=1)
        second = link.transfer(TrafficClass.PARAMETERS, [source], stream=2)
        assert second.reprioritise(TrafficClass.KV, rank=-1)
    first.done.result(60)
    second.done.result(60)
    assert [e["stream"] for e in shared_peer.call("received")["ended"]] == [2, 1]
    assert not second.reprioritise(TrafficClass.PARAMETERS)


def test_a_cancelled_transfer_ends_on_both_sides_and_the_link_stays_up(bench: Bench, shared_peer: PeerProcess) -> None:
    bench.open(rate_bytes_per_s=MB, chunk_bytes=64 * 1024, patience_chunks=1 << 20)  # 64 MiB take a minute, never yield
    link = bench.link(shared_peer, "w2")
    transfer = link.transfer(TrafficClass.KV, [torch.zeros(64 * MB, dtype=torch.uint8)], stream=1)
    waiting = link.transfer(TrafficClass.PARAMETERS, [pattern(MB, seed=2)], stream=2)
    shared_peer.call("wait", what="openings", count=1)
    assert waiting.cancel()  # before its first chunk: the peer never sees it
    assert waiting.done.result(60).outcome is TransferOutcome.CANCELLED
    assert transfer.cancel()
    report = transfer.done.result(60)
    assert report.outcome is TransferOutcome.CANCELLED
    assert 0 < report.sent_bytes < 64 * MB
    shared_peer.call("wait", what="ended", count=1)
    assert (
        link.transfer(TrafficClass.KV, [pattern(9, seed=3)], stream=3).done.result(60).outcome
        is TransferOutcome.DELIVERED
    )
    ended = shared_peer.call("received")["ended"]
    assert [(e["stream"], e["outcome"]) for e in ended] == [(1, "cancelled"), (3, "delivered")]
    assert not transfer.cancel()


def test_a_refused_transfer_stops(bench: Bench, shared_peer: PeerProcess) -> None:
    bench.open()
    link = bench.link(shared_peer, "w2")
    report = link.transfer(TrafficClass.KV, [torch.zeros(64 * MB, dtype=torch.uint8)], topic=REFUSE).done.result(60)
    assert (report.outcome, report.why) == (TransferOutcome.REFUSED, "not wanted")
    assert link.transfer(TrafficClass.KV, [pattern(MB, seed=2)]).done.result(60).outcome is TransferOutcome.DELIVERED
    assert shared_peer.call("counts", peer_id="w1")["discarded_bytes"] == report.sent_bytes < 64 * MB


def test_a_message_over_a_limit_is_refused_before_anything_is_sent(bench: Bench, shared_peer: PeerProcess) -> None:
    bench.open(max_transfer_bytes=MB)
    link = bench.link(shared_peer, "w2", max_message_bytes=1000)  # the smaller limit of both sides applies
    with pytest.raises(InvalidRequest, match="at most 1000"):
        link.send(TrafficClass.ACTIVATION, 0, tensor=torch.zeros(1001, dtype=torch.uint8))
    with pytest.raises(InvalidRequest, match="at most 1048576"):
        link.transfer(TrafficClass.KV, [torch.zeros(MB + 1, dtype=torch.uint8)])
    with pytest.raises(InvalidRequest, match="contiguous"):
        link.send(TrafficClass.ACTIVATION, 0, tensor=torch.zeros(8, 8)[:, ::2])
    with pytest.raises(InvalidRequest, match="bulk"):
        link.send(TrafficClass.KV, 0)
    with pytest.raises(InvalidRequest, match="use send"):
        link.transfer(TrafficClass.CONTROL, [torch.zeros(1)])
    link.send(TrafficClass.ACTIVATION, ECHO, meta=b"still here").result(60)
    bench.recorder.wait("messages", 1)
    assert link.state is LinkState.UP
    assert link.counts.sent[TrafficClass.ACTIVATION].messages == 1


def test_a_full_queue_refuses(bench: Bench, doomed_peer: PeerProcess) -> None:
    bench.open(max_queued_messages=20, max_transfers=3, urgent_window=4)
    link = bench.link(doomed_peer, "w2")
    doomed_peer.freeze()
    tensor = torch.zeros(256, 1024)

    def fill() -> None:
        for _ in range(60):  # the socket buffers some of them
            link.send(TrafficClass.ACTIVATION, 0, tensor=tensor, timeout_s=0.05)

    with pytest.raises(Overloaded, match="messages"):
        fill()
    for _ in range(3):
        link.transfer(TrafficClass.KV, [tensor])
    with pytest.raises(Overloaded, match="3 transfers unfinished"):
        link.transfer(TrafficClass.KV, [tensor])
    doomed_peer.signal(signal.SIGCONT)


def test_a_killed_peer_breaks_its_link_only(bench: Bench, shared_peer: PeerProcess, doomed_peer: PeerProcess) -> None:
    bench.open(rate_bytes_per_s=16 * MB)  # the transfer that the kill interrupts takes many seconds
    healthy = bench.link(shared_peer, "w2")
    doomed = bench.link(doomed_peer, "w3")
    transfer = doomed.transfer(TrafficClass.KV, [torch.zeros(256 * MB, dtype=torch.uint8)])
    doomed_peer.call("wait", what="openings", count=1)
    doomed_peer.signal(signal.SIGKILL)
    bench.recorder.wait("endings", 1, timeout_s=60)
    with pytest.raises(Unavailable, match="w3"):
        transfer.done.result(60)
    with pytest.raises(Unavailable, match="w3"):
        doomed.send(TrafficClass.ACTIVATION, 0)
    assert bench.recorder.endings["w3"].state is LinkState.BROKEN
    assert doomed.connection.wait_ended(60)
    healthy.send(TrafficClass.ACTIVATION, ECHO, meta=b"alive").result(60)
    bench.recorder.wait("messages", 1)
    assert healthy.transfer(TrafficClass.KV, [pattern(MB, seed=2)]).done.result(60).outcome is TransferOutcome.DELIVERED
    assert set(bench.recorder.endings) == {"w3"}


def test_a_receiver_learns_that_the_rest_will_not_arrive(bench: Bench, doomed_peer: PeerProcess) -> None:
    bench.open()
    link = bench.link(doomed_peer, "w2", rate_bytes_per_s=4 * MB)
    doomed_peer.call("transfer", to="w1", size_bytes=16 * MB, seed=4, wait=False)
    bench.recorder.wait("openings", 1)
    doomed_peer.signal(signal.SIGKILL)
    bench.recorder.wait("ended", 1, timeout_s=60)
    assert (bench.recorder.ended[0].stream, bench.recorder.ended[0].outcome) == (4, "broken")
    assert link.state is LinkState.BROKEN


def test_a_stopped_peer_is_detected_by_its_silence(bench: Bench, doomed_peer: PeerProcess) -> None:
    config = TransportConfig(keepalive_s=0.2, silence_timeout_s=4.0)
    bench.plane = open_plane("w1", bench.recorder, config, "127.0.0.1", secret=b"of this cluster")
    link = bench.link(doomed_peer, "w2")
    time.sleep(5.0)
    assert link.state is LinkState.UP, "keepalives must keep an idle link alive"
    doomed_peer.freeze()
    bench.recorder.wait("endings", 1)
    assert bench.recorder.endings["w2"].state is LinkState.BROKEN
    assert link.connection.wait_ended(60)
    doomed_peer.signal(signal.SIGKILL)


def test_a_peer_that_never_answers_a_close_does_not_delay_it(bench: Bench, doomed_peer: PeerProcess) -> None:
    bench.open(close_timeout_s=0.5)
    link = bench.link(doomed_peer, "w2")
    doomed_peer.freeze()
    transfer = link.transfer(TrafficClass.KV, [torch.zeros(64 * MB, dtype=torch.uint8)])
    link.connection.close()
    assert link.connection.wait_ended(60)
    with pytest.raises(Unavailable):
        transfer.done.result(1)
    doomed_peer.signal(signal.SIGKILL)


def test_the_next_epoch_gets_its_own_link_over_the_same_connection(bench: Bench, shared_peer: PeerProcess) -> None:
    plane = bench.open()
    first = bench.link(shared_peer, "w2", epoch=1)
    assert plane.connect("w2", bench.addresses["w2"], 1) is first
    second = bench.link(shared_peer, "w2", epoch=2)
    assert second is not first
    assert second.connection is first.connection
    plane.retire(before_epoch=2)
    with pytest.raises((StaleEpoch, Unavailable)):
        first.send(TrafficClass.ACTIVATION, 0)
    with pytest.raises(StaleEpoch):
        plane.connect("w2", bench.addresses["w2"], 1)
    assert first.state is LinkState.CLOSED
    second.send(TrafficClass.ACTIVATION, ECHO, meta=b"epoch 2").result(60)
    bench.recorder.wait("messages", 1)
    assert [facts.epochs for facts in plane.facts()] == [(2,)]


def test_a_retired_link_refuses_late_messages(bench: Bench, shared_peer: PeerProcess) -> None:
    bench.open()
    link = bench.link(shared_peer, "w2")
    link.connection._links.clear()  # as if this side had left and its notice were still on the way
    shared_peer.call("send", to="w1", texts=["late", "later"])
    answer = shared_peer.call("transfer", to="w1", size_bytes=MB, seed=1)
    assert answer["outcome"] == "refused"
    assert bench.recorder.messages == []
    assert link.counts.stale_frames == 3


def test_a_peer_that_leaves_an_epoch_ends_its_transfers(bench: Bench, shared_peer: PeerProcess) -> None:
    bench.open(rate_bytes_per_s=MB, chunk_bytes=64 * 1024)
    link, other = (bench.link(shared_peer, "w2", epoch=epoch) for epoch in (1, 2))
    transfer = link.transfer(TrafficClass.KV, [torch.zeros(64 * MB, dtype=torch.uint8)], stream=1)
    shared_peer.call("wait", what="openings", count=1)
    shared_peer.call("retire", before_epoch=2)
    with pytest.raises(Unavailable):
        transfer.done.result(60)
    bench.recorder.wait("endings", 1)
    assert bench.recorder.endings["w2"].state is LinkState.CLOSED
    with pytest.raises(Unavailable):
        link.send(TrafficClass.ACTIVATION, 0)
    shared_peer.call("wait", what="ended", count=1)
    assert [(e["stream"], e["outcome"]) for e in shared_peer.call("received")["ended"]] == [(1, "cancelled")]
    assert other.transfer(TrafficClass.KV, [pattern(9, seed=3)]).done.result(60).outcome is TransferOutcome.DELIVERED


def test_a_broken_link_can_be_reopened_in_the_same_epoch(bench: Bench, shared_peer: PeerProcess) -> None:
    bench.open()
    first = bench.link(shared_peer, "w2")
    first.connection.close()
    assert first.connection.wait_ended(60)
    assert bench.recorder.endings["w2"].state is LinkState.CLOSED
    second = bench.link(shared_peer, "w2")
    assert second.connection is not first.connection
    second.send(TrafficClass.ACTIVATION, ECHO, meta=b"again").result(60)
    bench.recorder.wait("messages", 1)


def test_a_missing_peer_costs_only_the_deadline(bench: Bench, shared_peer: PeerProcess) -> None:
    plane = bench.open()
    began_s = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="w2 did not connect"):
        plane.connect("w2", "127.0.0.1:1", 1, timeout_s=0.3)  # our store is used, not w2's address
    with pytest.raises(Unavailable, match="w0"):
        plane.connect("w0", "127.0.0.1:1", 1, timeout_s=0.3)
    assert time.monotonic() - began_s < 30, "the deadline given must apply, not the default of a minute"
    link = bench.link(shared_peer, "w2")  # the abandoned attempt does not interfere
    assert link.state is LinkState.UP


def test_over_a_slow_link_an_activation_waits_for_one_chunk_at_most(bench: Bench, shared_peer: PeerProcess) -> None:
    """24 chunks of half a second each are queued; each of five round trips waits for at most one of them."""
    bench.open(rate_bytes_per_s=MB, chunk_bytes=MB // 2)
    link = bench.link(shared_peer, "w2")
    transfer = link.transfer(TrafficClass.KV, [torch.zeros(12 * MB, dtype=torch.uint8)])
    shared_peer.call("wait", what="openings", count=1)
    chunks = [0]
    for trips in range(1, 6):
        link.send(TrafficClass.ACTIVATION, ECHO, tensor=torch.zeros(4, 256))
        bench.recorder.wait("messages", trips)
        chunks.append(link.counts.sent[TrafficClass.KV].total_bytes // (MB // 2))
    meanwhile = sorted(after - before for before, after in itertools.pairwise(chunks))
    assert meanwhile[2] <= 1, f"activations waited for {meanwhile} chunks; the first includes the one under way"
    assert transfer.cancel()
    transfer.done.result(60)


def test_a_slow_link_is_emulated(bench: Bench, shared_peer: PeerProcess) -> None:
    bench.open(rate_bytes_per_s=8 * MB)
    link = bench.link(shared_peer, "w2")
    report = link.transfer(TrafficClass.KV, [pattern(4 * MB, seed=1)]).done.result(60)
    assert report.duration_s >= 0.4


def test_an_abandoned_link_breaks_on_both_sides(bench: Bench, shared_peer: PeerProcess) -> None:
    bench.open()
    link = bench.link(shared_peer, "w2")
    link.give_up("a message does not fit")
    assert link.connection.wait_ended(60)
    assert link.state is LinkState.BROKEN
    assert bench.recorder.endings["w2"] == LinkEnding(LinkState.BROKEN, "a message does not fit")
    with pytest.raises(Unavailable):
        link.send(TrafficClass.CONTROL, 1)


def test_a_receiver_that_raises_breaks_the_link(bench: Bench, shared_peer: PeerProcess) -> None:
    bench.open()
    link = bench.link(shared_peer, "w2")
    transfer = link.transfer(TrafficClass.KV, [pattern(MB, seed=1)], meta=b"[1]")  # the peer expects one byte
    with pytest.raises(Unavailable):
        transfer.done.result(60)
    bench.recorder.wait("endings", 1)
    assert bench.recorder.endings["w2"].state is LinkState.BROKEN


@pytest.mark.parametrize("retired", [False, True])
def test_nothing_is_leaked(shared_peer: PeerProcess, retired: bool) -> None:
    _one_life(shared_peer, retired)  # creates whatever the process creates once and retains
    gc.collect()
    gc.disable()  # nothing may be left to the collector
    try:
        before = _holdings()
        for _ in range(3):
            _one_life(shared_peer, retired)
        _await_no_more_than(before)
    finally:
        gc.enable()


def _one_life(peer: PeerProcess, retired: bool) -> None:
    bench = Bench()
    plane = bench.open()
    link = bench.link(peer, "w2")
    link.transfer(TrafficClass.KV, [pattern(MB, seed=1)]).done.result(60)
    if retired:
        plane.retire(2)  # closed in the background, perhaps later than the other links
    bench.close()


def _await_no_more_than(before: tuple[int, int, int]) -> None:
    """Waits until this process holds no more resources than `before`, since closing in the background may take long on
    a busy machine.
    """
    deadline_s = time.monotonic() + 60
    while any(now > then for now, then in zip(_holdings(), before, strict=True)):
        assert time.monotonic() < deadline_s, f"before {before}, now {_holdings()}"
        time.sleep(0.2)


def _holdings() -> tuple[int, int, int]:
    """Counts of file descriptors, OS threads and Python threads."""
    deadline_s = time.monotonic() + 5
    held = (0, 0, 0)
    while time.monotonic() < deadline_s:  # the store's thread ends a moment after its last reference
        now = (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), threading.active_count())
        if now == held:
            return now
        held = now
        time.sleep(0.2)
    return held
