"""Long requests alongside ordinary traffic, on four GPUs in virtual time."""

import itertools
import random
from dataclasses import replace

from sim.clients import Arrival
from sim.hardware import find_model
from sim.results import Outcome, RequestRecord
from sim.world import World
from tests.support.simulated import options

LONG_TOKENS = 70_000  # one L4 holds 52,000 tokens of Llama-3.1-8B
UNTIL_S = 150.0


def ordinary() -> list[Arrival]:
    rng, at_s, arrivals = random.Random(5), 0.0, list[Arrival]()
    while at_s < UNTIL_S:
        arrivals.append(Arrival(at_s, rng.randint(50, 800), rng.randint(20, 200)))
        at_s += rng.expovariate(1.5)
    return arrivals


def world(long_count: int) -> World:
    made = options("drop", cluster="4xL4", seed=1, check_every=200)
    arrivals = [*ordinary(), *(Arrival(20.0 + 0.001 * i, LONG_TOKENS, 8) for i in range(long_count))]
    arrivals.sort(key=lambda arrival: arrival.at_s)
    return World(replace(made, model=find_model("Llama-3.1-8B")), arrivals)


def p99_s(records: list[RequestRecord]) -> float:
    waits = sorted(one.token_times_s[0] - one.arrival_s for one in records if one.input_tokens < LONG_TOKENS)
    return waits[len(waits) * 99 // 100]


def test_ten_at_once_have_one_group_in_order_and_the_others_hardly_wait() -> None:
    alone = world(0).run()
    beside = world(10)
    run = beside.run()
    assert {record.outcome for record in run.records} == {Outcome.FINISHED}
    first_s = [record.token_times_s[0] for record in run.records if record.input_tokens == LONG_TOKENS]
    assert first_s == sorted(first_s)
    assert min(later - earlier for earlier, later in itertools.pairwise(first_s)) > 5.0, "one after another"
    drops = [record for record in beside.planner.records if record.by == "long request"]
    assert len(drops) == 1
    assert p99_s(list(run.records)) <= 1.5 * p99_s(list(alone.records))
