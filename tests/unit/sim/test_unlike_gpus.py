"""Clusters with several kinds of GPUs: instances that overflow in a burst are merged, and every KV read is checked."""

from dataclasses import replace

import pytest

from benchmarks.regret_cells import CELLS, job_of
from sim.clients import Arrival
from sim.hardware import find_model
from sim.jobs.simulation import specs_of, world_of
from sim.results import Outcome
from sim.world import World
from tests.support.simulated import options


@pytest.mark.rotating
def test_a_drop_of_unlike_gpus_keeps_all_kv_correct() -> None:
    """Stages with different block counts exchange KV exactly, and have more room together than alone."""
    wanted = options(cluster="1xA100-40G+1xH100-80G", check_every=5000)
    # If nearly full instances sent requests away, they would migrate to the large GPU and fit there.
    rules = replace(wanted.rules, migrations=replace(wanted.rules.migrations, relieves=False))
    wanted = replace(wanted, model=find_model("Qwen2.5-14B"), marks=True, rules=rules)
    arrivals = [Arrival(0.3 * i, 600, 2200 + i) for i in range(160)]
    run = World(wanted, arrivals).run()
    for record in run.records:
        assert record.outcome is Outcome.FINISHED
        assert len(record.token_times_s) == record.wanted_tokens
    capacities = [sample.kv_capacity_bytes for sample in run.samples]
    assert capacities[-1] == capacities[0]
    assert max(capacities) > 1.3 * capacities[0]
    [first, *_] = run.transitions
    assert (str(first.journal.kind), str(first.journal.stage)) == ("drop", "done")


@pytest.mark.rotating
def test_small_gpus_keep_computing_as_their_long_requests_move_to_large_ones() -> None:
    """One answer in ten is long. Without migration, long answers would fill the small GPUs and leave their compute
    idle.
    """
    wanted = options(cluster="2xA100-40G+1xA100-80G", check_every=50000)
    arrivals = [Arrival(0.024 * i, 400, 3000 if i % 10 == 3 else 60) for i in range(1500)]
    world = World(replace(wanted, model=find_model("Qwen2.5-14B"), marks=True), arrivals)
    run = world.run()
    assert all(len(record.token_times_s) == record.wanted_tokens for record in run.records)
    assert sum(instance.member.published.migrations.moved for instance in world.instances.values()) > 10
    waits_s = sorted(record.token_times_s[0] - record.arrival_s for record in run.records)
    assert waits_s[len(waits_s) * 95 // 100] < 2.0, "3.2 s without migration"


def test_small_gpus_that_are_full_are_merged_with_each_other_while_requests_wait() -> None:
    """Three GPUs have 40 GB and two have 160 GB. Less than half of all memory is in use, but the small GPUs delay the
    burst.
    """
    job = replace(job_of(CELLS["any-5-4x-mixed-burst"], None, "drop", 0), stop_after_s=38.0)
    [(_, rules)] = specs_of(job)
    (drop,) = world_of(job, rules).run().transitions
    assert "predicted 1 of 3 of little memory" in drop.journal.why
