"""How many offline tokens fit into a batch within its time limit."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast.common.cost import Chunk, CostModel
from ballast.common.targets import for_all
from services.worker.policy.harvest import (
    MIN_CHUNK_TOKENS,
    Harvest,
    OfflineView,
    OnlineView,
    PriceList,
    allowance_s,
    efficient_tokens,
    fill,
    safepoint_layers,
    wanted_tokens,
)

A100 = CostModel(2.5e-9, 0.0, 0.0141, 0.01409, 5.2e-7, 0.0, 9.2e-5, 128)  # Llama-2-7B, as the simulator fits it


def test_a_price_list_adds_up_to_the_cost_models_estimate() -> None:
    chunks = [Chunk(1000, 1), Chunk(0, 200), Chunk(300, 40)]
    prices = PriceList(A100, chunks[:2])
    assert prices.with_chunk_s(*chunks[2]) == pytest.approx(A100.batch_cost_s(chunks))
    prices.add(*chunks[2])
    assert prices.seconds == pytest.approx(A100.batch_cost_s(chunks))
    assert PriceList(A100).seconds == 0.0


@given(st.integers(0, 4000), st.integers(1, 3000), st.floats(0.0, 0.4))
def test_a_cut_chunk_is_the_longest_within_the_limit(prefix: int, most: int, limit_s: float) -> None:
    prices = PriceList(A100, [Chunk(500, 1)] * 5)
    count = prices.tokens_within(prefix, limit_s, most)
    assert count == 0 or prices.with_chunk_s(prefix, count) <= limit_s
    assert count == most or prices.with_chunk_s(prefix, count + 1) > limit_s


def test_an_a100_is_efficient_from_256_tokens_on() -> None:
    assert efficient_tokens(A100, 2048) in (256, 512)
    assert efficient_tokens(CostModel(0.0, 1e-3, 0.0, 0.0), 2048) == 32, "the case in which every token costs the same"
    assert efficient_tokens(None, 300) == 300


def test_a_target_is_shared_by_the_batches_in_flight() -> None:
    target, online = Harvest(), [OnlineView(0.1), OnlineView(0.3)]
    assert allowance_s(target, 0.02, 4, 2, online, 99, 512) == pytest.approx(0.2)
    assert allowance_s(target, 0.3, 4, 2, online, 99, 512) == 0.3, "online work exceeds the target, so none is added"
    assert allowance_s(Harvest(slowdown=0.25), 0.02, 1, 1, [], 99, 512) == pytest.approx(0.025)


def test_the_strictest_running_request_decides() -> None:
    harvest, free = Harvest(slowdown=0.25), OnlineView(math.inf)

    def allowed_s(*online: OnlineView) -> float:
        return allowance_s(harvest, 0.02, 1, 1, online, 99, 100)

    assert allowed_s(OnlineView(0.05), OnlineView(0.03)) == 0.03
    assert allowed_s(OnlineView(0.05), free) == pytest.approx(0.025), "no target: slowed down by a fraction"
    assert allowed_s(OnlineView(0.05, first_token_in_s=0.08, left_tokens=150)) == 0.04, "two batches to the first token"
    assert allowed_s(OnlineView(0.05, first_token_in_s=-1.0)) == 0.02, "the first token is late already"
    assert allowed_s(free, OnlineView(math.inf, left_tokens=150)) == 0.02, "none alongside a prompt without a target"


def test_under_a_target_answers_are_slowed_down_only_as_far_as_places_suffice() -> None:
    online = [OnlineView(0.05)] * 10
    assert allowance_s(Harvest(), 0.02, 1, 1, online, 30, 512) == 0.05
    assert allowance_s(Harvest(), 0.02, 1, 1, online, 15, 512) == pytest.approx(0.03), "places for half as many more"
    assert allowance_s(Harvest(), 0.02, 1, 1, online, 9, 512) == 0.02
    free = [OnlineView(math.inf)] * 10
    assert allowance_s(Harvest(slowdown=0.25), 0.02, 1, 1, free, 10, 512) == pytest.approx(0.025), "without a target"


def test_decodes_precede_prompts_in_order_of_waiting_time() -> None:
    views = [OfflineView(10, 1, 7), OfflineView(10, 1, 3), OfflineView(0, 500, 0)]
    assert fill(PriceList(A100), views, 1.0, 1, 100) == [(1, 1)]
    assert fill(PriceList(A100), views, 1.0, 1000, 100) == [(1, 1), (0, 1), (2, 100)]


def test_prompts_are_cut_by_the_limit_and_tiny_chunks_are_avoided() -> None:
    free = PriceList(A100, [Chunk(0, 1)])
    ((_, count),) = fill(free, [OfflineView(0, 500, 0)], free.seconds * 1.01, 2048, 2048)
    assert 100 <= count <= 128
    full = PriceList(A100, [Chunk(0, 128 - MIN_CHUNK_TOKENS // 2)])
    assert fill(full, [OfflineView(0, 500, 0)], full.seconds * 1.0001, 2048, 2048) == []
    assert fill(PriceList(A100), [OfflineView(0, 5, 0)], 1.0, 2048, 2048) == [(0, 5)], "the end of a prompt"


def test_a_prompt_longer_than_a_batch_makes_progress() -> None:
    assert fill(PriceList(A100), [OfflineView(0, 500, 0)], 1.0, 8, 8) == [(0, 8)]


@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 3000), st.integers(0, 9)), max_size=20),
    st.floats(0.0, 0.5),
    st.integers(0, 2048),
    st.integers(0, 2048),
)
def test_a_filled_batch_is_within_all_bounds(
    offline: list[tuple[int, int, int]], limit_s: float, most: int, prompt_tokens: int
) -> None:
    views = [OfflineView(*view) for view in offline]
    base = [Chunk(1000, 1)] * 4
    share = fill(PriceList(A100, base), views, limit_s, most, prompt_tokens)
    assert len({index for index, _ in share}) == len(share)
    assert all(1 <= count <= views[index].left_tokens for index, count in share)
    assert sum(count for _, count in share) <= most
    assert sum(count for index, count in share if views[index].left_tokens > 1) <= prompt_tokens
    if share:
        whole = base + [Chunk(views[index].prefix_tokens, count) for index, count in share]
        assert A100.batch_cost_s(whole) <= limit_s + 1e-9


def test_prompts_for_two_batches_are_wanted() -> None:
    assert wanted_tokens(256, []) == 512
    assert wanted_tokens(256, [1, 1, 300]) == 212
    assert wanted_tokens(256, [700]) == 0


def test_a_step_longer_than_a_quarter_of_the_ttft_target_gets_safepoints() -> None:
    harvest = Harvest(targets=for_all(ttft_s=0.8), layer_count=32)
    assert safepoint_layers(harvest, 0.2) == 0
    assert safepoint_layers(harvest, 0.4) == 4, "an eighth of the layers takes a sixteenth of the target"
    assert safepoint_layers(harvest, 90.0) == 1
    assert safepoint_layers(Harvest(layer_count=32), 90.0) == 0, "no safepoints without a target"
