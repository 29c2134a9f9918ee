"""A link between two emulated workers: one TCP connection, on the event loop of each.

Messages are the real ones, but for tensors, of which only the size is told. A transfer is announced, takes as long as
the card says, and then its marks are sent. Otherwise as `services.worker.links.link.Link`, which moves bytes: a
destination is asked for when a transfer opens, a receiver may refuse, either end may break it off.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

from ballast.common.errors import BallastError, StaleEpoch, Unavailable
from ballast.service.logs import get_logger
from services.worker.emulation.card import Card, Outgoing
from services.worker.emulation.phantom import read_all, write_all
from services.worker.emulation.runner import Activation
from services.worker.emulation.wire import MAX_BYTES, MAX_HELLO_BYTES, Frame, Frames, Kind
from services.worker.links.traffic import TrafficClass
from services.worker.links.transfer import Opening, Outcome, Refusal, Transfer, TransferReport

if TYPE_CHECKING:
    import torch

# Shorter waits are left out: the way through two event loops takes as long.
_LEAST_WAIT_S = 0.0005
_CLOSE_WITHIN_S = 2.0
_Given = TypeVar("_Given")


@dataclass(frozen=True, slots=True)
class Message:
    """See `transport.receiving.Message`."""

    traffic: TrafficClass
    topic: int
    stream: int
    meta: bytes
    tensor: Activation | None
    receive_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Ending:
    """See `transport.link.LinkEnding`."""

    why: str


@dataclass(frozen=True, slots=True)
class LongMeta:
    data: bytes


class Receiver(Protocol):
    """See `transport.link.Receiver`. Called on the event loop."""

    def on_message(self, link: EmulatedLink, message: Message) -> None: ...

    def on_opening(self, link: EmulatedLink, opening: Opening) -> Sequence[torch.Tensor] | Refusal: ...

    def on_transfer_end(self, link: EmulatedLink, opening: Opening, outcome: Outcome) -> None: ...

    def on_link_end(self, link: EmulatedLink, ending: Ending) -> None: ...


@dataclass(slots=True)
class _Sending:
    number: int
    size_bytes: int
    pieces: Sequence[torch.Tensor]
    outgoing: Outgoing
    done: Future[TransferReport]
    began_s: float


class EmulatedLink:
    """Sending is safe from any thread; all else happens on the event loop."""

    def __init__(
        self,
        peer_id: str,
        epoch: int,
        *,
        loop: asyncio.AbstractEventLoop,
        connection: Connection,
        card: Card,
        receiver: Receiver,
        ended: Callable[[EmulatedLink], None],
    ) -> None:
        self.peer_id = peer_id
        self.epoch = epoch
        self._loop = loop
        self._connection = connection
        self._card = card
        self._receiver = receiver
        self._ended = ended
        self._retired = False
        self._is_up = True
        self._is_closing = False
        self._sendings: dict[int, _Sending] = {}
        self._incoming: dict[int, tuple[Opening, Sequence[torch.Tensor]]] = {}
        self._numbers = itertools.count(1)
        self._free_at_s = 0.0  # when the last message has left

    def begin(self) -> None:
        """From here on what comes is taken."""
        self._connection.trust()
        self._connection.attach(self._take, self._lost)

    @property
    def is_up(self) -> bool:
        return self._is_up and not self._is_closing

    @property
    def packed_below_bytes(self) -> int:
        """Nothing goes along with a message: only a transfer takes the time that moving it would take."""
        return 0

    @property
    def retired(self) -> bool:
        return self._retired

    @property
    def is_spare(self) -> bool:
        """None is kept ready."""
        return False

    @property
    def was_spare(self) -> bool:
        return False

    # ------------------------------------------------------------ sending: any thread

    def send(
        self,
        traffic: TrafficClass,
        topic: int,
        *,
        meta: bytes = b"",
        tensor: Activation | LongMeta | None = None,
        stream: int = 0,
        timeout_s: float = 0.0,
    ) -> Future[None]:
        self._refuse()
        size_bytes, body = len(meta), b""
        if isinstance(tensor, LongMeta):
            meta, size_bytes = tensor.data, len(tensor.data)
        elif tensor is not None:
            size_bytes, body = size_bytes + tensor.nbytes, tensor.wrong
        with_tensor = int(isinstance(tensor, Activation))
        frame = Frame(Kind.MESSAGE, traffic, topic, with_tensor, stream, size_bytes, meta, body)
        done: Future[None] = Future()
        self._loop.call_soon_threadsafe(self._send, frame, done)
        return done

    def as_tensor(self, data: bytes) -> LongMeta:
        return LongMeta(data)

    def transfer(
        self,
        traffic: TrafficClass,
        pieces: Sequence[torch.Tensor],
        *,
        topic: int = 0,
        meta: bytes = b"",
        stream: int = 0,
        rank: int = 0,
    ) -> Transfer:
        self._refuse()
        number = next(self._numbers)
        size_bytes = sum(piece.nbytes for piece in pieces)
        done: Future[TransferReport] = Future()
        outgoing = Outgoing((traffic, rank, number), float(size_bytes), lambda: self._send_content(number))
        sending = _Sending(number, size_bytes, pieces, outgoing, done, time.monotonic())
        frame = Frame(Kind.OPENING, traffic, topic, number, stream, size_bytes, meta)
        self._loop.call_soon_threadsafe(self._open, sending, frame)
        return Transfer(number, size_bytes, self, done)

    def cancel(self, number: int) -> bool:
        """For `Transfer.cancel`."""
        self._call(self._cancel, number)
        return number in self._sendings

    def reprioritise(self, number: int, traffic: TrafficClass, rank: int) -> bool:
        """For `Transfer`: an emulated card leaves transfers in the order that they came with."""
        return False

    def give_up(self, why: str) -> None:
        self._call(self._break, why)

    def _call(self, what: Callable[[_Given], None], given: _Given) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and everything with it
            self._loop.call_soon_threadsafe(what, given)

    def _refuse(self) -> None:
        if self._retired:
            raise StaleEpoch(f"link to {self.peer_id}", self.epoch, self.epoch + 1)
        if not self.is_up:
            raise Unavailable(self.peer_id, "the link has ended")

    # ------------------------------------------------------------ event loop: out

    def _send(self, frame: Frame, done: Future[None]) -> None:
        """In order, each after the time that the one before and its own bytes take."""
        now_s = self._loop.time()
        self._free_at_s = max(now_s, self._free_at_s) + self._card.message_s(frame.size_bytes)
        if self._free_at_s - now_s < _LEAST_WAIT_S:
            self._free_at_s = min(self._free_at_s, now_s)
            self._send_now(frame, done)
        else:
            self._loop.call_at(self._free_at_s, self._send_now, frame, done)

    def _send_now(self, frame: Frame, done: Future[None]) -> None:
        if not self._is_up:
            done.set_exception(Unavailable(self.peer_id, "the link has ended"))
            return
        self._connection.write(frame)
        done.set_result(None)

    def _open(self, sending: _Sending, frame: Frame) -> None:
        if not self._is_up:
            sending.done.set_exception(Unavailable(self.peer_id, "the link has ended"))
            return
        self._sendings[sending.number] = sending
        self._connection.write(frame)
        self._card.add(sending.outgoing)

    def _send_content(self, number: int) -> None:
        if (sending := self._sendings.get(number)) is not None and self._is_up:
            self._connection.write(Frame(Kind.CONTENT, transfer=number, body=read_all(sending.pieces)))

    def _cancel(self, number: int) -> None:
        sending = self._sendings.get(number)
        if sending is not None and not sending.outgoing.is_over:
            self._connection.write(Frame(Kind.CANCEL, transfer=number))
            self._settle(number, Outcome.CANCELLED)

    def _settle(self, number: int, outcome: Outcome, why: str = "") -> None:
        sending = self._sendings.pop(number, None)
        if sending is None:
            return
        sending.outgoing.is_over = True
        sent = sending.size_bytes if outcome is Outcome.DELIVERED else 0
        sending.done.set_result(TransferReport(outcome, sent, time.monotonic() - sending.began_s, why))

    # ------------------------------------------------------------ event loop: in

    def _take(self, frame: Frame) -> None:
        try:
            self._handle(frame)
        except (BallastError, ValueError, KeyError) as error:
            get_logger().error("what came over a link is wrong", peer=self.peer_id, why=f"{error}")
            self._break(f"{type(error).__name__}: {error}")

    def _handle(self, frame: Frame) -> None:
        match frame.kind:
            case Kind.MESSAGE:
                if not self._retired:
                    tensor = Activation(frame.size_bytes - len(frame.meta), frame.body) if frame.transfer else None
                    traffic = TrafficClass(frame.traffic)
                    self._receiver.on_message(self, Message(traffic, frame.topic, frame.stream, frame.meta, tensor))
            case Kind.OPENING:
                self._opened(frame)
            case Kind.CONTENT:
                self._arrived(frame)
            case Kind.CANCEL:
                self._end_incoming(frame.transfer, Outcome.CANCELLED)
            case Kind.REFUSED:
                self._settle(frame.transfer, Outcome.REFUSED, frame.meta.decode())
            case Kind.DELIVERED:
                self._settle(frame.transfer, Outcome.DELIVERED)
            case Kind.CLOSE:
                self._finish("closed")
            case _:
                raise ValueError(f"{frame.kind.name} on a link that is up")

    def _opened(self, frame: Frame) -> None:
        opening = Opening(
            frame.transfer, TrafficClass(frame.traffic), frame.topic, frame.stream, frame.size_bytes, frame.meta
        )
        stale = Refusal(f"epoch {self.epoch} is over")
        pieces = stale if self._retired else self._receiver.on_opening(self, opening)
        if isinstance(pieces, Refusal):
            self._connection.write(Frame(Kind.REFUSED, transfer=frame.transfer, meta=pieces.why.encode()))
            return
        if sum(piece.nbytes for piece in pieces) != frame.size_bytes:
            raise ValueError(f"{sum(piece.nbytes for piece in pieces)} bytes for {frame.size_bytes}")
        self._incoming[frame.transfer] = (opening, pieces)
        self._card.incoming_count += 1

    def _arrived(self, frame: Frame) -> None:
        if frame.transfer not in self._incoming:
            return  # it was refused
        write_all(self._incoming[frame.transfer][1], frame.body)
        self._end_incoming(frame.transfer, Outcome.DELIVERED)
        self._connection.write(Frame(Kind.DELIVERED, transfer=frame.transfer))

    def _end_incoming(self, number: int, outcome: Outcome) -> None:
        opening, _ = self._incoming.pop(number, (None, ()))
        if opening is not None:
            self._card.incoming_count -= 1
            self._receiver.on_transfer_end(self, opening, outcome)

    # ------------------------------------------------------------ event loop: the end

    def retire(self) -> None:
        self._retired = True
        self.begin_close()

    def begin_close(self) -> None:
        """Nothing more is sent. What the peer still sends is received until it does the same."""
        if self.is_up:
            self._is_closing = True
            self._connection.write(Frame(Kind.CLOSE))
            self._loop.call_later(_CLOSE_WITHIN_S, self._finish, "closed")

    def _lost(self, why: str) -> None:
        self._finish("closed" if self._is_closing else why)

    def _break(self, why: str) -> None:
        self._finish(why)

    def _finish(self, why: str) -> None:
        """Once. Transfers end after the link, as on a real one."""
        if not self._is_up:
            return
        self._is_up = False
        if not self._is_closing:
            self._connection.write(Frame(Kind.CLOSE))
        self._connection.close()
        for sending in list(self._sendings.values()):
            sending.outgoing.is_over = True
            sending.done.set_exception(Unavailable(self.peer_id, why))
        self._sendings.clear()
        self._receiver.on_link_end(self, Ending(why))
        for number in list(self._incoming):
            self._end_incoming(number, Outcome.BROKEN)
        self._ended(self)


class Connection(asyncio.Protocol):
    """Frames over TCP. While nobody is attached nothing more is read: what has come waits for the next who is."""

    def __init__(self, made: Callable[[Connection], None] | None = None) -> None:
        self._made = made
        self._transport: asyncio.Transport | None = None
        self._frames = Frames(MAX_HELLO_BYTES)
        self._early: list[Frame] = []  # of one read at most
        self._on_frame: Callable[[Frame], None] | None = None
        self._on_lost: Callable[[str], None] | None = None
        self._lost_why = ""

    def attach(self, on_frame: Callable[[Frame], None], on_lost: Callable[[str], None]) -> None:
        self._on_frame, self._on_lost = on_frame, on_lost
        while self._early and self._on_frame is on_frame:
            on_frame(self._early.pop(0))
        if self._lost_why:
            on_lost(self._lost_why)
        elif self._transport is not None and not self._transport.is_closing() and self._on_frame is on_frame:
            self._transport.resume_reading()

    def detach(self) -> None:
        self._on_frame = self._on_lost = None
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def trust(self) -> None:
        """The other side is a worker: from here on it may send frames of any size."""
        self._frames.max_bytes = MAX_BYTES

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        if self._made is not None:
            self._made(self)

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._frames.feed(data):
                if self._on_frame is None:
                    self._early.append(frame)
                else:
                    self._on_frame(frame)
        except ValueError as error:
            self._lose(str(error))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(str(exc) if exc is not None else "the connection ended")

    def write(self, frame: Frame) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame.encode())

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _lose(self, why: str) -> None:
        self._lost_why = self._lost_why or why
        if self._on_lost is not None:
            self._on_lost(why)
