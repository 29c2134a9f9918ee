"""ConServe's figures on its hardware, simulated: offline work beside online requests, and its effect on these.

    python -m benchmarks.offline 5|6|7|8|curve [--seconds 150] [--out FOLDER]
    python -m benchmarks.offline regret --traces DIR [--cells 'chat*,code*']

5: a trace (`--trace FILE`); 6: on for 180 s and off for 180 s; 7: rates and burstiness; 8: offline requests as long as
online ones, rule by rule; curve: offline throughput (harvest) against P99 TTFT for several bounds; regret: cells of
`benchmarks.regret` with and without offline work, with the policy drop. One A100-40G with Llama-2-7B; online requests
of 1,024 and 128 tokens, endless offline requests with the lengths of summarisation. Throughput counts prompts and
answers.

Rivals: online work only; priorities in one batch, as in other engines (a running request never yields to a waiting
one); preemption at step boundaries without a bound on steps.
"""

import argparse
import itertools
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ballast.common.sampling import PriorityClass
from benchmarks.regret_cells import CELLS, figures_of, job_of
from sim.clients import Arrival
from sim.hardware import find_cluster, find_model, timings
from sim.jobs.simulation import WorkerSize, production_rules, specs_of, world_of
from sim.offline import OfflineLoad
from sim.policies import find_policy
from sim.results import SimRun
from sim.world import World, WorldOptions
from tools.bench.traces import read_trace

MODEL, CLUSTER = "Llama-2-7B", "1xA100-40G"
ONLINE = (1024, 128)
WARM_S = 10.0
HOST_BYTES = 64 << 30  # host memory for KV of preempted requests
_NO_BOUND = 1e9
_LONGEST_TOKENS = 4000
_QUICK = "chat-13b-40g-x1.1,code-14b-40g-x1,calm-14b-40g-x1"


@dataclass(frozen=True, slots=True)
class OfflineMode:
    name: str
    slowdown: float = 0.25
    target_s: float | None = None
    target_share: float | None = None  # target of P99 TPOT, relative to that of online work only
    offline: bool = True
    by_class: bool = False  # priorities only
    mirrors: bool = True  # KV of preempted requests is kept on the host
    ttft_target_s: float | None = None  # target for which offline-only steps are split into slices of layers

    @property
    def is_ours(self) -> bool:
        return self.offline and not self.by_class and self.slowdown < _NO_BOUND


ALONE = OfflineMode("online alone", offline=False)
PRIORITIES = OfflineMode("priorities", by_class=True)
BOUNDARIES = OfflineMode("step boundaries", slowdown=_NO_BOUND, mirrors=False)
OURS = OfflineMode("ours, +25 %")
NO_MIRRORS = OfflineMode("ours, no mirrors", mirrors=False)
BELOW_ALONE = OfflineMode("ours, 0.87 of alone's", target_share=0.87)
MODES = (ALONE, PRIORITIES, BOUNDARIES, OURS, NO_MIRRORS, BELOW_ALONE, OfflineMode("ours, 50 ms", target_s=0.05))
# Rule by rule, as in the paper's figure 8.
PARTS = (
    ALONE,
    PRIORITIES,
    BOUNDARIES,
    *(
        replace(mode, name=f"{what}{mode.name}", target_s=target_s)
        for what, target_s in (("+25 %: ", None), ("50 ms: ", 0.05))
        for mode in (
            OfflineMode("bound", mirrors=False),
            OfflineMode("+ mirrors"),
            OfflineMode("+ within steps", ttft_target_s=0.08),
        )
    ),
)
CURVE = (
    ALONE,
    PRIORITIES,
    BOUNDARIES,
    *(OfflineMode(f"ours, +{slowdown:.0%}", slowdown) for slowdown in (0.0, 0.1, 0.25, 0.5, 1.0)),
    *(OfflineMode(f"ours, {ms} ms", target_s=ms / 1e3) for ms in (30, 50, 70, 110)),
)
# ConServe (arXiv 2410.01228): P99 TTFT in ms and harvest in tok/s, as far as its figures show them.
PAPER = {
    "6": "P99 TTFT 446 ms against 1,346 of priorities; 5,868 tok/s with nothing online",
    "7": "P99 TTFT within 25 % of online alone; 86 % of what priorities harvest",
    "8": "harvest 4 to 12 % more than priorities with swapping; priorities 4,980 ms P99 TTFT",
}


