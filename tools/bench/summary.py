"""`ballast bench plot`: summarises the results of `ballast bench overload` as a table, a JSON file and a figure per
workload.

The table has medians over the repetitions, with the range from lowest to highest if they differ.
"""

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from ballast.common.errors import ConfigError
from ballast.common.units import duration, share
from tools.bench.plot import merged_spans, plot_result
from tools.bench.progress import open_console
from tools.bench.records import RequestOutcome
from tools.bench.results import BenchResult, PolicyResult
from tools.bench.study import Contestant, Spread, Study, WorkloadStudy, read_study
from tools.bench.style import require_matplotlib

if TYPE_CHECKING:
    from argparse import _SubParsersAction  # pyright: ignore[reportPrivateUsage] -- it has no public name


@dataclass(frozen=True, slots=True)
class SummaryColumn:
    """A figure of each policy on a workload. `key`: its name in the JSON file, with the unit."""

    title: str
    key: str
    of: Callable[[WorkloadStudy, Contestant], Spread]
    text: Callable[[float | None], str]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _column(
    title: str, key: str, of: Callable[[PolicyResult], float | None], text: Callable[[float | None], str] = duration
) -> SummaryColumn:
    return SummaryColumn(title, key, lambda _, contestant: contestant.spread(of), text)


def _slo(scale: int) -> SummaryColumn:
    key = f"over_slo_x{scale}_share"
    return SummaryColumn(f"over SLO x{scale}", key, lambda workload, one: workload.violations(one, scale), share)


def _done(kind: str) -> Callable[[PolicyResult], float]:
    return lambda result: float(sum(t.kind == kind and t.phase == "done" for t in result.transitions))


COLUMNS = (
    _column("TTFT P50", "ttft_p50_s", lambda r: r.ttft_s.p50),
    _column("TTFT P99", "ttft_p99_s", lambda r: r.ttft_s.p99),
    _column("TTFT P99.9", "ttft_p999_s", lambda r: r.ttft_s.p999),
    _column("TPOT P50", "tpot_p50_s", lambda r: r.tpot_s.p50),
    _column("TPOT P99", "tpot_p99_s", lambda r: r.tpot_s.p99),
    _column("tokens/s", "output_tokens_per_s", lambda r: r.throughput_tokens_per_s, _number),
    _slo(5),
    _slo(10),
    SummaryColumn("KV demand", "mean_kv_demand_share", lambda workload, one: workload.demand_fraction(one), share),
    _column("preemptions", "preemptions", lambda r: _preemptions(r), _number),
    _column("drops", "drops", _done("drop"), _number),
    _column("restores", "restores", _done("restore"), _number),
    _column("dropped for", "dropped_s", lambda r: sum(end - begin for begin, end, _ in merged_spans(r))),
    _column("bubbles", "bubble_share", lambda r: r.bubble_fraction, share),
    _column(
        "not served", "not_served", lambda r: float(r.request_count - r.outcomes[RequestOutcome.FINISHED]), _number
    ),
)


def _preemptions(result: PolicyResult) -> float | None:
    """Number of preemptions during the replay; the workers' counters also include the warm-up."""
    counts = result.series.preemptions_total
    return float(counts[-1] - counts[0]) if counts else None


def text_table(study: Study) -> str:
    """The figures as Markdown, one table per workload."""
    return "\n\n".join(f"### {workload.name}\n\n{_table(workload)}" for workload in study.workloads) + "\n"


def _table(workload: WorkloadStudy) -> str:
    head = ["policy", "runs", *(column.title for column in COLUMNS)]
    rows = [
        [c.label, str(len(c.runs)), *(_ranged(column.of(workload, c), column.text) for column in COLUMNS)]
        for c in workload.contestants
    ]
    reference = workload.reference
    slo = (
        f"SLO x1: TTFT {duration(reference.ttft_s)} ({reference.ttft_policy}), TPOT {duration(reference.tpot_s)}"
        f" ({reference.tpot_policy}), the lowest medians of policies other than drop."
    )
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", slo])


def _ranged(spread: Spread, text: Callable[[float | None], str]) -> str:
    low, high = text(spread.low), text(spread.high)
    return text(spread.middle) if low == high else f"{text(spread.middle)} ({low} – {high})"


def _medians(workload: WorkloadStudy) -> Table:
    """A table of medians for the terminal, with a column per policy."""
    table = Table("", *(c.label for c in workload.contestants), title=workload.name, title_justify="left")
    for column in COLUMNS:
        table.add_row(column.title, *(column.text(column.of(workload, c).middle) for c in workload.contestants))
    return table


def as_json(study: Study) -> Mapping[str, Any]:
    """The figures as workload -> policy -> figure -> median, lowest and highest value, and number of values."""
    return {
        workload.name: {
            c.label: {column.key: asdict(column.of(workload, c)) for column in COLUMNS} for c in workload.contestants
        }
        for workload in study.workloads
    }


def side_by_side(workload: WorkloadStudy) -> BenchResult:
    """The first repetitions of all policies combined into one result."""
    return workload.sample.model_copy(update={"policies": {c.label: c.first for c in workload.contestants}})


def add_plot_parser(commands: "_SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "plot",
        help="create tables and figures of the results of `bench overload`",
        description="Reads only result files. Writes table.md, comparison.json with the same values, and for each"
        " workload WORKLOAD.png: load, memory and waits over time, one column per policy.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("--results", type=Path, required=True, metavar="DIR", help="output folder of `bench overload`")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="output folder")


def run(args: argparse.Namespace) -> int:
    require_matplotlib("bench plot")
    console = open_console()
    study = read_study(args.results)
    table = text_table(study)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "table.md").write_text(table)
        (args.out / "comparison.json").write_text(json.dumps(as_json(study), indent=1) + "\n")
    except OSError as error:
        raise ConfigError(str(args.out), f"cannot be written: {error.strerror}") from error
    for workload in study.workloads:
        plot_result(side_by_side(workload), args.out / f"{workload.name}.png")
    for workload in study.workloads:
        console.print(_medians(workload))
    if study.incomplete:
        console.print(f"{len(study.incomplete)} interrupted runs are left out")
    console.print(f"wrote table.md, comparison.json and {len(study.workloads)} figures into {args.out}")
    return 0
