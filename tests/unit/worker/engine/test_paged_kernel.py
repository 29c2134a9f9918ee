"""The GPU's attention kernel where there is no GPU: compiled ahead of time for two of them, and interpreted."""

import importlib
import os
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

import services.worker.engine.attention_cuda as attention_cuda
from services.worker.core.batch import Slice
from services.worker.engine.attention_cuda import CudaAttention
from services.worker.engine.packing import Packer
from tests.support.engine import BlockPool
from tests.unit.worker.engine import compiled_kernel
from tests.unit.worker.engine.compiled_kernel import SHARED_LIMIT_BYTES, TYPES, Compiled
from tests.unit.worker.engine.interpreted_kernel import BLOCK_TOKENS, BLOCKS, STEPS

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("own_cache")


# ------------------------------------------------------------ compiled


def compiled(capability: int, dtype: torch.dtype, groups: int, head_dim: int, *, with_chunks: bool) -> Compiled:
    kernel = importlib.import_module("services.worker.engine.paged_kernel").paged_attention
    kind = TYPES[dtype]
    given = {"out_ptr": f"*{kind}", "q_ptr": f"*{kind}", "kv_ptr": f"*{kind}", "tables_ptr": "*i32"}
    given |= {"tiles_ptr": "*i32", "q_row_stride": "i32", "table_width": "i32", "scale": "fp32"}
    attention = CudaAttention(8 * groups, 8, head_dim, dtype, torch.device("cuda"))
    return compiled_kernel.compiled(
        kernel, given, attention.constants(BLOCK_TOKENS, with_chunks=with_chunks), capability
    )


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_bfloat16_fits_into_registers_and_shared_memory(capability: int, head_dim: int) -> None:
    for groups in range(1, 9):
        for with_chunks in (False, True):
            kernel = compiled(capability, torch.bfloat16, groups, head_dim, with_chunks=with_chunks)
            which = f"sm_{capability}, heads of {head_dim}, {groups} to a KV head, chunks: {with_chunks}"
            assert kernel.shared_bytes <= SHARED_LIMIT_BYTES[capability], which
            # An A100 may move a dozen bytes: it has no instruction that reads operands from shared memory.
            assert kernel.spilled_bytes <= (0 if capability == 90 else 32), which
            if capability == 90 and with_chunks:
                assert "wgmma.mma_async" in kernel.ptx, which


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float16, 128), (torch.float32, 128), (torch.bfloat16, 256)])
def test_other_formats_fit_as_well(capability: int, dtype: torch.dtype, head_dim: int) -> None:
    kernel = compiled(capability, dtype, 4, head_dim, with_chunks=True)
    assert kernel.shared_bytes <= SHARED_LIMIT_BYTES[capability]
    assert kernel.spilled_bytes == 0


# ------------------------------------------------------------ interpreted


def test_interpreted_kernel_equals_cpu() -> None:
    """In a process of its own: Triton decides when it is imported whether it compiles or interprets."""
    command = [sys.executable, "-m", "tests.unit.worker.engine.interpreted_kernel"]
    subprocess.run(command, check=True, timeout=200, env=os.environ | {"TRITON_INTERPRET": "1"})


# ------------------------------------------------------------ launched


def test_a_step_compiles_nothing_that_another_one_has_not() -> None:
    """Tables of any width, and any numbers of rows: two variants, with chunks and without."""
    kernel = importlib.import_module("services.worker.engine.paged_kernel").paged_attention
    assert [p.name for p in kernel.params if not p.is_constexpr and not p.do_not_specialize] == [
        "out_ptr", "q_ptr", "kv_ptr", "tables_ptr", "tiles_ptr", "q_row_stride", "scale",
    ]  # fmt: skip
    attention = CudaAttention(8, 2, 64, torch.bfloat16, torch.device("cpu"))
    seen: set[tuple[tuple[str, Any], ...]] = set()
    for shares in (*STEPS.values(), [(0, 1)], [(0, 5)], [(100, 3), (0, 1)]):
        pool = BlockPool(BLOCKS, BLOCK_TOKENS)
        slices = [Slice(i, before, (1,) * count, True) for i, (before, count) in enumerate(shares)]
        packed = Packer(BLOCK_TOKENS).pack(slices, [pool.take(before + count) for before, count in shares])
        seen.add(tuple(sorted(attention.prepare(packed).constants.items())))
    assert len(seen) == 2


def test_without_triton_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> ModuleType:
        raise ImportError(name)

    monkeypatch.setattr(attention_cuda.importlib, "import_module", absent)
    with pytest.raises(Exception, match="triton"):
        CudaAttention(4, 2, 16, torch.float32, torch.device("cuda"))
