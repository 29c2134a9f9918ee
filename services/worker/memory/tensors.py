"""What backends whose memory torch can touch have in common."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Protocol

import torch

_PART_BYTES = 16 << 20


class _Addressed(Protocol):
    @property
    def device(self) -> torch.device: ...

    def tensor(self, address: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor: ...


class TensorOperations:
    """Half of a `MemoryBackend`, by the other half."""

    def raw(self: _Addressed, address: int, size_bytes: int) -> torch.Tensor:
        return self.tensor(address, (size_bytes,), torch.uint8)

    def scratch(self: _Addressed, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=self.device)

    def copy_rows(
        self, target: torch.Tensor, to: Sequence[int], source: torch.Tensor, rows: Sequence[int] | None = None
    ) -> None:
        if rows is not None:
            source = source.index_select(0, torch.tensor(rows, device=source.device))
        target.index_copy_(0, torch.tensor(to, device=target.device), source)

    def contents(self: _Addressed, tensor: torch.Tensor) -> Iterator[memoryview]:
        """A GPU copies beside what it computes: behind what it has been given to do by now, and before nothing."""
        stream = None
        if self.device.type == "cuda":
            stream = torch.cuda.Stream(self.device)
            stream.wait_stream(torch.cuda.current_stream(self.device))
        for part in tensor.split(_PART_BYTES):
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                here = part.cpu()
            yield here.numpy().data
