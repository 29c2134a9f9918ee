"""Receives a link's urgent messages, and its bulk transfers directly into their destinations."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ballast.common.errors import InvalidRequest, PeerViolation
from services.worker.links.config import TransportConfig
from services.worker.links.connection import Link
from services.worker.links.copies import HOST, Copies
from services.worker.links.frame import Header
from services.worker.links.frame_kinds import FrameKind
from services.worker.links.lane import Frame, FrameReader
from services.worker.links.pieces import Pieces
from services.worker.links.ports import Channel, Message, Pending
from services.worker.links.traffic import TrafficCounts
from services.worker.links.transfer import Opening, Refusal, TransferOutcome


@dataclass(frozen=True, slots=True)
class UrgentHandlers:
    link_of: Callable[[Header], Link | None]  # None: this worker has not joined the epoch
    device_of: Callable[[int], torch.device | str]  # device on which tensors of a topic are delivered
    on_message: Callable[[Link, Message], None]
    on_answer: Callable[[int, TransferOutcome, str], None]  # called with answers to this side's transfers
    on_join: Callable[[int], None]
    on_leave: Callable[[int, bool], None]  # True: the peer did not know that this side had joined
    on_close: Callable[[], None]


class UrgentReceiver:
    """Receives urgent messages. `run` is the body of one thread, which ends with the peer's CLOSE or an exception."""

    def __init__(
        self,
        peer: str,
        config: TransportConfig,
        channel: Channel,
        copies: Copies,
        counts: TrafficCounts,
        handlers: UrgentHandlers,
    ) -> None:
        self._peer = peer
        self._config = config
        self._channel = channel
        self._copies = copies
        self._counts = counts
        self._handlers = handlers
        frame_bytes = config.frame_bytes(urgent=True)
        self._reader = FrameReader(channel, peer, frame_bytes, config.posted_frames)

    def run(self) -> None:
        while True:
            frame = self._reader.next(self._config.silence_timeout_s)
            header = frame.header
            match header.kind:
                case FrameKind.MESSAGE:
                    self._take_message(frame)
                case FrameKind.DELIVERED:
                    self._handlers.on_answer(header.transfer, TransferOutcome.DELIVERED, "")
                case FrameKind.REFUSED:
                    self._handlers.on_answer(
                        header.transfer, TransferOutcome.REFUSED, frame.meta.decode(errors="replace")
                    )
                case FrameKind.KEEPALIVE:
                    pass
                case FrameKind.JOIN:
                    self._handlers.on_join(header.epoch)
                case FrameKind.LEAVE:
                    self._handlers.on_leave(header.epoch, bool(header.stream))
                case FrameKind.CLOSE:
                    self._handlers.on_close()
                    return
                case _:
                    raise PeerViolation(self._peer, f"{header.kind.name} on the urgent lane")

    def release(self) -> None:
        self._reader.release()

    def _take_message(self, frame: Frame) -> None:
        header = frame.header
        if not header.traffic.is_urgent or header.payload_bytes > self._config.max_message_bytes:
            raise PeerViolation(self._peer, f"message of class {header.traffic.name} with {header.payload_bytes} bytes")
        began_s = time.monotonic()
        payload = self._copies.empty(header.payload_bytes, _arrives_on(header, self._channel, self._peer))
        if frame.inline is not None:
            payload.copy_(frame.inline)
        elif header.payload_bytes:
            self._channel.post_payload(payload).wait(self._config.send_timeout_s)
        link = self._handlers.link_of(header)
        if link is None:
            return
        counted = self._counts.received[header.traffic]
        counted.messages += 1
        counted.total_bytes += header.payload_bytes + header.meta_bytes
        tensor = None
        if header.shape:
            tensor = self._to_device(header.topic, payload).view(header.dtype).view(header.shape)
        took_s = time.monotonic() - began_s
        message = Message(header.traffic, header.topic, header.stream, frame.meta, tensor, took_s)
        self._handlers.on_message(link, message)

    def _to_device(self, topic: int, payload: torch.Tensor) -> torch.Tensor:
        device = torch.device(self._handlers.device_of(topic))
        if payload.device == device:
            return payload
        there = self._copies.empty(payload.numel(), device)
        with self._copies.copying():
            there.copy_(payload, non_blocking=True)
        return there


