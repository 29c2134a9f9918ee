"""How well the cost model predicts what batches take, beside counting tokens: figure 15 of KunServe (EuroSys '26).

    python -m benchmarks.cost_model [--rounds 3] [--max-num-batched-tokens 1024] [--out FOLDER]

Fits on a grid and predicts batches held out, on the 35 M-parameter model of the throughput benchmark, float32, one
thread. Times are processor time of the thread, the least of several rounds: other load on the machine only adds.
Writes a figure and the measured batches (JSON) beside the earlier results.
"""

# pyright: reportUnknownMemberType=false

import argparse
import json
import os
import tempfile
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ballast.bench.environment import describe_environment
from ballast.model.tiny import make_preset
from services.worker.engine.load import load_engine
from services.worker.policy.cost import Chunk
from services.worker.policy.cost_fit import Form, Sample, StageCosts, errors_of, has_prefix, summarise
from services.worker.profiling.measure import Measured, Options, measure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RESULTS = Path(__file__).parent / "results"
MEMORY_BYTES = 900 << 20
SWEEP = (24, 48, 80, 160, 224, 320, 400, 480, 640, 800, 960, 1280, 1600, 1920)
SWEEP_PREFIX = 1000
NAMES = {Form.EXTENDED: "ours", Form.PAPER: "ours, paper's form", Form.TOKEN_COUNT: "token count"}
COLOURS = {Form.EXTENDED: "#0072B2", Form.PAPER: "#009E73", Form.TOKEN_COUNT: "#D55E00"}
MARKERS = {Form.EXTENDED: "o", Form.PAPER: "^", Form.TOKEN_COUNT: "s"}
DASHES = {Form.EXTENDED: "-", Form.PAPER: ":", Form.TOKEN_COUNT: "--"}


def run(options: Options, console: Console) -> Measured:
    torch.set_num_threads(1)
    sweep = [(Chunk(prefix, count),) for prefix in (0, SWEEP_PREFIX) for count in SWEEP]
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with (
        tempfile.TemporaryDirectory(prefix="ballast-bench-") as folder,
        Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as bar,
    ):
        model_dir = make_preset("bench", Path(folder) / "model")
        task = bar.add_task("", total=None)
        with load_engine(model_dir, dtype="float32", device_memory_bytes=MEMORY_BYTES) as engine:
            return measure(
                engine,
                options,
                lambda done, total, what: bar.update(task, completed=done, total=total, description=what),
                sweep,
            )


def of_kind(samples: list[Sample], *, prefix: bool) -> list[Sample]:
    return [sample for sample in samples if has_prefix(sample.chunks) == prefix]


