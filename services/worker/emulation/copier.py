"""KV between an emulated device and host memory: marks are copied, and it takes as long as the bytes would.

One thread: the engine's. What is copied beside a step has been copied when the step begins, and the worker waits after
the step for what would not be over yet.
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
    """What there is of one layer."""
    for here, there in zip(copy.device_blocks, copy.host_blocks, strict=True):
        if copy.out:
            host[layer, there] = area.cell(here)
        else:
            area.set_cell(here, host[layer, there])


def one_way(copies: Sequence[BlockCopy], layer_count: int) -> int:
    """Blocks of one layer that go the way that more of them go: both are used at once."""
    counts = [0, 0]
    for copy in copies:
        counts[copy.out] += len(copy.device_blocks) * layer_count
    return max(counts)


class EmulatedCopier:
    """A `BlockCopier`."""

    def __init__(self, memory: DeviceMemory, block_count: int, host_bytes_per_s: float) -> None:
        """`host_bytes_per_s`: each way."""
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
        """There is no thread."""
