"""The cost model follows executed batches, is never worse than the profile, and retains prefills within a bounded
memory.
"""

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ballast.common.cost import Chunk, CostModel
from services.worker.policy.cost_fit import StageCosts, StageShape
from services.worker.policy.online_cost import STEPS_PER_SIZE, OnlineCost

SHAPE, HALF = StageShape(8, True, True), StageShape(4, True, False)
NOTHING = CostModel(0.0, 0.0, 0.0, 0.0)
PROFILE = StageCosts(
    layer=CostModel(attention_s=3e-8, token_s=7e-5, chunk_s=1.31e-3, shared_s=1.3e-3, prefix_s=3e-7),
    step=CostModel(0.0, 0.0, 2.1e-4, 2e-4),
    first=NOTHING,
    last=CostModel(0.0, 0.0, 4e-4, 3e-4),
)
LOADED = PROFILE.of(SHAPE)
PREFILL, DECODES = (Chunk(0, 400),), (Chunk(300, 1),) * 8


def batch(rng: random.Random) -> tuple[Chunk, ...]:
    decodes = tuple(Chunk(rng.randrange(10, 1000), 1) for _ in range(rng.choice((1, 3, 9, 30))))
    return decodes + (Chunk(rng.choice((0, 200)), rng.randrange(8, 400)),) * rng.randrange(2)


def run(online: OnlineCost, true: CostModel, steps: int, *, noise: float = 0.1, seed: int = 0) -> None:
    rng = random.Random(seed)
    for _ in range(steps):
        chunks = batch(rng)
        online.record(chunks, true.batch_cost_s(chunks) * rng.uniform(1 - noise, 1 + noise))
        online.check()


def entered(profile: StageCosts | None = PROFILE) -> OnlineCost:
    online = OnlineCost(profile)
    online.enter(SHAPE)
    return online


def off_by(model: CostModel | None, true: CostModel, chunks: tuple[Chunk, ...]) -> float:
    assert model is not None
    return model.batch_cost_s(chunks) / true.batch_cost_s(chunks) - 1


def test_the_cost_of_all_layers_follows_from_executed_ones() -> None:
    online = OnlineCost(PROFILE)
    assert online.of_layers(8) is None
    online.enter(HALF)
    half = online.current()
    assert half is not None
    assert online.of_layers(8) == half.scaled(2.0)


def test_the_model_starts_with_the_profile() -> None:
    assert entered().current() == LOADED
    assert entered(None).current() is None


def test_a_slower_machine_is_noticed() -> None:
    online, slower = entered(), LOADED.scaled(2.0)
    run(online, slower, 200)
    for chunks in (PREFILL, DECODES, (Chunk(500, 100),)):
        assert off_by(online.current(), slower, chunks) == pytest.approx(0, abs=0.05)


def test_a_wrong_coefficient_is_corrected() -> None:
    true = CostModel(3e-8 * 8, 9e-4, 1.2e-2, 1.1e-2, 6e-6)
    online = entered()
    run(online, true, 400)
    for chunks in (PREFILL, DECODES, (Chunk(500, 100),)):
        assert off_by(online.current(), true, chunks) == pytest.approx(0, abs=0.08)


def test_without_a_profile_costs_are_learnt_from_batches_of_several_sizes() -> None:
    online = entered(None)
    for _ in range(200):
        online.record(DECODES, LOADED.batch_cost_s(DECODES))
    assert online.current() is None  # a fit to these steps alone would know nothing of prefills
    run(online, LOADED, 200, noise=0.02)
    assert off_by(online.current(), LOADED, PREFILL) == pytest.approx(0, abs=0.05)


def test_decodes_alone_do_not_make_it_forget_prefills() -> None:
    online = entered()
    run(online, LOADED.scaled(1.5), 200)
    for i in range(2000):
        online.record(DECODES, 1.5 * LOADED.batch_cost_s(DECODES) * (1.1 if i % 2 else 0.9))
    assert off_by(online.current(), LOADED.scaled(1.5), PREFILL) == pytest.approx(0, abs=0.1)


