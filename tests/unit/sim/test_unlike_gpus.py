"""Clusters of GPUs of several kinds, with every read of KV looked at: what a burst overflows is served together."""

from dataclasses import replace

import pytest

from sim.results import Outcome
from sim.world import World
from tests.support.simulated import burst, options


@pytest.mark.parametrize("cluster", ["1xA100-40G+1xA800", "2xA100-40G+1xH100-80G"])
def test_unlike_gpus_drop_and_restore_with_all_kv_in_its_place(cluster: str) -> None:
    """Requests of marks are exact, block counts of the stages are not the same, and nobody has less KV than before."""
    made = replace(options(cluster=cluster, check_every=50), marks=True)
    arrivals = burst(base_per_s=1.5, burst_per_s=30.0)
    world = World(made, arrivals)
    budgets = {memory.budget for memory in (kind.geometry for kind in world._kinds)}  # pyright: ignore[reportPrivateUsage]
    assert len(budgets) == 2
    run = world.run()
    assert len(run.records) == len(arrivals)
    for record in run.records:
        assert record.outcome is Outcome.FINISHED
        assert len(record.token_times_s) == record.wanted_tokens
    kinds = [(str(one.journal.kind), str(one.journal.stage)) for one in run.transitions]
    assert ("drop", "done") in kinds
    assert ("restore", "done") in kinds
    capacities = [sample.kv_capacity_bytes for sample in run.samples]
    assert max(capacities) > capacities[0]
    assert min(capacities) >= 0.97 * capacities[0]
    assert capacities[-1] == capacities[0]
