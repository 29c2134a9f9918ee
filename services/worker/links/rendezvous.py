"""Connects two workers: the one with the higher id connects to the other one's rendezvous, once per lane.

Unauthenticated callers may reach this port. Each takes one of a limited number of places for a limited time, and delays
no other caller.
"""

import contextlib
import selectors
import socket
import time
from collections import Counter
from dataclasses import dataclass
from threading import Condition, Thread

from ballast.common.addresses import is_address, is_ipv6, join_address, split_address
from ballast.common.errors import ConfigError, DeadlineExceeded, PeerViolation, Unavailable
from ballast.service.logs import get_logger
from services.worker.links.handshake import (
    MAX_LINE_BYTES,
    Hello,
    challenge_line,
    check_terms,
    hello_line,
    is_proof,
    left_s,
    parse_hello,
    parse_line,
    parse_proof,
    proof_line,
    proof_of,
    read_exactly,
    read_line,
    refusal_line,
)

_HELLO_TIMEOUT_S = 5.0  # maximum time from accepting a connection to the end of its proof
_ANSWER_TIMEOUT_S = 5.0  # maximum time for a caller to confirm that it is still waiting
_MAX_STRANGERS = 64  # maximum unauthenticated connections; a new one replaces the oldest
_MAX_PARKED = 256  # maximum authenticated callers not awaited here yet; a new one replaces the oldest
_PAUSE_S = 0.05  # pause after a failure to accept a connection


@dataclass(frozen=True, slots=True)
class Meeting:
    peer: Hello
    connection: socket.socket


@dataclass(slots=True)
class _Stranger:
    """An unauthenticated connection."""

    connection: socket.socket
    until_s: float
    line: bytes = b""  # received so far, without its end
    hello: Hello | None = None
    said: tuple[bytes, ...] = ()  # lines sent by both sides so far


@dataclass(frozen=True, slots=True)
class _RendezvousCaller:
    hello: Hello
    said: tuple[bytes, ...]
    connection: socket.socket


