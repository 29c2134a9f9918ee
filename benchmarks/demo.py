"""`make demo`: a burst overflows the KV cache of two workers, once with recomputation and once with parameter dropping.

1. Makes a small random checkpoint (preset `ballast`) with a real tokenizer.
2. Starts a cluster of separate processes, measures the throughput without dropping, and derives the scale factors from
   it (see benchmarks/demo_sizing.py). They are printed and stored in the results.
3. Replays the trace open-loop twice, each time on a fresh cluster: overload policy `recompute` (requests queue, and are
   preempted and recomputed), then `drop`. Prints both side by side and writes results.json and figure.png.
4. Compares the answers of both runs, and recomputes some of `drop` with `transformers` in a separate process; any
   differing token fails the demo.
"""

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ballast.common.errors import BallastError, Unavailable
from ballast.common.units import human_bytes
from benchmarks import demo_sizing as sizing
from benchmarks.demo_report import compare, differing_answers, markdown
from tools.bench.plot import plot_result
from tools.bench.probe import PROBE_S, probe
from tools.bench.progress import open_console
from tools.bench.records import RequestOutcome
from tools.bench.replay import ReplayOptions
from tools.bench.results import BenchResult, PolicyResult, write_result
from tools.bench.session import ReplayJob, replay_on
from tools.bench.sizing import (
    SizingMemory,
    SizingPace,
    forecast,
    length_scale_to,
    mean_request,
    size_memory_for,
    two_digits,
)
from tools.bench.traces import Trace, read_trace
from tools.local.cluster import LocalCluster
from tools.model.info import CheckpointInfo, read_info
from tools.model.tiny import make_preset

SHIPPED_TRACE = Path(__file__).parent / "traces" / "answers.csv"
PRESET = "ballast"
DEADLINE_S = 120.0  # per request
VERIFIED_ANSWERS = 40
MIN_VERIFIED_ANSWERS = 20
VERIFY_TIMEOUT_S = 120.0
POLICIES = ("recompute", "drop")
MAX_NUM_SEQS = 64
EXIT_FAILED, EXIT_CONFIGURATION, EXIT_INTERRUPTED = 1, 2, 130


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """The parts of the plan that both runs share: model, memory and scaled trace."""

    model: Path
    memory: SizingMemory
    trace: Trace  # the scaled trace
    time_scale: float
    length_scale: float


def start_cluster(args: argparse.Namespace, model: Path, memory: SizingMemory, policy: str, name: str) -> LocalCluster:
    return LocalCluster(
        model,
        workers=args.workers,
        device_memory_bytes=memory.device_memory_bytes,
        flags={
            "planner": ["--overload-policy", policy],
            "worker": ["--max-num-seqs", str(MAX_NUM_SEQS)],
        },
        environ={"OMP_NUM_THREADS": "1"},
        log_dir=args.out / "logs" / name,
    )


async def make_plan(args: argparse.Namespace, model: Path, console: Console) -> DemoPlan:
    """Size the memory, probe the machine and scale the trace; print the results."""
    info = read_info(model)
    whole = read_trace(args.trace).scaled(limit=args.limit)
    length_scale = length_scale_to(whole, sizing.MEAN_TOKENS) if args.length_scale is None else args.length_scale
    trace = whole.scaled(length_scale=length_scale, max_total_tokens=info.max_model_len)
    memory = _size_memory(args, info, trace)
    time_scale = args.time_scale
    concurrency = sizing.SEQUENCES_EACH * args.workers
    input_tokens, output_tokens = mean_request(trace.requests)
    console.print(f"probing the machine with {concurrency} requests of {input_tokens} + {output_tokens} tokens ...")
    async with start_cluster(args, model, memory, "recompute", "probe") as cluster:
        pace = await probe(
            cluster.address,
            concurrency=concurrency,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            probe_s=args.probe_s,
        )
    console.print(f"{pace.output_tokens_per_s:,.0f} output tokens/s with un-dropped memory full")
    if time_scale is None:
        time_scale, shorter = sizing.scales(trace, pace, args.max_span_s or _max_span_s(args.trace))
        length_scale = two_digits(length_scale * shorter) if args.length_scale is None else length_scale
    trace = whole.scaled(time_scale=time_scale, length_scale=length_scale, max_total_tokens=info.max_model_len)
    memory = _size_memory(args, info, trace)
    _say_plan(trace, memory, info, pace, console)
    return DemoPlan(model, memory, trace, time_scale, length_scale)


def _max_span_s(trace: Path) -> float:
    return sizing.SHIPPED_SPAN_S if trace == SHIPPED_TRACE else sizing.OTHER_SPAN_S


def _size_memory(args: argparse.Namespace, info: CheckpointInfo, trace: Trace) -> SizingMemory:
    return size_memory_for(info, trace.requests, sequences_each=sizing.SEQUENCES_EACH, workers=args.workers)


def _say_plan(trace: Trace, memory: SizingMemory, info: CheckpointInfo, pace: SizingPace, console: Console) -> None:
    demand = forecast(trace.requests, pace.seconds_per_token)
    whole, dropped = memory.undropped_tokens, memory.dropped_tokens
    kv_bytes = memory.device_memory_bytes - info.parameter_bytes
    console.print(
        f"each worker: {human_bytes(info.parameter_bytes)} of parameters, {human_bytes(kv_bytes)} of KV;"
        f" all workers: KV of {whole:,} tokens, {dropped:,} with parameters dropped"
    )
    console.print(
        f"KV demand if nobody waited: {demand.mean_tokens / whole:.0%} of it on average,"
        f" {demand.peak_tokens / whole:.0%} at the peak ({demand.peak_tokens / dropped:.0%} when dropped)"
    )


