"""ConServe's experiments on its hardware, simulated: how much offline work delays online requests.

    python -m benchmarks.offline 5|6|7|8|curve [--seconds 150] [--write]
    python -m benchmarks.offline regret --traces DIR [--cells 'chat*,code*'] [--write]

5: slices of traces (`--traces DIR`, `--slices`). 6: requests for 180 s, none for 180 s. 7: rates and burstiness. 8:
offline requests as long as online ones, and Ballast's rules added one by one. curve: harvest (offline tokens per
second) against P99 TTFT, for several bounds on TPOT. regret: cells of `benchmarks.regret` with policy drop, without and
with offline work. The others have one A100-40G with Llama-2-7B, online requests of 1,024 + 128 tokens, and endless
offline requests with the lengths of summarisation. tok/s counts prompts and answers. `--write` puts the table into
docs/offline.md, with the commit of the code; runs of that commit are stored in `--out`.

Rivals: online work alone; priorities in one batch, as in other engines (a running request never yields to a waiting
one); offline requests that yield at step boundaries, without a bound on the duration of steps.
"""

import argparse
import itertools
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

from ballast.common.errors import BallastError, ConfigError
from ballast.common.sampling import PriorityClass
from benchmarks.quoting import code_commit, quote_run
from benchmarks.regret_cells import CELLS, figures_of, job_of
from sim.clients import Arrival
from sim.hardware import find_cluster, find_model, timings
from sim.jobs.simulation import WorkerSize, production_rules, specs_of, world_of
from sim.offline import OfflineLoad
from sim.policies import find_policy
from sim.results import SimRun
from sim.world import World, WorldOptions
from tools.bench.traces import read_trace

PAGE = Path("docs/offline.md")
MODEL, CLUSTER = "Llama-2-7B", "1xA100-40G"
ONLINE = (1024, 128)
WARM_S = 10.0
HOST_BYTES = 64 << 30  # host memory for the KV of offline requests that yield
_NO_BOUND = 1e9
_LONGEST_TOKENS = 4000
_SLICES = "azure_conv_spike640_b,azure_code_spike640_b,azure_conv_spike1400_a,azure_code_spike1400_a"
_QUICK = "chat-13b-40g-x1.1,code-14b-40g-x1,calm-14b-40g-x1"


@dataclass(frozen=True, slots=True)
class OfflineMode:
    name: str
    slowdown: float = 0.25
    target_s: float | None = None
    target_share: float | None = None  # TPOT target as a fraction of the P99 TPOT of online work alone
    offline: bool = True
    by_class: bool = False  # offline requests are only ordered by their lower priority
    mirrors: bool = True  # offline requests that yield keep their KV in host memory
    ttft_target_s: float | None = None  # if set, steps of only offline work are cut into slices of layers

    @property
    def is_ours(self) -> bool:
        return self.offline and not self.by_class and self.slowdown < _NO_BOUND


ALONE = OfflineMode("online alone", offline=False)
PRIORITIES = OfflineMode("priorities", by_class=True)
BOUNDARIES = OfflineMode("step boundaries", slowdown=_NO_BOUND, mirrors=False)
OURS = OfflineMode("ours, +25 %")
NO_MIRRORS = OfflineMode("ours, +25 %, no mirrors", mirrors=False)
BELOW_ALONE = OfflineMode("ours, 0.87 of alone's", target_share=0.87)
MODES = (ALONE, PRIORITIES, BOUNDARIES, OURS, BELOW_ALONE)
# Rules are added one by one, as in figure 8 of the paper.
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


@dataclass(frozen=True, slots=True)
class OfflineLoadCase:
    name: str
    arrivals: list[Arrival]
    seconds: float
    lengths: list[tuple[int, int]]
    modes: tuple[OfflineMode, ...] = MODES


@dataclass(frozen=True, slots=True)
class OfflineOutcome:
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    online_per_s: float  # tokens of online requests per second
    harvest_per_s: float  # tokens of offline requests per second
    lost_share: float  # fraction of the harvested tokens that were computed twice
    yield_count: int


def gamma(rate: float, cv: float, seconds: float, seed: int) -> list[Arrival]:
    rng, shape, at_s = random.Random(seed), 1.0 / cv**2, 0.0
    found: list[Arrival] = []
    while (at_s := at_s + rng.gammavariate(shape, 1.0 / shape) / rate) < seconds:
        found.append(Arrival(at_s, *ONLINE))
    return found


def on_off(rate: float, phase_s: float, seconds: float, seed: int) -> list[Arrival]:
    return [one for one in gamma(rate, 1.0, seconds, seed) if int(one.at_s / phase_s) % 2 == 0]


def summaries(seed: int, count: int = 4096) -> list[tuple[int, int]]:
    """`count` pairs (prompt, answer) of tokens: log-normal with the means of article summaries (2,588 and 291), with an
    assumed spread.
    """
    rng = random.Random(seed)
    rows = ((int(rng.lognormvariate(7.72, 0.5)), int(rng.lognormvariate(5.55, 0.5)) + 1) for _ in itertools.count())
    return list(itertools.islice((row for row in rows if row[0] > 16 and sum(row) < _LONGEST_TOKENS), count))


