"""Compares the interpreted kernel with attention on the CPU. A program, to be started with TRITON_INTERPRET=1."""

import itertools
import os

import torch

from services.worker.core.batch import Slice
from services.worker.engine.attention import CpuAttention
from services.worker.engine.attention_cuda import CudaAttention
from services.worker.engine.packing import Packer
from tests.support.engine import BlockPool

BLOCKS, BLOCK_TOKENS = 120, 16
STEPS = {  # tokens before, tokens computed
    "decodes": [(0, 1), (3, 1), (16, 1), (150, 1)],
    "chunks": [(0, 9), (0, 40), (37, 34)],
    "mixed": [(7, 1), (0, 12), (2, 1), (9, 6), (160, 1), (70, 33)],
}
HEADS = ((8, 2, 64), (6, 6, 80), (7, 1, 16))  # of queries, of keys and values, elements of each
# bfloat16 is not among them: the interpreter multiplies its bits as if they were integers.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3}


def compare(step: str, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """The kernel has NaN in every slot that no sequence owns."""
    torch.manual_seed(0)
    pool, shares = BlockPool(BLOCKS, BLOCK_TOKENS), STEPS[step]
    slices = [Slice(i, before, (1,) * count, True) for i, (before, count) in enumerate(shares)]
    tables = [pool.take(before + count) for before, count in shares]
    packed = Packer(BLOCK_TOKENS).pack(slices, tables)
    clean_B2TKH = torch.randn(BLOCKS, 2, BLOCK_TOKENS, kv_heads, head_dim).to(dtype)
    poisoned_B2TKH = torch.full_like(clean_B2TKH, torch.nan)
    for (before, count), table in zip(shares, tables, strict=True):
        for token in range(before + count):
            slot = (table[token // BLOCK_TOKENS], slice(None), token % BLOCK_TOKENS)
            poisoned_B2TKH[slot] = clean_B2TKH[slot]
    on_cpu = CpuAttention(heads, kv_heads, head_dim, dtype)
    kernel = CudaAttention(heads, kv_heads, head_dim, dtype, torch.device("cpu"))
    inputs = torch.randn(packed.row_count, heads + 2 * kv_heads, head_dim).to(dtype)
    outputs: list[torch.Tensor] = []
    for backend, kv_B2TKH in ((on_cpu, clean_B2TKH), (kernel, poisoned_B2TKH)):
        out_TNH = torch.empty(packed.row_count, heads, head_dim, dtype=dtype)
        q_TNH, k_TKH, v_TKH = inputs.split([heads, kv_heads, kv_heads], 1)
        backend.prepare(packed).run(kv_B2TKH, q_TNH, k_TKH, v_TKH, out_TNH)
        outputs.append(out_TNH)
    torch.testing.assert_close(outputs[1], outputs[0], atol=TOLERANCES[dtype], rtol=0)
    owned = ~poisoned_B2TKH.isnan()
    assert torch.equal(poisoned_B2TKH[owned], clean_B2TKH[owned])


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    torch.set_num_threads(1)
    for step, heads in itertools.product(STEPS, HEADS):
        compare(step, *heads, torch.float32)
    for heads in HEADS:
        compare("mixed", *heads, torch.float16)
