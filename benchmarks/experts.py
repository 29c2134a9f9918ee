"""Benefit of a drop for mixtures of experts and dense models at equal load, simulated on three kinds of GPUs.

    python -m benchmarks.experts [--out out/experts] [--cells gpt-oss-20b:L40S,...]
    python -m benchmarks.experts --write        # table and figure into docs/

Each model has two instances, each with the fewest GPUs that hold the parameters in at most 85 % of their memory.
Prompts have 800 tokens on average, answers 600 (lognormal). The load is half for 15 s, full for 40 s, then half again.
Full is the load at which demand would reach 125 % of the memory in the burst, or prompts take 85 % of the time,
whichever is less, so that the scarce resource is equally scarce in each cell. Runs whose results are in --out are not
repeated.
"""

import argparse
import json
import math
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ballast.common.errors import InvariantViolation
from benchmarks.quoting import quote
from benchmarks.regret_cells import figures_of
from sim.hardware import Cluster, ModelSpec, find_cluster, find_gpu, find_model, timings
from sim.jobs.settled import Load, carried_by_pairs, peak_demand, settled
from sim.jobs.simulation import SimJob, WorkerSize, specs_of, world_of
from tools.bench.traces import Trace, TraceRequest

MODELS = ("Qwen2.5-14B", "Qwen3-32B", "gpt-oss-20b", "Qwen3-30B-A3B", "Mixtral-8x7B")
GPUS = ("L40S", "A100-80G", "H100-80G")
POLICIES = ("recompute", "drop")
PAGE, FIGURE = Path("docs/gpus.md"), Path("docs/pictures/experts.png")
_COUNT, _MOST_PARAMETERS = 2, 0.85
_PROMPT, _PROMPT_SIGMA, _ANSWER, _SIGMA = 800, 0.6, 600, 0.8
_BEFORE_S, _BURST_S, _AFTER_S = 15.0, 40.0, 10.0
_OVER, _MOST_PROMPTS, _MOST_RATE = 1.25, 0.85, 200.0
_SIZE = WorkerSize(max_running_count=1024)  # the number of running requests is not the bottleneck


@dataclass(frozen=True, slots=True)
class ExpertsCell:
    model: ModelSpec
    cluster: Cluster
    share: float  # fraction of the memory used by parameters

    @classmethod
    def of(cls, model_name: str, gpu_name: str) -> "ExpertsCell":
        model, gpu = find_model(model_name), find_gpu(gpu_name, "--cells")
        usable = gpu.memory_bytes * timings().memory_fraction
        count = next(n for n in (1, 2, 4, 8) if model.parameter_bytes <= _MOST_PARAMETERS * usable * n)
        spec = model.model_copy(update={"gpus_per_instance": count, "instance_parameter_bytes": None})
        return cls(spec, find_cluster(f"{_COUNT * count}x{gpu_name}"), model.parameter_bytes / (usable * count))

    def rate_per_s(self) -> float:
        """Requests per second per instance in the burst: the highest rate within the limits on memory and prompts."""
        square = _ANSWER * _ANSWER * math.exp(_SIGMA**2)
        low, high = 1e-4, _MOST_RATE
        for _ in range(30):
            middle = (low + high) / 2
            load = Load(middle, _PROMPT, _ANSWER, _PROMPT * _ANSWER, square)
            there = settled(self.model, self.cluster, timings(), load)
            phases = ((_BEFORE_S, replace(load, rate_per_s=middle / 2)), (_BURST_S, load))
            peak = peak_demand(self.model, self.cluster, timings(), phases)
            over = there.prompt_share > _MOST_PROMPTS or peak > _OVER
            low, high = (low, middle) if over else (middle, high)
        return low

    def run(self, policy: str, seed: int) -> Mapping[str, Any]:
        rate = self.rate_per_s()
        trace = _trace(rate, seed).scaled(max_total_tokens=self.model.max_model_len)
        job = SimJob(trace=trace, model=self.model, cluster=self.cluster, policies=(policy,), seed=seed, worker=_SIZE)
        [(_, rules)] = specs_of(job)
        told = {"share": self.share, "gpus": self.model.gpus_per_instance, "rate_per_s": rate}
        try:
            return told | {"failed": None} | figures_of(world_of(job, rules).run())
        except InvariantViolation as error:
            return told | {"failed": str(error)}


