"""The CUDA driver's memory calls on plain CPU memory. It enforces the real driver's rules and imitates its pitfalls."""

import ctypes
import mmap
import os

import torch

from ballast.common.errors import InvariantViolation
from services.worker.memory.cuda import CudaError

GRANULARITY_BYTES = 16 << 10
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
_FIXED = 0x10


class SimulatedDriver:
    """A `VmmDriver`. A handle is an offset in a memfd; new memory is filled with NaN bits, as it may be on a GPU."""

    device = torch.device("cpu")
    granularity_bytes = GRANULARITY_BYTES

    def __init__(self, available_bytes: int = 64 << 20) -> None:
        self._fd = os.memfd_create("simulated-gpu")
        self._end_bytes = 0
        self._available_bytes = available_bytes
        self.handles: dict[int, int] = {}  # handle -> size
        self._taken: list[int] = []  # handles, with another entry for each import from a file
        self.reservations: dict[int, int] = {}  # address -> size
        self.mappings: dict[int, tuple[int, int, bool]] = {}  # address -> (size, handle, accessible)
        self.kernels_run = False
        self.maps_until_failure: int | None = None
        self.creates_until_failure: int | None = None

    def available_bytes(self) -> int:
        return self._available_bytes

    def create(self, size_bytes: int) -> int:
        if self.creates_until_failure is not None:
            self.creates_until_failure -= 1
            if self.creates_until_failure < 0:
                raise CudaError("cuMemCreate", "<CUresult.CUDA_ERROR_OUT_OF_MEMORY: 2>")
        self._require(size_bytes % GRANULARITY_BYTES == 0, "size is not a multiple of the granularity")
        handle, self._end_bytes = self._end_bytes, self._end_bytes + size_bytes
        os.ftruncate(self._fd, self._end_bytes)
        os.pwrite(self._fd, b"\xff" * size_bytes, handle)
        self.handles[handle] = size_bytes
        return handle

    def export(self, handle: int) -> int:
        file = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR)  # with a file position of its own
        os.lseek(file, handle, os.SEEK_SET)
        return file

    def take(self, file: int) -> int:
        self._taken.append(os.lseek(file, 0, os.SEEK_CUR))
        return self._taken[-1]

    def release(self, handle: int) -> None:
        if handle in self._taken:
            self._taken.remove(handle)
            return
        self._require(handle in self.handles, "unknown handle")
        self._require(all(h != handle for _, h, _ in self.mappings.values()), "the handle is still mapped")
        del self.handles[handle]
        if not self.handles:
            os.close(self._fd)

    def reserve_address(self, size_bytes: int) -> int:
        address = self._mmap(None, size_bytes, 0, _RESERVED, -1, 0)
        self.reservations[address] = size_bytes
        return address

    def free_address(self, address: int, size_bytes: int) -> None:
        self._require(self.reservations.get(address) == size_bytes, "not the reservation as it was made")
        inside = [a for a in self.mappings if address <= a < address + size_bytes]
        self._require(not inside, "something is still mapped in the range")
        del self.reservations[address]
        _libc.munmap(address, size_bytes)

    def map(self, address: int, size_bytes: int, handle: int) -> None:
        if self.maps_until_failure is not None:
            self.maps_until_failure -= 1
            if self.maps_until_failure < 0:
                raise CudaError("cuMemMap", "<CUresult.CUDA_ERROR_INVALID_VALUE: 1>")
        self._require(self.handles.get(handle) == size_bytes, "size differs from the handle's")
        room = any(a <= address and address + size_bytes <= a + s for a, s in self.reservations.items())
        self._require(room, "outside of every reservation")
        clash = any(a < address + size_bytes and address < a + s for a, (s, _, _) in self.mappings.items())
        self._require(not clash, "something is mapped there already")
        self.mappings[address] = (size_bytes, handle, False)

    def allow_access(self, address: int, size_bytes: int) -> None:
        at = address
        while at < address + size_bytes:
            self._require(at in self.mappings, "the range is not fully mapped")
            size, handle, _ = self.mappings[at]
            self._mmap(at, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED, self._fd, handle)
            self.mappings[at] = (size, handle, True)
            at += size

    def unmap(self, address: int, size_bytes: int) -> None:
        self._require(not self.kernels_run, "a kernel may still use the memory")
        at = address
        while at < address + size_bytes:
            self._require(at in self.mappings, "not whole mappings")
            at += self.mappings.pop(at)[0]
        self._require(at == address + size_bytes, "not whole mappings")
        self._mmap(address, size_bytes, 0, _RESERVED | _FIXED, -1, 0)

    def synchronise(self) -> None:
        self.kernels_run = False

    def require_empty(self) -> None:
        self._require(not (self.handles or self.reservations or self.mappings), "something was left behind")

    def _mmap(self, address: int | None, size_bytes: int, protection: int, flags: int, fd: int, offset: int) -> int:
        mapped = _libc.mmap(address, size_bytes, protection, flags, fd, offset)
        if mapped in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), "mmap")
        return int(mapped)

    def _require(self, holds: bool, why: str) -> None:
        if not holds:
            raise InvariantViolation(f"the driver would refuse: {why}")
