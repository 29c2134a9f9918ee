"""Requests that begin alike share KV: no token is another one, and no decision about memory.

A history is drawn from its seed (see tests.support.prefix_history): a failure is repeated with its seed.
"""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from sim.world import World
from tests.support.prefix_history import PrefixHistory
from tests.support.simulated import burst, options
from tests.support.worker_core import MEMORY, VOCAB_SIZE, Driver, greedy, limits

_PHASES = (Phase.explicit, Phase.reuse, Phase.generate)


@settings(max_examples=60, deadline=None, phases=_PHASES)
@given(seed=st.integers(0, 2**31), stage_count=st.integers(0, 2))
def test_no_history_changes_a_token_or_loses_a_block(seed: int, stage_count: int) -> None:
    PrefixHistory(seed, stage_count).play()


def test_histories_share_much() -> None:
    counts = sum((PrefixHistory(seed, seed % 3).play().counts for seed in range(24)), start=Counter[str]())
    assert counts["hit"] >= 0.3 * counts["queried"]
    for name, least in (
        ("preempted", 30),
        ("swapped", 3),
        ("from host", 100),
        ("moved", 5),
        ("failed", 3),
        ("ahead", 15),
    ):
        assert counts[name] >= least, (name, counts)


@settings(max_examples=15, deadline=None, phases=_PHASES)
@given(seed=st.integers(0, 96), turns=st.integers(4, 10))
def test_an_overload_is_met_as_with_an_empty_cache(seed: int, turns: int) -> None:
    """What is retained is free for all that decide: what is let in, what gives way and what is reported."""

    def play(*, warm: bool) -> list[object]:
        driver = Driver(limits(max_running_count=6, max_batch_tokens=32, prefix_caching=True), 40)
        driver.open(1)
        if warm:
            for turn in range(turns):
                driver.submit(tuple(range(turn, turn + 8)), greedy(4))
                driver.run_to_end()
            assert driver.core.group_scheduler.scheduler.prefixes.retained_count >= 2 * turns
        told: list[object] = []
        for request in range(8):
            driver.submit(tuple((50 + seed + 7 * request + i * i) % VOCAB_SIZE for i in range(20)), greedy(40))
        while driver.step() is not None:
            load = driver.core.load(driver.at_s, MEMORY)
            told.append(
                (
                    load.used_block_count,
                    load.waiting_block_count,
                    load.prompt_token_count,
                    load.running_count,
                    load.waiting_count,
                    load.preemptions_total,
                )
            )
        return told

    assert play(warm=True) == play(warm=False)


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_a_cluster_meets_an_overload_as_with_an_empty_cache(seed: int) -> None:
    """No two prompts are alike: all that is retained is in nobody's way, from workers' decisions to the planner's."""
    begin_s = 20.0
    arrivals = [
        arrival._replace(hash_ids=tuple(range(3 * place, 3 * place + 3)), hash_tokens=512)
        for place, arrival in enumerate(burst(seed=seed, base_per_s=2.0, begin_s=begin_s))
    ]

    def world_of(*, caches: bool, stop_after_s: float | None = None) -> World:
        made = options("drop", check_every=0)
        rules = replace(made.rules, worker=replace(made.rules.worker, prefix_caching=caches))
        return World(replace(made, rules=rules, stop_after_s=stop_after_s), arrivals)

    before = world_of(caches=True, stop_after_s=begin_s)
    before.run()
    loads = [instance.load() for instance in before.instances.values()]
    assert sum(load.retained_block_count for load in loads) >= 0.5 * sum(load.block_count for load in loads)
    caching, plain = (world_of(caches=caches).run() for caches in (True, False))
    assert caching.records == plain.records
    assert caching.signals == plain.signals
    told = [[(t.journal.kind, t.journal.stage) for t in run.transitions] for run in (caching, plain)]
    assert told[0] == told[1]
    assert told[0], "memory was short"
