"""Simulates the evaluation of KunServe (EuroSys '26): pictures, results, and a table that compares them with the paper.

    python -m benchmarks.reproduce [--out out/reproduce] [--only longbench-14b,...] [--trace FILE]
    python -m benchmarks.reproduce --write                # puts the last run's table into docs/reproduction.md

Runs the scenarios under benchmarks/scenarios/kunserve, one policy after the other, in as many processes as there are
cores (`--processes`), and writes

    runs/WORKLOAD/POLICY.json   results, in the schema of `ballast bench` (docs/results-schema.md)
    WORKLOAD.png                load, memory and waits over time, one column per policy
    table.md                    paper, simulated, ratio; load

Every figure of the paper is a range as stated there; a single value is a range of one. The ratio is the simulated
figure over the nearest end of that range, and 1 within it. `--compute-fraction` replaces the calibrated share of the
GPU's peak (sim/catalogue/timings.yaml), for what-if analysis only. A run takes 5 to 40 s of processor time.
"""

import argparse
import hashlib
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from ballast.common.errors import BallastError, ConfigError
from benchmarks.quoting import quote
from sim.jobs.scenarios import job_of
from sim.jobs.simulation import simulate, specs_of
from sim.scenario import Scenario, read_scenario
from tools.bench.plot import plot_result
from tools.bench.results import SLO_SCALES, BenchResult, ComparisonFacts, PolicyResult, write_result
from tools.bench.study import read_study

SCENARIOS = Path(__file__).parent / "scenarios" / "kunserve"
PAGE = Path("docs/reproduction.md")
_PLAIN, _OURS, _STATIC = "recompute", "drop", "static-pipeline"
_LOOKAHEAD = "static-pipeline:microbatching=lookahead"  # microbatches like those of drop
_WITHIN = 1.5
BURST_AT_S = 45.0  # start of the burst in all scenarios


@dataclass(frozen=True, slots=True)
class PaperRun:
    workload: str
    scenario: Scenario  # with one policy
    word: str
    position: int
    compute_fraction: float | None


def runs_of(
    names: Sequence[str], trace: str | None, compute_fraction: float | None, rate_scale: float
) -> Iterator[PaperRun]:
    position = 0
    for name in names:
        scenario = read_scenario(SCENARIOS / f"{name}.yaml").model_copy(update={"rate_scale": rate_scale})
        if trace is not None:
            scenario = scenario.model_copy(update={"trace": trace})
        for word in scenario.policies:
            yield PaperRun(name, scenario.model_copy(update={"policies": (word,)}), word, position, compute_fraction)
            position += 1


def carry_out(run: PaperRun, out: Path) -> tuple[Path, float]:
    """Run a job and write the result. Returns its path and the processor time."""
    began_s = time.process_time()
    job = job_of(run.scenario)
    if run.compute_fraction is not None:
        job = replace(job, timings=job.timings.model_copy(update={"compute_fraction": run.compute_fraction}))
    spec, _ = specs_of(job)[0]
    result = simulate(job, time.time())
    capacity = result.policies[spec.label].series.kv_capacity_bytes[0]
    if spec.policy == "static-pipeline":  # the cluster's capacity before any drop
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


def _undropped(run: PaperRun) -> int:
    plain = job_of(run.scenario.model_copy(update={"policies": ("recompute",), "limit": 1}))
    return simulate(plain, 0.0).policies["recompute"].series.kv_capacity_bytes[0]


