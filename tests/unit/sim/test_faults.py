"""Every request is served despite faults in a simulation."""

from dataclasses import replace
from itertools import pairwise

import pytest

from ballast.common.errors import ConfigError
from ballast.common.ids import WorkerId
from sim.clients import Arrival
from sim.faults import Fault, FaultKind
from sim.results import Outcome
from sim.world import World
from tests.support.simulated import burst, options


def test_requests_of_a_crashed_worker_continue_elsewhere() -> None:
    crash = Fault(at_s=3.0, kind=FaultKind.CRASH, worker=1)
    made = replace(options("recompute", cluster="3xA100-40G"), faults=(crash,))
    world = World(made, burst(burst_per_s=4.0))
    run = world.run()
    assert [record.outcome for record in run.records] == [Outcome.FINISHED] * len(run.records)
    assert sum(node.core.replay_count for node in world.dispatchers) > 0
    assert sum(run.samples[-1].group_sizes) == 2


def test_samples_count_no_requests_of_a_crashed_worker_and_keep_its_preemptions() -> None:
    crash = Fault(at_s=4.0, kind=FaultKind.CRASH, worker=1)
    made = replace(options("recompute", cluster="2xA100-40G"), faults=(crash,))
    run = World(made, burst(burst_per_s=6.0)).run()
    last = run.samples[-1]
    assert (run.samples[0].on_count, last.on_count) == (2, 1)
    assert last.running_count <= sum(r.arrival_s <= last.at_s and r.end_s >= last.at_s for r in run.records if r.end_s)
    totals = [sample.preemptions_total for sample in run.samples]
    assert totals == sorted(totals)
    assert totals[-1] > 0


def test_a_crash_repeats_exactly() -> None:
    made = replace(options("recompute", check_every=0), faults=(Fault(at_s=3.0, kind=FaultKind.CRASH, worker=0),))
    hashes = {World(made, burst(burst_per_s=2.0)).run().trace_hash for _ in range(2)}
    assert len(hashes) == 1


@pytest.mark.parametrize("at_s", [0.4, 1.0, 2.3])
def test_a_pause_amid_decode_only_steps_loses_no_token_and_repeats_none(at_s: float) -> None:
    pause = Fault(at_s=at_s, kind=FaultKind.PAUSE, worker=0, duration_s=0.5)
    made = replace(options("recompute", cluster="1xA100-40G", check_every=1), faults=(pause,))
    world = World(made, [Arrival(0.01 * number, 100, 200) for number in range(4)])
    records = world.run().records
    assert [(one.outcome, len(one.token_times_s)) for one in records] == [(Outcome.FINISHED, 200)] * 4
    assert max(later - sooner for sooner, later in pairwise(records[0].token_times_s)) > 0.5


def test_an_alarm_during_a_pause_does_not_end_a_step_early() -> None:
    slow = Fault(at_s=0.0, kind=FaultKind.SLOW, worker=0, factor=10.0)
    pause = Fault(at_s=0.3, kind=FaultKind.PAUSE, worker=0, duration_s=0.2)

    def tokens_at_s(*alarms_at_s: float) -> list[float]:
        made = replace(options(cluster="1xA100-40G"), faults=(slow, pause))
        world = World(made, [Arrival(0.1, 1000, 20)])
        for at_s in alarms_at_s:
            world.clock.at(world.zero_s + at_s, b"alarm", world.instances[WorkerId("w0")]._wake)
        return list(world.run().records[0].token_times_s)

    assert tokens_at_s(0.4) == tokens_at_s()


def test_a_slow_worker_is_slow_for_the_given_time() -> None:
    slow = Fault(at_s=0.0, kind=FaultKind.SLOW, worker=0, factor=5.0, duration_s=2.0)
    lone = World(replace(options(cluster="1xA100-40G"), faults=(slow,)), [Arrival(0.1, 300, 60)]).run().records[0]
    gaps_s = [b - a for a, b in pairwise(lone.token_times_s)]
    assert gaps_s[0] == pytest.approx(5 * gaps_s[-1], rel=0.1)
    assert lone.token_times_s[-1] > 2.0


def test_impossible_faults_are_refused() -> None:
    with pytest.raises(ConfigError, match="worker 7 is not there; there are 0 to 1"):
        World(replace(options(), faults=(Fault(at_s=1.0, kind=FaultKind.CRASH, worker=7),)), [])
    with pytest.raises(ConfigError, match="factor must be above 0"):
        World(replace(options(), faults=(Fault(at_s=1.0, kind=FaultKind.SLOW, worker=0, factor=0.0),)), [])
