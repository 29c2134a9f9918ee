"""The GPU's attention kernel without a GPU: compiled ahead of time for several GPUs, and interpreted."""

import importlib
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import pytest
import torch

import services.worker.engine.attention_cuda as attention_cuda
from services.worker.core.batch import Slice
from services.worker.engine.attention_cuda import CudaAttention, StagedDecodes, join_constants, tiling
from services.worker.engine.kv_dtype import FP8
from services.worker.engine.operations import activation_constants, norm_constants, rotation_constants
from services.worker.engine.packing import Packer
from tests.support.engine import BlockPool
from tests.unit.worker.engine import compiled_kernel
from tests.unit.worker.engine.compiled_kernel import SHARED_LIMIT_BYTES, TYPES, Compiled, signatures
from tests.unit.worker.engine.interpreted_kernel import BLOCK_TOKENS, BLOCKS, STEPS

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("own_cache")


# ------------------------------------------------------------ compiled


STORED_FP8 = {80: "*u8", 90: "*fp8e4nv", 100: "*fp8e4nv"}  # by capability


def constants_of(
    capability: int,
    dtype: torch.dtype,
    groups: int,
    head_dim: int,
    *,
    chunks: bool,
    kv_dtype: torch.dtype | None = None,
) -> Mapping[str, Any]:
    attention = CudaAttention(
        8 * groups,
        8,
        head_dim,
        dtype,
        torch.device("cuda"),
        kv_dtype=kv_dtype,
        capability=divmod(capability, 10),
    )
    return attention.constants(BLOCK_TOKENS, chunks=chunks)


def compiled(
    capability: int, dtype: torch.dtype, groups: int, head_dim: int, *, chunks: bool, kv: str | None = None
) -> Compiled:
    kernel = importlib.import_module("services.worker.engine.paged_kernel").paged_attention
    kind = TYPES[dtype]
    given = {"out_ptr": f"*{kind}", "q_ptr": f"*{kind}", "kv_ptr": kv or f"*{kind}"}
    given |= {
        "shape_ptr": "*i32",
        "tables_ptr": "*i32",
        "tiles_ptr": "*i32",
        "parts_ptr": "*fp32",
        "weights_ptr": "*fp32",
        "q_row_stride": "i32",
        "scale": "fp32",
        "base_block": "i32",
    }
    kv_dtype = FP8 if kv else None
    constants = constants_of(capability, dtype, groups, head_dim, chunks=chunks, kv_dtype=kv_dtype)
    return compiled_kernel.compiled(kernel, given, constants, capability)


def compiled_join(capability: int) -> Compiled:
    kernel = importlib.import_module("services.worker.engine.paged_kernel").join_parts
    given = {"out_ptr": "*bf16", "parts_ptr": "*fp32", "weights_ptr": "*fp32", "joins_ptr": "*i32"}
    return compiled_kernel.compiled(kernel, given, join_constants(32, 128), capability)


@pytest.mark.rotating
@pytest.mark.parametrize("capability", SHARED_LIMIT_BYTES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_bfloat16_fits_into_registers_and_shared_memory(capability: int, head_dim: int) -> None:
    for groups in range(1, 9):
        for chunks in (False, True):
            kernel = compiled(capability, torch.bfloat16, groups, head_dim, chunks=chunks)
            which = f"sm_{capability}, heads of {head_dim}, {groups} to a KV head, chunks: {chunks}"
            assert kernel.shared_bytes <= SHARED_LIMIT_BYTES[capability], which
            assert kernel.spilled_bytes == 0, which
            if capability == 90 and chunks:
                assert "wgmma.mma_async" in kernel.ptx, which
            if chunks and (groups, head_dim) == (4, 128):
                tile = constants_of(capability, torch.bfloat16, groups, head_dim, chunks=True)
                threads, scores = 32 * tile["num_warps"], tile["TILE_QUERIES"] * tile["TILE_TOKENS"]
                taken = kernel.loop_instructions * threads / scores
                print(f"\nsm_{capability}: {taken:.2f} instructions for each score")
                assert taken <= {80: 20.0, 90: 9.0, 100: 11.0}[capability]


@pytest.mark.rotating
@pytest.mark.parametrize("capability", SHARED_LIMIT_BYTES)
@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [(torch.float16, 128), (torch.float32, 128), (torch.bfloat16, 80), (torch.bfloat16, 100), (torch.bfloat16, 256)],
)
def test_other_formats_fit_as_well(capability: int, dtype: torch.dtype, head_dim: int) -> None:
    kernel = compiled(capability, dtype, 4, head_dim, chunks=True)
    assert kernel.shared_bytes <= SHARED_LIMIT_BYTES[capability]
    assert kernel.spilled_bytes == 0