def loads_of(figure: str, args: argparse.Namespace) -> Iterator[OfflineLoadCase]:
    seconds, seed = args.seconds, args.seed
    lengths = summaries(seed)
    match figure:
        case "5":
            for stem in args.slices.split(","):
                rng = random.Random(seed)
                rows = [row for row in read_trace(args.traces / f"{stem}.csv").requests if row.arrival_s < seconds]
                kept = [row for row in rows if rng.random() < args.keep]
                arrivals = [Arrival(r.arrival_s, min(r.input_tokens, 3400), min(r.output_tokens, 512)) for r in kept]
                yield OfflineLoadCase(f"{stem}, {args.keep:g} of it", arrivals, seconds, lengths)
        case "6":
            seconds = max(seconds, 540.0)
            yield OfflineLoadCase("ON/OFF 180 s, 3.3/s", on_off(3.3, 180.0, seconds, seed), seconds, lengths)
        case "7":
            for rate in (1.0, 2.0, 3.0):
                yield OfflineLoadCase(f"{rate:g}/s, CV 1", gamma(rate, 1.0, seconds, seed), seconds, lengths)
            for cv in (0.5, 2.0, 4.0, 8.0):
                modes = (*MODES, NO_MIRRORS) if cv >= 4.0 else MODES
                yield OfflineLoadCase(f"2/s, CV {cv:g}", gamma(2.0, cv, seconds, seed), seconds, lengths, modes)
        case "8":
            name = "2/s, CV 1, offline 1,024 / 128"
            yield OfflineLoadCase(name, gamma(2.0, 1.0, seconds, seed), seconds, [ONLINE], PARTS)
        case _:
            yield OfflineLoadCase("2/s, CV 1", gamma(2.0, 1.0, seconds, seed), seconds, lengths, CURVE)


def run(load: OfflineLoadCase, mode: OfflineMode, seed: int) -> OfflineOutcome:
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
    )
    return outcome_of(World(options, load.arrivals).run(), load)


def outcome_of(found: SimRun, load: OfflineLoadCase) -> OfflineOutcome:
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
    )


def quantile(values: Sequence[float], fraction: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))] if ordered else 0.0


Outcomes = dict[str, OfflineOutcome]  # by name of the mode
_HEAD = (
    "| load | | P99 TTFT ms | x alone | P50 / P99 TPOT ms | x alone | harvest tok/s | of priorities | computed twice |",
    f"|{'---|' * 9}",
)


