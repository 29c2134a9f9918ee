"""`ballast sim --sweep`: runs `sim.jobs.whatif` and shows its results as a table and a figure."""

# matplotlib leaves some arguments untyped.
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
from sim.jobs.whatif import Point, parse_sweep, sweep
from sim.scenario import Scenario
from tools.bench.results import STANDARD_OUTPUT
from tools.bench.slo import Slo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sweep",
        metavar="NAME=V,V,..",
        help="condition to vary: rate, burst, gpus, network (Gbit/s) or slo (s of TTFT)",
    )
    parser.add_argument("--slo-ttft-s", type=float, metavar="S", help="SLO for the time to first token")
    parser.add_argument(
        "--slo-tpot-s", type=float, metavar="S", help="goal for the time per output token (default: none)"
    )
    parser.add_argument(
        "--slo-share", type=float, default=0.99, metavar="X", help="share of requests that must meet the SLO (0.99)"
    )


def slo_of(args: argparse.Namespace) -> Slo | None:
    """The goal given on the command line.

    Raises:
        ConfigError: there is a limit on TPOT, but none on TTFT.
    """
    if args.slo_ttft_s is None:
        if args.slo_tpot_s is not None:
            raise ConfigError("--slo-ttft-s", "is missing: how long may a first token take?")
        return None
    return Slo(ttft_s=args.slo_ttft_s, tpot_s=args.slo_tpot_s, share=args.slo_share)


def run(args: argparse.Namespace, scenario: Scenario, console: Console, progress: Progress) -> None:
    slo = slo_of(args)
    name, values = parse_sweep(args.sweep)
    points = sweep(scenario, name, values, slo, progress)
    console.print(_table(points, f"sweep of {name}"))
    if args.json is not None:
        rows = [dataclasses.asdict(point) for point in points]
        _write(args.json, json.dumps({"kind": "what-if", "points": rows}, indent=1) + "\n")
    if args.plot is not None:
        _draw(points, slo, args.plot)
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


def _draw(points: Sequence[Point], slo: Slo | None, path: Path) -> None:
    """Draw P99 TTFT over the conditions, and the share of requests within the SLO if one is given."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise lacking("--plot", "matplotlib", "bench") from error
    figure = Figure(figsize=(8.0 if slo is not None else 4.5, 3.2), layout="constrained")
    axes = figure.subplots(1, 2 if slo is not None else 1, squeeze=False)[0]
    conditions = list(dict.fromkeys(p.condition for p in points))
    for policy in dict.fromkeys(p.policy for p in points):
        mine = [p for p in points if p.policy == policy]
        places = [conditions.index(p.condition) for p in mine]
        latencies = [p.ttft_p99_s if p.ttft_p99_s is not None else float("nan") for p in mine]
        axes[0].plot(places, latencies, marker="o", label=policy)
        if slo is not None:
            axes[1].plot(places, [100.0 * (p.met_share or 0.0) for p in mine], marker="o", label=policy)
    for axis in axes:
        axis.set_xticks(range(len(conditions)), conditions, fontsize=8)
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
