import random
import time
from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.worker.policy.cost import Chunk, CostModel
from services.worker.policy.splitting import (
    Microbatch,
    Work,
    added_s,
    batch_costs_s,
    by_filling,
    by_halving,
    by_tokens,
    cut,
    makespan_bound_s,
    makespan_s,
    tokens_within,
)

Method = Callable[[Sequence[Work], CostModel, int], list[Microbatch]]
COST = CostModel(attention_s=2e-9, token_s=1e-5, chunk_s=1.5e-3, shared_s=1.2e-3, prefix_s=1e-7)


def cost_model(attention_s: float, token_s: float, chunk_s: float, saved: float, prefix_s: float) -> CostModel:
    return CostModel(attention_s, token_s, chunk_s, chunk_s * saved, prefix_s)


def tokens_only(work: Sequence[Work], _: CostModel, count: int) -> list[Microbatch]:
    return by_tokens(work, count)


COSTS = st.builds(
    cost_model,
    st.floats(0, 1e-6),
    st.floats(1e-7, 1e-3),
    st.floats(0, 0.01),
    st.floats(0, 1),
    st.floats(0, 1e-6),
)
WORKS = st.lists(st.builds(Work, st.integers(0, 3000), st.integers(1, 3000)), min_size=1, max_size=20)
METHODS: list[Method] = [by_filling, by_halving, tokens_only]


def lengths(seed: int, count: int) -> list[Work]:
    rng = random.Random(seed)
    return [Work(0, int(min(8000, 16 + rng.expovariate(1 / 2000)))) for _ in range(count)]


def check_whole(work: Sequence[Work], batches: Sequence[Microbatch], *, gaps: bool = False) -> None:
    """Every token once, each sequence at most once in a microbatch, its chunks in successive ones (in later ones, if
    there may be gaps: where a decode leaves less room than the smallest chunk needs).
    """
    places: dict[int, list[int]] = {}
    done = [0] * len(work)
    for at, batch in enumerate(batches):
        assert batch
        for index, count in batch:
            assert count >= 1
            done[index] += count
            places.setdefault(index, []).append(at)
    assert done == [w.token_count for w in work]
    for found in places.values():
        assert found == (sorted(set(found)) if gaps else list(range(found[0], found[0] + len(found))))


@pytest.mark.parametrize("method", METHODS)
@given(WORKS, COSTS, st.integers(1, 16))
def test_every_token_is_computed_once_and_in_order(
    method: Method, work: list[Work], cost: CostModel, count: int
) -> None:
    batches = method(work, cost, count)
    check_whole(work, batches)
    assert len(batches) <= count
    assert batches == method(list(work), cost, count)


@example([Work(0, 1), Work(0, 4)], CostModel(0.0, 0.0009999999999999998, 0.0, 0.0), 3, 2)
@given(WORKS, COSTS, st.integers(1, 16), st.integers(2, 64))
def test_nothing_is_cut_smaller_than_it_may_be(work: list[Work], cost: CostModel, count: int, least: int) -> None:
    for batches in (by_filling(work, cost, count, least), by_halving(work, cost, count, least)):
        check_whole(work, batches, gaps=True)
        assert all(n >= min(least, work[i].token_count) for batch in batches for i, n in batch)


@given(COSTS, st.integers(0, 4000), st.integers(1, 4000))
def test_a_chunk_is_as_long_as_its_cost_says(cost: CostModel, prefix: int, count: int) -> None:
    alone = cost.chunk_cost_s(Chunk(prefix, count))
    assert added_s(cost, prefix, count) == pytest.approx(alone - cost.shared_s, abs=1e-12)
    assert tokens_within(cost, prefix, added_s(cost, prefix, count)) == pytest.approx(count, rel=1e-3)


@given(COSTS, st.integers(0, 2000), st.integers(1, 60), st.floats(0, 0.05), st.integers(1, 20))
def test_a_cut_comes_as_near_as_it_may(cost: CostModel, prefix: int, count: int, room_s: float, least: int) -> None:
    chosen = cut(cost, Work(prefix, count), room_s, least)
    allowed = [0, count, *(n for n in range(least, count - least + 1))]
    assert chosen in allowed
    if added_s(cost, prefix, count) > room_s:  # else all of it is wanted
        off = [abs((added_s(cost, prefix, n) if n else 0.0) - room_s) for n in allowed]
        assert off[allowed.index(chosen)] <= min(off) + 1e-9


def test_filling_and_halving_come_within_two_percent_of_the_bound_where_token_counts_do_not() -> None:
    gaps: dict[int, list[float]] = {}
    for seed in range(40):
        work = lengths(seed, 4 + seed % 29)
        count = 1 << max(1, round(sum(w.token_count for w in work) / 2048).bit_length() - 1)
        for at, method in enumerate(METHODS):
            batches = method(work, COST, count)
            took_s = makespan_s(batch_costs_s(work, batches, COST), 2)
            bound_s = makespan_bound_s(work, len(batches), 2, COST)
            assert took_s >= bound_s * (1 - 1e-9)
            gaps.setdefault(at, []).append(took_s / bound_s - 1)
    filling, halving, tokens = (sum(each) / len(each) for each in gaps.values())
    assert filling < 0.015
    assert halving < 0.02
    assert tokens > 2 * filling


def test_decodes_are_dealt_out_by_what_they_cost() -> None:
    work = [Work(prefix, 1) for prefix in (4000, 100, 100, 100, 3900, 200)]
    costs = batch_costs_s(work, by_filling(work, CostModel(1e-6, 1e-6, 0.0, 0.0), 2), CostModel(1e-6, 1e-6, 0.0, 0.0))
    assert max(costs) - min(costs) < 0.0003


def test_a_pipeline_waits_for_the_longer_of_two_neighbours() -> None:
    assert makespan_s([2.0, 5.0, 1.0, 1.0], 2) == 2 + 5 + 5 + 1 + 1  # equation 4
    assert makespan_s([3.0], 4) == 12
    assert makespan_s([1.0] * 8, 4) == 8 + 3


def test_a_thousand_requests_are_cut_in_no_time() -> None:
    work = lengths(0, 1000)
    count = -(-sum(w.token_count for w in work) // 2048)
    started_s = time.process_time()
    check = [by_filling(work, COST, count) for _ in range(5)]
    assert (time.process_time() - started_s) / len(check) < 0.1  # about 5 ms; room for a slow machine
