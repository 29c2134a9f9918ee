"""Where dropping parameters pays: the parameters' share of the memory against the length of answers, simulated.

    python -m benchmarks.where_it_pays [--out out/where-it-pays] [--cells 0.8:1000,0.6:300]
    python -m benchmarks.where_it_pays --write     # the figure into docs/

Qwen2.5-14B on four machines as fast as an A100-80G, whose memory alone differs: parameters are 80, 60, 40 and 20 % of
it. Prompts of 800 tokens, answers with the mean named (lognormal, sigma 0.8). Half of a load, then a burst of it for
2.5 times as long as a request stays by itself (40 to 160 s), in which demand would reach 125 % of the memory if that
had no end, or prompts take 85 % of the time, whichever is less: what is short is short by about as much in each cell.
Beside each share stands what pairs carry by the closed form (`sim/jobs/settled.py`).

Each run leaves its figures in --out, and is not made again; `where-it-pays.png` is drawn from what is there.
"""

import argparse
import json
import math
import os
import random
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ballast.common.errors import InvariantViolation
from benchmarks.regret_cells import figures_of
from benchmarks.where_it_pays_figure import Spot, draw
from sim.hardware import Cluster, find_cluster, find_model, timings
from sim.jobs.settled import Load, Settled, peak_demand, settled
from sim.jobs.simulation import SimJob, WorkerSize, specs_of, world_of
from tools.bench.traces import Trace, TraceRequest

SHARES = (0.8, 0.6, 0.4, 0.2)
ANSWERS = (100, 300, 1000, 3000)
PLAIN, OURS = "recompute", "drop"
STATICS = (PLAIN, "static-pipeline")
FIGURE = Path("docs/pictures/where-it-pays.png")
_MODEL, _MACHINE, _COUNT = "Qwen2.5-14B", "A100-80G", 4
_PROMPT, _PROMPT_SIGMA, _SIGMA = 800, 0.6, 0.8
_OVER, _MOST_PROMPTS = 1.25, 0.85
_ALONE = 1e-4  # requests a second: hardly ever two at once
_SIZE = WorkerSize(max_running_count=1024)  # places are not what is short
_LONGEST_PROMPT, _LONGEST_ANSWER = 8000, 16_000


@dataclass(frozen=True, slots=True)
class Burst:
    rate_per_s: float  # of an instance
    demand: float
    prompt_share: float
    before_s: float
    for_s: float


def cluster_of(share: float) -> Cluster:
    base = find_cluster(f"{_COUNT}x{_MACHINE}")
    memory = int(find_model(_MODEL).parameter_bytes / share / timings().memory_fraction)
    return base.model_copy(update={"gpu": base.gpu.model_copy(update={"memory_bytes": memory})})


def burst_of(share: float, answer: int) -> Burst:
    """The largest rate that is over memory and prompts' time by no more than what is told above."""
    model, cluster = find_model(_MODEL), cluster_of(share)
    square = answer * answer * math.exp(_SIGMA**2)

    def at(rate_per_s: float) -> tuple[Load, Settled]:
        load = Load(rate_per_s, _PROMPT, answer, _PROMPT * answer, square)
        return load, settled(model, cluster, timings(), load)

    _, alone = at(_ALONE)
    stay_s = answer * alone.token_s
    before_s, for_s = min(100.0, max(30.0, stay_s)), min(160.0, max(40.0, 2.5 * stay_s))
    low, high = _ALONE, 40.0
    for _ in range(30):
        middle = (low + high) / 2
        load, there = at(middle)
        phases = ((before_s, replace(load, rate_per_s=middle / 2)), (for_s, load))
        over = there.prompt_share > _MOST_PROMPTS or peak_demand(model, cluster, timings(), phases) > _OVER
        low, high = (low, middle) if over else (middle, high)
    load, there = at(low)
    phases = ((before_s, replace(load, rate_per_s=low / 2)), (for_s, load))
    return Burst(low, peak_demand(model, cluster, timings(), phases), there.prompt_share, before_s, for_s)


