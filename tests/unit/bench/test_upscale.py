"""Traces with more or fewer requests in the same pattern."""

from pathlib import Path

import numpy as np
import pytest

from ballast.common.errors import ConfigError
from tools.bench.lengths import lengths_of, with_lengths
from tools.bench.sizing import (
    SizingForecast,
    SizingPace,
    Speed,
    forecast_shared,
    length_scales_to,
    mean_request,
    rate_for,
)
from tools.bench.traces import Trace, TraceRequest, write_trace
from tools.bench.upscale import densest_window, repeated_burst, upscaled
from tools.bench.workloads import parse_workloads


def spiky(rate_per_s: int = 4) -> Trace:
    """60 s with five times the rate between 20 s and 30 s. Prompts grow with the arrival time."""
    arrivals = [t / rate_per_s for t in range(60 * rate_per_s)]
    arrivals += [20 + t / (4 * rate_per_s) for t in range(40 * rate_per_s)]
    requests = tuple(TraceRequest(at_s, 10 + int(at_s), 5) for at_s in sorted(arrivals))
    return Trace(source="spiky", format="ballast", requests=requests)


def shares(trace: Trace) -> np.ndarray:
    counts, _ = np.histogram([r.arrival_s for r in trace.requests], bins=12, range=(0, 60))
    return counts / counts.sum()


@pytest.mark.parametrize("factor", [0.25, 0.6, 1.0, 2.0, 3.7])
def test_the_pattern_over_time_stays(factor: float) -> None:
    trace = spiky()
    scaled = upscaled(trace, factor, seed=3)
    assert len(scaled.requests) == round(factor * len(trace.requests))
    assert shares(scaled) == pytest.approx(shares(trace), abs=0.03)
    assert scaled.span_s == pytest.approx(trace.span_s, abs=2.0)
    assert scaled.rate_scale == factor
    arrivals_s = [r.arrival_s for r in scaled.requests]
    assert arrivals_s == sorted(arrivals_s)


def test_lengths_are_those_of_requests_nearby() -> None:
    scaled = upscaled(spiky(), 2.0, seed=0)
    assert all(abs(r.input_tokens - 10 - r.arrival_s) < 8 for r in scaled.requests)
    assert scaled == upscaled(spiky(), 2.0, seed=0)
    assert scaled != upscaled(spiky(), 2.0, seed=1)


def test_a_factor_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="rate-scale"):
        upscaled(spiky(), 0.0, seed=0)


def test_a_trace_can_be_squeezed_and_its_burst_repeated() -> None:
    trace = spiky().scaled(time_scale=0.5)
    assert densest_window(trace.requests, 5.0) == pytest.approx(10.0, abs=0.3)
    extreme = repeated_burst(trace, 5.0, times=3)
    assert extreme.requests[-1].arrival_s == pytest.approx(25.0, abs=0.3)
    assert len(extreme.requests) > 2.5 * sum(10 <= r.arrival_s < 15 for r in trace.requests)


def test_the_rate_is_chosen_by_the_demand() -> None:
    speed = Speed(2, SizingPace(100.0, 0.02), 16, SizingPace(320.0, 0.05))
    trace = spiky()
    rate = rate_for(trace, speed, SizingForecast(mean_tokens=300.0, peak_tokens=1e9), seed=0)
    demand = forecast_shared(upscaled(trace, rate, 0).requests, speed)
    assert demand.mean_tokens == pytest.approx(300.0, rel=0.2)
    assert demand.peak_tokens > 1.5 * demand.mean_tokens
    lower = rate_for(trace, speed, SizingForecast(mean_tokens=300.0, peak_tokens=0.5 * demand.peak_tokens), seed=0)
    demand = forecast_shared(upscaled(trace, lower, 0).requests, speed)
    assert lower < rate
    assert demand.mean_tokens < 250.0


