"""A link: two workers, one epoch, an urgent and a bulk lane. A spare one gets its epoch later, by `adopt`."""

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from threading import Condition, Event, Thread
from typing import Protocol

import torch

from ballast.common.errors import StaleEpoch
from services.worker.links.bulk import BulkSender
from services.worker.links.channel import PairChannel
from services.worker.links.config import TransportConfig
from services.worker.links.frame import FrameKind, Header
from services.worker.links.gate import SharedWire, UrgentGate
from services.worker.links.handshake import Terms
from services.worker.links.lane import FrameWriter
from services.worker.links.pace import StagePace
from services.worker.links.pieces import Pieces
from services.worker.links.receiving import BulkHandlers, BulkReceiver, Message, UrgentHandlers, UrgentReceiver
from services.worker.links.store import PairStore
from services.worker.links.traffic import TrafficClass, TrafficCounts
from services.worker.links.transfer import Opening, Outcome, Refusal, Transfer
from services.worker.links.urgent import UrgentSender

NO_EPOCH = 0  # layouts are numbered from 1
PACKED_BELOW_BYTES = 4 << 20


class LinkState(Enum):
    UP = "up"
    CLOSING = "closing"
    CLOSED = "closed"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class LinkEnding:
    state: LinkState  # CLOSED or BROKEN
    why: str


@dataclass(frozen=True, slots=True)
class LinkFacts:
    peer_id: str
    epoch: int
    state: LinkState
    queued_bulk_bytes: int
    in_flight_bulk_bytes: int  # at most: what an activation may find before it
    counts: TrafficCounts


class Receiver(Protocol):
    """Where a link brings what comes in.

    Called on the link's own threads, for one link at most once at a time per lane. It must return at once and must
    not wait for anything of the link; sending is fine. An exception breaks the link.
    """

    def on_message(self, link: "Link", message: Message) -> None: ...

    def on_opening(self, link: "Link", opening: Opening) -> Sequence[torch.Tensor] | Refusal:
        """Where the bytes shall go: contiguous tensors that together have exactly `total_bytes`.

        They are written to until `on_transfer_end`; before that they must be neither freed nor unmapped.
        """
        ...

    def on_transfer_end(self, link: "Link", opening: Opening, outcome: Outcome) -> None:
        """Once for every opening that was not refused."""
        ...

    def on_link_end(self, link: "Link", ending: LinkEnding) -> None:
        """Once. A broken link is reported at once; transfers it cut off end right after."""
        ...


@dataclass(frozen=True, slots=True)
class Channels:
    urgent: PairChannel
    bulk: PairChannel
    store: PairStore  # NCCL asks it again when it first sends


