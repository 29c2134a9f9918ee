"""Connections outlive epochs, close when no epoch needs them, and belong to one incarnation of each side. Two data
planes in one process, over real sockets.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import cast
from unittest.mock import Mock

import pytest
import torch

from ballast.common.errors import DeadlineExceeded, PeerViolation, Unavailable
from services.worker.links import connection as module
from services.worker.links.channel_connection import ChannelConnection
from services.worker.links.config import TransportConfig
from services.worker.links.connection import Link
from services.worker.links.frame_kinds import FrameKind
from services.worker.links.open import open_plane
from services.worker.links.plane import DataPlane
from services.worker.links.ports import LinkState
from services.worker.links.traffic import TrafficClass
from services.worker.links.transfer import TransferOutcome
from services.worker.pipeline.links import Links
from services.worker.pipeline.role import MemberRole
from services.worker.pipeline.wire import Topic
from services.worker.policy.step_limits import step_limits
from tests.unit.worker.links.recorder import Recorder, checksum, pattern

CONFIG = TransportConfig(keepalive_s=0.05, close_timeout_s=5.0)


def until(look: Callable[[], object], within_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not look():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


class Pair:
    def __init__(self, transport: str = "tcp", secrets: tuple[bytes | None, bytes | None] = (None, None)) -> None:
        self.recorders = {"w1": Recorder(), "w2": Recorder()}
        self.planes = {
            w: open_plane(w, recorder, CONFIG, "127.0.0.1", transport, secret)
            for (w, recorder), secret in zip(self.recorders.items(), secrets, strict=True)
        }
        for life, plane in enumerate(self.planes.values(), start=5):
            plane.incarnation = life

    def connect(self, epoch: int, timeout_s: float = 30.0) -> list[Link]:
        """Connects both sides. Returns the link of w1 and the link of w2."""
        return [future.result(60) for future in self.warm(epoch, timeout_s)]

    def warm(self, epoch: int, timeout_s: float = 30.0, lives: tuple[int, int] = (0, 0)) -> list[Future[Link]]:
        w1, w2 = self.planes.values()
        return [
            w1.warm("w2", w2.store_address, epoch, timeout_s, lives[1]),
            w2.warm("w1", w1.store_address, epoch, timeout_s, lives[0]),
        ]

    def restart(self, worker_id: str) -> DataPlane:
        """Replaces the worker's data plane with one of a new incarnation, as if the old process had been killed."""
        for connection in self.planes[worker_id]._connections.values():
            connection.give_up("killed")
        self.planes[worker_id].close()
        plane = open_plane(worker_id, self.recorders[worker_id], CONFIG, "127.0.0.1")
        plane.incarnation = 77
        self.planes[worker_id] = plane
        return plane

    def close(self) -> None:
        with ThreadPoolExecutor(2) as pool:
            for closing in [pool.submit(plane.close, 30.0) for plane in self.planes.values()]:
                closing.result(60)


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def test_epochs_begin_and_end_over_one_connection(pair: Pair) -> None:
    first = pair.connect(1)
    second = pair.connect(2)
    assert [link.connection for link in first] == [link.connection for link in second]
    for plane in pair.planes.values():
        plane.retire(2)
    assert [link.state for link in first] == [LinkState.CLOSED] * 2
    until(lambda: all(plane.facts()[0].epochs == (2,) for plane in pair.planes.values()))
    for plane in pair.planes.values():
        plane.retire(3)
    third = pair.connect(3)
    assert [link.connection for link in third] == [link.connection for link in first]
    third[0].send(TrafficClass.CONTROL, 0, meta=b"still there").result(30)
    pair.recorders["w2"].wait("messages", 1)


def test_a_link_is_up_only_once_both_sides_have_joined(pair: Pair) -> None:
    pair.connect(1)
    w1, w2 = pair.planes.values()
    early = w1.warm("w2", w2.store_address, 2, 30.0)
    time.sleep(0.1)
    assert not early.done()
    assert w1.link("w2", 2) is None
    late = w2.connect("w1", w1.store_address, 2, 30.0)
    assert early.result(30).is_up
    assert late.is_up


