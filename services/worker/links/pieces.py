"""A transfer's bytes in memory: a list of contiguous tensors, read or written like one contiguous range of bytes."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch

from ballast.common.errors import InvalidRequest
from services.worker.memory.runs import Runs

_WHOLE_BYTES = 4096  # gathered chunks are multiples of this size, which keeps them aligned


def as_bytes(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return the same memory as a flat uint8 tensor."""
    if not tensor.is_contiguous():
        raise InvalidRequest(name, f"must be contiguous, got strides {tensor.stride()} for shape {tuple(tensor.shape)}")
    return tensor.detach().reshape(-1).view(torch.uint8)


class Pieces:
    """A transfer's tensors. Offsets are counted over all pieces in order."""

    def __init__(self, tensors: Sequence[torch.Tensor], name: str) -> None:
        for index, tensor in enumerate(tensors):
            if not tensor.is_contiguous():
                as_bytes(tensor, f"{name}[{index}]")  # raises an error that names the tensor
        self._pieces = [tensor for tensor in tensors if tensor.nbytes]
        self._ends = list(accumulate(piece.nbytes for piece in self._pieces))

    @property
    def total_bytes(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def device(self) -> torch.device:
        return self._pieces[0].device if self._pieces else torch.device("cpu")

    def chunk_bytes(self, offset: int, limit: int, least_bytes: int) -> int:
        """Return how many of the next `limit` bytes to send together: those up to the end of the piece if they are at
        least `least_bytes`; otherwise `limit`, rounded down to whole `_WHOLE_BYTES` except at the end of the transfer.
        """
        run = min(self._ends[bisect_right(self._ends, offset)] - offset, limit)
        if run >= least_bytes or offset + limit >= self.total_bytes:
            return run if run >= least_bytes else limit
        return limit // _WHOLE_BYTES * _WHOLE_BYTES or limit

    def view(self, offset: int, size: int) -> torch.Tensor | None:
        """Return a view of these bytes, or None if they span several pieces."""
        index = bisect_right(self._ends, offset)
        if self._ends[index] < offset + size:
            return None
        return self._part(index, offset - self._start(index), size)

    def gather(self, offset: int, target: torch.Tensor) -> None:
        """Copy the bytes from `offset` on into all of `target`. On a device this is asynchronous, in stream order."""
        at = 0
        for piece in self.runs(offset, target.numel()):
            target[at : at + piece.numel()].copy_(piece, non_blocking=True)
            at += piece.numel()

    def scatter(self, offset: int, source: torch.Tensor) -> None:
        """Copy all of `source` to the bytes from `offset` on, like `gather`."""
        at = 0
        for piece in self.runs(offset, source.numel()):
            piece.copy_(source[at : at + piece.numel()], non_blocking=True)
            at += piece.numel()

    def runs(self, offset: int, size: int) -> Iterator[torch.Tensor]:
        """Yield the contiguous parts of a range, as flat bytes."""
        index = bisect_right(self._ends, offset)
        while size:
            run = min(self._ends[index] - offset, size)
            yield self._part(index, offset - self._start(index), run)
            offset, size, index = offset + run, size - run, index + 1

    def lies(self, offset: int, size: int) -> Runs:
        """Return the addresses and sizes of a range's memory."""
        first, last = bisect_right(self._ends, offset), bisect_right(self._ends, offset + size - 1)
        runs = Runs.of(self._pieces[first : last + 1])
        ahead = offset - self._start(first)
        runs.addresses[0] += ahead
        runs.sizes[0] -= ahead
        runs.sizes[-1] -= self._ends[last] - offset - size
        return runs

    def _part(self, index: int, first: int, size: int) -> torch.Tensor:
        return as_bytes(self._pieces[index], "piece")[first : first + size]

    def _start(self, index: int) -> int:
        return self._ends[index - 1] if index else 0