def trace_of(burst: Burst, answer: int, seed: int) -> Trace:
    rng = random.Random(seed)
    requests: list[TraceRequest] = []
    at_s = end_s = 0.0
    for seconds, factor in ((burst.before_s, 0.5), (burst.for_s, 1.0), (40.0, 0.5)):
        end_s += seconds
        while (at_s := at_s + rng.expovariate(burst.rate_per_s * _COUNT * factor)) <= end_s:
            prompt, tokens = _drawn(rng, _PROMPT, _PROMPT_SIGMA), _drawn(rng, answer, _SIGMA)
            requests.append(
                TraceRequest(at_s, min(max(4, prompt), _LONGEST_PROMPT), min(max(2, tokens), _LONGEST_ANSWER))
            )
        at_s = end_s
    return Trace(source="where_it_pays", format="generated", requests=tuple(requests))


def _drawn(rng: random.Random, mean: float, sigma: float) -> int:
    return int(mean * math.exp(rng.gauss(0.0, sigma) - sigma**2 / 2))


def carry_out(share: float, answer: int, policy: str, seed: int) -> Mapping[str, Any]:
    burst = burst_of(share, answer)
    model = find_model(_MODEL)
    trace = trace_of(burst, answer, seed).scaled(max_total_tokens=model.max_model_len)
    job = SimJob(trace=trace, model=model, cluster=cluster_of(share), policies=(policy,), seed=seed, worker=_SIZE)
    [(_, rules)] = specs_of(job)
    told = {"share": share, "answer": answer, "policy": policy, "demand": burst.demand, "prompts": burst.prompt_share}
    try:
        return told | {"failed": None} | figures_of(world_of(job, rules).run())
    except InvariantViolation as error:
        return told | {"failed": str(error)}


def spots(runs: Mapping[tuple[float, int, str], Mapping[str, Any]]) -> list[Spot]:
    """Cells of which all policies have been run."""
    found: list[Spot] = []
    for share in SHARES:
        for answer in ANSWERS:
            mine = {policy: runs.get((share, answer, policy)) for policy in (*STATICS, OURS)}
            waits: dict[str, float] = {
                name: run["ttft_p99_s"] for name, run in mine.items() if run is not None and run["failed"] is None
            }
            if len(waits) == len(mine):
                best = min(STATICS, key=lambda name: waits[name])
                ours, static = runs[share, answer, OURS], runs[share, answer, best]
                pace = ours["tpot_p50_s"] / static["tpot_p50_s"]
                found.append(Spot(share, answer, waits[OURS], waits[PLAIN], waits[best], pace, ours["prompts"]))
    return found


def make(out: Path, wanted: Sequence[tuple[float, int]], seed: int, processes: int) -> None:
    runs = [(*cell, policy) for policy in (OURS, *STATICS) for cell in wanted]
    missing = [run for run in runs if not _path(out, *run).exists()]
    with ProcessPoolExecutor(processes) as pool:
        futures = {pool.submit(carry_out, *run, seed): run for run in missing}
        for count, future in enumerate(as_completed(futures), 1):
            path = _path(out, *futures[future])
            path.write_text(json.dumps(future.result(), indent=1))
            print(f"{count}/{len(missing)} {path.stem}", file=sys.stderr, flush=True)


def _path(out: Path, share: float, answer: int, policy: str) -> Path:
    return out / f"{share:g}-{answer}-{policy}.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/where-it-pays"))
    parser.add_argument("--cells", help="share:answer,...; all by default")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--write", action="store_true", help="only draws, into docs/")
    given = parser.parse_args()
    words = [word.split(":") for word in given.cells.split(",")] if given.cells else []
    wanted = [(float(share), int(answer)) for share, answer in words] or [
        (s, a) for a in reversed(ANSWERS) for s in SHARES
    ]
    given.out.mkdir(parents=True, exist_ok=True)
    if not given.write:
        make(given.out, wanted, given.seed, given.processes)
    runs = {
        (r["share"], r["answer"], r["policy"]): r for r in (json.loads(p.read_text()) for p in given.out.glob("*.json"))
    }
    found = spots(runs)
    for spot in found:
        print(
            f"parameters {spot.share:.0%}, answers {spot.answer}: P99 TTFT {spot.ours_s:.2f} s with drop,"
            f" {spot.plain_s:.2f} s with recompute, {spot.static_s:.2f} s with the best static policy"
        )
    draw(found, SHARES, ANSWERS, FIGURE if given.write else given.out / "where-it-pays.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