def test_the_activations_of_the_largest_step_fit_into_a_message(pair: Pair) -> None:
    [link, _] = pair.connect(1)
    token_count = step_limits(180 << 30).tokens
    link.send(TrafficClass.ACTIVATION, 0, tensor=torch.zeros(token_count, 8192, dtype=torch.bfloat16)).result(60)
    pair.recorders["w2"].wait("messages", 1)


def test_a_side_that_times_out_abandons_the_epoch_and_notifies_the_other(pair: Pair) -> None:
    [link, _] = pair.connect(1)
    w1, w2 = pair.planes.values()
    with pytest.raises(DeadlineExceeded, match="epoch 2: w2 did not connect"):
        w1.connect("w2", w2.store_address, 2, 0.1)
    link.send(TrafficClass.ACTIVATION, 0)
    pair.recorders["w2"].wait("messages", 1)  # this message arrives after the notice that w1 has left the epoch
    with pytest.raises(DeadlineExceeded, match="epoch 2: w1 did not connect"):
        w2.connect("w1", w1.store_address, 2, 0.1)
    assert [link.epoch for link in pair.connect(3)] == [3, 3]
    assert pair.planes["w1"].link("w2", 1) is not None


def test_abandoning_an_epoch_while_the_other_side_joins_does_not_join_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    [link, other] = pair.connect(1)
    mine, theirs = link.connection, other.connection
    waits = mine.begin_join(2)
    assert waits is not None
    until(lambda: 2 in theirs._peer_epochs)
    with monkeypatch.context() as wire:  # on which the two notices cross
        wire.setattr(mine, "tell_abandoned", Mock())
        mine.leave(waits)
        late = theirs.begin_join(2)
        assert late is not None
        until(lambda: 2 in mine._peer_epochs)
    mine.tell_abandoned(2)
    until(lambda: late.ended)
    until(lambda: 2 not in mine._peer_epochs)
    again = mine.begin_join(2)
    assert again is not None
    assert not again.is_up


@pytest.mark.parametrize("leaves", [True, False])
def test_a_peer_that_joins_and_leaves_at_once_counts_as_joined(pair: Pair, leaves: bool) -> None:
    """The side that waits for the peer may wake up only after the peer has left again."""
    [mine, theirs] = pair.connect(1)
    link = mine.connection._links.setdefault(2, Link(mine.connection, 2))  # this side has joined epoch 2 and waits
    theirs.connection.tell(FrameKind.JOIN, 2)
    until(lambda: link.met)
    if leaves:
        theirs.connection.tell(FrameKind.LEAVE, 2)
    else:
        theirs.connection.close()
    until(lambda: link.ended)
    assert pair.recorders["w1"].endings["w2"].state is LinkState.CLOSED
    assert mine.connection._await_peer(link, time.monotonic())


def test_many_epochs_at_once_share_one_connection(pair: Pair) -> None:
    futures = [future for epoch in range(1, 6) for future in pair.warm(epoch)]
    links = [future.result(60) for future in futures]
    assert len({id(link.connection) for link in links}) == 2
    assert sorted(link.epoch for link in links) == sorted([*range(1, 6)] * 2)


def test_a_broken_connection_ends_all_its_links_and_is_reopened(pair: Pair) -> None:
    old = [*pair.connect(1), *pair.connect(2)]
    old[0].give_up("the test breaks it")
    until(lambda: not any(link.is_up for link in old))
    until(lambda: all(recorder.endings for recorder in pair.recorders.values()))
    new = pair.connect(3)
    assert new[0].connection is not old[0].connection
    with pytest.raises(Unavailable):
        old[0].send(TrafficClass.CONTROL, 0)


@pytest.mark.parametrize("who_retires", [0, 1])
def test_a_message_for_an_ended_epoch_ends_no_other_epoch(pair: Pair, who_retires: int) -> None:
    """For example, an answer to a migration of the replaced layout is sent while the next layout is being prepared."""
    old, new = pair.connect(1), pair.connect(2)
    old[who_retires].retire()
    until(lambda: all(link.retired or link.ended is LinkState.CLOSED for link in old))
    links = Links(pair.planes["w1"], cast("MemberRole", None), time.monotonic, lambda _: None)
    assert links.send_over(old[0], TrafficClass.CONTROL, Topic.MIGRATION, b"") is None
    old[0].give_up("too late")
    assert old[0].connection.is_up
    assert all(link.is_up for link in new)
    links.send_over(new[0], TrafficClass.CONTROL, Topic.MIGRATION, b"in time")
    until(lambda: pair.recorders["w2"].messages)


