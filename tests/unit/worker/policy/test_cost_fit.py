"""The fit recovers known coefficients, minimises the relative error, and never yields a negative coefficient."""

import random
from dataclasses import astuple, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ballast.common.cost import Chunk, CostModel
from services.worker.policy.cost_fit import (
    CostForm,
    Sample,
    StageCosts,
    StageShape,
    coefficients_of,
    cost_of,
    errors_of,
    fit_stages,
    summarise,
    terms_of,
)
from services.worker.policy.least_squares import non_negative_least_squares

WHOLE = StageShape(8, True, True)
SHAPES = (WHOLE, StageShape(4, True, False), StageShape(4, False, False), StageShape(4, False, True))
TRUE = StageCosts(
    layer=CostModel(attention_s=3e-8, token_s=7e-5, chunk_s=1.31e-3, shared_s=1.3e-3, prefix_s=3e-7),
    step=CostModel(0.0, 0.0, 2.1e-4, 2e-4),
    first=CostModel(0.0, 1e-6, 1e-5, 1e-5),
    last=CostModel(0.0, 0.0, 4e-4, 3e-4),
)


def some_chunks(rng: random.Random) -> tuple[Chunk, ...]:
    decodes = [Chunk(rng.randrange(1, 1000), 1) for _ in range(rng.choice((0, 1, 4, 20)))]
    chunks = [Chunk(rng.choice((0, 300, 900)), rng.randrange(2, 500)) for _ in range(rng.randrange(3))]
    return tuple(decodes + chunks) or (Chunk(0, 64),)


def samples_of(true: StageCosts, count: int, noise: float, seed: int = 0) -> list[Sample]:
    rng = random.Random(seed)
    samples: list[Sample] = []
    for i in range(count):
        chunks, shape = some_chunks(rng), SHAPES[i % len(SHAPES)]
        seconds = true.of(shape).batch_cost_s(chunks) * rng.uniform(1 - noise, 1 + noise)
        samples.append(Sample(chunks, shape, seconds))
    return samples


def test_known_coefficients_are_recovered_exactly() -> None:
    fitted = fit_stages(samples_of(TRUE, 200, noise=0.0))
    for part in ("layer", "step", "first", "last"):
        assert astuple(getattr(fitted, part)) == pytest.approx(astuple(getattr(TRUE, part)), rel=1e-3, abs=1e-9)


def test_noise_of_five_percent_leaves_predictions_within_two() -> None:
    fitted = fit_stages(samples_of(TRUE, 300, noise=0.05))
    held_out = summarise(errors_of(fitted, samples_of(TRUE, 200, noise=0.0, seed=1)))
    assert held_out.mean < 0.02
    assert fitted.layer.attention_s == pytest.approx(TRUE.layer.attention_s, rel=0.15)
    assert fitted.layer.token_s == pytest.approx(TRUE.layer.token_s, rel=0.1)


def test_small_batches_count_as_much_as_large_ones() -> None:
    """If the model's form cannot fit all costs, the relative errors are as small for small batches as for large
    ones.
    """
    chunks = [
        ((Chunk(0, n),), 1e-4 * n * (1.2 if n < 20 else 1.0)) for n in (1, 2, 4, 8, 16, 256, 512, 768, 1024, 1280)
    ]
    samples = [Sample(batch, StageShape(1, False, False), seconds) for batch, seconds in chunks]
    errors = errors_of(fit_stages(samples, CostForm.TOKEN_COUNT), samples)
    assert max(abs(e) for e in errors[:5]) < 0.2  # absolute least squares would ignore these
    assert max(abs(e) for e in errors) < 0.2


def test_the_papers_form_has_no_term_for_the_prefix_and_the_token_count_none_for_attention() -> None:
    samples = samples_of(TRUE, 200, noise=0.02)
    paper, tokens = fit_stages(samples, CostForm.PAPER), fit_stages(samples, CostForm.TOKEN_COUNT)
    assert paper.layer.prefix_s == 0
    assert paper.layer.attention_s > 0
    cost = tokens.of(WHOLE)
    assert (cost.attention_s, cost.prefix_s) == (0, 0)
    assert cost.chunk_s == cost.shared_s  # a constant per batch, and nothing per sequence
    means = [summarise(errors_of(costs, samples)).mean for costs in (fit_stages(samples), paper, tokens)]
    assert means == sorted(means)


def test_a_stage_is_the_sum_of_its_parts() -> None:
    chunks = (Chunk(100, 20), Chunk(0, 7))
    whole = TRUE.of(WHOLE).batch_cost_s(chunks)
    halves = TRUE.of(StageShape(5, True, False)), TRUE.of(StageShape(3, False, True))
    assert sum(half.batch_cost_s(chunks) for half in halves) == pytest.approx(
        whole + TRUE.step.batch_cost_s(chunks)  # each stage packs the batch
    )


def test_the_cost_is_the_product_of_coefficients_and_terms() -> None:
    cost = TRUE.of(WHOLE)
    chunks = some_chunks(random.Random(3))
    assert float(np.dot(coefficients_of(cost), terms_of(chunks))) == pytest.approx(cost.batch_cost_s(chunks))
    assert astuple(cost_of(coefficients_of(cost))) == pytest.approx(astuple(cost))


def test_no_errors_to_summarise() -> None:
    assert summarise([]).count == 0
    assert summarise([0.1, -0.3]).max == pytest.approx(0.3)


@given(
    arrays(np.float64, (12, 4), elements=st.floats(0, 100, width=32)),
    arrays(np.float64, 12, elements=st.floats(-100, 100, width=32)),
)
def test_least_squares_are_not_negative_and_cannot_be_improved(rows: np.ndarray, targets: np.ndarray) -> None:
    """At the optimum of a convex problem, the gradient is 0 where x > 0 and does not point inwards where x = 0."""
    x = non_negative_least_squares(rows, targets)
    assert (x >= 0).all()
    norms = np.sqrt(np.square(rows).sum(axis=0))
    gradient = (rows.T @ (rows @ x - targets)) / np.where(norms > 0, norms, 1.0)
    scale = 1e-6 * (1 + np.abs(targets).sum())
    assert (gradient >= -scale).all()
    assert (np.abs(gradient[x * norms > scale]) <= scale).all()


def test_a_negative_coefficient_is_held_at_zero() -> None:
    rows = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
    assert non_negative_least_squares(rows, np.array([3.0, 2.0, 1.0])).tolist() == pytest.approx([2.0, 0.0])


def test_errors_are_those_of_the_prediction() -> None:
    sample = Sample((Chunk(0, 10),), WHOLE, TRUE.of(WHOLE).batch_cost_s([Chunk(0, 10)]))
    assert errors_of(TRUE, [sample, sample._replace(seconds=sample.seconds / 2)]) == pytest.approx([0.0, 1.0])
    assert errors_of(replace(TRUE), [sample]) == [0.0]
