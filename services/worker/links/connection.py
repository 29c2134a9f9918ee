"""A connection between two incarnations of workers, with the epochs joined by both. Subclasses transport the bytes.

A connection is opened for the first epoch that needs it and reused by later ones, because the same two workers share
groups repeatedly. An epoch begins when both sides have sent `join`, in either order, and ends with a `leave`. Messages
carry their epoch; messages of an epoch that this side has not joined are refused.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from threading import Condition
from typing import TYPE_CHECKING, NoReturn, Protocol

from ballast.common.errors import StaleEpoch, Unavailable
from services.worker.links.frame_kinds import FrameKind
from services.worker.links.handshake import Hello
from services.worker.links.ports import ConnectionFacts, LinkEnding, LinkState, Message
from services.worker.links.traffic import TrafficClass, TrafficCounts
from services.worker.links.transfer import Opening, Refusal, Transfer, TransferOutcome

if TYPE_CHECKING:
    import torch

_IDLE_S = 60.0  # time without an epoch after which a connection is closed; it may be reused before that
_MAX_EPOCHS = 64  # maximum epochs joined by the peer; the oldest that only the peer has joined are dropped
_LOOK_S = 0.1  # interval for checking whether the peer has ended this connection


class Receiver(Protocol):
    """Receives a link's messages and transfers.

    Its methods are called on the connection's threads, one call at a time per lane. They must return at once and not
    wait for the link; sending is allowed. An exception breaks the connection.
    """

    def device_of(self, topic: int) -> torch.device | str:
        """Return the device on which tensors of a topic are delivered; the host for tensors that the CPU reads."""
        ...

    def on_message(self, link: Link, message: Message) -> None: ...

    def on_opening(self, link: Link, opening: Opening) -> Sequence[torch.Tensor] | Refusal:
        """Accept a transfer and return its destination: contiguous tensors of exactly `total_bytes` in total.

        They are written to until `on_transfer_end`, and must not be freed or unmapped before.
        """
        ...

    def on_transfer_end(self, link: Link, opening: Opening, outcome: TransferOutcome) -> None:
        """Called once for every accepted transfer."""
        ...

    def on_link_end(self, link: Link, ending: LinkEnding) -> None:
        """Called once for every link. A broken link is reported immediately, followed by the ends of its transfers. A
        link retired by this side is reported on the retiring thread.
        """
        ...


class Link:
    """One epoch of a connection. Thread-safe."""

    def __init__(self, connection: Connection, epoch: int) -> None:
        self.connection = connection
        self.peer_id = connection.peer_id
        self.epoch = epoch
        self.retired = False  # True: nothing is sent, and arriving messages are refused and counted
        self.met = False  # True: the peer has joined the epoch at some point
        self.ended: LinkState | None = None  # set by the connection, before the receiver is notified

    @property
    def state(self) -> LinkState:
        return self.ended or self.connection.state

    @property
    def has_ended(self) -> bool:
        """True if this side has retired the epoch, or knows that the link has ended."""
        return self.retired or self.ended is not None

    @property
    def is_up(self) -> bool:
        """True if both sides have joined the epoch, as far as this side knows."""
        return self.ended is None and self.connection.is_shared(self)

    @property
    def counts(self) -> TrafficCounts:
        """Traffic counters of the whole connection, over all its epochs."""
        return self.connection.counts

    @property
    def packed_below_bytes(self) -> int:
        """Size limit below which awaited transfers are sent within a message, which is faster."""
        return self.connection.packed_below_bytes

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
        """Send an urgent message. The tensor must not change until the future completes.

        Completion means that the message has left this process's memory, not that the peer has handled it. Messages of
        one class are ordered.

        Raises:
            Overloaded: the queue had no room within `timeout_s`.
            InvalidRequest: the message exceeds a bound, or the tensor is not contiguous.
            Unavailable: the link has ended.
            StaleEpoch: this side has retired the link.
        """
        self._refuse_ended()
        return self.connection.send(self.epoch, traffic, topic, meta, tensor, stream, timeout_s)

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
        """Send the bytes of `pieces` without copying them first. Within a class, transfers with a smaller `rank` are
        sent first; those of equal rank share the link.

        Raises:
            Overloaded: too many transfers are unfinished.
            InvalidRequest, Unavailable, StaleEpoch: as in `send`.
        """
        self._refuse_ended()
        return self.connection.transfer(self.epoch, traffic, pieces, topic, meta, stream, rank)

    def as_tensor(self, data: bytes) -> torch.Tensor:
        """Return bytes that are too long for a frame's meta as a tensor."""
        return self.connection.as_tensor(data)

    def pack(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a contiguous copy of `pieces`, to be sent as one message. See `packed_below_bytes`."""
        return self.connection.pack(pieces)

    def unpack(self, packed: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
        """Copy the output of `pack` into `pieces` of the same total size."""
        self.connection.unpack(packed, pieces)

    def urgent(self) -> AbstractContextManager[None]:
        """Context manager that holds back bulk because an activation is due, for at most `hold_s` between two
        chunks.
        """
        return self.connection.urgent()

    def retire(self) -> None:
        """End the epoch and notify the peer. No more messages are sent, and arriving ones are refused."""
        self.connection.leave(self)

    def give_up(self, why: str) -> None:
        """Break the connection because a required message cannot be sent. No effect if the link has ended, because
        other epochs may still use the connection.
        """
        if not self.has_ended:
            self.connection.give_up(why)

    def _refuse_ended(self) -> None:
        if self.retired:
            raise StaleEpoch(f"link to {self.peer_id}", self.epoch, self.epoch + 1)
        if self.ended is not None:
            self.connection.refuse(f"the link of epoch {self.epoch} is {self.ended.value}")


class Connection(ABC):
    """A connection to one peer. Thread-safe."""

    def __init__(self, peer: Hello, receiver: Receiver) -> None:
        self.peer_id = peer.worker_id
        self.incarnation = peer.incarnation
        self.counts = TrafficCounts()
        self._receiver = receiver
        self._changed = Condition()  # notified when the state of the connection or of an epoch changes
        self._state = LinkState.UP
        self._links: dict[int, Link] = {}  # joined by this side, by epoch
        self._peer_epochs: set[int] = set()  # joined by the peer
        self._idle_since_s = time.monotonic()

    @property
    def state(self) -> LinkState:
        return self._state

    @property
    def is_up(self) -> bool:
        return self._state is LinkState.UP

    def is_shared(self, link: Link) -> bool:
        with self._changed:
            return self.is_up and self._links.get(link.epoch) is link and link.met

    def links(self) -> list[Link]:
        with self._changed:
            return [link for _, link in sorted(self._links.items())]

    def facts(self) -> ConnectionFacts:
        epochs = tuple(link.epoch for link in self.links() if link.is_up)
        queued, in_flight = self.bulk_bytes()
        return ConnectionFacts(self.peer_id, epochs, self._state, queued, in_flight, self.counts)

    # ------------------------------------------------------------ epochs

    def join(self, epoch: int, deadline_s: float, is_given_up: Callable[[], bool]) -> Link | None:
        """Join an epoch, and wait until the peer has joined it.

        Returns None if the peer does not join in time, the connection has ended, or the peer opens a new connection.
        """
        link = self.begin_join(epoch)
        if link is None:
            return None
        while not self._await_peer(link, deadline_s):
            if is_given_up():
                self.give_up("the peer has opened a new connection")
            if self._state in (LinkState.CLOSED, LinkState.BROKEN):  # while closing, the peer's join may still arrive
                return None
            if time.monotonic() >= deadline_s:
                self.leave(link)
                return None
        return link

    def begin_join(self, epoch: int) -> Link | None:
        """Join an epoch without waiting for the peer; None if the connection has ended."""
        with self._changed:
            if not self.is_up:
                return None
            link = self._links.setdefault(epoch, Link(self, epoch))
            link.met = link.met or epoch in self._peer_epochs
        self.tell(FrameKind.JOIN, epoch)
        return link

    def _await_peer(self, link: Link, deadline_s: float) -> bool:
        """Wait briefly until the peer has joined or the connection has ended. Returns True if it has joined."""
        with self._changed:
            self._changed.wait_for(
                lambda: link.met or self._state in (LinkState.CLOSED, LinkState.BROKEN),
                timeout=max(min(_LOOK_S, deadline_s - time.monotonic()), 0.0),
            )
            return link.met

    def leave(self, link: Link) -> None:
        """End an epoch; see `Link.retire`."""
        with self._changed:
            if link.retired or self._links.get(link.epoch) is not link:
                link.retired = True
                return
            link.retired = True
            del self._links[link.epoch]
            was_shared = link.met
            self._peer_epochs.discard(link.epoch)
            self._idle_since_s = time.monotonic()
        if was_shared:
            self.tell(FrameKind.LEAVE, link.epoch)
        else:
            self.tell_abandoned(link.epoch)
        self._end(link, LinkEnding(LinkState.CLOSED, "its epoch has ended"), tell=was_shared)

    def link_of(self, epoch: int) -> Link | None:
        """Return the link of a received frame's epoch. If there is none, count the frame as stale and return None."""
        with self._changed:
            link = self._links.get(epoch)
        self.counts.stale_frames += link is None
        return link

    def peer_joined(self, epoch: int) -> None:
        with self._changed:
            self._peer_epochs.add(epoch)
            if (link := self._links.get(epoch)) is not None:
                link.met = True
            if len(self._peer_epochs) > _MAX_EPOCHS:
                self._peer_epochs.discard(min(self._peer_epochs - self._links.keys(), default=epoch))
            self._changed.notify_all()

    def peer_left(self, epoch: int, *, abandoned: bool = False) -> None:
        """Handle the peer's end of an epoch. `abandoned`: it left before it knew that this side had joined."""
        with self._changed:
            was_joined = epoch in self._peer_epochs
            self._peer_epochs.discard(epoch)
            link = self._links.pop(epoch, None) if was_joined else None
            self._idle_since_s = time.monotonic()
        if link is not None:
            self._end(link, LinkEnding(LinkState.CLOSED, "the peer has left its epoch"))
            if abandoned:  # the notices have crossed: the peer believes that this side is in the epoch
                self.tell(FrameKind.LEAVE, epoch)

    def close_if_idle(self) -> None:
        """Close the connection if it has had no epoch for `_IDLE_S`; called periodically. A peer that joins an epoch
        while it closes opens a new connection.
        """
        with self._changed:
            is_idle = not self._links and time.monotonic() - self._idle_since_s > _IDLE_S
        if is_idle:
            self.begin_close()

    def _end(self, link: Link, ending: LinkEnding, *, tell: bool = True) -> None:
        link.ended = ending.state
        self.end_transfers(link.epoch, ending.why)
        if tell:
            self._receiver.on_link_end(link, ending)

    def _take_links(self) -> list[Link]:
        """Detach the links of this connection because it ends. Returns the links whose receivers must be notified.
        Called with the lock held.
        """
        shared = [link for _, link in sorted(self._links.items()) if link.met]
        for link in self._links.values():
            link.ended = self._state
        self._links.clear()
        return shared

    def refuse(self, why: str) -> NoReturn:
        raise Unavailable(self.peer_id, why)

    # ------------------------------------------------------------ for subclasses

    @property
    @abstractmethod
    def packed_below_bytes(self) -> int: ...

    @abstractmethod
    def tell(self, kind: FrameKind, epoch: int) -> None:
        """Notify the peer that this side joins an epoch (sent before its messages) or leaves it (sent after them)."""

    def tell_abandoned(self, epoch: int) -> None:
        """Notify the peer that this side leaves an epoch without knowing whether the peer has joined it."""
        self.tell(FrameKind.LEAVE, epoch)

    @abstractmethod
    def send(
        self,
        epoch: int,
        traffic: TrafficClass,
        topic: int,
        meta: bytes,
        tensor: torch.Tensor | None,
        stream: int,
        timeout_s: float,
    ) -> Future[None]: ...

    @abstractmethod
    def transfer(
        self,
        epoch: int,
        traffic: TrafficClass,
        pieces: Sequence[torch.Tensor],
        topic: int,
        meta: bytes,
        stream: int,
        rank: int,
    ) -> Transfer: ...

    @abstractmethod
    def as_tensor(self, data: bytes) -> torch.Tensor: ...

    @abstractmethod
    def pack(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor: ...

    @abstractmethod
    def unpack(self, packed: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None: ...

    @contextmanager
    def urgent(self) -> Generator[None]:
        yield

    def bulk_bytes(self) -> tuple[int, int]:
        """(queued bytes, maximum bytes in flight)."""
        return 0, 0

    @abstractmethod
    def end_transfers(self, epoch: int, why: str) -> None:
        """Fail the unfinished outgoing transfers of this epoch."""

    @abstractmethod
    def check(self) -> None:
        """Raise InvariantViolation if the sums of queued bytes are wrong."""

    @abstractmethod
    def give_up(self, why: str) -> None: ...

    @abstractmethod
    def begin_close(self) -> None:
        """Refuse new messages, send the queued urgent ones, and end transfers. Receiving continues."""

    @abstractmethod
    def close(self, timeout_s: float | None = None) -> None:
        """`begin_close`, then wait for the peer to close as well. Must not be called from one of the connection's own
        threads.
        """

    @abstractmethod
    def wait_ended(self, timeout_s: float) -> bool:
        """Wait until the connection has ended completely. Returns False on a timeout."""
