"""Messages between rank 0 and another rank, over a private pair of sockets, or TCP to another host."""

from __future__ import annotations

import os
import pickle
import select
import socket
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ballast.common.errors import ConfigError
from ballast.service.logs import LogFormat, LogLevel

if TYPE_CHECKING:
    import torch

    from services.worker.engine.load import Engine
    from services.worker.engine.lora import AdapterRows
    from services.worker.engine.packing import Ints, PackedStep

_LENGTH = struct.Struct("<Q")
_FILES = b"f"  # stream byte that carries file descriptors

# Exceptions with which drivers and the system refuse memory changes. Others are bugs and end the process.
REFUSALS = (RuntimeError, OSError, ConfigError)


class RankLost(Exception):
    """A rank has ended, does not answer, or is out of step, so the instance ends."""


class RankEnded(RankLost):
    """The other side has ended."""


class RemapRefused(RuntimeError):
    """The driver of another rank has refused a memory change, which all ranks have undone."""


@dataclass(frozen=True, slots=True)
class RankLog:
    """Log settings of a rank."""

    instance: str = "worker"
    level: LogLevel = "info"
    form: LogFormat = "console"


@dataclass(frozen=True, slots=True)
class Start:
    """Configuration of a rank."""

    rank: int
    devices: Sequence[str]  # devices of all ranks, each on its own host
    share: int  # number of ranks per host
    meeting: str  # file for the rendezvous of all ranks, or HOST:PORT of a store
    host: str  # address at which others reach this rank
    log: RankLog
    load_one: Callable[..., Engine]  # `load_engine` without device and ranks; another host has its own model folder


@dataclass(frozen=True, slots=True)
class RankReady:
    """Answer of a rank that has loaded its shard."""

    block_count: int
    checksums: Mapping[int, bytes]  # checksums of its layers
    revision: str  # revision of its checkpoint


@dataclass(frozen=True, slots=True)
class Export:
    """Request for the files of these extents (`MemoryBackend.export`). Answered with their number, followed by the
    files.
    """

    first: int
    count: int


@dataclass(frozen=True, slots=True)
class RunLayers:
    """A step through the layers `[first_layer, last_layer)`. It has no answer, because its all-reduces synchronise the
    ranks.
    """

    packed: PackedStep
    hidden_shape: tuple[int, ...] | None  # shape of the hidden states broadcast next; None: the step embeds the tokens
    first_layer: int
    last_layer: int
    awaited: tuple[Ints, Ints, int] | None = None  # rows, sources and token count of `InFlightTokens`, which
    # are broadcast next; None: the host knows all tokens
    adapter_rows: AdapterRows = ()


@dataclass(frozen=True, slots=True)
class Remap:
    """Request to call a method of `DeviceMemory`; answered with Done or MemoryRefused."""

    name: str
    arguments: tuple[object, ...]
    named: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Done:
    result: object


@dataclass(frozen=True, slots=True)
class MemoryRefused:
    """A memory change was refused, and has been undone."""

    why: str


@dataclass(frozen=True, slots=True)
class Failed:
    where: str
    why: str


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    import torch

    return tensor.reshape(-1).view(torch.uint8).numpy().data


def body_of(message: object) -> bytes:
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


class RankChannel:
    """One side of the connection between two ranks. Messages are pickled, because the two processes trust each other:
    one has started the other, or each has proved to the other that it has the cluster's secret.
    """

    def __init__(self, connection: socket.socket, name: str) -> None:
        """`name`: name of the other side."""
        self._socket = connection
        self._name = name

    def send(self, message: object, within_s: float) -> None:
        """Send a message.

        Raises:
            RankLost: the other side has ended, or does not read.
        """
        self.send_body(body_of(message), within_s)

    def send_body(self, body: bytes, within_s: float) -> None:
        """Send a message pickled by `body_of`, which can be sent to several receivers; see `send`."""
        try:
            self._socket.settimeout(within_s)
            self._socket.sendall(_LENGTH.pack(len(body)) + body)
        except OSError as error:
            raise RankLost(f"{self._name}: {error or type(error).__name__}") from error

    def receive(self, within_s: float | None) -> object:
        """Receive a message. Raises RankLost if the other side has ended or is silent."""
        try:
            self._socket.settimeout(within_s)
            (size,) = _LENGTH.unpack(self._read(_LENGTH.size))
            return pickle.loads(self._read(size))
        except OSError as error:
            raise RankLost(f"{self._name}: {error or type(error).__name__}") from error

    def send_tensors(self, tensors: Iterable[torch.Tensor], within_s: float) -> None:
        """Send the bytes of tensors in host memory, without their sizes.

        Raises:
            RankLost: the other side has ended, or does not read.
        """
        try:
            self._socket.settimeout(within_s)
            for tensor in tensors:
                left = _bytes_of(tensor)
                while left:  # `sendall` would limit the time for the whole tensor
                    left = left[self._socket.send(left) :]
        except OSError as error:
            raise RankLost(f"{self._name}: {error or type(error).__name__}") from error

    def receive_into(self, tensors: Iterable[torch.Tensor], within_s: float) -> None:
        """Fill tensors with the bytes that the other side's `send_tensors` sends.

        Raises:
            RankLost: the other side has ended, or is silent.
        """
        try:
            self._socket.settimeout(within_s)
            for tensor in tensors:
                left = _bytes_of(tensor)
                while left:
                    if not (count := self._socket.recv_into(left)):
                        raise RankEnded(f"{self._name} has ended")
                    left = left[count:]
        except OSError as error:
            raise RankLost(f"{self._name}: {error or type(error).__name__}") from error

    def send_files(self, files: Sequence[int], within_s: float) -> None:
        """Send 1 to 253 files, and close them.

        Raises:
            RankLost: the other side has ended, or does not read.
        """
        try:
            self._socket.settimeout(within_s)
            socket.send_fds(self._socket, [_FILES], files)
        except OSError as error:
            raise RankLost(f"{self._name}: {error or type(error).__name__}") from error
        finally:
            for file in files:
                os.close(file)

    def receive_files(self, count: int, within_s: float) -> list[int]:
        """Receive `count` files. Raises RankLost if the other side has ended, or not all files have arrived."""
        try:
            self._socket.settimeout(within_s)
            _, files, *_ = socket.recv_fds(self._socket, len(_FILES), count)
        except OSError as error:
            raise RankLost(f"{self._name}: {error or type(error).__name__}") from error
        if len(files) != count:
            for file in files:
                os.close(file)
            raise RankLost(f"{self._name}: {count} files were sent, but only {len(files)} could be opened here")
        return files

    def hung_up(self) -> bool:
        """True if the other side has ended, or its host is silent. Thread-safe."""
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        return bool(poll.poll(0))

    def close(self) -> None:
        self._socket.close()

    def _read(self, size: int) -> bytes:
        read = bytearray()
        while len(read) < size:
            part = self._socket.recv(size - len(read))
            if not part:
                raise RankEnded(f"{self._name} has ended")
            read += part
        return bytes(read)
