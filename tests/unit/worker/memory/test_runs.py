"""Runs of bytes are gathered into a slot and scattered from it: tests how they are split into parts, and the kernel."""

import ctypes
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.memory.backend import SLOT_BYTES
from services.worker.memory.runs import RunKernel, Runs, constants, parts_of
from tests.unit.worker.engine.compiled_kernel import compiled

SHAPES: tuple[tuple[list[int], int], ...] = (  # bytes of each run, offset of the first run
    ([16], 0),
    ([65536, 16, 40000 * 16, 16384], 0),
    ([5, 4096, 4097, 1], 0),
    ([65536, 32], 3),
)


def scattered(sizes: Sequence[int], first: int, device: str = "cpu") -> list[torch.Tensor]:
    """Runs within one memory, with 48 bytes after each."""
    memory = torch.randint(0, 256, (first + sum(sizes) + 48 * len(sizes),), dtype=torch.uint8, device=device)
    runs: list[torch.Tensor] = []
    for size in sizes:
        runs.append(memory[first : first + size])
        first += size + 48
    return runs


def compare(device: str) -> None:
    """Checks that the kernel copies exactly the bytes of the runs, into a slot and out of it."""
    kernel = RunKernel(torch.device(device))
    for sizes, first in SHAPES:
        runs = scattered(sizes, first, device)
        slot = torch.full((sum(sizes) + 64,), 7, dtype=torch.uint8, device=device)
        kernel.gather(Runs.of(runs), slot)
        assert torch.equal(slot[: sum(sizes)], torch.cat(runs))
        assert bool((slot[sum(sizes) :] == 7).all())
        memory = runs[0]._base
        assert memory is not None
        wanted = memory.clone()
        for run in runs:
            run.zero_()
        kernel.scatter(Runs.of(runs), slot)
        assert torch.equal(memory, wanted)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 70_000), min_size=1, max_size=6), st.integers(0, 20), st.booleans())
def test_parts_cover_all_bytes_once_and_fit_a_program(sizes: list[int], first: int, aligned: bool) -> None:
    if aligned:
        sizes, first = [size * 16 for size in sizes], first * 16
    runs, slot = scattered(sizes, first), torch.zeros(sum(sizes), dtype=torch.uint8)
    parts, wide = parts_of(Runs.of(runs), slot)
    assert wide or not aligned
    unit = 16 if wide else 1
    assert parts[:, 2].min() > 0
    assert parts[:, 2].max() * unit <= constants(gathers=True, wide=wide)["SIZE"] * (4 if wide else 1)
    assert parts[:, 2].sum() * unit == sum(sizes)
    for address, place, size in (parts * unit).tolist():
        ctypes.memmove(slot.data_ptr() + place, address, size)
    assert torch.equal(slot, torch.cat(runs))


@pytest.fixture
def own_cache(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernel_moves_sixteen_bytes_at_a_time_and_fits_into_registers(capability: int) -> None:
    pytest.importorskip("triton")
    kernel = importlib.import_module("services.worker.memory.kernels").copy_runs
    for gathers in (False, True):
        for wide in (False, True):
            given = {"parts_ptr": "*i64", "slot_ptr": "*i32" if wide else "*i8"}
            done = compiled(kernel, given, constants(gathers=gathers, wide=wide), capability)
            assert done.spilled_bytes == done.shared_bytes == 0
            assert done.registers <= 96
            assert not wide or all(f"{which}.global.v4.b32" in done.ptx for which in ("ld", "st"))


def test_interpreted_the_kernel_copies_exactly_the_bytes_of_the_runs() -> None:
    pytest.importorskip("triton")
    program = f"from {__name__} import compare; compare('cpu')"
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_on_the_device_the_kernel_copies_exactly_the_bytes_of_the_runs() -> None:
    compare("cuda")


@pytest.mark.gpu
def test_a_slot_of_blocks_is_gathered_fast() -> None:
    memory = torch.zeros(4 * SLOT_BYTES, dtype=torch.uint8, device="cuda")
    blocks = list(memory.split(64 << 10))[::3][: SLOT_BYTES >> 16]
    kernel, slot = RunKernel(memory.device), torch.empty(SLOT_BYTES, dtype=torch.uint8, device="cuda")
    assert gb_per_s(lambda: kernel.gather(Runs.of(blocks), slot)) > 8


def gb_per_s(act: Callable[[], None], rounds: int = 20) -> float:
    """GB/s at which `act` copies a slot, including launches."""
    act()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(rounds):
        act()
    end.record()
    end.synchronize()
    return rounds * SLOT_BYTES / begin.elapsed_time(end) / 1e6
