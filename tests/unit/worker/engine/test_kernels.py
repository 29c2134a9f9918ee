"""Batches are padded, so that oneDNN need not compile its products for every batch size."""

import random
from pathlib import Path

import pytest
import torch

from services.worker.core.batch import Slice
from services.worker.engine.kernels import bound_kernel_caches, padded_rows
from services.worker.engine.load import load_engine
from tests.support.engine import Job, forward, generate


def test_padding_adds_at_most_a_sixteenth_and_gives_few_sizes() -> None:
    padded = {rows: padded_rows(rows) for rows in range(1, 4097)}
    assert all(rows <= size <= rows * 17 / 16 for rows, size in padded.items())
    assert all(padded_rows(size) == size for size in padded.values())
    assert all(padded[rows] <= padded[rows + 1] for rows in range(1, 4096))
    assert all(padded[rows] == rows for rows in range(1, 33))
    assert len({padded[rows] for rows in range(257, 513)}) == 16


def test_values_set_by_the_operator_stay() -> None:
    environ = {"DNNL_PRIMITIVE_CACHE_CAPACITY": "7", "LRU_CACHE_CAPACITY": "9"}
    bound_kernel_caches(environ)
    assert environ == {"DNNL_PRIMITIVE_CACHE_CAPACITY": "7", "LRU_CACHE_CAPACITY": "9"}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_no_row_depends_on_later_rows(model_dir: Path, dtype: str) -> None:
    """A padded batch gives the same rows as an unpadded one that ends with tokens of another sequence."""
    with load_engine(model_dir, dtype=dtype, device_memory_bytes=16 << 20) as engine:
        rng = random.Random(2)
        tokens = tuple(rng.randrange(3, 320) for _ in range(101))
        tables = [tuple(range(7)), (9,)]
        assert padded_rows(101) == padded_rows(104) == 104
        # Larger batches have left values in the buffers.
        generate(engine, [Job(i, (5 + i,) * 60, 2) for i in range(6)])
        (padded,) = forward(engine, [Slice(1, 0, tokens, True)], tables[:1])
        full, _ = forward(engine, [Slice(1, 0, tokens, True), Slice(2, 0, (7, 8, 9), True)], tables)
        torch.testing.assert_close(padded, full, rtol=0, atol=0)
