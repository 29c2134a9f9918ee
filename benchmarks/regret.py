"""Whether dropping parameters is ever worse than not dropping: simulates each policy in each cell of a grid.

    python -m benchmarks.regret --traces DIR [--out out/regret]           # the whole grid; can be interrupted
    python -m benchmarks.regret --traces DIR --quick                      # a handful of cells and policies, one draw
    python -m benchmarks.regret --traces DIR --again drop                 # reruns that policy only
    python -m benchmarks.regret --traces DIR --cells 'think*,code-14b*' --policies recompute,drop
    python -m benchmarks.regret --cells 'any*'                            # generated cells: no folder is needed
    python -m benchmarks.regret --write                                   # the page's table and figure
    python -m benchmarks.regret --traces DIR --signs                      # each change against the same run without it
    python -m benchmarks.regret --traces DIR --export DIR --cells 'chat*' # cells' traces, for `ballast bench`, `sim`

`--traces`: the folder with the open traces' slices (arrival_s, input_tokens, output_tokens). Cells are in
`regret_cells.py`. Each run writes a file with its figures to --out/runs, and is not repeated.

A cell is judged on draw 0 or, if the best rival's P99 TTFT exceeds 10 s (saturated), on the medians of four draws.
Waits below a cell's target (1 s, or five times the median of a calm run) count as equal. Rivals are all given policies
except the judged one.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from ballast.common.errors import BallastError, ConfigError
from benchmarks.quoting import quote
from benchmarks.regret_cells import CALM, CELLS, run_cell, trace_of
from benchmarks.regret_signs import compare_signs
from sim.policies import POLICIES
from tools.bench.style import RC, styles
from tools.bench.traces import write_trace

PAGE, FIGURE = Path("docs/regret.md"), Path("docs/evaluation/regret.png")
OURS, PLAIN = "drop", "recompute"
QUICK = (
    "think-14b-40g-x0.7",
    "think-14b-40g-x1.2",
    "think-14b-40g-x1.5",
    "think-14b-80g-x3",
    "think-70b-160g-x0.7",
    "chat-13b-40g-x1.1",
    "chat-13b-40g-x1.4",
    "code-14b-40g-x1",
    "agent-14b-40g-x1.2",
    "calm-14b-40g-x1",
)
_LOOKAHEAD = "static-pipeline:microbatching=lookahead"  # microbatches like those of drop
_RIVALS = (PLAIN, "swap", "migrate", "static-pipeline", "static-pipeline:degree=4", _LOOKAHEAD)
_QUICK_POLICIES = (PLAIN, "static-pipeline", OURS)
_DRAWS = 4
TARGET_S, CALM_FACTOR, SATURATED_S = 1.0, 5.0, 10.0
COMPUTING_SHARE = 0.70  # fraction of the steps' time spent on prefill; above it memory is not the bottleneck
BRIM, MOST_AT_THE_BRIM = (0.95, 1.15), 1.05  # peak demand with recompute, as a fraction of the memory
GAIN, GREAT_GAIN = 0.8, 0.5
GOOD_S = 0.5  # predictions do not distinguish shorter waits
_FIGURES = ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tokens_per_s", "preemptions", "mean_demand", "peak_demand")

Run = tuple[str, str, int]  # (cell, policy, draw)


@dataclass(frozen=True, slots=True)
class Judged:
    """Figures of one policy in one cell: medians over `draws` runs."""

    policy: str
    draws: int
    broken: int  # draws that ended with a broken invariant
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tokens_per_s: float
    preemptions: float
    mean_demand: float
    peak_demand: float
    unserved: float = 0.0  # requests that were refused or failed, or did not end


@dataclass(frozen=True, slots=True)
class RegretRow:
    """Results of one cell, with all policies that were run in it."""

    cell: str
    target_s: float
    saturated: bool
    prompt_share: float
    policies: Mapping[str, Judged]

    @property
    def memory_is_short(self) -> bool:
        plain = self.policies.get(PLAIN)
        full = plain is not None and (plain.preemptions > 0 or plain.peak_demand > 1.0)
        return full and self.prompt_share < COMPUTING_SHARE

    @property
    def is_at_the_brim(self) -> bool:
        """True if recompute's peak demand is close to the memory (within `BRIM`)."""
        plain = self.policies.get(PLAIN)
        return plain is not None and BRIM[0] <= plain.peak_demand <= BRIM[1]

    def over_plain(self, policy: str) -> dict[str, float]:
        """Each figure relative to recompute's."""
        ours, plain = self.policies[policy], self.policies[PLAIN]
        return {
            "P50 TTFT": ours.ttft_p50_s / plain.ttft_p50_s,
            "P99 TTFT": ours.ttft_p99_s / plain.ttft_p99_s,
            "P50 TPOT": ours.tpot_p50_s / plain.tpot_p50_s,
        }

    def rivals(self, policy: str) -> list[Judged]:
        return [judged for name, judged in self.policies.items() if name != policy]

    def best(self, policy: str) -> Judged:
        """The rival with the lowest P99 TTFT."""
        return min(self.rivals(policy), key=lambda judged: judged.ttft_p99_s)

    def ttft_regret(self, policy: str) -> float:
        """P99 TTFT relative to that of the best rival; waits below the target are equal."""
        return self._wait_s(policy) / max(self.best(policy).ttft_p99_s, self.target_s)

    def behind_all(self, policy: str) -> float:
        """P99 TTFT relative to that of the best policy, itself included."""
        return self._wait_s(policy) / min(map(self._wait_s, self.policies))

    def _wait_s(self, policy: str) -> float:
        return max(self.policies[policy].ttft_p99_s, self.target_s)

    def gain(self, policy: str) -> float:
        """P99 TTFT relative to that of the best rival, without the target."""
        return self.policies[policy].ttft_p99_s / self.best(policy).ttft_p99_s

    def tpot_regret(self, policy: str) -> float:
        """P50 TPOT relative to that of the policy with the best P99 TTFT, itself included."""
        ours, best = self.policies[policy], self.best(policy)
        return ours.tpot_p50_s / best.tpot_p50_s if best.ttft_p99_s < ours.ttft_p99_s else 1.0

    def tpot_over_plain(self, policy: str) -> float | None:
        """P50 TPOT relative to recompute's, if that meets its target; otherwise None."""
        plain = self.policies.get(PLAIN)
        if plain is None or plain.ttft_p99_s > self.target_s:
            return None
        return self.policies[policy].tpot_p50_s / plain.tpot_p50_s

    def throughput(self, policy: str) -> float:
        """Tokens until the last arrival, relative to the best rival's."""
        best = max(judged.tokens_per_s for judged in self.rivals(policy))
        return self.policies[policy].tokens_per_s / best if best else 1.0

    def faults(self, policy: str) -> list[str]:
        """Texts: the rules that the policy violates in this cell, unserved requests beyond the best rival's, and how
        many draws broke an invariant.
        """
        mine = self.policies[policy]
        broken, unserved = mine.broken, mine.unserved
        missed = [f"{rule.short.format(rule.of(self, policy))}" for rule in RULES if not rule.kept(self, policy)]
        if unserved > self.best(policy).unserved:
            missed.append(f"{unserved:g} unserved")
        return [*missed, f"{broken} broken"] if broken else missed


