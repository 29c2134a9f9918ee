"""Device memory of a GPU, through the driver's virtual memory management. Can be imported without a GPU.

`CudaBackend` contains the logic, `VmmDriver` declares the dozen driver calls that it needs, and `BindingsDriver`
implements them with the `cuda-bindings` package. The driver requires that every extent is a separate mapping that is
unmapped as a whole. A mapping needs access rights, which one call sets for a whole run. Unmapping does not wait for
kernels, so it is preceded by a synchronisation.
"""

from __future__ import annotations

import importlib
import itertools
import os
import threading
from collections.abc import Collection, Iterable, Sequence
from types import ModuleType
from typing import Any, Protocol, Self

import torch

from ballast.common.errors import ConfigError, InvariantViolation
from ballast.common.extras import lacking
from services.worker.memory.backend import ExtentRun
from services.worker.memory.tensors import TensorOperations

Handle = Any  # an opaque object of the driver bindings


class VmmDriver(Protocol):
    """Driver calls, bound to one device."""

    @property
    def device(self) -> torch.device: ...

    @property
    def granularity_bytes(self) -> int: ...

    def available_bytes(self) -> int: ...

    def create(self, size_bytes: int) -> Handle: ...

    def release(self, handle: Handle) -> None: ...

    def export(self, handle: Handle) -> int:
        """Export an allocation as a file descriptor that another process can `take`."""
        ...

    def take(self, file: int) -> Handle:
        """Import memory that another process has exported. The file is not closed."""
        ...

    def reserve_address(self, size_bytes: int) -> int: ...

    def free_address(self, address: int, size_bytes: int) -> None: ...

    def map(self, address: int, size_bytes: int, handle: Handle) -> None: ...

    def allow_access(self, address: int, size_bytes: int) -> None:
        """Let the device read and write `size_bytes` from `address`, which may span several mappings."""
        ...

    def unmap(self, address: int, size_bytes: int) -> None:
        """Unmap a range of one or several whole mappings."""
        ...

    def synchronise(self) -> None: ...


class CudaError(RuntimeError):
    """A driver call has failed."""

    def __init__(self, call: str, code: str) -> None:
        super().__init__(f"{call}: {code}")
        self.code = code

    @property
    def out_of_memory(self) -> bool:
        return "OUT_OF_MEMORY" in self.code


