"""The bubble fraction of a run, from the workers' stage counters before and after it."""

import pytest

from tools.bench.stages import bubble_fraction


def test_only_the_increase_of_counters_counts() -> None:
    before = {"w0": (10.0, 90.0), "w1": (5.0, 0.0)}
    after = {"w0": (16.0, 91.0), "w1": (7.0, 1.0)}
    assert bubble_fraction(before, after) == pytest.approx(2 / 10)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, {"w0": (1.0, 0.0)}),
        ({"w0": (1.0, 0.0)}, None),
        ({"w0": (1.0, 0.0)}, {"w1": (2.0, 0.0)}),  # another worker
        ({"w0": (1.0, 0.5)}, {"w0": (1.0, 0.5)}),  # no work was done
        ({"w0": (1.0, 0.5)}, {"w0": (2.0, 0.1)}),  # the worker restarted
    ],
)
def test_readings_that_cannot_be_compared_give_none(
    before: dict[str, tuple[float, float]] | None, after: dict[str, tuple[float, float]] | None
) -> None:
    assert bubble_fraction(before, after) is None
