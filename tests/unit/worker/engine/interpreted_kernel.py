"""Compares the interpreted kernels with torch on the CPU. Run it as a program with TRITON_INTERPRET=1."""

import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from services.worker.core.batch import Slice
from services.worker.engine import attention_cuda
from services.worker.engine.attention import CpuAttention
from services.worker.engine.attention_cuda import CudaAttention
from services.worker.engine.kv_dtype import FP8
from services.worker.engine.model_config import ModelConfig, RopeConfig, RopeKind
from services.worker.engine.operations import FusedOperations, HeadNorms, TorchOperations
from services.worker.engine.packing import Packer
from tests.support.engine import BlockPool

BLOCKS, BLOCK_TOKENS = 160, 16
STEPS = {  # (tokens in the cache, tokens computed) of each sequence
    "decodes": [(0, 1), (3, 1), (16, 1), (150, 1)],
    "chunks": [(0, 9), (0, 40), (37, 34)],
    "split": [(1030, 1), (5, 1), (511, 1), (512, 1)],
    "mixed": [(7, 1), (0, 12), (2, 1), (9, 6), (160, 1), (70, 33), (127, 9)],
}
HEADS = ((8, 2, 64), (6, 6, 80), (7, 1, 16))  # query heads, KV heads, head dim
# TOLERANCES lacks bfloat16: the interpreter multiplies its bits as if they were integers.
TYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3}