def test_decodes_alone_correct_the_cost_of_prefills_too() -> None:
    online = entered()
    for _ in range(300):
        online.record(DECODES, 2 * LOADED.batch_cost_s(DECODES))
    assert off_by(online.current(), LOADED.scaled(2.0), PREFILL) == pytest.approx(0, abs=0.1)


def test_occasional_stalls_change_little() -> None:
    online, rng = entered(), random.Random(5)
    for i in range(600):
        chunks = batch(rng)
        online.record(chunks, LOADED.batch_cost_s(chunks) * (20.0 if i % 20 == 0 else 1.0))
    for chunks in (PREFILL, DECODES):
        assert off_by(online.current(), LOADED, chunks) == pytest.approx(0, abs=0.05)


def test_another_shape_starts_from_the_profile_or_else_from_the_last_shape() -> None:
    online = entered()
    run(online, LOADED.scaled(2.0), 200)
    online.enter(HALF)
    assert online.current() == PROFILE.of(HALF)
    assert online.step_count == 0
    unknowing = entered(None)
    run(unknowing, LOADED, 300, noise=0.0)
    unknowing.enter(HALF)
    assert off_by(unknowing.current(), LOADED.scaled(0.5), PREFILL) == pytest.approx(0, abs=0.01)


def test_entering_the_same_shape_again_changes_nothing() -> None:
    online = entered()
    run(online, LOADED.scaled(2.0), 200)
    before, count = online.current(), online.step_count
    online.enter(SHAPE)
    assert (online.current(), online.step_count) == (before, count)


def test_empty_batches_do_not_count() -> None:
    online = entered()
    online.record((), 1.0)
    online.record(DECODES, 0.0)
    assert online.step_count == 0


def test_stored_steps_are_bounded() -> None:
    online = entered()
    for _ in range(1000):
        online.record((Chunk(5, 1),), 0.001)
    assert online.step_count == STEPS_PER_SIZE
    assert online.refits_total == 1000 // 16


chunks_st = st.lists(st.builds(Chunk, st.integers(0, 4000), st.integers(1, 600)), min_size=1, max_size=6)
steps_st = st.lists(st.tuples(chunks_st, st.floats(1e-4, 5.0)), min_size=1, max_size=150)


coefficients_st = st.sampled_from([0.0, 1e-8, 1e-4])


def sparse(attention_s: float, token_s: float, shared_s: float, own_s: float, prefix_s: float) -> CostModel:
    return CostModel(attention_s, token_s, shared_s + own_s, shared_s, prefix_s)


@settings(max_examples=60, deadline=None)
@given(
    st.builds(sparse, *[coefficients_st] * 5),
    st.lists(st.tuples(chunks_st, st.floats(1e-4, 5.0)), min_size=16, max_size=16),
)
@example(CostModel(0.0, 0.0, 0.0, 0.0, 1e-6), [([Chunk(1000, 1)], 1e-3)] * 16)
def test_a_profile_that_makes_some_batches_free_is_corrected(
    start: CostModel, steps: list[tuple[list[Chunk], float]]
) -> None:
    online = entered(StageCosts(layer=start, step=NOTHING, first=NOTHING, last=NOTHING))
    for chunks, seconds in steps:
        online.record(chunks, seconds)
        online.check()


@settings(max_examples=60, deadline=None)
@given(steps_st, st.booleans())
def test_the_fit_is_never_worse_than_the_profile(steps: list[tuple[list[Chunk], float]], has_profile: bool) -> None:
    """Checks the fit right after it is made, on all steps so far, as long as no batch size has more steps than are
    stored.
    """
    online = entered(PROFILE if has_profile else None)
    seen: list[tuple[list[Chunk], float]] = []
    sizes: dict[int, int] = {}
    for chunks, seconds in steps:
        size = sum(c.token_count for c in chunks).bit_length()
        sizes[size] = sizes.get(size, 0) + 1
        if sizes[size] > STEPS_PER_SIZE:
            break
        seen.append((chunks, seconds))
        fits = online.refits_total
        online.record(chunks, seconds)
        online.check()
        model = online.current()
        if model is None or not has_profile or online.refits_total == fits:
            continue
        mine, loaded = (sum(abs(cost.batch_cost_s(c) / s - 1) for c, s in seen) / len(seen) for cost in (model, LOADED))
        assert mine <= loaded * (1 + 1e-9)
