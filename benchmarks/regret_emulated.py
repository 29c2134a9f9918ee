"""Cells of the regret grid on emulated workers, in real time, beside the simulator's figures of the same requests.

    python -m benchmarks.regret_emulated --traces DIR --cells think-14b-40g-x1.2@200-450,chat-13b-40g-x1.4
    python -m benchmarks.regret_emulated --cells ... --write                        # the page's table and figure

A cell is one of `regret_cells.py`; `@FROM-UNTIL` cuts it to these seconds. Services are started as `ballast up` starts
them, their workers take the GPU's time and compute nothing. Clients ask for as long an answer as the model gives, as
the simulator's do, and both stop at the same instant: who has no first token by then counts with what it has waited.
Each run leaves a result file in --out/runs, and one whose file is there is not made again. A run in which this machine
could not keep up is void, says so, and is made again.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console

from ballast.common.errors import BallastError, ConfigError
from benchmarks.quoting import quote
from benchmarks.regret_cells import CELLS, job_of
from benchmarks.regret_figure import draw_emulated
from sim.jobs.machines import emulation_of, machine_of
from sim.jobs.simulation import SimJob, replay_run, specs_of, world_of
from sim.world import instance_count
from tools.bench.emulation import why_void, with_effort
from tools.bench.overload import run_on
from tools.bench.policies import parse_policies
from tools.bench.progress import ProgressDisplay
from tools.bench.replay import ReplayOptions
from tools.bench.results import BenchResult, PolicyResult, policy_result, read_result, write_result
from tools.bench.session import ReplayJob
from tools.bench.traces import Trace
from tools.local.cluster import LocalCluster

PAGE = Path("docs/evaluation.md")
POLICIES = "recompute,static-pipeline,drop"
FIGURE = Path("docs/evaluation/regret-emulated.png")
# Figure -> what it is called, and how far from the simulated one it may be.
GOALS = {
    "ttft_p50_s": ("TTFT P50", 0.2),
    "ttft_p99_s": ("TTFT P99", 0.4),
    "tpot_p50_s": ("TPOT P50", 0.2),
    "tokens_per_s": ("tokens/s", 0.2),
}
EFFORT = ("services_cores", "client_cores", "late_share", "lost_share", "send_lag_s")
_CALM_S, _AS_GOOD = 1.0, 1.1  # waits below one second are equal, and those so close
_DEADLINE_S = 3600.0


@dataclass(frozen=True, slots=True)
class Part:
    """A cell, or some seconds of it."""

    name: str
    cell: str
    from_s: float
    until_s: float

    def job(self, traces: Path, policy: str) -> SimJob:
        job = job_of(CELLS[self.cell], traces, policy, 0)
        return replace(job, trace=self.cut(job.trace), stop_after_s=self.until_s - self.from_s)

    def cut(self, trace: Trace) -> Trace:
        kept = [r for r in trace.requests if self.from_s <= r.arrival_s < self.until_s]
        return replace(trace, requests=tuple(replace(r, arrival_s=r.arrival_s - self.from_s) for r in kept))


def parse_parts(text: str) -> list[Part]:
    """
    Raises:
        ConfigError: no such cell, or seconds that it does not have.
    """
    return [_part(word.strip()) for word in text.split(",") if word.strip()]


def _part(word: str) -> Part:
    name, at, window = word.partition("@")
    if name not in CELLS:
        raise ConfigError("--cells", f"{name!r} is none of {', '.join(CELLS)}")
    span_s = CELLS[name].until_s - CELLS[name].from_s
    begin, dash, end = window.partition("-")
    try:
        from_s, until_s = (float(begin), float(end)) if at else (0.0, span_s)
    except ValueError:
        from_s = until_s = -1.0
    if (at and not dash) or not 0 <= from_s < until_s <= span_s:
        raise ConfigError(
            "--cells", f"{word!r}: after @ come two seconds of the cell's {span_s:g}, as in @0-{span_s:g}"
        )
    return Part(word, name, from_s, until_s)


# ------------------------------------------------------------ figures


@dataclass(frozen=True, slots=True)
class Figures:
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tokens_per_s: float
    transitions: float

    @staticmethod
    def of(part: Part, result: PolicyResult) -> "Figures":
        """The figures of a run that was stopped at the part's end: a request without a first token counts with what it
        had waited.
        """
        stop_s = part.until_s - part.from_s
        ends_s = [stop_s if r.first_token_s is None else r.first_token_s for r in result.requests]
        waits_s = [max(0.0, end_s - r.planned_s) for end_s, r in zip(ends_s, result.requests, strict=True)]
        tpots_s = [r.tpot_s for r in result.requests if r.tpot_s is not None]
        return Figures(
            ttft_p50_s=float(np.quantile(waits_s, 0.5)),
            ttft_p99_s=float(np.quantile(waits_s, 0.99)),
            tpot_p50_s=float(np.quantile(tpots_s, 0.5)) if tpots_s else 0.0,
            tokens_per_s=result.output_token_count / stop_s,
            transitions=sum(t.kind is not None and t.at_s >= 0 for t in result.transitions),
        )

    def told(self) -> str:
        ttft = f"TTFT {self.ttft_p50_s:.2f}/{self.ttft_p99_s:.2f} s"
        return f"{ttft}, TPOT {1e3 * self.tpot_p50_s:.0f} ms, {self.tokens_per_s:.0f} tokens/s"

    @staticmethod
    def median(of: "Sequence[Figures]") -> "Figures":
        """Each figure's own, over repetitions."""
        return Figures(*(statistics.median(each) for each in zip(*map(astuple, of), strict=True)))


