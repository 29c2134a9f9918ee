"""Copies between a device and the host, beside what the device computes.

On the host there is nothing to do: memory is as the last instruction left it, and a copy is over when it returns. A GPU
has streams: what was handed over is there once the stream that computes it has come so far, and a copy is over once its
own has.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from services.worker.links.pieces import Pieces

HOST = torch.device("cpu")


def carried_on(payload: torch.device, channel: torch.device) -> torch.device:
    """Where a payload must lie for a channel to move it: where it is, if the channel reaches that memory, or the
    host."""
    return payload if payload == channel else HOST


class Copies(Protocol):
    """Safe for use from any thread."""

    def empty(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        """Flat bytes to receive into or send from. On the host they are such that the device copies them fast."""
        ...

    def warm(self) -> None:
        """Pins the slots of a link that sends and receives, and compiles what copies: later it would stop the GPU."""
        ...

    def mark(self) -> Mark | None:
        """What the calling thread has given its device to do by now. None: there is nothing to wait for."""
        ...

    def copying(self) -> AbstractContextManager[None]:
        """Copies made inside wait for nothing that is computed, and are over at the end of the block.

        It blocks, and leaves the interpreter to others meanwhile.
        """
        ...

    def gather(self, pieces: Pieces, offset: int, slot: torch.Tensor) -> None:
        """Copy the bytes of `pieces` from `offset` on into all of `slot`, as inside of `copying`."""
        ...

    def scatter(self, pieces: Pieces, offset: int, slot: torch.Tensor) -> None:
        """Copy all of `slot` to where the bytes of `pieces` from `offset` on lie, as inside of `copying`."""
        ...

    def fetch(self, payload: torch.Tensor, device: torch.device, then: Callable[[torch.Tensor | None], None]) -> None:
        """Bring there what the calling thread's device computes, and say so from another thread. None: it failed."""
        ...

    def close(self) -> None:
        """Nothing is fetched any more. What has been is told first."""
        ...


class Mark(Protocol):
    """A place in what a device has been given to do."""

    def wait(self) -> None:
        """Until it has come so far. Leaves the interpreter to others."""
        ...


class HostCopies:
    """Of a worker whose memory is the host's."""

    def empty(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=device)

    def warm(self) -> None:
        """Nothing is pinned or compiled."""

    def mark(self) -> None:
        return None

    def copying(self) -> AbstractContextManager[None]:
        return nullcontext()

    def gather(self, pieces: Pieces, offset: int, slot: torch.Tensor) -> None:
        pieces.gather(offset, slot)

    def scatter(self, pieces: Pieces, offset: int, slot: torch.Tensor) -> None:
        pieces.scatter(offset, slot)

    def fetch(self, payload: torch.Tensor, device: torch.device, then: Callable[[torch.Tensor | None], None]) -> None:
        then(payload.to(device))

    def close(self) -> None:
        """Nothing is kept."""
