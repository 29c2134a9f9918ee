from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from services.worker.policy.preemption import VictimView, choose_victim


def view(rank: int, arrival: int) -> VictimView:
    return VictimView(rank, (0.5, arrival), reserved_block_count=3, computed_tokens=40)


def test_the_lowest_class_gives_way_first() -> None:
    assert choose_victim([view(0, 9), view(2, 1), view(1, 5)]) == 1


def test_in_a_class_the_latest_arrival_gives_way() -> None:
    assert choose_victim([view(1, 3), view(1, 8), view(1, 5)]) == 1


def test_with_the_latest_more_is_lost_than_with_all_others() -> None:
    tokens = [40, 30, 20, 91]
    views = [replace(view(1, arrival), computed_tokens=count) for arrival, count in enumerate(tokens)]
    assert choose_victim(views) == 2
    assert choose_victim([*views[:3], replace(views[3], computed_tokens=90)]) == 3
    assert choose_victim([views[0], views[3]]) == 1, "the oldest never gives way"


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 99)), min_size=2, max_size=9, unique=True))
def test_the_first_in_order_of_service_is_never_the_victim(orders: list[tuple[int, int]]) -> None:
    assert orders[choose_victim([view(*order) for order in orders])] != min(orders)
