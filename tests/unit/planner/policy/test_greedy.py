from collections.abc import Sequence

from services.planner.policy.cost import factors
from services.planner.policy.greedy import figure6, memory_greedy
from services.planner.policy.units import Units


def units(*stages: int, max_stages: int = 100) -> Units:
    weights = [1000 * s for s in stages]
    return Units(list(stages), weights, factors(sum(stages)), max_stages)


def anything(members: Sequence[int]) -> bool:
    return len(members) > 0


def sizes(of: Units, partition: list[list[int]]) -> list[int]:
    return sorted(sum(of.stages[i] for i in members) for members in partition)


def test_the_two_smallest_groups_are_merged_first() -> None:
    three = units(1, 2, 3)
    assert sorted(map(sorted, figure6(three, 1, anything))) == [[0, 1], [2]]


def test_pairs_come_before_fours() -> None:
    eight = units(*[1] * 8)
    assert sizes(eight, figure6(eight, 4, anything)) == [2, 2, 2, 2]
    assert sizes(eight, figure6(eight, 5, anything)) == [2, 2, 4]


def test_ties_go_to_the_lower_unit() -> None:
    four = units(1, 1, 1, 1)
    assert sorted(map(sorted, figure6(four, 1, anything))) == [[0, 1], [2], [3]]


def test_it_ends_with_one_group() -> None:
    three = units(1, 1, 1)
    assert sizes(three, figure6(three, 99, anything)) == [3]


def test_no_group_has_more_stages_than_layers() -> None:
    four = units(1, 1, 1, 1, max_stages=3)
    assert sizes(four, figure6(four, 99, anything)) == [2, 2]


def test_a_group_may_have_as_many_stages_as_there_are_layers() -> None:
    two = units(1, 2, max_stages=3)
    assert sizes(two, figure6(two, 1, anything)) == [3]


def test_a_pair_that_cannot_be_split_is_passed_over() -> None:
    four = units(1, 1, 1, 1)
    merged = figure6(four, 2, lambda members: not {0, 1} <= set(members))
    assert sorted(map(sorted, merged)) == [[0, 2], [1, 3]]


def test_units_that_fit_nobody_stay_alone() -> None:
    three = units(1, 1, 1)
    assert figure6(three, 2, lambda members: 0 not in members) == [[0], [1, 2]]


def test_memory_greedy_grows_one_group() -> None:
    eight = units(*[1] * 8)
    assert sizes(eight, memory_greedy(eight, 4, anything)) == [1, 1, 1, 5]


def test_memory_greedy_goes_on_where_a_group_is_full() -> None:
    seven = units(*[1] * 7, max_stages=3)
    assert sizes(seven, memory_greedy(seven, 99, anything)) == [1, 3, 3]
