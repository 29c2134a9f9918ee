"""The measured batches stay within the limits and cover all kinds of batches that occur in service."""

import random

import pytest

from ballast.common.cost import Chunk
from services.worker.policy.cost_fit import has_prefix
from services.worker.profiling.grid import Batch, GridLimits, grid, held_out

LIMITS = GridLimits(batch_tokens=512, sequences=64, model_len=2048, kv_tokens=32_768)
SMALL = GridLimits(batch_tokens=64, sequences=4, model_len=96, kv_tokens=300)


def decodes(batch: Batch) -> int:
    return sum(chunk.token_count == 1 for chunk in batch)


@pytest.mark.parametrize("limits", [LIMITS, SMALL])
def test_all_batches_are_allowed(limits: GridLimits) -> None:
    rng = random.Random(1)
    batches = grid(limits, rng)
    for prefix in (False, True):
        kept = held_out(limits, rng, prefix=prefix, count=30)
        assert len(kept) == 30
        assert all(has_prefix(batch) == prefix for batch in kept)
        batches += kept
    assert all(limits.allow(batch) for batch in batches)
    assert all(chunk.token_count >= 1 for batch in batches for chunk in batch)


def test_the_grid_has_batches_of_every_kind() -> None:
    batches = grid(LIMITS, random.Random(0))
    assert any(not has_prefix(batch) for batch in batches)
    assert any(len(batch) == 1 and has_prefix(batch) and not decodes(batch) for batch in batches)
    assert any(decodes(batch) == len(batch) == LIMITS.sequences for batch in batches)
    assert any(0 < decodes(batch) < len(batch) for batch in batches)
    assert max(sum(chunk.token_count for chunk in batch) for batch in batches) == LIMITS.batch_tokens


def test_the_same_seed_gives_the_same_batches() -> None:
    assert grid(LIMITS, random.Random(7)) == grid(LIMITS, random.Random(7))
    assert grid(LIMITS, random.Random(7)) != grid(LIMITS, random.Random(8))


@pytest.mark.parametrize(
    "batch", [((0, 513),), ((2000, 49),), ((16, 1),) * 65, ((1000, 1),) * 33], ids=["tokens", "length", "count", "KV"]
)
def test_grid_limits(batch: Batch) -> None:
    assert not LIMITS.allow(tuple(Chunk(*chunk) for chunk in batch))
