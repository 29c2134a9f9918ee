"""A large cluster of emulated workers under load: does every request end rightly, and what does the control plane cost?

    python -m benchmarks.many_workers --workers 64 --dispatchers 4 --rate 200 --minutes 5

Workers take the time of GPUs of the catalogue. Requests come at one rate all the time; in two bursts their prompts are
so much longer that the KV caches overflow: drops, and restores when the burst is over. Memory is sized for that with
`--kv-tokens`. Every token of every answer is compared with the right one (`services.worker.emulation.tokens`).

It tells the processor time of each service, per second and per request, and what requests waited for. `--simulate` runs
the same arrivals in `sim`, where the control plane costs next to nothing: the difference is what it adds here.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ballast.bench.records import PlannerTransition
from ballast.bench.transitions import transitions_or_why
from ballast.client import AsyncClient, SamplingParams
from ballast.common.errors import BallastError
from ballast.local.cluster import LocalCluster
from services.worker.emulation.tokens import answer
from sim.clients import Arrival
from sim.hardware import find_cluster, find_model, timings
from sim.jobs.machines import EmulatedModel, catalogue_machine, stand_in
from sim.jobs.simulation import WorkerSize, production_rules
from sim.world import World, WorldOptions

VOCABULARY = 4096
_BURSTS = ((0.25, 0.35), (0.6, 0.7))  # shares of the time
_DEADLINE_S = 120.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_TELL_S = 10.0


@dataclass(slots=True)
class Seen:
    """What was seen of one request."""

    arrival: Arrival
    first_s: float | None = None  # after its arrival
    last_s: float | None = None
    tokens: int = 0
    ending: str = "open"


@dataclass(slots=True)
class Usage:
    """Processor seconds and memory of one kind of process, over the time under load."""

    processes: int = 0
    cpu_s: float = 0.0
    most_cpu_s: float = 0.0  # of one of them
    pss_mib: list[float] = field(default_factory=list[float])


def draw_arrivals(args: argparse.Namespace) -> list[Arrival]:
    """Poisson arrivals; lengths are exponential, within bounds."""
    draw, span_s, at_s = random.Random(args.seed), args.minutes * 60.0, 0.0
    arrivals: list[Arrival] = []
    while (at_s := at_s + draw.expovariate(args.rate)) < span_s:
        bursts = any(first <= at_s / span_s < last for first, last in _BURSTS)
        mean = args.burst_prompt_tokens if bursts else args.prompt_tokens
        prompt = min(max(int(draw.expovariate(1 / mean)), 8), args.kv_tokens // 2)
        arrivals.append(Arrival(at_s, prompt, draw.randrange(args.output_tokens // 2, args.output_tokens * 3 // 2)))
    return arrivals


def prompt_of(number: int, arrival: Arrival) -> list[int]:
    return np.random.default_rng(number).integers(0, VOCABULARY, arrival.input_tokens).tolist()


async def ask(client: AsyncClient, number: int, seen: Seen, *, streamed: bool) -> None:
    """Not streamed: times are as the dispatcher saw them, and do not count its answer's way here."""
    arrival, began_s = seen.arrival, time.perf_counter()
    prompt, tokens = prompt_of(number, arrival), list[int]()
    sampling = SamplingParams(max_tokens=arrival.output_tokens, temperature=0.0, ignore_eos=True)
    try:
        if streamed:
            async for chunk in client.stream(
                token_ids=prompt, sampling=sampling, include_text=False, deadline_s=_DEADLINE_S
            ):
                now_s = time.perf_counter() - began_s
                tokens += chunk.token_ids
                seen.first_s, seen.last_s = seen.first_s or now_s, now_s
        else:
            answered = await client.generate(
                token_ids=prompt, sampling=sampling, include_text=False, deadline_s=_DEADLINE_S
            )
            tokens += answered.token_ids
            seen.first_s, seen.last_s = answered.usage.ttft_s, answered.usage.e2e_s
        seen.ending = "right" if tokens == answer(prompt, arrival.output_tokens, VOCABULARY) else "WRONG TOKENS"
    except BallastError as error:
        seen.ending = type(error).__name__
    seen.tokens = len(tokens)


async def load(address: str, arrivals: Sequence[Arrival], streamed_share: float) -> tuple[list[Seen], float]:
    """Open loop. Returns how late the latest request was sent, too: then this process was what limits."""
    seen, latest_s = [Seen(arrival) for arrival in arrivals], 0.0
    async with AsyncClient(address) as client, asyncio.TaskGroup() as tasks:
        zero_s = told_s = time.perf_counter()
        for number, each in enumerate(seen):
            now_s = time.perf_counter()
            if (wait_s := zero_s + each.arrival.at_s - now_s) > 0:
                await asyncio.sleep(wait_s)
            latest_s = max(latest_s, -wait_s)
            streamed = int((number + 1) * streamed_share) > int(number * streamed_share)
            tasks.create_task(ask(client, number, each, streamed=streamed))
            if now_s - told_s > _TELL_S:
                told_s = now_s
                endings = Counter(one.ending for one in seen[:number])
                print(f"{now_s - zero_s:6.0f} s  {number} sent, {dict(endings)}", file=sys.stderr, flush=True)
    return seen, latest_s