class Rendezvous:
    """Accepts peers with higher ids. A caller that is not awaited yet is parked.

    One thread serves all unauthenticated connections, without blocking on any of them.
    """

    def __init__(
        self,
        host: str,
        worker_id: str,
        secret: bytes | None = None,
        port: int = 0,
    ) -> None:
        self._worker_id = worker_id
        self._secret = secret
        try:
            self._listener = socket.create_server(
                (host, port), family=socket.AF_INET6 if is_ipv6(host) else socket.AF_INET
            )
        except OSError as error:
            raise ConfigError("worker.data_port", f"cannot listen on {host}:{port}: {error.strerror}") from error
        self._listener.setblocking(False)
        self.address = join_address(host, self._listener.getsockname()[1])
        self._changed = Condition()
        self._parked: dict[tuple[str, str], _RendezvousCaller] = {}  # by peer and lane; only the latest of each
        self._closed = False
        self.refused: Counter[str] = Counter()  # connections, by reason
        self._strangers: dict[int, _Stranger] = {}  # by file descriptor, oldest first; only for the rendezvous's thread
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = Thread(target=self._run, name=f"links-rendezvous-{worker_id}", daemon=True)
        self._thread.start()

    def meet(self, mine: Hello, deadline_s: float) -> Meeting:
        """Wait for the peer to which `mine` is addressed, on the same lane.

        Raises:
            DeadlineExceeded: the peer did not call in time.
            PeerViolation: the peer has another version or transport.
        """
        while (caller := self._take((mine.to, mine.lane), deadline_s)) is not None:
            try:
                within_s = min(deadline_s, time.monotonic() + _ANSWER_TIMEOUT_S)
                caller.connection.settimeout(left_s(within_s))
                line = hello_line(mine)
                proof = proof_of(self._secret, "host", *caller.said, line)
                caller.connection.sendall(line + proof_line(proof))
                if read_exactly(caller.connection, 1, within_s) == b"!":
                    check_terms(mine, caller.hello)
                    return Meeting(caller.hello, caller.connection)
            except OSError:
                pass  # the caller has timed out and may call again
            except PeerViolation:
                caller.connection.close()
                raise
            caller.connection.close()
        raise DeadlineExceeded(f"{mine.to} did not connect")

    def has_called(self, peer_id: str) -> bool:
        """True if this peer's call is parked here."""
        with self._changed:
            return any(who == peer_id for who, _ in self._parked)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            parked = list(self._parked.values())
            self._parked.clear()
            self._changed.notify_all()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(_HELLO_TIMEOUT_S)
        self._listener.close()
        for caller in parked:
            caller.connection.close()

    def _take(self, key: tuple[str, str], deadline_s: float) -> _RendezvousCaller | None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or key in self._parked, timeout=max(deadline_s - time.monotonic(), 0.0)
            )
            return self._parked.pop(key, None)

    # ------------------------------------------------------------ thread of the rendezvous

    def _run(self) -> None:
        while not self._closed:
            try:
                self._turn()
            except Exception:  # noqa: BLE001 no caller may end this thread
                get_logger().exception("a caller of the data plane could not be greeted")
                time.sleep(_PAUSE_S)
        for stranger in list(self._strangers.values()):
            self._forget(stranger)
            stranger.connection.close()
        self._selector.close()

    def _turn(self) -> None:
        until_s = min((s.until_s for s in self._strangers.values()), default=None)
        for key, _ in self._selector.select(None if until_s is None else max(until_s - time.monotonic(), 0.0)):
            if key.fileobj is self._listener:
                self._accept()
            elif (stranger := self._strangers.get(key.fd)) is not None:
                self._listen_to(stranger)
        now_s = time.monotonic()
        for stranger in [s for s in self._strangers.values() if s.until_s <= now_s]:
            self._refuse(stranger, "too slow")

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            if not self._closed:  # the caller disconnected, or there are no file descriptors left
                self._refuse_oldest()
                time.sleep(_PAUSE_S)
            return
        connection.setblocking(False)
        if len(self._strangers) >= _MAX_STRANGERS:
            self._refuse_oldest()
        self._strangers[connection.fileno()] = _Stranger(connection, time.monotonic() + _HELLO_TIMEOUT_S)
        self._selector.register(connection, selectors.EVENT_READ)

    def _listen_to(self, stranger: _Stranger) -> None:
        """Read from a caller, which must send one line and then wait for the answer."""
        try:
            part = stranger.connection.recv(MAX_LINE_BYTES - len(stranger.line))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        stranger.line += part
        if stranger.line.endswith(b"\n"):
            try:
                self._take_line(stranger)
            except (ValueError, OSError):  # a port scanner, or a disconnect
                self._refuse(stranger, "no handshake")
        elif not part or len(stranger.line) >= MAX_LINE_BYTES:
            self._refuse(stranger, "no handshake")

    def _take_line(self, stranger: _Stranger) -> None:
        line, stranger.line = stranger.line, b""
        if stranger.hello is None:
            stranger.hello = parse_hello(line)
            challenge = challenge_line()
            stranger.said = (line, challenge)
            stranger.connection.send(challenge)
        elif stranger.hello.to != self._worker_id:
            self._refuse(stranger, "meant for another worker")
        elif not (proof := parse_proof(line)) and self._secret is not None:
            self._refuse(stranger, "no proof")
        elif not is_proof(proof, self._secret, "caller", *stranger.said):
            self._refuse(stranger, "wrong proof")
        else:
            self._park(stranger, _RendezvousCaller(stranger.hello, (*stranger.said, line), stranger.connection))

    def _park(self, stranger: _Stranger, caller: _RendezvousCaller) -> None:
        self._forget(stranger)
        key = (caller.hello.worker_id, caller.hello.lane)
        replaced = list[_RendezvousCaller]()
        with self._changed:
            if (before := self._parked.pop(key, None)) is not None:
                replaced.append(before)
            elif len(self._parked) >= _MAX_PARKED:
                replaced.append(self._parked.pop(next(iter(self._parked))))
            if self._closed:
                replaced.append(caller)
            else:
                self._parked[key] = caller
            self._changed.notify_all()
        for other in replaced:
            other.connection.close()

    def _refuse_oldest(self) -> None:
        if self._strangers:
            self._refuse(next(iter(self._strangers.values())), "too many at once")

    def _refuse(self, stranger: _Stranger, why: str) -> None:
        """Refuse a caller. Refusals are counted by reason, and each reason is logged once."""
        self.refused[why] += 1
        if self.refused[why] == 1:
            said_by = None if stranger.hello is None else stranger.hello.worker_id[:64]
            get_logger().warning("a caller of the data plane is refused", why=why, says_it_is=said_by)
        self._forget(stranger)
        with contextlib.suppress(OSError):  # disconnected, or not reading
            stranger.connection.send(refusal_line(why))
        stranger.connection.close()

    def _forget(self, stranger: _Stranger) -> None:
        del self._strangers[stranger.connection.fileno()]
        self._selector.unregister(stranger.connection)


