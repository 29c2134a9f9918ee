"""Whole runs, with all invariants checked after every event."""

import gc
import os
import random
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from ballast.common.errors import ConfigError, InvariantViolation
from services.dispatcher.core.events import Deliver, Request
from services.monitor.policy.pressure import Overload
from services.worker.core.plain import PlainSteps
from services.worker.core.worker import WorkerCore
from sim.clients import Arrival, Clients
from sim.clock import Clock
from sim.hardware import find_cluster, find_model
from sim.jobs.simulation import WorkerSize, production_rules
from sim.offline import OfflineLoad
from sim.results import Outcome, SimRun
from sim.world import World
from tests.support.simulated import burst, options, world

pytestmark = pytest.mark.xdist_group("sim world")  # one process holds the runs that many tests share

_HASH = "from tests.support.simulated import world; print(world(check_every=0).run().trace_hash)"


@pytest.fixture(scope="module")
def runs() -> dict[str, SimRun]:
    return {policy: world(policy).run() for policy in ("drop", "recompute")}


def p99_ttft_s(run: SimRun) -> float:
    ttfts_s = sorted(record.token_times_s[0] - record.arrival_s for record in run.records)
    return ttfts_s[int(0.99 * (len(ttfts_s) - 1))]


def test_every_request_ends_once_with_all_its_tokens(runs: dict[str, SimRun]) -> None:
    for run in runs.values():
        assert len(run.records) == len(burst()) > 50
        for record in run.records:
            assert record.outcome is Outcome.FINISHED
            assert len(record.token_times_s) == record.wanted_tokens
            assert all(a <= b for a, b in pairwise([record.arrival_s, *record.token_times_s]))
            assert record.end_s == pytest.approx(record.token_times_s[-1])


def test_a_burst_drops_parameters_and_the_run_waits_for_their_restore(runs: dict[str, SimRun]) -> None:
    done = [(str(r.journal.kind), str(r.journal.stage)) for r in runs["drop"].transitions]
    assert done[0] == ("drop", "done")
    assert ("restore", "done") in done
    drop = runs["drop"].transitions[0]
    assert drop.total("freed_parameter_bytes") == pytest.approx(25e9, rel=0.1)  # 26 GB less embedding and head
    assert drop.total("kv_bytes_sent") > 1e9
    assert 0.0 < drop.longest_s("max_stall_s") < 2.0
    capacities = [sample.kv_capacity_bytes for sample in runs["drop"].samples]
    assert max(capacities) > 1.9 * capacities[0]
    assert capacities[-1] == capacities[0]


def test_dropping_serves_the_burst_earlier(runs: dict[str, SimRun]) -> None:
    assert runs["recompute"].transitions == []
    assert any(isinstance(signal, Overload) for _, signal in runs["recompute"].signals)
    assert p99_ttft_s(runs["drop"]) < 0.6 * p99_ttft_s(runs["recompute"])
    assert 0.0 < (runs["drop"].bubble_fraction or 0.0) < 1.0
    assert runs["recompute"].bubble_fraction is None


def test_the_ttft_of_a_lone_request_follows_from_the_machine() -> None:
    lone = world(arrivals=[Arrival(0.0, 1000, 3)]).run().records[0]
    # 2 FLOPs for each of 12.7 G parameters and 1,000 tokens at 0.72 of 312 TFLOPS, plus attention.
    assert lone.token_times_s[0] == pytest.approx(0.125, rel=0.1)
    assert lone.token_times_s[2] - lone.token_times_s[1] == pytest.approx(0.0207, rel=0.1)


def test_a_run_is_the_same_in_every_process() -> None:
    """BALLAST_OTHER_PYTHON: an interpreter of another version with the same packages."""
    hashes = {
        subprocess.run(
            [python, "-c", _HASH],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=100,
        ).stdout
        for seed, python in (("1", sys.executable), ("2", os.environ.get("BALLAST_OTHER_PYTHON", sys.executable)))
    }
    assert hashes == {f"{world(check_every=0).run().trace_hash}\n"}


def test_checking_changes_nothing_and_a_seed_does(runs: dict[str, SimRun]) -> None:
    assert world(check_every=0).run().trace_hash == runs["drop"].trace_hash
    assert World(options(check_every=0, seed=7), burst()).run().trace_hash != runs["drop"].trace_hash


