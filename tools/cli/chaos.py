"""`ballast chaos`: injects faults into a cluster on this machine under load, and reports what was lost."""

import argparse
import asyncio
import contextlib
import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ballast.common.errors import ConfigError
from sim.jobs.machines import emulated_model
from tools.cli.arguments import Commands
from tools.cli.up import secured
from tools.local.chaos import Chaos, ChaosReport, ChaosRules, percentile
from tools.local.cluster import LocalCluster
from tools.local.faults import Proxies
from tools.local.ports import free_ports
from tools.local.proxy import Proxy
from tools.local.secrets import REDIS_USERS
from tools.model.tiny import make_tiny

_FRONT = "127.0.0.2"
_STEP_TIMEOUT = ["--step-timeout-s", "3"]  # this short because steps of this load take milliseconds


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "chaos",
        help="inject faults into a cluster on this machine under load, and check that nothing is lost",
        description="Starts its own cluster, kills and stops its processes and the state server, several at a time,"
        " while pipelines form and dissolve, and compares every token of every answer. Exit status 1: a"
        " request was lost, a token was wrong, or the cluster did not recover.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("--for", dest="seconds", metavar="TIME", type=_seconds, default=60.0, help="60s, 10m, 1h")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed for the sequence of faults")
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="checkpoint (default: a tiny one with random weights)"
    )
    parser.add_argument("--profile", metavar="GPU", help="emulated workers, as in `ballast up --engine emulated`")
    parser.add_argument(
        "--emulate", default="Qwen2.5-14B", metavar="MODEL", help="model of the catalogue, with --profile"
    )
    parser.add_argument("--device-memory-bytes", metavar="BYTES", help="memory budget of each worker: 16MiB, 8GiB ...")
    for service, count in (("workers", 3), ("dispatchers", 2), ("monitors", 2), ("planners", 2)):
        parser.add_argument(f"--{service}", type=int, default=count, metavar="N", help=f"default: {count}")
    parser.add_argument("--fault-every-s", type=float, default=5.0, metavar="S", help="on average")
    parser.add_argument("--at-once", type=int, default=2, metavar="N", help="maximum number of simultaneous faults")
    parser.add_argument(
        "--faults",
        nargs="+",
        default=[],
        metavar="NAME",
        help="only these faults; see the printed lines for their names",
    )
    parser.add_argument("--secure", action="store_true", help="use TLS, certificates and tokens")
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="folder for the services' logs")


def _seconds(text: str) -> float:
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    number, unit = (text[:-1], units[text[-1]]) if text and text[-1] in units else (text, 1.0)
    try:
        seconds = float(number) * unit
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration such as 60s, 10m or 1h")
    return seconds


def run(args: argparse.Namespace) -> int:
    if args.workers < 2:
        raise ConfigError("--workers", f"at least 2 are needed, to make pipelines of; got {args.workers}")
    with contextlib.ExitStack() as resources:
        folder = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="ballast-chaos-")))
        model, worker_flags = _model(args, folder)
        if args.device_memory_bytes is not None:
            worker_flags += ["--device-memory-bytes", args.device_memory_bytes]
        report = asyncio.run(_run(args, model, worker_flags, folder / "keys"))
    _print(report)
    return 1 if report.why_not() else 0


def _model(args: argparse.Namespace, folder: Path) -> tuple[Path, list[str]]:
    """(folder of the model to serve, worker flags for it)."""
    if args.profile is not None:
        made = emulated_model(folder / "emulated", args.profile, args.emulate)
        return made.model, list(made.worker_flags)
    if args.model is not None:
        return args.model, []
    memory = [] if args.device_memory_bytes is not None else ["--device-memory-bytes", "16MiB"]
    return make_tiny("llama", folder / "tiny", max_len=512), ["--dtype", "float64", *memory]


