"""Interfaces of links, above and below. No torch needed: emulated workers have none.

DataPlane   all links of a worker: see `plane`
Connection  between two incarnations of workers, kept while both may need it: see `connection`
Link        one epoch of a connection that both take part in: see `connection`
Receiver    gets a link's messages and transfers
Opener      makes a connection from the sockets of a rendezvous
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
    epochs: tuple[int, ...]  # joined by both sides
    state: LinkState
    queued_bulk_bytes: int
    in_flight_bulk_bytes: int  # maximum; an activation may have to wait for these bytes
    counts: TrafficCounts


@dataclass(frozen=True, slots=True)
class Message:
    """An urgent message. The tensor has the sender's dtype and shape and belongs to the receiver.

    It is on the device that the receiver has chosen for the topic (`Receiver.device_of`).
    """

    traffic: TrafficClass
    topic: int
    stream: int
    meta: bytes
    tensor: torch.Tensor | None
    receive_s: float = 0.0  # time from its header to its last byte


class ChannelBroken(Exception):
    """The connection was lost, or a wait has timed out, which also breaks it."""


class Pending(Protocol):
    """A posted send or receive. The caller keeps it until `wait` has returned, because dropping an unfinished send
    loses the message.
    """

    def wait(self, timeout_s: float) -> None:
        """Wait for completion; called once per Pending.

        Raises:
            ChannelBroken: the send or receive will never complete.
        """
        ...


class Broken:
    """A message that could not be posted."""

    def __init__(self, why: str) -> None:
        self._why = why  # not an exception, which would keep the frames that it references alive

    def wait(self, timeout_s: float) -> None:
        raise ChannelBroken(self._why)


class Channel(Protocol):
    """Ordered messages in both directions between two processes: a frame, then the payload that it announces, if any.

    Posting is thread-safe and does not wait for the peer. One thread waits for receives. A frame may be shorter than
    the receive posted for it, but a payload may not.

    A payload is sent from device memory to device memory or from host to host, as stated in its frame. Frames are
    always on the host.
    """

    @property
    def device(self) -> torch.device:
        """The device whose memory the channel can transfer in addition to the host's; the host if none."""
        ...

    def send_frame(self, frame: torch.Tensor) -> Pending: ...

    def post_frame(self, buffer: torch.Tensor) -> Pending: ...

    def send_payload(self, payload: torch.Tensor) -> Pending: ...

    def post_payload(self, buffer: torch.Tensor) -> Pending: ...

    def abort(self) -> None:
        """End every current and future wait on both sides with ChannelBroken. Thread-safe.

        Afterwards posted memory is not accessed.
        """
        ...

    def destroy(self) -> None:
        """Release all resources, after `abort` and after the last Pending was dropped. Takes up to 0.2 s."""
        ...


@dataclass(frozen=True, slots=True)
class Channels:
    urgent: Channel
    bulk: Channel
    close: Callable[[], None]  # releases the resources shared by both channels, once both are destroyed


class Transport(Protocol):
    """The transport of real connections."""

    @property
    def name(self) -> str: ...

    @property
    def lanes(self) -> tuple[str, ...]: ...

    def open(self, sockets: Sequence[socket.socket], name: str, rank: int, within_s: float) -> Channels:
        """Open the channels. Blocks until the peer does the same with the same name and the other rank. Takes ownership
        of the sockets.

        Raises:
            ChannelBroken: the peer did not open them in time.
        """
        ...

    def close(self) -> None:
        """Refuse to open further channels. Shared resources are released when the last channel is destroyed."""
        ...