@dataclass(frozen=True, slots=True)
class Rule:
    """A bound on a figure of the judged policy. None: the rule does not apply to the cell."""

    title: str
    short: str
    of: Callable[[RegretRow, str], float | None]
    keeps: Callable[[RegretRow, float], bool]

    def kept(self, row: RegretRow, policy: str) -> bool:
        value = self.of(row, policy)
        return value is None or self.keeps(row, value)


RULES = (
    Rule(
        "P99 TTFT at most 1.10 x the best (saturated: 1.25)",
        "P99 TTFT {:.2f} x",
        RegretRow.ttft_regret,
        lambda row, value: value <= (1.25 if row.saturated else 1.10),
    ),
    Rule(
        "P50 TPOT at most 1.25 x that of the best P99 TTFT",
        "TPOT {:.2f} x",
        RegretRow.tpot_regret,
        lambda _, value: value <= 1.25,
    ),
    Rule(
        "P50 TPOT at most 1.10 x recompute's where that meets its target",
        "TPOT {:.2f} x recompute's",
        RegretRow.tpot_over_plain,
        lambda _, value: value <= 1.10,
    ),
    Rule(
        "tokens/s at least 0.97 x the best",
        "throughput {:.2f} x",
        RegretRow.throughput,
        lambda _, value: value >= 0.97,
    ),
)