@dataclass(frozen=True, slots=True)
class OfflineLoadCase:
    name: str
    arrivals: list[Arrival]
    seconds: float
    lengths: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class OfflineOutcome:
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    online_per_s: float  # tokens
    harvest_per_s: float  # tokens
    lost_share: float  # fraction of the harvested tokens that were computed twice
    yield_count: int
    took_s: float


def gamma(rate: float, cv: float, seconds: float, seed: int) -> list[Arrival]:
    rng, shape, at_s = random.Random(seed), 1.0 / cv**2, 0.0
    found: list[Arrival] = []
    while (at_s := at_s + rng.gammavariate(shape, 1.0 / shape) / rate) < seconds:
        found.append(Arrival(at_s, *ONLINE))
    return found


def on_off(rate: float, phase_s: float, seconds: float, seed: int) -> list[Arrival]:
    return [one for one in gamma(rate, 1.0, seconds, seed) if int(one.at_s / phase_s) % 2 == 0]


def summaries(seed: int, count: int = 4096) -> list[tuple[int, int]]:
    """Log-normal lengths with the means of article summaries (2,588 and 291 tokens); the spread is assumed."""
    rng = random.Random(seed)
    rows = ((int(rng.lognormvariate(7.72, 0.5)), int(rng.lognormvariate(5.55, 0.5)) + 1) for _ in itertools.count())
    return list(itertools.islice((row for row in rows if row[0] > 16 and sum(row) < _LONGEST_TOKENS), count))


def loads_of(figure: str, args: argparse.Namespace) -> Iterator[OfflineLoadCase]:
    seconds, seed = args.seconds, args.seed
    lengths = summaries(seed)
    match figure:
        case "5":
            rows = read_trace(args.trace).requests
            rng = random.Random(seed)
            kept = [row for row in rows if rng.random() < args.keep and row.arrival_s < seconds]
            arrivals = [Arrival(r.arrival_s, min(r.input_tokens, 3400), min(r.output_tokens, 512)) for r in kept]
            yield OfflineLoadCase(f"{args.trace.stem}, {args.keep:g} of it", arrivals, seconds, lengths)
        case "6":
            seconds = max(seconds, 540.0)
            yield OfflineLoadCase("ON/OFF 180 s, 3.3/s", on_off(3.3, 180.0, seconds, seed), seconds, lengths)
        case "7":
            for rate in (1.0, 2.0, 3.0):
                yield OfflineLoadCase(f"{rate:g}/s, CV 1", gamma(rate, 1.0, seconds, seed), seconds, lengths)
            for cv in (0.5, 2.0, 4.0, 8.0):
                yield OfflineLoadCase(f"2/s, CV {cv:g}", gamma(2.0, cv, seconds, seed), seconds, lengths)
        case "8":
            yield OfflineLoadCase("2/s, CV 1, offline 1,024 / 128", gamma(2.0, 1.0, seconds, seed), seconds, [ONLINE])
        case _:
            yield OfflineLoadCase("2/s, CV 1", gamma(2.0, 1.0, seconds, seed), seconds, lengths)


