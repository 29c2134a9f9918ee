"""What a link needs from a library that moves tensors between two processes."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.distributed import Store, Work


class ChannelBroken(Exception):
    """The connection is gone, or the wait's time was up, which breaks it too."""


class Group(Protocol):
    """The part of a process group that is used here; torch's stubs leave it out."""

    def send(self, tensors: Sequence[torch.Tensor], dst: int, tag: int) -> Work: ...

    def recv(self, tensors: Sequence[torch.Tensor], src: int, tag: int) -> Work: ...

    def abort(self) -> None: ...

    def shutdown(self) -> None: ...


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


class PairChannel(Protocol):
    """Two processes, messages in order in each direction, frames and payloads ordered separately.

    Posting is safe from several threads and does not wait for the peer. A send completes only when the peer has
    posted its receive; a frame may be shorter than the receive that was posted for it, a payload may not.
    """

    @property
    def device(self) -> torch.device:
        """Where payloads must lie to be sent or received in place. Frames are always on the host."""
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


class Transport(Protocol):
    def open(self, store: Store, name: str, rank: int, timeout_s: float) -> PairChannel:
        """Blocks until the peer has called it with the same name and the other rank.

        Raises:
            ChannelBroken: the peer did not come.
        """
        ...

    def close(self) -> None:
        """Nothing is opened any more. What channels share is given back when the last of them is destroyed."""
        ...
