"""Each policy's P99 TTFT in each cell, over the best of all: one line for a policy, cells sorted by it."""

# pyright: reportUnknownMemberType=false

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from benchmarks.regret_rules import Row
from tools.bench.style import BLUE, GREY, RC, styles


def draw(rows: Sequence[Row], policies: Sequence[str], path: Path) -> None:
    """Cells from top to bottom, in the order of the grid; a mark for each policy, the further right the worse."""
    looks = styles([(name, name.split(":")[0]) for name in policies])
    with mpl.rc_context(RC):
        figure = Figure(figsize=(8.0, 1.9 + 0.24 * len(rows)), layout="constrained")
        waits, paces = figure.subplots(1, 2, sharey=True, width_ratios=(1.7, 1.0))
        for name in policies:
            have = [(row, at) for at, row in enumerate(rows) if name in row.policies]
            look = looks[name]
            style = {"color": look.colour, "marker": look.mark, "linestyle": "none", "markersize": 6, "alpha": 0.85}
            at = [at for _, at in have]
            waits.plot([_over(row, name, policies) for row, _ in have], at, label=name, **style)
            paces.plot([_pace(row, name) for row, _ in have], at, **style)
        waits.set_yticks(range(len(rows)), [f"{row.cell}{' *' if row.memory_is_short else ''}" for row in rows])
        waits.invert_yaxis()
        waits.set_xscale("log")
        waits.set_xticks([1, 10, 100], ["1", "10", "100"])
        waits.axvline(1.1, color="0.5", linewidth=0.8)
        paces.axvline(1.1, color="0.5", linewidth=0.8)
        waits.set_xlabel("P99 TTFT over the best policy's\n(waits below the target are equal; *: memory is short)")
        paces.set_xlabel("P50 time per token\nover the least")
        figure.legend(loc="outside upper center", ncols=3)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)


def draw_predictions(found: Sequence[tuple[float, float]], path: Path) -> None:
    """Predicted and real P99 TTFT of each decision, with bands of 1.5 and 3 times."""
    with mpl.rc_context(RC):
        figure = Figure(figsize=(4.8, 4.6), layout="constrained")
        axis = figure.subplots()
        least, most = 0.4, max([100.0, *(2 * second for pair in found for second in pair)])
        line = [least, most]
        for factor, shade in ((3.0, 0.08), (1.5, 0.15)):
            low, high = [x / factor for x in line], [x * factor for x in line]
            axis.fill_between(line, low, high, color=BLUE, alpha=shade, linewidth=0)
        axis.plot(line, line, color=GREY, linewidth=0.8)
        axis.plot(
            [was for _, was in found], [predicted for predicted, _ in found], "o", color=BLUE, markersize=3, alpha=0.5
        )
        axis.set(xscale="log", yscale="log", xlim=line, ylim=line)
        axis.set_xlabel("P99 TTFT until the horizon or the next transition (s)")
        axis.set_ylabel("P99 TTFT predicted by the planner (s)")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)


class Figures(Protocol):
    """The figures of a run, emulated or simulated."""

    @property
    def ttft_p50_s(self) -> float: ...
    @property
    def ttft_p99_s(self) -> float: ...
    @property
    def tpot_p50_s(self) -> float: ...


def draw_emulated(
    found: Sequence[tuple[str, Figures, Figures]], goals: Mapping[str, tuple[str, float]], path: Path
) -> None:
    """A panel for each figure, with the band that is its goal.

    Args:
        found: Policy, emulated and simulated figures of each run.
        goals: Of fields of figures: what they are called, and how far from the simulated one the other may be.
    """
    looks = styles([(name, name.split(":")[0]) for name in dict.fromkeys(name for name, _, _ in found)])
    panels = [(field, *goals[field]) for field in ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s")]
    with mpl.rc_context(RC):
        figure = Figure(figsize=(9.6, 3.7), layout="constrained")
        for axis, (field, title, most) in zip(figure.subplots(1, 3), panels, strict=True):
            values = [getattr(each, field) for _, ours, theirs in found for each in (ours, theirs)]
            line = [min(values) / 1.5, max(values) * 1.5]
            axis.fill_between(
                line,
                [x * (1 - most) for x in line],
                [x * (1 + most) for x in line],
                color=BLUE,
                alpha=0.12,
                linewidth=0,
            )
            axis.plot(line, line, color=GREY, linewidth=0.8)
            for name, look in looks.items():
                own = [(getattr(b, field), getattr(a, field)) for policy, a, b in found if policy == name]
                axis.plot(
                    [x for x, _ in own], [y for _, y in own], look.mark, color=look.colour, markersize=6, label=name
                )
            axis.set(xscale="log", yscale="log", xlim=line, ylim=line, title=f"{title} (s)", xlabel="simulated")
            axis.set_aspect("equal")
            for scale in (axis.xaxis, axis.yaxis):
                scale.set_major_locator(LogLocator(subs=(1, 2, 5)))
                scale.set_major_formatter(StrMethodFormatter("{x:g}"))
                scale.set_minor_formatter(NullFormatter())
        figure.axes[0].set_ylabel("emulated, in real time")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)


def _over(row: Row, name: str, policies: Sequence[str]) -> float:
    best_s = min(row.policies[other].ttft_p99_s for other in policies if other in row.policies)
    return max(row.policies[name].ttft_p99_s, row.target_s) / max(best_s, row.target_s)


def _pace(row: Row, name: str) -> float:
    return row.policies[name].tpot_p50_s / min(judged.tpot_p50_s for judged in row.policies.values())
