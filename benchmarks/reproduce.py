"""The evaluation of KunServe (EuroSys '26) in one command, by simulation: figures, results, and a table of figures.

    python -m benchmarks.reproduce [--out out/reproduce] [--only longbench-14b,...] [--trace FILE]
    python -m benchmarks.reproduce --write                # puts the last run's table into docs/reproduction.md

Runs the scenarios under benchmarks/scenarios/kunserve, one policy after the other, in as many processes as there are
cores (`--processes`), and writes

    runs/WORKLOAD/POLICY.json   results, in the schema of `ballast bench` (docs/results-schema.md)
    figures                     2, 5, 12, 13, 16 and 17 as `ballast bench plot` draws them, and 14
    table.md                    paper, simulated, ratio; under what load; what differs from the paper's machines

`--compute-fraction` replaces the calibrated share of the GPU's peak (sim/catalogue/timings.yaml): a question, not a
calibration. A run takes 5 to 40 s of processor time.
"""

import argparse
import hashlib
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from ballast.common.errors import BallastError, ConfigError
from benchmarks.quoting import quote
from benchmarks.reproduction import lines_of, regime, table
from sim.jobs.scenarios import job_of
from sim.jobs.simulation import simulate, specs_of
from sim.scenario import Scenario, read_scenario
from tools.bench.figures import draw_all
from tools.bench.report import files_of
from tools.bench.results import SLO_SCALES, BenchResult, ComparisonFacts, PolicyResult, write_result
from tools.bench.study import read_study
from tools.bench.style import RC

SCENARIOS = Path(__file__).parent / "scenarios" / "kunserve"
ABLATION = "ablation-14b"
PAGE = Path("docs/reproduction.md")


@dataclass(frozen=True, slots=True)
class Run:
    workload: str
    scenario: Scenario  # with one policy
    word: str
    position: int
    compute_fraction: float | None


def runs_of(
    names: Sequence[str], trace: str | None, compute_fraction: float | None, rate_scale: float
) -> Iterator[Run]:
    position = 0
    for name in names:
        scenario = read_scenario(SCENARIOS / f"{name}.yaml").model_copy(update={"rate_scale": rate_scale})
        if trace is not None:
            scenario = scenario.model_copy(update={"trace": trace})
        for word in scenario.policies:
            yield Run(name, scenario.model_copy(update={"policies": (word,)}), word, position, compute_fraction)
            position += 1


def carry_out(run: Run, out: Path) -> tuple[Path, float]:
    """Writes the result. Returns its path and the processor time."""
    began_s = time.process_time()
    job = job_of(run.scenario)
    if run.compute_fraction is not None:
        job = replace(job, timings=job.timings.model_copy(update={"compute_fraction": run.compute_fraction}))
    spec, _ = specs_of(job)[0]
    result = simulate(job, time.time())
    capacity = result.policies[spec.label].series.kv_capacity_bytes[0]
    if spec.policy == "static-pipeline":  # what the cluster has before anything is dropped
        capacity = _undropped(run)
    facts = ComparisonFacts(
        workload=run.workload,
        policy=spec.label,
        overload_policy=spec.policy,
        knobs={name: value for name, value in spec.knobs.items() if name != "label"},
        repetition=0,
        position=run.position,
        warmup_request_count=0,
        undropped_kv_bytes=capacity,
        forecast_demand_fraction=0.0,
        plan_digest=hashlib.blake2b(run.workload.encode(), digest_size=8).hexdigest(),
    )
    path = out / "runs" / run.workload / f"{_file_name(spec.label)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_result(path, result.model_copy(update={"comparison": facts}))
    return path, time.process_time() - began_s


def _undropped(run: Run) -> int:
    plain = job_of(run.scenario.model_copy(update={"policies": ("recompute",), "limit": 1}))
    return simulate(plain, 0.0).policies["recompute"].series.kv_capacity_bytes[0]