# ------------------------------------------------------------ processes


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def pss_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def children(parent: int) -> list[int]:
    task = Path(f"/proc/{parent}/task/{parent}/children")
    return [int(pid) for pid in task.read_text(encoding="utf-8").split()]


def pids_of(cluster: LocalCluster) -> dict[str, list[int]]:
    found = {
        service: list(dict.fromkeys(process.pid for process in processes))
        for service, processes in cluster.processes.items()
    }
    known = {pid for pids in found.values() for pid in pids}
    return {**found, "state server": [pid for pid in children(os.getpid()) if pid not in known], "load": [os.getpid()]}


def usage(pids: dict[str, list[int]], before: dict[int, float]) -> dict[str, Usage]:
    used: dict[str, Usage] = {}
    for kind, processes in pids.items():
        spent = [processor_s(pid) - before[pid] for pid in processes]
        sizes = [pss_mib(pid) for pid in processes[:4]]
        used[kind] = Usage(len(processes), sum(spent), max(spent, default=0.0), sizes)
    return used


# ------------------------------------------------------------ the run


@dataclass(slots=True)
class Run:
    seen: list[Seen]
    latest_s: float
    wall_s: float
    used: dict[str, Usage]
    transitions: list[PlannerTransition]
    start_s: float


async def run(args: argparse.Namespace, model: EmulatedModel, budget: int, arrivals: Sequence[Arrival]) -> Run:
    flags = [*model.worker_flags, "--device-memory-bytes", str(budget), "--log-level", "warning"]
    begun_s = time.perf_counter()
    async with LocalCluster(
        model.model,
        workers=args.workers,
        workers_per_process=args.workers_per_process,
        dispatchers=args.dispatchers,
        flags={
            "worker": flags,
            "dispatcher": ["--log-level", "warning"],
            "monitor": ["--lease-s", str(args.lease_s)],
        },
        start_timeout_s=900.0,
        stop_timeout_s=60.0,
        log_dir=args.log_dir,
    ) as cluster:
        start_s = time.perf_counter() - begun_s
        print(f"{args.workers} workers ready after {start_s:.1f} s", file=sys.stderr, flush=True)
        pids = pids_of(cluster)
        before = {pid: processor_s(pid) for group in pids.values() for pid in group}
        begun_s = time.perf_counter()
        seen, latest_s = await load(",".join(cluster.addresses), arrivals, args.streamed_share)
        wall_s = time.perf_counter() - begun_s
        used = usage(pids, before)
        await asyncio.sleep(args.settle_s)  # what is dropped comes back
        transitions, why = await transitions_or_why(cluster.processes["planner"][0].address)
        if why:
            print(why, file=sys.stderr)
        return Run(seen, latest_s, wall_s, used, list(transitions), start_s)


def simulated(args: argparse.Namespace, budget: int, arrivals: Sequence[Arrival]) -> list[Seen]:
    """The same arrivals and rules in virtual time."""
    model = find_model(args.model)
    cluster = find_cluster(f"{args.workers * model.gpus_per_instance}x{args.gpu}")
    fraction = budget / (cluster.gpu.memory_bytes * model.gpus_per_instance)
    options = WorldOptions(
        model=model,
        cluster=cluster,
        timings=timings().model_copy(update={"memory_fraction": fraction}),
        rules=production_rules(WorkerSize()),
        dispatcher_count=args.dispatchers,
        seed=args.seed,
        deadline_s=_DEADLINE_S,
    )
    records = World(options, arrivals).run().records
    return [
        Seen(
            arrival, r.token_times_s[0] - r.arrival_s, r.token_times_s[-1] - r.arrival_s, len(r.token_times_s), "right"
        )
        for arrival, r in zip(arrivals, records, strict=True)
        if r.token_times_s
    ]


# ------------------------------------------------------------ what is told


def figures(seen: Sequence[Seen]) -> dict[str, tuple[float, float, float]]:
    """Mean, p50 and p99, in milliseconds."""
    first = [one.first_s for one in seen if one.first_s is not None]
    per_token = [
        (one.last_s - one.first_s) / (one.tokens - 1)
        for one in seen
        if one.first_s is not None and one.last_s is not None and one.tokens > 1
    ]
    return {name: _three(values) for name, values in (("TTFT", first), ("TPOT", per_token)) if values}


