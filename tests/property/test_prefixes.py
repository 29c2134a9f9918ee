"""Requests with a common prefix share KV, which changes no token and no decision about memory.

A history is drawn from its seed (see tests.support.prefix_history): its seed reproduces a failure. BALLAST_PREFIX_SEEDS
sets the number of simulated clusters per policy.
"""

import os
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from ballast.common.transition import TransitionKind
from services.worker.core.blocks import Table
from services.worker.core.mover import Mover
from services.worker.core.prefixes import PrefixIndex
from services.worker.core.spans import Piece
from sim.clients import Arrival
from sim.world import World
from tests.support.prefix_history import PrefixHistory
from tests.support.simulated import burst, options
from tests.support.worker_core import MEMORY, VOCAB_SIZE, Driver, greedy, limits

SEEDS = int(os.environ.get("BALLAST_PREFIX_SEEDS", "3"))
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
def test_an_overload_is_handled_as_with_an_empty_cache(seed: int, turns: int) -> None:
    """For admission, preemption and load reports, retained blocks count as free."""

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


@pytest.mark.parametrize("policy", ["drop", "migrate", "recompute"])
@pytest.mark.parametrize("seed", range(1, SEEDS + 1))
def test_a_cluster_handles_an_overload_as_with_an_empty_cache(
    policy: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retained blocks change no decision of workers, dispatchers, monitor and planner as long as no request hits them.

    No two prompts share a prefix. Matching is disabled, since a resumed request would hit its own blocks and run faster
    than with an empty cache.
    """
    monkeypatch.setattr(PrefixIndex, "match", lambda _index, _sequence: [])  # pyright: ignore[reportUnknownLambdaType]
    begin_s = 20.0
    arrivals = [
        arrival._replace(hash_ids=tuple(range(3 * place, 3 * place + 3)), hash_tokens=512)
        for place, arrival in enumerate(burst(seed=seed, base_per_s=2.0, begin_s=begin_s))
    ]
    before = _world_of(arrivals, policy, caches=True, stop_after_s=begin_s)
    before.run()
    assert _retained_fraction(before) >= 0.5
    caching, plain = (_world_of(arrivals, policy, caches=caches).run() for caches in (True, False))
    assert caching.records == plain.records
    assert caching.signals == plain.signals
    told = [[(t.journal.kind, t.journal.stage) for t in run.transitions] for run in (caching, plain)]
    assert told[0] == told[1]
    assert told[0] or policy != "drop", "no transition: memory was not short"


@pytest.mark.parametrize("seed", range(1, SEEDS + 1))
def test_no_overload_is_signalled_while_eviction_suffices(seed: int) -> None:
    rng = random.Random(seed)
    at_s, arrivals = 0.0, list[Arrival]()
    for place in range(80):
        hash_ids = tuple(range(3 * place, 3 * place + 3))
        arrivals.append(Arrival(at_s, rng.randint(600, 1500), rng.randint(20, 60), hash_ids=hash_ids))
        at_s += rng.uniform(0.3, 0.6)
    world = _world_of(arrivals, "drop", caches=True)
    run = world.run()
    assert _retained_fraction(world) >= 0.9
    assert not run.signals
    assert not run.transitions
    assert run.samples[-1].preemptions_total == 0


@pytest.mark.parametrize("caches", [True, False])
def test_many_requests_with_one_prompt_are_no_overload(caches: bool) -> None:
    """An instance has 232 blocks. Each request needs 31 blocks, 24 of which are shared by all requests."""
    arrivals = [Arrival(10.0 + place / 1000, 1950, 40, hash_ids=(0, 1, 2, 1000 + place)) for place in range(70)]
    kinds = [transition.journal.kind for transition in _world_of(arrivals, "drop", caches=caches).run().transitions]
    assert kinds == ([] if caches else [TransitionKind.DROP])


def test_a_drop_sends_shared_blocks_once_and_keeps_them_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of 1,088 to 1,408 tokens begin with one of two prefixes of 1,024 tokens. Without sharing, the sequences
    of the new group would need twice its memory.
    """
    sent: list[tuple[object, ...]] = []
    blocks_of = Mover._blocks  # pyright: ignore[reportPrivateUsage]

    def noting(mover: Mover, piece: Piece) -> Table:
        table = blocks_of(mover, piece)
        sent.extend((id(mover), piece.move, piece.first_layer, block_id) for block_id in table)
        return table

    monkeypatch.setattr(Mover, "_blocks", noting)
    rng, at_s, arrivals = random.Random(2), 0.0, list[Arrival]()
    while at_s < 25.0:
        prefix, first, new = rng.randrange(2), 10_000 + 100 * len(arrivals), rng.randint(1, 6)
        hash_ids = (*range(100 * prefix, 100 * prefix + 16), *range(first, first + new))
        arrivals.append(Arrival(at_s, 64 * (16 + new), rng.randint(100, 400), hash_ids=hash_ids, hash_tokens=64))
        at_s += rng.expovariate(16.0 if 10.0 <= at_s < 18.0 else 1.5)
    made = _world_of(arrivals, "drop", caches=True)
    run = made.run()
    assert [transition.journal.kind for transition in run.transitions][:1] == [TransitionKind.DROP]
    assert len(sent) == len(set(sent)) > 300
    assert run.samples[-1].preemptions_total == 0


def _world_of(arrivals: Sequence[Arrival], policy: str, *, caches: bool, stop_after_s: float | None = None) -> World:
    made = options(policy, check_every=0)
    rules = replace(made.rules, worker=replace(made.rules.worker, prefix_caching=caches))
    return World(replace(made, rules=rules, stop_after_s=stop_after_s), arrivals)


def _retained_fraction(world: World) -> float:
    loads = [instance.load() for instance in world.instances.values()]
    return sum(load.retained_block_count for load in loads) / sum(load.block_count for load in loads)
