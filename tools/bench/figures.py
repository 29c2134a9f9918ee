"""The figures of a comparison, after those of KunServe (EuroSys '26), drawn from result files only.

Figures over time show the first repetition. Bars and lines are medians over repetitions, whiskers and bands reach from
the lowest to the highest. matplotlib comes with the `bench` extra and is imported only here and in `plot`; its stubs
leave **kwargs without types, hence the comment below.
"""

# pyright: reportUnknownMemberType=false

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tools.bench.capacity import settled_capacity
from tools.bench.plot import merged_spans
from tools.bench.policies import ABLATION, PolicySpec, parse_policies
from tools.bench.records import Outcome
from tools.bench.results import SLO_SCALES, PolicyResult
from tools.bench.study import Contestant, Study, WorkloadStudy, first_violation_s
from tools.bench.style import BLUE, GREY, MIB, ORANGE, VERMILION, Style, styles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDE = 10.0  # inches: letters of 10 points are still 7 on a page of paper
_WINDOWS = 40  # of a figure over time
_PERCENTILES = (("P50", "p50"), ("P99", "p99"), ("P99.9", "p999"))
ABLATION_PERCENTILES = (("P50", "p50"), ("P90", "p90"), ("P99", "p99"), ("P99.9", "p999"))
_WHISKERS = {"elinewidth": 1, "ecolor": "#333333", "capsize": 2}
_FEW_TICKS = (1.0,)  # of a decade, for low panels
EXTREME_SCALE = 5.0  # of the SLO whose first violation is looked for


@dataclass(frozen=True)
class Drawn:
    """A figure with what is to be known to read it."""

    workload: str
    kind: str
    title: str
    caption: str
    figure: "Figure"

    @property
    def name(self) -> str:
        """Name of a file, without suffix."""
        return f"{self.workload}-{self.kind}"


@dataclass(frozen=True)
class _Latency:
    """TTFT spans decades and is drawn in seconds on logarithms, TPOT in milliseconds from zero."""

    field: str
    unit: float  # per second

    def scale(self, axis: "Axes") -> None:
        if self.unit == 1.0:
            _logarithmic(axis)
            axis.set_ylabel("TTFT (s)")
        else:
            axis.set_ylim(bottom=0)
            axis.set_ylabel("TPOT (ms)")


_LATENCIES = (_Latency("ttft_s", 1.0), _Latency("tpot_s", 1e3))


def draw_all(study: Study) -> list[Drawn]:
    look = styles(study.labels)
    drawn: list[Drawn] = []
    for workload in study.workloads:
        drawn += [_latencies(workload, look), _overview(workload, look), _over_time(workload, look)]
        if steps := ablation_steps(workload):
            drawn.append(_ablation(workload, steps, look))
        if any(c.is_ours for c in workload.contestants):
            drawn.append(_long_run(workload, look))
        if len(_degrees(workload)) > 1:
            drawn.append(_pipeline_degrees(workload))
        if workload.name.startswith("extreme-"):
            drawn.append(_extreme(workload, look))
    return drawn


def _new(rows: int, columns: int, width: float, height: float, *, sharex: bool) -> "tuple[Figure, list[list[Axes]]]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes: list[list[Axes]] = figure.subplots(rows, columns, sharex=sharex, squeeze=False).tolist()
    return figure, axes


# ---------------------------------------------------------------- figure 2


