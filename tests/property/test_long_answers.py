"""Long answers hold KV for minutes while parameters are dropped and restored. Every simulation runs with all checks.
`BALLAST_LONG_ANSWERS=200 pytest -m slow tests/property/test_long_answers.py` runs more of them.
"""

import os
import random
from dataclasses import replace
from itertools import pairwise

import pytest

from sim.clients import Arrival
from sim.hardware import find_model
from sim.results import Outcome
from sim.world import World
from tests.support.simulated import long_answers, options

_MORE = int(os.environ.get("BALLAST_LONG_ANSWERS", "20"))


def judge(seed: int) -> None:
    wanted = replace(options(cluster="4xA100-40G", check_every=200), model=find_model("Qwen2.5-14B"))
    run = World(wanted, long_answers(seed)).run()
    assert all(record.outcome is Outcome.FINISHED for record in run.records)
    assert all(len(record.token_times_s) == record.wanted_tokens for record in run.records)


@pytest.mark.rotating
def test_sequences_that_stay_after_a_restore_are_in_blocks_with_kv_of_all_layers() -> None:
    """With this seed, a sequence that started over once occupied blocks that another sequence still needed."""
    judge(20)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(_MORE))
def test_many_more_of_them(seed: int) -> None:
    judge(seed)


def beside_long_answers(seed: int) -> list[Arrival]:
    """A few answers of thousands of tokens, and minutes later a burst of short ones that causes a drop; the restore
    happens while the long answers run.
    """
    rng = random.Random(seed)
    arrivals = [Arrival(1.0 + 2 * i, 300, rng.randint(8000, 18_000)) for i in range(rng.randint(3, 7))]
    at_s, per_s = rng.uniform(60, 260), rng.uniform(1.5, 4)
    for _ in range(rng.randint(60, 160)):
        at_s += rng.expovariate(per_s)
        arrivals.append(Arrival(at_s, rng.randint(100, 400), rng.randint(500, 1400)))
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def restore_beside_long_answers(seed: int) -> float:
    """Checks that no member counts as lost because it waits. Returns the longest time between two tokens, in
    seconds.
    """
    wanted = replace(options(cluster="2xA100-40G", check_every=20_000), model=find_model("Qwen2.5-14B"))
    run = World(wanted, beside_long_answers(seed)).run()
    assert all(record.outcome is Outcome.FINISHED for record in run.records)
    assert [one.journal.why for one in run.transitions if one.journal.why.startswith("loss")] == []
    return max(after - before for record in run.records for before, after in pairwise(record.token_times_s))


# Seed 11: running requests soon outgrow two members. Seed 52: long answers fill one of two members.
@pytest.mark.rotating
@pytest.mark.parametrize("seed", [6, 11, 52])
def test_long_answers_continue_during_a_restore_and_then_move_with_their_kv(seed: int) -> None:
    assert restore_beside_long_answers(seed) < 1.5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(_MORE))
def test_no_member_is_given_up_for_waiting(seed: int) -> None:
    assert restore_beside_long_answers(seed) < 1.5