def table_of(found: dict[str, Outcomes]) -> str:
    """Markdown table of the outcomes by load and mode."""
    rows = [*_HEAD]
    for load, outcomes in found.items():
        alone, rival = outcomes[ALONE.name], outcomes[PRIORITIES.name]
        for name, one in outcomes.items():
            cells = [
                load if one is alone else "",
                name,
                f"{one.ttft_p99_s * 1e3:,.0f}",
                f"{one.ttft_p99_s / alone.ttft_p99_s:.2f}",
                f"{one.tpot_p50_s * 1e3:.0f} / {one.tpot_p99_s * 1e3:.0f}",
                f"{one.tpot_p99_s / alone.tpot_p99_s:.2f}",
                f"{one.harvest_per_s:,.0f}",
                "" if one is alone else f"{one.harvest_per_s / rival.harvest_per_s:.0%}",
                "" if one is alone else f"{one.lost_share:.1%}",
            ]
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def against_the_paper(figure: str, found: dict[str, Outcomes]) -> str:
    """Markdown table of figures stated for ConServe (arXiv 2410.01228) and those of these runs."""

    def ttft(mode: OfflineMode) -> str:
        return _range([f"{1e3 * each[mode.name].ttft_p99_s:,.0f}" for each in found.values()])

    def slower(mode: OfflineMode) -> str:
        ratios = sorted(each[mode.name].ttft_p99_s / each[ALONE.name].ttft_p99_s for each in found.values())
        return _range([f"{ratio:.2f}" for ratio in ratios])

    def share(mode: OfflineMode) -> str:
        shares = sorted(each[mode.name].harvest_per_s / each[PRIORITIES.name].harvest_per_s for each in found.values())
        return _range([f"{one:.0%}" for one in shares])

    both = (OURS, BELOW_ALONE)
    rows: list[tuple[str, str, str]] = []
    match figure:
        case "5":
            rows.append(("P99 TTFT of priorities, x alone", "59.7 to 84", slower(PRIORITIES)))
            rows += [(f"harvest, of priorities', {mode.name}", "86%", share(mode)) for mode in both]
        case "6":
            rows.append(("P99 TTFT ms of priorities", "1,346", ttft(PRIORITIES)))
            rows += [(f"P99 TTFT ms, {mode.name}", "446", ttft(mode)) for mode in both]
        case "7":
            rows += [(f"P99 TTFT, x alone, {mode.name}", "at most 1.25", slower(mode)) for mode in both]
            rows += [(f"harvest, of priorities', {mode.name}", "86%", share(mode)) for mode in both]
        case "8":
            rows.append(("P99 TTFT ms of priorities", "4,980", ttft(PRIORITIES)))
            rows += [
                (f"harvest, of priorities', {one.name}", "104 to 112%", share(one)) for one in PARTS if one.is_ours
            ]
        case _:
            return ""
    return "\n".join(["", "", "| | paper | here |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)])


def _range(values: Sequence[str]) -> str:
    return values[0] if values[0] == values[-1] else f"{values[0]} to {values[-1]}"


class KeptRuns:
    """Results of a commit's runs, stored in a file, so that an interrupted benchmark can continue."""

    def __init__(self, folder: Path, commit: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{commit.replace(' ', '-')}.json"
        self._found: dict[str, dict[str, float]] = json.loads(self._path.read_text()) if self._path.exists() else {}

    def run(self, load: OfflineLoadCase, mode: OfflineMode, seed: int) -> OfflineOutcome:
        key = f"{load.name}; {load.seconds:g} s; {mode}; seed {seed}"
        if key not in self._found:
            print(f"{load.name}: {mode.name} ...", file=sys.stderr, flush=True)
            self._found[key] = asdict(run(load, mode, seed))
            self._path.write_text(json.dumps(self._found, indent=1))
        return OfflineOutcome(**self._found[key])  # pyright: ignore[reportArgumentType] - it was written by us


def draw(load: str, outcomes: Outcomes, path: Path) -> None:
    """Draw harvest against P99 TTFT, with a point for each mode."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawing, axis = plt.subplots(figsize=(7, 4.5), constrained_layout=True)
    for name, one in outcomes.items():
        spot, ours, by_time = (one.ttft_p99_s * 1e3, one.harvest_per_s), name.startswith("ours"), name.endswith("ms")
        axis.scatter(*spot, s=40, color="#2a7" if ours else "#c60", zorder=3)
        place, side = ((-7, 4), "right") if by_time else ((7, -3), "left")
        axis.annotate(name, spot, textcoords="offset points", xytext=place, ha=side, fontsize=8)
    axis.set_xscale("log")
    axis.margins(x=0.25)
    axis.set_xlabel("P99 time to the first token of online requests, ms")
    axis.set_ylabel("harvest, tok/s")
    axis.set_title(f"{MODEL}, {CLUSTER}: {load}", fontsize=10)
    axis.grid(alpha=0.3)
    drawing.savefig(path, dpi=130)
    plt.close(drawing)


def beside(traces: Path, cells: str) -> str:
    """Markdown table of cells of the regret grid, simulated without and with endless offline requests."""
    rows = ["| cell, without / with | P50 TTFT s | P99 TTFT s | P99 TPOT s | drops | harvest tok/s |", f"|{'---|' * 6}"]
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
        cells_of_row = [name, *pairs, f"{alone['drops']} / {both['drops']}", harvest]
        rows.append(f"| {' | '.join(cells_of_row)} |")
    return "\n".join(rows)


def figure(which: str, args: argparse.Namespace) -> str:
    """Run an experiment. Returns its tables, and draws the curve."""
    kept, found = KeptRuns(args.out, code_commit()), dict[str, Outcomes]()
    for load in loads_of(which, args):
        if args.load not in load.name:
            continue
        outcomes = found[load.name] = {}
        for mode in load.modes:
            if mode.target_share is not None:
                mode = replace(mode, target_s=mode.target_share * outcomes[ALONE.name].tpot_p99_s)
            outcomes[mode.name] = kept.run(load, mode, args.seed)
            if not outcomes[ALONE.name].tpot_p99_s:
                why = f"{load.name}: nothing is generated between {WARM_S:g} s and {load.seconds:g} s"
                raise ConfigError("--seconds", why)
        if which == "curve":
            draw(load.name, outcomes, args.out / "curve.png")
    return table_of(found) + against_the_paper(which, found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=["5", "6", "7", "8", "curve", "regret"])
    parser.add_argument("--seconds", type=float, default=150.0, help="virtual time of each run (default: 150)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=float, default=0.3, help="for figure 5: fraction of the requests (default: 0.3)")
    parser.add_argument("--load", default="", help="only loads whose name contains this")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="for 5 and regret: folder of the traces")
    parser.add_argument("--slices", default=_SLICES, help="for 5: names of traces (default: %(default)s)")
    parser.add_argument("--cells", default=_QUICK, help="for regret: names or patterns of cells (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out/offline"), help="folder of the runs (%(default)s)")
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE}")
    args = parser.parse_args()
    if args.figure in ("5", "regret") and args.traces is None:
        parser.error(f"{args.figure} needs --traces DIR")
    try:
        page = beside(args.traces, args.cells) if args.figure == "regret" else figure(args.figure, args)
        print(page)
        if args.write:
            quote_run(PAGE, f"offline-{args.figure}", page, paths=(args.traces, args.out))
    except BallastError as error:
        print(f"offline: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
