"""Slopes are exact for straight series and insensitive to outliers."""

import pytest

from services.monitor.policy.trend import slope_per_s


@pytest.mark.parametrize("count", [3, 4, 5, 10, 11])
def test_the_slope_of_a_straight_line_is_exact(count: int) -> None:
    assert slope_per_s([(0.2 * i, 7 + 3 * 0.2 * i) for i in range(count)]) == pytest.approx(3.0)


def test_uneven_sample_times_do_not_change_the_slope() -> None:
    assert slope_per_s([(t, 5 * t) for t in (0.0, 0.1, 0.5, 0.55, 1.3, 2.0)]) == pytest.approx(5.0)


@pytest.mark.parametrize("at", range(10))
def test_one_outlier_changes_nothing(at: int) -> None:
    points = [(0.2 * i, 10.0 * i) for i in range(10)]
    points[at] = (points[at][0], 1e9)
    assert slope_per_s(points) == pytest.approx(50.0)


def test_too_few_or_simultaneous_samples_are_no_trend() -> None:
    assert slope_per_s([]) == slope_per_s([(0.0, 0.0), (1.0, 100.0)]) == 0.0
    assert slope_per_s([(1.0, 0.0), (1.0, 5.0), (1.0, 9.0)]) == 0.0


def test_a_low_quantile_is_confirmed_by_nearly_all_samples() -> None:
    line = [(0.2 * i, 10.0 * i) for i in range(10)]
    step = [(0.2 * i, 0.0 if i < 7 else 100.0) for i in range(10)]
    assert slope_per_s(line, at_quantile=0.25) == pytest.approx(50.0)
    assert slope_per_s(step, at_quantile=0.25) == 0.0 < slope_per_s(step)