def _file_name(label: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", label)


def gathered(out: Path) -> dict[str, BenchResult]:
    """One result for each workload, with all policies, and SLOs in multiples of the best baseline's medians."""
    study = read_study(out)
    found: dict[str, BenchResult] = {}
    for workload in study.workloads:
        settings: dict[str, str | int | float | bool | None] = {}
        policies: dict[str, PolicyResult] = {}
        for contestant in workload.contestants:
            settings |= contestant.runs[0].config.cluster
            fractions = {scale: workload.violations(contestant, scale).middle for scale in SLO_SCALES}
            policies[contestant.label] = contestant.first.model_copy(update={"slo_violation_fraction": fractions})
        sample = workload.sample
        config = sample.config.model_copy(update={"cluster": settings})
        found[workload.name] = sample.model_copy(update={"policies": policies, "config": config})
    return found


def draw(out: Path, results: dict[str, BenchResult]) -> int:
    study = read_study(out)
    with mpl.rc_context(RC):
        drawn = draw_all(study)
        for one in drawn:
            for form, data in files_of(one).items():
                (out / f"{one.name}.{form}").write_bytes(data)
        if ABLATION in results:
            _draw_ablation(results[ABLATION]).savefig(out / "figure-14.png", dpi=150)
    return len(drawn)


def _draw_ablation(result: BenchResult) -> Figure:
    """Figure 14: what each technique adds."""
    figure = Figure(figsize=(11.0, 3.2), layout="constrained")
    axes = figure.subplots(1, 3)
    names = list(result.policies)
    for axis, what, unit in ((axes[0], "ttft_s", 1.0), (axes[1], "tpot_s", 1e3)):
        for number, percentile in enumerate(("p90", "p99", "p999")):
            heights = [unit * (getattr(getattr(result.policies[n], what), percentile) or 0.0) for n in names]
            bars = axis.bar([i + 0.27 * number for i in range(len(names))], heights, 0.25, label=percentile.upper())
            axis.bar_label(bars, fmt="%.3g", fontsize=6)
        axis.set_ylabel("TTFT (s)" if unit == 1.0 else "TPOT (ms)")
        axis.set_xticks([i + 0.27 for i in range(len(names))], names, fontsize=7, rotation=15, ha="right")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    shares = [100.0 * (result.policies[n].bubble_fraction or 0.0) for n in names]
    axes[2].bar_label(axes[2].bar(range(len(names)), shares, 0.6), fmt="%.1f")
    axes[2].set_xticks(range(len(names)), names, fontsize=7, rotation=15, ha="right")
    axes[2].set_ylabel("bubbles in pipelines (%)")
    return figure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/reproduce"))
    parser.add_argument("--only", metavar="NAMES", help=f"of {', '.join(_known())}")
    parser.add_argument("--trace", metavar="FILE", help="arrivals instead of the drawn ones; lengths stay")
    parser.add_argument("--compute-fraction", type=float, metavar="X", help="of the GPU's peak (0.72)")
    parser.add_argument("--rate-scale", type=float, default=1.0, metavar="X", help="times as many requests")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--write", action="store_true", help="puts the table of the runs in --out into docs/")
    args = parser.parse_args()
    try:
        return _reproduce(args)
    except BallastError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _known() -> list[str]:
    return sorted(path.stem for path in SCENARIOS.glob("*.yaml"))


def _reproduce(args: argparse.Namespace) -> int:
    names = args.only.split(",") if args.only else _known()
    if unknown := sorted(set(names) - set(_known())):
        raise ConfigError("--only", f"{', '.join(unknown)}: not known; there are {', '.join(_known())}")
    runs = [] if args.write else list(runs_of(names, args.trace, args.compute_fraction, args.rate_scale))
    with ProcessPoolExecutor(args.processes) as pool:
        futures = [pool.submit(carry_out, run, args.out) for run in runs]
        for done, future in enumerate(as_completed(futures), 1):
            path, seconds = future.result()
            print(f"{done} of {len(runs)}: {path}, {seconds:.0f} s of processor time", flush=True)
    results = gathered(args.out)
    count = draw(args.out, results)
    lines = lines_of(results)
    met = sum(line.within for line in lines)
    page = f"{met} of {len(lines)} lines are within 1.5 x.\n\n{table(lines)}\n\nUnder this load:\n\n{regime(results)}\n"
    (args.out / "table.md").write_text(page)
    if args.write:
        quote(PAGE, "reproduction", page)
    print(f"\n{page}\nwrote {args.out / 'table.md'} and {count} figures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
