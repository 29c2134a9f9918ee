"""What backends whose memory torch can touch have in common."""

from collections.abc import Iterator, Sequence
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

    def contents(self, tensor: torch.Tensor) -> Iterator[memoryview]:
        for part in tensor.split(_PART_BYTES):
            yield part.cpu().numpy().data