def _three(values: Sequence[float]) -> tuple[float, float, float]:
    scaled = 1e3 * np.array(values)
    return float(scaled.mean()), float(np.percentile(scaled, 50)), float(np.percentile(scaled, 99))


def report(args: argparse.Namespace, done: Run, compared: Sequence[Seen]) -> None:
    endings = Counter(one.ending for one in done.seen)
    tokens = sum(one.tokens for one in done.seen)
    load_1 = os.getloadavg()[0]
    print(
        f"{args.workers} workers ({args.gpu}, {args.model}), {args.dispatchers} dispatchers, {args.rate:g} requests/s,"
        f" {args.streamed_share:.0%} streamed; {args.workers_per_process} workers in a process"
    )
    print(
        f"{len(done.seen)} requests in {done.wall_s:.0f} s, {tokens / done.wall_s:.0f} tokens/s;"
        f" endings: {dict(endings)}"
    )
    print(f"load average {load_1:.1f} on {os.cpu_count()} cores; sent at most {done.latest_s:.2f} s late")
    kinds = Counter(f"{one.kind} {one.phase}" for one in done.transitions)
    print(f"transitions: {dict(kinds)} (the latest that the planner remembers); start {done.start_s:.1f} s")
    print(f"{'':14}{'processes':>10}{'cores':>8}{'most':>7}{'ms/request':>12}{'PSS MiB':>9}")
    for kind, used in done.used.items():
        size = sum(used.pss_mib) / max(1, len(used.pss_mib))
        cores, most = used.cpu_s / done.wall_s, used.most_cpu_s / done.wall_s
        per_request = 1e3 * used.cpu_s / len(done.seen)
        print(f"{kind:14}{used.processes:>10}{cores:>8.3f}{most:>7.3f}{per_request:>12.2f}{size:>9.0f}")
    print(f"{'ms':14}{'mean':>10}{'p50':>10}{'p99':>10}")
    here, there = figures(done.seen), figures(compared) if compared else {}
    for name, values in here.items():
        print(f"{name:14}" + "".join(f"{value:>10.1f}" for value in values))
        if name in there:
            print(f"{'  simulated':14}" + "".join(f"{value:>10.1f}" for value in there[name]))
            added = [a - b for a, b in zip(values, there[name], strict=True)]
            print(f"{'  added':14}" + "".join(f"{value:>10.1f}" for value in added))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--workers-per-process", type=int, default=16, help="each with its own server and name")
    parser.add_argument("--dispatchers", type=int, default=4)
    parser.add_argument("--rate", type=float, default=200.0, help="requests per second")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--streamed-share", type=float, default=0.25, help="of the requests; others answer at once")
    parser.add_argument("--gpu", default="A800")
    parser.add_argument("--model", default="Qwen2.5-14B")
    parser.add_argument("--prompt-tokens", type=int, default=150, help="mean")
    parser.add_argument("--burst-prompt-tokens", type=int, default=2000, help="mean, in bursts")
    parser.add_argument("--output-tokens", type=int, default=16, help="mean")
    parser.add_argument("--kv-tokens", type=int, default=8700, help="that the KV cache of a worker holds")
    # A worker that gets no processor time for seconds is not lost, and looks as if it were.
    parser.add_argument("--lease-s", type=float, default=10.0, help="an instance that is silent for longer is lost")
    parser.add_argument("--settle-s", type=float, default=15.0, help="time for restores at the end")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--simulate", action="store_true", help="compare with the simulator")
    parser.add_argument("--log-dir", type=Path)
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep endings and latencies")
    args = parser.parse_args()
    machine = catalogue_machine(args.gpu, args.model, VOCABULARY)
    outline = machine.model
    kv_bytes = args.kv_tokens * outline.kv_elements_per_token_layer * 2 * outline.layer_count
    extents = (outline.layer_count + 1) * (outline.layer_parameter_bytes // 16)  # lost in rounding
    budget = outline.layer_count * outline.layer_parameter_bytes + outline.other_parameter_bytes + kv_bytes + extents
    arrivals = draw_arrivals(args)
    with tempfile.TemporaryDirectory(prefix="ballast-many-") as folder:
        done = asyncio.run(run(args, stand_in(Path(folder) / "model", machine), budget, arrivals))
    compared = simulated(args, budget, arrivals) if args.simulate else []
    report(args, done, compared)
    if args.json is not None:
        kept = [[one.arrival.at_s, one.first_s, one.last_s, one.tokens, one.ending] for one in done.seen]
        args.json.write_text(json.dumps(kept), encoding="utf-8")
    return 0 if all(one.ending == "right" for one in done.seen) else 1


if __name__ == "__main__":
    sys.exit(main())
