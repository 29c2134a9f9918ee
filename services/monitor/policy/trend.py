"""How fast something grows, from samples of which some are outliers."""

import statistics
from collections.abc import Iterable, Sequence
from itertools import takewhile

# Fewer samples say nothing about a trend.
_LEAST_SAMPLES = 3

Point = tuple[float, float]  # (at_s, value)


def slope_per_s(points: Sequence[Point]) -> float:
    """Median of the slopes between samples half the series apart (Theil's incomplete method): exact for a straight
    line, untouched by a few outliers, and linear in the number of samples. 0.0 where there are too few."""
    if len(points) < _LEAST_SAMPLES:
        return 0.0
    later = points[len(points) - len(points) // 2 :]
    slopes = [(y1 - y0) / (t1 - t0) for (t0, y0), (t1, y1) in zip(points, later, strict=False) if t1 > t0]
    return statistics.median(slopes) if slopes else 0.0


def window(newest_first: Iterable[Point], since_s: float) -> list[Point]:
    """The points not older than `since_s`, oldest first."""
    return list(takewhile(lambda point: point[0] >= since_s, newest_first))[::-1]
