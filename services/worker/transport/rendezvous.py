"""How two workers meet to make a link: one TCP connection per attempt, to the worker with the lower id.

Each side says who it is and what it can take; then the connection serves as the store through which the process
groups exchange addresses. An attempt that is given up takes its keys with it. torch's own TCPStore is not used: every
client of it asks the name service for the name behind the address, which takes five seconds whenever an answer is
lost.

A stranger may reach this port. Whatever it says, or does not say, costs one of a bounded number of places for a
bounded time, and nobody else waits for it.
"""

import json
import selectors
import socket
import struct
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from threading import Condition, Lock, Thread
from typing import cast

from torch.distributed import Store

from ballast.common.errors import ConfigError, DeadlineExceeded, PeerViolation, Unavailable
from ballast.service.logs import get_logger

_HELLO_TIMEOUT_S = 5.0  # from the connection to the end of its hello
_ANSWER_TIMEOUT_S = 5.0  # for a caller that is met to say that it is still there
_STORE_TIMEOUT_S = 5.0  # for what is asked for when the link has been opened
_MAX_HELLO_BYTES = 4096
_MAX_STORE_BYTES = 1 << 20  # of all that the other side sets
_MAX_STRANGERS = 64  # connections that have not said their hello; the oldest goes for another one
_MAX_PARKED = 256  # callers nobody waits for yet; the oldest goes for another one
_PAUSE_S = 0.05  # when no connection can be accepted
_LOOK_S = 0.02  # between two looks whether a peer that does not come has taken another way
_ENTRY = struct.Struct("<II")  # bytes of key, bytes of value


@dataclass(frozen=True, slots=True)
class Terms:
    """What each side must know of the other before the first frame."""

    version: int
    urgent_frame_bytes: int  # the largest frame that side has receives posted for
    bulk_frame_bytes: int
    max_message_bytes: int
    max_transfer_bytes: int


@dataclass(frozen=True, slots=True)
class Hello:
    worker_id: str
    epoch: int
    terms: Terms


class WaitsElsewhere(Exception):
    """A peer that does not come to the lobby: it wants to use a link that is there already."""


