"""A transfer's bytes as they lie in memory: a list of contiguous tensors, read or written as one run of bytes."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import torch

from ballast.common.errors import InvalidRequest


def as_bytes(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """The same memory as flat uint8."""
    if not tensor.is_contiguous():
        raise InvalidRequest(name, f"must be contiguous, got strides {tensor.stride()} for shape {tuple(tensor.shape)}")
    return tensor.detach().reshape(-1).view(torch.uint8)


class Pieces:
    """Offsets are counted over all pieces in order."""

    # A run inside one piece that is shorter than this is gathered with its neighbours instead of sent by itself.
    MIN_DIRECT_BYTES = 64 * 1024

    def __init__(self, tensors: Sequence[torch.Tensor], name: str) -> None:
        flat = (as_bytes(tensor, f"{name}[{index}]") for index, tensor in enumerate(tensors))
        self._pieces = [piece for piece in flat if piece.numel()]
        self._ends = list(accumulate(piece.numel() for piece in self._pieces))

    @property
    def total_bytes(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def device(self) -> torch.device:
        return self._pieces[0].device if self._pieces else torch.device("cpu")

    def chunk_bytes(self, offset: int, limit: int) -> int:
        """How much of the next `limit` bytes to send at once: up to a piece border if that is worth a message."""
        run = min(self._ends[bisect_right(self._ends, offset)] - offset, limit)
        return run if run >= self.MIN_DIRECT_BYTES else limit

    def view(self, offset: int, size: int) -> torch.Tensor | None:
        """These bytes in place, or None when they lie in more than one piece."""
        index = bisect_right(self._ends, offset)
        if self._ends[index] < offset + size:
            return None
        start = offset - self._start(index)
        return self._pieces[index][start : start + size]

    def gather(self, offset: int, target: torch.Tensor) -> None:
        """Copy the bytes from `offset` on into all of `target`. Between devices it is over when the stream says so."""
        for piece, at in self._runs(offset, target.numel()):
            target[at : at + piece.numel()].copy_(piece, non_blocking=True)

    def scatter(self, offset: int, source: torch.Tensor) -> None:
        """Copy all of `source` to where the bytes from `offset` on lie, as `gather` does."""
        for piece, at in self._runs(offset, source.numel()):
            piece.copy_(source[at : at + piece.numel()], non_blocking=True)

    def _runs(self, offset: int, size: int) -> list[tuple[torch.Tensor, int]]:
        """The contiguous runs of a range, each with its distance from the range's start."""
        runs: list[tuple[torch.Tensor, int]] = []
        at = 0
        index = bisect_right(self._ends, offset)
        while at < size:
            start = offset + at - self._start(index)
            run = self._pieces[index][start : start + size - at]
            runs.append((run, at))
            at += run.numel()
            index += 1
        return runs

    def _start(self, index: int) -> int:
        return self._ends[index - 1] if index else 0
