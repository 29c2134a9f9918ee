"""`ballast bench overload`: its flags, and what it says at the end."""

import argparse
import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from ballast.bench.overload import Comparison, arguments_of
from ballast.bench.policies import KNOBS, POLICIES, parse_policies
from ballast.bench.probe import PROBE_S
from ballast.bench.progress import open_console
from ballast.bench.workloads import parse_workloads
from ballast.common.errors import ConfigError
from ballast.model.info import read_info
from ballast.model.tiny import make_preset

if TYPE_CHECKING:
    from argparse import _SubParsersAction  # pyright: ignore[reportPrivateUsage] -- it has no public name

_INTERRUPTED = 130
_FAILED = 1
_PRESET = "ballast"


def add_overload_parser(commands: "_SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "overload",
        help="compare overload policies on the same bursts",
        description="Every policy replays every workload on fresh clusters of its own, in interleaved order. Called"
        " again with the same arguments it goes on where it was. `ballast bench plot` draws the results.",
    )
    parser.set_defaults(run=run)
    knobs = "; ".join(f"{name}: {knob.what}" for name, knob in KNOBS.items())
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="plan.json, runs/ and logs/ go there")
    parser.add_argument(
        "--policies",
        default=",".join(POLICIES),
        metavar="P,...",
        help=f"of {', '.join(POLICIES)}; knobs follow as :NAME=VALUE, a name for figures as :label=NAME ({knobs})",
    )
    parser.add_argument(
        "--workloads",
        required=True,
        metavar="W,...",
        help="trace files, `burst` or `answers`; FILE+LENGTHS takes lengths from another file or a fitted data set,"
        " extreme:W repeats the burst of W",
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="checkpoint (default: a small random one in OUT)")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="of each cluster (default: 2)")
    parser.add_argument("--repetitions", type=int, default=3, metavar="N", help="(default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals, lengths and prompts")
    parser.add_argument("--deadline-s", type=float, default=300.0, metavar="S", help="of each request")
    parser.add_argument(
        "--demand",
        type=float,
        default=0.55,
        metavar="X",
        help="average KV demand to scale arrivals to, as a share of un-dropped capacity (default: 0.55)",
    )
    parser.add_argument(
        "--span-s", type=float, metavar="S", help="squeeze or stretch each trace to this many seconds first"
    )
    parser.add_argument("--mean-tokens", type=float, default=240.0, metavar="N", help="shorten lengths to this mean")
    parser.add_argument("--sequences-each", type=int, default=8, metavar="N", help="mean requests that a worker holds")
    parser.add_argument("--probe-s", type=float, default=PROBE_S, metavar="S", help="of each of two measurements")
    parser.add_argument("--max-num-seqs", type=int, default=64, metavar="N", help="requests that run in a worker")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the services, of all runs: monitor.pressure.dwell_s=3; may be repeated",
    )


def run(args: argparse.Namespace) -> int:
    """Exit status: 0 all runs are there, 1 some failed, 130 interrupted."""
    console = open_console()
    if args.repetitions < 1:
        raise ConfigError("--repetitions", f"must be at least 1, got {args.repetitions}")
    if args.probe_s <= 0:
        raise ConfigError("--probe-s", f"must be above 0, got {args.probe_s}")
    specs = parse_policies(args.policies)
    workloads = parse_workloads(args.workloads, args.seed)
    model = args.model or _preset(args.out / "model", args.seed)
    arguments = arguments_of(
        read_info(model),
        workers=args.workers,
        seed=args.seed,
        deadline_s=args.deadline_s,
        demand_fraction=args.demand,
        mean_tokens=args.mean_tokens,
        sequences_each=args.sequences_each,
        span_s=args.span_s,
        max_num_seqs=args.max_num_seqs,
        settings=dict(_setting(text) for text in args.set),
    )
    comparison = Comparison(model, arguments, args.out, console, args.probe_s)
    problems = asyncio.run(comparison.run(workloads, specs, args.repetitions))
    for problem in problems:
        console.print(problem, style="bold red", markup=False)
    console.print(f"results are in {args.out / 'runs'}; ballast bench plot --results {args.out} --out DIR draws them")
    if not problems:
        return 0
    return _INTERRUPTED if problems[-1] == "interrupted" else _FAILED


def _preset(path: Path, seed: int) -> Path:
    return path if path.exists() else make_preset(_PRESET, path, seed=seed)


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    service = name.partition(".")[0]
    if not equals or service not in ("monitor", "planner", "dispatcher", "worker"):
        raise ConfigError("--set", f"must be SERVICE.SETTING=VALUE, got {text!r}")
    return name, value
