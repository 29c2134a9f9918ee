"""Stands in for the kernel that gathers GPU memory, but gathers from host addresses."""

import ctypes
from collections.abc import Callable

import torch

from services.worker.memory.runs import Runs


class HostGatherer:
    """Records each launch: kind, number of runs, stream."""

    def __init__(self, stream: Callable[[], object] = lambda: None) -> None:
        self._stream = stream
        self.launches: list[tuple[str, int, object]] = []

    def gather(self, runs: Runs, slot: torch.Tensor) -> None:
        self._copy(runs, slot, "gather")

    def scatter(self, runs: Runs, slot: torch.Tensor) -> None:
        self._copy(runs, slot, "scatter")

    def _copy(self, runs: Runs, slot: torch.Tensor, which: str) -> None:
        self.launches.append((which, len(runs.sizes), self._stream()))
        assert runs.sizes.sum() <= slot.numel()
        at = slot.data_ptr()
        for address, size in zip(runs.addresses.tolist(), runs.sizes.tolist(), strict=True):
            ctypes.memmove(*((at, address) if which == "gather" else (address, at)), size)
            at += size
