"""`make demo`: a bursty trace on a real cluster of separate processes, measured, drawn and verified.

1. Makes a small random checkpoint (preset `demo`) with a real tokenizer.
2. Starts monitor, planner, dispatcher, workers and a private state server, each a process of its own.
3. Replays the trace open-loop, prints the table, writes results.json and figure.png.
4. Re-computes answers with `transformers` in a process of its own; any token that differs fails the demo.

Scale factors. Unless given, they follow from the trace: time is compressed so that the trace spans at most
MAX_SPAN_S, and lengths are shortened so that no PEAK_WINDOW_S of it ask for more than MAX_PEAK_TOKENS_PER_S prompt and
answer tokens per second, and that the mean request fits the model four times. Neither is ever stretched. The factors
used are printed and stand in the results.
"""

import argparse
import asyncio
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ballast.bench.plot import plot_result
from ballast.bench.progress import open_console
from ballast.bench.records import Outcome
from ballast.bench.replay import ReplayOptions
from ballast.bench.results import BenchResult, write_result
from ballast.bench.session import ReplayJob, replay_on
from ballast.bench.table import render
from ballast.bench.traces import Trace, TraceRequest, read_trace
from ballast.common.errors import BallastError, Unavailable
from ballast.local.cluster import LocalCluster
from ballast.model.tiny import PRESETS, make_preset

SHIPPED_TRACE = Path(__file__).parent / "traces" / "bursty.csv"
MAX_SPAN_S = 100.0
PEAK_WINDOW_S = 10.0
MAX_PEAK_TOKENS_PER_S = 4500.0  # about what two workers on two busy cores can do
DEVICE_MEMORY_BYTES = 12 << 20  # of each worker: the burst fills a good part of the KV that this leaves
DEADLINE_S = 120.0  # of each request
VERIFIED_ANSWERS = 24
MIN_VERIFIED_ANSWERS = 20
VERIFY_TIMEOUT_S = 120.0
POLICY = "recompute"
EXIT_FAILED, EXIT_CONFIGURATION = 1, 2


def default_scales(trace: Trace, max_model_len: int) -> tuple[float, float]:
    """(time scale, length scale) as the head of this file says, rounded down to two digits that matter."""
    time_scale = _two_digits(min(1.0, MAX_SPAN_S / trace.span_s)) if trace.span_s > 0 else 1.0
    requests = trace.scaled(time_scale=time_scale).requests
    mean_tokens = sum(r.input_tokens + r.output_tokens for r in requests) / len(requests)
    peak_tokens_per_s = _peak_tokens(requests) / PEAK_WINDOW_S
    length_scale = min(1.0, MAX_PEAK_TOKENS_PER_S / peak_tokens_per_s, max_model_len / 4 / mean_tokens)
    return time_scale, _two_digits(length_scale)


def _peak_tokens(requests: Sequence[TraceRequest]) -> int:
    """The most prompt and answer tokens of requests that arrive within PEAK_WINDOW_S."""
    peak, tokens, first = 0, 0, 0
    for request in requests:
        tokens += request.input_tokens + request.output_tokens
        while requests[first].arrival_s <= request.arrival_s - PEAK_WINDOW_S:
            tokens -= requests[first].input_tokens + requests[first].output_tokens
            first += 1
        peak = max(peak, tokens)
    return peak


def _two_digits(scale: float) -> float:
    """0.1567 -> 0.15."""
    digits = 1 - math.floor(math.log10(scale))
    return math.floor(scale * 10**digits) / 10**digits


