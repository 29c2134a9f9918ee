"""Two sides meet, undisturbed by strangers and by peers that have stopped waiting. Both sides are in one process, over
real sockets.
"""

import json
import math
import os
import resource
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from random import Random

import pytest

from ballast.common.errors import ConfigError, DeadlineExceeded, PeerViolation, Unavailable
from services.worker.links import rendezvous as module
from services.worker.links.handshake import (
    Hello,
    Terms,
    challenge_line,
    hello_line,
    is_proof,
    parse_hello,
    proof_line,
    proof_of,
    read_line,
)
from services.worker.links.rendezvous import Meeting, Rendezvous, call, resolve_host
from services.worker.links.store import PairStore

TERMS = Terms(1, "tcp", 4096, 4096, 1000, 1000)
LOW = Hello("w1", 7, "w2", "urgent", TERMS)
HIGH = Hello("w2", 8, "w1", "urgent", replace(TERMS, max_message_bytes=77))
SECRET = b"the secret of this cluster"


@pytest.fixture
def rendezvous() -> Iterator[Rendezvous]:
    rendezvous = Rendezvous("127.0.0.1", "w1")
    yield rendezvous
    rendezvous.close()


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


def dial(rendezvous: Rendezvous) -> socket.socket:
    host, port = rendezvous.address.split(":")
    return socket.create_connection((host, int(port)), timeout=60)


@pytest.mark.parametrize("early", [True, False], ids=["caller first", "host first"])
def test_both_learn_the_terms_and_share_a_store(rendezvous: Rendezvous, early: bool) -> None:
    with ThreadPoolExecutor(2) as pool:
        calling = pool.submit(call, HIGH, rendezvous.address, soon()) if early else None
        time.sleep(0.1 * early)
        hosting = pool.submit(rendezvous.meet, LOW, soon())
        calling = calling or pool.submit(call, HIGH, rendezvous.address, soon())
        host_side, caller_side = hosting.result(60), calling.result(60)
    assert (host_side.peer, caller_side.peer) == (HIGH, LOW)
    host, caller = PairStore(host_side.connection), PairStore(caller_side.connection)
    caller.set("a", b"1")
    host.set("b", "2")
    assert (host.get("a"), caller.get("b")) == (b"1", b"2")
    caller.close()
    with pytest.raises(OSError, match="disconnected"):
        host.get("never set")
    host.close()


def test_a_key_that_is_never_set_costs_the_deadline(rendezvous: Rendezvous) -> None:
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(call, HIGH, rendezvous.address, soon())
        meeting = rendezvous.meet(LOW, soon())
        store = PairStore(meeting.connection)
        with store.expiring(soon(0.5)), pytest.raises(TimeoutError):
            store.get("never set")
        calling.result(60).connection.close()
        meeting.connection.close()


def test_after_the_deadline_a_side_gets_an_error(rendezvous: Rendezvous) -> None:
    """A side that is too late must not continue, since the other side has stopped waiting."""
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(call, HIGH, rendezvous.address, soon())
        host = PairStore(rendezvous.meet(LOW, soon()).connection)
        caller = PairStore(calling.result(60).connection)
        caller.set("a", b"1")
        assert host.get("a") == b"1"
        with host.expiring(soon(-0.1)), pytest.raises(TimeoutError, match="a arrived too late"):
            host.get("a")
        assert host.get("a") == b"1"
        caller.close()
        host.close()


def meet(rendezvous: Rendezvous, within_s: float = 5.0) -> None:
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(call, HIGH, rendezvous.address, soon(within_s))
        rendezvous.meet(LOW, soon(within_s)).connection.close()
        calling.result(60).connection.close()


def is_hung_up_on(stranger: socket.socket) -> bool:
    """Blocks until the other end closes the connection."""
    try:
        while stranger.recv(4096):  # the reason for the refusal
            pass
        return True
    except ConnectionResetError:  # it had sent more than the other end read
        return True


def park(connection: socket.socket, line: bytes) -> None:
    """Completes the handshake of a caller that no side expects yet."""
    connection.sendall(line)
    read_line(connection, soon())
    connection.sendall(proof_line(""))


def hello(**changed: object) -> bytes:
    return json.dumps(asdict(HIGH) | {"nonce": ""} | changed).encode() + b"\n"


