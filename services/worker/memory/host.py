"""Device memory on the CPU: extents are slices of one memfd, mapped with MAP_FIXED into PROT_NONE ranges.

Adjacent extents are adjacent in the file, so a run takes one call and one kernel mapping, however long it is.

Unmapping and mapping again would take as long as copying the bytes, because the kernel removes and creates one page
table entry per 4 KiB. Instead, page tables are moved: mremap moves an unmapped extent to its place in a mapping of the
whole file (the parking area), and from there to its next mapping. Kernels before 5.13 cannot do this for shared memory.
There an extent is unmapped normally, and all of it is faulted in again.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from ballast.common.errors import ConfigError, InvariantViolation
from services.worker.memory.backend import ExtentRun
from services.worker.memory.tensors import TensorOperations

# Linux, all 64-bit architectures; the mmap module of Python 3.11 lacks some of these constants.
_PROT_NONE = 0
_PROT_READ_WRITE = 3
_MAP_SHARED = 0x01
_MAP_PRIVATE = 0x02
_MAP_FIXED = 0x10
_MAP_ANONYMOUS = 0x20
_MAP_NORESERVE = 0x4000
_MAP_POPULATE = 0x8000
_MREMAP_MAYMOVE = 1
_MREMAP_FIXED = 2
_MADV_REMOVE = 9
_MREMAP_DONTUNMAP = 4  # leaves a mapping without pages instead of a hole that another thread's mmap might fill

_RESERVED = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
_MAP_FAILED = ctypes.c_void_p(-1).value
_PAGE_TABLE_BYTES = 2 << 20  # range of one page table; whole tables are moved between addresses aligned to this

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
_libc.munmap.restype = ctypes.c_int
_libc.madvise.restype = ctypes.c_int
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class HostBackend(TensorOperations):
    """`MemoryBackend` of host memory."""

    def __init__(self, fd: int | None = None, *, sparse: bool = False) -> None:
        """`fd`: the file with another backend's extents, used instead of a new file. Takes ownership of it. `sparse`:
        pages are allocated when they are written, and returned when their extents are unmapped.
        """
        if not hasattr(os, "memfd_create"):
            raise ConfigError("device", "the cpu backend needs memfd_create, which only Linux has")
        self._fd = fd
        self._makes_extents = fd is None and not sparse
        self._sparse = sparse
        self._extent_bytes = 0
        self._size_bytes = 0
        self._parking = 0  # address of the mapping of the whole file
        self._tables_move = False
        self._parked = bytearray()  # extent -> 1 if its page table entries are in the parking area

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def granularity_bytes(self) -> int:
        return mmap.PAGESIZE

    def create(self, extent_bytes: int, count: int) -> None:
        if self._extent_bytes:
            raise InvariantViolation("the extents of this backend have already been created")
        size_bytes, available_bytes = extent_bytes * count, _available_bytes()
        if self._makes_extents and size_bytes > available_bytes:
            raise ConfigError(
                "device_memory_bytes", f"{size_bytes} bytes requested, but this machine has {available_bytes} available"
            )
        parking = self.reserve(size_bytes)
        if self._fd is None:
            self._fd = os.memfd_create("ballast-device-memory", os.MFD_CLOEXEC)
            os.ftruncate(self._fd, size_bytes)
        elif os.fstat(self._fd).st_size != size_bytes:
            raise InvariantViolation(f"{size_bytes} bytes of extents are in a file of {os.fstat(self._fd).st_size}")
        self._parking = _mmap(parking, size_bytes, _PROT_READ_WRITE, _MAP_SHARED | _MAP_FIXED, self._fd, 0)
        self._extent_bytes, self._size_bytes, self._parked = extent_bytes, size_bytes, bytearray(count)
        self._tables_move = self._kernel_moves_tables(self._fd)

    def give_up(self, runs: Sequence[ExtentRun]) -> None:
        for run in runs:
            if _libc.madvise(self._parking_of(run), run.count * self._extent_bytes, _MADV_REMOVE) != 0:
                raise _os_failure("madvise", run.count * self._extent_bytes)
            self._parked[run.first : run.end] = bytes(run.count)  # these extents have no page tables to move

    def take_back(self, runs: Sequence[ExtentRun], files: Iterable[int] | None = None) -> None:
        if files is not None:
            for file in files:
                os.close(file)  # it is the file of `beside`
            return
        size_bytes, available_bytes = sum(run.count for run in runs) * self._extent_bytes, _available_bytes()
        if size_bytes > available_bytes:
            raise ConfigError(
                "device_memory_bytes", f"{size_bytes} bytes requested, but this machine has {available_bytes} available"
            )

    def export(self, first: int, count: int) -> list[int]:
        """Return the file of all extents if `first` is 0, otherwise no files."""
        return [os.dup(self._fd)] if self._fd is not None and first == 0 and count else []

    def beside(self, files: Iterable[int]) -> HostBackend:
        [fd] = files
        return HostBackend(fd)

    def reserve(self, size_bytes: int) -> int:
        """Reserve a range, aligned so that whole page tables can be moved."""
        raw = _mmap(None, size_bytes + _PAGE_TABLE_BYTES, _PROT_NONE, _RESERVED, -1, 0)
        address = -(-raw // _PAGE_TABLE_BYTES) * _PAGE_TABLE_BYTES
        if address > raw:
            self.release(raw, address - raw)
        self.release(address + size_bytes, raw + _PAGE_TABLE_BYTES - address)
        return address

    def release(self, address: int, size_bytes: int) -> None:
        if _libc.munmap(address, size_bytes) != 0:
            raise _os_failure("munmap", size_bytes)

    def map(self, address: int, runs: Sequence[ExtentRun]) -> None:
        if self._fd is None or not self._extent_bytes:
            raise InvariantViolation("extents are mapped before they were created or after they were closed")
        try:
            at = address
            for run in runs:
                for parked, extents in itertools.groupby(range(run.first, run.end), self._parked.__getitem__):
                    first, *others = extents
                    part = ExtentRun(first, 1 + len(others))
                    if not (parked and self._move_tables(self._parking_of(part), at, part.count)):
                        self._map_afresh(self._fd, at, part, 0 if self._sparse else _MAP_POPULATE)
                    at += part.count * self._extent_bytes
        except BaseException:
            self._reserve_again(address, sum(run.count for run in runs))
            raise
        finally:
            for run in runs:
                self._parked[run.first : run.end] = bytes(run.count)

    def unmap(self, address: int, runs: Sequence[ExtentRun]) -> None:
        at = address
        for run in runs:
            if self._sparse:
                _libc.madvise(at, run.count * self._extent_bytes, _MADV_REMOVE)
            else:
                self._park(at, run)
            at += run.count * self._extent_bytes
        self._reserve_again(address, sum(run.count for run in runs))

    def tensor(self, address: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        count = torch.Size(shape).numel()
        memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=dtype, count=count).view(tuple(shape))

    def synchronise(self) -> None:
        """Does nothing, because operations on the CPU are synchronous."""

    def close(self) -> None:
        if self._fd is not None:
            if self._parking:
                self.release(self._parking, self._size_bytes)
            os.close(self._fd)  # the last reference to the memory once every range has been released
            self._fd = None

    def _parking_of(self, run: ExtentRun) -> int:
        return self._parking + run.first * self._extent_bytes

    def _park(self, address: int, run: ExtentRun) -> None:
        if self._fd is None or not self._tables_move:
            return
        if self._move_tables(address, self._parking_of(run), run.count):
            self._parked[run.first : run.end] = b"\x01" * run.count
        else:  # a failed mremap may have removed its target
            self._map_afresh(self._fd, self._parking_of(run), run, 0)

    def _move_tables(self, source: int, target: int, count: int) -> bool:
        return _move_tables(source, target, count * self._extent_bytes)

    def _map_afresh(self, fd: int, address: int, run: ExtentRun, populate: int) -> None:
        size_bytes, offset_bytes = run.count * self._extent_bytes, run.first * self._extent_bytes
        _mmap(address, size_bytes, _PROT_READ_WRITE, _MAP_SHARED | _MAP_FIXED | populate, fd, offset_bytes)

    def _kernel_moves_tables(self, fd: int) -> bool:
        """True if the kernel can move page tables of shared memory. This is probed in advance, because a refused mremap
        leaves a hole at its target.
        """
        page_bytes = mmap.PAGESIZE
        source = _mmap(None, page_bytes, _PROT_READ_WRITE, _MAP_SHARED, fd, 0)
        target = _mmap(None, page_bytes, _PROT_NONE, _RESERVED, -1, 0)
        moved = _move_tables(source, target, page_bytes)
        self.release(source, page_bytes)
        self.release(target, page_bytes)
        return moved

    def _reserve_again(self, address: int, count: int) -> None:
        _mmap(address, count * self._extent_bytes, _PROT_NONE, _RESERVED | _MAP_FIXED, -1, 0)


def _move_tables(source: int, target: int, size_bytes: int) -> bool:
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
    return _libc.mremap(source, size_bytes, size_bytes, flags, target) == target


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
