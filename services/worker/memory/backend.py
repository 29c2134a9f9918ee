"""Interface of a device whose memory is reassigned by mapping instead of copying.

An extent is a physical allocation, identified by its number. A backend creates all of them at once, equal in size, and
maps runs of them at addresses inside reserved ranges. It does not track them: `pool` knows the owner of each extent,
and a caller may map an extent twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

SLOT_BYTES = 8 << 20  # gathered device memory per copy over the bus, or per message
FLOAT_DTYPES = ("float64", "float32", "bfloat16", "float16")
KV_DTYPES = (*FLOAT_DTYPES, "float8_e4m3fn")
SUPPORTED_DTYPES = (*FLOAT_DTYPES, "int64", "int32", "int8", "uint8")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True, order=True)
class ExtentRun:
    """The physical extents `[first, first + count)`: contiguous, so that on the host a single call can map them."""

    first: int
    count: int

    @property
    def end(self) -> int:
        return self.first + self.count


class Algorithm(Enum):
    """Algorithm of a checksum."""

    SHA256 = "sha256"  # for processors, which have SHA instructions
    MIX128 = "mix128"  # for GPUs; see `mixing`


class MemoryBackend(Protocol):
    """Virtual memory of one device. Used by one thread at a time."""

    @property
    def device(self) -> torch.device: ...

    @property
    def granularity_bytes(self) -> int:
        """Extent sizes and reserved sizes are multiples of this."""
        ...

    def create(self, extent_bytes: int, count: int) -> None:
        """Create the physical extents `0 .. count - 1`, once. Fresh extents read as zeros.

        Raises:
            ConfigError: the device lacks the memory.
        """
        ...

    def give_up(self, runs: Sequence[ExtentRun]) -> None:
        """Return the memory of these unmapped extents to the device. Their contents are lost."""
        ...

    def take_back(self, runs: Sequence[ExtentRun], files: Iterable[int] | None = None) -> None:
        """Allocate memory again for extents passed to `give_up`. They read as zeros.

        `files`: instead of allocating, use the memory that another process has allocated for them, which has exported
        all its extents to these files. Takes ownership of the files.

        Raises:
            ConfigError: the device lacks the memory, and no extent is allocated.
        """
        ...

    def export(self, first: int, count: int) -> list[int]:
        """File descriptors through which another process can map the extents `[first, first + count)`; extents beyond
        the last are left out. The caller closes the files.

        Raises:
            ConfigError: the extents cannot be shared.
        """
        ...

    def beside(self, files: Iterable[int]) -> MemoryBackend:
        """Create a backend of the same device for the extents of another process, which has created these files with
        `export`. Takes ownership of the files. The new backend's `create` does not allocate memory.

        Raises:
            ConfigError: this device cannot access that memory.
        """
        ...

    def reserve(self, size_bytes: int) -> int:
        """Reserve an address range without memory. Access before mapping crashes the process."""
        ...

    def release(self, address: int, size_bytes: int) -> None:
        """Release a reserved range without mappings."""
        ...

    def map(self, address: int, runs: Sequence[ExtentRun]) -> None:
        """Map extents for reading and writing, `runs` consecutively from `address` on.

        Either all runs are mapped, or the call raises and maps none.
        """
        ...

    def unmap(self, address: int, runs: Sequence[ExtentRun]) -> None:
        """Unmap `runs`, which are mapped consecutively from `address` on; the range stays reserved.

        Waits for this device's kernels first, because the driver does not.
        """
        ...

    def tensor(self, address: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor over a reserved range, mapped or not. The tensor does not own the range."""
        ...

    def raw(self, address: int, size_bytes: int) -> torch.Tensor:
        """Return a byte tensor over a reserved range, like `tensor`."""
        ...

    def scratch(self, size_bytes: int) -> torch.Tensor:
        """Allocate temporary bytes on the device, outside the budget."""
        ...

    def copy_rows(
        self, target: torch.Tensor, to: Sequence[int], source: torch.Tensor, rows: Sequence[int] | None = None
    ) -> None:
        """Copy `source[rows]` (None: all, in order) to `target[to]`. All rows are read before any is written."""
        ...

    @property
    def checksums_by(self) -> Algorithm:
        """The fastest checksum algorithm of this device."""
        ...

    def contents(self, tensor: torch.Tensor) -> Iterable[memoryview]:
        """Yield the bytes of a byte tensor, in parts, for checksums."""
        ...

    def synchronise(self) -> None:
        """Wait until the device has finished all work launched so far."""
        ...

    def close(self) -> None:
        """Return the physical memory to the system, after all ranges have been released. Idempotent."""
        ...
