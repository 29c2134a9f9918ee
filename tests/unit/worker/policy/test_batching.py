from hypothesis import given
from hypothesis import strategies as st

from services.worker.policy.batching import PrefillView, chunk_prefills


def view(remaining_tokens: int, rank: int = 1) -> PrefillView:
    return PrefillView(rank=rank, computed_tokens=0, remaining_tokens=remaining_tokens)


def test_one_prompt_gets_the_tokens_that_decodes_leave() -> None:
    assert chunk_prefills(10, [view(1000)], 64) == [54]


def test_a_long_prompt_shares_with_later_short_ones() -> None:
    assert chunk_prefills(0, [view(1000), view(8), view(8)], 64) == [48, 8, 8]


def test_the_first_prompt_in_the_queue_keeps_half_of_the_budget() -> None:
    assert chunk_prefills(4, [view(1000), view(500), view(400)], 64) == [30, 0, 30]


def test_tokens_that_the_first_does_not_need_go_to_the_others() -> None:
    assert chunk_prefills(0, [view(2), view(500), view(30)], 64) == [2, 32, 30]


def test_class_takes_precedence_over_length() -> None:
    assert chunk_prefills(0, [view(50, rank=0), view(60, rank=0), view(2, rank=2)], 60) == [30, 30, 0]


def test_decodes_may_take_everything() -> None:
    assert chunk_prefills(64, [view(5), view(7)], 64) == [0, 0]


@given(
    st.integers(0, 40),
    st.lists(st.builds(view, remaining_tokens=st.integers(2, 300), rank=st.integers(0, 2)), max_size=10),
    st.integers(1, 128),
)
def test_batch_invariants(decode_count: int, prefills: list[PrefillView], budget_tokens: int) -> None:
    chunks = chunk_prefills(decode_count, prefills, budget_tokens)
    left_tokens = max(0, budget_tokens - decode_count)
    assert len(chunks) == len(prefills)
    assert all(0 <= chunk <= p.remaining_tokens for chunk, p in zip(chunks, prefills, strict=True))
    # No token of the budget is wasted, none is given twice, and the first prompt always makes progress.
    assert sum(chunks) == min(left_tokens, sum(p.remaining_tokens for p in prefills))
    if prefills:
        assert chunks[0] >= min(prefills[0].remaining_tokens, left_tokens // 2)
        assert chunks[0] > 0 or left_tokens == 0


def test_prompts_of_several_callers_alternate() -> None:
    flood = [PrefillView(1, 0, 200, caller=1) for _ in range(9)]
    chunks = chunk_prefills(0, [*flood, PrefillView(1, 0, 300, caller=2)], budget_tokens=1000)
    assert chunks[-1] == 300
