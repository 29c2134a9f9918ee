"""Savings of parking and dropping together on slices of real arrivals, with default settings.

    python -m benchmarks.parking --traces DIR [--slices conv-spike,...] [--search] [--policy drop:park=on]

Simulates GPU-seconds relative to the constant number of GPUs that `recompute` needs for the same goal, in a pool of
that size. DIR has published traces as CSVs of `arrival_s,input_tokens,output_tokens`, and a pool of lengths. `--search`
repeats the search for the number of GPUs that `recompute` needs. `bar`: the most GPU-seconds allowed. The bars of the
first five slices are those of the study that motivated parking; the last three were held out during its development.
`soon`: number of parked instances that were needed again within a minute.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ballast.common.errors import BallastError, ConfigError
from sim.jobs.scenarios import job_of
from sim.jobs.simulation import SimJob
from sim.jobs.sizing import BOTH, attempt, size
from sim.scenario import make_scenario
from tools.bench.slo import Slo

_MOST = 40  # maximum number of instances in a search


@dataclass(frozen=True, slots=True)
class TraceSlice:
    trace: str
    on: tuple[str, str]  # (model, GPU)
    slo: Slo
    static: int  # instances that `recompute` needs, as `--search` finds
    bar: float | None  # maximum GPU-seconds, relative to those of `recompute`
    rate_scale: float = 1.0
    time_scale: float = 1.0
    answer_scale: float = 1.0
    lengths: str | None = None


_OLD, _NEW = ("Llama-2-13B", "A100-40G"), ("Qwen2.5-14B", "A800")
_CHAT, _CODE = Slo(ttft_s=2.0, tpot_s=0.15), Slo(ttft_s=10.0, tpot_s=0.2)
_POOL = "pool_sharegpt8k.csv"
SLICES = {
    "conv-spike": TraceSlice("azure_conv_spike640_a", _OLD, _CHAT, 6, 0.95),
    "conv-long": TraceSlice("azure_conv_spike640_b", _NEW, _CHAT, 6, 0.92, rate_scale=0.6, answer_scale=8.0),
    "burstgpt": TraceSlice("burstgpt1_t0_35400", _OLD, _CHAT, 14, 0.5, rate_scale=8.0, time_scale=0.02),
    "code-spike": TraceSlice("azure_code_spike640_b", _OLD, _CODE, 16, 0.5, rate_scale=0.5, lengths=_POOL),
    "computing": TraceSlice("azure_conv_spike640_b", _NEW, _CHAT, 6, 1.0, rate_scale=3.0),
    "conv-calm": TraceSlice("azure_conv_calm640", _OLD, _CHAT, 8, None, rate_scale=1.5),
    "code-other": TraceSlice("azure_code_spike640_a", _OLD, _CODE, 24, None, rate_scale=0.5, lengths=_POOL),
    "code-even": TraceSlice("azure_code_least_bursty640", _NEW, _CODE, 12, None, rate_scale=2.0, lengths=_POOL),
}


def job(one: TraceSlice, traces: Path, policy: str, count: int, limit: int | None = None) -> SimJob:
    """The simulation of a slice.

    Raises:
        ConfigError: a trace is missing, or the policy is unknown.
    """
    told: dict[str, object] = {"description": "", "model": one.on[0], "cluster": f"{count}x{one.on[1]}", "limit": limit}
    told |= {"trace": str(traces / f"{one.trace}.csv"), "policies": (policy,)}
    told |= {"rate_scale": one.rate_scale, "time_scale": one.time_scale, "answer_scale": one.answer_scale}
    if one.lengths is not None:
        told["lengths"] = str(traces / one.lengths)
    return job_of(make_scenario(told))


def needed(one: TraceSlice, traces: Path) -> int:
    """Number of instances that `recompute` needs, by search."""
    found = size(job(one, traces, "recompute", 1), one.slo, _MOST).columns[0].gpu_count
    if found is None:
        raise ConfigError("--search", f"{_MOST} GPUs are not enough for {one.trace}")
    return found


def row(name: str, traces: Path, policy: str, *, search: bool) -> tuple[str, bool]:
    one = SLICES[name]
    static = needed(one, traces) if search else one.static
    run = attempt(job(one, traces, policy, static), one.slo)
    part = run.mean_on / static
    kept = run.met_share >= one.slo.share and (one.bar is None or part <= one.bar + 0.005)
    figures = (
        str(static),
        f"{'at most ' if run.ended_early_s is not None else ''}{run.met_share:.2%}",
        f"{run.mean_on:.2f}",
        f"{part:.2f}",
        "-" if one.bar is None else f"{one.bar:.2f}",
        f"{run.drop_count}",
        f"{run.soon_count} of {run.leave_count}",
        "yes" if kept else "no",
    )
    return f"| {name} | {' | '.join(figures)} |", kept


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, metavar="DIR")
    parser.add_argument("--slices", default=",".join(SLICES), metavar="NAMES", help="slices to simulate (default: all)")
    parser.add_argument("--policy", default=BOTH, metavar="NAME", help="policy with its knobs (default: %(default)s)")
    parser.add_argument("--search", action="store_true", help="search for the number of GPUs that recompute needs")
    args = parser.parse_args(argv)
    names = args.slices.split(",")
    try:
        if unknown := set(names) - set(SLICES):
            raise ConfigError("--slices", f"{', '.join(sorted(unknown))}: known are {', '.join(SLICES)}")
        print("| slice | static GPUs | in time | mean GPUs on | of static | bar | drops | soon | kept |")
        print("|" + "---|" * 9, flush=True)
        kept = True
        for name in names:
            line, one = row(name, args.traces, args.policy, search=args.search)
            kept = kept and one
            print(line, flush=True)
    except BallastError as error:
        print(f"parking: {error}", file=sys.stderr)
        return 2
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
