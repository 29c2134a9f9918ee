"""Copies between a device and the host, concurrent with computation.

On the host they are synchronous. On a GPU, data is valid once the compute stream has executed the kernels that write
it, and a copy is complete once the copy stream has executed it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from services.worker.links.pieces import Pieces

HOST = torch.device("cpu")


def carried_on(payload: torch.device, channel: torch.device) -> torch.device:
    """Return the device on which a payload must be for a channel to send it: the payload's own device if the channel
    can access that memory, otherwise the host.
    """
    return payload if payload == channel else HOST


class Copies(Protocol):
    """Copies of a worker between a device and the host. Thread-safe."""

    def empty(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        """Return a flat byte buffer to receive into or send from; pinned host memory if the device needs that."""
        ...

    def warm(self) -> None:
        """Allocate the pinned slots of a link and compile the copy kernels, which would stall the GPU later."""
        ...

    def mark(self) -> Mark | None:
        """Mark the work that the calling thread has launched so far. None: there is no work to wait for."""
        ...

    def copying(self) -> AbstractContextManager[None]:
        """Context manager for copies that do not wait for computation and are complete at the end of the block.

        It waits without holding the GIL.
        """
        ...

    def gather(self, pieces: Pieces, offset: int, slot: torch.Tensor) -> None:
        """Fill `slot` with the bytes of `pieces` from `offset` on. Waits for the copy, but not for computation."""
        ...

    def scatter(self, pieces: Pieces, offset: int, slot: torch.Tensor) -> None:
        """Copy all of `slot` into `pieces` from `offset` on. Waits for the copy, but not for computation."""
        ...

    def fetch(self, payload: torch.Tensor, device: torch.device, then: Callable[[torch.Tensor | None], None]) -> None:
        """Copy data to the host once the work launched by the calling thread is done. Then another thread calls `then`
        with the copy, or with None if it failed.
        """
        ...

    def close(self) -> None:
        """Stop fetching, after the callbacks of completed fetches."""
        ...


class Mark(Protocol):
    """A point in a device's sequence of work, like a recorded CUDA event."""

    def wait(self) -> None:
        """Block until the device has reached the mark, without holding the GIL."""
        ...


class HostCopies:
    """`Copies` of a worker whose tensors are in host memory."""

    def empty(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=device)

    def warm(self) -> None:
        """Does nothing."""

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
        """Does nothing."""
