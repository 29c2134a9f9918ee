"""Table, JSON and figure of `benchmarks.live_exchange`."""

# pyright: reportUnknownMemberType=false

import json
import statistics
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from ballast.bench.style import BLUE, GREY, RC, VERMILION

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WAYS = ("stall", "live")
COLOURS = {"stall": VERMILION, "live": BLUE}
GAP_GOAL, EXCHANGE_GOAL = 3.0, 2.4
GOALS = f"live: longest gap at most {GAP_GOAL:g} x the median, exchange at most {EXCHANGE_GOAL:g} x stalling"
_TIMELINE_S = 0.1  # tokens are counted in steps of this


@dataclass(frozen=True, slots=True)
class Run:
    """One exchange. Gaps are between tokens of a victim, as its client sees them."""

    speed: str
    way: str
    exchange_s: float
    commit_s: float  # before that, from the first worker's commit
    kv_bytes: int
    victims: int
    recomputed: int
    usual_gap_s: float  # median, before
    pipeline_gap_s: float  # median, afterwards
    median_gap_s: float
    mean_gap_s: float
    longest_gap_s: float
    gap_count: int
    token_at_s: list[list[float]]  # since the commit
    end_s: float  # of the exchange, since the commit

    @property
    def stretch(self) -> float:
        return self.longest_gap_s / self.median_gap_s

    def tokens_until(self, end_s: float) -> int:
        return sum(bisect_right(came, end_s) - bisect_right(came, 0.0) for came in self.token_at_s)

    def line(self) -> str:
        ms = 1e3
        return (
            f"{self.speed} MB/s, {self.way}: exchange {self.exchange_s:.2f} s after {self.commit_s * ms:.0f} ms,"
            f" {self.kv_bytes / 1e6:.1f} MB of {self.victims} victims ({self.recomputed} recomputed); gaps before"
            f" {self.usual_gap_s * ms:.1f} ms, during median {self.median_gap_s * ms:.1f} mean"
            f" {self.mean_gap_s * ms:.1f} longest {self.longest_gap_s * ms:.0f} ms ({self.stretch:.1f} x),"
            f" after {self.pipeline_gap_s * ms:.1f} ms"
        )


@dataclass(frozen=True, slots=True)
class Pair:
    """Both ways at one speed, medians over the rounds."""

    speed: str
    runs: dict[str, list[Run]]

    def median(self, way: str, of: Callable[[Run], float]) -> float:
        return statistics.median(of(run) for run in self.runs[way])

    @property
    def lengthened(self) -> float:
        return self.median("live", lambda r: r.exchange_s) / self.median("stall", lambda r: r.exchange_s)

    @property
    def window_s(self) -> float:
        """From the commit until the exchange is over whichever way it goes."""
        return max(self.median(way, lambda r: r.end_s) for way in WAYS)

    def tokens(self, way: str) -> float:
        return self.median(way, lambda r: r.tokens_until(self.window_s))

    @property
    def reached(self) -> tuple[bool, bool]:
        return self.median("live", lambda r: r.stretch) <= GAP_GOAL, self.lengthened <= EXCHANGE_GOAL


def pairs_of(runs: Sequence[Run]) -> list[Pair]:
    speeds = list(dict.fromkeys(run.speed for run in runs))
    return [Pair(s, {way: [r for r in runs if (r.speed, r.way) == (s, way)] for way in WAYS}) for s in speeds]


def write_report(runs: Sequence[Run], facts: dict[str, object], folder: Path, console: Console) -> None:
    pairs = pairs_of(runs)
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{datetime.now(UTC).date()}-live-exchange"
    document = {
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "goals": GOALS,
        **facts,
        "speeds": [
            {
                "speed": pair.speed,
                "live_exchange_of_stall": pair.lengthened,
                "goals_reached": pair.reached,
                "window_s": pair.window_s,
                "tokens_in_window": {way: pair.tokens(way) for way in WAYS},
                "runs": [
                    {k: v for k, v in asdict(run).items() if k != "token_at_s"}
                    for way in WAYS
                    for run in pair.runs[way]
                ],
            }
            for pair in pairs
        ],
    }
    stem.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    draw(stem.with_suffix(".png"), pairs)
    console.print(table_of(pairs, facts))
    console.print(f"written: {stem}.json, {stem}.png; load average {facts['load_average']}")


