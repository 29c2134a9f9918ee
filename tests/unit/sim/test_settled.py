"""Compares the closed form with a simulation: the load that pairs sustain, and where a steady load settles."""

import math

import pytest

from sim.hardware import find_cluster, find_model, timings
from sim.jobs.settled import (
    Load,
    capacity_tokens,
    carried_by_pairs,
    peak_demand,
    prompt_share,
    reading_is_short,
    settled,
)
from sim.jobs.simulation import SimJob, simulate
from tools.bench.traces import Trace, TraceRequest

MODEL, CLUSTER = find_model("Qwen2.5-14B"), find_cluster("2xA100-40G")


def steady(rate_per_s: float, span_s: float, prompt: int = 600, answer: int = 400) -> Trace:
    """Identical requests at even intervals, for two instances; `rate_per_s` is per instance."""
    count = int(2 * rate_per_s * span_s)
    requests = tuple(TraceRequest(i * span_s / count, prompt, answer) for i in range(count))
    return Trace(source="test", format="generated", requests=requests)


def load(rate_per_s: float, prompt: int = 600, answer: int = 400) -> Load:
    return Load.of((TraceRequest(0.0, prompt, answer),), rate_per_s)


def test_a_simulation_settles_where_the_closed_form_says() -> None:
    at = settled(MODEL, CLUSTER, timings(), load(1.5))
    trace = steady(1.5, 60.0)
    job = SimJob(trace=trace, model=MODEL, cluster=CLUSTER, policies=("recompute",))
    ran = simulate(job, 0.0).policies["recompute"]
    assert ran.tpot_s.p50 == pytest.approx(at.token_s, rel=0.1)
    used = [used for at_s, used in zip(ran.series.at_s, ran.series.kv_used_bytes, strict=True) if 30 < at_s < 60]
    tokens = sum(used) / len(used) / MODEL.kv_bytes_per_token / 2
    assert tokens == pytest.approx(at.demand_tokens, rel=0.2)
    assert ran.series.kv_capacity_bytes[0] == pytest.approx(
        2 * MODEL.kv_bytes_per_token * capacity_tokens(MODEL, CLUSTER, timings()), rel=0.03
    )


def test_demand_grows_faster_than_the_rate_and_finally_without_bound() -> None:
    demands = [settled(MODEL, CLUSTER, timings(), load(rate)).demand for rate in (0.5, 1.0, 2.0)]
    assert demands[1] > 2 * demands[0]
    assert demands[2] > 2 * demands[1]
    assert math.isinf(settled(MODEL, CLUSTER, timings(), load(4.9, 800, 1000)).demand)


def test_a_simulated_burst_needs_as_much_memory_as_the_closed_form_says() -> None:
    """The tolerance is a third: the trace's answers all have the same length, but in the closed form they end at a
    constant rate.
    """
    machine = find_cluster("2xA100-80G")
    calm, burst = steady(1.0, 30.0), steady(3.0, 30.0)
    later = [TraceRequest(30.0 + r.arrival_s, r.input_tokens, r.output_tokens) for r in burst.requests]
    trace = Trace(source="test", format="generated", requests=(*calm.requests, *later))
    series = simulate(SimJob(trace=trace, model=MODEL, cluster=machine, policies=("recompute",)), 0.0)
    used = series.policies["recompute"].series
    wanted = peak_demand(MODEL, machine, timings(), [(30.0, load(1.0)), (30.0, load(3.0))])
    assert max(used.kv_used_bytes) / used.kv_capacity_bytes[0] == pytest.approx(wanted, rel=0.33)


@pytest.mark.parametrize(("share", "carried"), [(0.2, 1.02), (0.4, 1.11), (0.6, 1.35), (0.8, 2.14)])
def test_pairs_sustain_more_load_the_larger_the_parameters(share: float, carried: float) -> None:
    assert carried_by_pairs(share) == pytest.approx(carried, abs=0.005)


def test_the_share_of_prompts_is_of_the_densest_half_minute() -> None:
    calm = prompt_share(MODEL, CLUSTER, timings(), steady(1.0, 120.0))
    assert calm == pytest.approx(settled(MODEL, CLUSTER, timings(), load(1.0)).prompt_share, rel=0.05)
    crowd = [TraceRequest(120.0 + 0.1 * i, 600, 4) for i in range(300)]
    mixed = Trace(source="test", format="generated", requests=(*steady(1.0, 120.0).requests, *crowd))
    assert prompt_share(MODEL, CLUSTER, timings(), mixed) == pytest.approx(5 * calm, rel=0.05)
    assert prompt_share(MODEL, CLUSTER, timings(), Trace(source="", format="generated", requests=())) == 0.0


def test_memory_bandwidth_is_short_where_long_contexts_arrive_faster_than_they_end() -> None:
    machine = find_cluster("2xH200")
    assert not reading_is_short(MODEL, machine, timings(), steady(1.0, 200.0))
    assert reading_is_short(MODEL, machine, timings(), steady(1.5, 400.0, 2000, 4000))
