"""Bubbles and throughput of real pipelines under backlog: token counts against lookahead.

    python -m benchmarks.pipeline_bubbles --lengths FILE [FILE ...] [--stages 2 4] [--emulate] [--write]

Lookahead has one microbatch more in flight than stages while requests wait. So that it can be seen what is due to that,
both are measured with it and without it (--modes).

Each worker is a process with one engine thread. All requests are there from the beginning; their lengths are drawn
from CSV files with the columns input_tokens and output_tokens, scaled. Repetitions are interleaved, so that other load
on the machine hits both alike. More stages than there are cores (or all, with --emulate) do not execute but sleep for
as long as a model of the catalogue takes on one of its GPUs: they could not overlap otherwise. Scheduler, wire, links
and threads are real then, activations small. What lookahead goes by is fitted to the data sheet.

The bubble fraction is the part of the time in which stages did not execute, all of them together, while requests
waited; over the whole run, whose end has a tail of decodes, it is idle / (busy + idle). --write makes the table and
the file of results in benchmarks/results.
"""

import argparse
import json
import os
import random
import shlex
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from ballast.model.tiny import TinyShape, write_checkpoint
from benchmarks.engine_throughput import RESULTS, environment
from benchmarks.pipeline_rig import LOOKAHEAD, MODES, Rig, RigSpec, Served, read_lengths
from benchmarks.stage_gaps import shares
from services.worker.pipeline.stage_clock import Span, StageTimes
from sim.jobs.machines import catalogue_machine

REAL = TinyShape(hidden=256, layers=8, heads=8, kv_heads=4, intermediate=768, vocab=1024, max_len=4096)
HOLLOW = TinyShape(hidden=64, layers=8, heads=2, kv_heads=1, head_dim=2, intermediate=64, vocab=512, max_len=8192)
GPU, MODEL = "A800-80G", "Qwen2.5-14B"  # of the paper's
JITTER = 0.03


@dataclass(frozen=True)
class Workload:
    name: str
    input_scale: float
    output_scale: float
    request_count: int


WORKLOADS = (
    Workload("prompts and answers a quarter as long", 0.25, 0.25, 300),
    Workload("prompts half as long, answers a twentieth", 0.5, 0.05, 120),
)


@dataclass(frozen=True)
class Run:
    mode: str
    repetition: int
    wall_s: float
    backlog_s: float
    tokens_per_s: float
    bubble: float  # over the whole run
    backlog_bubble: float  # while requests waited, and what it is made of:
    waiting: float  # for a neighbour
    latency: float
    busy_s: float  # of all stages, over the whole run
    network_s: float
    steps: int
    mean_first_token_s: float


Kept = dict[str, list[Run]]  # by "stages workload"


def to_run(mode: str, repetition: int, served: Served, times: Sequence[StageTimes], spans: list[list[Span]]) -> Run:
    busy_s, idle_s = sum(t.busy_s for t in times), sum(t.idle_s for t in times)
    backlog = shares(spans, served.began_at_s, served.began_at_s + served.backlog_s)
    return Run(
        mode=mode,
        repetition=repetition,
        wall_s=served.wall_s,
        backlog_s=served.backlog_s,
        tokens_per_s=served.token_count / served.wall_s,
        bubble=idle_s / (busy_s + idle_s),
        backlog_bubble=backlog.bubble,
        waiting=backlog.waiting,
        latency=backlog.latency,
        busy_s=busy_s,
        network_s=sum(t.network_s for t in times),
        steps=times[0].steps,
        mean_first_token_s=statistics.mean(served.first_token_s),
    )


def draw(lengths: Sequence[tuple[int, int]], workload: Workload, seed: int) -> list[tuple[int, int]]:
    rng = random.Random(seed)
    drawn = (rng.choice(lengths) for _ in range(workload.request_count))
    return [(max(2, round(p * workload.input_scale)), max(2, round(o * workload.output_scale))) for p, o in drawn]


