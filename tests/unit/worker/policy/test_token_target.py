"""How many requests may run under a TPOT target."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast.common.cost import Chunk, CostModel
from ballast.common.errors import ConfigError
from services.worker.policy.splitting import added_s
from services.worker.policy.token_target import Decoders, TokenTarget, Turnover, token_s

# A step takes 10 ms, 0.1 ms for each sequence, and 1 ms for every 1,000 tokens of context.
COST = CostModel(attention_s=1e-6, token_s=1e-4, chunk_s=1e-2, shared_s=1e-2)
FULL = CostModel(1e-6, 1e-4, 1e-2, 9e-3, prefix_s=1e-7, many_s=2e-3, beyond_s=5e-5)
TEN = Decoders(10, 10 * 899)  # each further sequence adds 1 ms to a step: 0.9 for its context and 0.1 for itself


def target(target_s: float, cost: CostModel | None = COST) -> TokenTarget:
    return TokenTarget(target_s, lambda: cost)


@pytest.mark.parametrize(("target_s", "count"), [(0.0305, 20), (0.0605, 50), (0.2, 64), (0.0205, 10), (0.005, 10)])
def test_as_many_sequences_run_as_a_step_has_time_for_and_running_ones_stay(target_s: float, count: int) -> None:
    assert target(target_s).place_count(TEN, 64) == count


@pytest.mark.parametrize(("context_tokens", "count"), [(1899, 25), (899, 50), (399, 101), (0, 256)])
def test_longer_contexts_let_fewer_sequences_run(context_tokens: int, count: int) -> None:
    assert target(0.0605).place_count(Decoders(10, 10 * context_tokens), 256) == pytest.approx(count, abs=1)


@pytest.mark.parametrize(("stage_count", "count"), [(1, 50), (2, 100), (4, 200)])
def test_a_pipeline_computes_a_microbatch_for_each_stage_between_two_tokens(stage_count: int, count: int) -> None:
    """Each stage has its share of the layers, so if each microbatch has that many sequences, a round takes as long as a
    step on one stage.
    """
    assert target(0.0601).place_count(TEN._replace(stage_count=stage_count), 1024) == count


@given(st.integers(1, 300), st.integers(0, 5000))
def test_a_step_of_decodes_takes_the_cost_models_time(count: int, prefix_tokens: int) -> None:
    chunks = [Chunk(prefix_tokens, 1)] * count
    assert FULL.decodes_s(count, count * prefix_tokens) == pytest.approx(FULL.batch_cost_s(chunks))
    now = Decoders(count, count * prefix_tokens)
    assert token_s(FULL, now, Turnover(), count) == pytest.approx(FULL.batch_cost_s(chunks))


def test_prompts_of_arriving_requests_count() -> None:
    """With answers of 100 tokens, one of 20 running requests ends every five steps, and the prompt of its successor is
    computed.
    """
    turnover = Turnover(prompt_tokens=100, answer_tokens=100.0)
    with_prompts_s = token_s(COST, TEN, turnover, 20)
    assert with_prompts_s == pytest.approx(token_s(COST, TEN, Turnover(), 20) + added_s(COST, 0, 100) / 5)
    made = target(0.0605)
    for _ in range(7):
        made.ended(100, 100)
    assert made.place_count(TEN, 64) == 50  # too few requests have ended
    made.ended(100, 100)
    assert made.turnover == turnover
    assert made.place_count(TEN, 64) == 43  # each adds a hundredth of a 15 ms prompt


def test_requests_that_ended_long_ago_do_not_count() -> None:
    made = target(0.0605)
    for prompt_tokens in [1000] * 64 + [10] * 64:
        made.ended(prompt_tokens, 100)
    assert made.turnover == Turnover(10, 100.0)


def test_one_sequence_may_always_run_and_any_number_without_known_costs() -> None:
    assert target(1e-9).place_count(Decoders(0, 0), 64) == 64  # no limit until the first runs
    assert target(1e-9).place_count(Decoders(1, 100), 64) == 1
    assert target(1e-9, None).place_count(TEN, 64) == 64
    assert target(1.0).place_count(Decoders(70, 100), 64) == 70


@pytest.mark.parametrize("target_s", [0.0, -1.0, math.nan])
def test_a_target_that_nothing_can_meet_is_refused(target_s: float) -> None:
    with pytest.raises(ConfigError, match="tpot_target_s: must be positive"):
        target(target_s)
