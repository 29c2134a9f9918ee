"""Device memory on the CPU: extents are slices of one memfd, mapped with MAP_FIXED into PROT_NONE ranges.

Adjacent extents are adjacent in the file, so a run costs one call and one kernel mapping however long it is. Mapped
runs are populated at once: faulting them in later, page by page, costs five times as much.
"""

import ctypes
import errno
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from ballast.common.errors import ConfigError, InvariantViolation
from services.worker.memory.backend import ExtentRun

# Linux, all 64-bit architectures; the mmap module of Python 3.11 lacks some of them.
_PROT_NONE = 0
_PROT_READ_WRITE = 3
_MAP_SHARED = 0x01
_MAP_PRIVATE = 0x02
_MAP_FIXED = 0x10
_MAP_ANONYMOUS = 0x20
_MAP_NORESERVE = 0x4000
_MAP_POPULATE = 0x8000

_RESERVED = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.restype = ctypes.c_int
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class HostBackend:
    """`MemoryBackend` over the CPU's own memory."""

    def __init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise ConfigError("device", "the cpu backend needs memfd_create, which only Linux has")
        self._fd: int | None = None
        self._extent_bytes = 0

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def granularity_bytes(self) -> int:
        return mmap.PAGESIZE

    def create(self, extent_bytes: int, count: int) -> None:
        if self._fd is not None:
            raise InvariantViolation("the extents of this backend were created before")
        wanted_bytes, available_bytes = extent_bytes * count, _available_bytes()
        if wanted_bytes > available_bytes:
            raise ConfigError(
                "device_memory_bytes", f"{wanted_bytes} bytes asked for, this machine has {available_bytes} available"
            )
        self._extent_bytes = extent_bytes
        self._fd = os.memfd_create("ballast-device-memory", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, wanted_bytes)

    def reserve(self, size_bytes: int) -> int:
        return _mmap(None, size_bytes, _PROT_NONE, _RESERVED, -1, 0)

    def release(self, address: int, size_bytes: int) -> None:
        if _libc.munmap(address, size_bytes) != 0:
            raise _os_failure("munmap", size_bytes)

    def map(self, address: int, run: ExtentRun) -> None:
        if self._fd is None:
            raise InvariantViolation("extents are mapped before they were created or after they were closed")
        flags = _MAP_SHARED | _MAP_FIXED | _MAP_POPULATE
        size_bytes, offset_bytes = run.count * self._extent_bytes, run.first * self._extent_bytes
        _mmap(address, size_bytes, _PROT_READ_WRITE, flags, self._fd, offset_bytes)

    def unmap(self, address: int, count: int) -> None:
        _mmap(address, count * self._extent_bytes, _PROT_NONE, _RESERVED | _MAP_FIXED, -1, 0)

    def tensor(self, address: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        count = torch.Size(shape).numel()
        memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=dtype, count=count).view(tuple(shape))

    def synchronise(self) -> None:
        """Nothing to wait for: operations on the CPU have finished when their call returns."""

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)  # the last reference to the memory once every range has been released
            self._fd = None


def _mmap(address: int | None, size_bytes: int, protection: int, flags: int, fd: int, offset_bytes: int) -> int:
    mapped = _libc.mmap(address, size_bytes, protection, flags, fd, offset_bytes)
    if mapped is None or mapped == _MAP_FAILED:
        raise _os_failure("mmap", size_bytes)
    return int(mapped)


def _os_failure(call: str, size_bytes: int) -> Exception:
    code = ctypes.get_errno()
    if code == errno.ENOMEM:
        return ConfigError(
            "device_memory_bytes",
            f"the kernel refuses to {call} {size_bytes} bytes. Either the address space is limited (`ulimit -v`) or"
            " there are too many mappings (sysctl vm.max_map_count): raise the limit or use larger extents",
        )
    return OSError(code, f"{call} of {size_bytes} bytes: {os.strerror(code)}")


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise InvariantViolation("/proc/meminfo has no line MemAvailable")
