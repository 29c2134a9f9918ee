import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ballast.common.errors import ConfigError
from services.worker.memory.backend import ExtentRun
from services.worker.memory.host import HostBackend
from tests.unit.worker.memory.contract import COUNT, BackendContract, Range


def mappings() -> list[str]:
    """The kernel's mappings of device memory in this process."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if "ballast-device-memory" in line]


def device_memory_fds() -> int:
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sum("ballast-device-memory" in str(link.readlink()) for link in links)


class TestHostBackend(BackendContract):
    @pytest.fixture
    def backend(self) -> Iterator[HostBackend]:
        made = HostBackend()
        yield made
        made.close()
        assert mappings() == []
        assert device_memory_fds() == 0


@pytest.fixture
def backend() -> Iterator[HostBackend]:
    made = HostBackend()
    made.create(made.granularity_bytes, COUNT)
    yield made
    made.close()


def test_neighbours_mapped_one_by_one_are_merged_by_the_kernel(backend: HostBackend) -> None:
    one = Range(backend, backend.granularity_bytes)
    before = len(mappings())
    for slot in range(4):
        one.map(slot, ExtentRun(slot, 1))
    assert len(mappings()) == before + 1
    one.unmap(0, 4)
    assert len(mappings()) == before
    one.map(0, ExtentRun(0, 4))
    assert len(mappings()) == before + 1
    one.close()


def resident_bytes(address: int) -> int:
    """Resident bytes of the kernel's mapping that begins at `address`."""
    smaps = Path("/proc/self/smaps").read_text(encoding="utf-8")
    entry = smaps[smaps.index(f"{address:x}-") :]
    line = next(line for line in entry.splitlines() if line.startswith("Rss:"))
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize("tables_move", [True, False])
def test_mapped_memory_is_resident_before_it_is_touched(
    backend: HostBackend, monkeypatch: pytest.MonkeyPatch, tables_move: bool
) -> None:
    """This holds even if the kernel refuses to move page tables, as old kernels do."""
    monkeypatch.setattr(backend, "_tables_move", tables_move)
    one, other = Range(backend, backend.granularity_bytes), Range(backend, backend.granularity_bytes)
    one.map(0, ExtentRun(0, 4))
    assert resident_bytes(one.address) == 4 * backend.granularity_bytes
    one.extents[:4].fill_(6)
    one.unmap(2, 2)
    other.map(0, ExtentRun(2, 4))  # two used before, and two new ones
    assert resident_bytes(other.address) == 4 * backend.granularity_bytes
    assert [other.value(slot) for slot in range(4)] == [6, 6, 0, 0]
    one.close()
    other.close()


def fastest_move_s(*, tables_move: bool) -> float:
    """Seconds that the fastest of ten moves of 64 MiB of resident memory takes, from one range to another."""
    backend = HostBackend()
    extent_bytes, everything = 8 << 20, ExtentRun(0, 8)
    backend.create(extent_bytes, everything.count)
    backend._tables_move = backend._tables_move and tables_move
    source, target = (backend.reserve(everything.count * extent_bytes) for _ in range(2))
    backend.map(source, [everything])
    times_s: list[float] = []
    for _ in range(10):
        begin_s = time.perf_counter()
        backend.unmap(source, [everything])
        backend.map(target, [everything])
        times_s.append(time.perf_counter() - begin_s)
        source, target = target, source
    for address in (source, target):
        backend.release(address, everything.count * extent_bytes)
    backend.close()
    return min(times_s)


def test_page_tables_are_moved_and_not_rebuilt() -> None:
    """Moving page tables was measured to be about fifty times faster than rebuilding them."""
    assert fastest_move_s(tables_move=True) < fastest_move_s(tables_move=False) / 5


def test_a_move_that_the_kernel_refuses_loses_nothing(backend: HostBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = Range(backend, backend.granularity_bytes), Range(backend, backend.granularity_bytes)
    one.map(0, ExtentRun(0, 4))
    one.extents[:4].fill_(3)
    before = mappings()
    with monkeypatch.context() as refusing:
        refusing.setattr(HostBackend, "_move_tables", refuse_move)
        one.unmap(2, 2)
        other.map(0, ExtentRun(2, 2))
        one.unmap(0, 2)
    other.map(2, ExtentRun(0, 2))
    assert [other.value(slot) for slot in range(4)] == [3, 3, 3, 3]
    assert len(mappings()) <= len(before) + 1
    one.close()
    other.close()


def refuse_move(backend: HostBackend, source: int, target: int, count: int) -> bool:
    """Refuses a move as the kernel does, after the target has already been unmapped."""
    backend.release(target, count * backend.granularity_bytes)
    return False


def test_a_range_too_large_for_the_address_space_is_refused_with_a_hint(backend: HostBackend) -> None:
    with pytest.raises(ConfigError, match=r"vm\.max_map_count"):
        backend.reserve(1 << 60)


def test_a_tensor_covers_far_more_than_the_machine_has(backend: HostBackend) -> None:
    size_bytes = 1 << 42
    address = backend.reserve(size_bytes)
    backend.map(address + size_bytes - backend.granularity_bytes, [ExtentRun(0, 1)])
    tensor = backend.tensor(address, (size_bytes // 2,), torch.bfloat16)
    tensor[-3:] = 1.5
    assert tensor[-4:].tolist() == [0.0, 1.5, 1.5, 1.5]
    backend.release(address, size_bytes)


def test_touching_unmapped_memory_ends_the_process() -> None:
    program = (
        "import ctypes\n"
        "from services.worker.memory.host import HostBackend\n"
        "address = HostBackend().reserve(1 << 16)\n"
        "ctypes.string_at(address, 1)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], check=False, timeout=60)
    assert ended.returncode == -signal.SIGSEGV
