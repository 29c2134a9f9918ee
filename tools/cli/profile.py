"""`ballast profile`: measures batch durations of a model on this machine and writes the cost model to a file.

A subprocess measures, because measuring needs torch; this process shows its progress.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ballast.common.arguments import output_file
from ballast.common.errors import ConfigError, Unavailable
from services.worker.cost_profile import CostProfile, Costs, read_profile
from services.worker.policy.cost_fit import CostForm
from tools.cli.arguments import Commands, add_json

_ENDS_WITHIN_S = 10.0
_FORMS = {
    CostForm.EXTENDED: "this model",
    CostForm.PAPER: "the paper's form",
    CostForm.TOKEN_COUNT: "token count",
}


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("profile", help="measure batch times, for workers in pipelines")
    parser.set_defaults(run=run)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="Hugging Face checkpoint folder")
    parser.add_argument(
        "--out", type=output_file, required=True, metavar="FILE", help="output file, for a worker's --cost-profile"
    )
    parser.add_argument("--dtype", default="auto", metavar="TYPE", help="same as for the worker")
    parser.add_argument("--kv-cache-dtype", default="auto", metavar="TYPE", help="same as for the worker")
    parser.add_argument("--device", default="cpu", metavar="DEVICE", help="cpu or cuda")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="same as for the worker")
    parser.add_argument("--kernels", default="auto", choices=("auto", "native", "torch"), help="same as for the worker")
    parser.add_argument(
        "--layers",
        type=int,
        nargs="+",
        default=[],
        metavar="N",
        help="numbers of layers of further measured stages (default: half the model)",
    )
    parser.add_argument("--max-num-batched-tokens", type=int, default=512, metavar="TOKENS", help="of one batch")
    parser.add_argument("--max-num-seqs", type=int, default=64, metavar="N", help="of one batch")
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        metavar="N",
        help="number of measurements of each batch; the shortest counts (3)",
    )
    add_json(parser)
    parser.add_argument(
        "--seconds", type=float, metavar="S", help="maximum duration (default: until everything is measured)"
    )


def run(args: argparse.Namespace) -> int:
    for name in ("threads", "max_num_batched_tokens", "max_num_seqs", "rounds"):
        if getattr(args, name) < 1:
            raise ConfigError(name, f"must be at least 1, got {getattr(args, name)}")
    console = Console(stderr=args.json)
    measure(console, _command(args))
    profile = read_profile(args.out)
    if args.json:
        print(profile.model_dump_json(indent=2))
    else:
        console.print(render(profile))
        console.print(f"written: {args.out}")
    return 0


def _command(args: argparse.Namespace) -> list[str]:
    command = [sys.executable, "-m", "services.worker.profiling"]
    same = "model out dtype kv_cache_dtype device threads kernels max_num_batched_tokens max_num_seqs rounds"
    for name in same.split():
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    if args.layers:
        command += ["--layers", *map(str, args.layers)]
    if args.seconds is not None:
        command += ["--seconds", str(args.seconds)]
    return command


def measure(console: Console, command: list[str]) -> None:
    """Run the process that measures, show its progress and wait for its end.

    Raises:
        ConfigError: the process reported that the model or a setting is invalid.
        Unavailable: the process died.
    """
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with _started(command) as process, bar:
        assert process.stdout is not None
        task = bar.add_task("loading the model", total=None)
        told: dict[str, Any] = {}  # Any: parsed JSON
        for line in process.stdout:
            told = json.loads(line)
            if "done" in told:
                bar.update(task, completed=told["done"], total=told["total"], description=told["what"])
        status = process.wait(_ENDS_WITHIN_S)
    if "error" in told:
        raise ConfigError(told["path"] or "profile", told["error"])
    if "written" not in told:
        raise Unavailable("profile", f"the process that measures has died with exit status {status}; see above")


@contextmanager
def _started(command: list[str]) -> Generator[subprocess.Popen[str]]:
    # The subprocess has its own session, so that Ctrl-C reaches only this process, which then ends the subprocess.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def render(profile: CostProfile) -> Table:
    key = profile.key
    table = Table(
        title=f"{profile.model}: {key.architecture}, {key.dtype}, {key.layer_count} layers, {key.device},"
        f" {key.threads} thread{'s' if key.threads > 1 else ''}",
        caption=profile.clock,
        box=None,
        padding=(0, 2, 0, 0),
        show_header=False,
    )
    for row in (*_cost_rows(profile.costs), *_error_rows(profile), *_other_rows(profile)):
        table.add_row(*row)
    return table


Rows = Iterator[tuple[str, str]]


def _cost_rows(costs: Costs) -> Rows:
    layer, first, last = costs.layer, costs.first, costs.last
    many, beyond = layer.many_s * 1e6, layer.beyond_s * 1e6
    yield "a layer", f"{layer.shared_s * 1e6:,.0f} us per batch, {many:,.0f} more unless it has but one token"
    yield "", f"{(layer.chunk_s - layer.shared_s) * 1e6:,.1f} us per sequence"
    yield "", f"{layer.token_s * 1e6:,.1f} us per token, {beyond:,.1f} more beyond the {layer.knee_tokens}th"
    yield "", f"{layer.prefix_s * 1e9:,.1f} ns per token of a prefix"
    yield "", f"{layer.attention_s * 1e9:,.1f} ns per pair of tokens"
    yield "first stage", f"{first.shared_s * 1e6:,.0f} us per batch, {first.token_s * 1e6:,.2f} us per token"
    per_sequence_s = last.chunk_s - last.shared_s
    yield "last stage", f"{last.shared_s * 1e6:,.0f} us per batch, {per_sequence_s * 1e6:,.1f} per sequence"


def _error_rows(profile: CostProfile) -> Rows:
    for form, what in _FORMS.items():
        errors = profile.held_out[form]
        for name, of in (("no prefix", errors.without_prefix), ("prefix", errors.with_prefix)):
            if of.count:
                yield f"error of {what}", f"{of.mean:.1%} mean, {of.p90:.1%} p90, {of.max:.1%} max, {name}"


def _other_rows(profile: CostProfile) -> Rows:
    link = profile.link
    if link is None:
        yield "link", "could not be measured"
    else:
        yield "link", f"{link.bandwidth_bytes_per_s / 1e9:,.2f} GB/s, {link.latency_s * 1e6:,.0f} us one way"
    if profile.remap_s_per_gb is not None:
        yield "remapping", f"{profile.remap_s_per_gb * 1e3:,.2f} ms per GB"
    yield "copy to device", f"{profile.copies.to_device_bytes_per_s / 1e9:,.1f} GB/s"
    yield "copy from device", f"{profile.copies.from_device_bytes_per_s / 1e9:,.1f} GB/s"
