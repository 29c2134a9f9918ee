"""Arrivals that a scenario describes."""

import pytest

from ballast.common.errors import ConfigError
from sim.jobs.arrivals import generated
from sim.jobs.scenarios import trace_of
from sim.scenario import Arrivals, make_scenario

SPEC = Arrivals.model_validate(
    {"span_s": 200, "rate_per_s": 20, "cv": 1.5, "bursts": [{"at_s": 50, "for_s": 40, "factor": 3}]}
)
PLAIN = {"description": "", "source": "the moon", "model": "Llama-2-7B", "cluster": "1xA800"}


def rate_per_s(instants_s: list[float], begin_s: float, end_s: float) -> float:
    return sum(begin_s <= at_s < end_s for at_s in instants_s) / (end_s - begin_s)


def test_the_rate_is_that_of_the_scenario_inside_and_outside_of_bursts() -> None:
    instants_s = [r.arrival_s for r in generated(SPEC, "sharegpt", 3).requests]
    assert instants_s == sorted(instants_s)
    assert instants_s[0] >= 0.0
    assert instants_s[-1] <= 200.0
    assert rate_per_s(instants_s, 0.0, 50.0) == pytest.approx(20.0, rel=0.15)
    assert rate_per_s(instants_s, 50.0, 90.0) == pytest.approx(60.0, rel=0.15)
    assert rate_per_s(instants_s, 90.0, 200.0) == pytest.approx(20.0, rel=0.15)


def test_arrivals_follow_phases() -> None:
    spec = Arrivals.model_validate({"span_s": 60, "rate_per_s": 20, "on_s": 10, "off_s": 5})
    instants_s = [r.arrival_s for r in generated(spec, None, 3).requests]
    assert all(at_s % 15 < 10 for at_s in instants_s)
    for begin_s in (0.0, 15.0, 30.0, 45.0):
        assert rate_per_s(instants_s, begin_s, begin_s + 10) == pytest.approx(20.0, rel=0.3)


def test_a_seed_determines_the_trace() -> None:
    assert generated(SPEC, None, 1) == generated(SPEC, None, 1)
    assert generated(SPEC, None, 1).requests != generated(SPEC, None, 2).requests


def test_a_scenario_scales_its_arrivals_and_raises_its_burst() -> None:
    plain = make_scenario({**PLAIN, "arrivals": SPEC}, "test")
    more = plain.model_copy(update={"rate_scale": 2.0})
    steeper = plain.model_copy(update={"burst_scale": 2.0})
    count = len(trace_of(plain, 4096).requests)
    assert len(trace_of(more, 4096).requests) == pytest.approx(2 * count, rel=0.1)
    instants_s = [r.arrival_s for r in trace_of(steeper, 4096).requests]
    assert len(instants_s) == pytest.approx(count + 30 * 60, rel=0.1)
    assert rate_per_s(instants_s, 100.0, 200.0) == pytest.approx(20.0, rel=0.15)


def test_a_scenario_without_trace_and_arrivals_is_refused() -> None:
    with pytest.raises(ConfigError, match="the scenario names none"):
        trace_of(make_scenario(PLAIN, "test"), 4096)
