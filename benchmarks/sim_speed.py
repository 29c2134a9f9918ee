"""Cost of a simulation: processor time per request, batch and event, and its growth with the cluster.

    python -m benchmarks.sim_speed [--trace FILE]
    python -m benchmarks.sim_speed --instances 1000 --requests 1000000

Each instance serves Qwen2.5-14B on one A800, with policy `recompute`; the simulator has one thread. Arrivals are
Poisson with lengths like AzureConv's (`azureconv` in tools.bench.lengths) unless a trace is given; a larger cluster
gets proportionally more requests. Processor time depends on the machine and its load, so each figure is reported with
that of a fixed loop of Python statements, and the runs of a curve alternate. `--calls` counts function calls instead.
"""

import argparse
import cProfile
import gc
import random
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sim.clients import Arrival
from sim.hardware import find_cluster, find_model, timings
from sim.jobs.simulation import WorkerSize, production_rules
from sim.policies import find_policy
from sim.world import World, WorldOptions
from tools.bench.lengths import lengths_of
from tools.bench.traces import read_trace

MODEL = "Qwen2.5-14B"
SIZES = (8, 32, 125, 500, 1000)
RATE_PER_S = 2.0  # per instance: half of its capacity
CALM_PER_S = 3057 / 640 / 8  # of the Azure conversations, divided among eight instances
VIDUR = (103, 114)  # requests/s that vidur simulates, of 2,048 + 512 tokens, on one core of the original measurement


@dataclass(frozen=True, slots=True)
class Cost:
    what: str
    instances: int
    requests: int
    tokens: int
    steps: int
    events: int
    seconds: float  # processor time of the run
    loop_s: float  # processor time of the fixed loop, mean of just before and just after the run
    peak_mib: int

    @property
    def event_us(self) -> float:
        return self.seconds / self.events * 1e6


def poisson(count: int, rate_per_s: float, fixed: tuple[int, int] | None = None) -> list[Arrival]:
    """Poisson arrivals. `fixed`: (prompt, answer) tokens of every request, instead of random ones."""
    rng, lengths = random.Random(0), lengths_of("azureconv")
    arrivals: list[Arrival] = []
    at_s = 0.0
    for _ in range(count):
        at_s += rng.expovariate(rate_per_s)
        arrivals.append(Arrival(at_s, *(fixed or lengths.draw(rng))))
    return arrivals


def measured(
    what: str,
    instances: int,
    arrivals: Sequence[Arrival],
    *,
    check_every: int = 0,
    fast_forwards: bool = True,
    progress: Callable[[int, float], None] | None = None,
) -> Cost:
    options = replace(_options(instances, check_every), fast_forwards=fast_forwards)
    gc.collect()
    before_s = _loop_s()
    began_s = time.process_time()
    run = World(options, arrivals).run(progress)
    seconds = time.process_time() - began_s
    return Cost(
        what,
        instances,
        len(arrivals),
        sum(len(record.token_times_s) for record in run.records),
        run.step_count,
        run.event_count,
        seconds,
        (before_s + _loop_s()) / 2,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    )


def _every(count: int) -> Callable[[int, float], None]:
    """A callback that prints the progress of a run to stderr after every `count` ended requests."""
    next_count = count

    def tell(ended_count: int, at_s: float) -> None:
        nonlocal next_count
        if ended_count >= next_count:
            next_count += count
            peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            spent_s = time.process_time()
            print(f"{ended_count:,} ended at {at_s:.0f} s: {spent_s:.0f} s spent, {peak_mib} MiB", file=sys.stderr)

    return tell


def _options(instances: int, check_every: int = 0) -> WorldOptions:
    return WorldOptions(
        model=find_model(MODEL),
        cluster=find_cluster(f"{instances}xA800"),
        timings=timings(),
        rules=find_policy("recompute")(production_rules(WorkerSize())),
        check_every=check_every,
    )


def _loop_s() -> float:
    began_s = time.process_time()
    places: dict[int, int] = {}
    for number in range(1_000_000):
        places[number & 1023] = number
    return time.process_time() - began_s