@pytest.mark.parametrize("who", ["w1", "w2"])
def test_a_side_that_has_not_noticed_the_end_follows_the_other_to_a_new_connection(pair: Pair, who: str) -> None:
    """The notice of the connection's end is in transit or lost. The peer is at the rendezvous again, or does not
    answer.
    """
    old = pair.connect(1)
    plane = pair.planes[who]
    forgotten = plane._connections.pop("w2" if who == "w1" else "w1")  # this side opens a new connection
    if who == "w1":  # w1 waits for a connection, and w2 still believes that it is connected
        forgotten.give_up("gone")
    new = pair.connect(2)
    assert all(link.is_up for link in new)
    assert new[0].connection is not old[0].connection
    forgotten.close()


def test_a_new_incarnation_gets_a_new_connection(pair: Pair) -> None:
    [old, _] = [future.result(60) for future in pair.warm(1, lives=(5, 6))]
    pair.restart("w2")
    [new, _] = [future.result(60) for future in pair.warm(2, lives=(5, 77))]
    assert (old.connection.incarnation, new.connection.incarnation) == (6, 77)
    assert not old.is_up


def test_a_connection_without_epochs_stays_open_for_a_while(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    links = pair.connect(1)
    for plane in pair.planes.values():
        plane.retire(2)
    time.sleep(0.3)
    assert all(link.connection.is_up for link in links)
    monkeypatch.setattr(module, "_IDLE_S", 0.2)
    until(lambda: all(link.connection.state is LinkState.CLOSED for link in links))
    assert all(link.is_up for link in pair.connect(2))
    time.sleep(1.0)
    assert all(plane.facts()[0].epochs == (2,) for plane in pair.planes.values()), "no connection in use may be closed"


def test_a_peer_that_joins_endlessly_uses_a_limited_number_of_slots(pair: Pair) -> None:
    [mine, theirs] = pair.connect(1)
    for epoch in range(2, 1000):
        theirs.connection.tell(FrameKind.JOIN, epoch)
    theirs.send(TrafficClass.CONTROL, 0, timeout_s=30.0)
    pair.recorders["w1"].wait("messages", 1)
    assert len(mine.connection._peer_epochs) <= module._MAX_EPOCHS
    assert mine.is_up


def test_a_frame_larger_than_the_posted_receive_ends_only_its_connection(pair: Pair) -> None:
    [mine, theirs] = pair.connect(1)
    assert isinstance(theirs.connection, ChannelConnection)
    assert theirs.connection._channels is not None
    channel = theirs.connection._channels.urgent
    channel.send_frame(torch.zeros(CONFIG.frame_bytes(urgent=True) + 1, dtype=torch.uint8))
    pair.recorders["w1"].wait("endings", 1)
    assert pair.recorders["w1"].endings["w2"].why.startswith("ChannelBroken: the peer sends a frame of 65601 bytes")
    assert not mine.is_up
    assert all(link.is_up for link in pair.connect(2))


def test_a_peer_without_the_secret_gets_no_link() -> None:
    pair = Pair(secrets=(b"the secret", None))
    try:
        host, caller = pair.warm(1, timeout_s=1.0)
        with pytest.raises(PeerViolation, match="refuses this worker's link: no proof"):
            caller.result(30)
        with pytest.raises(DeadlineExceeded):
            host.result(30)
        assert pair.planes["w1"].refused == {"no proof": 1}
    finally:
        pair.close()


def test_tcp_carries_messages_and_bulk() -> None:
    pair = Pair("tcp", (b"shared", b"shared"))
    try:
        [link, _] = pair.connect(1)
        tensor = torch.randn(300, 700)
        link.send(TrafficClass.ACTIVATION, 0, meta=b"head", tensor=tensor).result(30)
        source = pattern(3 << 20, seed=4)
        assert link.transfer(TrafficClass.KV, [source], stream=1).done.result(30).outcome is TransferOutcome.DELIVERED
        pair.recorders["w2"].wait("messages", 1)
        message = pair.recorders["w2"].messages[0]
        assert message.tensor is not None
        assert torch.equal(message.tensor, tensor)
        assert pair.recorders["w2"].ended[0].checksum == checksum([source])
    finally:
        pair.close()