def _overview(workload: WorkloadStudy, look: dict[str, Style]) -> Drawn:
    """Rate of arrivals, KV demand of each policy, TTFT of each request."""
    count = len(workload.contestants)
    figure, grid = _new(2 + count, 1, 8.0, 4.2 + 1.5 * count, sharex=True)
    axes = [row[0] for row in grid]
    span_s = _end_s(workload)
    _rate(axes[0], workload.contestants[0].first, span_s)
    for c in workload.contestants:
        series, style = c.first.series, look[c.label]
        demand = np.array(series.kv_demand_bytes) / MIB
        axes[1].plot(series.at_s, demand, color=style.colour, linestyle=style.line, label=c.label)
    capacity = workload.undropped_kv_bytes / MIB
    axes[1].axhline(capacity, color=GREY, linewidth=1)
    name = axes[1].annotate("with all parameters", (span_s, capacity * 1.02), ha="right", va="bottom", fontsize=8)
    name.set_color(GREY)
    name.set_bbox({"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.8})  # curves pass there
    axes[1].set_ylabel("KV demand\n(MiB)")
    axes[1].set_ylim(bottom=0)
    _legend_above(figure, axes[1])
    lowest, highest = _ttft_range(workload)
    for axis, c in zip(axes[2:], workload.contestants, strict=True):
        _ttft_scatter(axis, c, look[c.label])
        axis.set_ylim(lowest / 1.5, highest * 2)
        _shade(axis, c.first)
    axes[-1].set_xlabel("time since the start (s)")
    axes[-1].set_xlim(0, span_s)
    caption = (
        "Request rate, KV demand (running and waiting requests) and the time to first token of every request. Shaded:"
        " parameters are dropped. First repetition."
    )
    return Drawn(workload.name, "overview", "demand and TTFT over time", caption, figure)


def _rate(axis: "Axes", result: PolicyResult, span_s: float) -> None:
    edges = np.linspace(0, span_s, _WINDOWS + 1)
    counts, _ = np.histogram([r.planned_s for r in result.requests], bins=edges)
    axis.stairs(counts / (edges[1] - edges[0]), edges, color=GREY, fill=True, alpha=0.5)
    axis.set_ylabel("requests\nper s")


def _ttft_scatter(axis: "Axes", c: Contestant, style: Style) -> None:
    served = [(r.planned_s, r.first_token_s - r.planned_s) for r in c.first.requests if r.first_token_s is not None]
    _logarithmic(axis, _FEW_TICKS)
    if served:
        axis.scatter(*zip(*served, strict=True), s=14, color=style.colour, alpha=0.75, linewidths=0)
    failed = [r.planned_s for r in c.first.requests if r.outcome is not Outcome.FINISHED]
    if failed:
        axis.plot(failed, [0.98] * len(failed), "x", color=VERMILION, transform=axis.get_xaxis_transform())
    axis.set_ylabel("TTFT (s)")
    axis.set_title(c.label, loc="left", fontsize=10, pad=3)


def _ttft_range(workload: WorkloadStudy) -> tuple[float, float]:
    values = [
        max(1e-4, r.first_token_s - r.planned_s)
        for c in workload.contestants
        for r in c.first.requests
        if r.first_token_s is not None
    ]
    return (min(values), max(values)) if values else (0.01, 1.0)


# ---------------------------------------------------------------- figure 5


def _degrees(workload: WorkloadStudy) -> dict[int, Contestant]:
    """Contestants by pipeline degree: `recompute` with all parameters is 1."""
    found: dict[int, Contestant] = {}
    for c in workload.contestants:
        facts = c.runs[0].comparison
        if facts is None:
            continue
        if c.policy == "static-pipeline":
            found.setdefault(PolicySpec(c.label, c.policy, facts.knobs).pipeline_degree, c)
        elif c.policy == "recompute" and not facts.knobs:
            found.setdefault(1, c)
    return dict(sorted(found.items()))


def _pipeline_degrees(workload: WorkloadStudy) -> Drawn:
    figure, grid = _new(1, 2, 8.0, 3.2, sharex=False)
    degrees = _degrees(workload)
    for axis, what in zip(grid[0], _LATENCIES, strict=True):
        for (name, field), colour, line in zip(_PERCENTILES, (BLUE, ORANGE, VERMILION), ("-", "--", ":"), strict=True):
            spreads = [c.spread(_summary(what.field, field)) for c in degrees.values()]
            middles = [np.nan if s.middle is None else what.unit * s.middle for s in spreads]
            axis.plot(list(degrees), middles, color=colour, linestyle=line, marker="o", label=name)
        what.scale(axis)
        axis.set_xticks(list(degrees))
        axis.set_xlabel("stages of a pipeline")
    grid[0][0].legend()
    caption = "Latency against the number of instances that hold one copy of the parameters, for the whole run."
    return Drawn(workload.name, "degrees", "latency and pipeline degree", caption, figure)


# ---------------------------------------------------------------- figure 12


def _over_time(workload: WorkloadStudy, look: dict[str, Style]) -> Drawn:
    figure, grid = _new(1, 3, _WIDE, 3.2, sharex=False)
    memory, ttft, throughput = grid[0]
    shown = next((c for c in workload.contestants if c.is_ours), workload.contestants[0])
    _memory(memory, shown)
    end_s = _end_s(workload)
    edges = np.linspace(0, end_s, _WINDOWS + 1)
    for c in workload.contestants:
        style = look[c.label]
        ttft.plot(*_windowed_ttft(c.first, edges), color=style.colour, linestyle=style.line, label=c.label)
        rate = _token_rate(c.first, edges)
        throughput.plot(edges[:-1], rate, color=style.colour, linestyle=style.line, label=c.label)
    _logarithmic(ttft)
    ttft.set_ylabel("mean TTFT (s)")
    throughput.set_ylabel("output tokens per s")
    throughput.set_ylim(bottom=0)
    for axis in (memory, ttft, throughput):
        axis.set_xlabel("time since the start (s)")
        axis.set_xlim(0, end_s)
    _legend_above(figure, ttft)
    caption = (
        f"Left: KV memory of {shown.label}; capacity as it is between transitions. Middle: mean TTFT of the requests"
        f" that arrived in a window of"
        f" {end_s / _WINDOWS:.1f} s. Right: throughput; the tokens of an answer are spread evenly from its first to its"
        " last. First repetition."
    )
    return Drawn(workload.name, "time", "memory, TTFT and throughput over time", caption, figure)


def _memory(axis: "Axes", c: Contestant) -> None:
    series = c.first.series
    settled_s, capacity_bytes = settled_capacity(c.first)
    axis.plot(settled_s, np.array(capacity_bytes) / MIB, color=GREY, drawstyle="steps-post")
    axis.plot(series.at_s, np.array(series.kv_demand_bytes) / MIB, color=VERMILION, linestyle="--")
    axis.fill_between(series.at_s, np.array(series.kv_used_bytes) / MIB, color=BLUE, alpha=0.3)
    axis.legend(["capacity", "demand", "used"])
    axis.set_ylabel("KV cache (MiB)")
    axis.set_ylim(bottom=0)
    axis.set_title(c.label, loc="left", fontsize=10)
    _shade(axis, c.first)


def _windowed_ttft(result: PolicyResult, edges: np.ndarray) -> tuple[list[float], list[float]]:
    at_s: list[float] = []
    means: list[float] = []
    for begin_s, end_s in itertools.pairwise(edges.tolist()):
        values = [
            r.first_token_s - r.planned_s
            for r in result.requests
            if r.first_token_s is not None and begin_s <= r.planned_s < end_s
        ]
        if values:
            at_s.append((begin_s + end_s) / 2)
            means.append(sum(values) / len(values))
    return at_s, means


def _token_rate(result: PolicyResult, edges: np.ndarray) -> np.ndarray:
    tokens = np.zeros(len(edges) - 1)
    for r in result.requests:
        if r.first_token_s is None or r.end_s is None or not r.output_tokens:
            continue
        begin_s, end_s = r.first_token_s, max(r.end_s, r.first_token_s + 1e-3)
        overlap = np.clip(np.minimum(edges[1:], end_s) - np.maximum(edges[:-1], begin_s), 0, None)
        tokens += r.output_tokens * overlap / (end_s - begin_s)
    return tokens / (edges[1] - edges[0])


# ---------------------------------------------------------------- figure 13


def _latencies(workload: WorkloadStudy, look: dict[str, Style]) -> Drawn:
    figure, grid = _new(1, 3, _WIDE, 3.4, sharex=False)
    for axis, what in zip(grid[0], _LATENCIES, strict=False):
        _bars(axis, workload.contestants, what, look)
        what.scale(axis)
    slo = grid[0][2]
    for c in workload.contestants:
        style, curve = look[c.label], workload.violation_curve(c)
        middles = [np.nan if s.middle is None else 100 * s.middle for s in curve]
        slo.plot(SLO_SCALES, middles, color=style.colour, linestyle=style.line, marker=style.mark, markersize=4)
        low = [np.nan if s.low is None else 100 * s.low for s in curve]
        high = [np.nan if s.high is None else 100 * s.high for s in curve]
        slo.fill_between(SLO_SCALES, low, high, color=style.colour, alpha=0.12, linewidth=0)
    slo.set_xticks(SLO_SCALES)
    slo.set_xlabel("SLO scale")
    slo.set_ylabel("requests over the SLO (%)")
    slo.set_ylim(bottom=0)
    _legend_above(figure, grid[0][0])
    reference = workload.reference
    caption = (
        f"Scale 1: the lowest median of a baseline, TTFT {_seconds(reference.ttft_s)} ({reference.ttft_policy}) and"
        f" TPOT {_seconds(reference.tpot_s)} ({reference.tpot_policy}). A request is over the SLO with either, or if it"
        " was not served. Medians over repetitions; whiskers and bands from the lowest to the highest."
    )
    return Drawn(workload.name, "latency", "latency and SLO violations", caption, figure)


def _bars(
    axis: "Axes",
    contestants: Sequence[Contestant],
    what: _Latency,
    look: dict[str, Style],
    percentiles: Sequence[tuple[str, str]] = _PERCENTILES,
) -> None:
    width = 0.8 / len(contestants)
    for index, c in enumerate(contestants):
        spreads = [c.spread(_summary(what.field, field)) for _, field in percentiles]
        at = np.arange(len(percentiles)) + (index - (len(contestants) - 1) / 2) * width
        middles = np.array([np.nan if s.middle is None else s.middle for s in spreads]) * what.unit
        low = np.array([0.0 if s.low is None or s.middle is None else s.middle - s.low for s in spreads]) * what.unit
        high = np.array([0.0 if s.high is None or s.middle is None else s.high - s.middle for s in spreads]) * what.unit
        style = look[c.label]
        axis.bar(at, middles, width * 0.92, yerr=[low, high], color=style.colour, error_kw=_WHISKERS, label=c.label)
    axis.set_xticks(range(len(percentiles)), [name for name, _ in percentiles])
    axis.grid(visible=False, axis="x")


def _summary(what: str, field: str) -> Callable[[PolicyResult], float | None]:
    return lambda result: getattr(getattr(result, what), field)


# ---------------------------------------------------------------- figure 14


def ablation_steps(workload: WorkloadStudy) -> list[Contestant]:
    """The steps of the ablation in their order, if all of them were run; else none."""
    by_label = {c.label: c for c in workload.contestants}
    labels = [spec.label for spec in parse_policies(",".join(ABLATION))]
    return [by_label[label] for label in labels] if all(label in by_label for label in labels) else []


def _ablation(workload: WorkloadStudy, steps: list[Contestant], look: dict[str, Style]) -> Drawn:
    figure, grid = _new(1, 3, _WIDE, 3.4, sharex=False)
    for axis, what in zip(grid[0], _LATENCIES, strict=False):
        _bars(axis, steps, what, look, ABLATION_PERCENTILES)
        what.scale(axis)
    bubbles = grid[0][2]
    for index, c in enumerate(steps):
        spread = c.spread(lambda r: r.bubble_fraction)
        if spread.middle is not None and spread.low is not None and spread.high is not None:
            around = [[100 * (spread.middle - spread.low)], [100 * (spread.high - spread.middle)]]
            bubbles.bar(index, 100 * spread.middle, 0.6, yerr=around, color=look[c.label].colour, error_kw=_WHISKERS)
    bubbles.set_xticks(range(len(steps)), [c.label.replace(" exchange", "\nexchange") for c in steps], fontsize=8)
    bubbles.grid(visible=False, axis="x")
    bubbles.set_ylabel("idle though there was work (%)")
    _legend_above(figure, grid[0][0])
    caption = (
        "What each step adds: dropping with KV and activations in one queue and microbatches of equal token counts;"
        " exchange in chunks behind activations; microbatches of equal cost. Right: the share of the stages' time in"
        " which they did not execute although there was work. Medians over repetitions, whiskers from the lowest to the"
        " highest."
    )
    return Drawn(workload.name, "ablation", "ablation", caption, figure)


# ---------------------------------------------------------------- figures 16 and 17


def _long_run(workload: WorkloadStudy, look: dict[str, Style]) -> Drawn:
    """The best baseline beside every variant of ours: with and without restore, for one."""
    ours = [c for c in workload.contestants if c.is_ours]
    rivals = [c for c in workload.contestants if not c.is_ours and c.spread(_summary("ttft_s", "p99")).middle]
    best = sorted(rivals, key=lambda c: c.spread(_summary("ttft_s", "p99")).middle or 0.0)[:1]
    shown = [*best, *ours]
    figure, grid = _new(len(shown), 2, _WIDE, 0.6 + 2.0 * len(shown), sharex=True)
    edges = np.linspace(0, _end_s(workload), 2 * _WINDOWS + 1)
    lowest, highest = _ttft_range(workload)
    for row, c in zip(grid, shown, strict=True):
        _ttft_scatter(row[0], c, look[c.label])
        row[0].set_ylim(lowest / 1.5, highest * 2)
        served = [(r.planned_s, 1e3 * r.tpot_s) for r in c.first.requests if r.tpot_s is not None]
        if served:
            row[1].scatter(*zip(*served, strict=True), s=14, color=look[c.label].colour, alpha=0.75, linewidths=0)
        row[1].set_ylabel("TPOT (ms)")
        row[1].set_ylim(bottom=0)
        for axis in row:
            _shade(axis, c.first)
            axis.set_xlim(0, float(edges[-1]))
    top = max(row[1].get_ylim()[1] for row in grid)
    for row in grid:
        row[1].set_ylim(0, 1.05 * top)
    for axis in grid[-1]:
        axis.set_xlabel("arrival, time since the start (s)")
    caption = "Each dot is a request. Shaded: parameters are dropped. First repetition."
    return Drawn(workload.name, "run", "the whole run", caption, figure)


def _extreme(workload: WorkloadStudy, look: dict[str, Style]) -> Drawn:
    figure, grid = _new(2, 1, 8.0, 5.4, sharex=True)
    rate, ttft = grid[0][0], grid[1][0]
    end_s = _end_s(workload)
    _rate(rate, workload.contestants[0].first, end_s)
    edges = np.linspace(0, end_s, _WINDOWS + 1)
    for c in workload.contestants:
        style = look[c.label]
        ttft.plot(*_windowed_ttft(c.first, edges), color=style.colour, linestyle=style.line, label=c.label)
        at_s = first_violation_s(c.first, workload.reference, EXTREME_SCALE)
        if at_s is not None:
            ttft.axvline(at_s, color=style.colour, linestyle=style.line, linewidth=1, alpha=0.8)
    if workload.reference.ttft_s is not None:
        ttft.axhline(EXTREME_SCALE * workload.reference.ttft_s, color=GREY, linewidth=1)
    _logarithmic(ttft)
    ttft.set_ylabel("mean TTFT (s)")
    ttft.set_xlabel("time since the start (s)")
    ttft.set_xlim(0, end_s)
    _legend_above(figure, ttft)
    caption = (
        f"A burst repeated until memory is out. Vertical: arrival of the first request whose TTFT exceeds"
        f" {EXTREME_SCALE:g} times that of the best baseline (horizontal). First repetition."
    )
    return Drawn(workload.name, "extreme", "time until the first violation", caption, figure)


# ---------------------------------------------------------------- shared


def _shade(axis: "Axes", result: PolicyResult) -> None:
    for begin_s, end_s, _ in merged_spans(result):
        axis.axvspan(begin_s, end_s, color=GREY, alpha=0.15, linewidth=0, zorder=0)


def _end_s(workload: WorkloadStudy) -> float:
    return max(1.0, *(c.first.duration_s for c in workload.contestants))


def _legend_above(figure: "Figure", axis: "Axes") -> None:
    """One for all panels: the entries of `axis`."""
    handles, labels = axis.get_legend_handles_labels()
    per_row = max(2, int(figure.get_figwidth() / 2.2))
    figure.legend(handles, labels, loc="outside upper center", ncols=min(per_row, len(labels)), handlelength=2.4)


def _logarithmic(axis: "Axes", subs: Sequence[float] = (1.0, 2.0, 5.0)) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=subs))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())


def _seconds(value_s: float | None) -> str:
    return "-" if value_s is None else f"{value_s * 1e3:.1f} ms"
