import random

import pytest

from services.planner.policy import exact
from services.planner.policy.cost import factors
from services.planner.policy.exact import cheapest, evened, improve, lower_bound
from services.planner.policy.greedy import figure6
from services.planner.policy.units import Units
from tests.support.drop_plans import least_cost


def units(stages: list[int], weights: list[int], max_stages: int = 100, exponent: float = 1.0) -> Units:
    return Units(stages, weights, [factor**exponent for factor in factors(sum(stages))], max_stages)


def test_identical_units_are_spread_evenly() -> None:
    ten = units([1] * 10, [1000] * 10)
    assert sorted(map(len, cheapest(ten, 4) or [])) == [2, 2, 3, 3]


def test_heavy_units_stand_in_short_pipelines() -> None:
    found = cheapest(units([1] * 4, [5000, 10, 5000, 10]), 3)
    assert sorted(found or []) == [[0], [1, 3], [2]]


def test_three_light_units_beat_two_pairs() -> None:
    weights = [9000, 9000, 9000, 10, 10, 10]
    found = cheapest(units([1] * 6, weights), 4)
    assert sorted(map(sorted, found or [])) == [[0], [1], [2], [3, 4, 5]]


@pytest.mark.parametrize("exponent", [1.0, 1.5, 2.0])
def test_equal_sizes_are_solved_exactly(exponent: float) -> None:
    rng = random.Random(3)
    for _ in range(40):
        count, size = rng.randint(2, 8), rng.choice([1, 1, 2])
        weights = [rng.choice([1000, 2000, rng.randint(1, 5000)]) for _ in range(count)]
        some = units([size] * count, weights, rng.choice([4, 6, 100]), exponent)
        for group_count in range(1, count + 1):
            best = least_cost(some, group_count)
            found = cheapest(some, group_count)
            assert (found is None) == (best is None)
            if found is not None and best is not None:
                assert some.cost(found) == pytest.approx(best)
                assert lower_bound(some, group_count) == pytest.approx(best)


def test_few_units_of_different_sizes_are_solved_exactly() -> None:
    rng = random.Random(4)
    for _ in range(25):
        stages = [rng.randint(1, 3) for _ in range(rng.randint(2, 7))]
        some = units(stages, [rng.randint(1, 3000) * s for s in stages], rng.choice([4, 100]))
        for group_count in range(1, len(stages) + 1):
            best = least_cost(some, group_count)
            found = cheapest(some, group_count)
            assert (found is None) == (best is None)
            if found is not None and best is not None:
                assert some.cost(found) == pytest.approx(best)
                assert lower_bound(some, group_count) <= best * (1 + 1e-9)


def test_many_units_of_different_sizes_come_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "SUBSET_LIMIT", 0)
    rng = random.Random(5)
    excess: list[float] = []
    for _ in range(40):
        stages = [rng.randint(1, 3) for _ in range(7)]
        some = units(stages, [rng.randint(500, 2000) * s for s in stages])
        group_count = rng.randint(2, 5)
        best, found = least_cost(some, group_count), cheapest(some, group_count)
        assert found is not None
        assert best is not None
        excess.append(some.cost(found) / best - 1.0)
    assert max(excess) < 0.10
    assert sum(excess) / len(excess) < 0.01


@pytest.mark.parametrize("count", [16, 32, 64])
def test_never_worse_than_figure_6(count: int) -> None:
    rng = random.Random(count)
    loads = units([1] * count, [rng.randint(1, 2000) for _ in range(count)])
    for merges in range(1, count):
        found = cheapest(loads, count - merges)
        assert found is not None
        assert loads.cost(found) <= loads.cost(figure6(loads, merges, lambda _: True))


def test_the_gap_of_figure_6_at_sixty_percent() -> None:
    for count, gap in ((32, 0.12), (64, 0.12)):
        alike = units([1] * count, [1000] * count)
        merges = round(0.6 * (count - 1))
        best = cheapest(alike, count - merges)
        assert best is not None
        assert alike.cost(figure6(alike, merges, lambda _: True)) / alike.cost(best) - 1.0 == pytest.approx(
            gap, abs=0.002
        )


def test_too_many_stages_for_the_layers() -> None:
    four = units([2, 2, 2, 2], [1000] * 4, max_stages=3)
    assert cheapest(four, 3) is None
    assert evened(four, 3) is None
    assert cheapest(units([2, 2, 1, 2], [10] * 4, max_stages=3), 3) is not None


def test_improving_keeps_every_unit_and_never_costs() -> None:
    rng = random.Random(6)
    for _ in range(30):
        stages = [rng.randint(1, 3) for _ in range(12)]
        some = units(stages, [rng.randint(1, 3000) for _ in stages], max_stages=9)
        start = [list(range(g, 12, 4)) for g in range(4)]
        if any(sum(stages[i] for i in members) > 9 for members in start):
            continue
        better = improve(some, start)
        assert sorted(unit for members in better for unit in members) == list(range(12))
        assert some.cost(better) <= some.cost(start)
        assert all(sum(stages[i] for i in members) <= 9 for members in better)
