from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from services.worker.policy.preemption import VictimView, choose_victim, claimed, outweighs


def view(rank: int, arrival: int, caller: int = 0, blocks: int = 3) -> VictimView:
    return VictimView(rank, (0.5, arrival), reserved_block_count=blocks, computed_tokens=40, caller=caller)


Many = list[tuple[int, int, int]]
MANY = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(1, 9)), min_size=2, max_size=12)


def views_of(many: Many) -> list[VictimView]:
    """Views with the given rank, caller and block count, in order of arrival."""
    return [view(rank, arrival, caller, blocks) for arrival, (rank, caller, blocks) in enumerate(many)]


def test_the_lowest_class_is_preempted_first() -> None:
    assert choose_victim([view(0, 9), view(2, 1), view(1, 5)]) == 1


def test_in_a_class_the_latest_arrival_is_preempted() -> None:
    assert choose_victim([view(1, 3), view(1, 8), view(1, 5)]) == 1


def test_the_latest_is_spared_if_it_would_lose_more_than_all_others() -> None:
    tokens = [40, 30, 20, 91]
    views = [replace(view(1, arrival), computed_tokens=count) for arrival, count in enumerate(tokens)]
    assert choose_victim(views) == 2
    assert choose_victim([*views[:3], replace(views[3], computed_tokens=90)]) == 3
    assert choose_victim([views[0], views[3]]) == 1, "the oldest must never be preempted"


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 99)), min_size=2, max_size=9, unique=True))
def test_the_first_in_order_of_service_is_never_the_victim(orders: list[tuple[int, int]]) -> None:
    assert orders[choose_victim([view(*order) for order in orders])] != min(orders)


def test_a_caller_with_few_blocks_keeps_them_while_another_has_many() -> None:
    flood = [view(1, arrival, caller=1) for arrival in range(5)]
    assert choose_victim([*flood, view(1, 9, caller=2)]) == 4
    assert choose_victim([view(1, 1, caller=1), view(1, 9, caller=2)]) == 1, "neither caller holds much more"


@given(MANY)
def test_the_caller_of_the_first_in_order_of_service_is_never_the_victim(many: Many) -> None:
    views = views_of(many)
    first = min(range(len(views)), key=lambda i: (views[i].rank, views[i].arrival))
    assert choose_victim(views) != first
    assert all(first not in claimed(views, caller, rank=0, need_block_count=1) for caller in range(5))


@given(MANY, st.integers(0, 3), st.integers(0, 2), st.integers(1, 9))
def test_claimed_blocks_cannot_be_claimed_back(many: Many, caller: int, rank: int, need: int) -> None:
    views = views_of(many)
    found = claimed(views, caller, rank, need)
    left = [one for i, one in enumerate(views) if i not in found]
    assert all(views[i].rank >= rank and views[i].caller != caller for i in found)
    for victim in (views[i] for i in found):
        after = [*left, view(rank, 99, caller, need)]
        assert all(
            after[i].caller != caller for i in claimed(after, victim.caller, victim.rank, victim.reserved_block_count)
        )


def test_a_claim_leaves_the_other_caller_twice_as_much_as_it_gains() -> None:
    flood = [view(1, arrival, caller=1) for arrival in range(6)]
    assert claimed(flood, 2, rank=1, need_block_count=3) == [5, 4, 3, 2]
    assert claimed(flood, 2, rank=2, need_block_count=3) == [], "no sequence of a better class"
    assert claimed(flood, 1, rank=1, need_block_count=3) == []
    assert not outweighs(5, 3)
    assert outweighs(6, 3)
