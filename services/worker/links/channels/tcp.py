"""Channels over TCP, each over one socket of the rendezvous.

A frame is preceded by its length, which is checked first. Payloads are sent directly from the sender's memory into the
receiver's. Bytes that the socket does not accept at once are sent by a waiting thread.

A wait is one system call for all remaining bytes, with the socket's own timeout, because every return to Python has to
wait for the GIL, which the engine's thread holds most of the time.
"""

import contextlib
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from threading import Condition, Lock
from typing import TYPE_CHECKING, cast

import torch

from services.worker.links.config import HEADER_BYTES
from services.worker.links.ports import ChannelBroken, Channels

if TYPE_CHECKING:
    from typing_extensions import Buffer

_LENGTH = struct.Struct("<I")
_TIMEVAL = struct.Struct("@ll")
_FIRST_BYTES = _LENGTH.size + HEADER_BYTES  # minimum length of a frame


class _TcpSend:
    def __init__(self, channel: "TcpChannel", parts: list[memoryview]) -> None:
        self._channel = channel
        self.parts = parts  # still to be sent

    def wait(self, timeout_s: float) -> None:
        self._channel.push(self, timeout_s)


class _TcpFrame:
    def __init__(self, channel: "TcpChannel", buffer: memoryview) -> None:
        self._channel = channel
        self._buffer = buffer

    def wait(self, timeout_s: float) -> None:
        self._channel.read_frame(self._buffer, timeout_s)


class _Payload:
    def __init__(self, channel: "TcpChannel", buffer: memoryview) -> None:
        self._channel = channel
        self.buffer = buffer
        self.has_come = False

    def wait(self, timeout_s: float) -> None:
        self._channel.read_payloads(self, timeout_s)


