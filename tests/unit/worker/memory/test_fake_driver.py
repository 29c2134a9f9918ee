"""The CUDA backend, without a GPU, on the driver's real bindings and a fake driver that enforces its rules.

BALLAST_DRIVER_HISTORIES sets the number of random operations.
"""

import contextlib
import importlib
import os
import random
import threading
from collections.abc import Iterator

import pytest

from ballast.common.errors import ConfigError
from services.worker.memory.cuda import BindingsDriver, CudaBackend, CudaError
from services.worker.memory.device import DeviceMemory
from tests.support.fake_driver import FakeDriver, OnTheCpu, load, open_fake
from tests.unit.worker.memory.contract import BackendContract
from tests.unit.worker.memory.models import EXTENT_BYTES, LAYERS, books, fill_layer, open_small, possible

OPERATIONS = int(os.environ.get("BALLAST_DRIVER_HISTORIES", "500"))
EPISODE = 25  # operations between opening and closing a memory


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    driver = load()
    driver.set_granularity(EXTENT_BYTES)
    driver.fail_at(None)
    yield driver
    driver.fail_at(None)
    assert driver.violation == ""
    assert driver.counts == (0, 0, 0, 0)


@pytest.mark.usefixtures("driver")
class TestCudaBackendOverTheBindings(BackendContract):
    @pytest.fixture
    def backend(self) -> Iterator[CudaBackend]:
        made = open_fake()
        yield made
        made.close()


def test_any_thread_may_call(driver: FakeDriver) -> None:
    """The driver requires a current context on each thread. A thread that has not used the device yet has none."""
    memory = open_small(open_fake())
    thread = threading.Thread(target=memory.drop_layers, args=([1, 2],))
    thread.start()
    thread.join()
    assert memory.parameters.held_layers == (0, 3)
    memory.close()


def test_extents_are_created_shareable_without_refused_features(driver: FakeDriver) -> None:
    cuda = importlib.import_module("cuda.bindings.driver")
    kinds = cuda.CUmemAllocationHandleType
    files, none = kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, kinds.CU_MEM_HANDLE_TYPE_NONE

    class Refuses(OnTheCpu):
        refused: tuple[str, ...] = ()

        def _attribute(self, index: int, name: str) -> int:
            return 1

        @property
        def asked(self) -> tuple[object, int]:
            return self._properties.requestedHandleTypes, self._properties.allocFlags.gpuDirectRDMACapable

        def create(self, size_bytes: int) -> object:
            handles, reads = self.asked
            if (handles != none and "files" in self.refused) or (reads and "network" in self.refused):
                raise CudaError("cuMemCreate", "CUDA_ERROR_NOT_PERMITTED")
            return super().create(size_bytes)

    for refused, left in (
        ((), (files, 1)),
        (("network",), (files, 0)),
        (("files",), (none, 1)),
        (("files", "network"), (none, 0)),
    ):
        made = type("Refusing", (Refuses,), {"refused": refused})(cuda, 0)
        assert made.asked == left
        backend = CudaBackend(made)
        backend.create(EXTENT_BYTES, 4)
        backend.close()


def test_a_layer_is_dropped_and_restored_in_a_few_calls(driver: FakeDriver) -> None:
    """One call unmaps a range and one call makes it accessible, whatever its number of extents."""
    memory = open_small(open_fake())
    driver.fail_at(None, unmaps=True)
    memory.parameters.drop([1])
    assert driver.calls == 1
    extents = memory.parameters.extents_of(1)
    driver.fail_at(None)
    memory.parameters.restore(1)
    assert driver.calls == extents + 1
    memory.close()


def test_a_refused_call_while_opening_leaks_nothing(driver: FakeDriver) -> None:
    """Nothing leaks, whichever call is refused while the memory is being opened."""
    driver.fail_at(None)
    open_small(open_fake()).close()
    for call in range(driver.calls):
        backend = open_fake()
        driver.fail_at(call)
        memory: DeviceMemory | None = None
        with contextlib.suppress(ConfigError, CudaError):
            memory = open_small(backend)
        driver.fail_at(None)
        if memory is not None:
            memory.check()
            memory.close()
        backend.close()
        assert driver.violation == ""
        assert driver.counts == (0, 0, 0, 0), f"call {call} was refused"


# ------------------------------------------------------------ drops, restores, aborts, refusals


def test_random_drops_and_restores_with_calls_that_are_refused(driver: FakeDriver) -> None:
    rng, refused, done = random.Random(7), 0, 0
    while done < OPERATIONS:
        memory = open_small(open_fake())
        checksums = [_fill(memory, layer) for layer in range(LAYERS)]
        assert memory.kv.block_count > 0
        for _ in range(EPISODE):
            held_before, before = set(memory.parameters.held_layers), books(memory)
            driver.fail_at(rng.randrange(12) if rng.random() < 0.5 else None, unmaps=True)
            try:
                possible(memory, rng)()
            except CudaError:
                refused += 1
                assert books(memory) == before
            driver.fail_at(None)
            done += 1
            assert driver.violation == ""
            memory.check()
            _compare_books(memory, driver)
            for layer in memory.parameters.held_layers:
                if layer not in held_before:
                    fill_layer(memory, layer)
                assert memory.parameters.layer_checksum(layer) == checksums[layer]
        memory.close()
        assert driver.counts == (0, 0, 0, 0)
    assert refused > OPERATIONS // 20


def _fill(memory: DeviceMemory, layer: int) -> bytes:
    fill_layer(memory, layer)
    return memory.parameters.layer_checksum(layer)


def _compare_books(memory: DeviceMemory, driver: FakeDriver) -> None:
    """Checks that the driver has mapped exactly what the books list, and that all of it is accessible."""
    extents = memory.parameters.extent_count + sum(window.extent_count for window in memory.kv.windows)
    assert driver.counts.mappings == extents == memory.pool.extent_count - memory.pool.free_count
    assert driver.counts.handles == memory.pool.extent_count
    assert driver.counts.inaccessible == 0
    for window in memory.kv.windows:
        for layer in (*window.held_layers, *window.retired_layers):
            blocks = window.blocks_of([layer])
            memory.kv.layer(layer)[window.first_block : window.first_block + blocks].fill_(0.5)  # must not fault


def test_the_bindings_report_which_call_was_refused(driver: FakeDriver) -> None:
    made: BindingsDriver = OnTheCpu(importlib.import_module("cuda.bindings.driver"), 0)
    driver.fail_at(0)
    with pytest.raises(CudaError, match=r"cuMemCreate: .*OUT_OF_MEMORY") as caught:
        made.create(EXTENT_BYTES)
    assert caught.value.out_of_memory
