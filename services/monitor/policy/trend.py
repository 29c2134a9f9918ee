"""Growth rate from samples with outliers."""

from collections.abc import Sequence

# Minimum samples of a trend.
_LEAST_SAMPLES = 3

Point = tuple[float, float]  # (at_s, value)


def slope_per_s(points: Sequence[Point], *, at_quantile: float = 0.5) -> float:
    """Return the median (or another quantile) of the slopes between samples that are half the series apart, after
    Theil's incomplete method. It is exact for a straight line, robust to outliers, and linear in the number of samples.
    A low quantile is a growth confirmed by nearly all samples. 0.0 with too few samples.
    """
    if len(points) < _LEAST_SAMPLES:
        return 0.0
    later = points[len(points) - len(points) // 2 :]
    slopes = sorted([(y1 - y0) / (t1 - t0) for (t0, y0), (t1, y1) in zip(points, later, strict=False) if t1 > t0])
    return slopes[int(at_quantile * (len(slopes) - 1))] if slopes else 0.0