def test_more_running_requests_slow_each_one_down() -> None:
    speed = Speed(2, SizingPace(100.0, 0.02), 16, SizingPace(320.0, 0.05))
    assert speed.seconds_per_token(1) < speed.seconds_per_token(2) == 0.02
    assert speed.seconds_per_token(30) == pytest.approx(0.08)


@pytest.mark.parametrize(
    ("name", "input_mean", "output_mean"),
    [
        ("burstgpt", 603, 289),
        ("azureconv", 1013, 247),
        ("agieval", 237, 390),
        ("sharegpt", 1660, 373),
        ("longbench", 5900, 499),
    ],
)
def test_fitted_lengths_have_the_published_means_and_say_that_they_are_fitted(
    name: str, input_mean: int, output_mean: int
) -> None:
    lengths = lengths_of(name)
    trace = with_lengths(upscaled(spiky(), 20.0, seed=0), lengths, seed=1)
    assert np.mean([r.input_tokens for r in trace.requests]) == pytest.approx(input_mean, rel=0.05)
    assert np.mean([r.output_tokens for r in trace.requests]) == pytest.approx(output_mean, rel=0.05)
    assert "published" in trace.lengths


def test_workloads_are_arrivals_and_lengths(tmp_path: Path) -> None:
    write_trace(tmp_path / "a.csv", spiky().requests)
    write_trace(tmp_path / "pool.csv", (TraceRequest(0.0, 77, 7),))
    words = f"{tmp_path}/a.csv,{tmp_path}/a.csv+{tmp_path}/pool.csv,burst,extreme:burst,answers+longbench"
    workloads = {w.name: w.trace for w in parse_workloads(words, seed=0)}
    assert list(workloads) == ["a", "a+pool", "burst", "extreme-burst", "answers+longbench"]
    assert workloads["a"].lengths == "of the trace"
    assert {(r.input_tokens, r.output_tokens) for r in workloads["a+pool"].requests} == {(77, 7)}
    assert "drawn from pool.csv" in workloads["a+pool"].lengths
    assert "fitted" in workloads["burst"].lengths
    assert len(workloads["extreme-burst"].requests) > len(workloads["burst"].requests)
    (extreme,) = parse_workloads("extreme:burst", seed=0)
    assert extreme.base.requests == workloads["burst"].requests, "the rate is derived from the ordinary trace"


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("", "names none"),
        ("burst,burst", "two are called"),
        ("burst+nonsense", "no data set"),
        ("none.csv", "none.csv"),
    ],
)
def test_wrong_workloads_are_named(words: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        parse_workloads(words, seed=0)


def test_a_part_of_a_trace_is_a_window_around_its_burst(tmp_path: Path) -> None:
    path = tmp_path / "spiky.csv"
    write_trace(path, spiky().requests)
    (whole, part) = parse_workloads(f"{path},{path}@24+sharegpt", seed=0)
    assert part.name == "spiky@24+sharegpt"
    assert len(whole.trace.requests) == len(spiky().requests)
    arrivals_s = [r.arrival_s for r in part.trace.requests]
    assert len(arrivals_s) == sum(14 <= r.arrival_s < 38 for r in whole.trace.requests)
    burst_s = densest_window(part.trace.requests, 10.0)
    assert burst_s == pytest.approx(6.0, abs=0.3)
    assert 23 < part.trace.span_s < 24
    for wrong in ("", "0", "soon", "inf"):
        with pytest.raises(ConfigError, match="after @ come seconds"):
            parse_workloads(f"burst@{wrong}", seed=0)


def test_prompts_and_answers_are_shortened_separately() -> None:
    trace = spiky()
    lengths = length_scales_to(trace, 20.0, 0.2)
    scaled = trace.scaled(length_scale=lengths[0], answer_scale=lengths[1])
    assert mean_request(scaled.requests) == (pytest.approx(16, abs=1), pytest.approx(4, abs=1))
    together = length_scales_to(trace, 20.0, None)
    assert together[1] is None
    assert sum(mean_request(trace.scaled(length_scale=together[0]).requests)) == pytest.approx(20, abs=1)
