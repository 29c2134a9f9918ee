"""Generates the small synthetic traces in `benchmarks/traces`.

    python -m tools.bench.generate --out benchmarks/traces/bursty.csv
    python -m tools.bench.generate --kind answers --out benchmarks/traces/answers.csv

**Arrivals.** A gamma renewal process (shape 1/cv²: cv 1 is Poisson, a higher cv burstier) whose rate is `base_rate`, or
`burst_factor` times that for `burst_s` seconds from `burst_start_s` on. Intervals of mean one are drawn in operational
time and mapped through the inverse of the rate's integral, so that their cv is the same within the burst.

**Lengths.** Input and output lengths are drawn independently from an inverse distribution function that passes through
the quantiles P50, P80, P95 and P99 that the first arXiv version of KunServe states for BurstGPT (its table 2), with
linear interpolation of the logarithm between them. The maximum is a little above P99, the minimum is chosen so that the
mean is the stated one: 603 input, 289 output tokens.

The kind `answers` has short prompts and longer answers: requests hold memory for long and need little compute, so a
burst of them exhausts memory first.

The kind `spike` has the lengths of BurstGPT and a higher and relatively shorter burst, before and after which little
memory is in use: a load whose average is far below its peak.

All random numbers come from `random.Random(seed)`: the same arguments give the same file.
"""

import argparse
import itertools
import math
import random
from dataclasses import dataclass
from pathlib import Path

from tools.bench.traces import TraceRequest, write_trace

# Points (probability, tokens) of an inverse distribution function, both ascending.
Quantiles = tuple[tuple[float, float], ...]
BURSTGPT_INPUT: Quantiles = ((0.0, 37), (0.5, 400), (0.8, 1146), (0.95, 1804), (0.99, 2009), (1.0, 2100))
BURSTGPT_OUTPUT: Quantiles = ((0.0, 25), (0.5, 249), (0.8, 462), (0.95, 715), (0.99, 1161), (1.0, 1500))
ANSWERS_INPUT: Quantiles = ((0.0, 24), (0.5, 56), (0.8, 96), (0.95, 144), (1.0, 200))
ANSWERS_OUTPUT: Quantiles = ((0.0, 60), (0.5, 150), (0.8, 220), (0.95, 280), (1.0, 340))


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstySpec:
    """Parameters of the generator; the defaults are those of `bursty.csv`."""

    span_s: float = 75.0
    base_rate: float = 3.4  # requests per second
    burst_start_s: float = 25.0
    burst_s: float = 12.0
    burst_factor: float = 3.0
    cv: float = 1.4
    input_quantiles: Quantiles = BURSTGPT_INPUT
    output_quantiles: Quantiles = BURSTGPT_OUTPUT


ANSWERS = BurstySpec(
    span_s=125.0,
    base_rate=2.0,
    burst_start_s=22.0,
    burst_s=12.0,
    burst_factor=4.0,
    cv=0.7,
    input_quantiles=ANSWERS_INPUT,
    output_quantiles=ANSWERS_OUTPUT,
)
SPIKE = BurstySpec(span_s=100.0, base_rate=4.0, burst_start_s=30.0, burst_s=10.0, burst_factor=6.0)
KINDS = {"bursty": BurstySpec(), "answers": ANSWERS, "spike": SPIKE}


def generate(spec: BurstySpec = BurstySpec(), seed: int = 1) -> tuple[TraceRequest, ...]:
    rng = random.Random(seed)
    shape = 1 / spec.cv**2
    requests: list[TraceRequest] = []
    operational = 0.0
    while True:
        operational += rng.gammavariate(shape, 1 / shape)
        arrival_s = _arrival_s(spec, operational)
        if arrival_s >= spec.span_s:
            return tuple(requests)
        lengths = (sample_length(q, rng.random()) for q in (spec.input_quantiles, spec.output_quantiles))
        requests.append(TraceRequest(round(arrival_s, 3), *lengths))


def _arrival_s(spec: BurstySpec, operational: float) -> float:
    """The time up to which the rate integrates to `operational`."""
    before = spec.base_rate * spec.burst_start_s
    within = spec.base_rate * spec.burst_factor * spec.burst_s
    if operational <= before:
        return operational / spec.base_rate
    if operational <= before + within:
        return spec.burst_start_s + (operational - before) / (spec.base_rate * spec.burst_factor)
    return spec.burst_start_s + spec.burst_s + (operational - before - within) / spec.base_rate


def sample_length(quantiles: Quantiles, probability: float) -> int:
    """The length at `probability`, interpolated in the logarithm between the two nearest quantiles."""
    for (p_low, low), (p_high, high) in itertools.pairwise(quantiles):
        if probability <= p_high:
            share = (probability - p_low) / (p_high - p_low)
            return round(math.exp(math.log(low) + share * (math.log(high) - math.log(low))))
    return round(quantiles[-1][1])


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a synthetic bursty trace.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kind", choices=list(KINDS), default="bursty")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    requests = generate(KINDS[args.kind], seed=args.seed)
    write_trace(args.out, requests)
    print(f"{args.out}: {len(requests)} requests over {requests[-1].arrival_s:.1f} s")


if __name__ == "__main__":
    main()