def run(load: OfflineLoadCase, mode: OfflineMode, seed: int) -> OfflineOutcome:
    began_s = time.monotonic()
    size = WorkerSize(block_tokens=16, max_batch_tokens=512, tpot_target_s=mode.target_s)
    rules = find_policy("recompute")(production_rules(size))
    host_bytes = HOST_BYTES if mode.mirrors else 0
    worker = replace(
        rules.worker,
        offline_slowdown=mode.slowdown,
        swap_space_bytes=host_bytes,
        swaps_online=False,
        ttft_target_s=mode.ttft_target_s,
    )
    rules = replace(rules, worker=worker)
    offline = None
    if mode.offline:
        priority = PriorityClass.DEFAULT if mode.by_class else PriorityClass.BATCH
        offline = OfflineLoad(lengths=load.lengths, priority=priority)
    options = WorldOptions(
        model=find_model(MODEL),
        cluster=find_cluster(CLUSTER),
        timings=timings(),
        rules=rules,
        seed=seed,
        stop_after_s=load.seconds,
        offline=offline,
        classes=(PriorityClass.INTERACTIVE,),
        fast_forwards=not mode.by_class,  # their steps would reach the trace's clients
    )
    return outcome_of(World(options, load.arrivals).run(), load, time.monotonic() - began_s)


def outcome_of(found: SimRun, load: OfflineLoadCase, took_s: float) -> OfflineOutcome:
    ttfts, gaps, tokens = list[float](), list[float](), 0
    for record in found.records:
        times = record.token_times_s
        tokens += len(times) + (record.input_tokens if times else 0)
        if record.arrival_s >= WARM_S:
            ttfts.append((times[0] if times else load.seconds) - record.arrival_s)
            gaps += [after - before for before, after in itertools.pairwise(times)]
    harvest = found.offline_token_count
    return OfflineOutcome(
        quantile(ttfts, 0.5),
        quantile(ttfts, 0.99),
        quantile(gaps, 0.5),
        quantile(gaps, 0.99),
        tokens / load.seconds,
        harvest / load.seconds,
        found.offline_lost_token_count / harvest if harvest else 0.0,
        found.offline_yield_count,
        took_s,
    )


def quantile(values: Sequence[float], fraction: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))] if ordered else 0.0


def table_of(load: OfflineLoadCase, outcomes: dict[OfflineMode, OfflineOutcome]) -> Table:
    table = Table(title=f"{MODEL}, {CLUSTER}; {load.name}; {load.seconds:g} s", title_justify="left")
    for name in ("", "P99 TTFT ms", "x alone", "P50 / P99 TPOT ms", "x alone", "online tok/s", "harvest tok/s"):
        table.add_column(name, justify="left" if not name else "right")
    table.add_column("of priorities", justify="right")
    table.add_column("twice", justify="right")
    alone, rival = outcomes[ALONE], outcomes.get(PRIORITIES)
    for mode, one in outcomes.items():
        table.add_row(
            mode.name,
            f"{one.ttft_p99_s * 1e3:,.0f}",
            f"{one.ttft_p99_s / alone.ttft_p99_s:.2f}",
            f"{one.tpot_p50_s * 1e3:.0f} / {one.tpot_p99_s * 1e3:.0f}",
            f"{one.tpot_p99_s / alone.tpot_p99_s:.2f}",
            f"{one.online_per_s:,.0f}",
            f"{one.harvest_per_s:,.0f}",
            f"{one.harvest_per_s / rival.harvest_per_s:.0%}" if rival and mode.offline else "",
            f"{one.lost_share:.1%}" if mode.offline else "",
        )
    return table


