import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ballast.common.errors import InvariantViolation
from ballast.common.sampling import Grammar, GrammarKind, SamplingParams
from ballast.service.grammar import Grammars
from services.worker.core.batch import NewSequence
from services.worker.engine.native.library import Kernels, RowParameters, native_kernels
from services.worker.engine.random_numbers import uniforms
from services.worker.engine.sampler import Sampled, Sampler, SampleRow, draw, keep_best, keep_best_at_once
from tests.support.engine import KERNELS, NEEDS_NATIVE
from tools.model.tokenizer import train_tokenizer

VOCAB = 300
EOS = 2


@pytest.fixture(params=KERNELS, autouse=True)
def kernels(request: pytest.FixtureRequest) -> str:
    """Sets the kernels that the test's samplers use. Returns their name."""
    global _kernels
    _kernels = native_kernels() if request.param == "native" else None
    return request.param


_kernels: Kernels | None = None


def sampler() -> Sampler:
    return Sampler(VOCAB, [EOS], torch.device("cpu"), kernels=_kernels)


def logits(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def once(
    sampling: SamplingParams,
    row_V: torch.Tensor,
    *,
    prompt: tuple[int, ...] = (5, 6),
    output: tuple[int, ...] = (),
) -> Sampled:
    chosen = sampler()
    chosen.add(NewSequence(1, prompt, output, sampling))
    return chosen.sample([SampleRow(1, len(prompt) + len(output))], row_V[None].clone())


def kept(sampling: SamplingParams, row_V: torch.Tensor) -> set[int]:
    """Tokens that can be drawn: those reached by a fine sweep of the random number over [0, 1)."""
    sweep = np.linspace(0, 1, 4001, endpoint=False)
    return set(drawn_from(row_V.double().expand(len(sweep), -1), [sampling] * len(sweep), sweep))


def drawn_from(logits_RV: torch.Tensor, given: list[SamplingParams], numbers: np.ndarray) -> list[int]:
    """Tokens drawn with the test's kernels. `numbers`: the rows' random numbers."""
    if _kernels is None:
        return draw(logits_RV.double().clone(), given, numbers)
    return at_once(_kernels, logits_RV.contiguous(), given, numbers)


def at_once(native: Kernels, logits_RV: torch.Tensor, given: list[SamplingParams], numbers: np.ndarray) -> list[int]:
    parameters = RowParameters(
        np.array([s.temperature for s in given]),
        np.array([s.top_k for s in given], np.int64),
        np.array([s.top_p for s in given]),
        np.array([s.min_p for s in given]),
        numbers,
    )
    return native.sample(logits_RV, parameters).tolist()


def most_probable(row_V: torch.Tensor, count: int) -> set[int]:
    return set(row_V.topk(count).indices.tolist())


def test_greedy_takes_the_largest_logit() -> None:
    row = logits(1)[0]
    assert once(SamplingParams(temperature=0.0), row).token_ids == (int(row.argmax()),)


def test_logits_in_bfloat16_are_sampled_like_wide_ones() -> None:
    """`transformers` returns logits in the dtype of the model."""
    logits_RV = torch.full((3, VOCAB), -1.0, dtype=torch.bfloat16)
    logits_RV[range(3), [5, 7, 9]] = 20.0
    logits_RV[1, 8] = 20.0
    made = sampler()
    for i, bias in enumerate(({}, {8: 0.01}, {})):  # bfloat16 does not distinguish 20.01 from 20
        sampling = SamplingParams(temperature=0.0, logit_bias=bias, logprobs=1 if i == 2 else None)
        made.add(NewSequence(i, (1,), (), sampling))
    sampled = made.sample([SampleRow(i, 1) for i in range(3)], logits_RV)
    assert sampled.token_ids == (5, 8, 9)
    assert (found := sampled.logprobs[2]) is not None
    assert found.logprob == pytest.approx(0.0, abs=1e-6)


def test_top_k_keeps_k() -> None:
    row = logits(2)[0] / 10
    assert kept(SamplingParams(top_k=7), row) == most_probable(row, 7)


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    row = logits(3)[0]
    probabilities = torch.softmax(row.double(), -1).sort(descending=True).values.cumsum(-1)
    count = int((probabilities < 0.8).sum()) + 1
    assert count > 3
    assert kept(SamplingParams(top_p=0.8), row) == most_probable(row, count)


def test_top_p_beyond_the_first_look_sorts_everything() -> None:
    row = torch.zeros(VOCAB)
    row[::2] += 1e-3
    assert kept(SamplingParams(top_p=0.99), row) == set(range(VOCAB))  # equal logits at the boundary are kept
    assert kept(SamplingParams(top_p=0.3), row) == set(range(0, VOCAB, 2))


def test_top_p_applies_after_top_k() -> None:
    row = torch.full((VOCAB,), -50.0)
    row[10:14] = torch.tensor([4.0, 3.0, 2.0, 1.0]).exp().log()
    # Of the best two alone, the first has 73 %.
    assert kept(SamplingParams(top_k=2, top_p=0.7), row) == {10}
    assert kept(SamplingParams(top_k=2, top_p=0.74), row) == {10, 11}


def test_min_p_is_relative_to_the_best() -> None:
    row = torch.full((VOCAB,), -math.inf)
    row[:4] = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert kept(SamplingParams(min_p=0.25), row) == {0, 1, 2}
    assert kept(SamplingParams(min_p=0.25, temperature=0.5), row) == {0, 1}  # applies after the temperature


def test_filtering_all_rows_at_once_equals_filtering_each_row() -> None:
    """The results must be equal bit for bit. Rows are processed one by one only if the first look does not suffice."""
    choice = random.Random(5)
    for seed in range(60):
        size, rows = choice.choice([5, 200, 300, 1000, 5000]), choice.choice([1, 2, 8, 17])
        logits_RV = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        logits_RV = (logits_RV * choice.choice([0.01, 1, 3, 10]) * 4).round() / 4
        wide = [0, 1, 7, 50, 256, 257, 400, size - 1, size]
        given = [
            SamplingParams(top_k=choice.choice(wide), top_p=choice.choice([1.0, 0.1, 0.5, 0.99])) for _ in range(rows)
        ]
        expected_RV = logits_RV.clone()
        for row_V, s in zip(expected_RV, given, strict=True):
            keep_best(row_V, s.top_k, s.top_p)
        for i in keep_best_at_once(logits_RV, given):
            keep_best(logits_RV[i], given[i].top_k, given[i].top_p)
        assert torch.equal(logits_RV, expected_RV)
    peaked_RV = torch.arange(5000, dtype=torch.float64).expand(8, -1).clone()
    assert keep_best_at_once(peaked_RV, [SamplingParams(top_k=50, top_p=0.9)] * 8) == []


def test_frequencies_follow_the_probabilities() -> None:
    row = torch.full((VOCAB,), -math.inf)
    row[[3, 50, 299]] = torch.tensor([0.6, 0.3, 0.1]).log()
    count = 20_000
    numbers = uniforms(np.full(count, 9), np.arange(count))
    drawn = drawn_from(row.double().expand(count, -1), [SamplingParams()] * count, numbers)
    shares = np.bincount(drawn, minlength=VOCAB) / count
    assert shares[[3, 50, 299]] == pytest.approx([0.6, 0.3, 0.1], abs=0.015)
    assert shares.sum() == pytest.approx(shares[[3, 50, 299]].sum())


def test_a_row_gives_the_same_token_in_any_batch() -> None:
    params = [
        SamplingParams(seed=1, temperature=0.7, top_p=0.9),
        SamplingParams(seed=2, top_k=5, repetition_penalty=1.3),
        SamplingParams(temperature=0.0),
        SamplingParams(seed=3, min_p=0.1, presence_penalty=0.5, logprobs=2),
        SamplingParams(seed=4),
    ] * 8
    rows_RV = logits(4, len(params))
    together = sampler()
    for i, sampling in enumerate(params):
        together.add(NewSequence(i, (i, 5), (), sampling))
    batch = together.sample([SampleRow(i, 2) for i in range(len(params))], rows_RV.clone())
    alone = [once(sampling, rows_RV[i], prompt=(i, 5)) for i, sampling in enumerate(params)]
    assert batch.token_ids == tuple(sampled.token_ids[0] for sampled in alone)
    assert batch.logprobs == tuple(sampled.logprobs[0] for sampled in alone)
    assert len(set(batch.token_ids)) > 10


def test_seed_and_position_decide() -> None:
    row = logits(5)[0] / 10
    drawn = {
        (seed, position): once(SamplingParams(seed=seed), row, prompt=(5,) * position).token_ids
        for seed in range(4)
        for position in range(1, 5)
    }
    assert len(set(drawn.values())) > 8
    assert once(SamplingParams(seed=2), row, prompt=(9, 9, 9)).token_ids == drawn[2, 3]
    assert once(SamplingParams(seed=2), row, prompt=(9,), output=(1, 1)).token_ids == drawn[2, 3]  # resumed


def test_repetition_penalty_counts_prompt_and_output() -> None:
    row = torch.zeros(VOCAB)
    row[[10, 11, 12]] = torch.tensor([4.0, 3.9, 3.8])
    sampling = SamplingParams(temperature=0.0, repetition_penalty=1.2)
    assert once(sampling, row).token_ids == (10,)
    assert once(sampling, row, prompt=(10,)).token_ids == (11,)
    assert once(sampling, row, prompt=(10,), output=(11,)).token_ids == (12,)
    negative = torch.full((VOCAB,), -5.0)
    negative[10] = -4.5
    assert once(sampling, negative, prompt=(10,)).token_ids != (10,)  # a negative logit is multiplied


def test_presence_and_frequency_penalties_count_the_output_only() -> None:
    row = torch.zeros(VOCAB)
    row[[10, 11]] = torch.tensor([2.0, 1.0])
    presence = SamplingParams(temperature=0.0, presence_penalty=1.5)
    frequency = SamplingParams(temperature=0.0, frequency_penalty=0.4)
    assert once(presence, row, prompt=(10, 10)).token_ids == (10,)
    assert once(presence, row, output=(10,)).token_ids == (11,)
    assert once(frequency, row, output=(10, 10)).token_ids == (10,)
    assert once(frequency, row, output=(10, 10, 10)).token_ids == (11,)


def test_history_grows_with_sampled_tokens() -> None:
    row = torch.zeros(1, VOCAB)
    row[0, [10, 11, 12]] = torch.tensor([3.0, 2.5, 2.4])
    chosen = sampler()
    chosen.add(NewSequence(1, (5,), (), SamplingParams(temperature=0.0, presence_penalty=1.0)))
    tokens = [chosen.sample([SampleRow(1, 1 + i)], row.clone()).token_ids[0] for i in range(4)]
    assert tokens == [10, 11, 12, 10]


def test_min_tokens_excludes_end_tokens() -> None:
    row = torch.zeros(VOCAB)
    row[[EOS, 7, 8]] = torch.tensor([9.0, 8.0, 7.0])
    sampling = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(7, 99_999))
    assert once(sampling, row).token_ids == (8,)
    assert once(sampling, row, output=(8,)).token_ids == (8,)
    assert once(sampling, row, output=(8, 8)).token_ids == (EOS,)
    ignoring = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(7,), ignore_eos=True)
    assert once(ignoring, row).token_ids == (EOS,)


