import random

import pytest

from services.planner.policy.cost import factors
from services.planner.policy.units import Units
from services.planner.policy.usable import blocks_by_size, cheapest_by_count, even_group_count, useful_sizes
from tests.support.drop_plans import model, partitions


def test_sizes_that_divide_the_layers_are_useful() -> None:
    shape = model(4)
    blocks = blocks_by_size(shape, shape.copy_bytes + 500 + 1000, 4)
    assert blocks == [0, 25, 150, 150, 400]
    assert useful_sizes(blocks) == [1, 2, 4]


def test_every_number_of_groups_is_solved_exactly() -> None:
    rng = random.Random(8)
    for _ in range(20):
        count = rng.randint(1, 7)
        weights = [rng.randint(1, 3000) for _ in range(count)]
        units = Units([1] * count, weights, factors(count), 100)
        sizes = sorted({1, *rng.sample(range(1, 8), 2)}) if rng.random() < 0.7 else [2, 3]
        found = cheapest_by_count(units, sizes)
        for group_count in range(1, count + 1):
            allowed = [
                units.cost(p)
                for p in partitions(range(count))
                if len(p) == group_count and all(len(members) in sizes for members in p)
            ]
            partition = found[group_count]
            assert (partition is None) == (not allowed)
            if partition is not None:
                assert sorted(unit for members in partition for unit in members) == list(range(count))
                assert units.cost(partition) == pytest.approx(min(allowed))


def test_even_groups_are_as_many_as_have_enough() -> None:
    rng = random.Random(9)
    for _ in range(300):
        count, deepest = rng.randint(1, 40), rng.randint(1, 8)
        blocks = [0, *sorted(rng.randint(1, 100) for _ in range(min(count, deepest)))]
        wanted = rng.randint(1, 120 * count)
        held: dict[int, int] = {}
        for groups in range(1, count + 1):
            size, larger = divmod(count, groups)
            if size + (larger > 0) < len(blocks):
                held[groups] = (groups - larger) * blocks[size] + (larger * blocks[size + 1] if larger else 0)
        enough = [groups for groups, total in held.items() if total >= wanted]
        best = max(enough) if enough else max(held, key=lambda groups: (held[groups], groups))
        assert even_group_count(blocks, count, wanted) == best
