"""`ballast bench overload`: its flags, and what it prints."""

import argparse
import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from ballast.common.errors import ConfigError
from tools.bench.emulation import Emulation
from tools.bench.overload import OverloadComparison
from tools.bench.overload_plan import NO_PEAK, Timetable, arguments_of, span_within
from tools.bench.policies import ABLATION, COMPARED, KNOBS, POLICIES, SWEEP, PolicySpec, parse_policies
from tools.bench.probe import PROBE_S
from tools.bench.progress import minutes, open_console
from tools.bench.workloads import Workload, parse_workloads
from tools.model.info import read_info
from tools.model.tiny import make_preset

if TYPE_CHECKING:
    from argparse import _SubParsersAction  # pyright: ignore[reportPrivateUsage] -- it has no public name

_INTERRUPTED = 130
_FAILED = 1
_PRESET = "ballast"
_EMULATED = (
    "emulated: workers compute nothing and take a GPU's time (--profile A100-40G --model Qwen2.5-14B); the trace is"
    " replayed at its own pace with its own lengths. As long as it lasts the machine should do nothing else: a run in"
    " which it could not keep up is void"
)
# Defaults of flags for workers that compute. Emulated ones keep the trace's arrivals and lengths.
_OWN = {"demand": 0.55, "mean_tokens": 240.0, "sequences_each": 8, "probe_s": PROBE_S, "max_num_seqs": 64}
_ONLY_OWN = ("sequences_each", "probe_s")  # flags that emulated workers refuse, having a GPU's memory and speed

# (folder for the checkpoint files, GPU, model name) -> emulated machine
Emulate = Callable[[Path, str, Path], Emulation]