def test_a_bad_word_is_never_completed() -> None:
    row = torch.zeros(VOCAB)
    row[[10, 11, 12]] = torch.tensor([9.0, 8.0, 7.0])
    bad = SamplingParams(temperature=0.0, bad_words_token_ids=((10,), (11, 11, 11)))
    assert once(bad, row).token_ids == (11,)
    assert once(bad, row, prompt=(11, 11)).token_ids == (11,)  # the prompt's tokens do not count, as in vLLM
    assert once(bad, row, output=(11,)).token_ids == (11,)
    assert once(bad, row, output=(11, 11)).token_ids == (12,)
    assert once(bad, row, output=(11, 11, 12, 11)).token_ids == (11,)
    chosen = sampler()
    chosen.add(NewSequence(1, (5,), (), bad))
    tokens = [chosen.sample([SampleRow(1, 1 + i)], row[None].clone()).token_ids[0] for i in range(6)]
    assert tokens == [11, 11, 12, 11, 11, 12]


def test_an_answer_consists_of_allowed_tokens_only() -> None:
    row = logits(8)[0]
    allowed = tuple(range(3, VOCAB, 17))
    tokens = {
        once(SamplingParams(seed=i, temperature=9.0, allowed_token_ids=allowed), row).token_ids[0] for i in range(99)
    }
    assert len(tokens) > 9
    assert tokens <= set(allowed)
    best = max(allowed, key=lambda token: float(row[token]))
    sampling = SamplingParams(temperature=0.0, allowed_token_ids=(*allowed, 99_999), bad_words_token_ids=((best,),))
    second = max(set(allowed) - {best}, key=lambda token: float(row[token]))
    assert once(sampling, row).token_ids == (second,)


