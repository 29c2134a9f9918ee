from hypothesis import given
from hypothesis import strategies as st

from services.worker.policy.microbatching import MicrobatchCandidate, PipelineView, Share, by_token_count


def decodes(count: int, in_flight: int = 0) -> list[MicrobatchCandidate]:
    """Views of decodes, of which the first `in_flight` are in flight."""
    flying = [MicrobatchCandidate(0, 9, 10, 10, 8, True) for _ in range(in_flight)]
    return flying + [MicrobatchCandidate(0, 9, 9, 10, i % 7, True) for i in range(count - in_flight)]


def prompt(tokens: int, computed: int = 0, *, in_flight: int = 0) -> MicrobatchCandidate:
    return MicrobatchCandidate(0, computed, computed + in_flight, computed + tokens, 8 if in_flight else 0, True)


def formed(stages: int, candidates: list[MicrobatchCandidate], max_batch_tokens: int = 512) -> Share:
    return by_token_count(PipelineView(stages, 7, max_batch_tokens, 0, candidates))


def test_decodes_are_spread_over_as_many_batches_as_there_are_stages() -> None:
    assert len(formed(4, decodes(13))) == 4
    assert len(formed(4, decodes(13, in_flight=11))) == 2


def test_the_sequence_that_has_waited_longest_precedes_others() -> None:
    late, early = MicrobatchCandidate(0, 9, 9, 10, 6, True), MicrobatchCandidate(0, 9, 9, 10, 3, True)
    assert formed(2, [late, early]) == [(1, 1)]


def test_prompts_are_spread_over_batches_too() -> None:
    assert [i for i, _ in formed(2, [prompt(200), prompt(200), prompt(200)])] == [0, 1]


def test_a_prompt_is_in_one_batch_at_a_time() -> None:
    assert formed(2, [prompt(1_000, in_flight=100), prompt(50)]) == [(1, 50)]


def test_a_long_prompt_is_cut_into_shares_but_not_into_tiny_chunks() -> None:
    assert formed(4, [prompt(1_000)]) == [(0, 250)]
    assert formed(4, [prompt(1_000, 24)]) == [(0, 250)]
    assert formed(4, [prompt(100)]) == [(0, 100)]
    assert formed(4, [prompt(200)]) == [(0, 128)]


def test_sequences_without_a_block_are_left_out() -> None:
    assert formed(2, [MicrobatchCandidate(0, 15, 15, 16, 0, False), MicrobatchCandidate(0, 9, 9, 10, 0, True)]) == [
        (1, 1)
    ]


@given(st.integers(2, 8), st.integers(0, 64), st.lists(st.integers(2, 400), max_size=9), st.integers(1, 64))
def test_the_shares_of_all_stages_include_every_sequence(
    stages: int, decode_count: int, lengths: list[int], places: int
) -> None:
    decode_count = min(decode_count, places * stages)
    share = formed(stages, decodes(decode_count) + [prompt(n) for n in lengths], places)
    taken = sum(index < decode_count for index, _ in share)
    assert taken * stages >= decode_count
    assert sum(n for _, n in share) <= places
    assert share or not (decode_count or lengths)
