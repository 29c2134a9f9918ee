"""Fits the cost model's coefficients to measured batches.

It minimises the relative error, so a decode of 10 ms counts as much as a prefill of 1 s.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from ballast.common.cost import KNEE_TOKENS, Chunk, CostModel
from services.worker.policy.least_squares import Floats, non_negative_least_squares

_LAYER_TERMS = 7
_TOKENS, _BEYOND = 1, 6  # indices into `terms_of`
KNEES = (32, 64, 128, 256, 512, 1024)  # batch tokens above which each token costs more
_NONE = (0.0, 0.0, 0.0)  # coefficients of prefix tokens, of more than one token, and of tokens beyond the knee


class StageShape(NamedTuple):
    """Shape of a stage: its number of layers, and whether it has the embedding (first), or the head and sampling
    (last).
    """

    layer_count: int
    is_first: bool
    is_last: bool


class Sample(NamedTuple):
    chunks: tuple[Chunk, ...]
    shape: StageShape
    seconds: float


class CostForm(StrEnum):
    """The terms that a cost model has."""

    EXTENDED = "extended"  # with all terms
    PAPER = "paper"  # equations 1 to 3
    TOKEN_COUNT = "token_count"  # tokens and a constant, like in schedulers without a cost model


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Components from which the cost of any stage is composed."""

    layer: CostModel
    step: CostModel  # cost per batch on every stage, regardless of its layers: preparing the batch
    first: CostModel
    last: CostModel

    def of(self, shape: StageShape) -> CostModel:
        cost = self.layer.scaled(shape.layer_count).plus(self.step)
        if shape.is_first:
            cost = cost.plus(self.first)
        return cost.plus(self.last) if shape.is_last else cost


@dataclass(frozen=True, slots=True)
class ErrorSummary:
    """Errors |predicted / measured - 1| of several batches."""

    count: int
    mean: float
    p90: float
    max: float


def terms_of(
    chunks: Iterable[Chunk], knee_tokens: int = KNEE_TOKENS
) -> tuple[float, float, float, float, float, float, float]:
    """Return the terms of a batch, which the coefficients multiply: pairs, tokens, sequences, 1, prefix tokens, 1 if
    more than one token, tokens beyond the knee.
    """
    pairs, tokens, sequences, prefixes = 0.0, 0, 0, 0
    for prefix, count in chunks:
        pairs += prefix * count + (count * count + count) / 2
        tokens += count
        prefixes += prefix
        sequences += 1
    beyond = max(0, tokens - knee_tokens)
    return pairs, float(tokens), float(sequences), 1.0, float(prefixes), float(tokens > 1), float(beyond)


def with_knee(rows: Floats, knee_tokens: int) -> Floats:
    """Return the same terms for a different knee."""
    moved = rows.copy()
    moved[:, _BEYOND] = np.maximum(0.0, rows[:, _TOKENS] - knee_tokens)
    return moved


def fit_knee(rows: Floats, seconds: Floats) -> CostModel:
    """Fit the model with the smallest mean relative error over the knees in `KNEES`."""
    found: list[tuple[float, CostModel]] = []
    for knee_tokens in KNEES:
        moved = with_knee(rows, knee_tokens)
        x = relative_fit(moved, seconds)
        found.append((float(np.abs(moved @ x / seconds - 1.0).mean()), cost_of(x, knee_tokens)))
    return min(found, key=lambda pair: pair[0])[1]


def cost_of(coefficients: Sequence[float] | Floats, knee_tokens: int = KNEE_TOKENS) -> CostModel:
    """Return the model with these coefficients of `terms_of`."""
    attention, token, sequence, batch, prefix, many, beyond = (float(value) for value in coefficients)
    knee_tokens = knee_tokens if beyond else KNEE_TOKENS  # no knee
    return CostModel(attention, token, sequence + batch, batch, prefix, many, beyond, knee_tokens)


def coefficients_of(cost: CostModel) -> Floats:
    """Return the coefficients of a model; the inverse of `cost_of`."""
    per_sequence_s = cost.chunk_s - cost.shared_s
    return np.array(
        [
            cost.attention_s,
            cost.token_s,
            per_sequence_s,
            cost.shared_s,
            cost.prefix_s,
            cost.many_s,
            cost.beyond_s,
        ]
    )


def fit_stages(samples: Sequence[Sample], form: CostForm = CostForm.EXTENDED) -> StageCosts:
    """Fit one set of coefficients to stages of all shapes. Samples of several shapes separate the components. The knee
    in `KNEES` with the smallest mean relative error is used.
    """
    seconds = np.array([sample.seconds for sample in samples])
    fits: list[tuple[float, int, Floats]] = []
    for knee_tokens in KNEES if form is CostForm.EXTENDED else (KNEE_TOKENS,):
        rows = np.array([_stage_terms(sample, knee_tokens) for sample in samples])
        rows[:, [not allowed for allowed in _ALLOWED[form]]] = 0.0
        x = relative_fit(rows, seconds)
        fits.append((float(np.abs(rows @ x / seconds - 1.0).mean()), knee_tokens, x))
    _, knee_tokens, x = min(fits, key=lambda fit: fit[0])
    layer, step, first, last = np.split(x, (_LAYER_TERMS, _LAYER_TERMS + 2, _LAYER_TERMS + 4))
    return StageCosts(
        layer=cost_of(layer, knee_tokens),
        step=cost_of((0.0, 0.0, *step, *_NONE)),
        first=cost_of((0.0, first[0], 0.0, first[1], *_NONE)),
        last=cost_of((0.0, 0.0, *last, *_NONE)),
    )


def relative_fit(rows: Floats, seconds: Floats) -> Floats:
    """Return x >= 0 with the smallest sum of squared relative errors of rows @ x."""
    return non_negative_least_squares(rows / seconds[:, None], np.ones(len(seconds)))


def errors_of(costs: StageCosts, samples: Iterable[Sample]) -> list[float]:
    """Return the relative errors of the samples: predicted / measured - 1."""
    return [costs.of(sample.shape).batch_cost_s(sample.chunks) / sample.seconds - 1.0 for sample in samples]


def summarise(errors: Sequence[float]) -> ErrorSummary:
    if not errors:
        return ErrorSummary(0, 0.0, 0.0, 0.0)
    sizes = np.abs(errors)
    return ErrorSummary(len(errors), float(sizes.mean()), float(np.quantile(sizes, 0.9)), float(sizes.max()))


def has_prefix(chunks: Iterable[Chunk]) -> bool:
    return any(chunk.prefix_tokens for chunk in chunks)


def _stage_terms(sample: Sample, knee_tokens: int) -> list[float]:
    terms = terms_of(sample.chunks, knee_tokens)
    _, tokens, sequences, one, *_ = terms
    layers, is_first, is_last = sample.shape
    row = [layers * term for term in terms]
    row += [sequences, one]
    row += [tokens * is_first, one * is_first]
    row += [sequences * is_last, one * is_last]
    return row


_ENDS = (True,) * 6  # step: sequences, batch; first: tokens, batch; last: sequences, batch
_ALLOWED = {
    # layer: pairs, tokens, sequences, batch, prefix, many, beyond
    CostForm.EXTENDED: (True,) * 7 + _ENDS,
    CostForm.PAPER: (True, True, True, True, False, False, False, *_ENDS),
    CostForm.TOKEN_COUNT: (False, True, False, True, False, False, False, False, True, True, True, False, True),
}