@pytest.mark.parametrize("given", [{"allowed_token_ids": (7,)}, {"allowed_token_ids": (EOS,), "min_tokens": 1}])
def test_a_sequence_without_allowed_tokens_fails(given: dict[str, Any]) -> None:
    sampling = SamplingParams(temperature=0.0, bad_words_token_ids=((7,), (8, 9)), **given)
    [(row, why)] = once(sampling, logits(9)[0]).errors
    assert row == 0
    assert why.startswith("no token can follow here")


def test_logprobs_are_those_of_the_raw_logits() -> None:
    row = logits(6)[0]
    sampling = SamplingParams(seed=1, temperature=0.3, top_k=3, repetition_penalty=2.0, logprobs=4)
    sampled = once(sampling, row, prompt=(int(row.argmax()),))
    expected = torch.log_softmax(row.double(), -1)
    (logprobs,) = sampled.logprobs
    assert logprobs is not None
    assert logprobs.token_id == sampled.token_ids[0]
    assert logprobs.logprob == pytest.approx(float(expected[logprobs.token_id]))
    assert [token for token, _ in logprobs.top] == expected.topk(4).indices.tolist()
    assert [value for _, value in logprobs.top] == pytest.approx(expected.topk(4).values.tolist())


def test_logprobs_zero_gives_the_chosen_token_alone() -> None:
    (logprobs,) = once(SamplingParams(temperature=0.0, logprobs=0), logits(7)[0]).logprobs
    assert logprobs is not None
    assert logprobs.top == ()


