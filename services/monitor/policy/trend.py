"""Growth rate from samples with outliers."""

from collections.abc import Reversible, Sequence
from typing import Protocol, TypeVar

# Minimum samples of a trend.
_LEAST_SAMPLES = 3

Point = tuple[float, float]  # (at_s, value)


class Timed(Protocol):
    @property
    def at_s(self) -> float: ...


Sample = TypeVar("Sample", bound=Timed)


def slope_per_s(points: Sequence[Point], *, at_quantile: float = 0.5) -> float:
    """Median (or another quantile) of the slopes between samples half the series apart, after Theil's incomplete
    method: exact for a straight line, robust to outliers, linear in the number of samples. A low quantile is a growth
    confirmed by nearly all samples. 0.0 with too few.
    """
    if len(points) < _LEAST_SAMPLES:
        return 0.0
    later = points[len(points) - len(points) // 2 :]
    slopes = sorted([(y1 - y0) / (t1 - t0) for (t0, y0), (t1, y1) in zip(points, later, strict=False) if t1 > t0])
    return slopes[int(at_quantile * (len(slopes) - 1))] if slopes else 0.0


def since(oldest_first: Reversible[Sample], since_s: float) -> list[Sample]:
    """The samples not older than `since_s`, oldest first."""
    found: list[Sample] = []
    for sample in reversed(oldest_first):
        if sample.at_s < since_s:
            break
        found.append(sample)
    found.reverse()
    return found