def table(costs: Sequence[Cost]) -> str:
    lines = [
        "| run | instances | requests | tokens | steps | events | s | requests/s | steps/s | us/event | fixed loop |"
        " MiB |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {c.what} | {c.instances} | {c.requests:,} | {c.tokens:,} | {c.steps:,} | {c.events:,} | {c.seconds:.2f} |"
        f" {c.requests / c.seconds:,.0f} | {c.steps / c.seconds:,.0f} | {c.event_us:.1f} | {c.loop_s * 1e3:.0f} ms |"
        f" {c.peak_mib} |"
        for c in costs
    ]
    return "\n".join(lines)


def curve(rounds: int, each: int) -> list[Cost]:
    """The median run of each size, by cost per event. `each`: requests per instance."""
    runs: dict[int, list[Cost]] = {size: [] for size in SIZES}
    for _ in range(rounds):
        for size in SIZES:
            arrivals = poisson(size * each, size * RATE_PER_S)
            runs[size].append(measured("growth", size, arrivals))
            print(table(runs[size][-1:]).splitlines()[-1], flush=True)
    return [sorted(costs, key=lambda c: c.event_us)[len(costs) // 2] for costs in runs.values()]


def calls_per_event(size: int, each: int) -> float:
    """Function calls per event: work independent of the processor's caches."""
    world = World(_options(size), poisson(size * each, size * RATE_PER_S))
    profile = cProfile.Profile()
    run = profile.runcall(world.run)
    return sum(entry.callcount for entry in profile.getstats()) / run.event_count


def calls_per_request(count: int) -> float:
    """Python calls per simulated request, on the workload for which vidur's speed was measured."""
    world = World(_options(1), poisson(count, 1.5, (2048, 512)))
    profile = cProfile.Profile()
    profile.runcall(world.run)
    return sum(entry.callcount for entry in profile.getstats()) / count


def single_runs(trace: Path | None) -> None:
    if trace is not None:
        long_run = [Arrival(r.arrival_s, r.input_tokens, r.output_tokens) for r in read_trace(trace).requests]
    else:
        long_run = poisson(3057, 8 * CALM_PER_S)
    beginning = long_run[:300]
    likes = poisson(600, 1.5, (2048, 512))
    print(table([measured("640 s", 8, long_run), measured(f"vidur's ({VIDUR[0]}-{VIDUR[1]} requests/s)", 1, likes)]))
    unchecked, checked = measured("unchecked", 8, beginning), measured("checked", 8, beginning, check_every=1)
    one_by_one = measured("one by one", 8, beginning, fast_forwards=False)
    print(f"\nchecks after every event: {checked.seconds / unchecked.seconds:.2f} times the processor time")
    print(f"steps one by one, none taken together: {one_by_one.seconds / unchecked.seconds:.2f} times\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="trace of the 640-s run; default: Poisson at its rate")
    parser.add_argument("--rounds", type=int, default=1, help="rounds of the growth curve")
    parser.add_argument("--each", type=int, default=20, metavar="N", help="requests per instance of that curve")
    parser.add_argument("--only-growth", action="store_true", help="measure only the curve")
    parser.add_argument(
        "--calls",
        action="store_true",
        help="count function calls per event instead of measuring time, since counts are reproducible",
    )
    parser.add_argument("--instances", type=int, help="measure only one run, with this many instances")
    parser.add_argument("--requests", type=int, default=100_000, help="number of requests of that run")
    args = parser.parse_args()
    if args.instances is not None:
        arrivals = poisson(args.requests, args.instances * RATE_PER_S)
        print(table([measured("one run", args.instances, arrivals, progress=_every(len(arrivals) // 50 or 1))]))
        return
    if args.calls:
        print(f"vidur's workload: {calls_per_request(600):,.0f} calls for each request", flush=True)
        for size in SIZES[:3]:
            print(f"{size} instances: {calls_per_event(size, args.each):.2f} calls for each event", flush=True)
        return
    if not args.only_growth:
        single_runs(args.trace)
    costs = curve(args.rounds, args.each)
    print("\n" + table(costs))
    growth = costs[-1].event_us / costs[0].event_us - 1.0
    print(f"\nan event at {costs[-1].instances} instances costs {growth:+.0%} compared with {costs[0].instances}")


if __name__ == "__main__":
    main()
