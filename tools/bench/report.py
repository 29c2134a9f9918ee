"""A comparison as a table, and as one HTML page that needs nothing but itself: figures are inside it.

matplotlib's stubs leave **kwargs without types, hence the comment below.
"""

# pyright: reportUnknownMemberType=false

import base64
import html
import io
import re
from collections.abc import Callable, Mapping, Sequence

from ballast.common.units import duration, human_bytes, share
from tools.bench.figures import ABLATION_PERCENTILES, Drawn, ablation_steps
from tools.bench.records import Outcome
from tools.bench.results import BenchResult, PolicyResult
from tools.bench.study import Contestant, Spread, Study, WorkloadStudy
from tools.bench.verdicts import verdicts

_DPI = 130
_PER_WORKLOAD = "device_memory_bytes"  # a setting that differs from workload to workload
COLUMNS = (
    "policy",
    "runs",
    "TTFT P50",
    "TTFT P99",
    "TTFT P99.9",
    "TPOT P50",
    "TPOT P99",
    "tokens/s",
    "over SLO x5",
    "over SLO x10",
    "KV demand",
    "preemptions",
    "transitions",
    "not served",
)


def rows_of(workload: WorkloadStudy) -> list[tuple[str, ...]]:
    """A row for each contestant, under `COLUMNS`: medians over repetitions, with the range where there are several."""
    return [_row(workload, c) for c in workload.contestants]


def _row(workload: WorkloadStudy, c: Contestant) -> tuple[str, ...]:
    return (
        c.label,
        str(len(c.runs)),
        _time(c.spread(lambda r: r.ttft_s.p50)),
        _time(c.spread(lambda r: r.ttft_s.p99)),
        _time(c.spread(lambda r: r.ttft_s.p999)),
        _time(c.spread(lambda r: r.tpot_s.p50)),
        _time(c.spread(lambda r: r.tpot_s.p99)),
        _number(c.spread(lambda r: r.throughput_tokens_per_s)),
        _share(workload.violations(c, 5)),
        _share(workload.violations(c, 10)),
        _share(workload.demand_fraction(c)),
        _number(c.spread(_preemptions)),
        _transitions(c.results),
        _number(c.spread(lambda r: float(r.request_count - r.outcomes.get(Outcome.FINISHED, 0)))),
    )


ABLATION_COLUMNS = (
    "step",
    "runs",
    *(f"{what} {name}" for what in ("TTFT", "TPOT") for name, _ in ABLATION_PERCENTILES),
    "bubbles",
)


def ablation_rows(workload: WorkloadStudy) -> list[tuple[str, ...]]:
    """Under `ABLATION_COLUMNS`; empty where it was not run."""
    return [
        (
            c.label,
            str(len(c.runs)),
            *(
                _time(c.spread(lambda r, of=of, field=field: getattr(getattr(r, of), field)))
                for of in ("ttft_s", "tpot_s")
                for _, field in ABLATION_PERCENTILES
            ),
            _share(c.spread(lambda r: r.bubble_fraction)),
        )
        for c in ablation_steps(workload)
    ]


def text_table(study: Study) -> str:
    """Markdown."""
    parts: list[str] = []
    for workload in study.workloads:
        tables = [_markdown(COLUMNS, rows_of(workload))]
        if steps := ablation_rows(workload):
            tables.append(_markdown(ABLATION_COLUMNS, steps))
        parts.append("\n\n".join([f"### {workload.name}", *tables, "\n".join(verdicts(workload))]))
    return "\n\n".join(parts) + "\n"


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def html_report(study: Study, drawn: Sequence[Drawn], svgs: Mapping[str, bytes]) -> str:
    """`svgs`: by the figures' names, as `files_of` makes them."""
    sections: list[str] = []
    for workload in study.workloads:
        figures = [one for one in drawn if one.workload == workload.name]
        sections.append(
            f"<h2>{html.escape(workload.name)}</h2>{_facts(workload)}{_table(COLUMNS, rows_of(workload))}"
            + (_table(ABLATION_COLUMNS, steps) if (steps := ablation_rows(workload)) else "")
            + "".join(f"<p>{html.escape(line)}</p>" for line in verdicts(workload))
            + "".join(_figure(one, svgs[one.name]) for one in figures)
        )
    sample = study.workloads[0].sample
    incomplete = f"<p>{len(study.incomplete)} interrupted runs are left out.</p>" if study.incomplete else ""
    body = f"<h1>Overload policies compared</h1>{incomplete}{''.join(sections)}{_configuration(study, sample)}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Overload policies compared</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_CSS}</style></head>'
        f"<body><main>{body}</main></body></html>\n"
    )


def files_of(one: Drawn) -> dict[str, bytes]:
    """The figure as files, by suffix; the same figure gives the same bytes."""
    svg = _drawn(one, "svg", {"Date": None})
    one.figure.set_layout_engine("none")  # everything is in its place now, and finding it takes the most time
    return {"svg": svg, "png": _drawn(one, "png", {})}


