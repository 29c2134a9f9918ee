"""Copies between emulated device and host memory: marks are copied, in the time that the bytes would take.

Used by the engine thread only. Marks are copied when the step begins; after the step the worker waits for the rest of
the duration.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from services.worker.core.events import BlockCopy
from services.worker.emulation.phantom import Area, phantom

if TYPE_CHECKING:
    from services.worker.memory.device import DeviceMemory

HostMarks = dict[tuple[int, int], int]  # layer and host block -> mark


def copy_marks(copy: BlockCopy, layer: int, area: Area, host: HostMarks) -> None:
    """Copy the marks of blocks in one layer."""
    for here, there in zip(copy.device_blocks, copy.host_blocks, strict=True):
        if copy.out:
            host[layer, there] = area.cell(here)
        else:
            area.set_cell(here, host[layer, there])


def one_way(copies: Sequence[BlockCopy], layer_count: int) -> int:
    """Return the larger block count of the two directions, because both run concurrently."""
    counts = [0, 0]
    for copy in copies:
        counts[copy.out] += len(copy.device_blocks) * layer_count
    return max(counts)


class EmulatedCopier:
    """A `BlockCopier` that copies marks, and waits as long as the bytes would take."""

    def __init__(self, memory: DeviceMemory, block_count: int, host_bytes_per_s: float) -> None:
        """`host_bytes_per_s`: copy speed in each direction."""
        self.block_count = block_count
        self._memory = memory
        self._block_s = memory.kv.shape.block_bytes / host_bytes_per_s
        self._host: HostMarks = {}
        self._began_s = self._took_s = 0.0

    def start(self, copies: Sequence[BlockCopy], layers: Sequence[int]) -> None:
        self._began_s = time.monotonic()
        for layer in layers:
            area = phantom(self._memory.kv.layer(layer)).area
            for copy in copies:
                copy_marks(copy, layer, area, self._host)
        self._took_s = one_way(copies, len(layers)) * self._block_s

    def finish(self) -> float:
        time.sleep(max(0.0, self._began_s + self._took_s - time.monotonic()))
        return self._took_s

    def close(self) -> None:
        """Does nothing."""
