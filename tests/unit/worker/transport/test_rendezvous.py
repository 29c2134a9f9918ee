"""Two sides meet, strangers and those who gave up are in nobody's way. Both sides in one process, over real sockets."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from ballast.common.errors import ConfigError, DeadlineExceeded, PeerViolation, Unavailable
from services.worker.transport.rendezvous import Hello, Lobby, Terms, call, resolve_host

TERMS = Terms(1, 4096, 4096, 1000, 1000)
LOW, HIGH = Hello("w1", 3, TERMS), Hello("w2", 3, replace(TERMS, max_message_bytes=77))


@pytest.fixture
def lobby() -> Iterator[Lobby]:
    lobby = Lobby("127.0.0.1", "w1")
    yield lobby
    lobby.close()


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


def dial(lobby: Lobby) -> socket.socket:
    host, port = lobby.address.split(":")
    return socket.create_connection((host, int(port)), timeout=60)


@pytest.mark.parametrize("early", [True, False], ids=["caller first", "host first"])
def test_both_learn_the_terms_and_share_a_store(lobby: Lobby, early: bool) -> None:
    with ThreadPoolExecutor(2) as pool:
        calling = pool.submit(call, HIGH, "w1", lobby.address, soon()) if early else None
        time.sleep(0.1 * early)
        hosting = pool.submit(lobby.meet, LOW, "w2", soon())
        calling = calling or pool.submit(call, HIGH, "w1", lobby.address, soon())
        host_side, caller_side = hosting.result(60), calling.result(60)
    assert (host_side.peer, caller_side.peer) == (HIGH, LOW)
    caller_side.store.set("a", b"1")
    host_side.store.set("b", "2")
    assert (host_side.store.get("a"), caller_side.store.get("b")) == (b"1", b"2")
    caller_side.store.close()
    with pytest.raises(OSError, match="hung up"):
        host_side.store.get("never set")
    host_side.store.close()


def test_a_key_that_is_never_set_costs_the_deadline(lobby: Lobby) -> None:
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(call, HIGH, "w1", lobby.address, soon())
        meeting = lobby.meet(LOW, "w2", soon())
        with meeting.store.expiring(soon(0.5)), pytest.raises(TimeoutError):
            meeting.store.get("never set")
        calling.result(60).store.close()
        meeting.store.close()


def test_after_the_deadline_there_is_nothing_to_be_had(lobby: Lobby) -> None:
    """Who comes too late must not go on: the other side has given it up."""
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(call, HIGH, "w1", lobby.address, soon())
        meeting = lobby.meet(LOW, "w2", soon())
        caller = calling.result(60)
        caller.store.set("a", b"1")
        assert meeting.store.get("a") == b"1"
        with meeting.store.expiring(soon(-0.1)), pytest.raises(TimeoutError, match="a has come too late"):
            meeting.store.get("a")
        assert meeting.store.get("a") == b"1"
        caller.store.close()
        meeting.store.close()


@pytest.mark.parametrize("noise", [b"", b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b"[1]\n", b"x" * 10_000])
def test_strangers_do_not_stop_a_meeting(lobby: Lobby, noise: bytes) -> None:
    with dial(lobby) as stranger, ThreadPoolExecutor(1) as pool:
        stranger.sendall(noise)
        calling = pool.submit(call, HIGH, "w1", lobby.address, soon())
        lobby.meet(LOW, "w2", soon()).store.close()
        calling.result(60).store.close()


def test_a_caller_who_gave_up_is_passed_over(lobby: Lobby) -> None:
    with pytest.raises(DeadlineExceeded):
        call(HIGH, "w1", lobby.address, soon(0.1))
    with ThreadPoolExecutor(1) as pool:
        hosting = pool.submit(lobby.meet, LOW, "w2", soon())
        time.sleep(0.1)
        call(HIGH, "w1", lobby.address, soon()).store.close()
        hosting.result(60).store.close()


def test_another_epoch_is_another_meeting(lobby: Lobby) -> None:
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(call, replace(HIGH, epoch=4), "w1", lobby.address, soon(0.5))
        with pytest.raises(DeadlineExceeded, match="epoch 3: w2 did not come"):
            lobby.meet(LOW, "w2", soon(0.3))
        with pytest.raises(DeadlineExceeded):
            calling.result(60)


def test_another_version_is_refused_by_both(lobby: Lobby) -> None:
    newer = replace(HIGH, terms=replace(TERMS, version=2))
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(call, newer, "w1", lobby.address, soon())
        with pytest.raises(DeadlineExceeded):
            lobby.meet(LOW, "w2", soon(0.5))
        with pytest.raises(PeerViolation, match="version 1, we speak 2"):
            calling.result(60)


def test_bad_addresses_are_named() -> None:
    with pytest.raises(ConfigError, match="host:port"):
        call(HIGH, "w1", "nowhere", soon())
    with pytest.raises(Unavailable, match="data plane at"):
        call(HIGH, "w1", "127.0.0.1:1", soon(1))
    with pytest.raises(ConfigError, match="advertise_host"):
        resolve_host("no such host")
    assert resolve_host("127.0.0.1") == "127.0.0.1"
    assert resolve_host(None).count(".") == 3
