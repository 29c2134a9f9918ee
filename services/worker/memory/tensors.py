"""Base class of backends whose memory torch can access."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol

import torch

from services.worker.memory.backend import Algorithm

_PART_BYTES = 16 << 20


class _Addressed(Protocol):
    @property
    def device(self) -> torch.device: ...

    def tensor(self, address: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor: ...


def beside(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """Return a factory of context managers in which a GPU works on a side stream, after all work launched so far."""
    if device.type != "cuda":
        return nullcontext
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return partial(torch.cuda.stream, stream)


class TensorOperations:
    """The operations of a `MemoryBackend` that can be implemented with tensors."""

    @property
    def checksums_by(self: _Addressed) -> Algorithm:
        return Algorithm.MIX128 if self.device.type == "cuda" else Algorithm.SHA256

    def raw(self: _Addressed, address: int, size_bytes: int) -> torch.Tensor:
        return self.tensor(address, (size_bytes,), torch.uint8)

    def scratch(self: _Addressed, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=self.device)

    def copy_rows(
        self, target: torch.Tensor, to: Sequence[int], source: torch.Tensor, rows: Sequence[int] | None = None
    ) -> None:
        if target.dtype.itemsize == 1:  # float8, which torch does not copy by index
            target, source = target.view(torch.uint8), source.view(torch.uint8)
        if rows is not None:
            source = source.index_select(0, torch.tensor(rows, device=source.device))
        target.index_copy_(0, torch.tensor(to, device=target.device), source)

    def contents(self: _Addressed, tensor: torch.Tensor) -> Iterator[memoryview]:
        on_its_own = beside(self.device)
        for part in tensor.split(_PART_BYTES):
            with on_its_own():
                here = part.cpu()
            yield here.numpy().data
