"""`ballast chaos`: breaks a cluster on this machine on purpose, under load, and says what came of it."""

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from pathlib import Path

from ballast.cli.arguments import Commands
from ballast.common.errors import ConfigError
from ballast.local.chaos import Chaos, ChaosReport, ChaosRules
from ballast.local.cluster import LocalCluster
from ballast.model.tiny import make_tiny


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "chaos",
        help="break a cluster on this machine on purpose, under load, and check that nothing is lost",
        description="Starts a cluster of its own, kills and stops its processes and the state server, several at a"
        " time, while pipelines form and dissolve, and compares every token of every answer. Exit status 1: something"
        " was lost, was wrong, or did not recover.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("--for", dest="seconds", metavar="TIME", type=_seconds, default=60.0, help="60s, 10m, 1h")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="another order of other faults")
    parser.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint; default: a tiny random one")
    parser.add_argument("--device-memory-bytes", metavar="BYTES", help="of each worker; 16MiB, 8GiB ...")
    for service, count in (("workers", 3), ("dispatchers", 2), ("monitors", 2), ("planners", 2)):
        parser.add_argument(f"--{service}", type=int, default=count, metavar="N", help=f"default: {count}")
    parser.add_argument("--fault-every-s", type=float, default=5.0, metavar="S", help="on average")
    parser.add_argument("--at-once", type=int, default=2, metavar="N", help="faults that last at a time, at most")
    parser.add_argument("--faults", nargs="+", default=[], metavar="NAME", help="only these; see the lines printed")
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="keep the services' logs there")


def _seconds(text: str) -> float:
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    number, unit = (text[:-1], units[text[-1]]) if text and text[-1] in units else (text, 1.0)
    try:
        seconds = float(number) * unit
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no time: 60s, 10m, 1h")
    return seconds


def run(args: argparse.Namespace) -> int:
    if args.workers < 2:
        raise ConfigError("--workers", f"at least 2 are needed, to make pipelines of; got {args.workers}")
    with contextlib.ExitStack() as resources:
        folder = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="ballast-chaos-")))
        model = args.model or make_tiny("llama", folder / "tiny", max_len=512)
        memory = args.device_memory_bytes or (None if args.model else "16MiB")
        report = asyncio.run(_run(args, model, memory))
    _print(report)
    return 1 if report.why_not() else 0


async def _run(args: argparse.Namespace, model: Path, memory: str | None) -> ChaosReport:
    began_s = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began_s:7.1f} s  {text}", file=sys.stderr, flush=True)

    worker_flags = ["--dtype", "float64"] if args.model is None else []
    if memory is not None:
        worker_flags += ["--device-memory-bytes", memory]
    cluster = LocalCluster(
        model,
        workers=args.workers,
        dispatchers=args.dispatchers,
        monitors=args.monitors,
        planners=args.planners,
        flags={"worker": worker_flags, "dispatcher": ["--shutdown-timeout-s", "2"]},
        log_dir=args.log_dir,
        stop_timeout_s=5.0,
    )
    rules = ChaosRules(
        seconds=args.seconds,
        seed=args.seed,
        fault_every_s=args.fault_every_s,
        at_once=args.at_once,
        faults=tuple(args.faults),
    )
    say(f"starting {args.workers} workers, {args.dispatchers} dispatchers ...")
    async with cluster:
        chaos = Chaos(cluster, rules, say)
        known = [fault.name for fault in chaos.faults()]
        if not known:
            raise ConfigError("--faults", "none of these is known")
        report = await chaos.run()
        if report.why_not():
            cluster.keep_logs = True
            say(f"the logs are kept in {cluster.log_dir}")
        for processes in cluster.processes.values():
            for process in processes:
                process.may_end = True
    return report


def _print(report: ChaosReport) -> None:
    if report.recoveries:
        print(f"{'fault':<28} {'times':>5}  {'whole again after':>17}")
        print(f"{'':<28} {'':>5}  {'p50':>8} {'p99':>8}")
    for name, recovery in sorted(report.recoveries.items()):
        p50, p99 = recovery.percentile(0.5), recovery.percentile(0.99)
        print(f"{name:<28} {recovery.count:>5}  {p50:>6.1f} s {p99:>6.1f} s")
    cut_off = f", {report.cut_off_count} cut off with their dispatcher" if report.cut_off_count else ""
    print(
        f"{report.request_count} requests, {report.lost_count} lost{cut_off}, {report.differing_count} answers of"
        f" {report.token_count:,} tokens differ; the slowest took {report.slowest_s:.1f} s"
    )
    why = report.why_not()
    print(f"FAILED: {why}" if why else "all is well")
