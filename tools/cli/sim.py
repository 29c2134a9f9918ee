"""`ballast sim`: simulates how a cluster would serve a trace, without its hardware."""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from ballast.common.arguments import figure_file, output_file
from ballast.common.errors import ConfigError
from sim.hardware import gpus, models
from sim.jobs.scenarios import job_of
from sim.jobs.simulation import simulate
from sim.scenario import Scenario, make_scenario, read_scenario
from tools.bench.conclusion import conclude
from tools.bench.progress import open_console
from tools.bench.results import STANDARD_OUTPUT, write_result
from tools.bench.slo import LENIENT
from tools.bench.style import require_matplotlib
from tools.bench.table import render
from tools.cli import whatif
from tools.cli.arguments import Commands, add_formats

# Flags that override the scenario's field of the same name.
_FIELDS = (
    "model",
    "quantization",
    "kv_cache_dtype",
    "cluster",
    "lengths",
    "rate_scale",
    "burst_scale",
    "network_gbps",
    "time_scale",
    "length_scale",
    "answer_scale",
    "limit",
    "seed",
    "deadline_s",
    "block_size",
    "max_num_seqs",
    "tpot_target_s",
    "max_num_batched_tokens",
    "microbatching",
)

_LINE_INTERVAL_S = 10.0


