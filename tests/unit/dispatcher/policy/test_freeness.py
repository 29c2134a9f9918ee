"""Properties of the routing policy."""

import math

import pytest

from services.dispatcher.policy.freeness import (
    Need,
    RoutingRules,
    WorkerView,
    freeness,
    has_place,
    runs_at_once,
)
from services.dispatcher.policy.ranking import Ranking
from tests.support.dispatcher_core import key

RULES = RoutingRules(growth_tokens=0)


def view(name: str = "a", **changes: int | bool) -> WorkerView:
    values: dict[str, int | bool] = {
        "block_tokens": 16,
        "block_count": 100,
        "used_block_count": 0,
        "waiting_block_count": 0,
        "unseen_block_count": 0,
        "running_count": 0,
        "waiting_count": 0,
        "unseen_count": 0,
        "max_running_count": 8,
        "max_waiting_count": 8,
        "draining": False,
        **changes,
    }
    return WorkerView(worker=key(name), **values)  # pyright: ignore[reportArgumentType] -- checked by the tests


def chosen(
    views: list[WorkerView], tokens: int = 16, growth: int = 0, rules: RoutingRules = RULES, *, patient: bool = False
) -> str | None:
    ranking = Ranking(rules)
    for one in views:
        ranking.update(one)
    found = ranking.choose(Need(tokens=tokens, growth_tokens=growth), may_queue_large=patient)
    return None if found is None else found.worker_id


def test_freeness_is_the_free_memory_per_running_request() -> None:
    assert freeness(view(used_block_count=20, running_count=4)) == 20.0
    assert freeness(view(used_block_count=20, running_count=0)) == 80.0


def test_waiting_demand_counts_like_used_blocks_and_may_make_freeness_negative() -> None:
    assert freeness(view(used_block_count=90, waiting_block_count=40, running_count=3)) == -10.0


def test_a_workers_reserve_is_for_new_requests_only_if_it_is_idle() -> None:
    assert chosen([view(kept_block_count=5)], tokens=100 * 16) == "a"
    assert runs_at_once(view(kept_block_count=5, used_block_count=90, running_count=1), 5)
    assert not runs_at_once(view(kept_block_count=5, used_block_count=90, running_count=1), 6)
    assert not runs_at_once(view(kept_block_count=5, unseen_block_count=90, unseen_count=1), 6)


def test_behind_a_full_queue_of_prompts_a_new_request_does_not_run_at_once() -> None:
    almost, full = (view("a", running_count=2, max_prompt_token_count=9, prompt_token_count=n) for n in (8, 9))
    assert runs_at_once(almost, 1)
    assert not runs_at_once(full, 1)
    assert chosen([full, view("b", used_block_count=98)]) == "b"


def test_a_draining_worker_is_least_free() -> None:
    assert freeness(view(draining=True)) == -math.inf
    assert not has_place(view(draining=True), RULES)


def test_the_freest_worker_wins_and_ties_go_to_the_smallest_id() -> None:
    assert chosen([view("a", used_block_count=1), view("b")]) == "b"
    assert chosen([view("b"), view("a")]) == "a"


def test_a_group_with_much_memory_does_not_attract_all_the_load() -> None:
    """A pair with ten times the blocks competes with a single instance, on which requests can or cannot grow by 64
    tokens.
    """
    rules = RoutingRules(growth_tokens=64)

    def went_to(single: WorkerView, pair_running: int) -> str | None:
        pair = view("p", block_count=1000, running_count=pair_running, max_running_count=64, instance_count=2)
        return chosen([single, pair], growth=64, rules=rules)

    enough, little = (view("s", used_block_count=n, running_count=5) for n in (80, 81))
    assert went_to(enough, pair_running=11) == "s", "5 requests on the single, 5.5 per instance of the pair"
    assert went_to(enough, pair_running=9) == "p"
    assert went_to(little, pair_running=60) == "p", "requests on the single could not grow"


@pytest.mark.parametrize("unseen", [1, 5])
def test_unreported_placements_make_a_worker_less_free(unseen: int) -> None:
    assert chosen([view("a", unseen_count=unseen, unseen_block_count=unseen), view("b")]) == "b"


def test_a_worker_where_it_runs_at_once_beats_a_freer_one_where_it_would_wait() -> None:
    waits = view("a", running_count=8, used_block_count=8)
    runs = view("b", running_count=7, used_block_count=98)
    assert freeness(waits) > freeness(runs)
    assert chosen([waits, runs]) == "b"


def test_a_full_worker_takes_only_a_short_queue() -> None:
    full = {"running_count": 8, "used_block_count": 100}
    assert chosen([view("a", **full, waiting_count=1)]) == "a"
    assert chosen([view("a", **full, waiting_count=2)]) is None
    assert not has_place(view("a", **full, waiting_count=2), RULES)


def test_room_to_grow_is_preferred_but_not_waited_for() -> None:
    nearly_full, has_room = view("a", used_block_count=99), view("b", used_block_count=98, running_count=4)
    assert chosen([nearly_full, has_room], tokens=16, growth=0) == "a"
    assert chosen([nearly_full, has_room], tokens=16, growth=16) == "b"
    assert chosen([nearly_full, has_room], tokens=16, growth=1000) == "a", "no worker has that much room"
    assert chosen([view("a")], tokens=1600, growth=1000) == "a"


def test_the_workers_bound_on_waiting_requests_holds_even_when_there_is_room() -> None:
    assert chosen([view("a", max_waiting_count=3, unseen_count=3)]) is None


def test_a_large_request_is_queued_only_when_its_patience_has_ended() -> None:
    busy = view("a", used_block_count=80, running_count=2)
    assert chosen([busy], tokens=30 * 16) is None
    assert chosen([busy], tokens=30 * 16, patient=True) == "a"
    assert chosen([busy], tokens=25 * 16) == "a"


def test_a_request_larger_than_a_worker_is_never_placed_there() -> None:
    assert chosen([view("a")], tokens=1601, patient=True) is None
    assert chosen([view("a"), view("b", block_count=200)], tokens=1601) == "b"
