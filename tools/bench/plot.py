"""Draws a result over time. matplotlib comes with the `bench` extra and is imported only here."""

# pyright: reportUnknownMemberType=false

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ballast.common.errors import ConfigError
from ballast.common.extras import lacking
from tools.bench.records import RequestOutcome
from tools.bench.results import BenchResult, PolicyResult
from tools.bench.style import BLUE, GREEN, GREY, MIB, ORANGE, RC, VERMILION

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_REPORT_S = 0.2  # time until all workers have reported their capacity after a transition
_WIDE, _NARROW = 6.0, 4.4  # width of a column in inches: with up to two columns, and with more
_FAILURE_MARKS = {
    RequestOutcome.REFUSED: "refused",
    RequestOutcome.DEADLINE: "over its deadline",
    RequestOutcome.FAILED: "failed",
}


def plot_result(result: BenchResult, path: Path) -> None:
    """Draw request rate, KV demand, TTFT and load over time, one column per policy. The path's suffix is the format.

    Periods with groups of several members, whose parameters are dropped, are grey; transitions are darker.

    Raises:
        ConfigError: matplotlib is not installed, the format is unknown or the file cannot be written.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise lacking("--plot", "matplotlib", "bench") from error
    with mpl.rc_context(RC):
        count = len(result.policies)
        figure = Figure(figsize=(max(8.0, (_WIDE if count <= 2 else _NARROW) * count), 10.0), layout="constrained")
        axes: list[list[Axes]] = figure.subplots(4, count, sharex=True, sharey="row", squeeze=False).tolist()
        end_s = max((1.0, *(policy.duration_s for policy in result.policies.values())))
        for column, (name, policy) in enumerate(result.policies.items()):
            _draw_policy([row[column] for row in axes], policy, end_s)
            if count > 1:
                axes[0][column].set_title(name, pad=14)
        for row in (0, 1, 3):
            axes[row][0].set_ylim(bottom=0)  # last, because it freezes the axis limits that the columns of a row share
        figure.suptitle(_title(result), fontsize=11)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=130)
        except (OSError, ValueError) as error:
            raise ConfigError(str(path), f"the figure cannot be written: {error}") from error


def _title(result: BenchResult) -> str:
    trace = result.trace
    title = f"{Path(trace.source).name}: {trace.request_count} requests, {trace.describe_scales()}"
    return title if result.complete else title + " (interrupted)"


def _draw_policy(axes: "list[Axes]", policy: PolicyResult, end_s: float) -> None:
    """Draw one policy's column. `end_s`: the end of all policies' time axes."""
    rate, memory, ttft, load = axes
    _draw_rate(rate, policy, end_s)
    _draw_memory(memory, policy)
    _draw_ttft(ttft, policy)
    _draw_load(load, policy)
    load.set_xlabel("time since the start (s)")
    spans = merged_spans(policy)
    for axis in axes:
        axis.set_xlim(0, end_s)
        for begin_s, until_s, _ in spans:
            axis.axvspan(begin_s, until_s, color=GREY, alpha=0.13, linewidth=0, zorder=0)
        for transition in policy.transitions:
            axis.axvline(transition.at_s, color=GREY, linewidth=0.8, linestyle=":")
            if transition.duration_s:
                over_s = transition.at_s + transition.duration_s
                axis.axvspan(transition.at_s, over_s, color=GREY, alpha=0.3, linewidth=0, zorder=0)
    _name_groups(rate, spans)
    _name_transitions(memory, policy)


Span = tuple[float, float, str]


def merged_spans(policy: PolicyResult) -> list[Span]:
    """(begin, end, group sizes as text) of periods with groups of several members, at the samples' resolution.

    A period begins with its transition if one is known.
    """
    spans: list[Span] = []
    begins_s = {t.epoch: t.at_s for t in policy.transitions}
    series = policy.series
    names = ["+".join(map(str, sizes)) if max(sizes, default=1) > 1 else "" for sizes in series.group_sizes]
    for index, name in enumerate(names):
        end_s = series.at_s[index + 1] if index + 1 < len(names) else policy.duration_s
        if not name:
            continue
        if spans and index and names[index - 1] == name:
            spans[-1] = (spans[-1][0], end_s, name)
        else:
            spans.append((begins_s.get(series.epoch[index], series.at_s[index]), end_s, name))
    return spans


def settled_capacity(policy: PolicyResult) -> tuple[list[float], list[int]]:
    """(times in s, KV capacities in bytes) of the samples that were not taken during a transition.

    During a transition, a leader reports the guaranteed capacity of its smallest stage, which is often lower than
    before and after.
    """
    spans = [
        (t.at_s, t.at_s + t.duration_s + _REPORT_S)
        for t in policy.transitions
        if t.kind is not None and t.duration_s is not None
    ]
    series = policy.series
    settled = [
        (at_s, capacity_bytes)
        for at_s, capacity_bytes in zip(series.at_s, series.kv_capacity_bytes, strict=True)
        if not any(begin_s <= at_s <= end_s for begin_s, end_s in spans)
    ]
    return [at_s for at_s, _ in settled], [capacity_bytes for _, capacity_bytes in settled]


def _name_groups(axis: "Axes", spans: list[Span]) -> None:
    """Write the group sizes above the first panel."""
    for begin_s, _, name in spans:
        axis.annotate(
            f"parameters dropped, groups of {name}",
            (begin_s, 1.0),
            xycoords=axis.get_xaxis_transform(),
            xytext=(0, 2),
            textcoords="offset points",
            va="bottom",
            fontsize=8,
            color=GREY,
        )


def _name_transitions(axis: "Axes", policy: PolicyResult) -> None:
    """Label each transition with its kind."""
    for transition in policy.transitions:
        if transition.kind is None:
            continue
        axis.annotate(
            transition.kind,
            (transition.at_s + (transition.duration_s or 0.0), 0.9),  # below the capacity line
            xycoords=axis.get_xaxis_transform(),
            xytext=(3, -3),
            textcoords="offset points",
            va="top",
            fontsize=8,
            color=GREY,
        )


def _draw_rate(axis: "Axes", policy: PolicyResult, end_s: float) -> None:
    width_s = max(1.0, round(end_s / 75))
    edges = np.arange(0, end_s + 2 * width_s, width_s)
    counts, _ = np.histogram([r.planned_s for r in policy.requests], edges)
    axis.stairs(counts / width_s, edges, fill=True, color=BLUE, alpha=0.7)
    axis.set_ylabel("requests/s")


def _draw_memory(axis: "Axes", policy: PolicyResult) -> None:
    series = policy.series
    settled_s, capacity_bytes = settled_capacity(policy)
    axis.step(settled_s, np.array(capacity_bytes) / MIB, where="post", color=GREY, linestyle="--", label="capacity")
    axis.plot(series.at_s, np.array(series.kv_demand_bytes) / MIB, color=VERMILION, label="wanted")
    axis.fill_between(series.at_s, np.array(series.kv_used_bytes) / MIB, color=BLUE, alpha=0.3, label="used")
    axis.set_ylabel("KV cache (MiB)")
    _legend_above(axis)


def _draw_ttft(axis: "Axes", policy: PolicyResult) -> None:
    finished = [(r.planned_s, r.first_token_s - r.planned_s) for r in policy.requests if r.first_token_s is not None]
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_ylabel("TTFT (s)")
    if not finished:
        return
    axis.scatter(*zip(*finished, strict=True), s=9, color=BLUE, alpha=0.7, linewidths=0, label="one request")
    for value_s, label, style in ((policy.ttft_s.p50, "median", "-"), (policy.ttft_s.p99, "p99", "--")):
        if value_s is not None:
            axis.axhline(value_s, color=VERMILION, linewidth=1, linestyle=style, label=label)
    top_s = max(ttft_s for _, ttft_s in finished)
    marks = ("x", "v", "s")
    for (outcome, label), mark in zip(_FAILURE_MARKS.items(), marks, strict=True):
        at_s = [r.planned_s for r in policy.requests if r.outcome is outcome]
        if at_s:
            axis.scatter(at_s, [2 * top_s] * len(at_s), s=18, color=ORANGE, marker=mark, label=label)
    _legend_above(axis)


def _draw_load(axis: "Axes", policy: PolicyResult) -> None:
    series = policy.series
    axis.plot(series.at_s, series.running_count, color=GREEN, label="running")
    axis.plot(series.at_s, series.waiting_count, color=ORANGE, linestyle="--", label="waiting")
    axis.set_ylabel("requests")
    _legend_above(axis)


def _legend_above(axis: "Axes") -> None:
    axis.legend(loc="lower right", bbox_to_anchor=(1.0, 0.98), ncols=3, borderaxespad=0.0, handlelength=1.6)
