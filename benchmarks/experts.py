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

MODELS = ("Qwen3-32B", "Qwen3-30B-A3B", "Qwen2.5-14B", "Mixtral-8x7B", "gpt-oss-20b")
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
        "| model | experts | GPUs of an instance | parameters | requests per s | pairs carry | P99 TTFT, recompute |"
        " with drop | a token takes |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for model_name in MODELS:
        for gpu in GPUS:
            ours, plain = (found.get((model_name, gpu, policy)) for policy in reversed(POLICIES))
            if ours is None or plain is None:
                continue
            model = find_model(model_name)
            experts = f"{model.experts_per_token} of {model.experts_per_layer}" if model.experts_per_layer else "-"
            if ours["failed"] or plain["failed"]:
                lines.append(f"| {model_name} | {experts} | {ours['gpus']} x {gpu} | failed | | | | | |")
                continue
            pace = ours["tpot_p50_s"] / plain["tpot_p50_s"]
            lines.append(
                f"| {model_name} | {experts} | {ours['gpus']} x {gpu} | {ours['share']:.0%} | {ours['rate_per_s']:.1f} "
                f"| {carried_by_pairs(ours['share']):.2f} x | {plain['ttft_p99_s']:.2f} s | {ours['ttft_p99_s']:.2f} s "
                f"| {pace:.2f} x |"
            )
    return "\n".join(lines)


def draw(found: Mapping[tuple[str, str, str], Mapping[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Rectangle

    models = [model for model in MODELS if any(key[0] == model for key in found)]
    figure, axes = plt.subplots(figsize=(6, 1.3 * len(models) + 1))
    for row, model in enumerate(models):
        for column, gpu in enumerate(GPUS):
            plain, ours = (found.get((model, gpu, policy)) for policy in POLICIES)
            if plain is None or ours is None or plain["failed"] or ours["failed"]:
                axes.text(column, row, "not run", ha="center", va="center", color="0.4")
                continue
            before_s, after_s = float(plain["ttft_p99_s"]), float(ours["ttft_p99_s"])
            gain = before_s / after_s
            depth = min(1.0, max(0.0, math.log10(gain) / 2))
            axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, color=plt.get_cmap("Blues")(0.9 * depth)))
            ink = "white" if depth > 0.5 else "black"
            size = f"{gain:.0f} x" if gain >= 10 else f"{gain:.1f} x"
            axes.text(column, row - 0.2, size, ha="center", va="center", color=ink, fontsize=16)
            pace = ours["tpot_p50_s"] / plain["tpot_p50_s"] - 1
            told = f"{before_s:.1f} \u2192 {after_s:.1f} s\nparameters {ours['share']:.0%}\ntokens {pace:+.0%}"
            axes.text(column, row + 0.17, told, ha="center", va="center", color=ink, fontsize=11)
    axes.set_xlim(-0.5, len(GPUS) - 0.5)
    axes.set_ylim(len(models) - 0.5, -0.5)
    axes.set_xticks(range(len(GPUS)), GPUS, fontsize=12)
    axes.set_yticks(range(len(models)), [_label(model) for model in models], fontsize=12)
    axes.set_title("P99 TTFT: times shorter with drop", fontsize=12)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _label(model_name: str) -> str:
    model = find_model(model_name)
    kind = f"{model.experts_per_token} of {model.experts_per_layer} experts" if model.experts_per_layer else "dense"
    return f"{model_name}\n{kind}\n{model.parameter_bytes / 1e9:.0f} GB"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/experts"))
    parser.add_argument("--cells", help="cells as model:gpu,... (default: all)")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="only write the results into docs/")
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
