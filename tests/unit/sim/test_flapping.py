"""Under steady load the number of serving instances hardly changes, and does not oscillate."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from services.planner.core.sizing import SizingRules
from sim.clients import Arrival
from sim.world import World
from tests.support.simulated import options

_SETTLES_S, _SPAN_S = 80.0, 200.0  # half of the instances leave, but only after a minute


def steady(per_s: float, seed: int) -> World:
    """Four instances; Poisson arrivals of prompts of 200 to 1,500 tokens, answers of 40 to 300."""
    rng, at_s, arrivals = random.Random(seed), 0.0, list[Arrival]()
    while at_s < _SPAN_S:
        arrivals.append(Arrival(at_s, rng.randint(200, 1500), rng.randint(40, 300)))
        at_s += rng.expovariate(per_s)
    made = options("drop", cluster="4xA100-40G", check_every=0)
    planner = made.rules.planner
    transitions = replace(planner.transitions, sizing=SizingRules(parks=True))
    return World(replace(made, rules=replace(made.rules, planner=replace(planner, transitions=transitions))), arrivals)


@pytest.mark.rotating(2)
@pytest.mark.parametrize(
    "per_s", [1.5, 4.5, *(pytest.param(per_s, marks=pytest.mark.slow) for per_s in (0.5, 3.0, 6.0))]
)
def test_steady_load_is_served_by_a_steady_number(per_s: float) -> None:
    run = steady(per_s, round(10 * per_s)).run()
    counts = [sample.on_count for sample in run.samples if _SETTLES_S <= sample.at_s <= _SPAN_S]
    changes = sum(one != other for one, other in pairwise(counts))
    assert changes <= (_SPAN_S - _SETTLES_S) / 60.0, f"{counts}"
