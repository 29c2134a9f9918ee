"""`ballast size`: finds the fewest GPUs that meet a latency goal on a trace, with and without parameter dropping."""

import argparse
import dataclasses
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from ballast.common.arguments import figure_file, output_file
from ballast.common.errors import ConfigError
from ballast.common.units import counted, duration
from sim.hardware import find_gpu, gpus, models
from sim.jobs.scenarios import job_of
from sim.jobs.sizing import BOTH, DROP, PARK, ClusterSize, Column, SizingRun, size
from sim.scenario import make_scenario
from tools.bench.progress import open_console
from tools.bench.results import STANDARD_OUTPUT
from tools.bench.slo import Slo
from tools.bench.style import require_matplotlib
from tools.cli.arguments import Commands, add_formats
from tools.cli.sim import RunDisplay
from tools.cli.size_page import SizeRow, draw, page

_FIELDS = (
    "quantization",
    "kv_cache_dtype",
    "lengths",
    "rate_scale",
    "burst_scale",
    "time_scale",
    "length_scale",
    "answer_scale",
    "limit",
    "seed",
)
_NAMES = {"recompute": "static", DROP: "with dropping", PARK: "with parking", BOTH: "with both"}
_LITTLE = 0.02  # savings below this fraction of the GPU-hours count as zero
_HOURS_A_MONTH = 730.0