async def replay(args: argparse.Namespace, plan: DemoPlan, policy: str, console: Console) -> BenchResult:
    job = ReplayJob(
        trace=args.trace,
        time_scale=plan.time_scale,
        length_scale=plan.length_scale,
        limit=args.limit,
        options=ReplayOptions(seed=args.seed, deadline_s=DEADLINE_S, record_tokens=True),
        policy=policy,
    )
    settings = {
        "workers": args.workers,
        "device_memory_bytes": plan.memory.device_memory_bytes,
        "max_num_seqs": MAX_NUM_SEQS,
    }
    async with start_cluster(args, plan.model, plan.memory, policy, policy) as cluster:
        console.print(
            f"{policy}: replaying {len(plan.trace.requests)} requests of {args.trace} over {plan.trace.span_s:.0f} s"
            f" (time x{plan.time_scale:g}, length x{plan.length_scale:g})"
        )
        planner = cluster.processes["planner"][0].address
        return await replay_on(cluster.address, job, console, settings, planner=planner)


async def verified(result: BenchResult, model: Path, results_path: Path) -> BenchResult:
    """Return `result` with counts by `benchmarks.verify_answers` added: for some answers of the last policy, and for
    all answers that differ between the first and the last policy.
    """
    first, last = next(iter(result.policies)), [*result.policies][-1]
    differing = differing_answers(result.policies[first], result.policies[last])[0]
    if differing and first != last:
        result = await verify(result, first, model, results_path, 0, differing)
    return await verify(result, last, model, results_path, VERIFIED_ANSWERS, differing)


async def verify(
    result: BenchResult, policy: str, model: Path, results_path: Path, count: int, also: Sequence[int]
) -> BenchResult:
    """Return `result` after verifying `count` answers of one policy, and those with indices in `also`."""
    command = ["-m", "benchmarks.verify_answers", "--results", str(results_path), "--model", str(model)]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        "--policy",
        policy,
        "--count",
        str(count),
        *(("--also", *map(str, also)) if also else ()),
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
    verified = result.policies[policy].model_copy(
        update={
            "verified_count": found["answers"],
            "token_mismatches": found["differing_tokens"],
            "near_ties": found["near_ties"],
        }
    )
    return result.model_copy(update={"policies": {**result.policies, policy: verified}})


def judge(result: BenchResult) -> list[str]:
    """Problems that make the demo fail; empty if it has succeeded. Only the last policy must have verified answers."""
    problems = [] if result.complete else ["interrupted"]
    for name, policy in result.policies.items():
        problems += [f"{name}: {problem}" for problem in _unserved(policy)]
    *_, last = result.policies.values()
    if (last.verified_count or 0) < min(MIN_VERIFIED_ANSWERS, last.request_count):
        problems.append(f"only {last.verified_count} answers could be verified")
    for name, policy in result.policies.items():
        if policy.token_mismatches:
            problems.append(f"{name}: {policy.token_mismatches} tokens differ from those of transformers")
    return problems


def _unserved(policy: PolicyResult) -> list[str]:
    unserved = [r for r in policy.requests if r.outcome is not RequestOutcome.FINISHED]
    if not unserved:
        return []
    return [f"{len(unserved)} requests did not finish; the first: {unserved[0].outcome}: {unserved[0].error}"]


async def demo(args: argparse.Namespace, console: Console) -> int:
    args.out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(args.out / "logs", ignore_errors=True)
    results_path, figure_path = args.out / "results.json", args.out / "figure.png"
    with tempfile.TemporaryDirectory(prefix="ballast-demo-") as scratch:
        model = make_preset(PRESET, Path(scratch) / PRESET, arch=args.arch, seed=args.seed)
        plan = await make_plan(args, model, console)
        result: BenchResult | None = None
        for policy in POLICIES:
            one = await replay(args, plan, policy, console)
            result = one if result is None else merged(result, one)
            if not result.complete:
                break
        assert result is not None, "there is a policy"
        write_result(results_path, result)
        console.print("re-computing answers with transformers ...")
        result = await verified(result, model, results_path)
    write_result(results_path, result)
    plot_result(result, figure_path)
    console.print(compare(result))
    table_path = args.out / "table.md"
    table_path.write_text(markdown(result) + "\n")
    console.print(f"wrote {results_path}, {figure_path} and {table_path}")
    problems = judge(result)
    for problem in problems:
        console.print(f"FAILED: {problem}", style="bold red")
    return EXIT_FAILED if problems else 0


def merged(result: BenchResult, other: BenchResult) -> BenchResult:
    """`result` with the policies of `other` added; complete if both are."""
    policies = {**result.policies, **other.policies}
    return result.model_copy(update={"policies": policies, "complete": result.complete and other.complete})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Let a burst overflow the KV cache, and drop parameters against it.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--trace", type=Path, default=SHIPPED_TRACE)
    parser.add_argument("--time-scale", type=float, help="default: see the head of benchmarks/demo_sizing.py")
    parser.add_argument("--length-scale", type=float, help="default: likewise")
    parser.add_argument("--max-span-s", type=float, help="default: likewise")
    parser.add_argument("--limit", type=int, help="use only the first requests of the trace")
    parser.add_argument("--probe-s", type=float, default=PROBE_S, help="duration of the speed measurement")
    parser.add_argument("--arch", default="llama")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/demo"))
    args = parser.parse_args(arguments)
    args.out = args.out.resolve()  # programs that read these paths run in another folder
    console = open_console()
    try:
        return asyncio.run(demo(args, console))
    except BallastError as error:
        console.print(f"error: {error}", style="bold red", markup=False)
        return EXIT_CONFIGURATION
    except KeyboardInterrupt:
        console.print("interrupted: nothing has been shown yet")
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
