import signal
import subprocess
import sys
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


def test_neighbours_mapped_one_by_one_are_one_mapping_to_the_kernel(backend: HostBackend) -> None:
    one = Range(backend, backend.granularity_bytes)
    for slot in range(4):
        one.map(slot, ExtentRun(slot, 1))
    assert len(mappings()) == 1
    one.close()


def test_mapped_memory_is_resident_before_it_is_touched(backend: HostBackend) -> None:
    one = Range(backend, backend.granularity_bytes)
    one.map(0, ExtentRun(0, 4))
    smaps = Path("/proc/self/smaps").read_text(encoding="utf-8")
    entry = smaps[smaps.index("ballast-device-memory") :]
    resident = next(line for line in entry.splitlines() if line.startswith("Rss:"))
    assert int(resident.split()[1]) * 1024 == 4 * backend.granularity_bytes
    one.close()


def test_a_range_too_large_for_the_address_space_is_refused_with_a_hint(backend: HostBackend) -> None:
    with pytest.raises(ConfigError, match=r"vm\.max_map_count"):
        backend.reserve(1 << 60)


def test_a_tensor_covers_far_more_than_the_machine_has(backend: HostBackend) -> None:
    size_bytes = 1 << 42
    address = backend.reserve(size_bytes)
    backend.map(address + size_bytes - backend.granularity_bytes, ExtentRun(0, 1))
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