@pytest.mark.rotating
@pytest.mark.parametrize("policy", ["drop", "recompute", "migrate", "static-pipeline"])
@pytest.mark.parametrize("stop_after_s", [None, 5.0])
def test_steps_simulated_together_give_the_same_run(policy: str, stop_after_s: float | None) -> None:
    made = replace(options(policy, check_every=0), stop_after_s=stop_after_s)
    worlds = [World(replace(made, fast_forwards=fast_forwards), burst()) for fast_forwards in (True, False)]
    together, one_by_one = (world.run() for world in worlds)
    # A dispatcher learns of steps that are simulated together only when they are over, so its counts in between may be
    # lower.
    assert replace(together, predicted=[]) == replace(one_by_one, predicted=[])
    decisions = [[(one.at_s, one.decision, one.predicted) for one in run.predicted] for run in (together, one_by_one)]
    assert decisions[0] == decisions[1]
    loads = [
        [replace(i.load(), step_age_s=0.0, prefixes_kept_s=0.0) for i in world.instances.values()] for world in worlds
    ]
    assert loads[0] == loads[1]


def test_most_tokens_result_from_steps_simulated_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds with production rules. Without it, simulations would take three times as long, and no other test would
    notice.
    """
    one_by_one = 0
    deliver = Clients.deliver

    def count(clients: Clients, command: Deliver, at_s: float) -> None:
        nonlocal one_by_one
        one_by_one += len(command[1])
        deliver(clients, command, at_s)

    monkeypatch.setattr(Clients, "deliver", count)
    run = World(options("recompute", check_every=0), burst(base_per_s=0.5, burst_per_s=0.5)).run()
    assert one_by_one < 0.6 * sum(len(record.token_times_s) for record in run.records)


@pytest.mark.parametrize("host_bytes", [0, 64 << 30])
def test_with_common_prefixes_too_most_steps_are_simulated_together(host_bytes: int) -> None:
    arrivals = [
        arrival._replace(hash_ids=(place % 25, 100 + place % 25, 1000 + place), hash_tokens=512)
        for place, arrival in enumerate(burst(burst_per_s=12.0))
    ]
    made = options("recompute", check_every=0)
    worker = replace(made.rules.worker, prefix_caching=True, swap_space_bytes=host_bytes, swaps_online=False)
    made = replace(made, rules=replace(made.rules, worker=worker))
    worlds = [World(replace(made, fast_forwards=fast_forwards), arrivals) for fast_forwards in (True, False)]
    together, one_by_one = (world.run() for world in worlds)
    assert replace(together, predicted=[]) == replace(one_by_one, predicted=[])
    loads = [
        [replace(i.load(), step_age_s=0.0, prefixes_kept_s=0.0) for i in world.instances.values()] for world in worlds
    ]
    assert loads[0] == loads[1]
    assert sum(load.prefix_hits_total for load in loads[0]) > 0.1 * sum(load.prefix_queries_total for load in loads[0])
    assert bool(host_bytes) == any(load.prefix_host_hits_total for load in loads[0])


def test_steps_without_decisions_are_simulated_together(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    plain = WorkerCore.take_plain_steps

    def watched(core: WorkerCore, steps: PlainSteps, ids: Iterable[Sequence[int]], count: int, at_s: float) -> None:
        counts.append(count)
        plain(core, steps, ids, count, at_s)

    monkeypatch.setattr(WorkerCore, "take_plain_steps", watched)
    run = world("recompute", arrivals=[Arrival(0.0, 1000, 300), Arrival(3.0, 1000, 2)], check_every=0).run()
    assert len(counts) <= 4
    assert sum(counts) > 0.9 * run.step_count


def test_the_garbage_collector_is_enabled_again_after_a_run() -> None:
    assert gc.isenabled()
    world(arrivals=[Arrival(0.0, 10, 2)]).run()
    assert gc.isenabled()


def test_a_request_ends_at_its_deadline_and_only_then() -> None:
    late = World(replace(options(), deadline_s=1.0), [Arrival(0.0, 300, 400), Arrival(0.0, 300, 10)]).run().records
    assert [record.outcome for record in late] == [Outcome.DEADLINE, Outcome.FINISHED]
    assert late[0].end_s == pytest.approx(1.0, abs=0.05)
    assert "deadline" in late[0].error


def test_a_token_out_of_place_is_noticed() -> None:
    clients = Clients(Clock(), [Arrival(0.0, 100, 5)], 0.0, 10.0, max_model_len=4096)
    taken: list[Request] = []
    clients.begin([taken.append])
    clients._clock.step()
    clients.deliver(Deliver(taken[0].request_id, [100], "", ()), 1.0)
    with pytest.raises(InvariantViolation, match="position 102 after 1 tokens"):
        clients.deliver(Deliver(taken[0].request_id, [102], "", ()), 1.1)
    with pytest.raises(InvariantViolation, match="disagree about"):
        clients.check(set())


def test_too_few_and_too_small_gpus_are_reported() -> None:
    with pytest.raises(ConfigError, match=r"one instance of Qwen2\.5-72B takes 4"):
        World(replace(options(), model=find_model("Qwen2.5-72B")), [])
    with pytest.raises(ConfigError, match="no room for a KV cache"):
        World(replace(options(), cluster=find_cluster("2x4090")), [])


def test_no_float_that_decides_is_added_by_a_rule_that_python_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Since Python 3.12, `sum` compensates for rounding, and a difference of one bit changes the run."""
    plain, files = sum, set[str]()

    def watched(items: Iterable[float], /, start: float = 0) -> float:
        total = plain(items, start)
        if isinstance(total, float):
            files.add(sys._getframe(1).f_code.co_filename)
        return total

    monkeypatch.setattr("builtins.sum", watched)
    for policy in ("drop", "static-pipeline"):
        world(policy, check_every=0).run()
    assert files == set()