async def _run(args: argparse.Namespace, model: Path, worker_flags: list[str], keys: Path) -> ChaosReport:
    began_s = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began_s:7.1f} s  {text}", file=sys.stderr, flush=True)

    opened = contextlib.AsyncExitStack()
    found: list[Proxy] = []

    async def front(address: str) -> str:
        found.append(await opened.enter_async_context(Proxy(address)))
        return found[0].address

    ports = free_ports(args.workers)
    workers = await _fronts(opened, ports)
    if workers:
        worker_flags += ["--advertise-host", _FRONT]
    cluster = LocalCluster(
        model,
        workers=args.workers,
        dispatchers=args.dispatchers,
        monitors=args.monitors,
        planners=args.planners,
        flags={
            "worker": [*worker_flags, "--dev", "step_timeout_s=3"],
            "monitor": _STEP_TIMEOUT,
            "dispatcher": ["--shutdown-timeout-s", "2"],
        },
        log_dir=args.log_dir,
        stop_timeout_s=5.0,
        secure=keys if args.secure else None,
        tokens_file=secured(keys, "127.0.0.1") if args.secure else None,
        worker_ports=ports,
        state_front=front,
    )
    rules = ChaosRules(
        seconds=args.seconds,
        seed=args.seed,
        fault_every_s=args.fault_every_s,
        at_once=args.at_once,
        faults=tuple(args.faults),
        every_kind=args.model is None and args.profile is None,  # the tiny model computes in float64
    )
    password = secrets.token_urlsafe(32)
    if args.secure:
        with (keys / REDIS_USERS).open("a") as users:  # faults of the state server need a user with all rights
            users.write(f"user chaos on >{password} ~* &* +@all\n")
    say(f"starting {args.workers} workers, {args.dispatchers} dispatchers ...")
    async with opened, cluster:
        admin_url = cluster.redis_url.replace("://", f"://chaos:{password}@") if args.secure else None
        chaos = Chaos(cluster, rules, say, Proxies(found[0], workers), admin_url)
        known = [fault.name for fault in chaos.faults()]
        if not known:
            raise ConfigError("--faults", "none of these is known")
        report = await chaos.run()
        cluster.keep_logs = bool(report.why_not())  # by default any kill preserves logs; here, failures do
        if cluster.keep_logs:
            say(f"the logs are kept in {cluster.log_dir}")
        for processes in cluster.processes.values():
            for process in processes:
                process.may_end = True
    return report


async def _fronts(opened: contextlib.AsyncExitStack, ports: Sequence[int]) -> dict[str, Proxy]:
    """Start proxies for the workers, at the same ports of another loopback address. Returns worker -> proxy, or nothing
    if this machine does not have that address.
    """
    fronts = {f"worker-{i}": Proxy(f"127.0.0.1:{port}", listen=f"{_FRONT}:{port}") for i, port in enumerate(ports)}
    async with contextlib.AsyncExitStack() as opening:
        try:
            for proxy in fronts.values():
                await opening.enter_async_context(proxy)
        except OSError:
            return {}
        opened.push_async_callback(opening.pop_all().aclose)
    return fronts


def _print(report: ChaosReport) -> None:
    if report.recoveries:
        print(f"{'fault':<38} {'times':>5}  {'a request waited':>17}  {'whole again after':>17}")
        print(f"{'':<38} {'':>5}  {'p50':>8} {'p99':>8}  {'p50':>8} {'p99':>8}")
    for name, recovery in sorted(report.recoveries.items()):
        shown = [
            percentile(times_s, share) for times_s in (recovery.waits_s, recovery.times_s) for share in (0.5, 0.99)
        ]
        waited, whole = (f"{p50:>6.1f} s {p99:>6.1f} s" for p50, p99 in (shown[:2], shown[2:]))
        print(f"{name:<38} {len(recovery.times_s):>5}  {waited}  {whole}")
    cut_off = f", {report.cut_off_count} cut off with dispatcher and state server" if report.cut_off_count else ""
    print(
        f"{report.request_count} requests, {report.lost_count} lost{cut_off}, {report.differing_count} answers of"
        f" {report.token_count:,} tokens differ; the slowest took {report.slowest_s:.1f} s"
    )
    why = report.why_not()
    print(f"FAILED: {why}" if why else "all is well")
