"""Block tables cached from earlier steps do not change a packed step: a new packer gives the same result."""

import random
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from ballast.common.errors import InvariantViolation
from services.worker.core.batch import Slice, row_order
from services.worker.engine.packing import PackedStep, Packer
from services.worker.ranks.channel import body_of
from services.worker.ranks.crew import Crew
from services.worker.ranks.runner import run_of

BLOCK_TOKENS = 4


def require_equal(step: PackedStep, expected: PackedStep) -> None:
    assert len(step.chunks) == len(expected.chunks)
    for each in fields(PackedStep):
        if each.name != "chunks":
            assert np.array_equal(getattr(step, each.name), getattr(expected, each.name)), each.name
    for chunk, other in zip(step.chunks, expected.chunks, strict=True):
        assert (chunk.first_row, chunk.positions.tolist()) == (other.first_row, other.positions.tolist())
        assert chunk.blocks.tolist() == other.blocks.tolist()


@pytest.mark.parametrize("seed", range(6))
def test_tables_may_grow_be_replaced_and_be_forgotten(seed: int) -> None:
    rng, packer = random.Random(seed), Packer(BLOCK_TOKENS)
    contexts: dict[int, int] = {}
    tables: dict[int, tuple[int, ...]] = {}
    for step in range(60):
        for ended in [i for i in contexts if rng.random() < 0.1]:
            packer.forget(ended)
            del contexts[ended], tables[ended]
        for new in range(1000 * step, 1000 * step + rng.randrange(4)):
            contexts[new], tables[new] = 0, ()
        if rng.random() < 0.1:
            packer.forget_all()
        chosen = rng.sample(sorted(contexts), rng.randint(0, len(contexts)))
        slices: list[Slice] = []
        for i in chosen:
            count = 1 if contexts[i] else rng.randint(1, 90)
            end = contexts[i] + count
            need = -(-end // BLOCK_TOKENS) + rng.randrange(2)
            if len(tables[i]) < need:
                tables[i] = tables[i] + tuple(rng.choices(range(500), k=need - len(tables[i])))
            elif rng.random() < 0.1:
                tables[i] = tuple(rng.choices(range(500), k=len(tables[i])))  # moved to other blocks
            slices.append(Slice(i, contexts[i], (1,) * count, rng.random() < 0.9))
            contexts[i] = end
        if slices:
            given = [tables[part.sequence_id] for part in slices]
            require_equal(packer.pack(slices, given), Packer(BLOCK_TOKENS).pack(slices, given))


def test_a_table_that_ends_too_early_is_a_bug() -> None:
    with pytest.raises(InvariantViolation, match="computes 5 tokens up to position 5: 1 blocks of 4 tokens"):
        Packer(BLOCK_TOKENS).pack([Slice(1, 0, (1,) * 5, True)], [(0,)])


def test_a_layout_for_other_ranks_is_little_more_than_its_block_tables() -> None:
    """Tables are sent as 32-bit numbers, and encoded once for all ranks."""
    table = tuple(range(256))
    packed = Packer(16).pack([Slice(i, 4095, (1,), True) for i in range(256)], [table] * 256)
    body = body_of(run_of(packed, None, 0, 1))
    assert len(body) < 1.1 * 4 * 256 * 256
    sent: list[int] = []
    crew = Crew(1)  # starts no other rank

    def send_body(body: bytes, within_s: float) -> None:
        sent.append(id(body))

    channel = SimpleNamespace(send_body=send_body)
    crew._ranks = cast(Any, [SimpleNamespace(channel=channel)] * 2)
    crew.tell(run_of(packed, None, 0, 1))
    assert len(sent) == 2
    assert len(set(sent)) == 1


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_in_the_order_that_an_activation_log_expects(seed: int) -> None:
    rng = random.Random(seed)
    slices = [Slice(i, rng.randrange(30), (1,) * rng.choice((1, 1, 2, 5)), samples=False) for i in range(12)]
    packed = Packer(4).pack(slices, [range(10 * i, 10 * i + 10) for i in range(12)])
    row, expected = 0, [0] * len(slices)
    for i in row_order(slices):
        expected[i], row = row, row + len(slices[i].token_ids)
    assert packed.first_rows.tolist() == expected
