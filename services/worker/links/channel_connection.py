"""A connection over two channels, an urgent and a bulk lane, each with a sending and a receiving thread."""

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from threading import Event, Thread

import torch

from services.worker.links.bulk import BulkSender
from services.worker.links.config import TransportConfig
from services.worker.links.connection import Connection, Link, Receiver
from services.worker.links.copies import HOST, Copies
from services.worker.links.frame import Header
from services.worker.links.frame_kinds import FrameKind
from services.worker.links.gate import SharedWire, UrgentGate
from services.worker.links.handshake import Hello
from services.worker.links.lane import FrameWriter
from services.worker.links.pace import StagePace
from services.worker.links.pieces import Pieces
from services.worker.links.ports import Channels, LinkEnding, LinkState
from services.worker.links.receiving import BulkHandlers, BulkReceiver, UrgentHandlers, UrgentReceiver
from services.worker.links.traffic import TrafficClass
from services.worker.links.transfer import Transfer
from services.worker.links.urgent import UrgentSender

PACKED_BELOW_BYTES = 4 << 20


class ChannelConnection(Connection):
    """A `Connection` over real channels."""

    def __init__(
        self,
        peer: Hello,
        channels: Channels,
        config: TransportConfig,
        receiver: Receiver,
        dispose: Callable[[Callable[[], None]], None],
        pace: StagePace,
        copies: Copies,
    ) -> None:
        super().__init__(peer, receiver)
        self._config = config
        self._copies = copies
        self._dispose = dispose
        self._channels: Channels | None = channels
        self._ended = Event()
        self._gate = UrgentGate()
        self._build(channels, peer, pace)
        names = ("urgent-send", "urgent-receive", "bulk-send", "bulk-receive")
        bodies = (self._urgent.run, self._urgent_in.run, self._bulk.run, self._bulk_in.run)
        self._threads = [
            Thread(target=self._run, args=(body,), name=f"link-{self.peer_id}-{name}", daemon=True)
            for name, body in zip(names, bodies, strict=True)
        ]
        self._running = len(self._threads)
        for thread in self._threads:
            thread.start()

    def _build(self, channels: Channels, peer: Hello, pace: StagePace) -> None:
        config, counts, gate, terms = self._config, self.counts, self._gate, peer.terms
        rate = config.rate_bytes_per_s
        wire = None if rate is None else SharedWire(rate, urgent_first=config.urgent_first)
        copies = self._copies
        urgent_out = FrameWriter(channels.urgent, terms.urgent_frame_bytes, copies)
        bulk_out = FrameWriter(channels.bulk, terms.bulk_frame_bytes, copies)
        max_message = min(config.max_message_bytes, terms.max_message_bytes)
        max_transfer = min(config.max_transfer_bytes, terms.max_transfer_bytes)
        quiet = self.close_if_idle
        self._urgent = UrgentSender(self.peer_id, config, urgent_out, max_message, gate, counts, wire, quiet)
        self._bulk = BulkSender(self.peer_id, config, bulk_out, max_transfer, gate, counts, wire, pace)
        urgent_handlers = UrgentHandlers(
            link_of=self._link_of,
            device_of=self._receiver.device_of,
            on_message=self._receiver.on_message,
            on_answer=self._bulk.acknowledged,
            on_join=self.peer_joined,
            on_leave=lambda epoch, abandoned: self.peer_left(epoch, abandoned=abandoned),
            on_close=self.begin_close,
        )
        bulk_handlers = BulkHandlers(
            link_of=self._link_of,
            on_opening=self._receiver.on_opening,
            on_transfer_end=self._receiver.on_transfer_end,
            answer=self._answer,
            on_close=self.begin_close,
        )
        self._urgent_in = UrgentReceiver(self.peer_id, config, channels.urgent, copies, counts, urgent_handlers)
        self._bulk_in = BulkReceiver(self.peer_id, config, channels.bulk, copies, counts, bulk_handlers)

    def _link_of(self, header: Header) -> Link | None:
        return self.link_of(header.epoch)

    # ------------------------------------------------------------ sending

    @property
    def packed_below_bytes(self) -> int:
        return PACKED_BELOW_BYTES

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
        return self._urgent.send(epoch, traffic, topic, meta, tensor, stream, timeout_s)

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
        return self._bulk.submit(epoch, traffic, pieces, topic, meta, stream, rank)

    def as_tensor(self, data: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def pack(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        parts = Pieces(pieces, "pieces")
        whole = self._copies.empty(parts.total_bytes, HOST)
        if (mark := self._copies.mark()) is not None:
            mark.wait()
        self._copies.gather(parts, 0, whole)
        return whole

    def unpack(self, packed: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
        self._copies.scatter(Pieces(pieces, "pieces"), 0, packed)

    @contextmanager
    def urgent(self) -> Generator[None]:
        self._gate.enter()
        try:
            yield
        finally:
            self._gate.leave()

    def tell(self, kind: FrameKind, epoch: int) -> None:
        traffic = TrafficClass.CONTROL if kind is FrameKind.JOIN else TrafficClass.ACTIVATION
        self._urgent.tell(Header(kind=kind, traffic=traffic, epoch=epoch))

    def tell_abandoned(self, epoch: int) -> None:
        header = Header(kind=FrameKind.LEAVE, traffic=TrafficClass.ACTIVATION, epoch=epoch, stream=1)
        self._urgent.tell(header)

    def end_transfers(self, epoch: int, why: str) -> None:
        self._bulk.end(epoch, why)

    def bulk_bytes(self) -> tuple[int, int]:
        return self._bulk.queued_bytes(), self._bulk.in_flight_bytes

    def check(self) -> None:
        self._bulk.check()

    # ------------------------------------------------------------ ending

    def give_up(self, why: str) -> None:
        self._break(why)

    def begin_close(self) -> None:
        with self._changed:
            if self._state is not LinkState.UP:
                return
            self._state = LinkState.CLOSING
            self._changed.notify_all()
        self._bulk.close()
        self._urgent.close()

    def close(self, timeout_s: float | None = None) -> None:
        self.begin_close()
        if not self._ended.wait(self._config.close_timeout_s if timeout_s is None else timeout_s):
            self._break("the peer did not answer the close")
            self._ended.wait(self._config.close_timeout_s)

    def wait_ended(self, timeout_s: float) -> bool:
        if not self._ended.wait(timeout_s):
            return False
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    # ------------------------------------------------------------ called by the threads

    def _run(self, body: Callable[[], None]) -> None:
        try:
            body()
        except Exception as error:  # noqa: BLE001 any error, including a receiver's, ends this connection only
            self._break(f"{type(error).__name__}: {error}")
        finally:
            with self._changed:
                self._running -= 1
                is_last = self._running == 0
            if is_last:
                self._finish()

    def _break(self, why: str) -> None:
        """End both lanes at once. During a close this is no error, because the peer may finish first."""
        with self._changed:
            if self._state not in (LinkState.UP, LinkState.CLOSING) or self._channels is None:
                return
            was_up = self._state is LinkState.UP
            self._state = LinkState.BROKEN if was_up else LinkState.CLOSED
            links = self._take_links() if was_up else []
            self._changed.notify_all()
            channels = self._channels
        channels.urgent.abort()  # must precede all callbacks, since channels may access the callers' memory until then
        channels.bulk.abort()
        self._urgent.fail(why)
        self._bulk.fail(why)
        for link in links:
            self._receiver.on_link_end(link, LinkEnding(LinkState.BROKEN, why))

    def _finish(self) -> None:
        """Report the end of the connection, and schedule the destruction of its channels. Runs on the connection's last
        thread.
        """
        with self._changed:
            if self._state is not LinkState.BROKEN:
                self._state = LinkState.CLOSED
            links = self._take_links()
            self._changed.notify_all()
            channels = self._channels
        try:
            self._bulk_in.abandon()
            for link in links:
                self._receiver.on_link_end(link, LinkEnding(LinkState.CLOSED, "closed"))
        finally:
            if channels is not None:
                self._dispose(partial(self._destroy, channels))
            self._ended.set()  # must be last: a waiter may then end the thread that destroys the channels

    def _destroy(self, channels: Channels) -> None:
        with self._changed:
            self._channels = None
        channels.urgent.abort()
        channels.bulk.abort()
        for part in (self._urgent, self._urgent_in, self._bulk, self._bulk_in):
            part.release()
        channels.urgent.destroy()
        channels.bulk.destroy()
        channels.close()

    def _answer(self, kind: FrameKind, transfer: int, why: str) -> None:
        header = Header(kind=kind, traffic=TrafficClass.CONTROL, transfer=transfer)
        self._urgent.tell(header, why.encode()[:1024])