def table_of(measured: Measured, fits: dict[Form, StageCosts]) -> Table:
    kinds = {prefix: len(of_kind(measured.held_out, prefix=prefix)) for prefix in (False, True)}
    table = Table(
        title=f"Error of the prediction on {kinds[False]} batches without prefix and {kinds[True]} with, held out;"
        f" fitted on {len(measured.samples)}",
        caption=measured.clock,
    )
    for heading in ("", "mean", "p90", "max", "mean, prefix", "p90, prefix", "max, prefix"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for form, costs in fits.items():
        errors = [measured.errors(costs, prefix=prefix) for prefix in (False, True)]
        table.add_row(NAMES[form], *(f"{value:.1%}" for e in errors for value in (e.mean, e.p90, e.max)))
    return table


def write_json(path: Path, measured: Measured, fits: dict[Form, StageCosts], options: Options) -> None:
    def shown(samples: list[Sample]) -> list[dict[str, object]]:
        predicted = {form: [costs.of(s.shape).batch_cost_s(s.chunks) for s in samples] for form, costs in fits.items()}
        return [
            {
                "chunks": sample.chunks,
                "stage": sample.shape,
                "measured_s": sample.seconds,
                "predicted_s": {form: predicted[form][i] for form in fits},
            }
            for i, sample in enumerate(samples)
        ]

    document = {
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "load_average": os.getloadavg(),
        "environment": describe_environment().model_dump(mode="json"),
        "options": asdict(options),
        "clock": measured.clock,
        "costs": {form: asdict(costs) for form, costs in fits.items()},
        "errors": {
            form: {
                name: asdict(measured.errors(costs, prefix=prefix))
                for name, prefix in (("without_prefix", False), ("with_prefix", True))
            }
            for form, costs in fits.items()
        },
        "fitted_on": shown(measured.samples),
        "held_out": shown(measured.held_out),
        "sweep": shown(measured.others),
    }
    path.write_text(json.dumps(document) + "\n", encoding="utf-8")


def draw(path: Path, measured: Measured, fits: dict[Form, StageCosts]) -> None:
    """Above: single sequences of growing length. Below: the error of every batch held out."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
    with mpl.rc_context(style):  # pyright: ignore[reportArgumentType] -- the stubs want literals
        figure = Figure(figsize=(10.5, 7.5), layout="constrained")
        axes: list[list[Axes]] = figure.subplots(2, 2, sharey="row", squeeze=False).tolist()
        for column, prefix in enumerate((False, True)):
            _draw_sweep(axes[0][column], of_kind(measured.others, prefix=prefix), fits)
            _draw_errors(axes[1][column], of_kind(measured.held_out, prefix=prefix), fits)
        axes[0][1].set_ylim(bottom=0)  # last: it ends the scaling that both share
        axes[0][0].set_title("without prefix")
        axes[0][1].set_title(f"behind a prefix of {SWEEP_PREFIX} tokens")
        axes[1][1].set_title("chunks behind prefixes, decodes, mixtures")
        axes[1][0].set_title("prefills of 1 to 4 sequences")
        axes[0][0].set_ylabel("time of one chunk, ms")
        axes[1][0].set_ylabel("error of the prediction, %")
        figure.suptitle("Cost model against token count: 35 M parameters, float32, one CPU thread", fontsize=11)
        figure.savefig(path, dpi=130)


def _draw_sweep(axes: "Axes", samples: list[Sample], fits: dict[Form, StageCosts]) -> None:
    samples = sorted(samples, key=lambda sample: sample.chunks[0].token_count)
    tokens = [sample.chunks[0].token_count for sample in samples]
    for form, costs in fits.items():
        predicted = [costs.of(s.shape).batch_cost_s(s.chunks) * 1e3 for s in samples]
        mean = summarise(errors_of(costs, samples)).mean
        label = f"{NAMES[form]}: mean error {mean:.1%}"
        axes.plot(tokens, predicted, DASHES[form], color=COLOURS[form], linewidth=1.8, label=label)
    measured_ms = [sample.seconds * 1e3 for sample in samples]
    axes.plot(tokens, measured_ms, "o", color="black", markersize=5, label="measured", zorder=3)
    axes.set_xlabel("tokens of the chunk")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", fontsize=9)


def _draw_errors(axes: "Axes", samples: list[Sample], fits: dict[Form, StageCosts]) -> None:
    axes.axhspan(-5, 5, color="black", alpha=0.07, linewidth=0)
    axes.axhline(0, color="black", linewidth=0.8)
    tokens = [sum(chunk.token_count for chunk in sample.chunks) for sample in samples]
    for form in (Form.TOKEN_COUNT, Form.EXTENDED):
        errors = errors_of(fits[form], samples)
        label = f"{NAMES[form]}: mean {summarise(errors).mean:.1%}"
        percent = [error * 100 for error in errors]
        axes.plot(tokens, percent, MARKERS[form], color=COLOURS[form], markersize=4.5, alpha=0.75, label=label)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
    axes.set_xlabel("tokens of the batch (grey: within 5 %)")
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize=9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = Options()
    parser.add_argument("--rounds", type=int, default=defaults.visits, help="over all batches")
    parser.add_argument("--max-num-batched-tokens", type=int, default=1024)
    parser.add_argument("--held-out", type=int, default=defaults.held_out_count, help="batches of each kind")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="of the batches drawn")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER")
    arguments = parser.parse_args()
    options = Options(
        visits=arguments.rounds,
        batch_tokens=arguments.max_num_batched_tokens,
        held_out_count=arguments.held_out,
        seed=arguments.seed,
    )
    console = Console() if Console().is_terminal else Console(width=120)
    measured = run(options, console)
    fits = {form: measured.fit(form) for form in Form}
    console.print(table_of(measured, fits))
    arguments.out.mkdir(parents=True, exist_ok=True)
    stem = arguments.out / f"{datetime.now(UTC).date()}-cost-model"
    write_json(stem.with_suffix(".json"), measured, fits, options)
    draw(stem.with_suffix(".png"), measured, fits)
    console.print(f"written: {stem}.json, {stem}.png; load average {', '.join(f'{x:.1f}' for x in os.getloadavg())}")


if __name__ == "__main__":
    main()