NOISE = [
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    b"{}\n",
    b"[1]\n",
    b"x" * 10_000,
    b"\xff\xfe\n",
    b"\n",
    b"[" * 4000 + b"\n",  # nested deeper than the parser allows
    b'{"a":' * 800 + b"\n",
    hello(incarnation=math.inf),
    hello(incarnation=-math.inf),
    hello(incarnation=math.nan),
    hello(incarnation=True),
    hello(incarnation="3"),
    hello(incarnation=-1),
    hello(incarnation=1 << 63),
    hello(incarnation=10**4000)[:4000] + b"\n",
    hello(worker_id=""),
    hello(worker_id=[["w2"]]),
    hello(terms=None),
    hello(terms={"version": 1}),
    hello(terms=asdict(TERMS) | {"urgent_frame_bytes": -1}),
    hello(terms=asdict(TERMS) | {"bulk_frame_bytes": 1e300}),
    hello(to=3),
    hello(lane=7),
    hello(terms=asdict(TERMS) | {"transport": 1}),
    hello() + b"more than is asked for",
    hello() + hello(),
    hello(to="another") + b'{"proof": ""}\n',
]


@pytest.mark.parametrize("noise", NOISE, ids=range(len(NOISE)))
def test_strangers_do_not_stop_a_meeting(rendezvous: Rendezvous, noise: bytes) -> None:
    with dial(rendezvous) as stranger:
        stranger.sendall(noise)
        if noise:
            assert is_hung_up_on(stranger)
            assert rendezvous.refused.total() == 1
        meet(rendezvous)


def test_a_flood_of_noise_does_not_change_the_lobby(rendezvous: Rendezvous) -> None:
    random = Random(3)
    for _ in range(500):
        with dial(rendezvous) as stranger, suppress(OSError):
            honest = bytearray(hello())
            for _ in range(random.randint(1, 8)):
                honest[random.randrange(len(honest) - 1)] = random.randrange(256)
            stranger.sendall(honest if random.random() < 0.8 else random.randbytes(random.randint(1, 5000)))
    meet(rendezvous)


