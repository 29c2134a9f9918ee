"""The real bindings of the CUDA driver over one that is made here (`fake_libcuda.c`), whose memory is the CPU's."""

import ctypes
import functools
import importlib
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from services.worker.memory.cuda import BindingsDriver, CudaBackend

_SOURCE = Path(__file__).with_name("fake_libcuda.c")


class Counts(NamedTuple):
    """What the driver has that was not given back."""

    handles: int
    reservations: int
    mappings: int
    inaccessible: int  # mappings to which nobody has access yet


class FakeDriver:
    """The one that this process has: a library called libcuda.so.1 is loaded once."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.fake_violation.restype = ctypes.c_char_p
        library.fake_set_granularity.argtypes = [ctypes.c_uint64]
        library.fake_fail_at.argtypes = [ctypes.c_long, ctypes.c_long]
        library.fake_calls.restype = ctypes.c_long

    def set_granularity(self, size_bytes: int) -> None:
        """While nothing is allocated."""
        self._library.fake_set_granularity(size_bytes)

    def fail_at(self, call: int | None, *, unmaps: bool = False) -> None:
        """The call that comes after so many more is refused, once; None: none is. Calls are counted from here, those
        that unmap with `unmaps` only: a driver has little reason to refuse them.
        """
        self._library.fake_fail_at(-1 if call is None else call, unmaps)

    @property
    def calls(self) -> int:
        """Those that a driver may refuse, since `fail_at`."""
        return self._library.fake_calls()

    @property
    def violation(self) -> str:
        """The first rule of the driver that was broken, or nothing."""
        return self._library.fake_violation().decode()

    @property
    def counts(self) -> Counts:
        counts = (ctypes.c_uint64 * 4)()
        self._library.fake_counts(counts)
        return Counts(*counts)


class OnTheCpu(BindingsDriver):
    """The product's driver, but for what torch does on a GPU."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def available_bytes(self) -> int:
        return 1 << 30

    def synchronise(self) -> None: ...


@functools.cache
def load() -> FakeDriver:
    if torch.cuda.is_available():
        pytest.skip("there is a driver")
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "libcuda.so.1"
        command = ["gcc", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wl,-soname,libcuda.so.1"]
        subprocess.run([*command, str(_SOURCE), "-o", str(made), "-ldl", "-lpthread"], check=True)
        library = ctypes.CDLL(str(made), ctypes.RTLD_GLOBAL)
    driver = FakeDriver(library)
    cuda = importlib.import_module("cuda.bindings.driver")
    assert cuda.cuInit(0)[0] == cuda.CUresult.CUDA_SUCCESS  # the bindings have found this one
    return driver


def open_fake() -> CudaBackend:
    load()
    return CudaBackend(OnTheCpu(importlib.import_module("cuda.bindings.driver"), 0))
