"""A connection between two emulated workers: one TCP connection, on both event loops.

Messages are real, except tensors, which are only sizes. A transfer is announced, takes time on the card, and then its
marks are sent. Otherwise connections behave like real channels: the opening message asks the receiver for destinations,
which it may refuse, and either end may cancel.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Event
from typing import TYPE_CHECKING, TypeVar, cast

from ballast.common.errors import BallastError, InvariantViolation, Unavailable
from ballast.service.logs import get_logger
from services.worker.emulation.card import Card, CardTransfer
from services.worker.emulation.clock import GpuClock
from services.worker.emulation.phantom import read_all, write_all
from services.worker.emulation.runner import Activation
from services.worker.emulation.wire import MAX_BYTES, EmulatedFrame, Frames, FrameType
from services.worker.links.connection import Connection, Link, Receiver
from services.worker.links.frame_kinds import FrameKind
from services.worker.links.handshake import Hello, Terms
from services.worker.links.ports import ChannelBroken, LinkEnding, LinkState, Message
from services.worker.links.traffic import TrafficClass
from services.worker.links.transfer import Opening, Refusal, Transfer, TransferOutcome, TransferReport

if TYPE_CHECKING:
    import torch

VERSION = 3
_LEAST_WAIT_S = 0.0005  # shorter waits are skipped, because passing a message to the other event loop takes that long
_CLOSE_WITHIN_S = 2.0
_OPEN_WITHIN_S = 5.0
_LOOK_S = 10.0  # interval of idle checks
_WORD_BYTES = 64  # size of a join or leave message
_Given = TypeVar("_Given")


class EmulatedOpener:
    """Creates connections on the event loop."""

    lanes = ("all",)

    def __init__(self, receiver: Receiver, bytes_per_s: float, clock: GpuClock) -> None:
        self._receiver = receiver
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._card = Card(self._loop, bytes_per_s)
        self.terms = Terms(VERSION, "emulation", MAX_BYTES, MAX_BYTES, MAX_BYTES, 1 << 60)

    def open(self, peer: Hello, sockets: Sequence[socket.socket], *, is_host: bool, name: str) -> EmulatedConnection:
        [connection] = sockets
        connection.setblocking(False)
        made = EmulatedConnection(peer, self._receiver, self._loop, self._card, self._clock)
        try:
            opening = asyncio.run_coroutine_threadsafe(self._open(made, connection), self._loop)
            opening.result(_OPEN_WITHIN_S)
        except (OSError, RuntimeError, TimeoutError) as error:
            raise ChannelBroken(f"{name}: {error}") from error
        return made

    async def _open(self, made: EmulatedConnection, connection: socket.socket) -> None:
        await self._loop.create_connection(lambda: made.protocol, sock=connection)

    def close(self, timeout_s: float) -> bool:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._card.close)
        return True


@dataclass(slots=True)
class _EmulatedSend:
    epoch: int
    number: int
    size_bytes: int
    pieces: Sequence[torch.Tensor]
    outgoing: CardTransfer
    done: Future[TransferReport]
    began_s: float


class _LongMeta:
    """Stand-in for a tensor of bytes."""

    def __init__(self, data: bytes) -> None:
        self.data = data


class EmulatedConnection(Connection):
    """A `Connection` between emulated workers. Sending is thread-safe; all other work is done on the event loop."""

    def __init__(
        self, peer: Hello, receiver: Receiver, loop: asyncio.AbstractEventLoop, card: Card, clock: GpuClock
    ) -> None:
        super().__init__(peer, receiver)
        self._clock = clock
        self.protocol = _Protocol(self._take, self._lost)
        self._loop = loop
        self._card = card
        self._ended = Event()
        self._sendings: dict[int, _EmulatedSend] = {}
        self._incoming: dict[int, tuple[Link, Opening, Sequence[torch.Tensor]]] = {}
        self._numbers = itertools.count(1)
        self._free_at_s = 0.0  # when the last message has been sent
        self._unsent: deque[tuple[float, EmulatedFrame, Future[None]]] = deque()  # with their times of sending
        self._call(self._look, None)

    # ------------------------------------------------------------ sending: any thread

    @property
    def packed_below_bytes(self) -> int:
        """0, because only transfers model the time of moving bytes."""
        return 0

    def send(
        self,
        epoch: int,
        traffic: TrafficClass,
        topic: int,
        meta: bytes,
        tensor: torch.Tensor | None,
        stream: int,
        timeout_s: float,
    ) -> Future[None]:
        self._refuse_ended()
        size_bytes, body, what = len(meta), b"", cast("Activation | _LongMeta | None", tensor)
        if isinstance(what, _LongMeta):
            meta, size_bytes = what.data, len(what.data)
        elif what is not None:
            size_bytes, body = size_bytes + what.nbytes, what.wrong
        with_tensor = int(isinstance(what, Activation))
        at_s = self._clock.ended_s + self._card.message_s(size_bytes)
        frame = EmulatedFrame(
            FrameType.MESSAGE, traffic, topic, with_tensor, epoch, stream, size_bytes, meta, body, at_s
        )
        done: Future[None] = Future()
        self._call(self._send, (frame, done))
        return done

    def transfer(
        self,
        epoch: int,
        traffic: TrafficClass,
        pieces: Sequence[torch.Tensor],
        topic: int,
        meta: bytes,
        stream: int,
        rank: int,
    ) -> Transfer:
        self._refuse_ended()
        number = next(self._numbers)
        size_bytes = sum(piece.nbytes for piece in pieces)
        done: Future[TransferReport] = Future()
        outgoing = CardTransfer((traffic, rank, number), float(size_bytes), lambda: self._send_content(number))
        sending = _EmulatedSend(epoch, number, size_bytes, pieces, outgoing, done, time.monotonic())
        frame = EmulatedFrame(FrameType.OPENING, traffic, topic, number, epoch, stream, size_bytes, meta)
        self._call(self._open, (sending, frame))
        return Transfer(number, size_bytes, self, done)

    def as_tensor(self, data: bytes) -> torch.Tensor:
        return cast("torch.Tensor", _LongMeta(data))

    def pack(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        raise InvariantViolation("tensors cannot be packed into a message over an emulated link")

    def unpack(self, packed: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
        raise InvariantViolation("tensors cannot be unpacked from a message over an emulated link")

    def tell(self, kind: FrameKind, epoch: int) -> None:
        frame = EmulatedFrame(
            FrameType.JOIN if kind is FrameKind.JOIN else FrameType.LEAVE, epoch=epoch, size_bytes=_WORD_BYTES
        )
        self._call(self._send, (frame, Future[None]()))

    def cancel(self, number: int) -> bool:
        """See `Transfer.cancel`."""
        self._call(self._cancel, number)
        return number in self._sendings

    def reprioritise(self, number: int, traffic: TrafficClass, rank: int) -> bool:
        """Return False, because an emulated card never reorders transfers."""
        return False

    def end_transfers(self, epoch: int, why: str) -> None:
        self._call(self._end_sendings, (epoch, why))

    def give_up(self, why: str) -> None:
        self._call(self._break, why)

    def check(self) -> None:
        """Does nothing, because only the card has a queue."""

    def begin_close(self) -> None:
        with self._changed:
            if self._state is not LinkState.UP:
                return
            self._state = LinkState.CLOSING
            self._changed.notify_all()
        self._call(self._say_close, None)

    def close(self, timeout_s: float | None = None) -> None:
        self.begin_close()
        self.wait_ended(_CLOSE_WITHIN_S if timeout_s is None else timeout_s)

    def wait_ended(self, timeout_s: float) -> bool:
        """Wait until the connection has ended. On the event loop, which has to end it itself, return at once."""
        with contextlib.suppress(RuntimeError):
            if asyncio.get_running_loop() is self._loop:
                return True
        return self._loop.is_closed() or self._ended.wait(timeout_s)

    def _call(self, what: Callable[[_Given], None], given: _Given) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(what, given)

    def _refuse_ended(self) -> None:
        if not self.is_up:
            raise Unavailable(self.peer_id, "the link has ended")

    @property
    def _has_ended(self) -> bool:
        return self._state in (LinkState.CLOSED, LinkState.BROKEN)

    # ------------------------------------------------------------ event loop: out

    def _send(self, what: tuple[EmulatedFrame, Future[None]]) -> None:
        """Send frames in order, each after the ideal duration of its own bytes and of the previous frame."""
        frame, done = what
        now_s = self._loop.time()
        self._free_at_s = max(now_s, self._free_at_s) + self._card.message_s(frame.size_bytes)
        self._unsent.append((self._free_at_s, frame, done))
        if len(self._unsent) == 1:  # else the timer is set
            self._send_due()

    def _send_due(self) -> None:
        while self._unsent:
            at_s, frame, done = self._unsent[0]
            if at_s - self._loop.time() >= _LEAST_WAIT_S:
                self._loop.call_at(at_s, self._send_due)
                return
            self._unsent.popleft()
            self._send_now(frame, done)

    def _send_now(self, frame: EmulatedFrame, done: Future[None]) -> None:
        if self._has_ended:
            done.set_exception(Unavailable(self.peer_id, "the link has ended"))
            return
        self.protocol.write(frame)
        done.set_result(None)

    def _open(self, what: tuple[_EmulatedSend, EmulatedFrame]) -> None:
        sending, frame = what
        if self._has_ended:
            sending.done.set_exception(Unavailable(self.peer_id, "the link has ended"))
            return
        self._sendings[sending.number] = sending
        self.protocol.write(frame)
        self._card.add(sending.outgoing)

    def _send_content(self, number: int) -> None:
        if (sending := self._sendings.get(number)) is not None and not self._has_ended:
            self.protocol.write(EmulatedFrame(FrameType.CONTENT, transfer=number, body=read_all(sending.pieces)))

    def _cancel(self, number: int) -> None:
        sending = self._sendings.get(number)
        if sending is not None and not sending.outgoing.is_over:
            self.protocol.write(EmulatedFrame(FrameType.CANCEL, transfer=number))
            self._settle(number, TransferOutcome.CANCELLED)

    def _end_sendings(self, what: tuple[int, str]) -> None:
        epoch, why = what
        for sending in [s for s in self._sendings.values() if s.epoch == epoch]:
            self.protocol.write(EmulatedFrame(FrameType.CANCEL, transfer=sending.number))
            self._fail(sending, why)

    def _fail(self, sending: _EmulatedSend, why: str) -> None:
        sending.outgoing.is_over = True
        self._sendings.pop(sending.number, None)
        sending.done.set_exception(Unavailable(self.peer_id, why))

    def _settle(self, number: int, outcome: TransferOutcome, why: str = "") -> None:
        sending = self._sendings.pop(number, None)
        if sending is None:
            return
        sending.outgoing.is_over = True
        sent = sending.size_bytes if outcome is TransferOutcome.DELIVERED else 0
        sending.done.set_result(TransferReport(outcome, sent, time.monotonic() - sending.began_s, why))

    # ------------------------------------------------------------ event loop: in

    def _take(self, frame: EmulatedFrame) -> None:
        try:
            self._handle(frame)
        except (BallastError, ValueError, KeyError) as error:
            get_logger().error("received invalid data over a link", peer=self.peer_id, why=f"{error}")
            self._break(f"{type(error).__name__}: {error}")

    def _handle(self, frame: EmulatedFrame) -> None:
        match frame.kind:
            case FrameType.MESSAGE:
                self._message(frame)
            case FrameType.OPENING:
                self._opened(frame)
            case FrameType.CONTENT:
                self._arrived(frame)
            case FrameType.CANCEL:
                self._end_incoming(frame.transfer, TransferOutcome.CANCELLED)
            case FrameType.REFUSED:
                self._settle(frame.transfer, TransferOutcome.REFUSED, frame.meta.decode())
            case FrameType.DELIVERED:
                self._settle(frame.transfer, TransferOutcome.DELIVERED)
            case FrameType.JOIN:
                self.peer_joined(frame.epoch)
            case FrameType.LEAVE:
                self.peer_left(frame.epoch)
            case FrameType.CLOSE:
                self._finish(LinkState.CLOSED, "closed")

    def _message(self, frame: EmulatedFrame) -> None:
        link = self.link_of(frame.epoch)
        if link is not None:
            tensor = None
            if frame.transfer:
                tensor = Activation(frame.size_bytes - len(frame.meta), frame.body, frame.at_s)
            else:
                self._clock.heard(frame.at_s)
            given = cast("torch.Tensor | None", tensor)
            message = Message(TrafficClass(frame.traffic), frame.topic, frame.stream, frame.meta, given)
            self._receiver.on_message(link, message)

    def _opened(self, frame: EmulatedFrame) -> None:
        opening = Opening(
            frame.transfer, TrafficClass(frame.traffic), frame.topic, frame.stream, frame.size_bytes, frame.meta
        )
        link = self.link_of(frame.epoch)
        pieces = Refusal(f"epoch {frame.epoch} has ended") if link is None else self._receiver.on_opening(link, opening)
        if link is None or isinstance(pieces, Refusal):
            why = pieces.why if isinstance(pieces, Refusal) else ""
            self.protocol.write(EmulatedFrame(FrameType.REFUSED, transfer=frame.transfer, meta=why.encode()))
            return
        if sum(piece.nbytes for piece in pieces) != frame.size_bytes:
            raise ValueError(f"{sum(piece.nbytes for piece in pieces)} bytes instead of {frame.size_bytes}")
        self._incoming[frame.transfer] = (link, opening, pieces)
        self._card.incoming_count += 1

    def _arrived(self, frame: EmulatedFrame) -> None:
        if frame.transfer not in self._incoming:
            return  # refused
        write_all(self._incoming[frame.transfer][2], frame.body)
        self._end_incoming(frame.transfer, TransferOutcome.DELIVERED)
        self.protocol.write(EmulatedFrame(FrameType.DELIVERED, transfer=frame.transfer))

    def _end_incoming(self, number: int, outcome: TransferOutcome) -> None:
        if (incoming := self._incoming.pop(number, None)) is not None:
            self._card.incoming_count -= 1
            self._receiver.on_transfer_end(incoming[0], incoming[1], outcome)

    # ------------------------------------------------------------ event loop: the end

    def _look(self, _: object) -> None:
        if not self._has_ended:
            self.close_if_idle()
            self._loop.call_later(_LOOK_S, self._look, None)

    def _say_close(self, _: object) -> None:
        if not self._has_ended:
            self.protocol.write(EmulatedFrame(FrameType.CLOSE))
            self._loop.call_later(_CLOSE_WITHIN_S, self._finish, LinkState.CLOSED, "closed")

    def _lost(self, why: str) -> None:
        self._break(why)

    def _break(self, why: str) -> None:
        self._finish(LinkState.BROKEN, why)

    def _finish(self, how: LinkState, why: str) -> None:
        """End the connection, once. Transfers end after the links, like on a real connection."""
        with self._changed:
            if self._has_ended:
                return
            was_up, self._state = self.is_up, how
            if not was_up:
                self._state, why = LinkState.CLOSED, "closed"
            links = self._take_links()
            self._changed.notify_all()
        if was_up:
            self.protocol.write(EmulatedFrame(FrameType.CLOSE))
        self.protocol.close()
        for sending in list(self._sendings.values()):
            self._fail(sending, why)
        for link in links:
            self._receiver.on_link_end(link, LinkEnding(self._state, why))
        for number in list(self._incoming):
            self._end_incoming(number, TransferOutcome.BROKEN)
        self._ended.set()


class _Protocol(asyncio.Protocol):
    """Frames over TCP."""

    def __init__(self, on_frame: Callable[[EmulatedFrame], None], on_lost: Callable[[str], None]) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._frames = Frames()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is no subclass

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._frames.feed(data):
                self._on_frame(frame)
        except ValueError as error:
            self._on_lost(str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost(str(exc) if exc is not None else "the connection ended")

    def write(self, frame: EmulatedFrame) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame.encode())

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
