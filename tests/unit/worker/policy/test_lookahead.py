import random

from hypothesis import given
from hypothesis import strategies as st

from ballast.common.cost import Chunk, CostModel
from services.worker.engine.kernels import padded_rows
from services.worker.policy.lookahead import MIN_CHUNK_TOKENS, lookahead
from services.worker.policy.microbatching import MicrobatchCandidate, PipelineView, Share, by_token_count

COST = CostModel(attention_s=1e-8, token_s=1e-5, chunk_s=2e-4, shared_s=1e-4, prefix_s=1e-8)
FORM = lookahead(lambda: COST)
LANDED = 7


def prompt(left: int, computed: int = 0, *, departed: int = 0, rank: int = 0) -> MicrobatchCandidate:
    flying = max(0, departed - computed)
    return MicrobatchCandidate(rank, computed, computed + flying, computed + left, LANDED + 1 if flying else 0, True)


def decode(context: int, step_id: int = 0) -> MicrobatchCandidate:
    in_flight = step_id > LANDED
    return MicrobatchCandidate(0, context, context + in_flight, context + 1, step_id, True)


def view(
    stages: int,
    candidates: list[MicrobatchCandidate],
    tokens: int = 512,
    waiting: int = 0,
    flying: int = 0,
    full: bool = False,
) -> PipelineView:
    return PipelineView(stages, LANDED, tokens, waiting, candidates, flying, lacks_room=full)


def cost_s(seen: PipelineView, share: Share) -> float:
    return COST.batch_cost_s(Chunk(seen.candidates[i].dispatched_tokens, n) for i, n in share)


def rounds(
    candidates: list[MicrobatchCandidate], stages: int, count: int, tokens: int = 512
) -> list[tuple[PipelineView, Share]]:
    """Consecutive microbatches and their views. Each microbatch completes once `stages` more have been formed."""
    states = [[c.computed_tokens, c.dispatched_tokens, c.token_count, c.step_id] for c in candidates]
    formed: list[tuple[PipelineView, Share]] = []
    for step in range(1, count + 1):
        if step > stages:
            seen, share = formed[step - stages - 1]
            for index, n in share:
                state = states[index]
                state[0] = seen.candidates[index].dispatched_tokens + n
                state[2] += state[0] == state[2]
        landed = LANDED + max(0, step - stages)
        now = [
            MicrobatchCandidate(c.rank, s[0], s[1] if s[3] > landed else s[0], s[2], s[3], True)
            for c, s in zip(candidates, states, strict=True)
        ]
        seen = PipelineView(stages, landed, tokens, 0, now)
        share = FORM(seen)
        formed.append((seen, share))
        for index, n in share:
            states[index][1], states[index][3] = now[index].dispatched_tokens + n, LANDED + step
    return formed


def test_without_a_cost_model_tokens_are_counted() -> None:
    seen = view(2, [prompt(700), prompt(30), decode(80), decode(90)])
    assert lookahead(lambda: None)(seen) == by_token_count(seen)


def test_microbatches_of_a_backlog_have_equal_costs_but_different_token_counts() -> None:
    candidates = [prompt(3000, 3000), *(prompt(40 + 7 * i) for i in range(60)), prompt(4000), prompt(2500, 1000)]
    formed = rounds(candidates, 2, 20)
    costs = [cost_s(*one) for one in formed]
    assert max(costs) / min(costs) < 1.15
    tokens = [sum(n for _, n in share) for _, share in formed]
    assert max(tokens) / min(tokens) > 1.1
    assert max(tokens) <= 512


def test_a_limit_on_prompts_is_used_whole_and_does_not_make_microbatches_small() -> None:
    seen = view(2, [prompt(100), prompt(80), *(decode(60) for _ in range(6))])._replace(max_prompt_tokens=24)
    assert sum(n for index, n in FORM(seen) if index < 2) == 24


def test_a_lone_prompt_keeps_all_stages_busy() -> None:
    formed = rounds([prompt(900)], 4, 4, tokens=1024)
    counts = [sum(n for _, n in share) for _, share in formed]
    assert sum(counts) == 900
    costs = [cost_s(*one) for one in formed]
    assert max(costs) / min(costs) < 1.25
    assert [seen.candidates[0].dispatched_tokens for seen, _ in formed] == [sum(counts[:i]) for i in range(4)]


def test_decodes_are_spread_according_to_their_cost() -> None:
    candidates = [decode(50_000), *(decode(50, step_id=1) for _ in range(5))]
    (_, first), (_, second) = rounds(candidates, 2, 2)
    assert [i for i, _ in first] == [0]
    assert len(second) == 5


def test_a_microbatch_with_prefill_also_has_its_share_of_decodes() -> None:
    formed = rounds([*(decode(100) for _ in range(40)), *(prompt(300) for _ in range(30))], 4, 12)
    decodes = [sum(i < 40 for i, _ in share) for _, share in formed]
    assert max(decodes) - min(decodes) <= 2
    costs = [cost_s(*one) for one in formed]
    assert max(costs) / min(costs) < 1.15


def test_prompts_progress_alongside_decodes_that_cost_more_than_a_batch_of_prompts() -> None:
    """Memory is free and many prompts wait, so a microbatch has nearly as many tokens as a batch of a single stage."""
    crowd = [decode(20_000) for _ in range(200)]
    share = FORM(view(2, [*crowd, *(prompt(800) for _ in range(20))], tokens=2048))
    assert sum(n for _, n in share) > 0.7 * 2048


def test_prompts_are_spread_further_while_others_wait_for_room() -> None:
    candidates = [*(decode(300) for _ in range(40)), prompt(600)]
    eager, patient = (FORM(view(2, candidates, waiting=3, full=full)) for full in (False, True))
    assert dict(patient)[40] < dict(eager)[40] / 2