def _arrives_on(header: Header, channel: Channel, peer: str) -> torch.device:
    """Return the device into whose memory a channel receives a payload."""
    if not header.on_device:
        return HOST
    if channel.device == HOST:
        raise PeerViolation(peer, "a payload between devices, but this channel only carries payloads between hosts")
    return channel.device


@dataclass(slots=True)
class _Incoming:
    link: Link | None
    opening: Opening
    pieces: Pieces | None  # None: the transfer is refused, and its bytes are discarded
    announced_bytes: int = 0
    received_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Arriving:
    pending: Pending
    incoming: _Incoming
    offset: int
    payload: torch.Tensor
    in_place: bool


@dataclass(frozen=True, slots=True)
class BulkHandlers:
    link_of: Callable[[Header], Link | None]
    on_opening: Callable[[Link, Opening], Sequence[torch.Tensor] | Refusal]
    on_transfer_end: Callable[[Link, Opening, TransferOutcome], None]
    answer: Callable[[FrameKind, int, str], None]
    on_close: Callable[[], None]


class BulkReceiver:
    """Receives bulk transfers. `run` is the body of one thread; `abandon` ends unfinished transfers."""

    def __init__(
        self,
        peer: str,
        config: TransportConfig,
        channel: Channel,
        copies: Copies,
        counts: TrafficCounts,
        handlers: BulkHandlers,
    ) -> None:
        self._peer = peer
        self._config = config
        self._channel = channel
        self._copies = copies
        self._counts = counts
        self._handlers = handlers
        frame_bytes = config.frame_bytes(urgent=False)
        self._reader = FrameReader(channel, peer, frame_bytes, config.posted_frames)
        self._incoming: dict[int, _Incoming] = {}
        self._arriving: deque[_Arriving] = deque()

    def run(self) -> None:
        promised = False  # True: another frame follows, so completions may wait until the window is full
        while True:
            while self._arriving and (not promised or len(self._arriving) >= self._config.window_chunks):
                self._complete(self._arriving.popleft())
            frame = self._reader.next(self._config.silence_timeout_s)
            promised = frame.header.more
            match frame.header.kind:
                case FrameKind.OPENING:
                    self._open(frame)
                case FrameKind.CHUNK:
                    self._take_chunk(frame)
                case FrameKind.CANCEL:
                    self._cancel(frame.header)
                case FrameKind.KEEPALIVE:
                    pass
                case FrameKind.CLOSE:
                    self._drain()
                    self._handlers.on_close()
                    return
                case _:
                    raise PeerViolation(self._peer, f"{frame.header.kind.name} on the bulk lane")

    def abandon(self) -> None:
        """End unfinished transfers. The lane must have ended, so that no write to the destinations is under way."""
        self._arriving.clear()
        unfinished = list(self._incoming.values())
        self._incoming.clear()
        for incoming in unfinished:
            self._end(incoming, TransferOutcome.BROKEN)

    def release(self) -> None:
        self._reader.release()

    def _open(self, frame: Frame) -> None:
        header = frame.header
        if header.transfer in self._incoming:
            raise PeerViolation(self._peer, f"transfer {header.transfer} opened twice")
        opening = Opening(header.transfer, header.traffic, header.topic, header.stream, header.total_bytes, frame.meta)
        link = self._handlers.link_of(header)
        pieces = self._destination(link, header, opening)
        if isinstance(pieces, Refusal):
            self._handlers.answer(FrameKind.REFUSED, header.transfer, pieces.why)
            pieces = None
        incoming = _Incoming(link, opening, pieces)
        if header.total_bytes:
            self._incoming[header.transfer] = incoming
        elif pieces is not None:
            self._deliver(incoming)

    def _destination(self, link: Link | None, header: Header, opening: Opening) -> Pieces | Refusal:
        if link is None:
            return Refusal(f"epoch {header.epoch} has ended")
        if header.total_bytes > self._config.max_transfer_bytes:
            return Refusal(f"{header.total_bytes} bytes, at most {self._config.max_transfer_bytes}")
        if len(self._incoming) >= self._config.max_transfers:
            return Refusal(f"{len(self._incoming)} transfers are unfinished already")
        answer = self._handlers.on_opening(link, opening)
        if isinstance(answer, Refusal):
            return answer
        pieces = Pieces(answer, "destination")
        if pieces.total_bytes != header.total_bytes:
            raise InvalidRequest("destination", f"{pieces.total_bytes} bytes instead of {header.total_bytes}")
        return pieces

    def _take_chunk(self, frame: Frame) -> None:
        header = frame.header
        incoming = self._incoming.get(header.transfer)
        if incoming is None:
            raise PeerViolation(self._peer, f"chunk of transfer {header.transfer}, which is not open")
        self._check_chunk(header, incoming)
        incoming.announced_bytes += header.payload_bytes
        if frame.inline is not None:
            self._place(incoming, header.offset_bytes, frame.inline, in_place=False)
            return
        device, view = _arrives_on(header, self._channel, self._peer), None
        if incoming.pieces is not None:
            view = incoming.pieces.view(header.offset_bytes, header.payload_bytes)
        in_place = view is not None and view.device == device
        payload = view if view is not None and in_place else self._copies.empty(header.payload_bytes, device)
        pending = self._channel.post_payload(payload)
        self._arriving.append(_Arriving(pending, incoming, header.offset_bytes, payload, in_place))

    def _check_chunk(self, header: Header, incoming: _Incoming) -> None:
        end = header.offset_bytes + header.payload_bytes
        in_order = header.offset_bytes == incoming.announced_bytes
        in_bounds = 0 < header.payload_bytes <= self._config.max_message_bytes and end <= incoming.opening.total_bytes
        if not in_order or not in_bounds:
            raise PeerViolation(
                self._peer,
                f"chunk [{header.offset_bytes}, {end}) of transfer {header.transfer} after "
                f"{incoming.announced_bytes} of {incoming.opening.total_bytes} bytes",
            )

    def _complete(self, arriving: _Arriving) -> None:
        arriving.pending.wait(self._config.send_timeout_s)
        self._place(arriving.incoming, arriving.offset, arriving.payload, in_place=arriving.in_place)

    def _place(self, incoming: _Incoming, offset: int, payload: torch.Tensor, *, in_place: bool) -> None:
        size = payload.numel()
        if incoming.pieces is None:
            self._counts.discarded_bytes += size
        else:
            if not in_place:
                self._copies.scatter(incoming.pieces, offset, payload)
                self._counts.copied_bytes += size
            self._counts.received[incoming.opening.traffic].total_bytes += size
        incoming.received_bytes += size
        if incoming.received_bytes == incoming.opening.total_bytes:
            del self._incoming[incoming.opening.transfer]
            if incoming.pieces is not None:
                self._deliver(incoming)

    def _deliver(self, incoming: _Incoming) -> None:
        self._counts.received[incoming.opening.traffic].messages += 1
        self._end(incoming, TransferOutcome.DELIVERED)
        self._handlers.answer(FrameKind.DELIVERED, incoming.opening.transfer, "")

    def _cancel(self, header: Header) -> None:
        self._drain()
        incoming = self._incoming.pop(header.transfer, None)
        if incoming is not None:
            self._end(incoming, TransferOutcome.CANCELLED)

    def _end(self, incoming: _Incoming, outcome: TransferOutcome) -> None:
        """Notify the receiver of a transfer's end, unless the transfer was refused."""
        if incoming.link is not None and incoming.pieces is not None:
            self._handlers.on_transfer_end(incoming.link, incoming.opening, outcome)

    def _drain(self) -> None:
        while self._arriving:
            self._complete(self._arriving.popleft())