def row_of(cell: str, runs: Sequence[Mapping[str, Any]], calm: Mapping[str, Any] | None) -> RegretRow | None:
    """The runs of a cell as a row; None if fewer than two policies have figures."""
    first = [run for run in runs if run["draw"] == 0 and run["failed"] is None]
    names = list(dict.fromkeys(run["policy"] for run in runs))
    saturated = is_saturated(first)
    policies = {name: judged for name in names if (judged := _judged(name, runs, saturated=saturated)) is not None}
    if len(policies) < 2:
        return None
    calm_s = calm["ttft_p50_s"] if calm is not None and calm["failed"] is None else None
    target_s = max(TARGET_S, CALM_FACTOR * calm_s) if calm_s is not None else TARGET_S
    return RegretRow(cell, target_s, saturated, max(run["prompt_share"] for run in runs), policies)


def is_saturated(first: Sequence[Mapping[str, Any]]) -> bool:
    """True if every rival of the judged policy has long waits in draw 0."""
    theirs = [run["ttft_p99_s"] for run in first if not is_ours(run["policy"]) and run["failed"] is None]
    return bool(theirs) and min(theirs) > SATURATED_S


def is_ours(policy: str) -> bool:
    return policy.split(":")[0] == OURS


def _judged(name: str, runs: Sequence[Mapping[str, Any]], *, saturated: bool) -> Judged | None:
    mine = [run for run in runs if run["policy"] == name and (saturated or run["draw"] == 0)]
    good = [run for run in mine if run["failed"] is None and run["ttft_p99_s"] is not None]
    if not good:
        return None
    figures = {figure: median(run[figure] for run in good) for figure in _FIGURES}
    unserved = median(run.get("unserved", 0) for run in good)
    return Judged(name, len(good), len(mine) - len(good), **figures, unserved=unserved)


# ---------------------------------------------------------------- the page