def test_caller_errors_are_named() -> None:
    chosen = sampler()
    chosen.add(NewSequence(1, (5,), (), SamplingParams(temperature=0.0)))
    with pytest.raises(InvariantViolation, match="sequence 1 is added twice"):
        chosen.add(NewSequence(1, (5,), (), SamplingParams(temperature=0.0)))
    with pytest.raises(InvariantViolation, match=r"sequence 2 .* without a seed"):
        chosen.add(NewSequence(2, (5,), (), SamplingParams()))
    chosen.remove(99)
    chosen.remove(1)
    assert chosen.sequence_ids == ()


@NEEDS_NATIVE
@pytest.mark.parametrize("vocabulary", [7, 300, 32_001, 128_256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_compiled_draws_are_those_of_torch(vocabulary: int, dtype: torch.dtype) -> None:
    """Compares thousands of draws from flat and peaked rows, with every filter and instruction set."""
    native = native_kernels()
    assert native is not None
    rng, best = np.random.default_rng(vocabulary), native.isa
    count = 4000 if vocabulary < 1000 else 300 if vocabulary < 100_000 else 80
    torch.manual_seed(vocabulary)
    logits_RV = torch.randn(count, vocabulary, dtype=dtype) * torch.rand(count, 1, dtype=dtype) * 8
    logits_RV[::5] = logits_RV[::5].round()  # many equal logits
    logits_RV[1::7, ::3] = -math.inf
    given = [
        SamplingParams(
            temperature=rng.choice([0.3, 0.8, 1.0, 1.7]),
            top_k=int(rng.choice([0, 0, 1, 5, 50, 1000])),
            top_p=float(rng.choice([1.0, 1.0, 0.999, 0.95, 0.5, 1e-3])),
            min_p=float(rng.choice([0.0, 0.0, 0.05, 1.0])),
        )
        for _ in range(count)
    ]
    numbers = rng.random(count)
    numbers[:3] = 0.0
    expected = draw(logits_RV.double().clone(), given, numbers)
    try:
        for isa in native.isas:
            native.choose_isa(isa)
            assert at_once(native, logits_RV, given, numbers) == expected
            greedy = at_once(native, logits_RV, [SamplingParams(temperature=0.0)] * count, numbers)
            assert greedy == logits_RV.argmax(-1).tolist()
    finally:
        native.choose_isa(best)


@NEEDS_NATIVE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_nan_logits_give_some_token(value: float, dtype: torch.dtype) -> None:
    native = native_kernels()
    assert native is not None
    given = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_p=0.9),
        SamplingParams(temperature=1.0, top_k=3),
        SamplingParams(temperature=1.0, top_k=290),
        SamplingParams(temperature=1.0, min_p=0.1),
        SamplingParams(temperature=1.0, top_p=0.5, top_k=5),
    ]
    for broken in (slice(0, VOCAB), slice(3, 4), slice(10, VOCAB)):
        logits_RV = torch.zeros(len(given), VOCAB, dtype=dtype)
        logits_RV[:, broken] = value
        assert all(0 <= token < VOCAB for token in at_once(native, logits_RV, given, np.full(len(given), 0.7)))


def test_a_failing_grammar_is_an_error_of_its_row_alone(tmp_path: Path) -> None:
    """Without an error, the matcher would allow the answer to end as if it were complete."""
    file = tmp_path / "tokenizer.json"
    train_tokenizer(VOCAB, qwen=False).save(str(file))
    made = Sampler(VOCAB, [EOS], torch.device("cpu"), Grammars(file, VOCAB, [EOS]), _kernels)
    deep = "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(60)) + '\nr60: "a"'
    texts = (Grammar(GrammarKind.LARK, 'start: "a" "b" "c"'), Grammar(GrammarKind.LARK, deep))
    gone = Grammar(GrammarKind.REGEX, "(")
    for number, grammar in enumerate((*texts, gone, None)):
        made.add(NewSequence(number, (5, 6), (), SamplingParams(temperature=0.0, grammar=grammar)))
    sampled = made.sample([SampleRow(number, 2) for number in range(4)], logits(1, 4))
    why = dict(sampled.errors)
    assert set(why) == {1, 2}
    assert "Too many items" in why[1]
    assert "unclosed group" in why[2]
    ended = made.sample([SampleRow(0, 3), SampleRow(1, 3)], logits(2, 2))
    assert [row for row, _ in ended.errors] == [1]
