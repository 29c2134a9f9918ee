"""Copies scattered bytes to and from a contiguous slot with one kernel launch.

Copying the pieces of KV blocks one by one would be limited by launch overhead.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from ballast.common.extras import lacking

_PART_BYTES = {True: 16 << 10, False: 4 << 10}  # bytes copied by one program, in units of 16 bytes or of one byte
_WIDE_BYTES = 16


class Runs(NamedTuple):
    """Contiguous pieces of memory, as [n] int64 arrays."""

    addresses: np.ndarray
    sizes: np.ndarray

    @classmethod
    def of(cls, tensors: Iterable[torch.Tensor]) -> Runs:
        """The memory of contiguous tensors."""
        lies = [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
        return cls(*np.array(lies, np.int64).reshape(-1, 2).T)


def parts_of(runs: Runs, slot: torch.Tensor) -> tuple[np.ndarray, bool]:
    """Return the parts [parts, 3] (address, offset in the slot, size), and True if all are aligned and in units of 16
    bytes.
    """
    addresses, sizes = runs
    wide = not (int(np.bitwise_or.reduce(addresses | sizes)) | slot.data_ptr()) % _WIDE_BYTES
    most = _PART_BYTES[wide]
    counts = -(-sizes // most)
    run = np.repeat(np.arange(len(sizes)), counts)
    starts = (np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)) * most
    places = (np.cumsum(sizes) - sizes)[run] + starts
    parts = np.stack([addresses[run] + starts, places, np.minimum(sizes[run] - starts, most)], 1)
    return parts // _WIDE_BYTES if wide else parts, wide


def constants(*, gathers: bool, wide: bool) -> dict[str, Any]:
    """Return the compile-time constants of the kernel."""
    size = _PART_BYTES[wide] // (4 if wide else 1)
    return {"GATHERS": gathers, "SIZE": size, "WIDE": wide}


class Gatherer(Protocol):
    """Interface of `RunKernel`, for tests."""

    def gather(self, runs: Runs, slot: torch.Tensor) -> None: ...

    def scatter(self, runs: Runs, slot: torch.Tensor) -> None: ...


class RunKernel:
    """Copies between runs of a device's memory and a slot of flat bytes on it, on the current stream."""

    def __init__(self, device: torch.device) -> None:
        """Raises ConfigError if triton is not installed."""
        try:
            self._kernel: Any = importlib.import_module("services.worker.memory.kernels").copy_runs
        except ImportError as error:
            raise lacking("device cuda", "triton", "cuda") from error
        self._device = device

    def gather(self, runs: Runs, slot: torch.Tensor) -> None:
        """Copy the runs into the first bytes of the slot."""
        self._launch(runs, slot, gathers=True)

    def scatter(self, runs: Runs, slot: torch.Tensor) -> None:
        """Copy the first bytes of the slot into the runs."""
        self._launch(runs, slot, gathers=False)

    def _launch(self, runs: Runs, slot: torch.Tensor, *, gathers: bool) -> None:
        if not len(runs.sizes):
            return
        parts, wide = parts_of(runs, slot)
        there = torch.from_numpy(parts).to(self._device, non_blocking=True)
        width = torch.int32 if wide else torch.int8
        flat = slot[: slot.numel() // width.itemsize * width.itemsize].view(width)
        self._kernel[(len(parts),)](there, flat, **constants(gathers=gathers, wide=wide))