def table(rows: Sequence[RegretRow], policies: Sequence[str], ours: str) -> str:
    """Markdown table with a row for each cell: P50/P99 TTFT in seconds, P50 TPOT in ms and tokens/s of each policy;
    then the ratios of `ours` to the best rival, and what it misses: rules, unserved requests, draws.
    """
    lines = [
        f"| cell (prompts' share, demand) | {' | '.join(policies)} | P99 TTFT of {ours} over the best (as it is) |"
        " TPOT | tokens/s | misses |",
        f"|---|{'---|' * len(policies)}---|---|---|---|",
    ]
    for row in rows:
        plain = row.policies.get(PLAIN)
        demand = "" if plain is None else f", {plain.mean_demand:.0%}/{plain.peak_demand:.0%}"
        mark = " **memory**" if row.memory_is_short else ""
        cells = [f"{row.cell} ({row.prompt_share:.0%}{demand}){mark}"]
        cells += [_text(row.policies.get(name)) for name in policies]
        if ours in row.policies:
            cells += [f"{row.ttft_regret(ours):.2f} ({row.gain(ours):.2f})", f"{row.tpot_regret(ours):.2f}"]
            cells += [f"{row.throughput(ours):.2f}", "; ".join(row.faults(ours)) or "-"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _text(judged: Judged | None) -> str:
    if judged is None:
        return "-"
    draws = f" [{judged.draws}]" if judged.draws > 1 else ""
    waits = f"{judged.ttft_p50_s:.2f}/{judged.ttft_p99_s:.2f}"
    unserved = f", {judged.unserved:g} unserved" if judged.unserved else ""
    return f"{waits}, {1e3 * judged.tpot_p50_s:.0f}, {judged.tokens_per_s:.0f}{draws}{unserved}"


def summary(rows: Sequence[RegretRow], policies: Sequence[str], ours: str) -> Iterator[str]:
    """One line per rule, then each policy's worst figures."""
    mine = [row for row in rows if ours in row.policies]
    if not mine:
        yield f"{ours} has not been run"
        return
    for rule in RULES:
        asked = [row for row in mine if rule.of(row, ours) is not None]
        missed = [row.cell for row in asked if not rule.kept(row, ours)]
        where = f"; not in {', '.join(missed)}" if missed else ""
        yield f"{rule.title}: {len(asked) - len(missed)} of {len(asked)} cells{where}"
    if brim := [row for row in mine if row.is_at_the_brim and ours != PLAIN]:
        worst = max(((ratio, what, r.cell) for r in brim for what, ratio in r.over_plain(ours).items()))
        yield (
            f"memory just full ({BRIM[0]:.0%} to {BRIM[1]:.0%}) in {len(brim)} cells: at most {worst[0]:.2f} x"
            f" recompute's (goal {MOST_AT_THE_BRIM}), {worst[1]} in {worst[2]}"
        )
    if short := [row for row in mine if row.memory_is_short]:
        gains = [row.gain(ours) for row in short]
        great = sum(gain <= GREAT_GAIN for gain in gains)
        yield (
            f"memory is short in {len(short)} cells: median of P99 TTFT over the best rival's {median(gains):.2f} (goal"
            f" {GAIN}), at most {GREAT_GAIN} in {great} (goal {math.ceil(len(short) / 3)})"
        )
        for name in policies:
            theirs = [r.policies[ours].ttft_p99_s / r.policies[name].ttft_p99_s for r in short if name in r.policies]
            if name != ours and theirs:
                great = sum(gain <= GREAT_GAIN for gain in theirs)
                yield f"over {name} alone: median {median(theirs):.2f}, at most {GREAT_GAIN} in {great}"
    yield "worst over all cells (P99 TTFT over the best; P50 TPOT over that of the best; least share of tokens/s):"
    for name in policies:
        if have := [row for row in rows if name in row.policies]:
            worst = max(have, key=lambda row: row.ttft_regret(name))
            tpot, rate = max(r.tpot_regret(name) for r in have), min(r.throughput(name) for r in have)
            yield f"{name}: {worst.ttft_regret(name):.2f} ({worst.cell}); {tpot:.2f}; {rate:.2f}"


def predictions(runs: Sequence[Mapping[str, Any]]) -> str:
    """Text that compares the P99 TTFT predicted for the planner's decisions with the outcome. Waits below GOOD_S count
    as equal.
    """
    found = [
        (max(one["predicted_s"], GOOD_S), max(one["was_s"], GOOD_S))
        for run in runs
        for one in run.get("decisions", ())
        if one["was_s"] is not None
    ]
    if not found:
        return "no decision was predicted"
    factors = [max(a / b, b / a) for a, b in found]
    within = sum(factor <= 3.0 for factor in factors) / len(factors)
    return (
        f"P99 TTFT as predicted against the actual one, {len(found)} decisions: median error {median(factors):.2f} x"
        f" (goal 1.5), {within:.0%} within 3 x (goal 90 %)"
    )


def draw(rows: Sequence[RegretRow], policies: Sequence[str], path: Path) -> None:
    """Draw one line per cell, from top to bottom in the grid's order, with a mark per policy; right is worse."""
    looks = styles([(name, name.split(":")[0]) for name in policies])
    with mpl.rc_context(RC):
        figure = Figure(figsize=(8.0, 1.9 + 0.24 * len(rows)), layout="constrained")
        waits, paces = figure.subplots(1, 2, sharey=True, width_ratios=(1.7, 1.0))
        for name in policies:
            have = [(row, at) for at, row in enumerate(rows) if name in row.policies]
            look = looks[name]
            style = {"color": look.colour, "marker": look.mark, "linestyle": "none", "markersize": 6, "alpha": 0.85}
            at = [at for _, at in have]
            waits.plot([row.behind_all(name) for row, _ in have], at, label=name, **style)
            least_s = [min(judged.tpot_p50_s for judged in row.policies.values()) for row, _ in have]
            mine_s = [row.policies[name].tpot_p50_s for row, _ in have]
            paces.plot([a / b for a, b in zip(mine_s, least_s, strict=True)], at, **style)
        waits.set_yticks(range(len(rows)), [f"{row.cell}{' *' if row.memory_is_short else ''}" for row in rows])
        waits.invert_yaxis()
        waits.set_xscale("log")
        waits.set_xticks([1, 10, 100], ["1", "10", "100"])
        for axis in (waits, paces):
            axis.axvline(1.1, color="0.5", linewidth=0.8)
        waits.set_xlabel("P99 TTFT over the best policy's\n(waits below the target are equal; *: memory is short)")
        paces.set_xlabel("P50 time per token\nover the least")
        figure.legend(loc="outside upper center", ncols=3)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)


# ---------------------------------------------------------------- runs