class PairStore(Store):
    """A store of two: what one sets, the other gets. `set` never waits for `get`."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # many small entries, each side in turn
        self._connection = connection
        self._deadline_s: float | None = None
        self._values: dict[str, bytes] = {}
        self._left_bytes = _MAX_STORE_BYTES
        self._writing = Lock()
        self._reading = Lock()

    def set(self, key: str, value: str | bytes) -> None:
        name, data = key.encode(), value.encode() if isinstance(value, str) else bytes(value)
        with self._writing:
            self._values[key] = data
            self._connection.sendall(_ENTRY.pack(len(name), len(data)) + name + data)

    @contextmanager
    def expiring(self, deadline_s: float) -> Generator[None]:
        """While inside, nothing is to be had after the deadline, even if it is there."""
        self._deadline_s = deadline_s
        try:
            yield
        finally:
            self._deadline_s = None

    def get(self, key: str) -> bytes:
        """Raises OSError when the other side does not set it before the deadline, or is gone."""
        with self._reading:
            deadline_s = self._deadline_s or time.monotonic() + _STORE_TIMEOUT_S
            while key not in self._values:
                name_bytes, value_bytes = _ENTRY.unpack(_read(self._connection, _ENTRY.size, deadline_s))
                self._left_bytes -= _ENTRY.size + name_bytes + value_bytes
                if self._left_bytes < 0:
                    raise OSError(f"the other side sets more than {_MAX_STORE_BYTES} bytes")
                entry = _read(self._connection, name_bytes + value_bytes, deadline_s)
                self._values[entry[:name_bytes].decode(errors="replace")] = entry[name_bytes:]
            if self._deadline_s is not None and time.monotonic() > self._deadline_s:
                raise TimeoutError(f"{key} has come too late")
            return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def close(self) -> None:
        self._connection.close()


@dataclass(frozen=True, slots=True)
class Meeting:
    peer: Hello
    store: PairStore


@dataclass(slots=True)
class _Stranger:
    """A connection that has not said its hello."""

    connection: socket.socket
    until_s: float
    said: bytes = b""


@dataclass(frozen=True, slots=True)
class _Caller:
    hello: Hello
    connection: socket.socket


class Lobby:
    """Where peers with higher ids come to. A caller nobody waits for yet is parked.

    One thread listens to all who have not said who they are, so that none of them can keep it.
    """

    def __init__(self, host: str, worker_id: str, called: Callable[[str, int], None] | None = None) -> None:
        """`called` hears of every caller that waits, by id and epoch; on the lobby's thread."""
        self._called = called
        self._listener = socket.create_server((host, 0))
        self._listener.setblocking(False)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._changed = Condition()
        self._parked: dict[tuple[str, int], _Caller] = {}  # by peer and epoch; the latest of each
        self._closed = False
        self.refused_total = 0  # connections that said nothing of ours, or not in time
        self._strangers: dict[int, _Stranger] = {}  # by file descriptor, the oldest first; of the lobby's thread
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = Thread(target=self._run, name=f"links-lobby-{worker_id}", daemon=True)
        self._thread.start()

    def meet(
        self, mine: Hello, peer_id: str, deadline_s: float, elsewhere: Callable[[], bool] = lambda: False
    ) -> Meeting:
        """Wait for that peer to call for the same epoch.

        Raises:
            WaitsElsewhere: it has not called, and `elsewhere` says that it will not.
            DeadlineExceeded: it did not come.
            PeerViolation: it speaks another version.
        """
        while (caller := self._take((peer_id, mine.epoch), deadline_s, elsewhere)) is not None:
            try:
                within_s = min(deadline_s, time.monotonic() + _ANSWER_TIMEOUT_S)
                caller.connection.settimeout(_left_s(within_s))
                _say(caller.connection, mine)
                if _read(caller.connection, 1, within_s) == b"!":
                    _check_version(mine, caller.hello)
                    return Meeting(caller.hello, PairStore(caller.connection))
            except OSError:
                pass  # it had given up before we came; it may call again
            except PeerViolation:
                caller.connection.close()
                raise
            caller.connection.close()
        raise DeadlineExceeded(f"link for epoch {mine.epoch}: {peer_id} did not come")

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

    def _take(self, key: tuple[str, int], deadline_s: float, elsewhere: Callable[[], bool]) -> _Caller | None:
        with self._changed:
            while not (self._closed or key in self._parked or (left_s := deadline_s - time.monotonic()) <= 0):
                if elsewhere():
                    raise WaitsElsewhere
                self._changed.wait(min(left_s, _LOOK_S))
            return self._parked.pop(key, None)

    # ------------------------------------------------------------ the lobby's thread

    def _run(self) -> None:
        while not self._closed:
            try:
                self._turn()
            except Exception:  # noqa: BLE001 no stranger ends this thread, whatever it has found
                get_logger().exception("a caller of the data plane could not be greeted")
                time.sleep(_PAUSE_S)
        for stranger in list(self._strangers.values()):
            self._drop(stranger)
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
            self._refuse(stranger)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            if not self._closed:  # it has gone again, or there are no more file descriptors
                self._refuse_oldest()
                time.sleep(_PAUSE_S)
            return
        connection.setblocking(False)
        if len(self._strangers) >= _MAX_STRANGERS:
            self._refuse_oldest()
        self._strangers[connection.fileno()] = _Stranger(connection, time.monotonic() + _HELLO_TIMEOUT_S)
        self._selector.register(connection, selectors.EVENT_READ)

    def _listen_to(self, stranger: _Stranger) -> None:
        """A caller says one line, and nothing more before it is answered."""
        try:
            part = stranger.connection.recv(_MAX_HELLO_BYTES - len(stranger.said))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        stranger.said += part
        if not part or (len(stranger.said) >= _MAX_HELLO_BYTES and not stranger.said.endswith(b"\n")):
            self._refuse(stranger)
        elif stranger.said.endswith(b"\n"):
            try:
                hello = parse_hello(stranger.said)
            except ValueError:  # a port scanner, or nothing of ours
                self._refuse(stranger)
            else:
                self._park(stranger, hello)

    def _park(self, stranger: _Stranger, hello: Hello) -> None:
        del self._strangers[stranger.connection.fileno()]
        self._selector.unregister(stranger.connection)
        key, caller = (hello.worker_id, hello.epoch), _Caller(hello, stranger.connection)
        replaced = list[_Caller]()
        with self._changed:
            if (before := self._parked.pop(key, None)) is not None:
                replaced.append(before)
            elif len(self._parked) >= _MAX_PARKED:
                replaced.append(self._parked.pop(next(iter(self._parked))))
            if is_closed := self._closed:
                replaced.append(caller)
            else:
                self._parked[key] = caller
            self._changed.notify_all()
        for other in replaced:
            other.connection.close()
        if not is_closed and self._called is not None:
            self._called(*key)

    def _refuse_oldest(self) -> None:
        if self._strangers:
            self._refuse(next(iter(self._strangers.values())))

    def _refuse(self, stranger: _Stranger) -> None:
        self.refused_total += 1
        self._drop(stranger)

    def _drop(self, stranger: _Stranger) -> None:
        del self._strangers[stranger.connection.fileno()]
        self._selector.unregister(stranger.connection)
        stranger.connection.close()


