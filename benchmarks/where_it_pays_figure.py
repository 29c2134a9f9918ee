"""The map as a figure: gain over recompute, and over the best static policy of each cell."""

# pyright: reportUnknownMemberType=false

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from benchmarks.regret_rules import COMPUTING_SHARE
from sim.jobs.settled import carried_by_pairs
from tools.bench.style import BLUE, GREY, RC, VERMILION

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TARGET_S = 1.0  # waits below it are equally good
_MOST = 2.0  # decades of colour
_ALIKE = 0.02
_DARK = 1.1  # decades from which on letters are white


@dataclass(frozen=True, slots=True)
class Spot:
    """P99 TTFT in one cell of the map."""

    share: float
    answer: int
    ours_s: float
    plain_s: float
    static_s: float  # of the best policy that never changes
    pace: float  # median time per token over that policy's
    prompt_share: float  # of the time, in the burst

    def over(self, other_s: float) -> float:
        return max(other_s, TARGET_S) / max(self.ours_s, TARGET_S)


def draw(spots: Sequence[Spot], shares: Sequence[float], answers: Sequence[int], path: Path) -> None:
    with mpl.rc_context({**RC, "font.size": 11, "axes.grid": False}):
        figure = Figure(figsize=(5.4, 6.8), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True)
        _panel(
            above,
            "P99 TTFT: times shorter than with recompute",
            [(s, s.over(s.plain_s), s.plain_s) for s in spots],
            shares,
            answers,
            paces=False,
        )
        _panel(
            below,
            "and than with the best static policy (time per token)",
            [(s, s.over(s.static_s), s.static_s) for s in spots],
            shares,
            answers,
            paces=True,
        )
        below.set_xlabel("mean length of answers (tokens)")
        figure.supylabel("parameters' share of the memory\n(load that pairs carry, by the closed form)", fontsize=11)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)


def _panel(
    axis: "Axes",
    title: str,
    cells: Sequence[tuple[Spot, float, float]],
    shares: Sequence[float],
    answers: Sequence[int],
    *,
    paces: bool,
) -> None:
    colours = LinearSegmentedColormap.from_list("gain", [VERMILION, "white", BLUE])
    axis.set_title(title, fontsize=11)
    drawn: set[tuple[int, int]] = set()
    for spot, gain, other_s in cells:
        decades = _decades(gain)
        x, y = answers.index(spot.answer), shares.index(spot.share)
        drawn.add((x, y))
        axis.fill_between([x - 0.5, x + 0.5], y - 0.5, y + 0.5, color=colours((decades / _MOST + 1.0) / 2), linewidth=0)
        letters = "white" if abs(decades) > _DARK else "black"
        axis.text(x, y - 0.13, _times(gain), ha="center", va="center", color=letters, fontsize=13)
        under = f"{_seconds(other_s)} → {_seconds(spot.ours_s)} s"
        if paces and abs(spot.pace - 1.0) > _ALIKE:
            under += f"\ntokens {spot.pace - 1.0:+.0%}"
        elif not paces and spot.prompt_share > COMPUTING_SHARE:
            under += f"\nprompts {spot.prompt_share:.0%}"
        axis.text(x, y + 0.28, under, ha="center", va="center", color=letters, fontsize=9)
    for x, y in {(x, y) for x in range(len(answers)) for y in range(len(shares))} - drawn:
        axis.text(x, y, "not run", ha="center", va="center", color=GREY, fontsize=9)
    axis.set_xlim(-0.5, len(answers) - 0.5)
    axis.set_ylim(len(shares) - 0.5, -0.5)
    axis.set_xticks(range(len(answers)), [f"{answer:,}" for answer in answers])
    axis.set_yticks(range(len(shares)), [f"{share:.0%}\n({carried_by_pairs(share):.2f} x)" for share in shares])
    axis.tick_params(length=0)


def _decades(gain: float) -> float:
    return max(-_MOST, min(_MOST, math.log10(gain)))


def _times(gain: float) -> str:
    return "=" if 0.95 < gain < 1.05 else f"{gain:.0f} x" if gain >= 9.5 else f"{gain:.1f} x"


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 9.5 else f"{seconds:.1f}"
