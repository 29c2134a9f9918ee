"""Least squares with non-negative coefficients: the active set method of Lawson and Hanson (1974, chapter 23)."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_TOLERANCE = 1e-10
_ROUNDS_PER_COLUMN = 10


def non_negative_least_squares(rows: Floats, targets: Floats) -> Floats:
    """Return the x >= 0 with the smallest |rows @ x - targets|. Zero columns get 0.

    The number of rounds is limited. If the limit is reached, which only rounding can cause, the best x so far is
    returned.
    """
    scales = np.sqrt(np.square(rows).sum(axis=0))
    used = np.flatnonzero(scales > 0)
    solution = np.zeros(rows.shape[1])
    if len(used):
        scaled = rows[:, used] / scales[used]
        # Normal equations, because there are few columns of norm 1 and possibly many rows.
        solution[used] = _solve(scaled.T @ scaled, scaled.T @ targets) / scales[used]
    return solution


def _solve(gram: Floats, moments: Floats) -> Floats:
    count = len(moments)
    solution, passive = np.zeros(count), np.zeros(count, dtype=bool)
    tolerance = _TOLERANCE * max(1.0, float(np.abs(moments).max()))
    for _ in range(_ROUNDS_PER_COLUMN * count):
        gradient = moments - gram @ solution
        gradient[passive] = -np.inf
        entering = int(np.argmax(gradient))
        if gradient[entering] <= tolerance:
            break
        passive[entering] = True
        solution = _descend(gram, moments, solution, passive)
    return solution


def _descend(gram: Floats, moments: Floats, solution: Floats, passive: NDArray[np.bool_]) -> Floats:
    """Return the optimum over the passive columns, after removing columns that would become negative. Updates
    `passive`.
    """
    while passive.any():
        wanted = np.zeros_like(solution)
        wanted[passive] = np.linalg.lstsq(gram[np.ix_(passive, passive)], moments[passive], rcond=None)[0]
        blocking = passive & (wanted <= 0)
        if not blocking.any():
            return wanted
        steps = solution[blocking] / np.maximum(solution[blocking] - wanted[blocking], np.finfo(np.float64).tiny)
        step = float(steps.min())
        solution = np.maximum(solution + step * (wanted - solution), 0.0)
        leaving = blocking & (solution <= _TOLERANCE)
        leaving[np.flatnonzero(blocking)[int(np.argmin(steps))]] = True  # ensures progress despite rounding
        passive &= ~leaving
        solution[~passive] = 0.0
    return np.zeros_like(solution)