def _drawn(one: Drawn, form: str, metadata: dict[str, None]) -> bytes:
    buffer = io.BytesIO()
    one.figure.savefig(buffer, format=form, dpi=_DPI, metadata=metadata)
    return buffer.getvalue()


def _figure(one: Drawn, svg: bytes) -> str:
    data = base64.b64encode(svg).decode()
    return (
        f"<figure><figcaption><b>{html.escape(one.title)}.</b> {html.escape(one.caption)}</figcaption>"
        f'<img alt="{html.escape(one.title)}" src="data:image/svg+xml;base64,{data}"></figure>'
    )


def _facts(workload: WorkloadStudy) -> str:
    trace, facts = workload.sample.trace, workload.sample.comparison
    assert facts is not None, "a study is made of such results"
    lengths = html.escape(trace.describe_lengths())
    memory_bytes = workload.sample.config.cluster.get(_PER_WORKLOAD)
    memory = f" of {human_bytes(memory_bytes)} each" if isinstance(memory_bytes, int) else ""
    return (
        f"<p>{html.escape(trace.source)}: {trace.request_count} requests over {trace.span_s:.0f} s, rate"
        f" x{trace.rate_scale:.3g}, lengths {lengths}"
        f" ({trace.clamped_count} cut to the maximum). All workers{memory} hold"
        f" {human_bytes(workload.undropped_kv_bytes)} of KV beside all parameters; forecast demand"
        f" {facts.forecast_demand_fraction:.0%} of that on average.</p>"
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{_cell(text)}</td>" for text in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(text: str) -> str:
    """A figure is not torn from its unit."""
    return html.escape(re.sub(r"(?<=\d) (?=(?:s|ms|us)\b)", "\N{NO-BREAK SPACE}", text))


def _configuration(study: Study, sample: BenchResult) -> str:
    environment, model = sample.environment, sample.model
    rows: list[tuple[str, str]] = [
        ("runs", str(study.files)),
        ("processor", f"{environment.cpu}, {environment.core_count} cores, {human_bytes(environment.memory_bytes)}"),
        ("system", f"{environment.platform}, Python {environment.python}"),
        ("packages", ", ".join(f"{name} {version}" for name, version in environment.packages.items())),
        ("source", f"{environment.git_commit or 'unknown'}{' with changes' if environment.git_dirty else ''}"),
        (
            "model",
            f"{model.name}: {model.architecture}, {model.parameter_count:,} parameters, {model.dtype},"
            f" {model.kv_bytes_per_token} bytes of KV for each token",
        ),
        ("seed", str(sample.config.seed)),
        ("deadline", f"{sample.config.deadline_s:g} s"),
        *((name, str(value)) for name, value in sample.config.cluster.items() if name != _PER_WORKLOAD),
    ]
    cells = "".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in rows)
    return f'<h2>Configuration and machine</h2><table class="facts"><tbody>{cells}</tbody></table>'


def _time(spread: Spread) -> str:
    return _ranged(spread, duration)


def _share(spread: Spread) -> str:
    return _ranged(spread, share)


def _number(spread: Spread) -> str:
    return _ranged(spread, lambda value: "-" if value is None else f"{value:,.0f}")


def _ranged(spread: Spread, form: Callable[[float | None], str]) -> str:
    middle = form(spread.middle)
    low, high = form(spread.low), form(spread.high)
    return middle if low == high else f"{middle} ({low} – {high})"


def _preemptions(result: PolicyResult) -> float | None:
    """During the replay: the workers count from their start."""
    counts = result.series.preemptions_total
    return float(counts[-1] - counts[0]) if counts else None


def _transitions(results: Sequence[PolicyResult]) -> str:
    kinds = [t.kind for r in results for t in r.transitions if t.phase == "done" and t.kind]
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)) or "0"


_CSS = """
body{font:15px/1.5 system-ui,sans-serif;color:#111;background:#fff;margin:0}
main{max-width:1180px;margin:0 auto;padding:24px}
h2{margin-top:2.2em;border-bottom:1px solid #ccc}
.wide{overflow-x:auto;margin:.8em 0}
table{border-collapse:collapse;font-size:13px}
th,td{border:1px solid #ccc;padding:4px 8px;text-align:right;vertical-align:top}
th:first-child,td:first-child{text-align:left}
thead th{background:#f2f2f2}
.facts td{text-align:left;word-break:break-word}
figure{margin:1.6em 0}
figcaption{margin-bottom:.4em}
img{max-width:100%;height:auto}
@page{margin:12mm}
@media print{
main{max-width:none;padding:0}
h2{break-before:page}
h2:first-of-type{break-before:auto}
figure,tr{break-inside:avoid}
table{font-size:8.5px}
th,td{padding:2px 3px}
.wide{overflow:visible}
}
"""