def _trace(rate_per_s: float, seed: int) -> Trace:
    rng = random.Random(seed)
    requests: list[TraceRequest] = []
    at_s = end_s = 0.0
    for seconds, factor in ((_BEFORE_S, 0.5), (_BURST_S, 1.0), (_AFTER_S, 0.5)):
        end_s += seconds
        while (at_s := at_s + rng.expovariate(rate_per_s * _COUNT * factor)) <= end_s:
            prompt, tokens = _drawn(rng, _PROMPT, _PROMPT_SIGMA), _drawn(rng, _ANSWER, _SIGMA)
            requests.append(TraceRequest(at_s, min(max(4, prompt), 8000), min(max(2, tokens), 8000)))
        at_s = end_s
    return Trace(source="experts", format="generated", requests=tuple(requests))


def _drawn(rng: random.Random, mean: float, sigma: float) -> int:
    return int(mean * math.exp(rng.gauss(0.0, sigma) - sigma**2 / 2))


def table(found: Mapping[tuple[str, str, str], Mapping[str, Any]]) -> str:
    lines = [
        "| model | experts | GPUs of an instance | parameters | pairs carry | P99 TTFT, recompute | with drop |"
        " a token takes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model_name in MODELS:
        for gpu in GPUS:
            ours, plain = (found.get((model_name, gpu, policy)) for policy in reversed(POLICIES))
            if ours is None or plain is None:
                continue
            model = find_model(model_name)
            experts = f"{model.experts_per_token} of {model.experts_per_layer}" if model.experts_per_layer else "-"
            if ours["failed"] or plain["failed"]:
                lines.append(f"| {model_name} | {experts} | {ours['gpus']} x {gpu} | failed | | | | |")
                continue
            pace = ours["tpot_p50_s"] / plain["tpot_p50_s"]
            lines.append(
                f"| {model_name} | {experts} | {ours['gpus']} x {gpu} | {ours['share']:.0%} "
                f"| {carried_by_pairs(ours['share']):.2f} x | {plain['ttft_p99_s']:.2f} s | {ours['ttft_p99_s']:.2f} s "
                f"| {pace:.2f} x |"
            )
    return "\n".join(lines)


def draw(found: Mapping[tuple[str, str, str], Mapping[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3.6))
    models = [model for model in MODELS if any(key[0] == model for key in found)]
    for at, gpu in enumerate(GPUS):
        label: str | None = gpu
        for row, model in enumerate(models):
            pair = [found.get((model, gpu, policy)) for policy in POLICIES]
            if any(one is None or one["failed"] for one in pair):
                continue
            plain, ours = (max(float(one["ttft_p99_s"]), 0.01) for one in pair if one is not None)
            x, colour = row + (at - 1) * 0.26, f"C{at}"
            axes.bar(x, plain, 0.11, color=colour, alpha=0.4)
            axes.bar(x + 0.12, ours, 0.11, color=colour, label=label)
            label = None
    axes.set_yscale("log")
    axes.set_xticks(range(len(models)), models)
    axes.set_ylabel("P99 TTFT, s")
    axes.set_title("pale: recompute, full: drop")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/experts"))
    parser.add_argument("--cells", help="model:gpu,...; all by default")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="only writes, into docs/")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    words = [word.split(":") for word in given.cells.split(",")] if given.cells else []
    cells = [(model, gpu) for model, gpu in words] or [(model, gpu) for gpu in GPUS for model in MODELS]
    for model, gpu in () if given.write else cells:
        for policy in POLICIES:
            path = given.out / f"{model}-{gpu}-{policy}.json"
            if not path.exists():
                run = ExpertsCell.of(model, gpu).run(policy, given.seed)
                told = {"model": model, "gpu": gpu, "policy": policy, **run}
                path.write_text(json.dumps(told, indent=1))
                print(f"{path.stem}: {told.get('ttft_p99_s')}", file=sys.stderr, flush=True)
    runs = [json.loads(path.read_text()) for path in sorted(given.out.glob("*.json"))]
    found = {(run["model"], run["gpu"], run["policy"]): run for run in runs}
    print(table(found))
    draw(found, FIGURE if given.write else given.out / "experts.png")
    if given.write:
        quote(PAGE, "experts", table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
