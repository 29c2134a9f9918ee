from itertools import pairwise
from pathlib import Path

import pytest

from tools.bench.generate import (
    BURSTGPT_INPUT,
    BURSTGPT_OUTPUT,
    KINDS,
    BurstySpec,
    Quantiles,
    generate,
    sample_length,
)
from tools.bench.traces import read_trace

SHIPPED = Path(__file__).parents[3] / "benchmarks" / "traces" / "bursty.csv"


def test_the_shipped_trace_is_generated() -> None:
    trace = read_trace(SHIPPED)
    assert trace.requests == generate()
    assert len(trace.requests) >= 300
    assert 60 <= trace.span_s <= 90


def test_the_demo_trace_is_generated() -> None:
    trace = read_trace(SHIPPED.with_name("answers.csv"))
    assert trace.requests == generate(KINDS["answers"])
    assert sum(r.output_tokens for r in trace.requests) > 2 * sum(r.input_tokens for r in trace.requests)


def test_another_seed_gives_another_trace() -> None:
    assert generate(seed=2) != generate()


def test_the_burst_is_where_it_should_be() -> None:
    """Compares mean rates over a long trace, in which random fluctuations of the arrivals average out."""
    spec = BurstySpec(span_s=3000, base_rate=5, burst_start_s=1000, burst_s=500, burst_factor=3)
    arrivals = [r.arrival_s for r in generate(spec)]
    assert arrivals == sorted(arrivals)
    burst = sum(1000 <= a < 1500 for a in arrivals) / 500
    rest = sum(not 1000 <= a < 1500 for a in arrivals) / 2500
    assert rest == pytest.approx(5, rel=0.1)
    assert burst == pytest.approx(15, rel=0.1)


def test_a_higher_cv_gives_burstier_arrivals() -> None:
    def variation(cv: float) -> float:
        arrivals = [r.arrival_s for r in generate(BurstySpec(span_s=1000, burst_factor=1, cv=cv))]
        gaps = [b - a for a, b in pairwise(arrivals)]
        mean = sum(gaps) / len(gaps)
        return (sum((g - mean) ** 2 for g in gaps) / len(gaps)) ** 0.5 / mean

    assert variation(0.5) == pytest.approx(0.5, rel=0.1)
    assert variation(2.0) == pytest.approx(2.0, rel=0.15)


@pytest.mark.parametrize(("quantiles", "mean"), [(BURSTGPT_INPUT, 603), (BURSTGPT_OUTPUT, 289)])
def test_lengths_meet_the_stated_quantiles_and_mean(quantiles: Quantiles, mean: float) -> None:
    for probability, tokens in quantiles:
        assert sample_length(quantiles, probability) == tokens
    lengths = [sample_length(quantiles, (i + 0.5) / 20_000) for i in range(20_000)]
    assert lengths == sorted(lengths)
    assert sum(lengths) / len(lengths) == pytest.approx(mean, rel=0.01)