def call(mine: Hello, address: str, deadline_s: float, secret: bytes | None = None) -> Meeting:
    """Connect to the rendezvous of the peer with a lower id to which `mine` is addressed.

    Raises:
        Unavailable: no peer listens there, or it disconnected.
        DeadlineExceeded: the peer did not request the link in time.
        PeerViolation: the peer has another version, refuses this caller, or does not belong to this cluster.
    """
    peer_id = mine.to
    if not is_address(address):
        raise ConfigError("store_address", f"of worker {peer_id} must be host:port, got {address!r}")
    try:
        connection = socket.create_connection(split_address(address), timeout=left_s(deadline_s))
    except OSError as error:
        raise Unavailable(peer_id, f"data plane at {address}: {error}") from error
    try:
        theirs = _introduce(connection, mine, deadline_s, secret)
        connection.sendall(b"!")
    except TimeoutError:
        connection.close()
        raise DeadlineExceeded(f"{peer_id} did not connect") from None
    except (OSError, ValueError) as error:
        connection.close()
        raise Unavailable(peer_id, f"data plane at {address}: {error}") from error
    except PeerViolation:
        connection.close()
        raise
    return Meeting(theirs, connection)


def _introduce(connection: socket.socket, mine: Hello, deadline_s: float, secret: bytes | None) -> Hello:
    peer_id = mine.to
    hello = hello_line(mine)
    connection.sendall(hello)
    challenge = _heard(connection, peer_id, deadline_s)
    proof = proof_line(proof_of(secret, "caller", hello, challenge))
    connection.sendall(proof)
    answer = _heard(connection, peer_id, deadline_s)
    theirs = parse_hello(answer)
    if theirs.worker_id != peer_id:
        raise PeerViolation(peer_id, f"another worker, {theirs.worker_id}, answers at its address")
    if not is_proof(parse_proof(read_line(connection, deadline_s)), secret, "host", hello, challenge, proof, answer):
        raise PeerViolation(peer_id, "does not prove that it has this cluster's secret")
    check_terms(mine, theirs)
    return theirs


def _heard(connection: socket.socket, peer_id: str, deadline_s: float) -> bytes:
    line = read_line(connection, deadline_s)
    if (why := parse_line(line).get("refused")) is not None:
        raise PeerViolation(peer_id, f"refuses this worker's link: {str(why)[:200]}")
    return line


def resolve_host(advertise_host: str | None) -> str:
    """Return an address of this machine: by default the source of its route to the outside, or else loopback. IPv4 is
    preferred.
    """
    if advertise_host is None:
        for outside in ("192.0.2.1", "2001:db8::1"):
            with (
                contextlib.suppress(OSError),
                socket.socket(socket.AF_INET6 if is_ipv6(outside) else socket.AF_INET, socket.SOCK_DGRAM) as probe,
            ):
                probe.connect((outside, 9))  # sends nothing; only asks the routing table
                return str(probe.getsockname()[0])
        return "127.0.0.1"
    try:
        found = socket.getaddrinfo(advertise_host.strip("[]"), None, type=socket.SOCK_STREAM)
        return str(min(found, key=lambda each: each[0] is not socket.AF_INET)[4][0])
    except OSError as error:
        raise ConfigError("advertise_host", f"{advertise_host!r} cannot be resolved: {error}") from error
