"""Contexts in two places give what they give in one."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from services.worker.core.batch import SequenceId
from services.worker.engine import partial_attention
from services.worker.engine.attention import CpuAttention
from services.worker.engine.packing import Packer
from services.worker.engine.partial_attention import Partial, PartialAttention, Span
from services.worker.engine.spread_attention import Elsewhere, SpreadAttentionStep
from tests.unit.worker.engine.test_attention import BLOCK_TOKENS, HEAD_DIM, HEADS, KV_HEADS, World

CPU = torch.device("cpu")
LAYERS = 4


@dataclass
class OtherMembers:
    """`Holders` with caches of their own; what they hold is not in the asker's."""

    world: World
    contexts: dict[SequenceId, tuple[Elsewhere, ...]]
    layers: dict[str, torch.Tensor]
    asked: list[tuple[str, int, int]]

    def of(self, sequence_id: SequenceId) -> Sequence[Elsewhere]:
        return self.contexts.get(sequence_id, ())

    def ask(
        self, holder: str, layer: int, rows: Sequence[tuple[SequenceId, int]], q_RNH: torch.Tensor
    ) -> Callable[[], Partial]:
        self.asked.append((holder, layer, len(q_RNH)))
        spans: list[Span] = []
        for sequence_id, count in rows:
            (context,) = (e for e in self.contexts[sequence_id] if e.first_layer <= layer < e.last_layer)
            assert context.holder == holder
            table = np.array(self.world.tables[sequence_id])
            spans.append(Span(count, 0, context.token_count, False, table))
        partial = PartialAttention(spans, BLOCK_TOKENS, CPU).run(self.layers[holder], q_RNH)
        return lambda: partial


def moved(shares: list[tuple[int, int]], away: dict[int, tuple[Elsewhere, ...]]) -> tuple[World, OtherMembers]:
    """A world whose sequences in `away` have their first tokens' KV only in the caches of others."""
    world = World(shares)
    holders = {e.holder for contexts in away.values() for e in contexts}
    return world, OtherMembers(world, away, {holder: world.kv_B2TKH.clone() for holder in holders}, [])


def check(shares: list[tuple[int, int]], away: dict[int, tuple[Elsewhere, ...]], dtype: torch.dtype) -> OtherMembers:
    world, others = moved(shares, away)
    rows = world.packed.row_count
    full = world.kv_B2TKH.to(dtype)
    torn = full.clone()
    others.layers = {holder: cache.to(dtype) for holder, cache in others.layers.items()}
    backend = CpuAttention(HEADS, KV_HEADS, HEAD_DIM, dtype)
    step = SpreadAttentionStep(backend, Packer(BLOCK_TOKENS), world.packed, world.slices, world.tables, others, 0, CPU)
    for layer in range(LAYERS):
        torn.copy_(full)
        for sequence, contexts in away.items():
            for context in contexts:
                if context.first_layer <= layer < context.last_layer:
                    for at in range(context.token_count):
                        torn[world.tables[sequence][at // BLOCK_TOKENS], :, at % BLOCK_TOKENS] = 1e6
        q_TNH = torch.randn(rows, HEADS, HEAD_DIM, dtype=dtype)
        k_TKH, v_TKH = (torch.randn(rows, KV_HEADS, HEAD_DIM, dtype=dtype) for _ in range(2))
        expected, found = torch.empty_like(q_TNH), torch.full_like(q_TNH, float("nan"))
        backend.prepare(world.packed).run(full.clone(), q_TNH, k_TKH, v_TKH, expected)
        step.run(torn, q_TNH, k_TKH, v_TKH, found)
        tolerance = 1e-12 if dtype == torch.float64 else 2e-5
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)
        for i, part in enumerate(world.slices):
            for at, row in enumerate(world.rows_of(i)):
                position = part.first_position + at
                written = torn[world.tables[i][position // BLOCK_TOKENS], :, position % BLOCK_TOKENS]
                assert torch.equal(written, torch.stack([k_TKH[row], v_TKH[row]])), "new KV is kept here"
    return others


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("shares", "away"),
    [
        ([(7, 1)], {0: (Elsewhere("a", 7, 0, LAYERS),)}),
        ([(9, 1), (5, 1), (30, 1), (3, 1)], {1: (Elsewhere("a", 4, 0, LAYERS),), 2: (Elsewhere("b", 8, 1, 3),)}),
        ([(8, 6), (5, 1), (0, 9), (12, 3)], {0: (Elsewhere("a", 3, 0, LAYERS),), 3: (Elsewhere("a", 12, 0, 2),)}),
        ([(40, 1), (41, 1)], {i: (Elsewhere("b", 37, 0, 2), Elsewhere("a", 37, 2, LAYERS)) for i in range(2)}),
    ],
)
def test_it_makes_no_difference_where_a_context_lies(
    shares: list[tuple[int, int]], away: dict[int, tuple[Elsewhere, ...]], dtype: torch.dtype
) -> None:
    check(shares, away, dtype)


def test_fewer_new_tokens_may_need_more_blocks() -> None:
    """Two on either side of a boundary, and three inside of a block."""
    assert BLOCK_TOKENS >= 4
    two, three = Elsewhere("a", BLOCK_TOKENS - 1, 0, LAYERS), Elsewhere("a", 1, 0, LAYERS)
    check([(BLOCK_TOKENS, 1), (3, 1)], {0: (two,), 1: (three,)}, torch.float64)


def test_each_holder_is_asked_once_per_layer() -> None:
    contexts = {i: (Elsewhere("ab"[i % 2], 5 + i, 0, 2),) for i in range(4)}
    others = check([(9, 1), (9, 4), (10, 1), (12, 1), (3, 1)], contexts, torch.float64)
    assert others.asked == [("a", 0, 2), ("b", 0, 5), ("a", 1, 2), ("b", 1, 5)]


def test_many_of_all_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """With groups and tiles so small that all borders are met."""
    monkeypatch.setattr(partial_attention, "_SIDE_BY_SIDE_BYTES", 4000)
    monkeypatch.setattr(partial_attention, "_SCORE_ELEMENTS", 400)
    rng = random.Random(3)
    for _ in range(10):
        shares = [(rng.randrange(1, 40), rng.choice([1, 1, 1, 2, 7])) for _ in range(12)]
        away = {
            i: (Elsewhere(rng.choice("ab"), rng.randint(1, before), rng.randrange(2), rng.randint(2, LAYERS)),)
            for i, (before, _) in enumerate(shares)
            if rng.random() < 0.5
        }
        check(shares, away, torch.float64)


def test_without_the_fused_kernel_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_attention, "_FUSED", None)
    away = {1: (Elsewhere("a", 4, 0, LAYERS),), 2: (Elsewhere("b", 8, 1, 3),)}
    check([(9, 6), (5, 1), (30, 3), (3, 1)], away, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_both_kernels_say_the_same_log_sum_exp(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    q = torch.randn(3, 5, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM, dtype=dtype)
    k, v = torch.randn(2, 3, 17, KV_HEADS, HEAD_DIM, dtype=dtype).unbind()
    hidden = torch.rand(3, 5, 17) < 0.5
    hidden[:, :, 3] = False  # every row sees something
    for mask in (hidden, None):
        found, expected = partial_attention._attend_fused(q, k, v, mask), partial_attention._attend(q, k, v, mask)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-12 if dtype == torch.float64 else 1e-5, rtol=0)
