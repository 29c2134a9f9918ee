"""Key-value store through which two processes exchange their addresses while they open channels.

torch's own TCPStore resolves the name of its address in every client, which takes five seconds whenever a response is
lost.
"""

import socket
import struct
import time
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from threading import Lock

from torch.distributed import Store

from services.worker.links.handshake import read_exactly

_TIMEOUT_S = 5.0  # timeout for keys requested after the link was opened
_MAX_BYTES = 1 << 20  # maximum size of all entries of the other side
_ENTRY = struct.Struct("<II")  # bytes of key, bytes of value


class PairStore(Store):
    """A store for two processes: each gets the values that the other sets. `set` never waits for `get`."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # many small entries in alternation
        self._connection = connection
        self._deadline_s: float | None = None
        self._values: dict[str, bytes] = {}
        self._left_bytes = _MAX_BYTES
        self._writing = Lock()
        self._reading = Lock()

    def set(self, key: str, value: str | bytes) -> None:
        name, data = key.encode(), value.encode() if isinstance(value, str) else bytes(value)
        with self._writing:
            self._values[key] = data
            self._connection.sendall(_ENTRY.pack(len(name), len(data)) + name + data)

    @contextmanager
    def expiring(self, deadline_s: float) -> Generator[None]:
        """Context manager in which `get` fails after the deadline, even if the entry exists."""
        self._deadline_s = deadline_s
        try:
            yield
        finally:
            self._deadline_s = None

    def get(self, key: str) -> bytes:
        """Return the value of `key`. Raises OSError if the other side does not set it before the deadline, or is
        lost.
        """
        with self._reading:
            deadline_s = self._deadline_s or time.monotonic() + _TIMEOUT_S
            while key not in self._values:
                name_bytes, value_bytes = _ENTRY.unpack(read_exactly(self._connection, _ENTRY.size, deadline_s))
                self._left_bytes -= _ENTRY.size + name_bytes + value_bytes
                if self._left_bytes < 0:
                    raise OSError(f"the other side has set more than {_MAX_BYTES} bytes")
                entry = read_exactly(self._connection, name_bytes + value_bytes, deadline_s)
                self._values[entry[:name_bytes].decode(errors="replace")] = entry[name_bytes:]
            if self._deadline_s is not None and time.monotonic() > self._deadline_s:
                raise TimeoutError(f"{key} arrived too late")
            return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def close(self) -> None:
        self._connection.close()
