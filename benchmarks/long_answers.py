"""Long answers beside short memory: six draws of the lengths, on the arrivals of an open trace, simulated.

    python -m benchmarks.long_answers TRACE.csv [--draws 1,2,3,4,5,6] [--policies drop,static-pipeline]

TRACE.csv has the columns arrival_s, input_tokens and output_tokens; meant is `azure_conv_spike640_a.csv`, 640 s of
Azure's conversation trace of 2023 (18:15:46 to 18:26:26). Every sixth of its requests is taken, with a prompt of at
most 3,000 tokens and an answer as reasoning models give them: lognormal, median 1,700 tokens, sigma 0.9, from 50 to
12,000. Twice as many of these come to Qwen2.5-14B on eight A100 of 40 GB.

Prints TTFT, TPOT, tokens for each second until the last arrival, and for how long at most a request waited where it was
full although another group had room. About half a minute for each run.
"""

import argparse
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.regret_cells import figures_of, long_answer
from sim.hardware import find_cluster, find_model
from sim.jobs.simulation import SimJob, specs_of, world_of
from sim.results import Sample, SimRun
from tools.bench.traces import Trace, read_trace
from tools.bench.upscale import upscaled

DRAWS = (1, 2, 3, 4, 5, 6)
_EVERY, _MOST_INPUT_TOKENS, _RATE_SCALE = 6, 3_000, 2.0


def long_answers(trace: Trace, draw: int) -> Trace:
    """The trace with answers as reasoning models give them, before its rate is scaled."""
    rng = random.Random(draw)
    requests = tuple(
        replace(
            request,
            input_tokens=min(request.input_tokens, _MOST_INPUT_TOKENS),
            output_tokens=long_answer(rng),
        )
        for request in trace.requests[::_EVERY]
    )
    return replace(trace, requests=requests, lengths=f"lognormal, draw {draw}")


def job_of(trace: Trace, draw: int, policies: tuple[str, ...]) -> SimJob:
    model = find_model("Qwen2.5-14B")
    scaled = upscaled(long_answers(trace, draw), _RATE_SCALE, seed=0).scaled(max_total_tokens=model.max_model_len)
    return SimJob(trace=scaled, model=model, cluster=find_cluster("8xA100-40G"), policies=policies)


def stranded_s(samples: Sequence[Sample]) -> float:
    """The longest time in which there was always something that waited where it was full while another had room: no
    request waited so for longer.
    """
    longest_s, since_s, last_s = 0.0, math.inf, 0.0
    for sample in samples:
        if sample.stranded_count:
            since_s = min(since_s, last_s)  # it waited at the sample before, too
            longest_s = max(longest_s, sample.at_s - since_s)
        else:
            since_s = math.inf
        last_s = sample.at_s
    return longest_s


def told(run: SimRun) -> str:
    found = figures_of(run)
    return (
        f"TTFT {found['ttft_p50_s']:6.2f} / {found['ttft_p99_s']:6.2f} s, TPOT {1e3 * found['tpot_p50_s']:5.1f} /"
        f" {1e3 * found['tpot_p99_s']:6.1f} ms (P50 / P99), {found['tokens_per_s']:6.0f} tokens/s,"
        f" {found['preemptions']} preempted, {found['drops']} drops, {found['unserved']} unfinished,"
        f" {found['stranded']:.0%} of the waiting where it was full beside another's room, there for"
        f" {stranded_s(run.samples):.1f} s on end at most"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--draws", default=",".join(map(str, DRAWS)))
    parser.add_argument("--policies", default="drop,static-pipeline")
    args = parser.parse_args()
    trace = read_trace(args.trace)
    for draw in map(int, args.draws.split(",")):
        job = job_of(trace, draw, tuple(args.policies.split(",")))
        for spec, rules in specs_of(job):
            print(f"draw {draw}  {spec.label:16} {told(world_of(job, rules).run())}", flush=True)


if __name__ == "__main__":
    main()
