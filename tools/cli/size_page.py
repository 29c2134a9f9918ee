"""The HTML page and the figure of `ballast size`, which show the share of requests in time by number of GPUs."""

# matplotlib leaves some arguments untyped.
# pyright: reportUnknownMemberType=false

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from ballast.common.errors import ConfigError
from sim.jobs.sizing import ClusterSize, Column
from tools.bench.slo import Slo
from tools.bench.style import GREY, RC, Style, styles

_WIDTH, _HEIGHT, _LEFT, _BELOW, _ABOVE = 640.0, 300.0, 46.0, 44.0, 14.0
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --dim: #666; --line: #ddd; --paper: #fff; }
@media (prefers-color-scheme: dark) { :root { --ink: #eee; --dim: #aaa; --line: #444; --paper: #161616; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 46rem;
  margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: .35rem .6rem; border-bottom: 1px solid var(--line); text-align: right; }
th:first-child { text-align: left; font-weight: normal; color: var(--dim); }
tr.first td { font-size: 1.4rem; font-weight: 600; }
svg { width: 100%; height: auto; margin-top: 1rem; }
text { fill: var(--dim); font-size: 13px; }
footer { color: var(--dim); font-size: .85rem; }
"""


class SizeRow(NamedTuple):
    name: str
    cells: tuple[str, ...]  # one per policy


def page(title: str, words: str, names: Sequence[str], rows: Sequence[SizeRow], found: ClusterSize, slo: Slo) -> str:
    """The result as a self-contained HTML page."""
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(
        f"<tr{' class=first' if number == 0 else ''}><th>{escape(row.name)}</th>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in row.cells)
        + "</tr>\n"
        for number, row in enumerate(rows)
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{_STYLE}</style></head><body>
<h1>{escape(title)}</h1>
<p>{escape(words)}</p>
<div class="wide"><table><thead><tr><th></th>{head}</tr></thead>
<tbody>{body}</tbody></table></div>
{_svg(names, found, slo)}
<footer>{found.request_count:,} requests in {found.span_s:.0f} s, simulated by <code>ballast size</code> with the
deciding code of the services. Open marks: the run ended when the goal was missed for certain; the share is at most
that.</footer>
</body></html>
"""


def _points(column: Column) -> list[tuple[int, float, bool]]:
    """(number of GPUs, percentage of requests in time, whether that is only an upper bound) of each run."""
    return [(run.gpu_count, 100.0 * run.met_share, run.ended_early_s is not None) for run in column.runs]


def _range(found: ClusterSize, slo: Slo) -> tuple[int, int, float]:
    """(fewest GPUs tried, most GPUs tried, lowest percentage to show)."""
    points = [point for column in found.columns for point in _points(column)]
    gpus = [gpu_count for gpu_count, _, _ in points]
    least = min(100.0 * slo.share - 1.0, *(percent for _, percent, _ in points))
    return min(gpus), max(gpus), max(0.0, least - 0.5)


def _styles(found: ClusterSize) -> list[Style]:
    chosen = styles((column.policy, column.policy.split(":")[0]) for column in found.columns)
    return [chosen[column.policy] for column in found.columns]


def _svg(names: Sequence[str], found: ClusterSize, slo: Slo) -> str:
    fewest, most, least = _range(found, slo)
    across, up = _WIDTH - _LEFT - 20.0, _HEIGHT - _BELOW - _ABOVE

    def at(gpu_count: float, percent: float) -> tuple[float, float]:
        x = _LEFT + across * (gpu_count - fewest + 0.5) / (most - fewest + 1)
        return x, _ABOVE + up * (100.0 - percent) / (100.0 - least)

    right, goal = _WIDTH - 20.0, at(fewest, 100.0 * slo.share)[1]
    parts = [
        f'<svg viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" role="img" aria-label="Requests in time by GPUs">',
        f'<line x1="{_LEFT}" x2="{right}" y1="{goal:.1f}" y2="{goal:.1f}" stroke="{GREY}" stroke-dasharray="4 3"/>',
        f'<text x="{_LEFT + 4}" y="{goal - 5:.1f}">goal: {100.0 * slo.share:g} %</text>',
        f'<line x1="{_LEFT}" x2="{_LEFT}" y1="{_ABOVE}" y2="{_HEIGHT - _BELOW}" stroke="{GREY}"/>',
        f'<line x1="{_LEFT}" x2="{_WIDTH - 20}" y1="{_HEIGHT - _BELOW}" y2="{_HEIGHT - _BELOW}" stroke="{GREY}"/>',
        f'<text x="{_LEFT - 6}" y="{_ABOVE + 5}" text-anchor="end">100 %</text>',
        f'<text x="{_LEFT - 6}" y="{_HEIGHT - _BELOW}" text-anchor="end">{least:.0f} %</text>',
    ]
    every = max(1, (most - fewest + 1) // 12)
    for gpu_count in range(fewest, most + 1, every):
        x = at(gpu_count, least)[0]
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BELOW + 17}" text-anchor="middle">{gpu_count}</text>')
    for number, (name, column, style) in enumerate(zip(names, found.columns, _styles(found), strict=True)):
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(g, percent) for g, percent, _ in _points(column)))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{style.colour}" stroke-width="2"/>')
        for gpu_count, percent, at_most in _points(column):
            x, y = at(gpu_count, percent)
            fill = "var(--paper)" if at_most else style.colour
            size = 7 if gpu_count == column.gpu_count else 4
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size}" fill="{fill}" stroke="{style.colour}" stroke-width="2"/>'
            )
        x = _LEFT + 10 + 190 * number
        parts.append(f'<circle cx="{x}" cy="{_HEIGHT - 9}" r="5" fill="{style.colour}"/>')
        parts.append(f'<text x="{x + 10}" y="{_HEIGHT - 4}">{escape(name)}</text>')
    parts.append(f'<text x="{_WIDTH - 20}" y="{_HEIGHT - 4}" text-anchor="end">GPUs</text></svg>')
    return "\n".join(parts)


def draw(found: ClusterSize, slo: Slo, title: str, names: Sequence[str], path: Path) -> None:
    """Draw the figure and write it to a file, in the format of its suffix.

    Raises:
        ConfigError: the file cannot be written.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with mpl.rc_context(RC):
        figure = Figure(figsize=(6.5, 3.4), layout="constrained")
        axes = figure.subplots()
        for name, column, style in zip(names, found.columns, _styles(found), strict=True):
            points = _points(column)
            gpus, percents = [g for g, _, _ in points], [percent for _, percent, _ in points]
            axes.plot(gpus, percents, color=style.colour, linestyle=style.line, label=name)
            for gpu_count, percent, at_most in points:
                size = 9 if gpu_count == column.gpu_count else 5
                face = "white" if at_most else style.colour
                axes.plot([gpu_count], [percent], style.mark, color=style.colour, markersize=size, markerfacecolor=face)
        axes.axhline(100.0 * slo.share, color=GREY, linewidth=1, linestyle=":")
        axes.set_ylim(_range(found, slo)[2], 100.2)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("GPUs (the large mark: what is needed; open: at most that share)")
        axes.set_ylabel("requests in time (%)")
        axes.set_title(title, fontsize=10)
        axes.legend()
        try:
            figure.savefig(path, dpi=150)
        except (OSError, ValueError) as error:
            raise ConfigError("--plot", f"{path}: {error}") from error
