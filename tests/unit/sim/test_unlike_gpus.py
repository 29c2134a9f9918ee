"""Clusters of GPUs of several kinds, with every read of KV looked at: what a burst overflows is served together."""

from dataclasses import replace

from sim.clients import Arrival
from sim.hardware import find_model
from sim.results import Outcome
from sim.world import World
from tests.support.simulated import options


def test_unlike_gpus_drop_with_all_kv_in_its_place() -> None:
    """Stages of other block counts exchange KV exactly, and have more room together than alone."""
    wanted = options(cluster="1xA100-40G+1xH100-80G", check_every=5000)
    arrivals = [Arrival(0.3 * i, 600, 2200 + i) for i in range(160)]
    run = World(replace(wanted, model=find_model("Qwen2.5-14B"), marks=True), arrivals).run()
    for record in run.records:
        assert record.outcome is Outcome.FINISHED
        assert len(record.token_times_s) == record.wanted_tokens
    capacities = [sample.kv_capacity_bytes for sample in run.samples]
    assert capacities[-1] == capacities[0]
    assert max(capacities) > 1.3 * capacities[0]
    [first, *_] = run.transitions
    assert (str(first.journal.kind), str(first.journal.stage)) == ("drop", "done")
