"""Table and JSON of `benchmarks.transfers`."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

WAYS = ("idle", "naive", "chunked", "coordinated")
IDLE_TIMES, EXCHANGE_SHARE = 1.5, 0.7
GOALS = f"p99 at most {IDLE_TIMES} x idle + one chunk's time; exchange at least {EXCHANGE_SHARE:.0%} of bulk alone"


@dataclass(frozen=True, slots=True)
class WayFigures:
    p50_s: float
    p99_s: float
    bytes_per_s: float  # speed of the KV exchange
    count: int  # number of activations


@dataclass(frozen=True, slots=True)
class SpeedFigures:
    speed: str
    alone_bytes_per_s: float  # speed of bulk data without activations
    chunk_s: float  # duration of the bulk data in flight at that speed: maximum delay of an activation
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
    console.print(table_of(figures, facts))
    console.print(f"written: {stem}.json; load average {facts['load_average']}")


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
