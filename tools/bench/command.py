"""`ballast bench`: its flags, and the subcommand `replay`."""

import argparse
import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from ballast.common.addresses import default_address
from ballast.common.arguments import figure_file, output_file, size
from ballast.common.errors import BallastError
from tools.bench.overload_command import Emulate, add_overload_parser
from tools.bench.progress import open_console
from tools.bench.records import RequestOutcome
from tools.bench.replay import ReplayOptions
from tools.bench.results import STANDARD_OUTPUT, BenchResult, write_result
from tools.bench.session import ReplayJob, replay_on
from tools.bench.style import require_matplotlib
from tools.bench.summary import add_plot_parser
from tools.bench.table import render
from tools.bench.timeline import write_timeline
from tools.bench.traces import read_trace
from tools.local.cluster import LocalCluster

if TYPE_CHECKING:
    from argparse import _SubParsersAction  # pyright: ignore[reportPrivateUsage] -- it has no public name

_INTERRUPTED = 130  # exit status after Ctrl-C, as in shells
_FAILED = 1


def add_parser(subparsers: "_SubParsersAction[argparse.ArgumentParser]", emulate: Emulate) -> None:
    """Add `bench` and its subcommands to a parser. `emulate`: resolves `--profile GPU` and `--model NAME`."""
    parser = subparsers.add_parser("bench", help="measure a cluster under load")
    commands = parser.add_subparsers(dest="bench_command", required=True)
    replay = commands.add_parser(
        "replay",
        help="replay a trace of requests in real time",
        description="Open-loop replay: requests are sent at the times of the trace, regardless of the cluster's"
        " load. Traces are CSV files with arrival_s,input_tokens,output_tokens, or the published files"
        " of BurstGPT, Azure and Mooncake.",
    )
    replay.add_argument(
        "--trace", type=Path, required=True, metavar="FILE", help="trace with arrivals and token counts"
    )
    replay.add_argument(
        "--time-scale", type=float, default=1.0, metavar="X", help="factor on arrival times; 0.5: twice as fast"
    )
    replay.add_argument(
        "--length-scale", type=float, default=1.0, metavar="X", help="factor on input and output tokens"
    )
    replay.add_argument("--limit", type=int, metavar="N", help="only the first N requests")
    replay.add_argument("--seed", type=int, default=0, help="seed of the prompts, which are random tokens")
    replay.add_argument("--deadline-s", type=float, default=300.0, metavar="S", help="deadline of each request")
    where = replay.add_mutually_exclusive_group()
    where.add_argument(
        "--address", metavar="HOST:PORT", help="addresses of dispatchers (default: BALLAST_ADDRESS, or this machine)"
    )
    replay.add_argument(
        "--planner", metavar="HOST:PORT", help="address of a planner to call directly, not through dispatchers"
    )
    where.add_argument("--model", type=Path, metavar="DIR", help="start a cluster with this model")
    replay.add_argument("--workers", type=int, default=2, metavar="N", help="number of workers of that cluster")
    replay.add_argument("--device-memory-bytes", type=size, metavar="SIZE", help="memory budget of each of its workers")
    replay.add_argument(
        "--json", type=output_file, metavar="OUT", help="result file; -: standard output (docs/results-schema.md)"
    )
    replay.add_argument("--plot", type=figure_file, metavar="OUT.png", help="figure over time (needs matplotlib)")
    replay.add_argument(
        "--trace-out", type=output_file, metavar="FILE", help="timeline of the stages, for ui.perfetto.dev"
    )
    replay.add_argument("--record-tokens", action="store_true", help="store prompt and answer of each request")
    replay.set_defaults(run=run)
    add_overload_parser(commands, emulate)
    add_plot_parser(commands)


def run(args: argparse.Namespace) -> int:
    """Run `ballast bench replay`. Returns the exit status: 0 if all requests finished, 1 if some did not, 130 if
    interrupted (the results so far are written).
    """
    return asyncio.run(_replay(args))


async def _replay(args: argparse.Namespace) -> int:
    if args.plot is not None:
        require_matplotlib("--plot")
    job = ReplayJob(
        trace=read_trace(args.trace),
        time_scale=args.time_scale,
        length_scale=args.length_scale,
        limit=args.limit,
        options=ReplayOptions(seed=args.seed, deadline_s=args.deadline_s, record_tokens=args.record_tokens),
    )
    console = open_console(stderr=args.json == STANDARD_OUTPUT)
    if args.model is None:
        address: str = args.address or default_address()
        result = await replay_on(address, job, console, planner=args.planner)
        await _write_timeline(address, args.trace_out, console)
        return _report(result, args, console)
    settings = {"workers": args.workers, "device_memory_bytes": args.device_memory_bytes}
    async with LocalCluster(args.model, workers=args.workers, device_memory_bytes=args.device_memory_bytes) as cluster:
        planner = cluster.processes["planner"][0].address
        result = await replay_on(cluster.address, job, console, settings, planner=planner)
        await _write_timeline(cluster.address, args.trace_out, console)
    return _report(result, args, console)


async def _write_timeline(address: str, path: Path | None, console: Console) -> None:
    """Write the timeline of the workers' steps while the workers still run. A failure is only reported."""
    if path is None:
        return
    try:
        count, silent = await asyncio.to_thread(write_timeline, address.split(",")[0], path)
    except BallastError as error:
        console.print(f"no timeline: {error}", style="yellow")
        return
    console.print(f"wrote {path}: {count} steps, transfers and phases")
    if silent:
        console.print(f"without {', '.join(silent)}: no answer", style="yellow")


def _report(result: BenchResult, args: argparse.Namespace, console: Console) -> int:
    if args.json is not None:
        write_result(args.json, result)
    console.print(render(result))
    if args.plot is not None:
        from tools.bench.plot import plot_result

        plot_result(result, args.plot)
    for path in (args.json, args.plot):
        if path not in (None, STANDARD_OUTPUT):
            console.print(f"wrote {path}")
    if not result.complete:
        return _INTERRUPTED
    served = all(
        policy.outcomes[RequestOutcome.FINISHED] == policy.request_count for policy in result.policies.values()
    )
    return 0 if served else _FAILED
