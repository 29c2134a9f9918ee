"""What a device must offer so that memory can be moved by mapping instead of copying.

An extent is a physical allocation, known by its number. A backend makes all of them at once, equal in size, and maps
runs of them at addresses inside ranges that were reserved before. It keeps no books: who owns which extent is the
business of `pool`, and a caller that maps one extent twice gets what it asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

SLOT_BYTES = 8 << 20  # of a device's memory, gathered: what one copy over the bus, or one message, is worth
FLOAT_DTYPES = ("float64", "float32", "bfloat16", "float16")
SUPPORTED_DTYPES = (*FLOAT_DTYPES, "int64", "int32", "int8", "uint8")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True, order=True)
class ExtentRun:
    """The physical extents `[first, first + count)`: contiguous, so one call can map them all on the host."""

    first: int
    count: int

    @property
    def end(self) -> int:
        return self.first + self.count


class Algorithm(Enum):
    """How contents are read for a checksum."""

    SHA256 = "sha256"  # by a processor, which has instructions for it
    MIX128 = "mix128"  # by a GPU, see `mixing`


class MemoryBackend(Protocol):
    """One device's virtual memory. Not safe for use from two threads at once; any one thread at a time will do."""

    @property
    def device(self) -> torch.device: ...

    @property
    def granularity_bytes(self) -> int:
        """Extent sizes and reserved sizes are multiples of this."""
        ...

    def create(self, extent_bytes: int, count: int) -> None:
        """Make the physical extents `0 .. count - 1`. Once in the life of a backend. Fresh extents read as zeros.

        Raises:
            ConfigError: the device has not that much memory.
        """
        ...

    def give_up(self, runs: Sequence[ExtentRun]) -> None:
        """The device gets the memory of these extents, none of which is mapped; their contents are lost."""
        ...

    def take_back(self, runs: Sequence[ExtentRun]) -> None:
        """Memory for extents that were given up; they read as zeros.

        Raises:
            ConfigError: the device has not that much; none of them has memory then.
        """
        ...

    def export(self, first: int, count: int) -> list[int]:
        """Open files by which another process has the same extents: those numbered `[first, first + count)`, as far as
        there are so many. They are the caller's to close.

        Raises:
            ConfigError: the extents are this process' alone.
        """
        ...

    def beside(self, files: Iterable[int]) -> MemoryBackend:
        """A backend of the same device, over the extents of another process, whose `export` has given all these files.
        They belong to it from here on. Its `create` makes nothing.

        Raises:
            ConfigError: this device does not reach that memory.
        """
        ...

    def reserve(self, size_bytes: int) -> int:
        """Reserve an address range that takes no memory; touching it before something is mapped is a crash."""
        ...

    def release(self, address: int, size_bytes: int) -> None:
        """Give a reserved range back. Nothing may be mapped in it any more."""
        ...

    def map(self, address: int, runs: Sequence[ExtentRun]) -> None:
        """Make extents readable and writable for this device, `runs` one after the other from `address` on.

        Either all of them are mapped or an error is raised and none is.
        """
        ...

    def unmap(self, address: int, runs: Sequence[ExtentRun]) -> None:
        """Take away `runs`, which are mapped one after the other from `address` on; the range stays reserved.

        Waits for this device's kernels first, since the driver would pull the memory away under them.
        """
        ...

    def tensor(self, address: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor over a reserved range, mapped or not. It does not keep the range alive."""
        ...

    def raw(self, address: int, size_bytes: int) -> torch.Tensor:
        """Memory as from `tensor`, of bytes."""
        ...

    def scratch(self, size_bytes: int) -> torch.Tensor:
        """Bytes on the device beside the budget, for a short time."""
        ...

    def copy_rows(
        self, target: torch.Tensor, to: Sequence[int], source: torch.Tensor, rows: Sequence[int] | None = None
    ) -> None:
        """`source[rows]` (None: all, in order) to `target[to]`. All are read before one is written."""
        ...

    @property
    def checksums_by(self) -> Algorithm:
        """What reads contents in the least time."""
        ...

    def contents(self, tensor: torch.Tensor) -> Iterable[memoryview]:
        """The bytes of a tensor of bytes, a part at a time, for checksums."""
        ...

    def synchronise(self) -> None:
        """Wait until the device has finished everything launched so far."""
        ...

    def close(self) -> None:
        """Return the physical memory to the system. All ranges have been released. May be called again."""
        ...