def add_overload_parser(commands: "_SubParsersAction[argparse.ArgumentParser]", emulate: Emulate) -> None:
    parser = commands.add_parser(
        "overload",
        help="compare overload policies on the same bursts",
        description="Replays every workload with every policy, each on a new cluster, in interleaved order. Run"
        " again with the same arguments, it resumes after an interruption. `ballast bench plot` draws"
        " the results.",
    )
    parser.set_defaults(run=run, emulate=emulate)
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="output folder for plan.json, runs/ and logs/"
    )
    _add_contestants(parser)
    parser.add_argument(
        "--workloads",
        required=True,
        metavar="W,...",
        help="trace files, `burst`, `spike` or `answers`; FILE+LENGTHS uses lengths from another file or a fitted"
        " data set, extreme:W repeats the burst of W, twice:W all of W, FILE@SECONDS is that part of it around"
        " its burst",
    )
    parser.add_argument("--engine", choices=["torch", "emulated"], default="torch", help=_EMULATED)
    parser.add_argument(
        "--profile", metavar="GPU", help="speed of emulated workers: a GPU of the catalogue, or a FILE.yaml"
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="checkpoint (default: a small one with random weights in OUT); with emulated workers a model of the"
        " catalogue",
    )
    parser.add_argument(
        "--workers",
        default="2",
        metavar="N,...",
        help="workers of each cluster (default: 2); with several numbers each has its own folder in OUT",
    )
    parser.add_argument("--repetitions", type=int, default=3, metavar="N", help="number of repetitions (default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="seed of arrivals, lengths and prompts")
    parser.add_argument("--deadline-s", type=float, default=300.0, metavar="S", help="deadline of each request")
    parser.add_argument(
        "--demand",
        type=float,
        metavar="X",
        help="scale arrivals to this average KV demand, as a fraction of un-dropped capacity (default: 0.55; with"
        " emulated workers arrivals are not scaled)",
    )
    parser.add_argument(
        "--peak",
        type=float,
        metavar="X",
        help="scale arrivals less if their forecast peak would exceed X times that capacity",
    )
    span = parser.add_mutually_exclusive_group()
    span.add_argument("--span-s", type=float, metavar="S", help="compress or stretch each trace to this many seconds")
    span.add_argument(
        "--max-minutes",
        type=float,
        metavar="M",
        help="compress or stretch traces so that the whole comparison takes this long",
    )
    parser.add_argument("--plan-only", action="store_true", help="print the expected duration and exit")
    parser.add_argument(
        "--mean-tokens",
        type=float,
        metavar="N",
        help="shorten lengths to this mean (default: 240; with emulated workers they are not changed)",
    )
    parser.add_argument(
        "--answer-share",
        type=float,
        metavar="X",
        help="fraction of answer tokens in the mean request, as prompts and answers are shortened separately"
        " (default: that of the trace)",
    )
    parser.add_argument(
        "--sequences-each", type=int, metavar="N", help="number of mean requests that fit into a worker's memory (8)"
    )
    parser.add_argument(
        "--probe-s", type=float, metavar="S", help=f"seconds of each of two measurements (default: {PROBE_S:g})"
    )
    parser.add_argument(
        "--max-num-seqs",
        type=int,
        metavar="N",
        help="maximum number of running requests of a worker (default: 64; 256 with emulated ones)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the services for all runs: monitor.dwell_s=5; may be repeated",
    )


def _add_contestants(parser: argparse.ArgumentParser) -> None:
    knobs = "; ".join(f"{name}: {knob.what}" for name, knob in KNOBS.items())
    contestants = parser.add_mutually_exclusive_group()
    contestants.add_argument(
        "--policies",
        metavar="P,...",
        help=f"of {', '.join(POLICIES)}; knobs follow as :NAME=VALUE, a name for figures as :label=NAME ({knobs})."
        f" Default: {', '.join(COMPARED)}",
    )
    contestants.add_argument(
        "--ablation",
        action="store_const",
        dest="policies",
        const=",".join(ABLATION),
        help="drop with naive transfers and microbatches of equal token counts; with coordinated transfers; with both",
    )
    contestants.add_argument(
        "--sweep",
        action="store_const",
        dest="policies",
        const=",".join(SWEEP),
        help="compare parameters of each policy",
    )


@dataclass(frozen=True)
class _ComparisonPart:
    """The part of a comparison for one number of workers."""

    workers: int
    out: Path
    specs: list[PolicySpec]


def run(args: argparse.Namespace) -> int:
    """Run `ballast bench overload`. Returns the exit status: 0 all runs finished, 1 some failed, 130 interrupted."""
    console = open_console()
    settle(args)
    if args.repetitions < 1:
        raise ConfigError("--repetitions", f"must be at least 1, got {args.repetitions}")
    if args.probe_s <= 0:
        raise ConfigError("--probe-s", f"must be above 0, got {args.probe_s}")
    workloads = parse_workloads(args.workloads, args.seed)
    parts = _parts(args)
    if args.max_minutes is not None:
        unit = [_timetable(part, args, {w.name: _longer(w) for w in workloads}) for part in parts]
        args.span_s = span_within(unit, args.max_minutes)
    _say_timetable(parts, args, workloads, console)
    if args.plan_only:
        return 0
    problems: list[str] = []
    for part in parts:
        problems += asyncio.run(_comparison(part, args, console).run(workloads, part.specs, args.repetitions))
        if problems[-1:] == ["interrupted"]:
            break
    for problem in problems:
        console.print(problem, style="bold red", markup=False)
    for part in parts:
        console.print(
            f"results are in {part.out / 'runs'}; ballast bench plot --results {part.out} --out DIR draws them"
        )
    if not problems:
        return 0
    return _INTERRUPTED if problems[-1] == "interrupted" else _FAILED


def settle(args: argparse.Namespace) -> None:
    """Fill in defaults that depend on the engine.

    Raises:
        ConfigError: the flags contradict each other.
    """
    args.policies = args.policies or ",".join(COMPARED)
    args.peak = NO_PEAK if args.peak is None else args.peak
    if args.engine != "emulated":
        if args.profile is not None:
            raise ConfigError("--profile", "is for --engine emulated; other engines are as fast as this machine")
        for name, value in _OWN.items():
            setattr(args, name, value if getattr(args, name) is None else getattr(args, name))
        return
    if args.profile is None:
        raise ConfigError("--profile", "is needed: the GPU that workers emulate, such as A100-40G")
    if args.model is None:
        raise ConfigError("--model", "is needed: the model that emulated workers appear to serve, such as Qwen2.5-14B")
    for name in _ONLY_OWN:
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')}", "is for workers that compute; a GPU has its own memory")
    if args.answer_share is not None and args.mean_tokens is None:
        raise ConfigError("--answer-share", "is the answers' share of --mean-tokens; emulated workers keep lengths")
    if args.peak != NO_PEAK and args.demand is None:
        raise ConfigError("--peak", "limits what --demand scales; emulated workers keep arrivals as they are")
    args.sequences_each, args.probe_s = _OWN["sequences_each"], 1.0


def _parts(args: argparse.Namespace) -> list[_ComparisonPart]:
    """The comparisons, one for each number of workers. Each has the policies for which its workers suffice."""
    numbers = _numbers(args.workers)
    specs = parse_policies(args.policies)
    for spec in specs:
        if spec.pipeline_degree > max(numbers):
            raise ConfigError("policies", f"{spec.label} needs more than {max(numbers)} workers")
    return [
        _ComparisonPart(
            workers,
            args.out if len(numbers) == 1 else args.out / f"workers-{workers}",
            chosen,
        )
        for workers in numbers
        if (chosen := [spec for spec in specs if spec.pipeline_degree <= workers])
    ]


def _numbers(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() for word in words) or len(set(words)) < len(words):
        raise ConfigError("--workers", f"must be different whole numbers, got {text!r}")
    return [int(word) for word in words]


def _longer(workload: Workload) -> float:
    """Factor by which a workload lasts longer than its base trace, because its burst is repeated."""
    return workload.trace.span_s / workload.base.span_s if workload.base.span_s else 1.0


def _timetable(part: _ComparisonPart, args: argparse.Namespace, spans_s: dict[str, float]) -> Timetable:
    return Timetable(part.workers, spans_s, [spec.label for spec in part.specs], args.repetitions, args.probe_s)


def _say_timetable(
    parts: Sequence[_ComparisonPart], args: argparse.Namespace, workloads: Sequence[Workload], console: Console
) -> None:
    spans_s = {w.name: w.trace.span_s if args.span_s is None else args.span_s * _longer(w) for w in workloads}
    tables = [_timetable(part, args, spans_s) for part in parts]
    for table in tables:
        console.print(table.describe(), markup=False, highlight=False)
    if len(tables) > 1:
        console.print(f"together about {minutes(sum(table.total_s for table in tables))} min", highlight=False)


def _comparison(part: _ComparisonPart, args: argparse.Namespace, console: Console) -> OverloadComparison:
    if args.engine == "emulated":
        model = args.emulate(args.out / "machine", args.profile, args.model)
        info, gpu = model.info, model.gpu
    else:
        model = args.model or _preset(args.out / "model", args.seed)
        info, gpu = read_info(model), None
    arguments = arguments_of(
        info,
        workers=part.workers,
        seed=args.seed,
        deadline_s=args.deadline_s,
        demand_fraction=args.demand,
        peak_fraction=args.peak,
        mean_tokens=args.mean_tokens,
        answer_share=args.answer_share,
        sequences_each=args.sequences_each,
        span_s=args.span_s,
        max_num_seqs=args.max_num_seqs,
        settings=dict(_setting(text) for text in args.set),
        gpu=gpu,
    )
    return OverloadComparison(model, arguments, part.out, console, args.probe_s)


def _preset(path: Path, seed: int) -> Path:
    return path if path.exists() else make_preset(_PRESET, path, seed=seed)


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    service = name.partition(".")[0]
    if not equals or service not in ("monitor", "planner", "dispatcher", "worker"):
        raise ConfigError("--set", f"must be SERVICE.SETTING=VALUE, got {text!r}")
    return name, value
