"""The CUDA backend: its errors without a device, and its agreement with the CPU on a device."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from ballast.common.errors import ConfigError
from services.worker.core.batch import Slice
from services.worker.engine.attention import CpuAttention
from services.worker.engine.attention_cuda import CudaAttention
from services.worker.engine.kv_dtype import FP8
from services.worker.engine.load import load_engine
from services.worker.engine.packing import Packer
from tests.support.engine import BlockPool, Job, generate
from tests.support.reference import NEAR_TIE, reference_greedy_batch, reference_logits
from tools.model.tiny import make_tiny

BLOCKS = 600


def test_without_a_device_the_engine_reports_it(model_dir: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    with pytest.raises(ConfigError, match="device"):
        load_engine(model_dir, device_memory_bytes=8 << 20, device="cuda")


def test_float64_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"dtype: torch\.float64 runs on the cpu device only"):
        CudaAttention(4, 2, 16, torch.float64, torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shares",
    [
        [(0, 1), (3, 1), (16, 1), (200, 1)],
        [(0, 9), (0, 100), (37, 64)],
        [(7, 1), (0, 12), (2, 1), (9, 6), (400, 1), (130, 33)],
        [(1030, 1), (5, 1), (511, 1), (512, 1), (0, 9)],
    ],
)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(8, 2, 64), (6, 6, 80), (32, 8, 128), (7, 1, 16)])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("block_tokens", [4, 16])
@pytest.mark.parametrize("kv_dtype", [None, FP8])
def test_kernel_equals_cpu(
    shares: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    atol: float,
    block_tokens: int,
    kv_dtype: torch.dtype | None,
) -> None:
    torch.manual_seed(0)
    device = torch.device("cuda")
    pool = BlockPool(BLOCKS, block_tokens)
    slices = [Slice(i, before, (1,) * count, True) for i, (before, count) in enumerate(shares)]
    tables = [pool.take(before + count) for before, count in shares]
    packed = Packer(block_tokens).pack(slices, tables)
    kv_B2TKH = torch.randn(BLOCKS, 2, block_tokens, kv_heads, head_dim).to(kv_dtype or dtype)
    heads_all = torch.randn(packed.row_count, heads + 2 * kv_heads, head_dim).to(dtype)
    outputs: list[torch.Tensor] = []
    caches: list[torch.Tensor] = []
    for where, backend in (
        (torch.device("cpu"), CpuAttention(heads, kv_heads, head_dim, dtype)),
        (device, CudaAttention(heads, kv_heads, head_dim, dtype, device, kv_dtype=kv_dtype)),
    ):
        cache, moved = kv_B2TKH.clone().to(where), heads_all.to(where)
        out_TNH = torch.empty(packed.row_count, heads, head_dim, dtype=dtype, device=where)
        q_TNH, k_TKH, v_TKH = moved.split([heads, kv_heads, kv_heads], 1)
        backend.prepare(packed).run(cache, q_TNH, k_TKH, v_TKH, out_TNH)
        outputs.append(out_TNH.cpu())
        caches.append(cache.cpu())
    assert torch.equal(caches[0].to(dtype), caches[1].to(dtype))
    torch.testing.assert_close(outputs[1], outputs[0], atol=atol, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("arch", ["llama", "llama3", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_greedy_tokens_on_the_device_equal_transformers(tmp_path: Path, arch: str, dtype: str) -> None:
    model_dir = make_tiny(arch, tmp_path / "model", seed=7, layers=3)
    prompts = [tuple(range(3, 3 + length)) for length in (1, 2, 15, 16, 17, 64, 200, 400)]
    references = reference_greedy_batch(model_dir, prompts, [16] * len(prompts))
    answered = [(*prompt, *each.token_ids) for prompt, each in zip(prompts, references, strict=True)]
    near_tie = max(10 * NEAR_TIE, 2 * max(_rounding(model_dir, tokens, dtype) for tokens in answered))
    with load_engine(model_dir, dtype=dtype, device_memory_bytes=256 << 20, device="cuda") as engine:
        jobs = [
            Job(i, prompt, 16, forced=reference.token_ids)
            for i, (prompt, reference) in enumerate(zip(prompts, references, strict=True))
        ]
        generate(engine, jobs, chunk_tokens=64)
    gaps = [
        gap
        for job, reference in zip(jobs, references, strict=True)
        for token, wanted, gap in zip(job.chosen, reference.token_ids, reference.gaps, strict=True)
        if token != wanted
    ]
    assert max(gaps, default=0.0) < near_tie
    assert len(gaps) <= 0.1 * 16 * len(jobs)


def _rounding(model_dir: Path, token_ids: Sequence[int], dtype: str) -> float:
    """Largest difference between logits of `transformers` in this dtype and in float32."""
    exact = reference_logits(model_dir, token_ids)
    return (reference_logits(model_dir, token_ids, dtype).float() - exact).abs().max().item()
