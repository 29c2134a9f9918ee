"""The real CUDA driver bindings on a fake driver (`fake_libcuda.c`), which uses host memory."""

import ctypes
import functools
import importlib
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from services.worker.engine.load import Engine, load_engine
from services.worker.engine.peers import Peers
from services.worker.memory.cuda import BindingsDriver, CudaBackend

_SOURCE = Path(__file__).with_name("fake_libcuda.c")


class Counts(NamedTuple):
    """Resources of the driver that have not been released."""

    handles: int
    reservations: int
    mappings: int
    inaccessible: int  # mappings whose access rights have not been set yet


class FakeDriver:
    """Controls this process's fake driver: a library named libcuda.so.1 is loaded only once."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.fake_violation.restype = ctypes.c_char_p
        library.fake_set_granularity.argtypes = [ctypes.c_uint64]
        library.fake_fail_at.argtypes = [ctypes.c_long, ctypes.c_long]
        library.fake_calls.restype = ctypes.c_long

    def set_peers(self, reach_each_other: bool) -> None:
        """Sets whether devices can map each other's memory."""
        self._library.fake_set_peers(reach_each_other)

    def set_granularity(self, size_bytes: int) -> None:
        """Sets the allocation granularity; nothing may be allocated."""
        self._library.fake_set_granularity(size_bytes)

    def fail_at(self, call: int | None, *, unmaps: bool = False) -> None:
        """Lets the call after the next `call` calls fail; with None, no call fails. Unmapping calls count and can fail
        only with `unmaps`, since a real driver has little reason to refuse them.
        """
        self._library.fake_fail_at(-1 if call is None else call, unmaps)

    @property
    def calls(self) -> int:
        """The number of calls since `fail_at` that a driver may refuse."""
        return self._library.fake_calls()

    @property
    def violation(self) -> str:
        """The first driver rule that was violated, or ""."""
        return self._library.fake_violation().decode()

    def said(self) -> tuple[str, Counts]:
        return self.violation, self.counts

    @property
    def counts(self) -> Counts:
        counts = (ctypes.c_uint64 * 4)()
        self._library.fake_counts(counts)
        return Counts(*counts)


class OnTheCpu(BindingsDriver):
    """The production driver without its calls of torch's CUDA functions."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def available_bytes(self) -> int:
        return 1 << 30

    def synchronise(self) -> None: ...


@functools.cache
def load() -> FakeDriver:
    if torch.cuda.is_available():
        pytest.skip("a real CUDA driver is installed")
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "libcuda.so.1"
        command = ["gcc", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wl,-soname,libcuda.so.1"]
        subprocess.run([*command, str(_SOURCE), "-o", str(made), "-ldl", "-lpthread"], check=True)
        library = ctypes.CDLL(str(made), ctypes.RTLD_GLOBAL)
    driver = FakeDriver(library)
    cuda = importlib.import_module("cuda.bindings.driver")
    assert cuda.cuInit(0)[0] == cuda.CUresult.CUDA_SUCCESS  # so the bindings use the fake driver
    return driver


def open_fake(index: int = 0) -> CudaBackend:
    load()
    return CudaBackend(OnTheCpu(importlib.import_module("cuda.bindings.driver"), index))


def load_share(model_dir: Path, *, peers: Peers, extent_bytes: int, **named: Any) -> Engine:
    """`load_engine` for one rank of an instance, each on a device of this driver.

    Adds `fail_at` and `said` to the methods of the engine's memory, so that a test can call them on every rank by the
    same mechanism with which rank 0 changes the other ranks' memory.
    """
    driver = load()
    driver.set_granularity(extent_bytes)
    engine = load_engine(model_dir, peers=peers, backend=open_fake(peers.rank), **named)
    vars(engine.memory).update(fail_at=functools.partial(driver.fail_at, unmaps=True), said=driver.said)
    return engine
