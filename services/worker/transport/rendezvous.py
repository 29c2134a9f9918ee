"""How two workers meet to make a link: one TCP connection per attempt, to the worker with the lower id.

Each side says who it is and what it can take; then the connection serves as the store through which the process
groups exchange addresses. An attempt that is given up takes its keys with it. torch's own TCPStore is not used: every
client of it asks the name service for the name behind the address, which takes five seconds whenever an answer is
lost.
"""

import json
import socket
import struct
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from socket import SocketIO
from threading import Condition, Lock, Thread
from typing import Any

from torch.distributed import Store

from ballast.common.errors import ConfigError, DeadlineExceeded, PeerViolation, Unavailable

_HELLO_TIMEOUT_S = 0.5  # callers behind a silent one wait so long
_STORE_TIMEOUT_S = 5.0  # for what is asked for when the link has been opened
_MAX_HELLO_BYTES = 4096
_MAX_ENTRY_BYTES = 1 << 20
_MAX_PARKED = 256
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

    def __init__(self, connection: socket.socket, reader: SocketIO) -> None:
        super().__init__()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # many small entries, each side in turn
        self._connection = connection
        self._reader = reader
        self._deadline_s: float | None = None
        self._values: dict[str, bytes] = {}
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
                self._connection.settimeout(max(deadline_s - time.monotonic(), 0.001))
                name_bytes, value_bytes = _ENTRY.unpack(_read(self._reader, _ENTRY.size))
                if max(name_bytes, value_bytes) > _MAX_ENTRY_BYTES:
                    raise OSError(f"store entry of {name_bytes} + {value_bytes} bytes")
                entry = _read(self._reader, name_bytes + value_bytes)
                self._values[entry[:name_bytes].decode()] = entry[name_bytes:]
            if self._deadline_s is not None and time.monotonic() > self._deadline_s:
                raise TimeoutError(f"{key} has come too late")
            return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def close(self) -> None:
        self._reader.close()
        self._connection.close()


@dataclass(frozen=True, slots=True)
class Meeting:
    peer: Hello
    store: PairStore


@dataclass(frozen=True, slots=True)
class _Caller:
    hello: Hello
    connection: socket.socket
    reader: SocketIO

    def close(self) -> None:
        self.reader.close()
        self.connection.close()


class Lobby:
    """Where peers with higher ids come to. A caller nobody waits for yet is parked."""

    def __init__(self, host: str, worker_id: str, called: Callable[[str, int], None] | None = None) -> None:
        """`called` hears of every caller that waits, by id and epoch; on the lobby's thread."""
        self._called = called
        self._listener = socket.create_server((host, 0))
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._changed = Condition()
        self._parked: dict[tuple[str, int], _Caller] = {}  # by peer and epoch; the latest of each
        self._closed = False
        self._thread = Thread(target=self._accept, name=f"links-lobby-{worker_id}", daemon=True)
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
                caller.connection.settimeout(max(deadline_s - time.monotonic(), 0.001))
                _say(caller.connection, mine)
                if caller.reader.read(1) == b"!":
                    _check_version(mine, caller.hello)
                    return Meeting(caller.hello, PairStore(caller.connection, caller.reader))
            except OSError:
                pass  # it had given up before we came; it may call again
            except PeerViolation:
                caller.close()
                raise
            caller.close()
        raise DeadlineExceeded(f"link for epoch {mine.epoch}: {peer_id} did not come")

    def close(self) -> None:
        with self._changed:
            self._closed = True
            parked = list(self._parked.values())
            self._parked.clear()
            self._changed.notify_all()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(2 * _HELLO_TIMEOUT_S)
        self._listener.close()
        for caller in parked:
            caller.close()

    def _take(self, key: tuple[str, int], deadline_s: float, elsewhere: Callable[[], bool]) -> _Caller | None:
        with self._changed:
            while not (self._closed or key in self._parked or (left_s := deadline_s - time.monotonic()) <= 0):
                if elsewhere():
                    raise WaitsElsewhere
                self._changed.wait(min(left_s, _LOOK_S))
            return self._parked.pop(key, None)

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._greet(connection)

    def _greet(self, connection: socket.socket) -> None:
        connection.settimeout(_HELLO_TIMEOUT_S)
        reader = connection.makefile("rb", buffering=0)
        try:
            caller = _Caller(_hear(connection), connection, reader)
        except (OSError, ValueError, KeyError, TypeError):  # a port scanner, or nothing of ours
            reader.close()
            connection.close()
            return
        key = (caller.hello.worker_id, caller.hello.epoch)
        with self._changed:
            replaced = self._parked.pop(key, None)
            if self._closed or len(self._parked) >= _MAX_PARKED:
                replaced = caller
            else:
                self._parked[key] = caller
            self._changed.notify_all()
        if replaced is not None:
            replaced.close()
        if replaced is not caller and self._called is not None:
            self._called(*key)


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
    reader = connection.makefile("rb", buffering=0)
    try:
        _say(connection, mine)
        theirs = _hear(connection)
        _check_version(mine, theirs)
        connection.sendall(b"!")
    except TimeoutError:
        reader.close()
        connection.close()
        raise DeadlineExceeded(f"link for epoch {mine.epoch}: {peer_id} did not come") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        reader.close()
        connection.close()
        raise Unavailable(peer_id, f"data plane at {address}: {error}") from error
    except PeerViolation:
        reader.close()
        connection.close()
        raise
    return Meeting(theirs, PairStore(connection, reader))


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


def _hear(connection: socket.socket) -> Hello:
    """Reads a line and nothing beyond. Not byte by byte: after each the GIL would have to be had from the engine."""
    line = b""
    while not line.endswith(b"\n"):
        there = connection.recv(_MAX_HELLO_BYTES - len(line), socket.MSG_PEEK)
        if not there:  # or it says too much
            raise ConnectionResetError("it hung up")
        line += connection.recv(there.find(b"\n") + 1 or len(there))
    said: dict[str, Any] = json.loads(line)  # Any: what a stranger says; the constructors below take it apart
    return Hello(str(said["worker_id"]), int(said["epoch"]), Terms(**said["terms"]))


def _check_version(mine: Hello, theirs: Hello) -> None:
    if theirs.terms.version != mine.terms.version:
        why = f"speaks data plane version {theirs.terms.version}, we speak {mine.terms.version}"
        raise PeerViolation(theirs.worker_id, why)


def _read(reader: SocketIO, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = reader.read(size - len(data))
        if not part:
            raise ConnectionResetError("the other side hung up")
        data += part
    return data
