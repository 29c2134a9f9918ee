"""Whether each change of the layout was better than leaving it unchanged: `python -m benchmarks.regret --signs`.

Each cell runs with drop, and once more for each drop and restore decided by its planner: identical up to that instant,
with no decisions afterwards. The requests that waited at that time or arrived until the end of the prediction are
judged by the planner's own loss function and targets. A request still open two minutes later is taken to have waited
until then. The planner drops if it predicts a loss at least a tenth lower; it restores unless it predicts a loss a
tenth higher. Restores are counted separately, because most of them predict no difference.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.regret_cells import CELLS, job_of
from services.planner.core.prediction_log import Predicted
from services.planner.policy.compare import loss_of
from services.planner.policy.fluid_model import Prediction
from sim.jobs.simulation import SimJob, specs_of, world_of
from sim.results import RequestRecord, SimRun
from sim.world import World

_AFTER_S = 120.0  # simulated after the judged period
_DECIDES = math.log(1.1)


def _world(job: SimJob) -> World:
    [(_, rules)] = specs_of(job)
    return world_of(job, rules)


def without(job: SimJob, predicted: Predicted, zero_s: float) -> SimRun:
    """A second run of the job, without this change and all later ones."""
    assert predicted.settled_at_s is not None
    world = _world(replace(job, stop_after_s=predicted.settled_at_s - zero_s + _AFTER_S))
    world.planner.decides_until_s = predicted.at_s
    return world.run()


def outcome(
    records: Sequence[RequestRecord], begin_s: float, end_s: float, until_s: float, lost_after_s: float = math.inf
) -> Prediction | None:
    """P99 wait in seconds of requests that waited at `begin_s` or arrived until `end_s`, and mean TPOT between the two.
    None if there are no such requests or tokens. A request without a token at `until_s` counts as waiting until then.
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
    lost, lost_ahead = (float(np.mean(np.clip(np.array(w) / lost_after_s - 1, 0.0, 1.0))) for w in (waits_s, ahead_s))
    p99_s, ahead_p99_s = float(np.quantile(waits_s, 0.99)), float(np.quantile(ahead_s, 0.99))
    return Prediction(p99_s, ahead_p99_s, took_s / tokens, lost, lost_ahead)


def judged(run: SimRun, other: SimRun, predicted: Predicted) -> Mapping[str, Any] | None:
    """Predicted and real gain of one change, as logarithms of factors. None: too few requests to compare."""
    assert predicted.settled_at_s is not None
    begin_s, end_s = predicted.at_s - run.zero_s, predicted.settled_at_s - run.zero_s
    with_it, left = (
        outcome(one.records, begin_s, end_s, end_s + _AFTER_S, predicted.targets.lost_s) for one in (run, other)
    )
    if with_it is None or left is None:
        return None
    real, told = (
        loss_of(nothing, predicted.targets) - loss_of(change, predicted.targets)
        for change, nothing in ((with_it, left), (predicted.predicted, predicted.nothing))
    )
    return {
        "change": predicted.decision,
        "at_s": begin_s,
        "lasts_s": end_s - begin_s,
        "with": asdict(with_it),
        "without": asdict(left),
        "gain": real,
        "predicted_gain": told,
    }


def signs_of(name: str, traces: Path | None, draw: int) -> list[Mapping[str, Any]]:
    job = job_of(CELLS[name], traces, "drop", draw)
    run = _world(job).run()
    changes = [one for one in run.predicted if one.epoch is not None and one.settled_at_s is not None]
    found = [judged(run, without(job, one, run.zero_s), one) for one in changes]
    return [{"cell": name, "draw": draw, **one} for one in found if one is not None]


def signs_text(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line per change, then the counts."""

    def figures(one: Mapping[str, float]) -> str:
        return f"{one['ttft_p99_s']:7.2f} s ({one['ahead_p99_s']:.2f} ahead) {1e3 * one['tpot_s']:4.0f} ms"

    lines = [
        f"{one['cell']:20} {one['draw']} at {one['at_s']:6.1f} s {one['change']:16} with {figures(one['with'])},"
        f" without {figures(one['without'])}: {math.exp(one['gain']):6.2f} x,"
        f" predicted {math.exp(one['predicted_gain']):6.2f} x"
        for one in found
    ]
    for what, decided in (("predicted to differ by more than a tenth", True), ("predicted to differ by less", False)):
        some = [one for one in found if (abs(one["predicted_gain"]) > _DECIDES) is decided]
        cases = [one for one in some if abs(one["gain"]) > _DECIDES]
        right = sum((one["gain"] > 0.0) == (one["predicted_gain"] > 0.0) for one in cases)
        better = sum(one["gain"] > 0.0 for one in cases)
        share = f" ({right / len(cases):.0%}; goal 95 %)" if cases and decided else ""
        lines.append(
            f"{what}: {len(some)} changes, {len(cases)} did differ by more than a tenth; better with the change in"
            f" {better}, the sign as predicted in {right}{share}"
        )
    return lines


def compare_signs(given: argparse.Namespace, cells: Sequence[str]) -> str:
    began_s, found = time.monotonic(), list[Mapping[str, Any]]()
    draws = given.draws or 1
    with ProcessPoolExecutor(given.processes) as pool:
        asked = {pool.submit(partial(signs_of, c, given.traces, d)): f"{c} {d}" for c in cells for d in range(draws)}
        for count, future in enumerate(as_completed(asked), 1):
            found += future.result()
            at_s = time.monotonic() - began_s
            print(f"{at_s:5.0f} s {count}/{len(asked)} {asked[future]}", file=sys.stderr, flush=True)
    found.sort(key=lambda one: (one["cell"], one["draw"], one["at_s"]))
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "signs.json").write_text(json.dumps(found, indent=1))
    return "\n".join(signs_text(found))
