"""Compares CPU attention with its definition, on caches that also hold other sequences' KV."""

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ballast.common.errors import InvariantViolation
from services.worker.core.batch import Slice
from services.worker.engine import attention
from services.worker.engine.attention import AttentionBackend, CpuAttention
from services.worker.engine.kv_dtype import FP8, rounded
from services.worker.engine.native.library import native_kernels
from services.worker.engine.packed_attention import PagedAttention
from services.worker.engine.packing import PackedStep, Packer
from tests.support.engine import KERNELS, NEEDS_NATIVE

BLOCK_TOKENS, HEADS, KV_HEADS, HEAD_DIM = 4, 6, 2, 8
BLOCKS = 400


def attend(q_NH: torch.Tensor, k_CKH: torch.Tensor, v_CKH: torch.Tensor) -> torch.Tensor:
    """Attention of one query over its whole context, head by head."""
    outputs: list[torch.Tensor] = []
    for head in range(HEADS):
        kv_head = head // (HEADS // KV_HEADS)
        weights = torch.softmax(k_CKH[:, kv_head] @ q_NH[head] / HEAD_DIM**0.5, 0)
        outputs.append(weights @ v_CKH[:, kv_head])
    return torch.stack(outputs)


def backend_of(kernels: str, dtype: torch.dtype = torch.float64) -> AttentionBackend:
    if kernels == "torch":
        return CpuAttention(HEADS, KV_HEADS, HEAD_DIM, dtype)
    native = native_kernels()
    assert native is not None
    return PagedAttention(native)


