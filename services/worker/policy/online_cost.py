"""Keeps a stage's cost model up to date by refitting it to recent steps.

The last steps of each batch size (powers of two of its tokens) are stored, so that data on prefills survives long
periods with decodes only.
"""

import math
from collections import deque
from collections.abc import Iterable

import numpy as np

from ballast.common.cost import Chunk, CostModel
from ballast.common.errors import InvariantViolation
from services.worker.policy.cost_fit import (
    StageCosts,
    StageShape,
    coefficients_of,
    cost_of,
    fit_knee,
    relative_fit,
    terms_of,
    with_knee,
)
from services.worker.policy.least_squares import Floats

STEPS_PER_SIZE = 32
_SIZES = 16  # batch sizes with stored steps; the last one has all batches from 2 ** 15 tokens on
_REFIT_STEPS = 16
# Minimum steps and batch sizes for a first fit without a profile, so that it covers different batches.
_LEAST_STEPS, _LEAST_SIZES = 32, 3
_KNEE_REFITS = 8  # refits between two searches for the knee, each of which takes as long as six refits
# Fits are regularised towards the initial model; each of these pseudo-samples counts as one step.
_ANCHORS = [
    *[(Chunk(prefix, count),) for prefix in (0, 512) for count in (1, 16, 128, 512)],
    (Chunk(256, 1),) * 16,
]
_ANCHOR_TERMS: Floats = np.array([terms_of(chunks) for chunks in _ANCHORS])


class OnlineCost:
    """The cost model of the stage that this worker executes. Used by one thread.

    The mean relative error of `current` on the stored steps is never larger than the profile's.
    """

    def __init__(self, profile: StageCosts | None = None) -> None:
        self._profile = profile
        self._shape: StageShape | None = None
        self._start: CostModel | None = None  # model of this shape, from the profile or the last fit
        self._model: CostModel | None = None
        self._recent: list[deque[tuple[tuple[float, ...], float]]] = []
        self._new_steps = 0
        self.refits_total = 0

    def current(self) -> CostModel | None:
        """The current model. None: there is no profile, and too few steps have been executed."""
        return self._model

    def of_layers(self, layer_count: int) -> CostModel | None:
        """Return the model of a stage of `layer_count` layers, derived from the model of the executed stage."""
        if self._model is None or self._shape is None:
            return None
        return self._model.scaled(layer_count / self._shape.layer_count)

    @property
    def step_count(self) -> int:
        """Number of stored steps."""
        return sum(len(steps) for steps in self._recent)

    def enter(self, shape: StageShape) -> None:
        """Set the stage's shape. Steps of another shape are dropped."""
        if shape == self._shape:
            return
        if self._profile is not None:
            self._start = self._profile.of(shape)
        elif self._model is not None and self._shape is not None:
            self._start = self._model.scaled(shape.layer_count / self._shape.layer_count)
        self._shape, self._model = shape, self._start
        self._recent = [deque(maxlen=STEPS_PER_SIZE) for _ in range(_SIZES)]
        self._new_steps = 0

    def record(self, chunks: Iterable[Chunk], seconds: float) -> None:
        """Record a step; call `enter` first. Every sixteenth step refits the model, which takes about 0.3 ms."""
        terms = terms_of(chunks)
        tokens = int(terms[1])
        if not tokens or not 0.0 < seconds < math.inf:
            return
        self._recent[min(tokens.bit_length(), _SIZES) - 1].append((terms, seconds))
        self._new_steps += 1
        if self._new_steps >= _REFIT_STEPS:
            self._refit()

    def _refit(self) -> None:
        self._new_steps = 0
        kept = [step for steps in self._recent for step in steps]
        rows = np.array([terms for terms, _ in kept])
        seconds = np.array([took_s for _, took_s in kept])
        candidates = [cost for cost in (self._start, self._model) if cost is not None]
        if self._start is not None:
            predicted = _seconds_of(self._start, rows)
            known = predicted > 0.0  # a fit may predict 0 for some batches
            paced = (
                self._start.scaled(float(np.median(seconds[known] / predicted[known]))) if known.any() else self._start
            )
            candidates.append(paced)
            anchors = _seconds_of(paced, _ANCHOR_TERMS)
            anchored = np.concatenate([rows, _ANCHOR_TERMS[anchors > 0.0]])
            candidates.append(self._fit(anchored, np.concatenate([seconds, anchors[anchors > 0.0]])))
        elif len(kept) >= _LEAST_STEPS and sum(bool(steps) for steps in self._recent) >= _LEAST_SIZES:
            candidates.append(self._fit(rows, seconds))
        if candidates:
            self._model = min(candidates, key=lambda cost: _error(cost, rows, seconds))
            self.refits_total += 1

    def _fit(self, rows: Floats, seconds: Floats) -> CostModel:
        if self._model is None or self.refits_total % _KNEE_REFITS == 0:
            return fit_knee(rows, seconds)
        knee_tokens = self._model.knee_tokens
        return cost_of(relative_fit(with_knee(rows, knee_tokens), seconds), knee_tokens)

    def check(self) -> None:
        """Raise InvariantViolation if too many steps are stored, or the model has invalid coefficients."""
        if self.step_count > _SIZES * STEPS_PER_SIZE:
            raise InvariantViolation(f"{self.step_count} steps are kept")
        if self._model is not None and not (np.isfinite(c := coefficients_of(self._model)) & (c >= -1e-15)).all():
            raise InvariantViolation(f"not a cost model: {self._model}")


def _seconds_of(cost: CostModel, rows: Floats) -> Floats:
    return with_knee(rows, cost.knee_tokens) @ coefficients_of(cost)


def _error(cost: CostModel, rows: Floats, seconds: Floats) -> float:
    return float(np.abs(_seconds_of(cost, rows) / seconds - 1.0).mean())
