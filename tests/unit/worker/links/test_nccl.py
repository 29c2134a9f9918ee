"""Links over NCCL between memories that the host must not access, with process groups that fail as NCCL's do."""

import os
import time
from collections.abc import Iterator
from threading import Lock, Thread

import pytest
import torch
from torch._C._distributed_c10d import HashStore, Store

from ballast.common.errors import ConfigError, Unavailable
from services.worker.links import open as module
from services.worker.links.channels.nccl import UNWATCHED, NcclGroup, NcclTransport, refuse_one_device
from services.worker.links.config import TransportConfig
from services.worker.links.connection import Link
from services.worker.links.open import open_plane
from services.worker.links.ports import ChannelBroken, LinkState
from services.worker.links.traffic import TrafficClass
from services.worker.links.transfer import TransferOutcome
from tests.support.fake_nccl import Fate, HostStream, Wires
from tests.support.untouchable import DEVICE, on_device, touchable
from tests.unit.worker.links.recorder import pattern
from tests.unit.worker.links.test_devices import HIDDEN, DeviceCopies, DeviceRecorder

KB = 1024


class Ends:
    """Links of w1 to w2 and to w3 in one process, each over its own pair of process groups."""

    def __init__(self, fates: dict[str, list[Fate]]) -> None:
        self.fates = fates  # fates of the groups, by peer
        self.wires: dict[str, Wires] = {}
        self._lock = Lock()
        self.recorders = {me: DeviceRecorder() for me in ("w1", "w2", "w3")}
        config = TransportConfig(keepalive_s=0.1, send_timeout_s=1.0, silence_timeout_s=20.0)
        self.planes = {
            me: open_plane(
                me,
                recorder,
                config,
                "127.0.0.1",
                NcclTransport(DEVICE, lambda store, rank, _, me=me: self.group(me, store, rank), HostStream),
                device=DEVICE,
            )
            for me, recorder in self.recorders.items()
        }

    def group(self, me: str, store: Store, rank: int) -> NcclGroup:
        """As with NCCL, the two groups of a pair find each other through the store."""
        store.set(f"from {rank}", me)
        peer = store.get(f"from {1 - rank}").decode()
        name = me if me != "w1" else peer
        with self._lock:
            wires = self.wires.setdefault(name, Wires(self.fates.get(name, [])))
        return wires.groups[rank]

    def link(self, peer: str) -> Link:
        one, other = self.planes["w1"], self.planes[peer]
        made = one.warm(peer, other.store_address, 1), other.warm("w1", one.store_address, 1)
        made[1].result(30)
        return made[0].result(30)

    def close(self) -> None:
        threads = [Thread(target=plane.close, args=(20.0,)) for plane in self.planes.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@pytest.fixture
def ends(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    copies = DeviceCopies()

    def copies_for(device: torch.device) -> DeviceCopies:
        return copies

    monkeypatch.setattr(module, "copies_for", copies_for)
    ends = Ends(getattr(request, "param", {}))
    yield ends
    ends.close()


def fates(**by_peer: list[Fate]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("ends", [by_peer], indirect=True)


def test_device_data_is_sent_directly_and_other_data_through_the_host(ends: Ends) -> None:
    link = ends.link("w2")
    hidden, said, kv = torch.randn(2048, 64), b"word " * 40 * KB, pattern(3000 * KB, seed=3)
    link.send(TrafficClass.ACTIVATION, HIDDEN, tensor=on_device(hidden)).result(30)
    link.send(TrafficClass.CONTROL, 3, tensor=link.as_tensor(said)).result(30)
    transfer = link.transfer(TrafficClass.KV, [on_device(part) for part in kv.split(1000 * KB)])
    assert transfer.done.result(30).outcome is TransferOutcome.DELIVERED
    received = ends.recorders["w2"]
    received.wait("messages", 2)
    state, words = (message.tensor for message in received.messages)
    assert state is not None
    assert words is not None
    assert state.device == DEVICE
    assert torch.equal(touchable(state), hidden)
    assert words.numpy().tobytes() == said
    assert torch.equal(touchable(received.there[0]), kv)
    moved = sum(sum(turn) for turn in ends.wires["w2"].turns)
    assert moved == hidden.nbytes + kv.nbytes, "only hidden states and KV may go from device to device"
    assert not ends.wires["w2"].mismatched


def test_a_pair_has_one_communicator_that_is_created_with_the_link(ends: Ends) -> None:
    ends.link("w2")
    for group in ends.wires["w2"].groups:
        assert group.connected_to == [DEVICE]
    assert not ends.wires["w2"].turns


@fates(w2=[Fate.FINE, Fate.FAILS])
def test_a_failed_receive_breaks_its_link_and_delivers_nothing(ends: Ends) -> None:
    """NCCL reports a failed receive as completed."""
    broken, other = ends.link("w2"), ends.link("w3")
    first = broken.transfer(TrafficClass.KV, [on_device(pattern(2000 * KB, seed=1))])
    assert first.done.result(30).outcome is TransferOutcome.DELIVERED
    transfer = broken.transfer(TrafficClass.KV, [on_device(pattern(10_000 * KB, seed=3))])
    with pytest.raises(Unavailable):
        transfer.done.result(30)
    ends.recorders["w2"].wait("ended", 2)
    ends.recorders["w2"].wait("endings", 1)
    assert [ended.outcome for ended in ends.recorders["w2"].ended] == ["delivered", "broken"]
    assert broken.state is LinkState.BROKEN
    kv = pattern(500 * KB, seed=2)
    assert other.transfer(TrafficClass.KV, [on_device(kv)]).done.result(30).outcome is TransferOutcome.DELIVERED
    assert torch.equal(touchable(ends.recorders["w3"].there[0]), kv)


@fates(w2=[Fate.NEVER_ENDS])
def test_a_payload_that_never_arrives_ends_the_link_in_time_but_not_the_process(ends: Ends) -> None:
    link, began_s = ends.link("w2"), time.monotonic()
    sent = link.send(TrafficClass.ACTIVATION, HIDDEN, tensor=on_device(torch.ones(100 * KB)))
    with pytest.raises(Unavailable):
        sent.result(30)
    assert time.monotonic() - began_s < 15
    assert not ends.recorders["w2"].messages
    assert ends.link("w3").is_up


@fates(w2=[Fate.NEVER_ENDS])
def test_a_peer_that_dies_during_a_transfer_ends_only_its_link(ends: Ends) -> None:
    link, other = ends.link("w2"), ends.link("w3")
    transfer = link.transfer(TrafficClass.KV, [on_device(pattern(2048 * KB, seed=1))])
    deadline_s = time.monotonic() + 30
    while not ends.wires["w2"].turns:
        assert time.monotonic() < deadline_s
        time.sleep(0.002)
    for connection in ends.planes["w2"]._connections.values():
        connection.give_up("killed")
    with pytest.raises(Unavailable):
        transfer.done.result(30)
    assert link.state is LinkState.BROKEN
    other.send(TrafficClass.ACTIVATION, HIDDEN, tensor=on_device(torch.ones(100 * KB))).result(30)
    ends.recorders["w3"].wait("messages", 1)
    ends.recorders["w2"].wait("ended", 1)
    assert ends.recorders["w2"].ended[0].outcome == "broken"


def test_torchs_watchdog_is_off_when_the_first_group_is_created(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its watchdog, torch would end the process when a peer dies."""
    for name in UNWATCHED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    NcclTransport(DEVICE, lambda store, rank, timeout_s: Wires().groups[0], HostStream)
    assert {name: os.environ.get(name) for name in UNWATCHED} == UNWATCHED
    assert UNWATCHED["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert UNWATCHED["TORCH_NCCL_ENABLE_MONITORING"] == "0"


def test_torch_reads_these_environment_variables() -> None:
    header = os.path.join(torch.__path__[0], "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp")
    with open(header) as file:
        text = file.read()
    assert [name for name in UNWATCHED if f'"{name}"' not in text] == []


@pytest.mark.parametrize(("devices", "refused"), [(["GPU-1", "GPU-1"], 2), (["GPU-1", "GPU-2"], 0)])
def test_two_workers_on_one_gpu_get_an_error_with_a_remedy(devices: list[str], refused: int) -> None:
    store, told = HashStore(), list[str]()

    def come(rank: int) -> None:
        try:
            refuse_one_device(store, rank, devices[rank])
        except ChannelBroken as error:
            told.append(str(error))

    threads = [Thread(target=come, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(told) == refused
    assert all("set --transport tcp" in why for why in told)


def test_nccl_is_refused_without_a_gpu() -> None:
    with pytest.raises(ConfigError, match="not that of cpu"):
        NcclTransport(torch.device("cpu"))


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this build of torch has NCCL")
def test_nccl_is_refused_if_torch_lacks_it() -> None:
    with pytest.raises(ConfigError, match="has no NCCL"):
        NcclTransport(torch.device("cuda", 0))