def draw(figure: str, load: OfflineLoadCase, outcomes: dict[OfflineMode, OfflineOutcome], folder: Path) -> Path:
    """Draw harvest against P99 TTFT, one point per mode."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawing, axis = plt.subplots(figsize=(7, 4.5), constrained_layout=True)
    ours = [one for mode, one in outcomes.items() if mode.is_ours and mode.target_s is None]
    axis.plot([o.ttft_p99_s * 1e3 for o in ours], [o.harvest_per_s for o in ours], color="#2a7", linewidth=1, alpha=0.5)
    for mode, one in outcomes.items():
        axis.scatter(one.ttft_p99_s * 1e3, one.harvest_per_s, s=40, color="#2a7" if mode.is_ours else "#c60", zorder=3)
        spot = (one.ttft_p99_s * 1e3, one.harvest_per_s)
        place, side = ((7, -3), "left") if mode.target_s is None else ((-7, 4), "right")
        axis.annotate(mode.name, spot, textcoords="offset points", xytext=place, ha=side, fontsize=8)
    axis.set_xscale("log")
    axis.margins(x=0.25)
    axis.set_xlabel("P99 time to the first token of online requests, ms")
    axis.set_ylabel("harvest, tok/s")
    axis.set_title(f"{MODEL}, {CLUSTER}: {load.name}", fontsize=10)
    axis.grid(alpha=0.3)
    path = folder / f"offline-{figure}-{load.name.replace('/', '-').replace(' ', '-').replace(',', '')}.png"
    drawing.savefig(path, dpi=130)
    plt.close(drawing)
    return path


def beside(traces: Path, cells: str) -> Table:
    """Cells of the regret grid with endless offline work beside the requests."""
    table = Table(title="without / with offline work beside it", title_justify="left")
    for name in ("cell", "P50 TTFT s", "P99 TTFT s", "P99 TPOT s", "drops", "harvest tok/s"):
        table.add_column(name, justify="left" if name == "cell" else "right")
    for name in [name for name in CELLS if any(fnmatch(name, pattern) for pattern in cells.split(","))]:
        job = job_of(CELLS[name], traces, "drop", 0)
        [(_, rules)] = specs_of(job)
        alone = figures_of(world_of(job, rules).run())
        last_s = max(request.arrival_s for request in job.trace.requests)
        job = replace(job, offline=OfflineLoad(lengths=summaries(0), waiting_count=8, until_s=last_s))
        mirrored = replace(rules.worker, swap_space_bytes=HOST_BYTES, swaps_online=False)
        found = world_of(job, replace(rules, worker=mirrored)).run()
        both = figures_of(found)
        pairs = [f"{alone[key]:.3f} / {both[key]:.3f}" for key in ("ttft_p50_s", "ttft_p99_s", "tpot_p99_s")]
        harvest = f"{found.offline_token_count / found.duration_s:,.0f}"
        table.add_row(name, *pairs, f"{alone['drops']} / {both['drops']}", harvest)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=["5", "6", "7", "8", "curve", "regret"])
    parser.add_argument("--seconds", type=float, default=150.0, help="of virtual time for each run (default: 150)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trace", type=Path, help="for figure 5: arrival_s, input_tokens, output_tokens")
    parser.add_argument("--keep", type=float, default=0.3, help="for figure 5: share of the trace (default: 0.3)")
    parser.add_argument("--load", default="", help="only loads whose name has this in it")
    parser.add_argument("--traces", type=Path, help="for regret: the folder of its traces")
    parser.add_argument("--cells", default=_QUICK, help="for regret: names or patterns (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="folder for figures as PNG")
    args = parser.parse_args()
    if args.figure == "5" and args.trace is None:
        parser.error("figure 5 needs --trace FILE")
    console = Console(width=150)
    if args.figure == "regret":
        console.print(beside(args.traces, args.cells))
        return 0
    modes = {"curve": CURVE, "8": PARTS}.get(args.figure, MODES)
    for load in loads_of(args.figure, args):
        if args.load not in load.name:
            continue
        if not any(arrival.at_s >= WARM_S for arrival in load.arrivals):
            parser.error(f"{load.name}: nothing arrives between {WARM_S:g} s and --seconds ({load.seconds:g})")
        outcomes: dict[OfflineMode, OfflineOutcome] = {}
        for number, mode in enumerate(modes, 1):
            print(f"\r{load.name}: {mode.name}, {number} of {len(modes)} ...".ljust(70), end="", file=sys.stderr)
            if mode.target_share is not None:
                mode = replace(mode, target_s=mode.target_share * outcomes[ALONE].tpot_p99_s)
            outcomes[mode] = run(load, mode, args.seed)
        print("\r".ljust(72), end="\r", file=sys.stderr, flush=True)
        console.print(table_of(load, outcomes))
        if args.out is not None:
            args.out.mkdir(parents=True, exist_ok=True)
            console.print(f"{draw(args.figure, load, outcomes, args.out)}")
    if args.figure in PAPER:
        console.print(f"The paper: {PAPER[args.figure]}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
