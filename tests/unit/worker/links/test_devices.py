"""Tensors in memory that the host must not access are transferred like others, and data that the host reads arrives in
host memory. The tests fail if a receive or a send accesses such memory directly.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from threading import Thread

import pytest
import torch

from ballast.common.errors import Unavailable
from services.worker.links import open as module
from services.worker.links.config import TransportConfig
from services.worker.links.connection import Link
from services.worker.links.copies import HOST, HostCopies
from services.worker.links.open import carrier_of, device_bytes, open_plane
from services.worker.links.pieces import Pieces
from services.worker.links.traffic import TrafficClass
from services.worker.links.transfer import Opening, Refusal, TransferOutcome
from services.worker.pipeline.hub import Hub
from services.worker.pipeline.wire import Topic
from tests.support.untouchable import DEVICE, on_device, touchable
from tests.unit.worker.links.recorder import Recorder, pattern

KB = 1024
HIDDEN = 12


class DeviceCopies(HostCopies):
    """While `held` is a list, fetches complete or fail only when the test lets them."""

    def __init__(self) -> None:
        self.held: list[Callable[[bool], None]] | None = None
        self.gathered: list[int] = []  # bytes of each slot that was gathered

    def gather(self, pieces: Pieces, offset: int, slot: torch.Tensor) -> None:
        self.gathered.append(slot.numel())
        super().gather(pieces, offset, slot)

    def empty(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        plain = super().empty(size_bytes, HOST)
        return on_device(plain) if device == DEVICE else plain

    def fetch(self, payload: torch.Tensor, device: torch.device, then: Callable[[torch.Tensor | None], None]) -> None:
        def come(is_computed: bool) -> None:
            Thread(target=then, args=(payload.to(device) if is_computed else None,)).start()

        if self.held is None:
            come(True)
        else:
            self.held.append(come)


class DeviceRecorder(Recorder):
    """Receives hidden states and all bulk transfers on the device."""

    def device_of(self, topic: int) -> torch.device:
        return DEVICE if topic == HIDDEN else HOST

    def on_opening(self, link: Link, opening: Opening) -> Sequence[torch.Tensor] | Refusal:
        pieces = super().on_opening(link, opening)
        assert not isinstance(pieces, Refusal)
        self.there = self._destinations[link.peer_id, opening.transfer] = [on_device(piece) for piece in pieces]
        return self.there

    def on_transfer_end(self, link: Link, opening: Opening, outcome: TransferOutcome) -> None:
        self._destinations[link.peer_id, opening.transfer] = [touchable(piece) for piece in self.there]
        super().on_transfer_end(link, opening, outcome)


class Ends:
    """Two connected data planes in one process, over real sockets."""

    def __init__(self) -> None:
        self.recorders = DeviceRecorder(), DeviceRecorder()
        config = TransportConfig(keepalive_s=0.1, send_timeout_s=20.0, silence_timeout_s=20.0)
        a, b = (
            open_plane(me, recorder, config, "127.0.0.1", "tcp", device=DEVICE)
            for me, recorder in zip(("w1", "w2"), self.recorders, strict=True)
        )
        self.planes = a, b
        made = a.warm("w2", b.store_address, 1), b.warm("w1", a.store_address, 1)
        self.links = made[0].result(30), made[1].result(30)

    def close(self) -> None:
        threads = [Thread(target=plane.close, args=(20.0,)) for plane in self.planes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> DeviceCopies:
    copies = DeviceCopies()

    def copies_for(device: torch.device) -> DeviceCopies:
        return copies

    monkeypatch.setattr(module, "copies_for", copies_for)
    return copies


@pytest.fixture
def ends(copies: DeviceCopies) -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


def test_bulk_data_arrives_in_memory_that_the_host_must_not_access(ends: Ends) -> None:
    sources = [pattern(size, seed=size) for size in (1, 70 * KB, 3, 2048 * KB, 999)]
    cuts = [5, 1024 * KB, 100, sum(t.numel() for t in sources) - 1024 * KB - 105]
    transfer = ends.links[0].transfer(TrafficClass.KV, [on_device(s) for s in sources], meta=str(cuts).encode())
    assert transfer.done.result(30).outcome is TransferOutcome.DELIVERED
    arrived = torch.cat([touchable(piece) for piece in ends.recorders[1].there])
    assert torch.equal(arrived, torch.cat(sources))


def test_interleaved_blocks_are_sent_slot_by_slot(ends: Ends, copies: DeviceCopies) -> None:
    cache, size = on_device(pattern(40 << 20, seed=3)), 64 * KB
    blocks = [cache[first : first + size] for first in range(0, cache.numel(), 2 * size)]
    transfer = ends.links[0].transfer(TrafficClass.KV, blocks, meta=str([3 * size] * 106 + [2 * size]).encode())
    assert transfer.done.result(60).outcome is TransferOutcome.DELIVERED
    arrived = torch.cat([touchable(piece) for piece in ends.recorders[1].there])
    assert torch.equal(arrived, torch.cat([touchable(block) for block in blocks]))
    assert sum(copies.gathered) == arrived.numel()
    assert len(copies.gathered) / arrived.numel() * 1e9 <= 200, "at most 200 messages per GB"


@pytest.mark.parametrize("rows", [2, 2048])  # inside the frame, and after it
def test_hidden_states_arrive_on_the_device(ends: Ends, rows: int) -> None:
    hidden = torch.randn(rows, 64)
    ends.links[0].send(TrafficClass.ACTIVATION, HIDDEN, tensor=on_device(hidden)).result(30)
    ends.recorders[1].wait("messages", 1)
    tensor = ends.recorders[1].messages[0].tensor
    assert tensor is not None
    assert tensor.device == DEVICE
    assert torch.equal(touchable(tensor), hidden)


def test_data_that_the_host_reads_arrives_in_host_memory(ends: Ends) -> None:
    said = bytes(range(256)) * 400  # too long to be sent within a frame
    ends.links[0].send(TrafficClass.CONTROL, 3, tensor=ends.links[0].as_tensor(said)).result(30)
    ends.links[0].send(TrafficClass.CONTROL, 3, tensor=on_device(ends.links[0].as_tensor(said))).result(30)
    ends.recorders[1].wait("messages", 2)
    for message in ends.recorders[1].messages:
        assert message.tensor is not None
        assert message.tensor.numpy().tobytes() == said


def test_kv_attached_to_a_message_is_moved_from_device_to_device(ends: Ends) -> None:
    kv, link = pattern(300 * KB, seed=1), ends.links[0]
    packed = link.pack([on_device(part) for part in kv.split(100 * KB)])
    link.send(TrafficClass.CONTROL, 3, tensor=packed).result(30)
    ends.recorders[1].wait("messages", 1)
    tensor = ends.recorders[1].messages[0].tensor
    assert tensor is not None
    there = [on_device(torch.zeros_like(part)) for part in kv.split(150 * KB)]
    ends.links[1].unpack(tensor, there)
    assert torch.equal(torch.cat([touchable(part) for part in there]), kv)


@pytest.mark.parametrize("ends", ["tcp"], indirect=True)
def test_messages_do_not_wait_for_computations_and_activations_stay_in_order(ends: Ends, copies: DeviceCopies) -> None:
    copies.held = []
    link = ends.links[0]
    sent = [link.send(TrafficClass.ACTIVATION, HIDDEN, stream=1, tensor=on_device(torch.ones(9)))]
    sent.append(link.send(TrafficClass.ACTIVATION, 3, stream=2, meta=b"behind it"))
    link.send(TrafficClass.CONTROL, 3, stream=3, meta=b"a word").result(30)
    assert not any(future.done() for future in sent)
    copies.held[0](True)
    assert [future.result(30) for future in sent] == [None, None]
    ends.recorders[1].wait("messages", 3)
    assert [message.stream for message in ends.recorders[1].messages] == [3, 1, 2]


@pytest.mark.parametrize("ends", ["tcp"], indirect=True)
def test_unreadable_device_memory_breaks_the_link(ends: Ends, copies: DeviceCopies) -> None:
    copies.held = []
    sent = ends.links[0].send(TrafficClass.ACTIVATION, HIDDEN, tensor=on_device(torch.ones(9)))
    copies.held[0](False)
    with pytest.raises(Unavailable, match="could not be read from the device"):
        sent.result(30)
    ends.recorders[1].wait("endings", 1)
    assert not ends.recorders[1].messages


@pytest.mark.parametrize("ends", ["tcp"], indirect=True)
def test_a_transfer_waits_until_its_bytes_are_computed(
    ends: Ends, copies: DeviceCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = on_device(torch.zeros(100 * KB, dtype=torch.uint8))

    class Computed:
        def wait(self) -> None:
            time.sleep(0.05)
            touchable(source).fill_(7)

    monkeypatch.setattr(copies, "mark", Computed)
    ends.links[0].transfer(TrafficClass.KV, [source]).done.result(30)
    assert bool((touchable(ends.recorders[1].there[0]) == 7).all())


def test_only_hidden_states_are_received_on_the_device() -> None:
    hub = Hub(lambda event: None, device=DEVICE)
    assert [topic for topic in Topic if hub.device_of(topic) == DEVICE] == [Topic.BATCH, Topic.ACTIVATIONS]


@pytest.mark.parametrize(
    ("said", "device", "has_nccl", "carrier"),
    [
        ("auto", "cpu", True, "tcp"),
        ("auto", "cuda:1", True, "nccl"),
        ("auto", "cuda", False, "tcp"),
        ("tcp", "cuda", True, "tcp"),
        ("nccl", "cuda", True, "nccl"),
    ],
)
def test_the_transport_of_links_follows_from_the_memory(
    said: str, device: str, has_nccl: bool, carrier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: has_nccl)
    assert carrier_of(said, device.partition(":")[0]) == carrier
    assert bool(device_bytes(said, device)) == (device != "cpu")


def test_memory_is_reserved_for_nccls_allocations_per_process() -> None:
    slots_bytes = 8 * 16 << 20
    assert device_bytes("tcp", "cuda") == slots_bytes
    assert device_bytes("tcp", "cuda:1", ranks=2) == slots_bytes + (310 << 20)
    assert device_bytes("nccl", "cuda", ranks=2) == device_bytes("nccl", "cuda") == (8 * 128 + 310) << 20
    assert device_bytes("auto", "cpu", ranks=2) == 0