class RegretRuns:
    """Figures of runs, stored in one file each."""

    def __init__(self, out: Path, traces: Path | None) -> None:
        self._folder = out / "runs"
        self._traces = traces
        self._folder.mkdir(parents=True, exist_ok=True)
        self.found: dict[Run, Mapping[str, Any]] = {}
        for path in sorted(self._folder.glob("*/*.json")):
            run = json.loads(path.read_text())
            self.found[path.parent.name, run["policy"], run["draw"]] = run

    def forget(self, policies: Sequence[str]) -> None:
        for run in [run for run in self.found if run[1] in policies]:
            del self.found[run]

    def make(self, wanted: Sequence[Run], processes: int) -> None:
        """Execute the missing runs.

        Raises:
            ConfigError: missing runs need a trace's arrivals, and no folder of traces was given.
        """
        missing = [run for run in dict.fromkeys(wanted) if run not in self.found]
        if not missing:
            return
        began_s = time.monotonic()
        with ProcessPoolExecutor(processes) as pool:
            futures = {
                pool.submit(run_cell, cell, self._traces, policy, d): (cell, policy, d) for cell, policy, d in missing
            }
            for count, future in enumerate(as_completed(futures), 1):
                cell, policy, d = futures[future]
                run = future.result()
                path = self._folder / cell / f"{policy.replace(':', '_')}-{d}.json"
                path.parent.mkdir(exist_ok=True)
                path.write_text(json.dumps(run, indent=1))
                self.found[cell, policy, d] = run
                waits = run["failed"] or f"{run['ttft_p50_s']:.2f}/{run['ttft_p99_s']:.2f} s"
                at_s = time.monotonic() - began_s
                print(f"{at_s:5.0f} s {count}/{len(missing)} {cell} {policy} {d}: {waits}", file=sys.stderr, flush=True)

    def of(self, cell: str, policies: Sequence[str]) -> list[Mapping[str, Any]]:
        return [run for (name, policy, _), run in self.found.items() if name == cell and policy in policies]


def measure(runs: RegretRuns, cells: Sequence[str], policies: Sequence[str], draws: int, processes: int) -> None:
    """Run draw 0 of each cell with each policy, then the other draws of saturated cells."""
    runs.make([(cell, policy, 0) for policy in (CALM, *reversed(policies)) for cell in cells], processes)
    saturated = [cell for cell in cells if is_saturated([r for r in runs.of(cell, policies) if r["draw"] == 0])]
    runs.make([(c, policy, d) for c in saturated for policy in policies for d in range(1, draws)], processes)


def compare_policies(given: argparse.Namespace, cells: Sequence[str]) -> str:
    every = (*(name for name in _RIVALS if name.split(":")[0] in POLICIES), OURS)
    policies = given.policies.split(",") if given.policies else list(_QUICK_POLICIES if given.quick else every)
    ours = next((name for name in reversed(policies) if is_ours(name)), policies[-1])
    runs = RegretRuns(given.out, given.traces)
    runs.forget(given.again.split(","))
    if not given.write:
        measure(runs, cells, policies, 1 if given.quick else given.draws or _DRAWS, given.processes)
    found = (row_of(cell, runs.of(cell, policies), runs.found.get((cell, CALM, 0))) for cell in cells)
    rows = [row for row in found if row is not None]
    predicted = predictions([run for cell in cells for run in runs.of(cell, [ours])])
    lines = [*summary(rows, policies, ours), predicted]
    text = "\n".join([table(rows, policies, ours), "", *(f"- {line}" for line in lines)])
    draw(rows, policies, given.out / "regret.png")
    if given.write:
        quote(PAGE, "regret", text)
        draw(rows, policies, FIGURE)
    return text


def export(folder: Path, traces: Path | None, cells: Sequence[str]) -> None:
    """Write draw 0 of each cell as a trace file."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in cells:
        write_trace(folder / f"{name}.csv", trace_of(CELLS[name], traces, 0).requests)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--signs", action="store_true", help="compare each change of the layout with a run without it")
    mode.add_argument("--export", type=Path, metavar="DIR", help="write the cells' traces to this folder and exit")
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--out", type=Path, help="folder for the runs (default: out/regret, or out/regret-signs)")
    parser.add_argument("--cells", default="*", help="names or patterns of cells, separated by commas")
    parser.add_argument("--policies", help="separated by commas; the last variant of drop is judged")
    parser.add_argument("--again", default="", help="policies whose runs are repeated")
    parser.add_argument("--draws", type=int, help=f"of saturated cells ({_DRAWS}); with --signs, of all cells (1)")
    parser.add_argument("--quick", action="store_true", help="only a handful of cells and policies, with one draw")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--write", action="store_true", help="write the table and the figure into docs/")
    given = parser.parse_args()
    given.out = given.out or Path("out/regret-signs" if given.signs else "out/regret")
    patterns = QUICK if given.quick and given.cells == "*" else given.cells.split(",")
    cells = [name for name in CELLS if any(fnmatch(name, pattern) for pattern in patterns)]
    try:
        if not cells:
            raise ConfigError("--cells", f"fits none of {', '.join(CELLS)}")
        if given.export:
            export(given.export, given.traces, cells)
            return 0
        text = compare_signs(given, cells) if given.signs else compare_policies(given, cells)
    except BallastError as error:
        print(error, file=sys.stderr)
        return 2
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "table.md").write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