class CudaBackend(TensorOperations):
    """`MemoryBackend` of a GPU. Unmapping does not wait for peers that still read an extent."""

    def __init__(self, driver: VmmDriver) -> None:
        self._driver = driver
        self._handles: list[Handle] = []  # by extent; None: returned to the device
        self._extent_bytes = 0
        self._taken = False  # True: the extents belong to another process

    @property
    def device(self) -> torch.device:
        return self._driver.device

    @property
    def granularity_bytes(self) -> int:
        return self._driver.granularity_bytes

    def create(self, extent_bytes: int, count: int) -> None:
        if self._taken and not self._extent_bytes:
            if len(self._handles) != count:
                raise InvariantViolation(f"{count} extents requested, but the other process has {len(self._handles)}")
            self._extent_bytes = extent_bytes
            return
        if self._handles:
            raise InvariantViolation("the extents of this backend have already been created")
        available_bytes = self._driver.available_bytes()
        if extent_bytes * count > available_bytes:
            raise _too_little(self.device, extent_bytes * count, available_bytes)
        self._extent_bytes = extent_bytes
        try:
            for _ in range(count):
                self._handles.append(self._driver.create(extent_bytes))
            self._clear(ExtentRun(0, count))
        except CudaError as error:
            self.close()
            if error.out_of_memory:
                raise _too_little(self.device, extent_bytes * count, available_bytes) from error
            raise

    def give_up(self, runs: Sequence[ExtentRun]) -> None:
        self._driver.synchronise()
        for extent in _extents(runs):
            handle, self._handles[extent] = self._handles[extent], None
            self._driver.release(handle)

    def take_back(self, runs: Sequence[ExtentRun], files: Iterable[int] | None = None) -> None:
        if files is not None:
            self._import(files, set(_extents(runs)))
            return
        wanted_bytes = sum(run.count for run in runs) * self._extent_bytes
        available_bytes, made = self._driver.available_bytes(), list[int]()
        if wanted_bytes > available_bytes:
            raise _too_little(self.device, wanted_bytes, available_bytes)
        try:
            for extent in _extents(runs):
                self._handles[extent] = self._driver.create(self._extent_bytes)
                made.append(extent)
            for run in runs:
                self._clear(run)
        except CudaError as error:
            for extent in made:
                handle, self._handles[extent] = self._handles[extent], None
                self._driver.release(handle)
            if error.out_of_memory:
                raise _too_little(self.device, wanted_bytes, available_bytes) from error
            raise

    def export(self, first: int, count: int) -> list[int]:
        files: list[int] = []
        try:
            files.extend(map(self._driver.export, self._handles[first : first + count]))
        except BaseException:
            _close(files)
            raise
        return files

    def beside(self, files: Iterable[int]) -> CudaBackend:
        made = CudaBackend(self._driver)
        made._taken = True
        try:
            made._import(files)
        except BaseException:
            made.close()
            raise
        return made

    def _import(self, files: Iterable[int], wanted: Collection[int] | None = None) -> None:
        """Import the extents in `wanted` from the files of all extents; None: all, which are new."""
        for extent, file in enumerate(files):
            try:
                if wanted is None:
                    self._handles.append(self._driver.take(file))
                elif extent in wanted and self._handles[extent] is None:
                    self._handles[extent] = self._driver.take(file)
            finally:
                os.close(file)  # the handle keeps the memory alive

    def reserve(self, size_bytes: int) -> int:
        return self._driver.reserve_address(size_bytes)

    def release(self, address: int, size_bytes: int) -> None:
        self._driver.free_address(address, size_bytes)

    def map(self, address: int, runs: Sequence[ExtentRun]) -> None:
        for run in runs:
            if not 0 <= run.first <= run.end <= len(self._handles):
                raise InvariantViolation(f"{run} is mapped, but {len(self._handles)} extents exist")
        end = address
        try:
            for handle in itertools.chain.from_iterable(self._handles[run.first : run.end] for run in runs):
                self._driver.map(end, self._extent_bytes, handle)
                end += self._extent_bytes
            self._driver.allow_access(address, end - address)
        except CudaError:
            if end > address:
                self._driver.unmap(address, end - address)
            raise

    def unmap(self, address: int, runs: Sequence[ExtentRun]) -> None:
        self._driver.synchronise()
        self._driver.unmap(address, sum(run.count for run in runs) * self._extent_bytes)

    def tensor(self, address: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        size_bytes = torch.Size(shape).numel() * dtype.itemsize
        storage = torch._C._construct_storage_from_data_pointer(address, self.device, size_bytes)
        # The public interfaces (DLPack, __cuda_array_interface__) look up the pointer in the driver, which fails while
        # nothing is mapped.
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage).view(dtype).view(tuple(shape))

    def synchronise(self) -> None:
        self._driver.synchronise()

    def close(self) -> None:
        while self._handles:
            if (handle := self._handles.pop()) is not None:
                self._driver.release(handle)

    def _clear(self, run: ExtentRun) -> None:
        """Clear fresh memory, which contains old data but must read as zeros."""
        size_bytes = run.count * self._extent_bytes
        address = self.reserve(size_bytes)
        try:
            self.map(address, [run])
            self.tensor(address, (size_bytes,), torch.uint8).zero_()
            self.unmap(address, [run])
        finally:
            self.release(address, size_bytes)


def _extents(runs: Iterable[ExtentRun]) -> Iterable[int]:
    return (extent for run in runs for extent in range(run.first, run.end))


def _close(files: Iterable[int]) -> None:
    for file in files:
        os.close(file)


def _too_little(device: torch.device, wanted_bytes: int, available_bytes: int) -> ConfigError:
    return ConfigError(
        "device_memory_bytes", f"{wanted_bytes} bytes requested, but {device} has {available_bytes} available"
    )


