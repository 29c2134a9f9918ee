"""What links need of others, and others of links. Nothing here needs torch: emulated workers have none.

DataPlane   all links of a worker: see `plane`
Connection  two lives of workers, kept while both may need it: see `connection`
Link        one epoch that both take part in, over their connection: see `link`
Receiver    where what comes in is brought
Opener      makes a connection of the sockets on which two workers have met
Transport   makes the two channels of a real connection
Channel     messages and memory between two processes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from services.worker.links.traffic import TrafficClass, TrafficCounts

if TYPE_CHECKING:
    import socket

    import torch


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
class ConnectionFacts:
    peer_id: str
    epochs: tuple[int, ...]  # that both sides take part in
    state: LinkState
    queued_bulk_bytes: int
    in_flight_bulk_bytes: int  # at most: what an activation may find before it
    counts: TrafficCounts


@dataclass(frozen=True, slots=True)
class Message:
    """An urgent message. The tensor has the dtype and shape it was sent with and belongs to whoever gets it.

    It lies on the device on which the receiver wants that topic, whatever it was sent from and came through.
    """

    traffic: TrafficClass
    topic: int
    stream: int
    meta: bytes
    tensor: torch.Tensor | None
    receive_s: float = 0.0  # from its header to its last byte


class ChannelBroken(Exception):
    """The connection is gone, or the wait's time was up, which breaks it too."""


class Pending(Protocol):
    """A posted send or receive. Keep it until `wait` has returned: dropping an unfinished send loses the message."""

    def wait(self, timeout_s: float) -> None:
        """Once per Pending.

        Raises:
            ChannelBroken: it will never complete.
        """
        ...


class Broken:
    """Stands for a message that could not even be posted."""

    def __init__(self, why: str) -> None:
        self._why = why  # an error would know the frames that know this, and keep what they hold

    def wait(self, timeout_s: float) -> None:
        raise ChannelBroken(self._why)


class Channel(Protocol):
    """Two processes, messages in order in each direction: a frame, then the payload that it announces, if any.

    Posting is safe from several threads and does not wait for the peer. Receives are waited for by one thread. A frame
    may be shorter than the receive that was posted for it, a payload may not.

    A payload goes from one device's memory into the other's, or from host to host, as its frame says. Frames are always
    on the host.
    """

    @property
    def device(self) -> torch.device:
        """Whose memory it moves, beside the host's; the host: nothing else."""
        ...

    def send_frame(self, frame: torch.Tensor) -> Pending: ...

    def post_frame(self, buffer: torch.Tensor) -> Pending: ...

    def send_payload(self, payload: torch.Tensor) -> Pending: ...

    def post_payload(self, buffer: torch.Tensor) -> Pending: ...

    def abort(self) -> None:
        """Every wait, present and future, here and at the peer, ends with ChannelBroken. Safe from any thread.

        When it has returned, nothing touches memory that was posted.
        """
        ...

    def destroy(self) -> None:
        """Give everything back, after `abort` and after the last Pending is dropped. Takes up to 0.2 s."""
        ...


@dataclass(frozen=True, slots=True)
class Channels:
    urgent: Channel
    bulk: Channel
    close: Callable[[], None]  # what both have in common, when both are destroyed


class Transport(Protocol):
    """How a real connection is carried."""

    @property
    def name(self) -> str: ...

    @property
    def lanes(self) -> tuple[str, ...]: ...

    def open(self, sockets: Sequence[socket.socket], name: str, rank: int, within_s: float) -> Channels:
        """Blocks until the peer has called it with the same name and the other rank. Takes the sockets over.

        Raises:
            ChannelBroken: the peer did not come.
        """
        ...

    def close(self) -> None:
        """Nothing is opened any more. What channels share is given back when the last of them is destroyed."""
        ...
