"""Victims of a drop that go on while their KV travels, against victims that wait for it (KunServe, first arXiv version,
figure 14), at several speeds of the link.

    python -m benchmarks.live_exchange [--speeds 4,16,64,unlimited] [--requests 8] [--context 600] [--out FOLDER]

Two processes with real engines and links. One serves requests alone; then the two become a pipeline by an ordinary
drop, and the KV of half of the layers travels. What victims notice are the gaps between their tokens from the commit to
the end of the exchange. Both ways take turns at every speed, and must say the same tokens (in float64).
"""

# pyright: reportUnknownMemberType=false

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from ballast.common.ids import Epoch
from ballast.model.tiny import make_preset
from benchmarks.pipeline_rig import Rig, RigSpec
from services.worker.pipeline.status import Progress

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RESULTS = Path(__file__).parent / "results"
WAYS = ("stall", "live")
COLOURS = {"stall": "#D55E00", "live": "#0072B2"}
LAYERS, MEMORY_BYTES = 8, 900 << 20
BEFORE_S = 1.0  # of decoding alone, for the usual gap


@dataclass(frozen=True, slots=True)
class Run:
    speed: str
    way: str
    exchange_s: float
    kv_bytes: int
    usual_gap_s: float  # median before the drop
    median_gap_s: float  # of victims, during the exchange
    longest_gap_s: float
    gap_count: int
    long_gaps: int  # of those: longer than three times the median
    tokens: list[list[int]]


def run(model_dir: Path, speed: str, way: str, options: argparse.Namespace) -> Run:
    spec = RigSpec(
        model_dir=model_dir,
        layer_count=LAYERS,
        stage_count=2,
        memory_bytes=MEMORY_BYTES,
        max_running_count=64,
        max_batch_tokens=512,
        merged=False,
        live_exchange=way == "live",
        rate_bytes_per_s=None if speed == "unlimited" else float(speed) * 1e6,
        dtype="float64",
    )
    requests = [(options.context + 7 * i, options.tokens) for i in range(options.requests)]
    with Rig(spec) as rig:
        number = rig.send(0, "generate", requests)
        time.sleep(options.warm_s)
        began_s = time.monotonic()
        rig.merge()
        progress: Progress = rig.ask(0, "progress", Epoch(2))
        said: list[tuple[list[int], list[float]]] = rig.receive(0, number)
    taken_up_s = progress.taken_up_at_s
    end_s = taken_up_s + progress.exchange_s
    before = [gap for _, at_s in said for gap, a, b in gaps_of(at_s) if b <= began_s and a >= began_s - BEFORE_S]
    during = [gap for _, at_s in said for gap, a, b in gaps_of(at_s) if b > taken_up_s and a < end_s]
    if not before or not during or min(at_s[-1] for _, at_s in said) < end_s:
        raise SystemExit(f"{speed}, {way}: requests began too late or ended too early; see --tokens and --warm-s")
    middle = statistics.median(during)
    return Run(
        speed=speed,
        way=way,
        exchange_s=progress.exchange_s,
        kv_bytes=progress.kv_bytes_sent,
        usual_gap_s=statistics.median(before),
        median_gap_s=middle,
        longest_gap_s=max(during),
        gap_count=len(during),
        long_gaps=sum(gap > 3 * middle for gap in during),
        tokens=[token_ids for token_ids, _ in said],
    )


def gaps_of(at_s: Sequence[float]) -> list[tuple[float, float, float]]:
    return [(b - a, a, b) for a, b in itertools.pairwise(at_s)]


def table_of(runs: Sequence[Run]) -> Table:
    table = Table(title="Victims of a drop while their KV travels; goals: longest gap 3 x median, exchange 2.4 x stall")
    for heading in ("link MB/s", "way", "exchange s", "of stall", "gap before ms", "median ms", "longest ms", "> 3 x"):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    stalls = {one.speed: one for one in runs if one.way == "stall"}
    for one in runs:
        table.add_row(
            one.speed,
            one.way,
            f"{one.exchange_s:.2f}",
            f"{one.exchange_s / stalls[one.speed].exchange_s:.2f}",
            f"{one.usual_gap_s * 1e3:.1f}",
            f"{one.median_gap_s * 1e3:.1f}",
            f"{one.longest_gap_s * 1e3:.0f}",
            f"{one.long_gaps} of {one.gap_count}",
        )
    return table


def draw(path: Path, runs: Sequence[Run]) -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
    with mpl.rc_context(style):  # pyright: ignore[reportArgumentType] -- the stubs want literals
        figure = Figure(figsize=(10.5, 4.4), layout="constrained")
        axes: list[Axes] = figure.subplots(1, 2, squeeze=False).ravel().tolist()
        speeds = list(dict.fromkeys(one.speed for one in runs))
        for way in WAYS:
            mine = [one for one in runs if one.way == way]
            places = range(len(mine))
            axes[0].plot(places, [r.longest_gap_s for r in mine], "o-", color=COLOURS[way], label=f"{way}, longest")
            axes[0].plot(places, [r.median_gap_s for r in mine], "^:", color=COLOURS[way], label=f"{way}, median")
            axes[1].plot(places, [r.exchange_s for r in mine], "o-", color=COLOURS[way], label=way)
        axes[0].set_ylabel("gap between a victim's tokens, s")
        axes[1].set_ylabel("exchange, s")
        for one in axes:
            one.set_yscale("log")
            one.set_xticks(range(len(speeds)), speeds)
            one.set_xlabel("speed of the link, MB/s")
            one.grid(alpha=0.3)
            one.legend(fontsize=9)
        megabytes = runs[0].kv_bytes / 1e6
        figure.suptitle(f"Victims of a drop wait for {megabytes:.0f} MB of KV, or go on meanwhile", fontsize=11)
        figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speeds", default="4,16,64,unlimited", help="MB/s, with commas between them")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--context", type=int, default=600, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=900, help="of an answer: it must outlast the exchange")
    parser.add_argument("--warm-s", type=float, default=8.0, help="until the drop: prompts are computed by then")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER")
    options = parser.parse_args()
    console = Console(width=130)
    with tempfile.TemporaryDirectory(prefix="ballast-bench-") as folder:
        model_dir = make_preset("bench", Path(folder) / "model")
        runs = [run(model_dir, speed, way, options) for speed in options.speeds.split(",") for way in WAYS]
    same = all(one.tokens == runs[0].tokens for one in runs)
    console.print(table_of(runs))
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.out / f"{datetime.now(UTC).date()}-live-exchange"
    document = {
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "load_average": os.getloadavg(),
        "tokens_identical": same,
        "runs": [{k: v for k, v in asdict(one).items() if k != "tokens"} for one in runs],
    }
    stem.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    draw(stem.with_suffix(".png"), runs)
    console.print(f"tokens identical: {same}; written: {stem}.json, {stem}.png; load average {os.getloadavg()}")


if __name__ == "__main__":
    main()