def simulated(part: Part, traces: Path, policy: str) -> Figures:
    job = part.job(traces, policy)
    [(_, rules)] = specs_of(job)
    result = policy_result(replay_run(world_of(job, rules).run()), policy)
    return Figures.of(part, result)


# ------------------------------------------------------------ runs


async def emulated(part: Part, traces: Path, policy: str, out: Path, log_dir: Path, console: Console) -> BenchResult:
    """
    Raises:
        Unavailable: a service died, or did not come to rest.
    """
    job, [spec] = part.job(traces, policy), parse_policies(policy)
    emulation = emulation_of(out / "machines" / part.cell, machine_of(job.cluster.gpu, job.model))
    workers = instance_count(job.model, job.cluster)
    flags = spec.flags()
    flags["worker"] = [*emulation.worker_flags, *flags["worker"]]
    options = ReplayOptions(deadline_s=_DEADLINE_S, stop_after_s=job.stop_after_s, last_token=emulation.last_token)
    replay = ReplayJob(trace=job.trace, options=options, policy=spec.label)
    settings = {"workers": workers, "gpu": emulation.gpu, "model": job.model.name}
    cluster = LocalCluster(emulation.info.path, workers=workers, flags=flags, log_dir=log_dir)
    with ProgressDisplay(console) as display:
        result = await run_on(cluster, spec, replay, console, settings, display)
    return with_effort(result, log_dir)


class Runs:
    """Files of what was measured and simulated."""

    def __init__(self, out: Path, parts: Sequence[Part], policies: Sequence[str], repetitions: int) -> None:
        self._out = out
        self._parts = parts
        self._policies = policies
        self._repetitions = repetitions

    def measure(self, traces: Path, console: Console) -> None:
        """Makes the runs that are not there yet, one repetition of everything before the next."""
        for number in range(self._repetitions):
            for part in self._parts:
                for policy in self._policies:
                    path = self._measured(part, policy, number)
                    if not path.exists():
                        console.print(f"{part.name} {policy} {number}")
                        logs = self._out / "logs" / part.name / path.stem
                        result = asyncio.run(emulated(part, traces, policy, self._out, logs, console))
                        if why := why_void(result):
                            path = path.with_suffix(".void")
                        write_result(path, result)
                        figures = Figures.of(part, *result.policies.values()).told()
                        console.print(f"  {figures}{'; VOID: ' if why else ''}{why}")

    def simulate(self, traces: Path, console: Console) -> None:
        for part in self._parts:
            for policy in self._policies:
                path = self._simulated(part, policy)
                if not path.exists():
                    figures = simulated(part, traces, policy)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(json.dumps(asdict(figures)))
                    console.print(f"{part.name} {policy} simulated: {figures.told()}")

    def rows(self) -> "list[Row]":
        """One for each cell and policy that was both measured and simulated."""
        return [row for part in self._parts for policy in self._policies if (row := self._row(part, policy))]

    def _row(self, part: Part, policy: str) -> "Row | None":
        paths = [self._measured(part, policy, number) for number in range(self._repetitions)]
        results = [read_result(path) for path in paths if path.exists()]
        if not results or not self._simulated(part, policy).exists():
            return None
        told = [{**r.config.cluster, "send_lag_s": p.send_lag_s.p99} for r in results for p in r.policies.values()]
        return Row(
            part.name,
            policy,
            Figures.median([Figures.of(part, p) for r in results for p in r.policies.values()]),
            Figures(**json.loads(self._simulated(part, policy).read_text())),
            len(results),
            {name: max(float(one.get(name) or 0.0) for one in told) for name in EFFORT},
        )

    def _measured(self, part: Part, policy: str, number: int) -> Path:
        return self._out / "runs" / part.name / f"{policy.replace(':', '_')}.{number}.json"

    def _simulated(self, part: Part, policy: str) -> Path:
        return self._out / "simulated" / part.name / f"{policy.replace(':', '_')}.json"


# ------------------------------------------------------------ beside each other


@dataclass(frozen=True, slots=True)
class Row:
    part: str
    policy: str
    emulated: Figures  # medians over the repetitions
    simulated: Figures
    repetitions: int
    effort: Mapping[str, float]  # the most of what a repetition took of this machine

    @property
    def errors(self) -> Mapping[str, float]:
        """Figure -> the emulated one over the simulated one, less 1."""
        pairs = {name: (getattr(self.emulated, name), getattr(self.simulated, name)) for name in GOALS}
        return {name: ours / theirs - 1 for name, (ours, theirs) in pairs.items() if theirs}


