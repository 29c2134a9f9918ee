"""Threads that copy data from file pages to a GPU in parallel, each through its own pinned buffer.

A copy from pageable memory goes through the driver's staging buffer piece by piece, at a tenth of the speed.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from services.worker.memory.backend import SLOT_BYTES
from services.worker.memory.tensors import beside

_READERS = 4


def _pinned(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)


class PinnedReaders:
    def __init__(self, device: torch.device, empty: Callable[[int], torch.Tensor] = _pinned) -> None:
        """`empty`: allocates pinned memory."""
        self._device = device
        self._empty = empty
        self._of_thread = threading.local()
        self._threads = ThreadPoolExecutor(_READERS, thread_name_prefix="readers")

    def submit(self, read: torch.Tensor, write: Callable[[torch.Tensor], None]) -> Future[None]:
        """Copy `read` to pinned memory and call `write` with the copy; `write` copies it to the device. The future
        completes once the data are on the device.
        """
        return self._threads.submit(self._bring, read, write)

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _bring(self, read: torch.Tensor, write: Callable[[torch.Tensor], None]) -> None:
        slot: torch.Tensor | None = getattr(self._of_thread, "slot", None)
        if slot is None or slot.numel() < read.nbytes:
            slot = self._of_thread.slot = self._empty(max(read.nbytes, SLOT_BYTES))
        staged = slot[: read.nbytes].view(read.dtype).view(read.shape)
        staged.copy_(read)
        with beside(self._device)():
            write(staged)  # returns after the copy, so the slot can be reused