def add_parser(subparsers: Commands) -> None:
    parser = subparsers.add_parser(
        "size",
        help="find the smallest number of GPUs for your traffic",
        description="Finds by simulation the smallest number of GPUs that meets a goal on a trace, with and without"
        " dropping parameters. A trace is a CSV of arrival_s,input_tokens,output_tokens, as written by"
        " `ballast record`, or a published file of BurstGPT, Azure or Mooncake.",
        epilog=f"Models: {', '.join(models())}. GPUs: {', '.join(gpus())}.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("trace", metavar="TRACE", help="trace with arrivals and token counts")
    parser.add_argument(
        "--model",
        required=True,
        metavar="NAME",
        help="a model in the list below; or a folder or org/name with a config.json",
    )
    add_formats(parser)
    parser.add_argument(
        "--gpu", required=True, metavar="NAME", help="a GPU in the list below; or FILE.yaml (docs/gpus.md)"
    )
    parser.add_argument(
        "--slo-ttft-s", type=float, default=2.0, metavar="S", help="goal for the time to first token (2)"
    )
    parser.add_argument(
        "--slo-tpot-s", type=float, metavar="S", help="goal for the time per output token (default: none)"
    )
    parser.add_argument(
        "--slo-share", type=float, default=0.99, metavar="X", help="share of requests that must meet the goal (0.99)"
    )
    parser.add_argument("--price", type=float, metavar="X", help="price of one GPU for an hour, in any currency")
    parser.add_argument(
        "--policy", default=f"recompute,{DROP}", metavar="NAMES", help="policies to compare (%(default)s)"
    )
    parser.add_argument(
        "--parking", action="store_true", help="also simulate parking of idle GPUs, alone and with drops"
    )
    parser.add_argument("--max-gpus", type=int, default=256, metavar="N", help="maximum number of GPUs to try (256)")
    parser.add_argument(
        "--rate-scale", type=float, metavar="X", help="factor on the number of requests, in the same pattern"
    )
    parser.add_argument(
        "--burst-scale", type=float, metavar="X", help="factor on the number of requests in the densest 30 s"
    )
    parser.add_argument("--time-scale", type=float, metavar="X", help="factor on arrival times; 0.5: twice as fast")
    parser.add_argument("--length-scale", type=float, metavar="X", help="factor on input and output tokens")
    parser.add_argument(
        "--answer-scale", type=float, metavar="X", help="factor on output tokens, instead of --length-scale"
    )
    parser.add_argument("--lengths", metavar="NAME", help="lengths of another data set, or of a file: longbench ...")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N requests of the trace")
    parser.add_argument("--seed", type=int, help="seed of all random draws (0)")
    parser.add_argument(
        "--json", type=output_file, metavar="OUT", help="output file for the result as JSON; -: standard output"
    )
    parser.add_argument(
        "--plot", type=figure_file, metavar="OUT.png", help="output file for a figure (needs matplotlib)"
    )
    parser.add_argument("--html", type=output_file, metavar="OUT.html", help="output file for a self-contained page")


def run(args: argparse.Namespace) -> int:
    """Search for the smallest clusters and print the result.

    Raises:
        ConfigError: the trace, the model, the GPU or the goal is invalid.
    """
    if args.plot is not None:
        require_matplotlib("--plot")
    if args.price is not None and not 0.0 < args.price < math.inf:
        raise ConfigError("--price", f"must be above 0, got {args.price:g}")
    slo = Slo(ttft_s=args.slo_ttft_s, tpot_s=args.slo_tpot_s, share=args.slo_share)
    find_gpu(args.gpu, "--gpu")  # for an error that names the flag
    changes = {name: getattr(args, name) for name in _FIELDS if getattr(args, name) is not None}
    policies = tuple(name.strip() for name in args.policy.split(",") if name.strip())
    policies += tuple(name for name in (PARK, BOTH) if args.parking and name not in policies)
    told = {"description": "", "trace": args.trace, "model": args.model, "cluster": f"1x{args.gpu}"}
    job = job_of(make_scenario({**told, "policies": policies, **changes}))
    console = open_console(stderr=args.json == STANDARD_OUTPUT)
    with RunDisplay(console, len(job.trace.requests)) as display:
        found = size(
            job,
            slo,
            args.max_gpus,
            lambda policy, gpu_count, ended, at_s: display(f"{policy}, {counted(gpu_count, 'GPU')}", ended, at_s),
            processes=os.cpu_count() or 1,
        )
    gpu, title = job.cluster.gpu.name, f"{Path(args.trace).name}: {job.model.name} on {job.cluster.gpu.name}"
    words, rows = in_words(found, slo, gpu, args.max_gpus, args.price), rows_of(found, args.price)
    console.print(_table(found, rows, title))
    console.print(Text(f"\n{words}"))
    if args.json is not None:
        _write(args.json, json.dumps(_as_json(found, args.price, words), indent=1) + "\n")
    if args.html is not None:
        _write(args.html, page(title, words, [name_of(c.policy) for c in found.columns], rows, found, slo))
    if args.plot is not None:
        draw(found, slo, title, [name_of(c.policy) for c in found.columns], args.plot)
    for path in (args.json, args.html, args.plot):
        if path not in (None, STANDARD_OUTPUT):
            console.print(f"wrote {path}")
    return 0


def name_of(policy: str) -> str:
    return _NAMES.get(policy, policy)


# ---------------------------------------------------------------- a table


def rows_of(found: ClusterSize, price: float | None) -> list[SizeRow]:
    """The rows of the result's table, with one cell per policy."""
    answers = [column.answer for column in found.columns]

    def row(name: str, cell: Callable[[SizingRun], str], missing: str = "-") -> SizeRow:
        return SizeRow(name, tuple(missing if run is None else cell(run) for run in answers))

    rows = [
        row("GPUs", lambda run: f"{run.gpu_count}", "more than tried"),
        row("GPU-hours of the trace", lambda run: f"{run.mean_on * found.span_s / 3600:.3g}"),
    ]
    if price is not None:
        rows.append(row("price of a month", lambda run: f"{run.mean_on * price * _HOURS_A_MONTH:,.0f}"))
    return [
        *rows,
        row("requests in time", lambda run: f"{run.met_share:.2%}"),
        row("first token, P99", lambda run: duration(run.ttft_p99_s)),
        row("further tokens, P50", lambda run: duration(run.tpot_p50_s)),
        row("drops", lambda run: f"{run.drop_count}"),
        SizeRow("with one instance less", tuple(map(_less, found.columns))),
    ]


def _less(column: Column) -> str:
    """Share of requests in time with the next smaller cluster that was tried, as text."""
    below = [run for run in column.runs if column.gpu_count is None or run.gpu_count < column.gpu_count]
    if not below:
        return "-"
    run = below[-1]
    return f"{'' if run.ended_early_s is None else 'at most '}{run.met_share:.1%} with {run.gpu_count}"


def _table(found: ClusterSize, rows: Sequence[SizeRow], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for column in found.columns:
        table.add_column(name_of(column.policy), justify="right")
    for row in rows:
        table.add_row(row.name, *row.cells)
    return table


# ---------------------------------------------------------------- words


def in_words(found: ClusterSize, slo: Slo, gpu: str, most: int, price: float | None) -> str:
    """The result as one paragraph, with figures from the search only."""
    sentences = [f"The goal: {slo}."]
    for column in found.columns:
        name = _NAMES.get(column.policy)
        way = f"With {column.policy}" if name is None else name[0].upper() + name[1:]
        answer = column.answer
        if answer is None:
            at_most = max((run.met_share for run in column.runs), default=0.0)
            sentences.append(f"{way}, {counted(most, 'GPU')} of type {gpu} do not suffice: {at_most:.1%} meet it.")
        else:
            sentences.append(f"{way}, {answer.gpu_count} {gpu} {'meets' if answer.gpu_count == 1 else 'meet'} it.")
    sentences += [_saved(found, price), _parked(found, price)]
    if cut := found.cut_count:
        what = "request exceeds" if cut == 1 else "requests exceed"
        were = "was" if cut == 1 else "were"
        sentences.append(f"{cut:,} {what} the model's maximum length and {were} shortened, so the real need is higher.")
    return " ".join(filter(None, sentences))


def _saved(found: ClusterSize, price: float | None) -> str:
    answers = {column.policy: column.answer for column in found.columns}
    ours = answers.get(DROP)
    others = {
        name: run for name, run in answers.items() if not name.startswith(DROP) and name != PARK and run is not None
    }
    if ours is None or not others:
        return ""
    name, best = min(others.items(), key=lambda item: (item[1].gpu_count, item[0]))
    against = "" if name == "recompute" else f" against {name}"
    if ours.gpu_count > best.gpu_count:
        return f"Dropping parameters saves nothing here: it needs {ours.gpu_count - best.gpu_count} more{against}."
    if ours.gpu_count == best.gpu_count:
        return f"Dropping parameters saves nothing here{against}. {_why(found)}"
    saved = best.gpu_count - ours.gpu_count
    money = "" if price is None else f", {saved * price * _HOURS_A_MONTH:,.0f} a month"
    part = f"{saved / best.gpu_count:.0%}{money}"
    told = f"Dropping parameters saves {saved} of {counted(best.gpu_count, 'GPU')} ({part}){against}."
    if ours.tpot_p50_s and best.tpot_p50_s and ours.tpot_p50_s > 1.05 * best.tpot_p50_s:
        told += (
            f" The cost: the median time per output token is {duration(ours.tpot_p50_s)} instead of"
            f" {duration(best.tpot_p50_s)}, as fewer GPUs do the same work."
        )
    return told


def _parked(found: ClusterSize, price: float | None) -> str:
    """A sentence that compares the GPU-hours with parking to those of GPUs that are always on; may be empty."""
    answers = {column.policy: column.answer for column in found.columns}
    static = answers.get("recompute")
    if static is None:
        return ""
    told: list[str] = []
    for policy, what in ((PARK, "parking"), (BOTH, "both together")):
        run = answers.get(policy)
        if run is None:
            continue
        saved = 1.0 - run.mean_on / static.mean_on
        if saved < _LITTLE:
            told.append(f"{what} saves none of the GPU-hours")
            continue
        money = "" if price is None else f", {(static.mean_on - run.mean_on) * price * _HOURS_A_MONTH:,.0f} a month"
        told.append(f"{what} saves {saved:.0%} of the GPU-hours of static{money}")
    words = ", and ".join(told)
    return f"{words[0].upper()}{words[1:]}." if words else ""


def _why(found: ClusterSize) -> str:
    bounds = found.bounds
    if bounds.memory < bounds.prompts:
        return (
            f"Compute is the bottleneck: prompts alone need {counted(bounds.prompts, 'instance')}, and running requests"
            f" fill the memory of {bounds.memory:.1f}."
        )
    return "The gained memory is less than that of one instance, or answers slow down by as much."


# ---------------------------------------------------------------- files


def _as_json(found: ClusterSize, price: float | None, words: str) -> dict[str, object]:
    return {
        "kind": "size",
        "words": words,
        "price": price,
        "gpus": {column.policy: column.gpu_count for column in found.columns},
        **dataclasses.asdict(found),
    }


def _write(path: Path, text: str) -> None:
    if path == STANDARD_OUTPUT:
        print(text, end="")
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(str(path), f"cannot be written: {error.strerror}") from error