def table_of(pairs: Sequence[Pair], facts: dict[str, object]) -> Table:
    table = Table(
        title="Victims of a drop while their KV travels",
        caption=f"{GOALS}; {facts['tokens_differing']} of {facts['tokens_compared']} tokens differ",
    )
    headings = ("exchange s", "of stall", "MB", "gap before ms", "median ms", "mean ms", "longest ms", "of median")
    for heading in ("link MB/s", "way", *headings, "tokens meanwhile", "goals"):
        table.add_column(heading, justify="left" if heading in ("way", "goals") else "right")
    for pair in pairs:
        for way in WAYS:

            def of(get: Callable[[Run], float], way: str = way, pair: Pair = pair) -> float:
                return pair.median(way, get)

            live = way == "live"
            table.add_row(
                "" if live else pair.speed,
                way,
                f"{of(lambda r: r.exchange_s):.2f}",
                f"{pair.lengthened:.2f}" if live else "",
                f"{of(lambda r: r.kv_bytes) / 1e6:.1f}",
                f"{of(lambda r: r.usual_gap_s) * 1e3:.1f}",
                f"{of(lambda r: r.median_gap_s) * 1e3:.1f}",
                f"{of(lambda r: r.mean_gap_s) * 1e3:.1f}",
                f"{of(lambda r: r.longest_gap_s) * 1e3:.0f}",
                f"{of(lambda r: r.stretch):.1f}",
                f"{pair.tokens(way):.0f}",
                " ".join("yes" if yes else "no" for yes in pair.reached) if live else "",
            )
    return table


def draw(path: Path, pairs: Sequence[Pair]) -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(RC):
        figure = Figure(figsize=(11.0, 7.4), layout="constrained")
        axes: list[Axes] = figure.subplots(2, 2, squeeze=False).ravel().tolist()
        _draw_gaps(axes[0], pairs)
        _draw_exchange(axes[1], pairs)
        _draw_tokens(axes[2], pairs)
        _draw_timeline(axes[3], pairs)
        names = [pair.speed for pair in pairs]
        for one in axes[:3]:
            one.set_xticks(range(len(pairs)), names)
            one.set_xlabel("speed of the link, MB/s")
        megabytes = pairs[0].median("stall", lambda r: r.kv_bytes) / 1e6
        victims = pairs[0].runs["stall"][0].victims
        figure.suptitle(
            f"{victims} victims of a drop wait for {megabytes:.0f} MB of KV, or go on meanwhile", fontsize=11
        )
        figure.savefig(path, dpi=130)


def _draw_gaps(axes: "Axes", pairs: Sequence[Pair]) -> None:
    at = range(len(pairs))
    measures: dict[str, tuple[str, Callable[[Run], float]]] = {
        "longest": ("o-", lambda r: r.longest_gap_s),
        "mean": ("^:", lambda r: r.mean_gap_s),
    }
    for way in WAYS:
        for name, (mark, get) in measures.items():
            values = [pair.median(way, get) * 1e3 for pair in pairs]
            axes.plot(at, values, mark, color=COLOURS[way], label=f"{way}, {name}", markersize=5)
    usual = statistics.median(run.usual_gap_s for pair in pairs for runs in pair.runs.values() for run in runs)
    axes.axhline(usual * 1e3, color=GREY, linewidth=1.0, linestyle="--", label="median before the drop")
    axes.set_yscale("log")
    axes.set_ylabel("gap between a victim's tokens, ms")
    axes.legend(fontsize=8)


def _draw_exchange(axes: "Axes", pairs: Sequence[Pair]) -> None:
    at = range(len(pairs))
    for way in WAYS:
        values = [pair.median(way, lambda r: r.exchange_s) for pair in pairs]
        axes.plot(at, values, "o-", color=COLOURS[way], label=way, markersize=5)
        if way == "stall":
            allowed = [EXCHANGE_GOAL * value for value in values]
            axes.plot(at, allowed, "--", color=GREY, linewidth=1.0, label=f"{EXCHANGE_GOAL:g} x stall")
    axes.set_yscale("log")
    axes.set_ylabel("exchange, s")
    axes.legend()


def _draw_tokens(axes: "Axes", pairs: Sequence[Pair]) -> None:
    shares = [pair.tokens("live") / max(pair.tokens("stall"), 1.0) for pair in pairs]
    axes.plot(range(len(pairs)), shares, "o-", color=BLUE, markersize=5)
    axes.axhline(1.0, color=VERMILION, linewidth=1.2, label="as many as stalling")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("tokens until both exchanges are over,\nlive / stall")
    for x, share in enumerate(shares):
        axes.annotate(f"{share:.2f}", (x, share), textcoords="offset points", xytext=(0, 6), ha="center", fontsize=8)
    axes.legend()


def _draw_timeline(axes: "Axes", pairs: Sequence[Pair]) -> None:
    """Of the slowest link: all victims' tokens per second."""
    pair = pairs[0]
    for way in WAYS:
        run = pair.runs[way][0]
        steps = range(-10, int(1.15 * pair.window_s / _TIMELINE_S) + 1)
        came = sorted(at_s for one in run.token_at_s for at_s in one)
        counts = [bisect_right(came, (i + 1) * _TIMELINE_S) - bisect_right(came, i * _TIMELINE_S) for i in steps]
        rates = [count / _TIMELINE_S for count in counts]
        axes.step([i * _TIMELINE_S for i in steps], rates, where="post", color=COLOURS[way], label=way, linewidth=1.2)
        axes.axvline(run.end_s, color=COLOURS[way], linewidth=1.0, linestyle=":")
    axes.set_xlabel(f"seconds since the commit, at {pair.speed} MB/s (dotted: exchange over)")
    axes.set_ylabel("tokens/s of all victims")
    axes.set_ylim(bottom=0)
    axes.legend()
