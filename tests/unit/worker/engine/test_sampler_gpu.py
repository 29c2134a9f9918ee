"""The GPU's sampler without a GPU: interpreted, and compiled ahead of time for several GPUs."""

import importlib
import os
import subprocess
import sys

import pytest
import torch

from services.worker.core.batch import NewSequence
from services.worker.engine.sampler import SampleRow
from services.worker.engine.sampler_gpu import GpuSampler, adjust_constants, draw_constants, find_constants
from tests.unit.worker.engine.compiled_kernel import SHARED_LIMIT_BYTES, TYPES, compiled
from tests.unit.worker.engine.interpreted_sampler import (
    CPU,
    compare,
    requests,
    require_grammars,
    require_small_changes,
    require_tokens_of_what_is_no_number,
)

pytest.importorskip("triton")

TYPE_OF = {
    "numbers_ptr": "*fp64",
    "wholes_ptr": "*i32",
    "chosen_ptr": "*i32",
    "best_ptr": "*fp32",
    "seen_ptr": "*i32",
    "total_ptr": "*fp64",
    "near_ptr": "*fp32",
    "near_tokens_ptr": "*i32",
    "masks_ptr": "*i32",
    "counts_ptr": "*i16",
    "row_stride": "i32",
    "mask_stride": "i32",
    "vocabulary": "i32",
}


@pytest.mark.rotating
def test_the_interpreted_sampler_draws_the_cpus_tokens() -> None:
    """Runs in its own process, since Triton decides on import whether it compiles or interprets."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.unit.worker.engine.interpreted_sampler"]
    subprocess.run(command, check=True, timeout=300, env=os.environ | {"TRITON_INTERPRET": "1"})


@pytest.mark.rotating
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("capability", SHARED_LIMIT_BYTES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sampler_kernels_fit_into_registers(capability: int, dtype: torch.dtype) -> None:
    kernels = importlib.import_module("services.worker.engine.sampling_kernels")
    variants = ((kernels.find_best, find_constants()), (kernels.draw, draw_constants()))
    for kernel, constants in (*variants, (kernels.adjust, adjust_constants())):
        types = TYPE_OF | {"logits_ptr": f"*{TYPES[dtype]}"}
        given = {name: types[name] for name in kernel.arg_names if name in types}
        done = compiled(kernel, given, constants, capability)
        assert done.spilled_bytes <= (64 if capability == 100 else 0), kernel.fn.__name__  # rows of 256 KiB and more
        assert done.shared_bytes <= 48 << 10, kernel.fn.__name__


def test_table_rows_are_reused_by_other_sequences() -> None:
    """Tables have as many rows as sequences have run at once. A history starts empty."""
    sampler = GpuSampler(40, [2], CPU)
    for first in range(0, 3000, 300):
        for new in requests(300, 40, first):
            sampler.add(NewSequence(first + new.sequence_id, new.prompt_token_ids, (), new.sampling))
        for i in range(first, first + 300):
            sampler.remove(i)
    assert len(sampler._numbers) == 512
    assert len(sampler._counts_HV) <= 512
    (new,) = [each for each in requests(20, 40, 5) if each.sampling.penalised][:1]
    sampler.add(NewSequence(1, (3, 3, 4), (4, 4, 7), new.sampling))
    sampler.add(NewSequence(2, (5,), (), new.sampling))
    sampler.prepare([SampleRow(1, 6)])
    expected = torch.zeros(40, dtype=torch.int16)
    expected[[3, 4, 7]] = torch.tensor([1, 3, 2], dtype=torch.int16)
    assert torch.equal(sampler._counts_HV[sampler._sequences[1].history], expected)


@pytest.mark.gpu
def test_on_the_device_draws_equal_the_cpus_except_for_rounding() -> None:
    device = torch.device("cuda", 0)
    assert compare(256, 128_256, 1, steps=2, device=device) <= 2
    assert compare(64, 5_000, 2, steps=4, device=device) <= 1
    require_tokens_of_what_is_no_number(device)
    require_small_changes(device)
    require_grammars(device)