def measure(rig: Rig, requests: list[tuple[int, int]], repetitions: int, modes: Sequence[str]) -> list[Run]:
    runs: list[Run] = []
    for mode in modes:  # warm: links, caches, and the cost model, which is fitted from what is executed
        rig.serve(mode, requests[: max(8, len(requests) // 8)])
    for repetition in range(repetitions):
        for mode in modes if repetition % 2 == 0 else modes[::-1]:
            served, times = rig.serve(mode, requests)
            runs.append(to_run(mode, repetition, served, times, rig.spans()))
            print(runs[-1], flush=True)
    return runs


def table(runs: Sequence[Run]) -> list[str]:
    lines = [
        "| | bubble while requests wait | for a neighbour | latency | bubble, whole run | tokens/s | busy, s |"
        " first token, mean s | microbatches | runs |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for mode in MODES:
        own = [run for run in runs if run.mode == mode]
        if not own:
            continue
        median = {
            name: statistics.median(getattr(run, name) for run in own) for name in asdict(own[0]) if name != "mode"
        }
        lines.append(
            f"| {mode} | {median['backlog_bubble']:.1%} | {median['waiting']:.1%} | {median['latency']:.1%} |"
            f" {median['bubble']:.1%} | {median['tokens_per_s']:.0f} | {median['busy_s']:.1f} |"
            f" {median['mean_first_token_s']:.2f} | {median['steps']:.0f} | {len(own)} |"
        )
    lines.append("")
    return [*lines, *(text for rival in MODES if rival != LOOKAHEAD and (text := in_pairs(runs, rival)))]


def in_pairs(runs: Sequence[Run], rival: str) -> str:
    """Empty: there are none."""
    pairs = [
        (one, other)
        for one in runs
        for other in runs
        if one.repetition == other.repetition and (one.mode, other.mode) == (rival, LOOKAHEAD)
    ]
    if not pairs:
        return ""
    faster = statistics.median(other.tokens_per_s / one.tokens_per_s for one, other in pairs)
    left = statistics.median(other.backlog_bubble / one.backlog_bubble for one, other in pairs)
    return f"Lookahead over {rival}, medians of pairs of runs: {faster:.3f} x the tokens/s, {left:.2f} x the bubble.\n"


def text_of(workload: Workload, requests: Sequence[tuple[int, int]]) -> str:
    return (
        f"{workload.name[0].upper()}{workload.name[1:]} (x {workload.input_scale:g} and x {workload.output_scale:g}):"
        f" {len(requests)} requests of {sum(p for p, _ in requests)} prompt and {sum(o for _, o in requests)} output"
        " tokens."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, nargs="+", required=True, metavar="FILE")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--emulate", action="store_true", help="all stages sleep")
    parser.add_argument("--workloads", type=int, nargs="+", choices=range(len(WORKLOADS)), default=[0, 1], metavar="N")
    parser.add_argument("--batch-tokens", type=int, help="at most (default: 512, 2048 where stages sleep)")
    parser.add_argument("--running", type=int, default=16, metavar="N", help="sequences for each stage")
    parser.add_argument("--repetitions", type=int, default=2, help="0: report what --keep has")
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=MODES, metavar="MODE", help=f"of: {'; '.join(MODES)}"
    )
    parser.add_argument("--keep", type=Path, metavar="FILE", help="runs are kept there, and reported with earlier ones")
    parser.add_argument("--write", action="store_true", help="JSON and table into benchmarks/results")
    given = parser.parse_args()
    lengths = read_lengths(given.lengths)
    kept: Kept = {}
    for stages in given.stages if given.repetitions else ():
        wanted = {index: draw(lengths, WORKLOADS[index], 0) for index in given.workloads}
        for index, runs in measure_all(stages, wanted, given).items():
            kept[f"{stages} {index}"] = runs
    if given.keep is not None:
        kept = kept_with(given.keep, kept)
    text = report(kept, lengths, given)
    print("\n".join(text))
    if given.write:
        write(given, text, kept)


def measure_all(
    stages: int, wanted: dict[int, list[tuple[int, int]]], given: argparse.Namespace
) -> dict[int, list[Run]]:
    emulated = is_emulated(stages, given)
    shape = HOLLOW if emulated else REAL
    with tempfile.TemporaryDirectory() as folder:
        spec = RigSpec(
            model_dir=write_checkpoint("llama", Path(folder) / "model", shape),
            layer_count=shape.layers,
            stage_count=stages,
            memory_bytes=256 << 20 if emulated else 1 << 30,
            max_running_count=given.running,
            max_batch_tokens=batch_tokens(emulated, given),
            emulated=catalogue_machine(GPU, MODEL) if emulated else None,
            jitter=JITTER if emulated else 0.0,
        )
        with Rig(spec) as rig:
            return {index: measure(rig, requests, given.repetitions, given.modes) for index, requests in wanted.items()}


def is_emulated(stages: int, given: argparse.Namespace) -> bool:
    return given.emulate or stages > (os.cpu_count() or 1)


def batch_tokens(emulated: bool, given: argparse.Namespace) -> int:
    return given.batch_tokens or (2048 if emulated else 512)


def kept_with(path: Path, runs: Kept) -> Kept:
    """With what `path` has from earlier calls. It has all of them afterwards."""
    kept: Kept = {}
    if path.exists():
        for key, earlier in json.loads(path.read_text(encoding="utf-8")).items():
            kept[key] = [Run(**run) for run in earlier]
    for key, new in runs.items():
        before = kept.setdefault(key, [])
        count = 1 + max((run.repetition for run in before), default=-1)
        before += [replace(run, repetition=run.repetition + count) for run in new]
    document = {key: [asdict(run) for run in runs] for key, runs in kept.items()}
    path.write_text(json.dumps(document) + "\n", encoding="utf-8")
    return kept


def report(kept: Kept, lengths: Sequence[tuple[int, int]], given: argparse.Namespace) -> list[str]:
    names = ", ".join(path.name for path in given.lengths)
    text = [
        f"Lengths drawn from {names}, scaled; at most {given.running} sequences a stage. Medians of pairs of runs,"
        " interleaved."
    ]
    before = 0
    for key in sorted(kept):
        stages, index = map(int, key.split())
        emulated = is_emulated(stages, given)
        doing = f"take the time of {MODEL} on {GPU}s" if emulated else "execute"
        if stages != before:
            most = batch_tokens(emulated, given)
            text += ["", f"## {stages} stages, which {doing}, at most {most} tokens a microbatch"]
        before = stages
        workload = WORKLOADS[index]
        text += ["", text_of(workload, draw(lengths, workload, 0)), "", *table(kept[key])]
    return text


def write(given: argparse.Namespace, text: Sequence[str], kept: Kept) -> None:
    stem = RESULTS / f"{datetime.now(UTC):%Y-%m-%d}-pipeline-bubbles"
    command = "python -m benchmarks.pipeline_bubbles"
    for key, value in vars(given).items():
        if key in ("keep", "repetitions") or value in (None, False, True):
            continue
        words = value if isinstance(value, list | tuple) else [value]
        names = (word.name if isinstance(word, Path) else str(word) for word in words)
        command += f" --{key.replace('_', '-')} {shlex.join(names)}"
    command += f" --repetitions {max((run.repetition + 1 for runs in kept.values() for run in runs), default=1)}"
    command += " --emulate" * given.emulate
    head = ["# Bubbles of pipelines under backlog", "", f"{environment()}.", ""]
    stem.with_suffix(".md").write_text("\n".join([*head, *text, "", f"Repeat with `{command} --write`.", ""]))
    runs = {key: [asdict(run) for run in runs] for key, runs in kept.items()}
    document = {"environment": environment(), "command": command, "runs": runs}
    stem.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