class TcpChannel:
    """A `links.ports.Channel` over a socket."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.device = torch.device("cpu")
        self._out = connection
        self._out.setblocking(True)
        self._in = connection.dup()
        self._writing = Condition()  # notified when no thread is sending
        self._pushing = False  # True: a thread sends the first unsent item, without the lock
        self._reading = Lock()
        self._unsent: deque[_TcpSend] = deque()
        self._payloads: deque[_Payload] = deque()  # posted but not read yet; they precede all other frames
        self._first = memoryview(bytearray(_FIRST_BYTES))  # first bytes of the frame being read
        self._timeouts_s = {socket.SO_RCVTIMEO: 0.0, socket.SO_SNDTIMEO: 0.0}  # timeouts currently set on the socket
        self._aborted = ""  # reason for the abort

    # ------------------------------------------------------------ sending

    def send_frame(self, frame: torch.Tensor) -> _TcpSend:
        data = _memory(frame)
        return self._send([memoryview(_LENGTH.pack(data.nbytes)), data])

    def send_payload(self, payload: torch.Tensor) -> _TcpSend:
        return self._send([_memory(payload)])

    def _send(self, parts: list[memoryview]) -> _TcpSend:
        sending = _TcpSend(self, parts)
        with self._writing:
            if self._aborted:
                raise ChannelBroken(self._aborted)
            self._unsent.append(sending)
            while self._unsent and not self._pushing and not self._aborted:
                if not self._sent(self._unsent[0], self._try(self._unsent[0], socket.MSG_DONTWAIT)):
                    break
        return sending

    def push(self, sending: _TcpSend, timeout_s: float) -> None:
        """Send until this item and all items before it are sent. Meanwhile other threads may post items and wait for
        them.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            with self._writing:
                left_s = max(deadline_s - time.monotonic(), 0.0)
                self._writing.wait_for(lambda: not sending.parts or not self._pushing, left_s)
                if not sending.parts:
                    return
                if self._aborted:
                    raise ChannelBroken(self._aborted)
                if time.monotonic() >= deadline_s:
                    raise ChannelBroken(f"the peer has accepted no bytes for {timeout_s} s")
                self._pushing, first = True, self._unsent[0]
                self._limit(socket.SO_SNDTIMEO, deadline_s)
            count = self._try(first, 0)
            with self._writing:
                self._pushing = False
                self._sent(first, count)
                self._writing.notify_all()

    def _try(self, sending: _TcpSend, flags: int) -> int:
        """Send as many bytes as the socket accepts. Returns their number, or 0 if the connection has ended."""
        try:
            return self._out.sendmsg(sending.parts, (), flags)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._aborted = self._aborted or f"the connection has ended: {error}"
            return 0

    def _sent(self, first: _TcpSend, count: int) -> bool:
        """Account for `count` sent bytes of the first item. Returns True if the item is complete. Called with the lock
        held.
        """
        parts = first.parts
        while parts and count >= parts[0].nbytes:
            count -= parts.pop(0).nbytes
        if parts:
            parts[0] = parts[0][count:]
            return False
        self._unsent.popleft()
        return True

    # ------------------------------------------------------------ receiving: one thread

    def post_frame(self, buffer: torch.Tensor) -> _TcpFrame:
        return _TcpFrame(self, _memory(buffer))

    def post_payload(self, buffer: torch.Tensor) -> _Payload:
        payload = _Payload(self, _memory(buffer))
        self._payloads.append(payload)
        return payload

    def read_frame(self, buffer: memoryview, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        self._read_payloads(None, deadline_s)
        first = self._first
        self._read(first, deadline_s)
        (length,) = _LENGTH.unpack_from(first)
        if not HEADER_BYTES <= length <= buffer.nbytes:
            raise ChannelBroken(f"the peer sends a frame of {length} bytes, not {HEADER_BYTES} to {buffer.nbytes}")
        buffer[:HEADER_BYTES] = first[_LENGTH.size :]
        self._read(buffer[HEADER_BYTES:length], deadline_s)

    def read_payloads(self, last: _Payload, timeout_s: float) -> None:
        self._read_payloads(last, time.monotonic() + timeout_s)

    def _read_payloads(self, last: _Payload | None, deadline_s: float) -> None:
        """Read payloads in order of arrival, up to `last`, or all of them."""
        while self._payloads and not (last is not None and last.has_come):
            payload = self._payloads.popleft()
            self._read(payload.buffer, deadline_s)
            payload.has_come = True

    def _read(self, buffer: memoryview, deadline_s: float) -> None:
        while buffer.nbytes:
            try:
                with self._reading:
                    if self._aborted:
                        raise ChannelBroken(self._aborted)
                    self._limit(socket.SO_RCVTIMEO, deadline_s)
                    count = self._in.recv_into(buffer, 0, socket.MSG_WAITALL)
            except BlockingIOError:  # timeout
                if time.monotonic() < deadline_s:
                    continue
                raise ChannelBroken("the peer has sent no bytes for too long") from None
            except OSError as error:
                raise ChannelBroken(f"the connection has ended: {error}") from error
            if not count:
                raise ChannelBroken("the peer has ended the connection")
            buffer = buffer[count:]

    def _limit(self, which: int, deadline_s: float) -> None:
        """Set the timeout of the next call on the socket, approximately."""
        left_s = max(deadline_s - time.monotonic(), 0.001)
        if not left_s <= self._timeouts_s[which] <= 1.1 * left_s:  # setting it is a system call
            self._timeouts_s[which] = wanted_s = 1.05 * left_s
            self._out.setsockopt(socket.SOL_SOCKET, which, _TIMEVAL.pack(int(wanted_s), int(wanted_s % 1 * 1e6)))

    # ------------------------------------------------------------ end

    def abort(self) -> None:
        self._aborted = self._aborted or "aborted"
        with contextlib.suppress(OSError):  # it has already ended
            self._out.shutdown(socket.SHUT_RDWR)  # wakes threads that it blocks
        with self._writing, self._reading:
            self._writing.wait_for(lambda: not self._pushing)
            self._unsent.clear()

    def destroy(self) -> None:
        self._payloads.clear()
        self._out.close()
        self._in.close()


class TcpTransport:
    name = "tcp"
    lanes = ("urgent", "bulk")

    def open(self, sockets: Sequence[socket.socket], name: str, rank: int, within_s: float) -> Channels:
        urgent, bulk = (TcpChannel(connection) for connection in sockets)
        return Channels(urgent, bulk, lambda: None)

    def close(self) -> None:
        """Does nothing."""


def _memory(tensor: torch.Tensor) -> memoryview:
    """Return a flat view of host memory as bytes."""
    return memoryview(cast("Buffer", tensor.numpy()))
