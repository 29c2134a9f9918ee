"""Whether dropping parameters is ever regretted: each policy in each cell of a grid, simulated.

    python -m benchmarks.regret --traces DIR [--out out/regret]           # the whole grid; goes on where it stopped
    python -m benchmarks.regret --traces DIR --quick                      # a handful of cells and policies, one draw
    python -m benchmarks.regret --traces DIR --again drop                 # runs that policy anew, the others not
    python -m benchmarks.regret --traces DIR --cells 'think*,code-14b*' --policies recompute,drop
    python -m benchmarks.regret --write                                   # the page's table and figure

`--traces`: the folder with the open traces' slices (arrival_s, input_tokens, output_tokens). Cells are in
`regret_cells.py`, the rules in `regret_rules.py`. Cells where the best rival waits for more than 10 s are judged by the
medians of four draws. Each run leaves a file of its figures in --out/runs; a run whose file is there is not made again,
so that a change is compared with what was before by running `--again drop` or by another --out. Besides there are then
`table.md`, `regret.png` and `regret-predictions.png`: what the planner predicted of its
decisions beside what then happened.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ballast.common.errors import BallastError, ConfigError
from benchmarks.quoting import quote
from benchmarks.regret_cells import CALM, CELLS, run_cell
from benchmarks.regret_figure import draw, draw_predictions
from benchmarks.regret_rules import OURS, errors, is_ours, is_saturated, row_of, summary, table, told_errors
from sim.policies import POLICIES

PAGE, FIGURE = Path("docs/regret.md"), Path("docs/evaluation/regret.png")
PREDICTIONS = FIGURE.with_name("regret-predictions.png")
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
_RIVALS = ("recompute", "swap", "migrate", "static-pipeline", "static-pipeline:degree=4")
_QUICK_POLICIES = ("recompute", "static-pipeline", OURS)
_DRAWS = 4

Run = tuple[str, str, int]  # cell, policy, draw


class Runs:
    """Figures of runs, each in a file."""

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
        """Those that are not there yet.

        Raises:
            ConfigError: there are some, and no folder of traces was given.
        """
        missing = [run for run in dict.fromkeys(wanted) if run not in self.found]
        if not missing:
            return
        if self._traces is None:
            raise ConfigError("--traces", f"is missing: {len(missing)} runs are still to be made")
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
                told = (
                    run["failed"]
                    or f"{run['ttft_p50_s']:.2f}/{run['ttft_p99_s']:.2f} s, {1e3 * run['tpot_p50_s']:.0f} ms"
                )
                at_s = time.monotonic() - began_s
                print(f"{at_s:5.0f} s {count}/{len(missing)} {cell} {policy} {d}: {told}", file=sys.stderr, flush=True)

    def of(self, cell: str, policies: Sequence[str]) -> list[Mapping[str, Any]]:
        return [run for (name, policy, _), run in self.found.items() if name == cell and policy in policies]


def measure(runs: Runs, cells: Sequence[str], policies: Sequence[str], draws: int, processes: int) -> None:
    """Draw 0 of everything, then the other draws of the cells that it shows to be saturated."""
    first = [(cell, policy, 0) for policy in (CALM, *reversed(policies)) for cell in cells]
    runs.make(first, processes)
    saturated = [cell for cell in cells if is_saturated([r for r in runs.of(cell, policies) if r["draw"] == 0])]
    runs.make([(c, policy, d) for c in saturated for policy in policies for d in range(1, draws)], processes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--out", type=Path, default=Path("out/regret"))
    parser.add_argument("--cells", default="*", help="names or patterns, separated by commas")
    parser.add_argument("--policies", help="separated by commas; the last drop of them is judged")
    parser.add_argument("--again", default="", help="policies whose runs are made anew")
    parser.add_argument("--draws", type=int, default=_DRAWS, help="of cells that are saturated")
    parser.add_argument("--quick", action="store_true", help="a handful of cells and policies, one draw")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--write", action="store_true", help="puts table and figure into docs/")
    given = parser.parse_args()
    patterns = QUICK if given.quick and given.cells == "*" else given.cells.split(",")
    cells = [name for name in CELLS if any(fnmatch(name, pattern) for pattern in patterns)]
    every = (*(name for name in _RIVALS if name.split(":")[0] in POLICIES), OURS)
    policies = given.policies.split(",") if given.policies else list(_QUICK_POLICIES if given.quick else every)
    again = given.again.split(",") if given.again else []
    ours = next((name for name in reversed(policies) if is_ours(name)), policies[-1])
    try:
        if not cells:
            raise ConfigError("--cells", f"fits none of {', '.join(CELLS)}")
        runs = Runs(given.out, given.traces)
        runs.forget(again)
        if not given.write:
            measure(runs, cells, policies, 1 if given.quick else given.draws, given.processes)
        calm = {cell: runs.found.get((cell, CALM, 0)) for cell in cells}
        found = (row_of(cell, runs.of(cell, policies), calm[cell]) for cell in cells)
        rows = [row for row in found if row is not None]
        predicted = errors([run for cell in cells for run in runs.of(cell, [ours])])
        lines = [*summary(rows, policies, ours), told_errors(predicted)]
        text = "\n".join([table(rows, policies, ours), "", *(f"- {line.strip()}" for line in lines)])
        (given.out / "table.md").write_text(text + "\n")
        draw(rows, policies, given.out / "regret.png")
        draw_predictions(predicted, given.out / "regret-predictions.png")
        if given.write:
            quote(PAGE, "regret", text)
            draw(rows, policies, FIGURE)
            draw_predictions(predicted, PREDICTIONS)
    except BallastError as error:
        print(error, file=sys.stderr)
        return 2
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