def _file_name(label: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", label)


def gathered(out: Path) -> dict[str, BenchResult]:
    """One result per workload, with all policies, and SLOs as multiples of the best baseline's medians."""
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


# ---------------------------------------------------------------- the table


@dataclass(frozen=True, slots=True)
class PaperClaim:
    """A result that the paper reports, as a range, and how to measure it in a simulated run."""

    figure: str
    what: str
    workload: str
    low: float
    high: float
    unit: str  # "x", "%", "points" or "s"
    measure: Callable[[BenchResult], float | None]


@dataclass(frozen=True, slots=True)
class PaperLine:
    claim: PaperClaim
    simulated: float | None  # None: not measurable

    @property
    def ratio(self) -> float | None:
        claim, value = self.claim, self.simulated
        if value is None:
            return None
        if claim.low <= value <= claim.high:
            return 1.0
        nearest = claim.low if value < claim.low else claim.high
        return value / nearest if nearest else math.inf

    @property
    def within(self) -> bool:
        return self.ratio is not None and 1.0 / _WITHIN <= self.ratio <= _WITHIN


def lines_of(results: Mapping[str, BenchResult]) -> list[PaperLine]:
    """The paper's claims about the simulated workloads, with their simulated values."""
    return [PaperLine(claim, claim.measure(results[claim.workload])) for claim in CLAIMS if claim.workload in results]


def table(lines: Sequence[PaperLine]) -> str:
    """The lines as a Markdown table."""
    rows = ["| figure | what | workload | paper | simulated | ratio | within 1.5 x |", "|---|---|---|---|---|---|---|"]
    for line in lines:
        claim = line.claim
        paper = _figure(claim.low, claim.unit)
        if claim.high != claim.low:
            paper = f"{_figure(claim.low, '')} to {_figure(claim.high, claim.unit)}"
        ratio = "-" if line.ratio is None else f"{line.ratio:.2f}"
        rows.append(
            f"| {claim.figure} | {claim.what} | {claim.workload} | {paper} | {_figure(line.simulated, claim.unit)} |"
            f" {ratio} | {'yes' if line.within else 'no'} |"
        )
    return "\n".join(rows)


def regime(results: Mapping[str, BenchResult]) -> str:
    """Markdown table of the load in each run. It shows whether memory was scarce: a compute-bound cluster gains nothing
    from more memory.
    """
    rows = [
        "| workload (prompts' share of the densest half minute) | policy | mean KV demand | peak | P50 / P99 TTFT (s) |"
        " P50 / P99 TPOT (ms) | bubbles | drops | recomputed |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for workload, result in results.items():
        prompts = result.config.cluster.get("prompt_share")
        told = f"{workload} ({prompts:.0%})" if isinstance(prompts, float) else workload
        for name, policy in result.policies.items():
            demand = _demand(result, policy)
            bubbles = "-" if policy.bubble_fraction is None else f"{policy.bubble_fraction:.1%}"
            drops = sum(t.kind == "drop" and t.phase == "done" for t in policy.transitions)
            recomputed = sum(t.victims_recomputed or 0 for t in policy.transitions)
            rows.append(
                f"| {told} | {name} | {fmean(demand):.0%} | {max(demand):.0%} |"
                f" {_plain(policy.ttft_s.p50)} / {_plain(policy.ttft_s.p99)} |"
                f" {_plain(policy.tpot_s.p50, 1e3)} / {_plain(policy.tpot_s.p99, 1e3)} | {bubbles} | {drops} |"
                f" {recomputed} |"
            )
    return "\n".join(rows)


def _plain(value: float | None, unit: float = 1.0) -> str:
    return "-" if value is None else f"{value * unit:,.3g}"


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    shown = f"{value:.1f}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{shown} {unit}".rstrip()


# ---------------------------------------------------------------- measures


def _over(result: BenchResult, ours: str, theirs: str, of: Callable[[PolicyResult], float | None]) -> float | None:
    """Figure of policy `theirs` divided by that of `ours`; None if one is missing."""
    if ours not in result.policies or theirs not in result.policies:
        return None
    mine, other = of(result.policies[ours]), of(result.policies[theirs])
    return other / mine if mine and other is not None else None


def _gain(rival: str, ours: str = _OURS) -> Callable[[BenchResult], float | None]:
    """P99 TTFT of a rival relative to ours. Of static pipelines, the variant with the lowest counts."""

    def measure(result: BenchResult) -> float | None:
        variants = (rival, _LOOKAHEAD) if rival == _STATIC else (rival,)
        gains = [_over(result, ours, name, lambda p: p.ttft_s.p99) for name in variants]
        return min((gain for gain in gains if gain is not None), default=None)

    return measure


def _change(of: Callable[[PolicyResult], float | None], new: str, old: str) -> Callable[[BenchResult], float | None]:
    """Change in percent; positive if the new value is larger."""

    def measure(result: BenchResult) -> float | None:
        ratio = _over(result, old, new, of)
        return None if ratio is None else 100.0 * (ratio - 1.0)

    return measure


def _less(of: Callable[[PolicyResult], float | None], new: str, old: str) -> Callable[[BenchResult], float | None]:
    change = _change(of, new, old)

    def measure(result: BenchResult) -> float | None:
        value = change(result)
        return None if value is None else -value

    return measure


def _violations(result: BenchResult) -> float | None:
    """Percentage points by which drop's share of requests that violate the SLO is below its rivals', as a mean over
    scales and rivals.
    """
    ours = result.policies.get(_OURS)
    rivals = [policy for name, policy in result.policies.items() if not name.startswith(_OURS)]
    if ours is None or not rivals:
        return None

    def share(policy: PolicyResult) -> float:
        return fmean(policy.slo_violation_fraction[scale] or 0.0 for scale in SLO_SCALES)

    return 100.0 * (fmean(share(rival) for rival in rivals) - share(ours))


def _throughput(result: BenchResult, policy: PolicyResult) -> float | None:
    """Tokens per second while requests arrive; afterwards every policy only drains its queues."""
    span_s = result.trace.span_s
    count = 0
    for request in policy.requests:
        begin_s, end_s = request.first_token_s, request.end_s
        if begin_s is None or end_s is None:
            continue
        if end_s <= span_s:
            count += request.output_tokens
        elif begin_s < span_s:
            share = (span_s - begin_s) / (end_s - begin_s)
            count += round(request.output_tokens * share)
    return count / span_s if span_s else None


def _pipeline_loss(result: BenchResult) -> float | None:
    rivals = [name for name in result.policies if not name.startswith(_STATIC)]
    if _STATIC not in result.policies or not rivals:
        return None
    variants = [_throughput(result, result.policies[name]) for name in (_STATIC, _LOOKAHEAD) if name in result.policies]
    static = max((value for value in variants if value is not None), default=None)
    others = [_throughput(result, result.policies[name]) for name in rivals]
    known = [value for value in others if value]
    return 100.0 * (1.0 - static / fmean(known)) if known and static is not None else None


def _bubbles(name: str) -> Callable[[BenchResult], float | None]:
    def measure(result: BenchResult) -> float | None:
        fraction = result.policies[name].bubble_fraction if name in result.policies else None
        return None if fraction is None else 100.0 * fraction

    return measure


def _demand(result: BenchResult, policy: PolicyResult) -> list[float]:
    """KV demand relative to the capacity without dropping, until the last arrival."""
    capacity = min(p.series.kv_capacity_bytes[0] for p in result.policies.values())
    span_s = result.trace.span_s
    pairs = zip(policy.series.at_s, policy.series.kv_demand_bytes, strict=True)
    return [wanted / capacity for at_s, wanted in pairs if at_s <= span_s] or [0.0]


def _full_s(policy: PolicyResult) -> float | None:
    """Seconds from the start of the burst until demand first exceeds the capacity reachable by dropping."""
    series = policy.series
    most = max(series.kv_capacity_bytes)
    pairs = zip(series.at_s, series.kv_demand_bytes, strict=True)
    return next((at_s - BURST_AT_S for at_s, wanted in pairs if wanted > most), None)


def _stands(result: BenchResult) -> float | None:
    return _over(result, _PLAIN, _OURS, _full_s)


def _freed(result: BenchResult) -> float | None:
    ours = result.policies.get(_OURS)
    return None if ours is None else 100.0 * (max(ours.series.kv_capacity_bytes) / ours.series.kv_capacity_bytes[0] - 1)


def _spike(name: str) -> Callable[[BenchResult], float | None]:
    def measure(result: BenchResult) -> float | None:
        ttft = result.policies[name].ttft_s if name in result.policies else None
        return ttft.max / ttft.p50 if ttft is not None and ttft.max is not None and ttft.p50 else None

    return measure


def _p50_ttft(policy: PolicyResult) -> float | None:
    return policy.ttft_s.p50


def _p50_tpot(policy: PolicyResult) -> float | None:
    return policy.tpot_s.p50


def _p99_tpot(policy: PolicyResult) -> float | None:
    return policy.tpot_s.p99


_RIVALS = ((_PLAIN, "vLLM"), ("swap", "InferCept"), (_STATIC, "vLLM with pipelines"), ("migrate", "Llumnix"))
_SMALL = ("burstgpt-14b", "sharegpt-14b", "longbench-14b")
_BARE, _COORDINATED, _WHOLE = "dynamic drop", "coordinated exchange", "lookahead"
_STAYS = "drop:restore=off"

CLAIMS: tuple[PaperClaim, ...] = (
    PaperClaim("2", "longest TTFT over the median, recompute", "long-14b", 239, 239, "x", _spike(_PLAIN)),
    PaperClaim("2", "longest TTFT over the median, swap", "long-14b", 92, 92, "x", _spike("swap")),
    *(
        PaperClaim("13", f"P99 TTFT gain over {name} ({rival})", workload, 12.7, 72.2, "x", _gain(rival))
        for workload in _SMALL
        for rival, name in _RIVALS
    ),
    *(
        PaperClaim("13", f"P99 TTFT gain over {name} ({rival})", "longbench-72b", 8.4, 11.9, "x", _gain(rival))
        for rival, name in _RIVALS
    ),
    *(
        PaperClaim("13", f"P50 TPOT above {name}", "longbench-14b", 15.8, 22.7, "%", _change(_p50_tpot, _OURS, rival))
        for rival, name in _RIVALS[:2]
    ),
    *(
        PaperClaim("13", f"P50 TPOT above {name}", "longbench-72b", 18.3, 22.7, "%", _change(_p50_tpot, _OURS, rival))
        for rival, name in _RIVALS[:2]
    ),
    *(
        PaperClaim("13", "fewer SLO violations", workload, 7.2, 12.8, "points", _violations)
        for workload in (*_SMALL, "longbench-72b")
    ),
    *(
        PaperClaim("12", "throughput that static pipelines lose", workload, 3.3, 21.8, "%", _pipeline_loss)
        for workload in (*_SMALL, "longbench-72b")
    ),
    PaperClaim("14", "P99 TTFT gain by dropping alone", "ablation-14b", 11.7, 11.7, "x", _gain(_PLAIN, _BARE)),
    PaperClaim("14", "P99 TTFT gain by coordination", "ablation-14b", 1.5, 1.5, "x", _gain(_BARE, _COORDINATED)),
    PaperClaim(
        "14", "P99 TPOT less by lookahead", "ablation-14b", 10.6, 10.6, "%", _less(_p99_tpot, _WHOLE, _COORDINATED)
    ),
    PaperClaim("14", "bubbles without lookahead", "ablation-14b", 21.9, 21.9, "%", _bubbles(_COORDINATED)),
    PaperClaim("14", "bubbles with lookahead", "ablation-14b", 8.3, 8.3, "%", _bubbles(_WHOLE)),
    PaperClaim("16", "P50 TTFT less with restore", "long-14b", 28, 28, "%", _less(_p50_ttft, _OURS, _STAYS)),
    PaperClaim("16", "P50 TPOT less with restore", "long-14b", 23, 23, "%", _less(_p50_tpot, _OURS, _STAYS)),
    PaperClaim("16", "P99 TTFT gain by restore", "long-14b", 6.4, 6.4, "x", _gain(_STAYS)),
    PaperClaim("17", "time from the burst until memory is full", "extreme-72b", 1.5, 1.5, "x", _stands),
    PaperClaim("17", "KV memory that drops add", "extreme-72b", 57, 57, "%", _freed),
)


# ---------------------------------------------------------------- the command


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/reproduce"))
    parser.add_argument("--only", metavar="NAMES", help=f"of {', '.join(_known())}")
    parser.add_argument("--trace", metavar="FILE", help="take arrivals from this trace; lengths stay the same")
    parser.add_argument("--compute-fraction", type=float, metavar="X", help="usable share of the GPU's peak (0.72)")
    parser.add_argument("--rate-scale", type=float, default=1.0, metavar="X", help="factor on the number of requests")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--write", action="store_true", help="write the table of the runs in --out into docs/")
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
    for name, result in results.items():
        plot_result(result, args.out / f"{name}.png")
    lines = lines_of(results)
    met = sum(line.within for line in lines)
    page = f"{met} of {len(lines)} lines are within 1.5 x.\n\n{table(lines)}\n\nUnder this load:\n\n{regime(results)}\n"
    (args.out / "table.md").write_text(page)
    if args.write:
        quote(PAGE, "reproduction", page)
    print(f"\n{page}\nwrote {args.out / 'table.md'} and {len(results)} figures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
