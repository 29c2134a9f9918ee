"""The CUDA backend: its logic on a simulated driver, and all of it on a GPU with `-m gpu`."""

import importlib
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch

from ballast.common.errors import ConfigError
from services.worker.memory.backend import ExtentRun
from services.worker.memory.cuda import BindingsDriver, CudaBackend, CudaError
from tests.unit.worker.memory.contract import COUNT, BackendContract, Range
from tests.unit.worker.memory.simulated_driver import GRANULARITY_BYTES, SimulatedDriver


class TestCudaBackendLogic(BackendContract):
    @pytest.fixture
    def backend(self) -> Iterator[CudaBackend]:
        driver = SimulatedDriver()
        made = CudaBackend(driver)
        yield made
        made.close()
        driver.require_empty()


class CountingDriver(BindingsDriver):
    """Counts handles, since the device's free memory does not show leaks: it also shrinks when torch loads kernels."""

    had_count = released_count = 0

    def create(self, size_bytes: int) -> Any:
        handle = super().create(size_bytes)
        self.had_count += 1
        return handle

    def take(self, file: int) -> Any:
        handle = super().take(file)
        self.had_count += 1
        return handle

    def release(self, handle: Any) -> None:
        super().release(handle)
        self.released_count += 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestCudaBackendOnDevice(BackendContract):
    @pytest.fixture
    def backend(self) -> Iterator[CudaBackend]:
        driver = CountingDriver.open(0)
        made = CudaBackend(driver)
        yield made
        made.close()
        assert driver.released_count == driver.had_count

    def test_a_captured_graph_survives_a_remap(self, created: CudaBackend, one: Range) -> None:
        one.map(0, ExtentRun(0, 2))
        words = created.tensor(one.address, (2, one.extent_bytes // 4), torch.float32)
        words.fill_(1)
        graph, sums = torch.cuda.CUDAGraph(), torch.zeros(2, device=created.device)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            sums.copy_(words.sum(dim=1))
        graph.replay()
        assert sums.tolist() == [one.extent_bytes / 4] * 2
        one.unmap(1, 1)
        one.map(1, ExtentRun(5, 1))
        words[1].fill_(2)
        graph.replay()
        assert sums.tolist() == [one.extent_bytes / 4, one.extent_bytes / 2]
        one.unmap(0, 2)

    def test_unmapping_waits_for_kernels(self, created: CudaBackend, one: Range) -> None:
        one.map(0, ExtentRun(0, 1))
        for _ in range(200):
            one.extents[0].add_(1)
        one.unmap(0, 1)
        one.map(0, ExtentRun(0, 1))
        assert one.value(0) == 200
        one.unmap(0, 1)


@pytest.fixture
def driver() -> SimulatedDriver:
    return SimulatedDriver()


def test_unmapping_waits_for_kernels(driver: SimulatedDriver) -> None:
    backend = CudaBackend(driver)
    backend.create(GRANULARITY_BYTES, COUNT)
    one = Range(backend, GRANULARITY_BYTES)
    one.map(0, ExtentRun(0, 2))
    driver.kernels_run = True
    one.unmap(0, 2)
    assert driver.mappings == {}
    one.close()
    backend.close()


def test_a_run_that_fails_halfway_is_not_mapped_at_all(driver: SimulatedDriver) -> None:
    backend = CudaBackend(driver)
    backend.create(GRANULARITY_BYTES, COUNT)
    one = Range(backend, GRANULARITY_BYTES)
    driver.maps_until_failure = 2
    with pytest.raises(CudaError, match="cuMemMap"):
        one.map(0, ExtentRun(0, 4))
    assert driver.mappings == {}
    one.close()
    backend.close()
    driver.require_empty()


def test_memory_taken_by_another_process_is_reported_as_too_little(driver: SimulatedDriver) -> None:
    driver.creates_until_failure = 3
    with pytest.raises(ConfigError, match="device_memory_bytes"):
        CudaBackend(driver).create(GRANULARITY_BYTES, COUNT)
    driver.require_empty()


def test_without_gpu_or_bindings_the_module_imports_and_names_what_is_missing() -> None:
    program = (
        "import sys\n"
        "sys.modules['cuda'] = None\n"
        "from ballast.common.errors import ConfigError\n"
        "from services.worker.memory.cuda import open_cuda\n"
        "import torch\n"
        "for sees_gpu, what in ((False, 'torch sees no GPU'), (True, 'cuda-bindings')):\n"
        "    torch.cuda.is_available = lambda: sees_gpu\n"
        "    torch.cuda.device_count = lambda: 1\n"
        "    try:\n"
        "        open_cuda(0)\n"
        "    except ConfigError as error:\n"
        "        assert what in str(error), error\n"
        "    else:\n"
        "        raise SystemExit('no error')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


class RecordedBindings(ModuleType):
    """The bindings' real structures and enums; calls are recorded and answered from a table."""

    def __init__(self, answers: dict[str, tuple[Any, ...]]) -> None:
        super().__init__("cuda.bindings.driver")
        self._real = pytest.importorskip("cuda.bindings.driver")
        self._answers = answers
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith(("cuMem", "cuDevice", "cuCtx")):
            return getattr(self._real, name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, arguments))
            code, *values = self._answers.get(name, (0,))
            return (self._real.CUresult(code), *values)

        return call


def bindings(**answers: tuple[Any, ...]) -> RecordedBindings:
    return RecordedBindings(
        {
            "cuDeviceGet": (0, 0),
            "cuDevicePrimaryCtxRetain": (0, "context"),
            "cuDeviceGetAttribute": (0, 1),
            "cuMemGetAllocationGranularity": (0, 2 << 20),
            "cuMemCreate": (0, "handle"),
            "cuMemAddressReserve": (0, 1 << 40),
            **answers,
        }
    )


def test_the_driver_gives_access_to_its_device_alone() -> None:
    cuda = bindings()
    driver = BindingsDriver(cuda, 1)
    driver.allow_access(1 << 40, 4 << 20)
    name, (address, size_bytes, access, count) = cuda.calls[-1]
    assert (name, address, size_bytes, count) == ("cuMemSetAccess", 1 << 40, 4 << 20, 1)
    assert [each.location.id for each in access] == [1]
    assert {each.flags for each in access} == {cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE}


def test_the_driver_requests_memory_on_its_device() -> None:
    cuda = bindings()
    driver = BindingsDriver(cuda, 3)
    assert driver.granularity_bytes == 2 << 20
    assert driver.create(2 << 20) == "handle"
    _, (size_bytes, properties, _) = cuda.calls[-1]
    assert (size_bytes, properties.location.id) == (2 << 20, 3)
    assert properties.type == cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    assert properties.location.type == cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE


def test_a_gpu_without_virtual_memory_management_is_refused() -> None:
    with pytest.raises(ConfigError, match="no virtual memory management"):
        BindingsDriver(bindings(cuDeviceGetAttribute=(0, 0)), 0)


def test_the_bindings_have_every_used_call() -> None:
    pytest.importorskip("cuda.bindings.driver")
    real = importlib.import_module("cuda.bindings.driver")
    cuda = bindings()
    driver = BindingsDriver(cuda, 0)
    address = driver.reserve_address(2 << 20)
    driver.map(address, 2 << 20, driver.create(2 << 20))
    driver.allow_access(address, 2 << 20)
    driver.unmap(address, 2 << 20)
    driver.free_address(address, 2 << 20)
    driver.release("handle")
    assert {name for name, _ in cuda.calls if not hasattr(real, name)} == set()


def test_bytes_for_checksums_are_read_in_parallel_with_computations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes are read on a separate stream, which waits only for work that was launched before the read."""

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.device = device
            self.behind: object = None

        def wait_stream(self, other: object) -> None:
            self.behind = other

    engine = Stream(torch.device("cuda", 0))
    current, read_on = [engine], list[Stream]()

    @contextmanager
    def on(stream: Stream) -> Generator[None]:
        current.append(stream)
        yield
        current.pop()

    def read(tensor: torch.Tensor) -> torch.Tensor:
        read_on.append(current[-1])
        return tensor

    def current_stream(device: torch.device) -> Stream:
        return current[-1]

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(torch.Tensor, "cpu", read)
    held = torch.randint(0, 256, (40 << 20,), dtype=torch.uint8)
    parts = list[bytes]()
    driver = SimulatedDriver()
    driver.device = engine.device
    for part in CudaBackend(driver).contents(held):
        assert current == [engine]  # the caller's stream is unchanged
        parts.append(bytes(part))
    assert b"".join(parts) == held.numpy().tobytes()
    assert len(parts) > 1
    assert all(stream is not engine and stream.behind is engine for stream in read_on)