def test_a_slow_caller_delays_no_other_and_is_soon_dropped(
    rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_HELLO_TIMEOUT_S", 0.6)
    with ExitStack() as stack:
        drips = [stack.enter_context(dial(rendezvous)) for _ in range(8)]
        began_s = time.monotonic()
        for letter in hello()[:4]:
            for drip in drips:
                drip.send(bytes([letter]))
            time.sleep(0.05)
        meet(rendezvous)  # while all of them are in the middle of their handshake
        for drip in drips:
            assert is_hung_up_on(drip)
        assert 0.5 < time.monotonic() - began_s < 30
    assert rendezvous.refused == {"too slow": len(drips)}


def test_half_open_connections_use_a_limited_number_of_slots(
    rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_HELLO_TIMEOUT_S", 60.0)
    with ExitStack() as stack:
        half_open = [stack.enter_context(dial(rendezvous)) for _ in range(module._MAX_STRANGERS + 10)]
        for first in half_open[:10]:
            assert is_hung_up_on(first)
        meet(rendezvous)


def test_unexpected_callers_use_a_limited_number_of_slots(rendezvous: Rendezvous) -> None:
    with ExitStack() as stack:
        for number in range(module._MAX_PARKED + 20):
            park(stack.enter_context(dial(rendezvous)), hello(worker_id=f"stranger-{number}"))
        meet(rendezvous)
        assert len(rendezvous._parked) <= module._MAX_PARKED


def test_a_temporary_lack_of_file_descriptors_ends_nothing(rendezvous: Rendezvous) -> None:
    host, port = rendezvous.address.split(":")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as stranger:
        os.close(none_from := os.dup(0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (none_from, hard))
        try:
            stranger.connect((host, int(port)))
            time.sleep(0.2)  # no descriptor is left to accept it
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        meet(rendezvous)


@pytest.fixture
def guarded() -> Iterator[Rendezvous]:
    rendezvous = Rendezvous("127.0.0.1", "w1", SECRET)
    yield rendezvous
    rendezvous.close()


def introduce(rendezvous: Rendezvous, host_secret_of: bytes | None, mine: Hello = HIGH) -> Meeting:
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(call, mine, rendezvous.address, soon(), host_secret_of)
        try:
            rendezvous.meet(LOW, soon(1.0)).connection.close()
        except DeadlineExceeded:
            calling.result(60)
            raise
        return calling.result(60)


def test_two_sides_with_the_secret_meet(guarded: Rendezvous) -> None:
    meeting = introduce(guarded, SECRET)
    assert meeting.peer == LOW
    meeting.connection.close()
    assert not guarded.refused


@pytest.mark.parametrize(("secret", "why"), [(None, "no proof"), (b"that of another cluster", "wrong proof")])
def test_a_caller_without_the_secret_is_refused_with_the_reason(
    guarded: Rendezvous, secret: bytes | None, why: str
) -> None:
    with pytest.raises(PeerViolation, match=f"w1: refuses this worker's link: {why}"):
        introduce(guarded, secret)
    assert guarded.refused == {why: 1}
    assert not guarded._parked


def test_a_host_without_the_secret_gets_no_link(rendezvous: Rendezvous) -> None:
    with pytest.raises(PeerViolation, match="w1: does not prove that it has this cluster's secret"):
        introduce(rendezvous, SECRET)


def test_an_overheard_handshake_is_useless(guarded: Rendezvous) -> None:
    """An attacker replays everything that it has overheard from a caller with the secret."""
    with dial(guarded) as caller, dial(guarded) as thief:
        line = hello_line(HIGH)
        caller.sendall(line)
        proof = proof_line(proof_of(SECRET, "caller", line, read_line(caller, soon())))
        caller.sendall(proof)
        thief.sendall(line)
        read_line(thief, soon())
        thief.sendall(proof)
        assert b"wrong proof" in read_line(thief, soon())
    assert guarded.refused == {"wrong proof": 1}


def test_a_proof_is_bound_to_message_and_sender() -> None:
    hello, challenge = hello_line(HIGH), challenge_line()
    proof = proof_of(SECRET, "caller", hello, challenge)
    assert is_proof(proof, SECRET, "caller", hello, challenge)
    assert not is_proof(proof, SECRET, "host", hello, challenge)
    assert not is_proof(proof, SECRET, "caller", hello + challenge)
    assert not is_proof(proof, SECRET, "caller", hello, challenge_line())
    for other in (
        replace(HIGH, lane="bulk"),
        replace(HIGH, incarnation=9),
        replace(HIGH, worker_id="w3"),
        replace(HIGH, to="w0"),
        replace(HIGH, terms=TERMS),
    ):
        line = json.dumps(json.loads(hello) | asdict(other)).encode() + b"\n"
        assert parse_hello(line) == other
        assert not is_proof(proof, SECRET, "caller", line, challenge)
    assert not is_proof("\N{SNOWMAN}", SECRET, "caller", hello, challenge)


def test_a_host_that_answers_too_slowly_is_abandoned_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            connection, _ = server.accept()
            with connection, suppress(OSError):
                connection.sendall(challenge_line())
                for letter in json.dumps(asdict(LOW)).encode():
                    connection.send(bytes([letter]))
                    time.sleep(0.05)

        with ThreadPoolExecutor(1) as pool:
            dripping = pool.submit(drip)
            began_s = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                call(HIGH, f"127.0.0.1:{server.getsockname()[1]}", soon(0.4))
            assert time.monotonic() - began_s < 5.0
            dripping.result(60)


def test_a_caller_that_stopped_waiting_is_skipped(rendezvous: Rendezvous) -> None:
    with pytest.raises(DeadlineExceeded):
        call(HIGH, rendezvous.address, soon(0.1))
    with ThreadPoolExecutor(1) as pool:
        hosting = pool.submit(rendezvous.meet, LOW, soon())
        time.sleep(0.1)
        call(HIGH, rendezvous.address, soon()).connection.close()
        hosting.result(60).connection.close()


def test_another_lane_is_another_meeting(rendezvous: Rendezvous) -> None:
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(call, replace(HIGH, lane="bulk"), rendezvous.address, soon(0.5))
        with pytest.raises(DeadlineExceeded, match="w2 did not connect"):
            rendezvous.meet(LOW, soon(0.3))
        with pytest.raises(DeadlineExceeded):
            calling.result(60)


def test_another_version_is_refused_by_both(rendezvous: Rendezvous) -> None:
    newer = replace(HIGH, terms=replace(TERMS, version=2))
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(call, newer, rendezvous.address, soon())
        with pytest.raises(DeadlineExceeded):
            rendezvous.meet(LOW, soon(0.5))
        with pytest.raises(PeerViolation, match="version 1, this worker speaks 2"):
            calling.result(60)


def test_links_over_another_transport_are_refused(rendezvous: Rendezvous) -> None:
    other = replace(HIGH, terms=replace(TERMS, transport="nccl"))
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(call, other, rendezvous.address, soon())
        with pytest.raises(DeadlineExceeded):
            rendezvous.meet(LOW, soon(0.5))
        with pytest.raises(PeerViolation, match="its --transport is tcp, but this worker's is nccl"):
            calling.result(60)


def test_bad_addresses_are_named() -> None:
    with pytest.raises(ConfigError, match="host:port"):
        call(HIGH, "nowhere", soon())
    with pytest.raises(Unavailable, match="data plane at"):
        call(HIGH, "127.0.0.1:1", soon(1))
    with pytest.raises(ConfigError, match="advertise_host"):
        resolve_host("no such host")
    assert resolve_host("127.0.0.1") == "127.0.0.1"
    assert resolve_host(None).count(".") == 3