class BindingsDriver:
    """`VmmDriver` through `cuda.bindings.driver`.

    The calls need the device's context on the calling thread. Access is granted only to this device, even for memory of
    another device. Further grants cost time and would only serve kernels on other devices, which this process does not
    launch.
    """

    def __init__(self, cuda: ModuleType, index: int) -> None:
        self._cuda = cuda
        self._device = torch.device("cuda", index)
        self._reached = {index}  # devices whose memory this device can map
        self._thread = threading.local()  # `entered`: the context is current on that thread
        # torch has created the context and keeps it for the lifetime of the process.
        self._context = self._checked("cuDevicePrimaryCtxRetain", self._checked("cuDeviceGet", index))
        if not self._attribute(index, "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"):
            raise ConfigError(f"device cuda:{index}", "has no virtual memory management, which remapping needs")
        self._properties = self._make_properties(index)
        self._access = [self._make_access(index)]
        size = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        self._granularity_bytes = int(self._call("cuMemGetAllocationGranularity", self._properties, size))
        self._allow_sharing(index)

    @classmethod
    def open(cls, index: int) -> Self:
        """Bind to the GPU with this ordinal.

        Raises:
            ConfigError: there is no such GPU, driver or bindings, or the GPU does not support virtual memory
                management.
        """
        where = f"device cuda:{index}"
        if not torch.cuda.is_available():
            raise ConfigError(where, "torch sees no GPU (a CPU build of torch, no driver, or none visible)")
        device_count = torch.cuda.device_count()
        if not 0 <= index < device_count:
            raise ConfigError(where, f"there are only {device_count} GPUs, from cuda:0 on")
        try:
            cuda = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            raise lacking(where, "cuda-bindings", "cuda") from error
        torch.zeros(1, device=torch.device("cuda", index))  # torch creates the primary context and keeps it
        return cls(cuda, index)

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def granularity_bytes(self) -> int:
        return self._granularity_bytes

    def available_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]

    def create(self, size_bytes: int) -> Handle:
        return self._call("cuMemCreate", size_bytes, self._properties, 0)

    def release(self, handle: Handle) -> None:
        self._call("cuMemRelease", handle)

    def export(self, handle: Handle) -> int:
        kinds = self._cuda.CUmemAllocationHandleType
        if self._properties.requestedHandleTypes != kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR:
            raise ConfigError(f"device {self._device}", "the driver does not permit other processes to map its memory")
        return int(self._call("cuMemExportToShareableHandle", handle, self._properties.requestedHandleTypes, 0))

    def take(self, file: int) -> Handle:
        kind = self._cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        handle = self._call("cuMemImportFromShareableHandle", file, kind)
        try:
            self._require_reach(int(self._call("cuMemGetAllocationPropertiesFromHandle", handle).location.id))
        except BaseException:
            self.release(handle)
            raise
        return handle

    def reserve_address(self, size_bytes: int) -> int:
        return int(self._call("cuMemAddressReserve", size_bytes, 0, 0, 0))

    def free_address(self, address: int, size_bytes: int) -> None:
        self._call("cuMemAddressFree", address, size_bytes)

    def map(self, address: int, size_bytes: int, handle: Handle) -> None:
        self._call("cuMemMap", address, size_bytes, 0, handle, 0)

    def allow_access(self, address: int, size_bytes: int) -> None:
        self._call("cuMemSetAccess", address, size_bytes, self._access, len(self._access))

    def unmap(self, address: int, size_bytes: int) -> None:
        self._call("cuMemUnmap", address, size_bytes)

    def synchronise(self) -> None:
        torch.cuda.synchronize(self._device)

    def _require_reach(self, other: int) -> None:
        if other in self._reached:
            return
        here, there = self._call("cuDeviceGet", self._device.index), self._call("cuDeviceGet", other)
        if not self._call("cuDeviceCanAccessPeer", here, there):
            raise ConfigError(f"device {self._device}", f"has no access to the memory of cuda:{other}")
        self._reached.add(other)

    def _make_properties(self, index: int) -> Any:
        properties = self._cuda.CUmemAllocationProp()
        properties.type = self._cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = index
        return properties

    def _make_access(self, index: int) -> Any:
        access = self._cuda.CUmemAccessDesc()
        access.location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = index
        access.flags = self._cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return access

    def _attribute(self, index: int, name: str) -> int:
        attribute = getattr(self._cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self._call("cuDeviceGetAttribute", attribute, self._call("cuDeviceGet", index)))

    def _allow_sharing(self, index: int) -> None:
        """Let network cards read extents and other processes (rank 0, UCX) open them, if the driver permits it. Both
        are requested when extents are created.
        """
        kinds = self._cuda.CUmemAllocationHandleType
        handles, none = kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, kinds.CU_MEM_HANDLE_TYPE_NONE
        if not self._attribute(index, "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"):
            handles = none
        reads = int(bool(self._attribute(index, "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED")))
        for self._properties.requestedHandleTypes, self._properties.allocFlags.gpuDirectRDMACapable in dict.fromkeys(
            [(handles, reads), (handles, 0), (none, reads)]
        ):
            try:
                self.release(self.create(self._granularity_bytes))
            except CudaError as error:
                if error.out_of_memory:
                    raise
            else:
                return
        self._properties.requestedHandleTypes, self._properties.allocFlags.gpuDirectRDMACapable = none, 0

    def _call(self, name: str, *arguments: Any) -> Any:
        if not getattr(self._thread, "entered", False):
            self._checked("cuCtxSetCurrent", self._context)
            self._thread.entered = True
        return self._checked(name, *arguments)

    def _checked(self, name: str, *arguments: Any) -> Any:
        code, *values = getattr(self._cuda, name)(*arguments)
        if code != self._cuda.CUresult.CUDA_SUCCESS:
            raise CudaError(name, repr(code))
        return values[0] if values else None


def open_cuda(index: int) -> CudaBackend:
    """Open the backend of one GPU. Raises ConfigError that states what is missing."""
    return CudaBackend(BindingsDriver.open(index))