def order(rows: Sequence[Row], of: Callable[[Row], Figures]) -> str:
    """Policies by their P99 TTFT, the lowest first; = between those that are as good."""
    ranked = sorted(rows, key=lambda row: of(row).ttft_p99_s)
    words = [ranked[0].policy]
    for before, after in itertools.pairwise(ranked):
        words += ["=" if _equal(of(before).ttft_p99_s, of(after).ttft_p99_s) else "<", after.policy]
    return " ".join(words)


def same_order(rows: Sequence[Row]) -> bool:
    """Whether no policy is clearly before another emulated, and clearly behind it simulated."""
    for one, other in itertools.combinations(rows, 2):
        waits = [(of(one).ttft_p99_s, of(other).ttft_p99_s) for of in (_emulated, _simulated)]
        signs = {a_s < b_s for a_s, b_s in waits if not _equal(a_s, b_s)}
        if len(signs) > 1:
            return False
    return True


def _emulated(row: Row) -> Figures:
    return row.emulated


def _simulated(row: Row) -> Figures:
    return row.simulated


def _equal(one_s: float, other_s: float) -> bool:
    low_s, high_s = sorted((one_s, other_s))
    return high_s <= max(_CALM_S, _AS_GOOD * low_s)


def table(rows: Sequence[Row]) -> str:
    """Emulated, in brackets simulated and by how much the former differs."""
    lines = [
        "| cell | policy (runs) | TTFT P50, s | TTFT P99, s | TPOT P50, ms | tokens/s | transitions |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ours, theirs = row.emulated, row.simulated
        pairs = [(ours.ttft_p50_s, theirs.ttft_p50_s), (ours.ttft_p99_s, theirs.ttft_p99_s)]
        cells = [f"{a:.2f} ({b:.2f}, {_percent(a, b)})" for a, b in pairs]
        cells.append(
            f"{1e3 * ours.tpot_p50_s:.0f} ({1e3 * theirs.tpot_p50_s:.0f},"
            f" {_percent(ours.tpot_p50_s, theirs.tpot_p50_s)})"
        )
        a, b = ours.tokens_per_s, theirs.tokens_per_s
        cells.append(f"{a:.0f} ({b:.0f}, {_percent(a, b)})")
        cells.append(f"{ours.transitions:g} ({theirs.transitions:g})")
        lines.append(f"| {row.part} | {row.policy} ({row.repetitions}) | {' | '.join(cells)} |")
    return "\n".join(lines)


def _percent(ours: float, theirs: float) -> str:
    return f"{ours / theirs - 1:+.0%}" if theirs else "-"


def summary(rows: Sequence[Row]) -> list[str]:
    lines: list[str] = []
    for name, (what, most) in GOALS.items():
        errors = [row.errors[name] for row in rows if name in row.errors]
        within = sum(abs(error) <= most for error in errors)
        middle = statistics.median(map(abs, errors))
        lines.append(f"{what}: {within} of {len(errors)} within {most:.0%}, half within {middle:.0%}")
    parts = {part: [row for row in rows if row.part == part] for part in dict.fromkeys(row.part for row in rows)}
    compared = {part: of for part, of in parts.items() if len(of) > 1}
    agreed = [part for part, of in compared.items() if same_order(of)]
    lines.append(f"The same order of the policies by P99 TTFT in {len(agreed)} of {len(compared)} cells")
    lines += [
        f"{part}: {order(of, _emulated)}; simulated {order(of, _simulated)}"
        for part, of in compared.items()
        if part not in agreed
    ]
    most = {name: max(row.effort[name] for row in rows) for name in EFFORT}
    lines.append(
        f"This machine at most: {most['services_cores']:.2f} cores for the services, {most['client_cores']:.2f} for the"
        f" client; steps began late by {most['late_share']:.1%} of their time, which was made good, and took"
        f" {most['lost_share']:.1%} longer besides; requests were sent {1e3 * most['send_lag_s']:.0f} ms late at P99"
    )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--cells", required=True, help="names, with @FROM-UNTIL if cut, separated by commas")
    parser.add_argument("--policies", default=POLICIES)
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("out/regret-emulated"))
    parser.add_argument("--write", action="store_true", help="puts table and figure of what there is into docs/")
    given = parser.parse_args()
    console = Console(width=240, highlight=False)
    try:
        runs = Runs(given.out, parse_parts(given.cells), given.policies.split(","), given.repetitions)
        if given.traces is not None:
            runs.measure(given.traces, console)
            runs.simulate(given.traces, console)
        rows = runs.rows()
        if not rows:
            raise ConfigError("--traces", f"is missing: there are no runs in {given.out}")
        text = "\n".join([table(rows), "", *(f"- {line}" for line in summary(rows))])
        (given.out / "table.md").write_text(text + "\n")
        pairs = [(row.policy, row.emulated, row.simulated) for row in rows]
        draw_emulated(pairs, GOALS, given.out / "regret-emulated.png")
        if given.write:
            quote(PAGE, "emulated", text)
            draw_emulated(pairs, GOALS, FIGURE)
    except BallastError as error:
        print(error, file=sys.stderr)
        return 2
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
