"""`ballast sim --sweep` and `--find-gpus`: tables, a figure and words for what `sim.jobs.whatif` finds."""

# matplotlib leaves some arguments without types.
# pyright: reportUnknownMemberType=false

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ballast.common.errors import ConfigError
from ballast.common.extras import lacking
from ballast.common.units import duration
from sim.jobs.simulation import Progress
from sim.jobs.whatif import Point, Sizing, find_gpus, in_words, parse_sweep, sweep
from sim.scenario import Scenario
from tools.bench.results import STANDARD_OUTPUT
from tools.bench.slo import Slo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sweep", metavar="NAME=V,V,..", help="rate, burst, gpus, network (Gbit/s) or slo (s of TTFT)")
    parser.add_argument("--find-gpus", action="store_true", help="the fewest GPUs that keep --slo-ttft-s")
    parser.add_argument("--max-gpus", type=int, default=256, metavar="N", help="that --find-gpus tries (256)")
    parser.add_argument("--slo-ttft-s", type=float, metavar="S", help="time to the first token that is good enough")
    parser.add_argument("--slo-tpot-s", type=float, metavar="S", help="time per further token; none: whatever it is")
    parser.add_argument(
        "--slo-share", type=float, default=0.99, metavar="X", help="of the requests that keep it (0.99)"
    )


def slo_of(args: argparse.Namespace) -> Slo | None:
    """
    Raises:
        ConfigError: --find-gpus without a goal, or with --sweep.
    """
    if args.find_gpus and args.sweep is not None:
        raise ConfigError("--find-gpus", "and --sweep are two questions; ask one at a time")
    if args.slo_ttft_s is None:
        if args.find_gpus or args.slo_tpot_s is not None:
            raise ConfigError("--slo-ttft-s", "is missing: how long may a first token take?")
        return None
    return Slo(ttft_s=args.slo_ttft_s, tpot_s=args.slo_tpot_s, share=args.slo_share)


def run(args: argparse.Namespace, scenario: Scenario, console: Console, progress: Progress) -> None:
    slo = slo_of(args)
    found: dict[str, int | None] = {}  # policy -> GPUs that are needed
    words = ""
    if args.find_gpus:
        assert slo is not None, "looked at by slo_of"
        sizings = find_gpus(scenario, slo, args.max_gpus, progress)
        points = [point for sizing in sizings for point in sizing.points]
        words = in_words(sizings, slo, scenario, args.max_gpus)
        found = {sizing.policy: sizing.gpu_count for sizing in sizings}
        console.print(_table(points, "what was tried"))
        console.print(_answers(sizings))
        console.print(f"\n{words}")
    else:
        name, values = parse_sweep(args.sweep)
        points = sweep(scenario, name, values, slo, progress)
        console.print(_table(points, f"sweep of {name}"))
    if args.json is not None:
        rows = [dataclasses.asdict(point) for point in points]
        told = {"kind": "what-if", "points": rows, "gpus": found, "words": words}
        _write(args.json, json.dumps(told, indent=1) + "\n")
    if args.plot is not None:
        _draw(points, slo, args.plot, by_gpus=args.find_gpus)
    for path in (args.json, args.plot):
        if path not in (None, STANDARD_OUTPUT):
            console.print(f"wrote {path}")


def _write(path: Path, text: str) -> None:
    if path == STANDARD_OUTPUT:
        print(text, end="")
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(str(path), f"cannot be written: {error.strerror}") from error


def _table(points: Sequence[Point], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("condition", "policy", "GPUs", "keep the SLO", "p50 TTFT", "p99 TTFT", "p50 TPOT", "drops"):
        table.add_column(name, justify="left" if name in ("condition", "policy") else "right")
    for p in points:
        share = "-" if p.met_share is None else f"{p.met_share:.1%}"
        table.add_row(
            p.condition,
            p.policy,
            str(p.gpu_count),
            share,
            duration(p.ttft_p50_s),
            duration(p.ttft_p99_s),
            duration(p.tpot_p50_s),
            str(p.drop_count),
        )
    return table


def _answers(sizings: Sequence[Sizing]) -> Table:
    table = Table(title="GPUs that are needed", title_justify="left")
    table.add_column("policy")
    table.add_column("GPUs", justify="right")
    for sizing in sizings:
        table.add_row(sizing.policy, "more than were tried" if sizing.gpu_count is None else str(sizing.gpu_count))
    return table


def _draw(points: Sequence[Point], slo: Slo | None, path: Path, *, by_gpus: bool) -> None:
    """p99 TTFT over the conditions, and the share that keeps the SLO if there is one."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise lacking("--plot", "matplotlib", "bench") from error
    figure = Figure(figsize=(8.0 if slo is not None else 4.5, 3.2), layout="constrained")
    axes = figure.subplots(1, 2 if slo is not None else 1, squeeze=False)[0]
    conditions = list(dict.fromkeys(str(p.gpu_count) if by_gpus else p.condition for p in points))
    if by_gpus:
        conditions.sort(key=int)
    for policy in dict.fromkeys(p.policy for p in points):
        mine = [p for p in points if p.policy == policy]
        places = [conditions.index(str(p.gpu_count) if by_gpus else p.condition) for p in mine]
        latencies = [p.ttft_p99_s if p.ttft_p99_s is not None else float("nan") for p in mine]
        axes[0].plot(places, latencies, marker="o", label=policy)
        if slo is not None:
            axes[1].plot(places, [100.0 * (p.met_share or 0.0) for p in mine], marker="o", label=policy)
    for axis in axes:
        axis.set_xticks(range(len(conditions)), conditions, fontsize=8)
        axis.set_xlabel("GPUs" if by_gpus else "")
    axes[0].set_yscale("log")
    axes[0].set_ylabel("p99 TTFT (s)")
    axes[0].legend(fontsize=8)
    if slo is not None:
        axes[1].axhline(100.0 * slo.share, color="grey", linewidth=1, linestyle="--")
        axes[1].set_ylabel("requests that keep the SLO (%)")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError("--plot", f"{path}: {error}") from error