def add_parser(subparsers: Commands) -> None:
    parser = subparsers.add_parser(
        "sim",
        help="simulate a cluster of GPUs on a trace",
        description="Runs the decision code of all services in virtual time against a model of GPUs and links."
        " Traces are CSV files with arrival_s,input_tokens,output_tokens, or the published files of"
        " BurstGPT, Azure and Mooncake.",
        epilog=f"Models: {', '.join(models())}. GPUs: {', '.join(gpus())}.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("--trace", metavar="FILE", help="trace with arrivals and token counts")
    parser.add_argument(
        "--model", metavar="NAME", help="a model in the list below; or a folder or org/name with a config.json"
    )
    add_formats(parser)
    parser.add_argument(
        "--cluster",
        metavar="NxGPU",
        help="8xA800: eight GPUs; 2x8xH800: two servers of eight; 8xmine.yaml: your own description (docs/gpus.md);"
        " 4xA100-40G+2xH100-80G: several kinds",
    )
    parser.add_argument("--policy", metavar="NAMES", help="policies to compare (recompute,drop)")
    parser.add_argument(
        "--scenario", type=Path, metavar="FILE", help="YAML file with these settings; flags take precedence"
    )
    parser.add_argument(
        "--rate-scale", type=float, metavar="X", help="factor on the number of requests, in the same pattern"
    )
    parser.add_argument("--time-scale", type=float, metavar="X", help="factor on arrival times; 0.5: twice as fast")
    parser.add_argument("--length-scale", type=float, metavar="X", help="factor on input and output tokens")
    parser.add_argument(
        "--answer-scale", type=float, metavar="X", help="factor on output tokens, instead of --length-scale"
    )
    parser.add_argument("--lengths", metavar="NAME", help="lengths of another data set, or of a file: longbench ...")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N requests of the trace")
    parser.add_argument("--seed", type=int, help="seed of all random draws (0)")
    parser.add_argument("--deadline-s", type=float, metavar="S", help="deadline of each request (3600)")
    parser.add_argument("--block-size", type=int, metavar="TOKENS", help="tokens of a KV block (64)")
    parser.add_argument(
        "--max-num-seqs",
        type=int,
        metavar="N",
        help="maximum number of running requests per instance (default: as workers on the GPU)",
    )
    parser.add_argument(
        "--tpot-target-s",
        type=float,
        metavar="S",
        help="TPOT target, which limits the number of running requests (none)",
    )
    parser.add_argument(
        "--max-num-batched-tokens",
        type=int,
        metavar="N",
        help="maximum number of tokens per step (default: as workers on the GPU)",
    )
    parser.add_argument(
        "--microbatching", metavar="WAY", help="microbatches of pipelines: lookahead (default) or token-count"
    )
    parser.add_argument(
        "--network-gbps", type=float, metavar="X", help="speed of each GPU's network card (default: from the catalogue)"
    )
    parser.add_argument(
        "--burst-scale", type=float, metavar="X", help="factor on the number of requests in the densest 30 s"
    )
    parser.add_argument(
        "--arrivals",
        metavar="NAME=X,...",
        help="instead of --trace: rate_per_s=2,span_s=150; cv=4 for burstier arrivals, on_s=20,off_s=20 for phases",
    )
    parser.add_argument(
        "--offline",
        metavar="LENGTHS",
        help="endless offline requests in addition to the trace, with lengths as for --lengths",
    )
    parser.add_argument(
        "--offline-class",
        metavar="CLASS",
        help="class of offline requests: batch (default), or default: the same as online requests (docs/offline.md)",
    )
    whatif.add_arguments(parser)
    parser.add_argument("--check-every", type=int, default=0, metavar="N", help="check all invariants every N events")
    parser.add_argument(
        "--json", type=output_file, metavar="OUT", help="result file; -: standard output (docs/results-schema.md)"
    )
    parser.add_argument(
        "--plot", type=figure_file, metavar="OUT.png", help="output file for a figure over time (needs matplotlib)"
    )


def run(args: argparse.Namespace) -> int:
    """Run the simulation and print the result. The exit status is 0, whatever happened to the simulated requests."""
    if args.plot is not None:
        require_matplotlib("--plot")
    scenario, console = _scenario(args), open_console(stderr=args.json == STANDARD_OUTPUT)
    slo = whatif.slo_of(args)
    if args.sweep is not None:
        with RunDisplay(console, None) as display:
            whatif.run(args, scenario, console, display)
        return 0
    job = job_of(scenario, check_every=args.check_every)
    with RunDisplay(console, len(job.trace.requests)) as display:
        result = simulate(job, time.time(), display)
    if args.json is not None:
        write_result(args.json, result)
    console.print(render(result))
    console.print(Text("\n" + conclude(result, slo or LENIENT)))
    if args.plot is not None:
        from tools.bench.plot import plot_result

        plot_result(result, args.plot)
    for path in (args.json, args.plot):
        if path not in (None, STANDARD_OUTPUT):
            console.print(f"wrote {path}")
    return 0


def _scenario(args: argparse.Namespace) -> Scenario:
    changes = {name: getattr(args, name) for name in _FIELDS if getattr(args, name) is not None}
    if args.trace is not None:
        changes["trace"] = args.trace
    if args.policy is not None:
        changes["policies"] = tuple(name.strip() for name in args.policy.split(",") if name.strip())
    if args.arrivals is not None:
        changes["arrivals"] = _numbers(args.arrivals)
    if args.offline is not None:
        changes["offline"] = {"lengths": args.offline, "as_class": args.offline_class or "batch"}
    told = {"description": ""}
    if args.scenario is not None:
        told = read_scenario(args.scenario).model_dump()
    else:
        for name in ("trace", "model", "cluster"):
            if name not in changes and not (name == "trace" and "arrivals" in changes):
                raise ConfigError(f"--{name}", "is missing; or give a --scenario")
    return make_scenario({**told, **changes})


def _numbers(text: str) -> dict[str, float]:
    try:
        return {name.strip(): float(value) for name, _, value in (one.partition("=") for one in text.split(","))}
    except ValueError:
        raise ConfigError("--arrivals", f"must be NAME=NUMBER, ... (got {text!r})") from None


@dataclass
class _SimTask:
    name: str
    id: TaskID
    next_line_s: float


class RunDisplay:
    """Shows the progress of simulations within a `with` block: bars on a terminal, otherwise lines on standard error,
    when a run begins and every ten seconds.
    """

    def __init__(self, console: Console, request_count: int | None) -> None:
        """`request_count`: number of requests of each run; None: it varies."""
        self._console = console
        self._request_count = request_count
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn(
                "{task.completed:.0f} requests"
                if request_count is None
                else "{task.completed:.0f}/{task.total:.0f} requests"
            ),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, _SimTask] = {}  # policy -> its current run's bar

    def __enter__(self) -> "RunDisplay":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, policy: str, ended_count: int, at_s: float) -> None:
        key = policy.partition(",")[0]
        task = self._tasks.get(key)
        if task is None or task.name != policy:
            if task is not None:
                self._bar.remove_task(task.id)
            id_ = self._bar.add_task(policy, total=self._request_count)
            task = self._tasks[key] = _SimTask(policy, id_, time.monotonic() + _LINE_INTERVAL_S)
            self._print(f"simulating {policy} ...")
        elif time.monotonic() >= task.next_line_s:
            task.next_line_s = time.monotonic() + _LINE_INTERVAL_S
            count = f"{ended_count}" if self._request_count is None else f"{ended_count}/{self._request_count}"
            self._print(f"simulating {policy}: {count} requests at {at_s:.0f} s")
        self._bar.update(task.id, completed=ended_count, description=f"{policy} at {at_s:.0f} s")

    def _print(self, line: str) -> None:
        if not self._console.is_terminal:
            print(line, file=sys.stderr, flush=True)
