"""Runs the measurements of docs/evaluation.md, and writes the page's tables from their results.

    python -m benchmarks.evaluation plan                              # how long each part takes
    python -m benchmarks.evaluation run PART ... [--traces DIR]       # continues after an interruption
    python -m benchmarks.evaluation write                             # tables and figures into the page

Results of the runs are stored in --out (out/evaluation). `write` inserts them between the marks of the page, writes the
figures next to it, and leaves parts that have not been run unchanged. --traces names a folder with the published
slices. With it, comparisons also replay a real spike, and the long run replays the slice that contains it; otherwise
only generated traces are used.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ballast.common.errors import BallastError, ConfigError
from benchmarks.quoting import quote
from tools.bench.plot import plot_result
from tools.bench.policies import COMPARED
from tools.bench.study import Study, read_study
from tools.bench.summary import side_by_side, text_table
from tools.cli.main import main as ballast
from tools.model.tiny import make_preset

PAGE = Path("docs/evaluation.md")
FIGURES = Path("docs/evaluation")
SPIKE = "azure_code_spike640_a.csv"
_SPIKE_WINDOW_S = 100  # its burst of some twelve seconds and the time around it
_KNOBS = "recompute,swap,migrate,static-pipeline,drop"
_DEGREES = "recompute,static-pipeline,static-pipeline:degree=4,drop"
_RESTORES = "recompute,drop,drop:restore=off"
# Traces are compressed into seconds here, so the TTFT target is lowered as well.
_COMPARED = ",".join((*COMPARED, "drop:ttft-target-s=0.1"))
# Requests are limited by memory, not by compute: prompts are less than a third of their tokens, and a worker's KV holds
# eight requests. The rate follows from a probe and _LOAD: requests need half the KV memory on average, and 1.7 times
# the KV memory in the burst.
_SIZES = ("--mean-tokens", "120", "--answer-share", "0.7", "--sequences-each", "8", "--probe-s", "3")
_LOAD = ("--demand", "0.5", "--peak", "1.7")


@dataclass(frozen=True)
class Command:
    """A command line of `ballast bench overload`."""

    workers: int
    span_s: int
    workloads: str
    arguments: tuple[str, ...] = ()
    repetitions: int = 3
    load: tuple[str, ...] = _LOAD

    @property
    def preset(self) -> str:
        """Name of the model preset. With four workers on two cores, the model has half the arithmetic."""
        return "ballast" if self.workers == 2 else "ballast-half"

    def words(self) -> list[str]:
        counts = ("--workers", str(self.workers), "--repetitions", str(self.repetitions))
        where = ("--workloads", self.workloads, "--span-s", str(self.span_s))
        return [*counts, *where, *_SIZES, *self.load, *self.arguments]


@dataclass(frozen=True)
class EvaluationPart:
    """A part of the evaluation. Each command writes to a folder named after it, within the part's folder."""

    name: str
    commands: dict[str, Command]


def parts(traces: Path | None) -> list[EvaluationPart]:
    against = ("--policies", _COMPARED)
    compared = {"workers-2": Command(2, 21, "spike", against), "workers-4": Command(4, 12, "spike", against)}
    restores = ("--policies", _RESTORES)
    long = {"workers-2": Command(2, 22, "twice:spike", restores)}
    if traces is not None:
        compared["workers-2-real"] = Command(2, 12, f"{traces / SPIKE}@{_SPIKE_WINDOW_S}+burstgpt", against)
        # At half the real speed, because drops and restores are not sped up with the trace.
        long["workers-2-real"] = Command(2, 160, f"twice:{traces / SPIKE}+burstgpt", restores)
    slow_links = ("--ablation", "--set", "worker.link_bytes_per_s=50000000")
    return [
        EvaluationPart("comparison", compared),
        EvaluationPart("ablation", {"workers-2": Command(2, 14, "spike", slow_links)}),
        EvaluationPart(
            "sweep",
            {
                "workers-2": Command(2, 10, "spike", ("--sweep",), 1),
                "degrees": Command(4, 12, "spike", ("--policies", _DEGREES), 1),
                "calm": Command(2, 10, "answers", ("--policies", _KNOBS), 1, ("--demand", "0.3", "--peak", "1.01")),
            },
        ),
        EvaluationPart("long", long),
        EvaluationPart("extreme", {"workers-2": Command(2, 13, "extreme:spike", ("--policies", _KNOBS), 2)}),
    ]