@pytest.mark.rotating
@pytest.mark.parametrize("capability", SHARED_LIMIT_BYTES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_kv_in_float8_fits_as_well(capability: int, head_dim: int) -> None:
    for groups, chunks in itertools.product((4, 8), (False, True)):
        kernel = compiled(capability, torch.bfloat16, groups, head_dim, chunks=chunks, kv=STORED_FP8[capability])
        which = f"sm_{capability}, heads of {head_dim}, {groups} to a KV head, chunks: {chunks}"
        assert kernel.shared_bytes <= SHARED_LIMIT_BYTES[capability], which
        assert kernel.spilled_bytes <= (40 if (capability, groups, head_dim, chunks) == (90, 8, 128, False) else 0), (
            which
        )
        assert ("e4m3x2" in kernel.ptx) == (capability >= 90), which
    fused = importlib.import_module("services.worker.engine.fused_kernels")
    given = signatures(torch.bfloat16)[1] | {"kv_ptr": STORED_FP8[capability]}
    constants = rotation_constants(32, BLOCK_TOKENS, 8, head_dim, has_norm=True)
    assert compiled_kernel.compiled(fused.rotate_and_write, given, constants, capability).spilled_bytes == 0


@pytest.mark.parametrize("capability", [86, 120])
def test_gpus_with_less_shared_memory_get_smaller_tiles(capability: int) -> None:
    kernel = compiled(capability, torch.bfloat16, 4, 128, chunks=True)
    assert kernel.shared_bytes <= 99 << 10


@pytest.mark.parametrize(
    ("kv_dtype", "head_dim", "capability", "tile"),
    [
        (torch.bfloat16, 128, (9, 0), (128, 128)),
        (torch.bfloat16, 128, (10, 3), (128, 128)),
        (torch.bfloat16, 128, (8, 0), (128, 32)),
        (torch.bfloat16, 128, (12, 0), (128, 32)),
        (torch.bfloat16, 64, (8, 0), (128, 64)),
        (torch.bfloat16, 100, (8, 0), (64, 32)),
        (torch.bfloat16, 100, (9, 0), (128, 64)),
        (torch.bfloat16, 256, (9, 0), (32, 32)),
        (FP8, 64, (9, 0), (128, 128)),
        (FP8, 128, (9, 0), (128, 64)),
        (FP8, 64, (8, 0), (128, 64)),
        (FP8, 128, (8, 0), (64, 32)),
    ],
)
def test_tiles_of_prompts_are_as_large_as_registers_allow(
    kv_dtype: torch.dtype, head_dim: int, capability: tuple[int, int], tile: tuple[int, int]
) -> None:
    chosen = tiling(torch.bfloat16, kv_dtype, head_dim, capability)
    assert (chosen.chunk_queries, chosen.chunk_tokens) == tile
    assert chosen.chunk_unmasked == (head_dim <= 128)


@pytest.mark.parametrize("capability", SHARED_LIMIT_BYTES)
def test_the_kernel_that_merges_parts_fits_as_well(capability: int) -> None:
    done = compiled_join(capability)
    assert (done.spilled_bytes, done.registers <= 128, done.shared_bytes <= 48 << 10) == (0, True, True)


@pytest.mark.parametrize("capability", SHARED_LIMIT_BYTES)
def test_all_that_a_worker_compiles_before_it_is_ready_takes_less_than_20_s(capability: int) -> None:
    """Processor time, including the assembler's, for Llama 3 8B in bfloat16. Variants with head norms take as long."""
    fused = importlib.import_module("services.worker.engine.fused_kernels")
    norm, rotation, activation = signatures(torch.bfloat16)
    variants = [(fused.add_and_norm, norm, norm_constants(4096, has_added=added)) for added in (False, True)]
    variants.append((fused.rotate_and_write, rotation, rotation_constants(32, 16, 8, 128, has_norm=True)))
    variants.append((fused.activate, activation, activation_constants(14336)))
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as empty:
        patch.setenv("TRITON_CACHE_DIR", empty)
        before_s = sum(os.times()[:4])
        for chunks in (False, True):
            compiled(capability, torch.bfloat16, 4, 128, chunks=chunks)
        compiled_join(capability)
        for kernel, given, constants in variants:
            compiled_kernel.compiled(kernel, given, constants, capability)
        took_s = sum(os.times()[:4]) - before_s
    print(f"\n{took_s:.1f} s")
    assert took_s < 20.0


# ------------------------------------------------------------ split


def test_a_context_is_split_by_its_own_length() -> None:
    """The split does not depend on the rest of the batch. Every token is read once, and one long context can fill a
    whole GPU.
    """
    contexts = [1, 3, 512, 513, 1024, 4000, 16_384, 16_385, 131_072]
    attention = CudaAttention(8, 2, 64, torch.bfloat16, torch.device("cpu"))
    pool = BlockPool(20_000, BLOCK_TOKENS)
    tables = [pool.take(context) for context in contexts]

    def tiles(members: list[int]) -> dict[int, list[tuple[int, ...]]]:
        """Token range and part number of each tile, by context length."""
        slices = [Slice(i, contexts[i] - 1, (1,), True) for i in members]
        step = attention.prepare(Packer(BLOCK_TOKENS).pack(slices, [tables[i] for i in members]))
        joins = {row: (first, count) for row, first, count, _ in step.joins.tolist()}
        read: dict[int, list[tuple[int, ...]]] = {}
        [(tiles, _, _)] = step.launches
        for table, row, rows, position, begin, end, part, _ in tiles.tolist():
            assert (table, rows) == (row, 1)
            first, count = joins.get(row, (-1, 1))
            assert first <= part < first + count
            read.setdefault(position + 1, []).append((begin, end, part - first))
        assert len(step.parts) == len(step.weights) == sum(count for _, count in joins.values())
        return read

    together = tiles(list(range(len(contexts))))
    for i, context in enumerate(contexts):
        parts = together[context]
        assert tiles([i])[context] == parts
        assert [part for *_, part in parts] == list(range(len(parts)))
        assert [begin for begin, *_ in parts] == [0, *(end for _, end, _ in parts[:-1])]
        assert parts[-1][1] == context
        assert (len(parts) == 1) == (context <= 512)
    assert len(together[16_384]) == len(together[131_072]) == 32


@pytest.mark.parametrize("rows", [1, 2, 8, 64, 256])
def test_contexts_of_any_length_are_recorded(rows: int) -> None:
    """Batches of up to 256 rows, with contexts up to the longest, are recorded with fewer programs than parts."""
    attention = CudaAttention(8, 2, 64, torch.bfloat16, torch.device("cpu"))
    staged = StagedDecodes(attention, 256, 131_072, BLOCK_TOKENS)
    table = tuple(range(131_072 // BLOCK_TOKENS))
    for context in (1, 512, 2048, 4096, 131_072):
        slices = [Slice(i, context - 1, (1,), True) for i in range(rows)]
        assert staged.fill(Packer(BLOCK_TOKENS).pack(slices, [table] * rows))
        [(tiles, programs, _)] = staged.first(rows, 0).launches
        count, width, _, _ = staged.first(rows, 0).shape.tolist()
        assert width == -(-context // BLOCK_TOKENS)
        parts = tiles[: 8 * count].view(count, 8)[:, [1, 4, 5]].tolist()
        assert {row for row, *_ in parts} == set(range(rows))
        assert sum(end - start for _, start, end in parts) == rows * context
        assert programs <= max(64, 2 * rows)


# ------------------------------------------------------------ interpreted


@pytest.mark.rotating
def test_interpreted_kernel_equals_cpu() -> None:
    """Runs in its own process, since Triton decides on import whether it compiles or interprets."""
    command = [sys.executable, "-m", "tests.unit.worker.engine.interpreted_kernel"]
    subprocess.run(command, check=True, timeout=200, env=os.environ | {"TRITON_INTERPRET": "1"})


# ------------------------------------------------------------ launched


def test_all_steps_share_two_compiled_variants() -> None:
    """Tables of any width and any number of rows need only two variants: with and without chunks."""
    kernel = importlib.import_module("services.worker.engine.paged_kernel").paged_attention
    assert [p.name for p in kernel.params if not p.is_constexpr and not p.do_not_specialize] == [
        "out_ptr", "q_ptr", "kv_ptr", "shape_ptr", "tables_ptr", "tiles_ptr", "parts_ptr", "weights_ptr",
        "q_row_stride", "scale",
    ]  # fmt: skip
    attention = CudaAttention(8, 2, 64, torch.bfloat16, torch.device("cpu"))
    seen: set[tuple[tuple[str, Any], ...]] = set()
    for shares in (*STEPS.values(), [(0, 1)], [(0, 5)], [(100, 3), (0, 1)]):
        pool = BlockPool(BLOCKS, BLOCK_TOKENS)
        slices = [Slice(i, before, (1,) * count, True) for i, (before, count) in enumerate(shares)]
        packed = Packer(BLOCK_TOKENS).pack(slices, [pool.take(before + count) for before, count in shares])
        seen |= {tuple(sorted(constants.items())) for _, _, constants in attention.prepare(packed).launches}
    assert len(seen) == 2


def test_without_triton_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> ModuleType:
        raise ImportError(name)

    monkeypatch.setattr(attention_cuda.importlib, "import_module", absent)
    with pytest.raises(Exception, match="triton"):
        CudaAttention(4, 2, 16, torch.float32, torch.device("cuda"))


@pytest.mark.parametrize("name", STEPS)
def test_kernels_get_the_address_of_a_mapped_block(name: str) -> None:
    """After a restore nothing is mapped at a layer's start address, and Triton refuses an unmapped address."""
    pool = BlockPool(BLOCKS, BLOCK_TOKENS)
    pool.take(BLOCK_TOKENS)  # no sequence of this step has block 0
    slices = [Slice(i, before, (1,) * count, True) for i, (before, count) in enumerate(STEPS[name])]
    tables = [pool.take(before + count) for before, count in STEPS[name]]
    step = CudaAttention(8, 2, 64, torch.bfloat16, torch.device("cpu")).prepare(
        Packer(BLOCK_TOKENS).pack(slices, tables)
    )
    assert step.base_block in {block for table in tables for block in table}
