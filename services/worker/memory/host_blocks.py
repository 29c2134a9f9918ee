"""KV of swapped-out sequences in host memory, copied concurrently with a step.

A separate thread makes the copies. On a CPU it shares the cores with the step. On a GPU it uses a separate stream,
where one kernel gathers all layers of several blocks and one copy moves them over the bus to pinned memory. The core
chooses the blocks (`core.swapping`) and never includes blocks that the step touches. Each stage copies its own layers.

Shapes: B blocks, L layers, R ranks, T tokens of a block, K KV heads, H head dim.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from ballast.common.errors import ConfigError, InvariantViolation
from services.worker.core.events import BlockCopy
from services.worker.memory.backend import SLOT_BYTES
from services.worker.memory.kv_cache import KvCache
from services.worker.memory.runs import Gatherer, RunKernel, Runs


class HostBlocks:
    """KV blocks in host memory. In each step the engine thread calls `start`, executes, and calls `finish`. For a GPU,
    host memory is allocated at once, otherwise when a block is first used.
    """

    def __init__(self, kv: KvCache, block_count: int, kernel: Gatherer | None = None) -> None:
        """`kernel`: for a GPU's memory, `RunKernel` except in tests.

        Raises:
            ConfigError: this machine lacks the memory.
        """
        self.block_count = block_count
        self._kv = kv
        device = kv.layer(0).device
        ranks, layer_count = range(len(kv.of_ranks(0))), kv.shape.layer_count
        self._on_gpu = device.type == "cuda"
        try:
            self._host_BLR2TKH = torch.empty(
                (block_count, layer_count, len(ranks), *kv.layer(0).shape[1:]), dtype=kv.shape.dtype
            )
            if self._on_gpu:
                _pin(self._host_BLR2TKH)
        except RuntimeError as error:
            size_bytes = block_count * kv.block_bytes * layer_count
            raise ConfigError("swap_space_bytes", f"{size_bytes} bytes of host memory cannot be allocated") from error
        self._layers_B2TKH = [[self._host_BLR2TKH[:, layer, rank] for rank in ranks] for layer in range(layer_count)]
        self._stream = torch.cuda.Stream(device) if self._on_gpu else None
        self._kernel = RunKernel(device) if self._on_gpu else kernel
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-copies")
        self._under_way: Future[float] | None = None

    def start(self, copies: Sequence[BlockCopy], layers: Sequence[int]) -> None:
        if self._under_way is not None:
            raise InvariantViolation("copies are started, but the last step's were not finished")
        for copy in copies:
            self._kv.guard(max(copy.device_blocks) + 1, layers)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._kv.layer(0).device))
        self._under_way = self._thread.submit(self._copy, tuple(copies), layers)

    def finish(self) -> float:
        """Wait for all copies. Returns the seconds from the start of the first copy to the end of the last."""
        if self._under_way is None:
            raise InvariantViolation("no copies have been started")
        under_way, self._under_way = self._under_way, None
        return under_way.result()

    def close(self) -> None:
        """Return the memory. Idempotent."""
        self._thread.shutdown(wait=True)
        if self._on_gpu and self._layers_B2TKH:
            _unpin(self._host_BLR2TKH)
        self._layers_B2TKH.clear()
        self._host_BLR2TKH = self._host_BLR2TKH[:0].clone()

    def _copy(self, copies: tuple[BlockCopy, ...], layers: Sequence[int]) -> float:
        begin_s = time.perf_counter()
        with torch.inference_mode():
            if self._stream is None:
                self._copy_all(copies, layers)
            else:
                with torch.cuda.stream(self._stream):
                    self._copy_all(copies, layers)
                self._stream.synchronize()
        return time.perf_counter() - begin_s

    def _copy_all(self, copies: tuple[BlockCopy, ...], layers: Sequence[int]) -> None:
        if self._kernel is None:
            self._copy_each(copies, layers)
            return
        block_bytes = self._kv.block_bytes * len(layers)
        at_once = max(1, SLOT_BYTES // block_bytes)
        for copy in copies:
            for first in range(0, len(copy.host_blocks), at_once):
                there, here = (blocks[first : first + at_once] for blocks in (copy.device_blocks, copy.host_blocks))
                slot = torch.empty(len(here) * block_bytes, dtype=torch.uint8, device=self._kv.layer(0).device)
                parts = self._parts(here, layers)
                staged = slot.split([part.numel() for part in parts])
                if copy.out:
                    self._kernel.gather(self._lie(there, layers), slot)
                for target, source in zip(*((parts, staged) if copy.out else (staged, parts)), strict=True):
                    target.copy_(source, non_blocking=True)
                if not copy.out:
                    self._kernel.scatter(self._lie(there, layers), slot)

    def _lie(self, blocks: Sequence[int], layers: Sequence[int]) -> Runs:
        """Return the memory of these blocks on the device, block by block, in all layers and ranks."""
        bases = [rank_B2TKH.data_ptr() for layer in layers for rank_B2TKH in self._kv.of_ranks(layer)]
        size = self._kv.shape.block_bytes
        addresses = np.add.outer(np.array(blocks, np.int64) * size, np.array(bases, np.int64)).ravel()
        return Runs(addresses, np.full(len(addresses), size, np.int64))

    def _parts(self, blocks: Sequence[int], layers: Sequence[int]) -> list[torch.Tensor]:
        """Return the memory of these blocks on the host, in the order of `_lie`, as flat bytes: one tensor per
        contiguous run.
        """
        whole = len(layers) == self._kv.shape.layer_count
        of_blocks = _spans(blocks) if whole else [slice(block, block + 1) for block in blocks]
        spans = _spans(layers)
        parts = [self._host_BLR2TKH[some, span] for some in of_blocks for span in spans]
        return [part.view(-1).view(torch.uint8) for part in parts]

    def _copy_each(self, copies: tuple[BlockCopy, ...], layers: Sequence[int]) -> None:
        for copy in copies:
            for layer in layers:
                for device_B2TKH, host_B2TKH in zip(self._kv.of_ranks(layer), self._layers_B2TKH[layer], strict=True):
                    for device_block, host_block in zip(copy.device_blocks, copy.host_blocks, strict=True):
                        if copy.out:
                            host_B2TKH[host_block].copy_(device_B2TKH[device_block])
                        else:
                            device_B2TKH[device_block].copy_(host_B2TKH[host_block])


def _spans(numbers: Sequence[int]) -> list[slice]:
    """Return slices for the runs of consecutive numbers."""
    spans: list[slice] = []
    for number in numbers:
        if spans and spans[-1].stop == number:
            spans[-1] = slice(spans[-1].start, number + 1)
        else:
            spans.append(slice(number, number + 1))
    return spans


def _pin(tensor: torch.Tensor) -> None:
    cudart: Any = torch.cuda.cudart()
    torch.cuda.check_error(cudart.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))


def _unpin(tensor: torch.Tensor) -> None:
    cudart: Any = torch.cuda.cudart()
    torch.cuda.check_error(cudart.cudaHostUnregister(tensor.data_ptr()))