def run_part(part: EvaluationPart, out: Path, *, plan_only: bool) -> int:
    for name, command in part.commands.items():
        model = out / "models" / command.preset  # shared by all parts
        if not plan_only and not model.exists():
            make_preset(command.preset, model)
        how = ["--plan-only"] if plan_only else ["--model", str(model)]
        status = ballast(["bench", "overload", "--out", str(out / part.name / name), *command.words(), *how])
        if status:
            return status
    return 0


def write(out: Path, page: Path, figures: Path, of: Sequence[EvaluationPart]) -> list[str]:
    """Write tables and figures into the page. Returns the parts that were written."""
    written: list[str] = []
    for part in of:
        folders = sorted(path.parent for path in (out / part.name).rglob("plan.json"))
        if not folders:
            continue
        texts = [_section(part, folder, out / part.name, figures, page) for folder in folders]
        quote(page, part.name, "\n\n".join(texts))
        written.append(part.name)
    return written


def _section(part: EvaluationPart, folder: Path, root: Path, figures: Path, page: Path) -> str:
    name, study = "-".join(folder.relative_to(root).parts), read_study(folder)
    lines = [text_table(study).strip(), "", _where(study)]
    for workload in study.workloads:
        figure = figures / f"{part.name}-{name}-{workload.name}.png"
        plot_result(side_by_side(workload), figure)
        lines += ["", f"![{workload.name}]({os.path.relpath(figure, page.parent)})"]
    return "\n".join(lines)


def _where(study: Study) -> str:
    sample = study.workloads[0].sample
    machine, model, cluster = sample.environment, sample.model, sample.config.cluster
    settings = ", ".join(f"{name} {value}" for name, value in cluster.items() if "." in name) or "shipped settings"
    loads = "; ".join(
        f"{workload.name}: {(trace := workload.sample.trace).request_count} requests over {trace.span_s:.0f} s,"
        f" lengths {trace.describe_lengths()}"
        for workload in study.workloads
    )
    return (
        f"{study.files} runs on {machine.cpu}, {machine.core_count} cores, Python {machine.python}, commit"
        f" {(machine.git_commit or 'unknown')[:7]}{' with changes' if machine.git_dirty else ''}. {cluster['workers']}"
        f" workers; {model.architecture} of {model.parameter_count / 1e6:.1f} million parameters, {model.dtype};"
        f" {settings}. {loads}."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("plan", "run", "write"))
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(p.name for p in parts(None))} (all)")
    parser.add_argument("--out", type=Path, default=Path("out/evaluation"))
    parser.add_argument("--traces", type=Path, metavar="DIR", help=f"folder that contains {SPIKE}")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--figures", type=Path, default=FIGURES)
    given = parser.parse_args(arguments)
    try:
        chosen = _choose(parts(given.traces), given.parts)
        if given.what == "write":
            written = write(given.out, given.page, given.figures, chosen)
            print(f"wrote {', '.join(written) or 'nothing: there are no results'} into {given.page}")
            return 0
        for part in chosen:
            print(f"{part.name}:", flush=True)
            if status := run_part(part, given.out, plan_only=given.what == "plan"):
                return status
    except BallastError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _choose(known: Sequence[EvaluationPart], names: Sequence[str]) -> list[EvaluationPart]:
    if unknown := set(names) - {part.name for part in known}:
        raise ConfigError(
            "PART", f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(p.name for p in known)}"
        )
    return [part for part in known if not names or part.name in names]


if __name__ == "__main__":
    sys.exit(main())