class Link:
    """Safe for use from any thread."""

    def __init__(
        self,
        peer_id: str,
        epoch: int,
        channels: Channels,
        peer_terms: Terms,
        config: TransportConfig,
        receiver: Receiver,
        dispose: Callable[[Callable[[], None]], None],
        pace: StagePace,
    ) -> None:
        self.peer_id = peer_id
        self.epoch = epoch
        self._tag = epoch  # in all frames, whatever epoch a spare is adopted for
        self._asked = self._peer_asked = epoch  # for which each side has adopted it
        self.counts = TrafficCounts()
        self._config = config
        self._receiver = receiver
        self._dispose = dispose
        self._channels: Channels | None = channels
        self._lock = Condition()  # notified when the state changes, or what the peer asks for
        self._state = LinkState.UP
        self._retired = False
        self._ended = Event()
        self._gate = UrgentGate()
        self._build(channels, peer_terms, pace)
        names = ("urgent-send", "urgent-receive", "bulk-send", "bulk-receive")
        bodies = (self._urgent.run, self._urgent_in.run, self._bulk.run, self._bulk_in.run)
        self._threads = [
            Thread(target=self._run, args=(body,), name=f"link-{peer_id}-{epoch}-{name}", daemon=True)
            for name, body in zip(names, bodies, strict=True)
        ]
        self._running = len(self._threads)
        for thread in self._threads:
            thread.start()

    def _build(self, channels: Channels, peer_terms: Terms, pace: StagePace) -> None:
        rate = self._config.rate_bytes_per_s
        wire = None if rate is None else SharedWire(rate, urgent_first=self._config.urgent_first)
        config, epoch, counts = self._config, self.epoch, self.counts
        urgent_out = FrameWriter(channels.urgent, peer_terms.urgent_frame_bytes)
        bulk_out = FrameWriter(channels.bulk, peer_terms.bulk_frame_bytes)
        max_message = min(config.max_message_bytes, peer_terms.max_message_bytes)
        max_transfer = min(config.max_transfer_bytes, peer_terms.max_transfer_bytes)
        gate = self._gate
        self._urgent = UrgentSender(self.peer_id, epoch, config, urgent_out, max_message, gate, counts, wire)
        self._bulk = BulkSender(self.peer_id, epoch, config, bulk_out, max_transfer, gate, counts, wire, pace)
        urgent_handlers = UrgentHandlers(
            on_message=partial(self._receiver.on_message, self),
            on_answer=self._bulk.acknowledged,
            on_adopt=self._adoption_asked,
            on_close=self.begin_close,
            is_stale=self._is_stale,
        )
        bulk_handlers = BulkHandlers(
            on_opening=partial(self._receiver.on_opening, self),
            on_transfer_end=partial(self._receiver.on_transfer_end, self),
            answer=self._answer,
            on_close=self.begin_close,
            is_stale=self._is_stale,
        )
        self._urgent_in = UrgentReceiver(self.peer_id, config, channels.urgent, counts, urgent_handlers)
        self._bulk_in = BulkReceiver(self.peer_id, config, channels.bulk, counts, bulk_handlers)

    @property
    def state(self) -> LinkState:
        return self._state

    @property
    def packed_below_bytes(self) -> int:
        """Bulk that is less, and for which somebody waits, goes along with a message: it is there sooner."""
        return PACKED_BELOW_BYTES

    @property
    def is_up(self) -> bool:
        return self._state is LinkState.UP

    def facts(self) -> LinkFacts:
        bulk = self._bulk
        return LinkFacts(self.peer_id, self.epoch, self._state, bulk.queued_bytes(), bulk.in_flight_bytes, self.counts)

    # ------------------------------------------------------------ sending

    def send(
        self,
        traffic: TrafficClass,
        topic: int,
        *,
        meta: bytes = b"",
        tensor: torch.Tensor | None = None,
        stream: int = 0,
        timeout_s: float = 0.0,
    ) -> Future[None]:
        """Send an urgent message. The tensor must stay as it is until the future is done.

        Done means that it has left our memory, not that the peer has acted on it. Messages of a class stay in order.

        Raises:
            Overloaded: no room in the queue within `timeout_s`.
            InvalidRequest: over a bound, or not contiguous.
            Unavailable: the link has ended.
        """
        self._refuse_retired()
        return self._urgent.send(traffic, topic, meta, tensor, stream, timeout_s)

    def as_tensor(self, data: bytes) -> torch.Tensor:
        """What is too long to be meta, to be sent as a tensor of bytes."""
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def pack(self, pieces: Sequence[torch.Tensor], end: bytes) -> torch.Tensor:
        """A copy of what lies in `pieces` and then `end`, to be sent as one message. See `packed_below_bytes`."""
        body = self.as_tensor(end)
        parts = Pieces([*pieces, body], "pieces")
        whole = body.new_empty(parts.total_bytes)
        parts.gather(0, whole)
        return whole

    def unpack(self, packed: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
        """Into `pieces`, which take as many bytes, what `pack` took from others."""
        Pieces(pieces, "pieces").scatter(0, packed)

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
        """Send bulk bytes from where they lie. Inside a class the smaller `rank` goes first; equals share the link.

        Raises: as `send`.
        """
        self._refuse_retired()
        return self._bulk.submit(traffic, pieces, topic, meta, stream, rank)

    @contextmanager
    def urgent(self) -> Generator[None]:
        """While inside, an activation is due: bulk stands back, for `hold_s` between two chunks at most."""
        self._gate.enter()
        try:
            yield
        finally:
            self._gate.leave()

    # ------------------------------------------------------------ a spare gets its epoch

    def adopt(self, epoch: int, timeout_s: float, *, decides: bool) -> bool:
        """Make a spare that epoch's link: once both sides have asked for the same. A later epoch takes precedence.

        One side decides: the other one says that it has come, and waits for the answer. If both decided, one could give
        up at the moment in which the other takes it, and would hear of it too late.

        False: the peer has not asked in time, or either side wants it for another epoch by now, or the peer that
        decides has given it up.
        """
        with self._lock:
            if self._state is not LinkState.UP or self._retired or not self.is_spare or epoch < self._asked:
                return False
            self._asked = self.epoch = epoch  # the peer sends nothing for it before it has heard of this
        if not decides:
            self._tell_adoption(epoch)
        with self._lock:
            self._lock.wait_for(
                lambda: self._state is not LinkState.UP or self._asked != epoch or self._peer_asked >= epoch,
                timeout=timeout_s,
            )
            adopted = self._state is LinkState.UP and self._asked == self._peer_asked == epoch
        if decides and adopted:
            self._tell_adoption(epoch)
        return adopted

    def _tell_adoption(self, epoch: int) -> None:
        self._urgent.tell(Header(kind=FrameKind.ADOPT, traffic=TrafficClass.CONTROL, epoch=self._tag, stream=epoch))

    def give_back(self) -> bool:
        """A spare that is not wanted any more begins to close. False: somebody wants it for an epoch just now."""
        with self._lock:
            if self._asked != NO_EPOCH or self._peer_asked != NO_EPOCH:
                return False
            self._retired = True
        self.begin_close()
        return True

    @property
    def was_spare(self) -> bool:
        return self._tag == NO_EPOCH

    @property
    def asked_epoch(self) -> int:
        """For which this side has adopted it last."""
        return self._asked

    @property
    def peer_asked_epoch(self) -> int:
        return self._peer_asked

    @property
    def is_spare(self) -> bool:
        """No epoch's link yet: nobody counts on it."""
        return self._asked != self._peer_asked or self._asked == NO_EPOCH

    def _adoption_asked(self, epoch: int) -> None:
        """Of the peer that decides: it has."""
        with self._lock:
            is_other = not self.is_spare and epoch != self._asked
            if not is_other:
                self._peer_asked = epoch
                self._lock.notify_all()
        if is_other:
            self._break(f"the peer wants it for epoch {epoch}, and it is that of epoch {self.epoch}")

    # ------------------------------------------------------------ ending

    def retire(self) -> None:
        """The epoch is over: nothing more is sent, and what still comes is refused and counted."""
        self._retired = True

    @property
    def retired(self) -> bool:
        """By this side."""
        return self._retired

    def give_up(self, why: str) -> None:
        """What had to be sent cannot be. The link breaks, here and at the peer; nothing if it has ended already."""
        self._break(why)

    def begin_close(self) -> None:
        """Accept nothing more, let urgent messages out, end transfers. What the peer still sends is received."""
        with self._lock:
            if self._state is not LinkState.UP:
                return
            self._state = LinkState.CLOSING
            self._lock.notify_all()
        self._bulk.close()
        self._urgent.close()

    def close(self, timeout_s: float | None = None) -> None:
        """`begin_close`, then wait for the peer to do the same. Not from a link's thread."""
        self.begin_close()
        if not self._ended.wait(self._config.close_timeout_s if timeout_s is None else timeout_s):
            self._break("the peer did not answer the close")
            self._ended.wait(self._config.close_timeout_s)

    def wait_ended(self, timeout_s: float) -> bool:
        """True: no thread of this link is left."""
        if not self._ended.wait(timeout_s):
            return False
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def check(self) -> None:
        self._bulk.check()

    # ------------------------------------------------------------ the threads' side

    def _run(self, body: Callable[[], None]) -> None:
        try:
            body()
        except Exception as error:  # noqa: BLE001 whatever goes wrong, a receiver's bug included, ends this link only
            self._break(f"{type(error).__name__}: {error}")
        finally:
            with self._lock:
                self._running -= 1
                is_last = self._running == 0
            if is_last:
                self._finish()

    def _break(self, why: str) -> None:
        """Both lanes end at once. While closing this is how the slower side sees the faster one go."""
        with self._lock:
            if self._state not in (LinkState.UP, LinkState.CLOSING) or self._channels is None:
                return
            was_up = self._state is LinkState.UP
            self._state = LinkState.BROKEN if was_up else LinkState.CLOSED
            self._lock.notify_all()
            channels = self._channels
        channels.urgent.abort()  # before anyone is told: until then the channels may touch the callers' memory
        channels.bulk.abort()
        self._urgent.fail(why)
        self._bulk.fail(why)
        if was_up:
            self._receiver.on_link_end(self, LinkEnding(LinkState.BROKEN, why))

    def _finish(self) -> None:
        """On the last thread to end."""
        with self._lock:
            was_broken = self._state is LinkState.BROKEN
            self._state = LinkState.BROKEN if was_broken else LinkState.CLOSED
            self._lock.notify_all()
            channels = self._channels
        try:
            self._bulk_in.abandon()
            if not was_broken:
                self._receiver.on_link_end(self, LinkEnding(LinkState.CLOSED, "closed"))
        finally:
            if channels is not None:
                self._dispose(partial(self._destroy, channels))
            self._ended.set()  # whoever has waited for it may end what disposes

    def _destroy(self, channels: Channels) -> None:
        with self._lock:
            self._channels = None
        channels.urgent.abort()
        channels.bulk.abort()
        for part in (self._urgent, self._urgent_in, self._bulk, self._bulk_in):
            part.release()
        channels.urgent.destroy()
        channels.bulk.destroy()
        channels.store.close()

    def _answer(self, kind: FrameKind, transfer: int, why: str) -> None:
        header = Header(kind=kind, traffic=TrafficClass.CONTROL, epoch=self._tag, transfer=transfer)
        self._urgent.tell(header, why.encode()[:1024])

    def _is_stale(self, header: Header) -> bool:
        stale = self._retired or header.epoch != self._tag
        self.counts.stale_frames += stale
        return stale

    def _refuse_retired(self) -> None:
        if self._retired:
            raise StaleEpoch(f"link to {self.peer_id}", self.epoch, self.epoch + 1)