async def replay(args: argparse.Namespace, model: Path, console: Console) -> BenchResult:
    trace = read_trace(args.trace).scaled(limit=args.limit)
    time_scale, length_scale = default_scales(trace, PRESETS["demo"].max_len)
    job = ReplayJob(
        trace=args.trace,
        time_scale=time_scale if args.time_scale is None else args.time_scale,
        length_scale=length_scale if args.length_scale is None else args.length_scale,
        limit=args.limit,
        options=ReplayOptions(seed=args.seed, deadline_s=DEADLINE_S, record_tokens=True),
        policy=POLICY,
    )
    console.print(f"starting {args.workers} workers, a dispatcher, a monitor, a planner and a state server ...")
    cluster = LocalCluster(
        model,
        workers=args.workers,
        device_memory_bytes=DEVICE_MEMORY_BYTES,
        environ={"OMP_NUM_THREADS": "1"},
        log_dir=args.out / "logs",
    )
    async with cluster:
        console.print(
            f"serving at {cluster.address}; replaying {len(trace.requests)} requests of {args.trace}"
            f" over {trace.span_s * job.time_scale:.0f} s (time x{job.time_scale:g}, length x{job.length_scale:g})"
        )
        settings = {"workers": args.workers, "device_memory_bytes": DEVICE_MEMORY_BYTES}
        planner = cluster.processes["planner"][0].address
        return await replay_on(cluster.address, job, console, settings, planner=planner)


async def verify(result: BenchResult, model: Path, results_path: Path) -> BenchResult:
    """The result with what `benchmarks.verify_answers` found out about its answers."""
    command = ["-m", "benchmarks.verify_answers", "--results", str(results_path), "--model", str(model)]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        "--count",
        str(VERIFIED_ANSWERS),
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[1],
    )
    try:
        async with asyncio.timeout(VERIFY_TIMEOUT_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode not in (0, EXIT_FAILED):
        raise Unavailable("benchmarks.verify_answers", f"ended with status {process.returncode}")
    found = json.loads(output)
    verified = result.policies[POLICY].model_copy(
        update={
            "verified_count": found["answers"],
            "token_mismatches": found["differing_tokens"],
            "near_ties": found["near_ties"],
        }
    )
    return result.model_copy(update={"policies": {POLICY: verified}})


def judge(result: BenchResult) -> list[str]:
    """What is wrong; empty: the demo has succeeded."""
    policy = result.policies[POLICY]
    problems: list[str] = []
    if not result.complete:
        problems.append("interrupted")
    unserved = policy.request_count - policy.outcomes[Outcome.FINISHED]
    if unserved:
        first = next(r for r in policy.requests if r.outcome is not Outcome.FINISHED)
        problems.append(f"{unserved} requests did not finish; the first: {first.outcome}: {first.error}")
    if (policy.verified_count or 0) < min(MIN_VERIFIED_ANSWERS, policy.request_count):
        problems.append(f"only {policy.verified_count} answers could be verified")
    if policy.token_mismatches:
        problems.append(f"{policy.token_mismatches} tokens differ from those of transformers")
    return problems


async def demo(args: argparse.Namespace, console: Console) -> int:
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ballast-demo-") as scratch:
        model = make_preset("demo", Path(scratch) / "demo", arch=args.arch, seed=args.seed)
        shutil.rmtree(args.out / "logs", ignore_errors=True)
        result = await replay(args, model, console)
        results_path, figure_path = args.out / "results.json", args.out / "figure.png"
        write_result(results_path, result)
        console.print("re-computing answers with transformers ...")
        result = await verify(result, model, results_path)
    write_result(results_path, result)
    plot_result(result, figure_path)
    console.print(render(result))
    console.print(f"wrote {results_path} and {figure_path}")
    policy = result.policies[POLICY]
    console.print(f"{policy.verified_count} answers re-computed: {policy.token_mismatches} differing tokens")
    problems = judge(result)
    for problem in problems:
        console.print(f"FAILED: {problem}", style="bold red")
    return EXIT_FAILED if problems else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Replay a bursty trace on a local cluster and verify the answers.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--trace", type=Path, default=SHIPPED_TRACE)
    parser.add_argument("--time-scale", type=float, help="default: see the head of benchmarks/demo.py")
    parser.add_argument("--length-scale", type=float, help="default: likewise")
    parser.add_argument("--limit", type=int, help="only the first requests of the trace")
    parser.add_argument("--arch", default="llama")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/demo"))
    args = parser.parse_args(arguments)
    console = open_console()
    try:
        return asyncio.run(demo(args, console))
    except BallastError as error:
        console.print(f"error: {error}", style="bold red", markup=False)
        return EXIT_CONFIGURATION


if __name__ == "__main__":
    sys.exit(main())
