"""KV of swapped-out sequences in host memory, and the copies from there and back, beside a running step.

Copies are made by a thread of their own: on a CPU it shares the cores with the step, on a CUDA device it feeds a stream
of its own from pinned memory. Which blocks may be copied at all is the core's business (`core.swapping`): none that the
step touches. A stage copies the layers that it executes.

Shapes: B blocks, T tokens of a block, K KV heads, H head dim.
"""

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from ballast.common.errors import ConfigError, InvariantViolation
from services.worker.core.events import BlockCopy
from services.worker.memory.kv_cache import KvCache


class HostBlocks:
    """`start`, the step, `finish`: all from the engine thread. Takes memory as blocks are used for the first time."""

    def __init__(self, kv: KvCache, block_count: int) -> None:
        """
        Raises:
            ConfigError: this machine has not that much memory.
        """
        self.block_count = block_count
        self._kv = kv
        device = kv.layer(0).device
        shape = (block_count, *kv.layer(0).shape[1:])
        on_gpu = device.type == "cuda"
        try:
            self._layers_B2TKH = [
                [torch.empty(shape, dtype=kv.shape.dtype) for _ in kv.of_ranks(layer)]
                for layer in range(kv.shape.layer_count)
            ]
        except RuntimeError as error:
            size_bytes = block_count * kv.block_bytes * kv.shape.layer_count
            raise ConfigError("swap_space_bytes", f"{size_bytes} bytes of host memory are not to be had") from error
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        self._copy_all = self._copy_gathered if on_gpu else self._copy_each
        self._staged_B2TKH = torch.empty((0, *shape[1:]), dtype=kv.shape.dtype)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-copies")
        self._under_way: Future[float] | None = None

    def start(self, copies: Sequence[BlockCopy], layers: Sequence[int]) -> None:
        if self._under_way is not None:
            raise InvariantViolation("copies are started before those of the last step have been waited for")
        for copy in copies:
            self._kv.guard(max(copy.device_blocks) + 1, layers)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._kv.layer(0).device))
        self._under_way = self._thread.submit(self._copy, tuple(copies), layers)

    def finish(self) -> float:
        """Waits until all is copied. Returns the seconds that it took, from the start of the first to the last."""
        if self._under_way is None:
            raise InvariantViolation("no copies have been started")
        under_way, self._under_way = self._under_way, None
        return under_way.result()

    def close(self) -> None:
        """Returns the memory. May be called again."""
        self._thread.shutdown(wait=True)
        self._layers_B2TKH.clear()

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

    def _copy_gathered(self, copies: tuple[BlockCopy, ...], layers: Sequence[int]) -> None:
        """One copy for each layer and rank, through memory that the device reads and writes by itself: block by block a
        GPU would wait for Python.
        """
        device = self._kv.layer(0).device
        for copy in copies:
            there = torch.tensor(copy.device_blocks, device=device)
            here = torch.tensor(copy.host_blocks)
            staged_B2TKH = self._staging(len(here))
            pairs = [zip(self._kv.of_ranks(layer), self._layers_B2TKH[layer], strict=True) for layer in layers]
            for device_B2TKH, host_B2TKH in itertools.chain.from_iterable(pairs):
                if copy.out:
                    staged_B2TKH.copy_(device_B2TKH.index_select(0, there), non_blocking=True)
                    self._wait()
                    host_B2TKH.index_copy_(0, here, staged_B2TKH)
                else:
                    torch.index_select(host_B2TKH, 0, here, out=staged_B2TKH)
                    device_B2TKH.index_copy_(0, there, staged_B2TKH.to(device, non_blocking=True))
                    self._wait()

    def _staging(self, block_count: int) -> torch.Tensor:
        if len(self._staged_B2TKH) < block_count:
            shape, dtype = (block_count, *self._staged_B2TKH.shape[1:]), self._staged_B2TKH.dtype
            self._staged_B2TKH = torch.empty(shape, dtype=dtype, pin_memory=self._stream is not None)
        return self._staged_B2TKH[:block_count]

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _copy_each(self, copies: tuple[BlockCopy, ...], layers: Sequence[int]) -> None:
        for copy in copies:
            for layer in layers:
                for device_B2TKH, host_B2TKH in zip(self._kv.of_ranks(layer), self._layers_B2TKH[layer], strict=True):
                    for device_block, host_block in zip(copy.device_blocks, copy.host_blocks, strict=True):
                        if copy.out:
                            host_B2TKH[host_block].copy_(device_B2TKH[device_block])
                        else:
                            device_B2TKH[device_block].copy_(host_B2TKH[host_block])