class World:
    """Sequences with known keys and values; those of tokens before the step are in the cache."""

    def __init__(self, shares: list[tuple[int, int]]) -> None:
        torch.manual_seed(0)
        self.kv_B2TKH = torch.randn(BLOCKS, 2, BLOCK_TOKENS, KV_HEADS, HEAD_DIM, dtype=torch.float64)
        blocks = list(range(BLOCKS))
        random.Random(0).shuffle(blocks)
        self.slices: list[Slice] = []
        self.tables: list[tuple[int, ...]] = []
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        for i, (before, count) in enumerate(shares):
            needed = -(-(before + count) // BLOCK_TOKENS)
            self.tables.append(tuple(blocks.pop() for _ in range(needed)))
            self.slices.append(Slice(i, before, (1,) * count, True))
            self.keys.append(torch.randn(before + count, KV_HEADS, HEAD_DIM, dtype=torch.float64))
            self.values.append(torch.randn(before + count, KV_HEADS, HEAD_DIM, dtype=torch.float64))
            for at in range(before):
                self.cache_row(i, at).copy_(torch.stack([self.keys[i][at], self.values[i][at]]))
        self.packed: PackedStep = Packer(BLOCK_TOKENS).pack(self.slices, self.tables)

    def cache_row(self, sequence: int, position: int) -> torch.Tensor:
        return self.kv_B2TKH[self.tables[sequence][position // BLOCK_TOKENS], :, position % BLOCK_TOKENS]

    def rows_of(self, sequence: int) -> range:
        last = int(self.packed.sample_rows[sequence])
        return range(last + 1 - len(self.slices[sequence].token_ids), last + 1)

    def check(self, kernels: str) -> None:
        rows = self.packed.row_count
        q_TNH = torch.randn(rows, HEADS, HEAD_DIM, dtype=torch.float64)
        k_TKH, v_TKH = (torch.empty(rows, KV_HEADS, HEAD_DIM, dtype=torch.float64) for _ in range(2))
        for i, part in enumerate(self.slices):
            k_TKH[self.rows_of(i)] = self.keys[i][part.first_position :]
            v_TKH[self.rows_of(i)] = self.values[i][part.first_position :]
        out_TNH = torch.empty_like(q_TNH)
        backend_of(kernels).prepare(self.packed).run(self.kv_B2TKH, q_TNH, k_TKH, v_TKH, out_TNH)
        for i, part in enumerate(self.slices):
            for at, row in enumerate(self.rows_of(i)):
                end = part.first_position + at + 1
                expected = attend(q_TNH[row], self.keys[i][:end], self.values[i][:end])
                torch.testing.assert_close(out_TNH[row], expected, atol=1e-12, rtol=0)
                written = torch.stack([self.keys[i][end - 1], self.values[i][end - 1]])
                assert torch.equal(self.cache_row(i, end - 1), written)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    "shares",
    [
        [(0, 1)],
        [(0, 9)],
        [(3, 1), (4, 1), (0, 1), (21, 1)],
        [(5, 3), (16, 16), (0, 5)],
        [(7, 1), (0, 12), (2, 1), (9, 6), (40, 1), (3, 1)],
        [(length, 1) for length in range(1, 40)],
    ],
)
def test_attention_equals_its_definition(shares: list[tuple[int, int]], kernels: str) -> None:
    World(shares).check(kernels)


def test_small_buckets_give_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_BUCKET_BYTES", 8192)
    World([(length, 1) for length in (1, 2, 3, 30, 31, 32, 33, 90, 91, 100)]).check("torch")


def test_a_table_that_is_too_short_is_a_bug() -> None:
    with pytest.raises(InvariantViolation, match="sequence 3 computes 2 tokens up to position 9: 2 blocks of 4"):
        Packer(BLOCK_TOKENS).pack([Slice(3, 7, (1, 1), True)], [(0, 1)])


def test_a_table_is_reread_when_it_is_another_object() -> None:
    packer = Packer(BLOCK_TOKENS)
    assert packer.pack([Slice(1, 4, (1,), True)], [(7, 8)]).slots_T.tolist() == [32]
    assert packer.pack([Slice(1, 8, (1,), True)], [(7, 8, 5)]).slots_T.tolist() == [20]


def test_rows_of_samples_follow_the_order_of_slices() -> None:
    slices = [
        Slice(1, 9, (1,), True),
        Slice(2, 0, (4, 5, 6), True),
        Slice(3, 2, (2,), True),
        Slice(4, 0, (8, 9), False),
    ]
    packed = Packer(BLOCK_TOKENS).pack(slices, [(0, 1, 2), (3,), (4,), (5,)])
    assert packed.token_ids_T.tolist() == [2, 1, 8, 9, 4, 5, 6]
    assert packed.positions_T.tolist() == [2, 9, 0, 1, 0, 1, 2]
    assert packed.sample_rows.tolist() == [1, 6, 0]
    assert packed.blocks_end == 6


DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@pytest.mark.parametrize("kernels", KERNELS)
@given(
    shares=st.lists(st.tuples(st.integers(0, 70), st.sampled_from([1, 1, 1, 2, 7, 33])), min_size=1, max_size=6),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_other_sequences_kv_in_the_cache_changes_nothing(
    kernels: str, shares: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    """One of two caches has NaN in every slot that no sequence owns."""
    world = World(shares)
    clean = world.kv_B2TKH.to(dtype)
    poisoned = torch.full_like(clean, float("nan"))
    for i in range(len(shares)):
        for at in range(len(world.keys[i])):
            place = world.tables[i][at // BLOCK_TOKENS], slice(None), at % BLOCK_TOKENS
            poisoned[place] = clean[place]
    q, k, v = (torch.randn(world.packed.row_count, n, HEAD_DIM).to(dtype) for n in (HEADS, KV_HEADS, KV_HEADS))
    outs = [torch.empty_like(q) for _ in range(2)]
    for cache, out in zip((clean, poisoned), outs, strict=True):
        backend_of(kernels, dtype).prepare(world.packed).run(cache, q, k, v, out)
    assert not outs[0].isnan().any()
    assert torch.equal(*outs)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_to_a_float8_cache_uses_its_exact_values(kernels: str, dtype: torch.dtype) -> None:
    """A float8 cache gives the same bits as a cache that holds its values in the model's dtype. The step's own keys and
    values are rounded, too.
    """
    world = World([(7, 1), (0, 12), (2, 1), (9, 6), (40, 1), (3, 1)])
    rows = world.packed.row_count
    q, k, v = (torch.randn(rows, n, HEAD_DIM).to(dtype) * 300 for n in (HEADS, KV_HEADS, KV_HEADS))
    narrow = world.kv_B2TKH.to(FP8)
    wide, outs = narrow.to(dtype), [torch.empty_like(q) for _ in range(2)]
    backend_of(kernels, dtype).prepare(world.packed).run(narrow, q, k, v, outs[0])
    backend_of(kernels, dtype).prepare(world.packed).run(wide, q, rounded(k, FP8), rounded(v, FP8), outs[1])
    assert torch.equal(*outs)
    assert torch.equal(narrow.to(dtype), wide)
    assert float(wide.abs().max()) == 448.0  # larger values are stored as 448


@NEEDS_NATIVE
@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prompt_gives_the_same_bits_in_any_chunks(dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    torch.manual_seed(2)
    q, k, v = (torch.randn(75, n, HEAD_DIM).to(dtype) for n in (HEADS, KV_HEADS, KV_HEADS))
    table = tuple(random.Random(3).sample(range(BLOCKS), 19))
    results: list[torch.Tensor] = []
    for sizes in ([75], [1] * 75, [40, 1, 1, 33], [7] * 10 + [5]):
        cache = torch.randn(BLOCKS, 2, BLOCK_TOKENS, KV_HEADS, HEAD_DIM).to(kv_dtype or dtype)
        out, done = torch.empty_like(q), 0
        for size in sizes:
            rows = slice(done, done + size)
            step = Packer(BLOCK_TOKENS).pack([Slice(1, done, (1,) * size, True)], [table])
            backend_of("native").prepare(step).run(cache, q[rows], k[rows], v[rows], out[rows])
            done += size
        results.append(out)
    for other in results[1:]:
        assert torch.equal(results[0], other)