def call(mine: Hello, peer_id: str, address: str, deadline_s: float) -> Meeting:
    """Go to the lobby of a peer with a lower id.

    Raises:
        Unavailable: nobody listens there, or it hung up.
        DeadlineExceeded: it does not want a link for this epoch in time.
        PeerViolation: it speaks another version.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError("store_address", f"of worker {peer_id} must be host:port, got {address!r}")
    left_s = max(deadline_s - time.monotonic(), 0.001)
    try:
        connection = socket.create_connection((host, int(port)), timeout=left_s)
    except OSError as error:
        raise Unavailable(peer_id, f"data plane at {address}: {error}") from error
    try:
        _say(connection, mine)
        theirs = parse_hello(_hear(connection, deadline_s))
        _check_version(mine, theirs)
        connection.sendall(b"!")
    except TimeoutError:
        connection.close()
        raise DeadlineExceeded(f"link for epoch {mine.epoch}: {peer_id} did not come") from None
    except (OSError, ValueError) as error:
        connection.close()
        raise Unavailable(peer_id, f"data plane at {address}: {error}") from error
    except PeerViolation:
        connection.close()
        raise
    return Meeting(theirs, PairStore(connection))


def resolve_host(advertise_host: str | None) -> str:
    """An address of this machine. Without advice: the one its route to the outside leaves from, else loopback."""
    if advertise_host is None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(("192.0.2.1", 9))  # sends nothing; only asks the routing table
                return str(probe.getsockname()[0])
            except OSError:
                return "127.0.0.1"
    try:
        return str(socket.getaddrinfo(advertise_host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError("advertise_host", f"{advertise_host!r} cannot be resolved: {error}") from error


def _say(connection: socket.socket, hello: Hello) -> None:
    connection.sendall(json.dumps(asdict(hello)).encode() + b"\n")


def _hear(connection: socket.socket, deadline_s: float) -> bytes:
    """Reads a line and nothing beyond. Not byte by byte: after each the GIL would have to be had from the engine."""
    line = b""
    while not line.endswith(b"\n"):
        connection.settimeout(_left_s(deadline_s))
        there = connection.recv(_MAX_HELLO_BYTES - len(line), socket.MSG_PEEK)
        if not there:  # or it says too much
            raise ConnectionResetError("it hung up")
        line += connection.recv(there.find(b"\n") + 1 or len(there))
    return line


def parse_hello(line: bytes) -> Hello:
    """
    Raises:
        ValueError: this is no hello.
    """
    try:
        said = json.loads(line)
    except RecursionError as error:
        raise ValueError("brackets without end") from error
    if not isinstance(said, dict):
        raise ValueError("no object")
    said = cast(dict[str, object], said)
    worker_id, terms = said.get("worker_id"), said.get("terms")
    if not isinstance(worker_id, str) or not worker_id or not isinstance(terms, dict):
        raise ValueError("no worker id, or no terms")
    terms = cast(dict[str, object], terms)
    numbers = {field.name: _int(terms, field.name, least=1) for field in fields(Terms)}
    return Hello(worker_id, _int(said, "epoch", least=0), Terms(**numbers))


def _int(said: dict[str, object], name: str, *, least: int) -> int:
    value = said.get(name)
    if type(value) is not int or not least <= value < 1 << 63:  # a bool is an int to isinstance
        raise ValueError(f"{name} must be a whole number of at least {least}")
    return value


def _check_version(mine: Hello, theirs: Hello) -> None:
    if theirs.terms.version != mine.terms.version:
        why = f"speaks data plane version {theirs.terms.version}, we speak {mine.terms.version}"
        raise PeerViolation(theirs.worker_id, why)


def _read(connection: socket.socket, size: int, deadline_s: float) -> bytes:
    data = b""
    while len(data) < size:
        connection.settimeout(_left_s(deadline_s))
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionResetError("the other side hung up")
        data += part
    return data


def _left_s(deadline_s: float) -> float:
    """For a socket, to which zero would mean not to wait at all."""
    return max(deadline_s - time.monotonic(), 0.001)