def test_requests_move_to_instances_with_more_room_and_fewer_are_recomputed() -> None:
    preempted = {"recompute": 0, "migrate": 0}
    for seed in (3, 5):
        rng = random.Random(seed)
        trace = [Arrival(0.2 * n, 600, min(2500, int(rng.lognormvariate(5.8, 1.2)) + 2)) for n in range(60)]
        for policy in preempted:
            made = world(policy, trace, check_every=10)
            run = made.run()
            assert all(record.outcome is Outcome.FINISHED for record in run.records)
            moved = sum(instance.member.published.migrations.moved for instance in made.instances.values())
            assert bool(moved) == (policy == "migrate")
            preempted[policy] += run.samples[-1].preemptions_total
    assert preempted["migrate"] < preempted["recompute"]


def test_a_fast_forward_ends_when_no_block_is_free() -> None:
    """Long answers outgrow the cache, so victims are chosen amid steps that otherwise need no decision."""
    made = options("recompute", check_every=0)
    trace = [Arrival(0.01 * number, 500, 700) for number in range(40)]
    together, one_by_one = (
        World(replace(made, fast_forwards=fast_forwards), trace).run() for fast_forwards in (True, False)
    )
    assert together == one_by_one
    assert max(sample.preemptions_total for sample in together.samples) > 0


@pytest.mark.parametrize("policy", ["drop", "recompute"])
def test_objects_created_for_events_form_no_cycles(policy: str) -> None:
    """The garbage collector is off during a run, so reference cycles would stay until the end."""
    kept = world(policy, check_every=0)
    gc.collect()
    gc.disable()  # or it would collect as soon as the run has ended
    try:
        run = kept.run()
        # Parts of a transition refer to each other, but there are few transitions.
        assert gc.collect() < run.event_count / 100 + 500 * len(run.transitions)
    finally:
        gc.enable()


def with_target(policy: str, target_s: float | None, arrivals: list[Arrival], cluster: str = "2xA100-40G") -> SimRun:
    made = options(policy, cluster=cluster, check_every=1999)
    worker = replace(made.rules.worker, tpot_target_s=target_s)
    return World(replace(made, rules=replace(made.rules, worker=worker)), arrivals).run()


def p50_tpot_s(run: SimRun) -> float:
    gaps_s = [(r.token_times_s[-1] - r.token_times_s[0]) / (len(r.token_times_s) - 1) for r in run.records]
    return sorted(gaps_s)[len(gaps_s) // 2]


@pytest.mark.rotating(2)
@pytest.mark.parametrize(("policy", "beyond"), [("recompute", 0.1), ("static-pipeline", 0.25)])
def test_under_overload_tokens_meet_their_target_and_requests_wait(policy: str, beyond: float) -> None:
    """More requests arrive than the instances can compute, but memory suffices for all."""
    free, bound = (with_target(policy, it, burst(base_per_s=9.0), "2xA100-80G") for it in (None, 0.06))
    assert p50_tpot_s(free) > 0.07
    assert 0.9 * 0.06 < p50_tpot_s(bound) < (1 + beyond) * 0.06
    assert p99_ttft_s(bound) > p99_ttft_s(free)
    assert [record.outcome for record in bound.records] == [Outcome.FINISHED] * len(free.records)


@pytest.mark.rotating
@pytest.mark.parametrize("policy", ["drop", "recompute", "static-pipeline"])
def test_no_target_equals_a_target_that_is_always_met(policy: str) -> None:
    assert production_rules(WorkerSize()).worker.tpot_target_s is None
    assert with_target(policy, None, burst()).trace_hash == with_target(policy, 100.0, burst()).trace_hash


@pytest.mark.parametrize(("waiting_count", "deadline_s"), [(100, 0.5), (300, 3600.0)])
def test_offline_requests_may_be_late_or_refused(waiting_count: int, deadline_s: float) -> None:
    load = OfflineLoad(lengths=[(2000, 400)], waiting_count=waiting_count, until_s=4.0)
    run = World(replace(options(), deadline_s=deadline_s, offline=load), [Arrival(0.0, 300, 10)]).run()
    assert run.records[0].outcome is Outcome.FINISHED