def test_a_short_prompt_progresses_among_decodes_while_others_wait_for_room() -> None:
    """The prompt's fair share of each microbatch is less than the smallest chunk."""
    crowd = [decode(100) for _ in range(20)]
    share = FORM(view(2, [*crowd, prompt(100)], waiting=3, full=True))
    assert share[-1] == (20, MIN_CHUNK_TOKENS)


def test_a_prompt_progresses_if_batches_have_less_room_than_the_smallest_chunk() -> None:
    """Batches have so little room while a restore is being prepared."""
    crowd = [decode(100) for _ in range(20)]
    share = FORM(view(2, [*crowd, prompt(100)], tokens=10 + 8))
    assert [index for index, _ in share[:-1]] == [*range(10)]
    assert share[-1] == (20, 8)


def test_one_more_microbatch_is_in_flight_while_others_wait() -> None:
    candidates = [*(decode(300) for _ in range(60)), *(prompt(900) for _ in range(6))]
    ahead = FORM(view(2, candidates, waiting=3, flying=2))
    assert sum(i < 60 for i, _ in ahead) == 20  # a third of the decodes
    assert not FORM(view(2, candidates, waiting=3, flying=3))
    assert not FORM(view(2, candidates, flying=2))
    assert not FORM(view(2, candidates[:60], waiting=3, flying=2))  # no prompt to fill it
    assert FORM.ahead == 1


def test_no_extra_microbatch_if_every_batch_is_expensive() -> None:
    costly = CostModel(attention_s=1e-8, token_s=1e-5, chunk_s=2e-3, shared_s=1.9e-3)
    form = lookahead(lambda: costly)
    candidates = [*(decode(300) for _ in range(60)), *(prompt(900) for _ in range(6))]
    assert not form(view(2, candidates, waiting=3, flying=2))
    assert sum(i < 60 for i, _ in form(view(2, candidates, waiting=3, flying=1))) == 30


def test_without_a_cost_model_no_extra_microbatch_is_formed() -> None:
    assert not lookahead(lambda: None)(view(2, [prompt(700)], waiting=3, flying=2))


def test_chunked_prompts_waste_no_rows() -> None:
    rng = random.Random(2)
    for _ in range(200):
        decodes = [decode(rng.randint(20, 900)) for _ in range(rng.randint(0, 20))]
        share = FORM(view(2, [*decodes, *(prompt(rng.randint(600, 4000), rng.randint(0, 3000)) for _ in range(8))]))
        total = sum(n for _, n in share)
        assert total <= 512
        assert padded_rows(total) == total


def test_a_long_prompt_gets_half_and_short_ones_do_not_wait_for_it() -> None:
    share = dict(FORM(view(2, [prompt(4000), prompt(900), prompt(30), prompt(20, rank=1)])))
    assert share[0] > 100
    assert share[2] == 30
    assert 3 not in share  # of a lower class


def test_sequences_waiting_for_a_token_or_a_block_are_left_out() -> None:
    seen = view(2, [decode(80, step_id=LANDED + 1), MicrobatchCandidate(0, 64, 64, 65, 0, False), prompt(50)])
    assert [i for i, _ in FORM(seen)] == [2]


def flying_prompt(left: int, computed: int, flying: int, rank: int) -> MicrobatchCandidate:
    return prompt(left, computed, departed=computed + min(flying, left) if flying else 0, rank=rank)


def cost_model(attention_s: float, token_s: float, chunk_s: float, saved: float, prefix_s: float) -> CostModel:
    return CostModel(attention_s, token_s, chunk_s, chunk_s * saved, prefix_s)


CANDIDATES = st.one_of(
    st.builds(decode, st.integers(1, 4000), st.integers(0, LANDED + 2)),
    st.builds(
        flying_prompt,
        st.integers(2, 4000),
        st.integers(0, 3000),
        st.integers(0, 300),
        st.integers(0, 2),
    ),
)
COSTS = st.builds(
    cost_model,
    st.sampled_from([0.0, 1e-9, 1e-6]),
    st.sampled_from([0.0, 1e-6, 1e-4]),
    st.sampled_from([0.0, 1e-3, 1.0]),
    st.floats(0, 1),
    st.sampled_from([0.0, 1e-7]),
)


@given(st.lists(CANDIDATES, max_size=30), st.integers(2, 8), st.integers(30, 600), st.integers(0, 2), COSTS)
def test_every_microbatch_can_be_run(
    candidates: list[MicrobatchCandidate], stages: int, tokens: int, waiting: int, cost: CostModel
) -> None:
    seen = view(stages, candidates, tokens, waiting, full=waiting > 1)
    share = lookahead(lambda: cost)(seen)
    assert share == lookahead(lambda: cost)(seen)
    assert len({i for i, _ in share}) == len(share)
    assert sum(n for _, n in share) <= tokens
    ready, computes = 0, False
    rows = max(1, (1 << (tokens - 1).bit_length()) // 32)
    for index, c in enumerate(candidates):
        left = c.token_count - c.dispatched_tokens
        ready += left > 0
        computes |= left > 0 and c.token_count - c.computed_tokens > 1
        n = dict(share).get(index, 0)
        assert 0 <= n <= left
        # A chunk may be smaller only if the batch lacks room, of which rounding leaves less than one unit.
        assert n in (0, left) or n >= MIN_CHUNK_TOKENS or tokens - sum(m for _, m in share) < rows
    assert bool(share) == bool(ready)
    prompt_tokens = sum(n for i, n in share if candidates[i].token_count - candidates[i].computed_tokens > 1)
    assert prompt_tokens or not computes or len(share) == tokens  # no prompt is delayed only for the sake of decodes
