"""Compares `ballast size` with an exhaustive search on ten traces, in results and duration.

    python -m benchmarks.sizes --traces DIR [--limit 300]

The traces are five slices of `benchmarks.parking`, `bursty.csv` of this repository, three with answers of 1,000 to
4,000 tokens, and one limited by compute, on which nothing can be saved. The first `--limit` requests of each are used.
Every number of GPUs from 1 to one more than the result is simulated. DIR as for `benchmarks.parking`.
"""

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ballast.common.errors import BallastError
from benchmarks.parking import SLICES, job
from sim.jobs.scenarios import job_of
from sim.jobs.simulation import SimJob
from sim.jobs.sizing import DROP, attempt, size
from sim.scenario import make_scenario
from tools.bench.slo import Slo
from tools.bench.traces import Trace, TraceRequest

_OURS = Path(__file__).parent / "traces" / "bursty.csv"
_GOAL = Slo(ttft_s=2.0, share=0.99)
_MOST = 24


def drawn(name: str, seed: int, per_s: float, prompts: tuple[int, int], answers: tuple[int, int], limit: int) -> SimJob:
    """A job with Poisson arrivals and uniform lengths. The middle fifth of the requests has four times the rate."""
    rng, at_s, requests = random.Random(seed), 0.0, list[TraceRequest]()
    for number in range(limit):
        burst = 4.0 if 2 * limit / 5 < number < 3 * limit / 5 else 1.0
        at_s += rng.expovariate(per_s * burst)
        requests.append(TraceRequest(at_s, rng.randint(*prompts), rng.randint(*answers)))
    told = {"description": "", "model": "Qwen2.5-14B", "cluster": "1xA100-40G", "trace": str(_OURS)}
    trace = Trace(source=name, format="generated", requests=tuple(requests))
    return replace(job_of(make_scenario(told)), trace=trace)


def cases(traces: Path, limit: int) -> Iterator[tuple[str, SimJob, Slo]]:
    for name in ("conv-spike", "conv-long", "burstgpt", "code-spike", "computing"):
        yield name, job(SLICES[name], traces, DROP, 1, limit), SLICES[name].slo
    told = {"description": "", "model": "Llama-2-13B", "cluster": "1xA100-40G", "trace": str(_OURS), "limit": limit}
    yield "bursty.csv", job_of(make_scenario(told)), _GOAL
    for seed, answers in enumerate(((1000, 2000), (1000, 4000), (3000, 4000))):
        name = f"answers of {answers[0]:,} to {answers[1]:,}"
        yield name, drawn(name, seed, 1.0, (100, 2000), answers, limit // 2), _GOAL
    yield "prompts alone", drawn("prompts", 9, 4.0, (1500, 2500), (2, 4), limit), _GOAL


def exhaustive(one: SimJob, policy: str, slo: Slo, found: int) -> int | None:
    for count in range(1, found + 2):
        sized = replace(one, policies=(policy,), cluster=one.cluster.model_copy(update={"gpu_count": count}))
        if attempt(sized, slo).keeps:
            return count
    return None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, metavar="DIR")
    parser.add_argument("--limit", type=int, default=300, metavar="N", help="requests per trace (%(default)s)")
    args = parser.parse_args(argv)
    equal = True
    try:
        print("| trace | requests | static | with dropping | exhaustive | s | equal |\n|" + "---|" * 7, flush=True)
        for name, one, slo in cases(args.traces, args.limit):
            began_s = time.process_time()
            columns = size(replace(one, policies=("recompute", DROP)), slo, _MOST).columns
            took_s = time.process_time() - began_s
            found = [column.gpu_count for column in columns]
            right = [exhaustive(one, column.policy, slo, column.gpu_count or _MOST - 1) for column in columns]
            equal = equal and found == right
            told = (len(one.trace.requests), *found, " ".join(map(str, right)), f"{took_s:.1f}", found == right)
            print(f"| {name} | {' | '.join(map(str, told))} |", flush=True)
    except BallastError as error:
        print(f"sizes: {error}", file=sys.stderr)
        return 2
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
