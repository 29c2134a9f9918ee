"""Sends urgent messages, control before activations, each posted at once if the window permits."""

import heapq
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from threading import Condition

import torch

from ballast.common.errors import InvalidRequest, Overloaded, Unavailable
from services.worker.links.config import TransportConfig
from services.worker.links.frame import MAX_DIMENSIONS, SUPPORTED_DTYPES, Header
from services.worker.links.frame_kinds import FrameKind
from services.worker.links.gate import SharedWire, UrgentGate
from services.worker.links.lane import FrameWriter
from services.worker.links.pieces import as_bytes
from services.worker.links.ports import Broken, ChannelBroken, Pending
from services.worker.links.traffic import TrafficClass, TrafficCounts

_LAST = max(TrafficClass) + 1  # sorts after every class


@dataclass(slots=True, order=True)
class _UrgentMessage:
    order: tuple[int, int]  # class, sequence number
    header: Header = field(compare=False)
    meta: bytes = field(compare=False)
    payload: torch.Tensor | None = field(compare=False)  # flat bytes; the caller's memory
    size_bytes: int = field(compare=False)
    queued_at_s: float = field(compare=False)
    done: Future[None] = field(compare=False)
    is_ready: bool = field(compare=False, default=True)  # the payload can be posted in place
    failure: str = field(compare=False, default="")  # why the message cannot be sent
    pending: list[Pending] = field(compare=False, default_factory=list[Pending])


