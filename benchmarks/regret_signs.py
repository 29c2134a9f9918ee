"""Whether each change of the layout was better than to leave it: simulated twice, with the change and without.

    python -m benchmarks.regret_signs --traces DIR [--out out/regret-signs] [--cells 'think*,chat-13b*'] [--draws 1]

Each cell of the grid runs with drop; then once more for each drop and each restore that its planner decided, the same
up to that instant, with nothing decided from there on. Judged are the requests that waited then or came until the
prediction ended, by the planner's own loss, with its own targets. A request that is still open two minutes after that
time has waited till then.

A drop is taken where it foretells a loss at least a tenth less. It counts where both runs differ by more than that
tenth, and is right where the one with the drop is better. A restore is taken unless it foretells a loss a tenth more,
so that most foretell no difference: those are shown, and counted by themselves.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ballast.common.errors import BallastError, ConfigError
from benchmarks.regret_cells import CELLS, job_of
from benchmarks.regret_rules import OURS
from services.planner.core.prediction_log import Predicted
from services.planner.policy.compare import loss_of
from services.planner.policy.fluid_model import Prediction
from sim.jobs.simulation import SimJob, specs_of, world_of
from sim.results import RequestRecord, SimRun
from sim.world import World

_AFTER_S = 120.0  # simulated behind the time that is judged
_DECIDES = math.log(1.1)


def without(job: SimJob, predicted: Predicted, zero_s: float) -> SimRun:
    """The same run, in which this was not decided, nor anything afterwards."""
    assert predicted.settled_at_s is not None
    world = _world(replace(job, stop_after_s=predicted.settled_at_s - zero_s + _AFTER_S))
    world.planner.decides_until_s = predicted.at_s
    return world.run()


def came(records: Sequence[RequestRecord], begin_s: float, end_s: float, until_s: float) -> Prediction | None:
    """P99 waits, in seconds, of requests that waited at the first instant or came until the second, and the mean TPOT
    between them. None: too little to say. A request that waits at `until_s` is taken to have waited so long.
    """
    waits_s, ahead_s, tokens, took_s = list[float](), list[float](), 0, 0.0
    for record in records:
        times = np.asarray(record.token_times_s)
        first_s = float(times[0]) if len(times) else until_s
        if record.arrival_s < end_s and first_s >= begin_s:
            waits_s.append(min(first_s, until_s) - record.arrival_s)
            ahead_s.append(min(first_s, until_s) - max(record.arrival_s, begin_s))
        within = (times[1:] >= begin_s) & (times[1:] < end_s)
        tokens += int(within.sum())
        took_s += float(np.diff(times)[within].sum())
    if not waits_s or not tokens:
        return None
    return Prediction(float(np.quantile(waits_s, 0.99)), float(np.quantile(ahead_s, 0.99)), took_s / tokens)


def judged(run: SimRun, other: SimRun, predicted: Predicted) -> Mapping[str, Any] | None:
    """One change, predicted and real. None: nothing came that could be compared."""
    assert predicted.settled_at_s is not None
    begin_s, end_s = predicted.at_s - run.zero_s, predicted.settled_at_s - run.zero_s
    found = [came(one.records, begin_s, end_s, end_s + _AFTER_S) for one in (run, other)]
    if found[0] is None or found[1] is None:
        return None
    losses = [loss_of(one, predicted.targets) for one in found if one is not None]
    told = [loss_of(one, predicted.targets) for one in (predicted.predicted, predicted.nothing)]
    return {
        "change": predicted.decision,
        "at_s": begin_s,
        "lasts_s": end_s - begin_s,
        "with": asdict(found[0]),
        "without": asdict(found[1]),
        "gain": losses[1] - losses[0],  # logarithms of factors
        "predicted_gain": told[1] - told[0],
    }


def signs_of(name: str, traces: Path, draw: int) -> list[Mapping[str, Any]]:
    job = job_of(CELLS[name], traces, OURS, draw)
    run = _world(job).run()
    changes = [one for one in run.predicted if one.epoch is not None and one.settled_at_s is not None]
    found = [judged(run, without(job, one, run.zero_s), one) for one in changes]
    return [{"cell": name, "draw": draw, **one} for one in found if one is not None]


def _words(one: Mapping[str, float]) -> str:
    return f"{one['ttft_p99_s']:7.2f} s ({one['ahead_p99_s']:.2f} ahead) {1e3 * one['tpot_s']:4.0f} ms"


def told(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each change, and what all say together; of drops and of restores, too."""
    lines = [
        f"{one['cell']:20} {one['draw']} at {one['at_s']:6.1f} s {one['change']:16} with {_words(one['with'])},"
        f" without {_words(one['without'])}: {math.exp(one['gain']):6.2f} x,"
        f" predicted {math.exp(one['predicted_gain']):6.2f} x"
        for one in found
    ]
    decided = [one for one in found if abs(one["predicted_gain"]) > _DECIDES]
    others = [one for one in found if abs(one["predicted_gain"]) <= _DECIDES]
    for what, some in (("predicted to differ by more than a tenth", decided), ("predicted to differ by less", others)):
        cases = [one for one in some if abs(one["gain"]) > _DECIDES]
        right = sum((one["gain"] > 0.0) == (one["predicted_gain"] > 0.0) for one in cases)
        better = sum(one["gain"] > 0.0 for one in cases)
        share = f" ({right / len(cases):.0%}; goal 95 %)" if cases and some is decided else ""
        lines.append(
            f"{what}: {len(some)} changes, {len(cases)} did differ by more than a tenth; better with the change in"
            f" {better}, the sign as predicted in {right}{share}"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("out/regret-signs"))
    parser.add_argument("--cells", default="*", help="names or patterns, separated by commas")
    parser.add_argument("--draws", type=int, default=1)
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    given = parser.parse_args()
    cells = [name for name in CELLS if any(fnmatch(name, pattern) for pattern in given.cells.split(","))]
    try:
        if not cells:
            raise ConfigError("--cells", f"fits none of {', '.join(CELLS)}")
        found = _measure(cells, given.traces, given.draws, given.processes)
    except BallastError as error:
        print(error, file=sys.stderr)
        return 2
    text = "\n".join(told(found))
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "signs.json").write_text(json.dumps(found, indent=1))
    (given.out / "signs.txt").write_text(text + "\n")
    print(text)
    return 0


def _measure(cells: Sequence[str], traces: Path, draws: int, processes: int) -> list[Mapping[str, Any]]:
    began_s, found = time.monotonic(), list[Mapping[str, Any]]()
    with ProcessPoolExecutor(processes) as pool:
        asked = {pool.submit(partial(signs_of, cell, traces, d)): (cell, d) for cell in cells for d in range(draws)}
        for count, future in enumerate(as_completed(asked), 1):
            cell, draw = asked[future]
            found += future.result()
            at_s = time.monotonic() - began_s
            print(f"{at_s:5.0f} s {count}/{len(asked)} {cell} {draw}", file=sys.stderr, flush=True)
    return sorted(found, key=lambda one: (one["cell"], one["draw"], one["at_s"]))


def _world(job: SimJob) -> World:
    [(_, rules)] = specs_of(job)
    return world_of(job, rules)


if __name__ == "__main__":
    sys.exit(main())
