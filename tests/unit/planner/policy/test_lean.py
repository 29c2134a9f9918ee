"""The rules for placing and moving large requests, and the invariants of their moves."""

import random

from services.planner.policy.lean import RESERVE, HeldRequest, check, leaves, place, relieve

C = 1000


def test_a_new_request_is_placed_on_the_fullest_instance_that_keeps_its_reserve() -> None:
    instances = [HeldRequest(0, (400,)), HeldRequest(1, (600,)), HeldRequest(2, (900,))]
    assert place(200, instances, C) == 1
    assert place(330, instances, C) == 0
    assert place(600, instances, C) is None
    assert place(1000, [*instances, HeldRequest(3, ())], C) == 3


def test_a_leaving_instance_stays_if_the_others_are_full() -> None:
    instances = [HeldRequest(0, (900,)), HeldRequest(1, (100,), leaving=True)]
    assert place(200, instances, C) == 1
    assert place(50, [HeldRequest(0, (300,)), HeldRequest(1, (600,), leaving=True)], C) == 0


def test_the_emptiest_instance_leaves_if_its_requests_fit_into_the_others() -> None:
    moves = leaves([HeldRequest(0, (500, 100)), HeldRequest(1, (700,)), HeldRequest(2, (200, 100))], C)
    assert moves is not None
    assert {(move.amount, move.source, move.target) for move in moves} == {(200, 2, 1), (100, 2, 0)}
    assert leaves([HeldRequest(0, (900,)), HeldRequest(1, (200,))], C) is None
    assert leaves([HeldRequest(0, (100,))], C) is None


def test_a_nearly_full_instance_migrates_its_smallest_request() -> None:
    (move,) = relieve([HeldRequest(0, (700, 290)), HeldRequest(1, (300,))], C)
    assert (move.amount, move.source, move.target) == (290, 0, 1)
    assert relieve([HeldRequest(0, (700, 200)), HeldRequest(1, (300,))], C) == []
    assert relieve([HeldRequest(0, (990,)), HeldRequest(1, (300,))], C) == []


def test_moves_of_a_thousand_random_clusters_keep_the_invariants() -> None:
    for seed in range(1000):
        rng = random.Random(seed)
        instances: list[HeldRequest] = []
        for number in range(rng.randint(1, 12)):
            amounts: list[int] = []
            while rng.random() < 0.8 and sum(amounts) < C:
                amounts.append(rng.randint(1, max(1, C - sum(amounts))))
            instances.append(HeldRequest(number, tuple(amounts), leaving=rng.random() < 0.2))
        for moves in (relieve(instances, C), leaves(instances, C) or []):
            assert check(instances, moves, C) == [], seed
        amount = rng.randint(1, C)
        chosen = place(amount, instances, C)
        if chosen is not None and instances[chosen].amounts:
            assert instances[chosen].used + amount <= C * (1 - RESERVE), seed