class UrgentSender:
    """Sends urgent messages. `run` is the body of the thread that waits for completions. Messages are posted by that
    thread or by the caller's.
    """

    def __init__(
        self,
        peer: str,
        config: TransportConfig,
        writer: FrameWriter,
        max_message_bytes: int,
        gate: UrgentGate,
        counts: TrafficCounts,
        wire: SharedWire | None,
        on_quiet: Callable[[], None],
    ) -> None:
        """`on_quiet` is called periodically while there is no message to send."""
        self._on_quiet = on_quiet
        self._peer = peer
        self._config = config
        self._writer = writer
        self._max_message_bytes = max_message_bytes
        self._gate = gate
        self._counts = counts
        self._wire = wire
        self._changed = Condition()
        self._queue: list[_UrgentMessage] = []  # heap
        self._crossing: tuple[_UrgentMessage, float] | None = None  # message on the emulated wire, and until when
        self._in_flight: deque[_UrgentMessage] = deque()
        self._unsent_bytes = 0  # queued and in flight
        self._arrivals = 0
        self._refusal: str | None = None  # reason for refusing new messages
        self._broken = False

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
        payload = None if tensor is None else as_bytes(tensor, "tensor")
        size_bytes = len(meta) + (0 if payload is None else payload.numel())
        self._refuse_bad(traffic, meta, tensor, size_bytes)
        header = Header(
            kind=FrameKind.MESSAGE,
            traffic=traffic,
            epoch=epoch,
            stream=stream,
            topic=topic,
            dtype=torch.uint8 if tensor is None else tensor.dtype,
            shape=() if tensor is None else tuple(tensor.shape) or (1,),
        )
        with self._changed:
            self._wait_for_room(size_bytes, timeout_s)
            return self._accept(header, meta, payload, size_bytes)

    def tell(self, header: Header, meta: bytes = b"") -> None:
        """Send a frame of the link itself. No limits apply, because every such frame answers a received one."""
        with self._changed:
            if self._refusal is None:
                self._accept(header, meta, None, len(meta))

    def close(self) -> None:
        """Send the queued messages, then CLOSE. Refuse new messages."""
        with self._changed:
            if self._refusal is not None:
                return
            self._refusal = "the link is closed"
            closing = Header(kind=FrameKind.CLOSE, traffic=TrafficClass.CONTROL)
            self._accept(closing, b"", None, 0, order_class=_LAST)

    def fail(self, why: str) -> None:
        """Fail all unfinished messages, because the channel was lost."""
        with self._changed:
            self._refusal, self._broken = why, True
            failed = [*self._in_flight, *([self._crossing[0]] if self._crossing else []), *self._queue]
            self._queue.clear()
            self._crossing = None
            self._changed.notify_all()
        for outgoing in failed:
            _settle(outgoing.done, Unavailable(self._peer, why))

    def release(self) -> None:
        """Drop the posted sends, which reference the channel. The channel must have been aborted, and `run` must have
        ended.
        """
        self._in_flight.clear()

    def run(self) -> None:
        while not self._broken:
            outgoing = self._oldest_in_flight()
            if outgoing is None:
                continue
            if outgoing.header.kind is FrameKind.KEEPALIVE:
                self._on_quiet()
            for pending in outgoing.pending:
                pending.wait(self._config.send_timeout_s)
            self._complete(outgoing)
            if outgoing.header.kind is FrameKind.CLOSE:
                return

    # ------------------------------------------------------------ below: called with _changed held, except _complete

    def _oldest_in_flight(self) -> _UrgentMessage | None:
        """Post all messages that may be posted. Returns the oldest message in flight; None if there is none after a
        short wait.
        """
        with self._changed:
            self._post_ready()
            if self._in_flight:
                return self._in_flight[0]
            if not self._changed.wait(self._until_next_s()) and not self._waiting_count and not self._broken:
                quiet = Header(kind=FrameKind.KEEPALIVE, traffic=TrafficClass.CONTROL)
                self._accept(quiet, b"", None, 0)
            return self._in_flight[0] if self._in_flight else None

    def _complete(self, outgoing: _UrgentMessage) -> None:
        with self._changed:
            if self._broken:
                return
            self._in_flight.popleft()
            self._unsent_bytes -= outgoing.size_bytes
            self._post_ready()
            self._changed.notify_all()
        if outgoing.header.kind is FrameKind.MESSAGE and self._wire is None:
            self._gate.leave()
        _settle(outgoing.done, None)

    def _accept(
        self, header: Header, meta: bytes, payload: torch.Tensor | None, size_bytes: int, order_class: int | None = None
    ) -> Future[None]:
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()  # a queued message cannot be cancelled
        self._arrivals += 1
        order = (header.traffic if order_class is None else order_class, self._arrivals)
        outgoing = _UrgentMessage(order, header, meta, payload, size_bytes, time.monotonic(), done)
        heapq.heappush(self._queue, outgoing)
        if header.kind is FrameKind.MESSAGE:
            if header.traffic is TrafficClass.ACTIVATION:
                self._gate.activation_at_s = outgoing.queued_at_s
            if self._wire is None:
                self._gate.enter()
        if self._wire is not None:  # the wire then holds back bulk until this message has crossed
            self._wire.urgent_waits()
        self._unsent_bytes += size_bytes
        if payload is not None and not self._writer.is_ready(payload):
            outgoing.is_ready = False
            self._writer.fetch(payload, partial(self._fetched, outgoing))
        self._post_ready()
        self._changed.notify_all()
        return done

    def _fetched(self, outgoing: _UrgentMessage, payload: torch.Tensor | None) -> None:
        """Mark a message as ready once its payload has been fetched. It keeps its place in its class. Called on any
        thread.
        """
        with self._changed:
            outgoing.payload, outgoing.is_ready = payload, True
            outgoing.failure = "" if payload is not None else "its tensor could not be read from the device"
            self._post_ready()
            self._changed.notify_all()

    def _post_ready(self) -> None:
        while len(self._in_flight) < self._config.urgent_window and not self._broken:
            outgoing = self._next_to_post()
            if outgoing is None:
                return
            self._in_flight.append(outgoing)
            try:
                if outgoing.failure:
                    raise ChannelBroken(outgoing.failure)
                outgoing.pending = self._writer.post(outgoing.header, outgoing.meta, outgoing.payload)
            except ChannelBroken as error:
                # The sending thread takes it from `_in_flight` and reports the error through the caller's future.
                outgoing.pending = [Broken(str(error))]
            if outgoing.header.kind is FrameKind.MESSAGE:
                counted = self._counts.sent[outgoing.header.traffic]
                counted.messages += 1
                counted.total_bytes += outgoing.size_bytes
                counted.waited_s += time.monotonic() - outgoing.queued_at_s

    def _next_to_post(self) -> _UrgentMessage | None:
        """Return the next message of the queue; with an emulated wire, only once the message has crossed it."""
        if self._wire is None:
            return heapq.heappop(self._queue) if self._has_ready else None
        if self._crossing is None:
            if not self._has_ready:
                return None
            first = self._queue[0]
            crossed_at_s = self._wire.take_urgent(first.size_bytes, first.queued_at_s)
            if crossed_at_s is None:
                return None
            self._crossing = (heapq.heappop(self._queue), crossed_at_s)
        outgoing, crossed_at_s = self._crossing
        if time.monotonic() < crossed_at_s:
            return None
        self._crossing = None
        return outgoing

    @property
    def _has_ready(self) -> bool:
        return bool(self._queue) and self._queue[0].is_ready

    @property
    def _waiting_count(self) -> int:
        """Number of messages that are queued but not posted."""
        return len(self._queue) + (self._crossing is not None)

    def _until_next_s(self) -> float:
        """Seconds to wait, unless a message is queued earlier."""
        if self._wire is None or not (self._crossing or self._has_ready):
            return self._config.keepalive_s
        at_s = self._wire.free_at_s if self._crossing is None else self._crossing[1]
        return min(max(at_s - time.monotonic(), 0), self._config.keepalive_s)

    def _wait_for_room(self, size_bytes: int, timeout_s: float) -> None:
        def has_room() -> bool:
            return self._refusal is not None or (
                self._waiting_count + len(self._in_flight) < self._config.max_queued_messages
                and self._unsent_bytes + size_bytes <= self._config.max_queued_bytes
            )

        if not self._changed.wait_for(has_room, timeout=timeout_s):
            why = f"link to {self._peer}: {self._waiting_count} messages, {self._unsent_bytes} bytes unsent"
            raise Overloaded(why, retry_after_s=0.01)
        if self._refusal is not None:
            raise Unavailable(self._peer, self._refusal)

    def _refuse_bad(self, traffic: TrafficClass, meta: bytes, tensor: torch.Tensor | None, size_bytes: int) -> None:
        if not traffic.is_urgent:
            raise InvalidRequest("traffic", f"{traffic.name} is bulk: use transfer()")
        if len(meta) > self._writer.max_meta_bytes():
            raise InvalidRequest("meta", f"{len(meta)} bytes, at most {self._writer.max_meta_bytes()}")
        if size_bytes > min(self._max_message_bytes, self._config.max_queued_bytes):
            raise InvalidRequest("tensor", f"message of {size_bytes} bytes, at most {self._max_message_bytes}")
        if tensor is not None and (tensor.dtype not in SUPPORTED_DTYPES or tensor.dim() > MAX_DIMENSIONS):
            raise InvalidRequest("tensor", f"{tensor.dtype} with {tensor.dim()} dimensions cannot be sent")


def _settle(done: Future[None], error: Exception | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
