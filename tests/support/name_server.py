"""A DNS server for tests that resolves every name to the given addresses, like a headless service of containers."""

import socket
import struct
import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager

_A = 1
_ANSWER, _NO_ERROR = 0x8180, 0xC00C  # flags of an answer; pointer to the queried name


class NameServer:
    """The DNS server. `addresses` may be changed at any time."""

    def __init__(self, addresses: Iterable[str]) -> None:
        self.addresses = list(addresses)
        self.question_count = 0
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self._socket.settimeout(0.1)
        self.port: int = self._socket.getsockname()[1]
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="name server", daemon=True)

    @contextmanager
    def running(self) -> Generator["NameServer"]:
        self._thread.start()
        try:
            yield self
        finally:
            self._stopping.set()
            self._thread.join()
            self._socket.close()

    def _serve(self) -> None:
        while not self._stopping.is_set():
            try:
                question, sender = self._socket.recvfrom(512)
            except TimeoutError:
                continue
            self._socket.sendto(self._answer(question), sender)

    def _answer(self, question: bytes) -> bytes:
        end = question.index(0, 12) + 5  # after name, type and class
        [kind] = struct.unpack("!H", question[end - 4 : end - 2])
        found = self.addresses if kind == _A else []
        self.question_count += kind == _A
        records = [struct.pack("!HHHIH", _NO_ERROR, _A, 1, 0, 4) + socket.inet_aton(address) for address in found]
        head = question[:2] + struct.pack("!HHHHH", _ANSWER, 1, len(records), 0, 0)
        return head + question[12:end] + b"".join(records)
