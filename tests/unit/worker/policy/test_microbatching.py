from hypothesis import given
from hypothesis import strategies as st

from services.worker.policy.microbatching import MicrobatchShape, PipelineView, by_token_count


def test_a_lone_worker_takes_everything() -> None:
    assert by_token_count(PipelineView(1, 12, 3, 900, 512)) == MicrobatchShape(12, 3, 512)


def test_decodes_are_spread_over_as_many_batches_as_there_are_stages() -> None:
    assert by_token_count(PipelineView(4, 13, 0, 0, 512)).max_decode_count == 4


def test_prompts_are_spread_too_so_that_the_next_batch_has_one() -> None:
    assert by_token_count(PipelineView(2, 0, 3, 600, 512)).max_prefill_count == 2


def test_a_long_prompt_is_cut_into_shares_but_not_into_crumbs() -> None:
    assert by_token_count(PipelineView(4, 0, 1, 1_000, 512)).budget_tokens == 250
    assert by_token_count(PipelineView(4, 0, 1, 100, 512)).budget_tokens == 128


@given(st.integers(1, 8), st.integers(0, 64), st.integers(0, 5_000), st.integers(1, 64))
def test_the_shares_of_all_stages_together_leave_nobody_out(
    stages: int, decodes: int, prefill_tokens: int, places: int
) -> None:
    shape = by_token_count(
        PipelineView(stages, min(decodes, places * stages), prefill_tokens // 9, prefill_tokens, places)
    )
    assert shape.max_decode_count * stages >= min(decodes, places * stages)
    assert shape.max_decode_count <= shape.budget_tokens <= places
