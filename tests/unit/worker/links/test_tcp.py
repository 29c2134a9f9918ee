"""Waiting for a socket takes one system call, and does not keep other threads from posting."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future
from threading import Thread

import pytest
import torch

from services.worker.links.channels.tcp import TcpChannel
from services.worker.links.config import HEADER_BYTES
from services.worker.links.ports import ChannelBroken, Pending
from tests.unit.worker.links.recorder import pattern

PAYLOAD = pattern(16 << 20, seed=1)


@pytest.fixture
def ends() -> Iterator[tuple[TcpChannel, TcpChannel]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    channels = TcpChannel(one), TcpChannel(other)
    yield channels
    for channel in channels:
        channel.abort()
        channel.destroy()


def outcome(pending: Pending, timeout_s: float = 30.0) -> Future[None]:
    """The outcome of `pending`, which a separate thread waits for."""
    done: Future[None] = Future()

    def wait() -> None:
        try:
            pending.wait(timeout_s)
            done.set_result(None)
        except ChannelBroken as error:
            done.set_exception(error)

    Thread(target=wait, daemon=True).start()
    return done


def test_a_payload_is_received_by_one_call_however_it_arrives(ends: tuple[TcpChannel, TcpChannel]) -> None:
    sender, receiver = ends
    calls: list[int] = []

    class Counted:
        def recv_into(self, *given: object) -> int:
            calls.append(receiving.recv_into(*given))  # pyright: ignore[reportArgumentType]
            return calls[-1]

        def close(self) -> None:
            receiving.close()

    receiving, receiver._in = receiver._in, Counted()  # pyright: ignore[reportAttributeAccessIssue]
    came = torch.zeros_like(PAYLOAD)
    arrives = outcome(receiver.post_payload(came))
    for part in PAYLOAD.split(3 << 20):
        sender.send_payload(part).wait(30)
        time.sleep(0.005)
    arrives.result(30)
    assert torch.equal(came, PAYLOAD)
    assert calls == [PAYLOAD.numel()]


def test_other_threads_can_post_and_abort_while_one_waits_for_a_stalled_peer(
    ends: tuple[TcpChannel, TcpChannel],
) -> None:
    sender, _ = ends
    pushed = outcome(sender.send_payload(PAYLOAD))
    time.sleep(0.1)
    began_s = time.monotonic()
    late = sender.send_frame(torch.zeros(HEADER_BYTES, dtype=torch.uint8))
    assert time.monotonic() - began_s < 5
    waits = outcome(late)
    assert not pushed.done()
    sender.abort()
    assert time.monotonic() - began_s < 10
    for each in (pushed, waits):
        with pytest.raises(ChannelBroken, match="aborted"):
            each.result(10)


def test_two_waiting_threads_are_served_in_order(ends: tuple[TcpChannel, TcpChannel]) -> None:
    sender, receiver = ends
    waiting = [outcome(sender.send_payload(part)) for part in PAYLOAD.split(5 << 20)]
    came = torch.zeros_like(PAYLOAD)
    receiver.post_payload(came).wait(30)
    for each in waiting:
        each.result(30)
    assert torch.equal(came, PAYLOAD)


def test_waits_to_send_and_to_receive_have_a_timeout(ends: tuple[TcpChannel, TcpChannel]) -> None:
    sender, _ = ends
    began_s = time.monotonic()
    with pytest.raises(ChannelBroken, match="accepted no bytes"):
        sender.send_payload(PAYLOAD).wait(0.2)
    with pytest.raises(ChannelBroken, match="sent no bytes for too long"):
        sender.post_frame(torch.zeros(HEADER_BYTES, dtype=torch.uint8)).wait(0.2)
    assert 0.3 < time.monotonic() - began_s < 10
