"""Long answers beside short memory: six draws of the lengths, on the arrivals of an open trace, simulated.

    python -m benchmarks.long_answers TRACE.csv [--draws 1,2,3,4,5,6] [--policies drop,static-pipeline]

TRACE.csv has the columns arrival_s, input_tokens and output_tokens; meant is `azure_conv_spike640_a.csv`, 640 s of
Azure's conversation trace of 2023 (18:15:46 to 18:26:26). Every sixth of its requests is taken, with a prompt of at
most 3,000 tokens and an answer as reasoning models give them: lognormal, median 1,700 tokens, sigma 0.9, from 50 to
12,000. Twice as many of these come to Qwen2.5-14B on eight A100 of 40 GB.

Prints P99 TTFT, P50 and P99 TPOT, and tokens for each second until the last arrival. About half a minute for each run.
"""

import argparse
import random
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ballast.bench.traces import Trace, read_trace
from ballast.bench.upscale import upscaled
from benchmarks.regret_cells import long_answer
from sim.hardware import find_cluster, find_model
from sim.jobs.simulation import SimJob, specs_of, world_of
from sim.results import Outcome, SimRun

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a run comes to. Times in seconds."""

    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    tokens_per_s: float  # until the last arrival: after it one straggler decides
    preemption_count: int
    unfinished_count: int
    drop_count: int

    @staticmethod
    def of(run: SimRun) -> "Figures":
        answered = [r for r in run.records if r.token_times_s]
        ttfts_s = [r.token_times_s[0] - r.arrival_s for r in answered]
        several = [r.token_times_s for r in answered if len(r.token_times_s) > 1]
        tpots_s = [(times_s[-1] - times_s[0]) / (len(times_s) - 1) for times_s in several]
        last_s = max(r.arrival_s for r in run.records)
        early_count = sum(at_s <= last_s for r in answered for at_s in r.token_times_s)
        return Figures(
            ttft_p50_s=float(np.quantile(ttfts_s, 0.5)),
            ttft_p99_s=float(np.quantile(ttfts_s, 0.99)),
            tpot_p50_s=float(np.quantile(tpots_s, 0.5)),
            tpot_p99_s=float(np.quantile(tpots_s, 0.99)),
            tokens_per_s=early_count / last_s,
            preemption_count=run.samples[-1].preemptions_total,
            unfinished_count=sum(r.outcome is not Outcome.FINISHED for r in run.records),
            drop_count=sum(t.journal.kind.value == "drop" and t.journal.stage.value == "done" for t in run.transitions),
        )

    def __str__(self) -> str:
        return (
            f"TTFT {self.ttft_p50_s:6.2f} / {self.ttft_p99_s:6.2f} s, TPOT {1e3 * self.tpot_p50_s:5.1f} /"
            f" {1e3 * self.tpot_p99_s:6.1f} ms (P50 / P99), {self.tokens_per_s:6.0f} tokens/s,"
            f" {self.preemption_count} preempted, {self.drop_count} drops, {self.unfinished_count} unfinished"
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
            print(f"draw {draw}  {spec.label:16} {Figures.of(world_of(job, rules).run())}", flush=True)


if __name__ == "__main__":
    main()
