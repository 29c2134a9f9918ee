"""Table, JSON and figure of `benchmarks.transfers`."""

# pyright: reportUnknownMemberType=false

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WAYS = ("idle", "naive", "chunked", "coordinated")
COLOURS = {"idle": "#999999", "naive": "#D55E00", "chunked": "#E69F00", "coordinated": "#0072B2"}
IDLE_TIMES, EXCHANGE_SHARE = 1.5, 0.7
GOALS = f"p99 at most {IDLE_TIMES} x idle + one chunk's time; exchange at least {EXCHANGE_SHARE:.0%} of bulk alone"


@dataclass(frozen=True, slots=True)
class WayFigures:
    p50_s: float
    p99_s: float
    bytes_per_s: float  # of the exchange
    count: int  # activations


@dataclass(frozen=True, slots=True)
class SpeedFigures:
    speed: str
    alone_bytes_per_s: float  # bulk and nothing else
    chunk_s: float  # bulk in flight at most, by that speed: what an activation may find before it
    ways: dict[str, WayFigures]

    @property
    def allowed_s(self) -> float:
        return IDLE_TIMES * self.ways["idle"].p99_s + self.chunk_s

    def share(self, way: str) -> float:
        return self.ways[way].bytes_per_s / self.alone_bytes_per_s


def write_report(figures: Sequence[SpeedFigures], facts: dict[str, object], folder: Path, console: Console) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{datetime.now(UTC).date()}-transfers"
    document = {
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        **facts,
        "speeds": [{**asdict(one), "allowed_p99_s": one.allowed_s} for one in figures],
    }
    stem.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    draw(stem.with_suffix(".png"), figures, facts)
    console.print(table_of(figures, facts))
    console.print(f"written: {stem}.json, {stem}.png; load average {facts['load_average']}")


def table_of(figures: Sequence[SpeedFigures], facts: dict[str, object]) -> Table:
    table = Table(
        title=f"Activations of {facts['activation_bytes']} bytes, one every {facts['stage_ms']} ms, beside an exchange",
        caption=f"{facts['links']}; goals: {facts['goals']}",
    )
    table.add_column("link MB/s")
    table.add_column("way")
    for heading in ("p50 ms", "p99 ms", "allowed ms", "exchange MB/s", "of bulk alone", "activations", "goals"):
        table.add_column(heading, justify="right")
    for one in figures:
        for way in WAYS:
            figure, is_idle = one.ways[way], way == "idle"
            met = figure.p99_s <= one.allowed_s, one.share(way) >= EXCHANGE_SHARE
            table.add_row(
                one.speed if is_idle else "",
                way,
                f"{figure.p50_s * 1e3:.2f}",
                f"{figure.p99_s * 1e3:.2f}",
                "" if is_idle else f"{one.allowed_s * 1e3:.2f}",
                f"alone {one.alone_bytes_per_s / 1e6:.1f}" if is_idle else f"{figure.bytes_per_s / 1e6:.1f}",
                "" if is_idle else f"{one.share(way):.0%}",
                str(figure.count),
                "" if is_idle else " ".join("yes" if yes else "no" for yes in met),
            )
    return table


def draw(path: Path, figures: Sequence[SpeedFigures], facts: dict[str, object]) -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
    with mpl.rc_context(style):  # pyright: ignore[reportArgumentType] -- the stubs want literals
        figure = Figure(figsize=(10.5, 4.6), layout="constrained")
        axes: list[Axes] = figure.subplots(1, 2, squeeze=False).ravel().tolist()
        _draw_latency(axes[0], figures)
        _draw_throughput(axes[1], figures)
        names = [f"{one.speed} MB/s" if one.speed[0].isdigit() else one.speed for one in figures]
        for one in axes:
            one.set_xticks(range(len(figures)), names)
            one.set_xlabel("speed of the link")
            one.grid(axis="y", alpha=0.3)
        figure.suptitle(
            f"Activations beside a KV exchange: a stage of {facts['stage_ms']} ms, two processes", fontsize=11
        )
        figure.savefig(path, dpi=130)


def _draw_latency(axes: "Axes", figures: Sequence[SpeedFigures]) -> None:
    width = 0.8 / len(WAYS)
    for index, way in enumerate(WAYS):
        at = [x + (index - 1.5) * width for x in range(len(figures))]
        p99_ms = [f.ways[way].p99_s * 1e3 for f in figures]
        p50_ms = [f.ways[way].p50_s * 1e3 for f in figures]
        axes.bar(at, p99_ms, width * 0.92, color=COLOURS[way], alpha=0.45)
        axes.bar(at, p50_ms, width * 0.92, color=COLOURS[way], label=way)
    for x, one in enumerate(figures):
        label = "" if x else "goal for p99"
        axes.hlines(one.allowed_s * 1e3, x - 0.42, x + 0.42, color="black", linewidth=1.2, linestyle="--", label=label)
    axes.set_yscale("log")
    axes.set_ylabel("latency of activations, ms (dark: p50, light: p99)")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=5, fontsize=8, columnspacing=1.0)


def _draw_throughput(axes: "Axes", figures: Sequence[SpeedFigures]) -> None:
    ways = [way for way in WAYS if way != "idle"]
    width = 0.8 / len(ways)
    for index, way in enumerate(ways):
        at = [x + (index - 1) * width for x in range(len(figures))]
        axes.bar(at, [f.share(way) * 100 for f in figures], width * 0.92, color=COLOURS[way], label=way)
    axes.axhline(EXCHANGE_SHARE * 100, color="black", linewidth=1.2, linestyle="--", label="goal")
    axes.set_ylabel("throughput of the exchange, % of bulk alone")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=4, fontsize=8, columnspacing=1.0)