def compare(
    step: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    capability: tuple[int, int] = (9, 0),
) -> None:
    """Compares attention. The kernel's cache has NaN in every slot that no sequence owns."""
    torch.manual_seed(0)
    pool, shares = BlockPool(BLOCKS, BLOCK_TOKENS), STEPS[step]
    slices = [Slice(i, before, (1,) * count, True) for i, (before, count) in enumerate(shares)]
    tables = [pool.take(before + count) for before, count in shares]
    packed = Packer(BLOCK_TOKENS).pack(slices, tables)
    clean_B2TKH = torch.randn(BLOCKS, 2, BLOCK_TOKENS, kv_heads, head_dim).to(kv_dtype or dtype)
    poisoned_B2TKH = torch.full(clean_B2TKH.shape, torch.nan).to(clean_B2TKH.dtype)
    for (before, count), table in zip(shares, tables, strict=True):
        for token in range(before + count):
            slot = (table[token // BLOCK_TOKENS], slice(None), token % BLOCK_TOKENS)
            poisoned_B2TKH[slot] = clean_B2TKH[slot]
    on_cpu = CpuAttention(heads, kv_heads, head_dim, dtype)
    kernel = CudaAttention(
        heads, kv_heads, head_dim, dtype, torch.device("cpu"), kv_dtype=kv_dtype, capability=capability
    )
    inputs = torch.randn(packed.row_count, heads + 2 * kv_heads, head_dim).to(dtype)
    outputs: list[torch.Tensor] = []
    for backend, kv_B2TKH in ((on_cpu, clean_B2TKH), (kernel, poisoned_B2TKH)):
        out_TNH = torch.empty(packed.row_count, heads, head_dim, dtype=dtype)
        q_TNH, k_TKH, v_TKH = inputs.split([heads, kv_heads, kv_heads], 1)
        backend.prepare(packed).run(kv_B2TKH, q_TNH, k_TKH, v_TKH, out_TNH)
        outputs.append(out_TNH)
    torch.testing.assert_close(outputs[1], outputs[0], atol=TOLERANCES[dtype], rtol=0)
    owned = ~poisoned_B2TKH.to(dtype).isnan()
    assert torch.equal(poisoned_B2TKH.to(dtype)[owned], clean_B2TKH.to(dtype)[owned])


def model(heads: int, kv_heads: int, head_dim: int) -> ModelConfig:
    """A model whose sizes are not powers of two."""
    return ModelConfig(
        architecture="any",
        vocab_size=2,
        hidden_size=96,
        intermediate_size=1100,
        layer_count=1,
        head_count=heads,
        kv_head_count=kv_heads,
        head_dim=head_dim,
        max_position=200,
        rms_norm_eps=1e-5,
        rope=RopeConfig(kind=RopeKind.DEFAULT, theta=10000.0),
        tied_embeddings=False,
        has_qkv_bias=False,
        has_output_bias=False,
        has_mlp_bias=False,
        has_qk_norm=head_dim != 64,
        eos_token_ids=(),
        checkpoint_dtype=None,
    )


class Recorder:
    """Replaces the attention kernel and records the queries."""

    q_TNH: torch.Tensor

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(out_TNH: torch.Tensor, q_TNH: torch.Tensor, *rest: Any, **constants: Any) -> None:
            self.q_TNH = q_TNH.clone()

        return launch


def compare_operations(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, kv_dtype: torch.dtype | None = None
) -> None:
    """Compares the fused operations with torch's. In float16 nearly all elements are equal bit by bit, since both round
    at the same places. In float32, functions and sums differ in the last bits, and in bfloat16 the interpreter
    truncates instead of rounding.
    """
    torch.manual_seed(1)
    pool, shares = BlockPool(BLOCKS, BLOCK_TOKENS), STEPS["decodes"]
    slices = [Slice(i, before, (1,) * count, True) for i, (before, count) in enumerate(shares)]
    packed = Packer(BLOCK_TOKENS).pack(slices, [pool.take(before + count) for before, count in shares])
    rows, heads, kv_heads, head_dim = packed.row_count, config.head_count, config.kv_head_count, config.head_dim
    attention = CudaAttention(heads, kv_heads, head_dim, dtype, device).prepare(packed)
    hidden, added = (torch.randn(rows, config.hidden_size).to(device, dtype) for _ in range(2))
    weight = torch.randn(config.hidden_size).to(device, dtype)
    qkv = torch.randn(rows, heads + 2 * kv_heads, head_dim).to(device, dtype)
    norms = HeadNorms(*torch.randn(2, head_dim).to(device, dtype)) if config.has_qk_norm else None
    gate_up = torch.randn(rows, 2 * config.intermediate_size).to(device, dtype)
    kv = torch.randn(BLOCKS, 2, BLOCK_TOKENS, kv_heads, head_dim).to(device, kv_dtype or dtype)
    names = ("sum", "norm", "norm without a sum", "queries", "cache", "activation")
    results: list[list[torch.Tensor]] = []
    for kind in (TorchOperations, FusedOperations):
        operations = kind(config, 200, dtype, device)
        recorder = Recorder()
        summed, cache = hidden.clone(), kv.clone()
        normed = operations.norm(summed, added, weight)
        again = operations.norm(summed, None, weight)
        rotation = operations.rotation(torch.from_numpy(packed.positions_T).to(device))
        out = torch.empty(rows, heads, config.head_dim, dtype=dtype, device=device)
        operations.attend(cache, qkv.clone(), norms, rotation, replace(attention, kernel=recorder), out)
        activated = operations.activate(gate_up.clone())
        results.append([summed, normed, again, recorder.q_TNH, cache.to(dtype), activated])
    bound = (2 if dtype == torch.float16 else 4) * torch.finfo(dtype).eps
    for name, expected, given in zip(names, *results, strict=True):
        if name == "cache" and kv_dtype is not None:  # rounded from values whose last bits differ
            assert float((given != expected).double().mean()) < 1e-3, name
            continue
        torch.testing.assert_close(given, expected, rtol=bound, atol=bound, msg=lambda why, name=name: f"{name}: {why}")
        if dtype == torch.float16:
            assert float((given != expected).double().mean()) < 1e-3, name


def compare_float8(as_bytes: bool) -> None:
    """Compares KV in float8: as the GPU's type, and as bytes for GPUs that lack the type."""
    attention_cuda._has_fp8 = lambda _: not as_bytes  # pyright: ignore[reportPrivateUsage, reportUnknownLambdaType]
    for step, heads in itertools.product(("decodes", "chunks", "mixed"), HEADS[:2]):
        compare(step, *heads, torch.float32, FP8)
    compare("mixed", *HEADS[0], torch.float16, FP8)
    for dtype, (heads, kv_heads, head_dim) in itertools.product(TYPES, HEADS[:2]):
        compare_operations(model(heads, kv_heads, head_dim), dtype, torch.device("cpu"), FP8)


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    torch.set_num_threads(1)
    for step, heads in itertools.product(STEPS, HEADS):
        if step != "split" or heads == HEADS[0]:
            compare(step, *heads, torch.float32)
    for heads, capability in itertools.product(HEADS, ((9, 0), (8, 0))):
        compare("mixed", *heads, torch.float16, capability=capability)
    for dtype, (heads, kv_heads, head_dim) in itertools.product(TYPES, HEADS):
        compare_operations(model(heads, kv_heads, head_dim), dtype, torch.device("cpu"))
    for as_bytes in (True, False):
        compare_float8(as_bytes)
