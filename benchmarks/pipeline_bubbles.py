"""Bubbles and throughput of real pipelines under backlog: token counts against lookahead.

    python -m benchmarks.pipeline_bubbles --lengths FILE [FILE ...] [--stages 2 4] [--emulate] [--write]

Each worker is a process with one engine thread. All requests are there from the beginning; their lengths are drawn
from CSV files with the columns input_tokens and output_tokens, scaled. Repetitions are interleaved, so that other load
on the machine hits both alike. With --emulate stages sleep for as long as a cost model says instead of executing:
more stages than there are cores can overlap only then. A stage is idle while it does not execute although the leader
has work; the bubble fraction is idle / (busy + idle) over all stages, while requests wait and over the whole run, whose
end has a tail of decodes.
"""

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from ballast.model.tiny import TinyShape, write_checkpoint
from benchmarks.engine_throughput import RESULTS, environment
from benchmarks.microbatching import read_lengths
from benchmarks.pipeline_rig import Rig, RigSpec, Served
from services.worker.pipeline.stage_clock import Span, StageTimes
from services.worker.policy.cost import CostModel

MODES = ("token-count", "lookahead")
REAL = TinyShape(hidden=256, layers=8, heads=8, kv_heads=4, intermediate=768, vocab=1024, max_len=4096)
HOLLOW = TinyShape(hidden=64, layers=8, heads=2, kv_heads=1, head_dim=2, intermediate=64, vocab=512, max_len=8192)
# Of all layers of the model that is emulated: a full batch of 512 tokens without attention takes 51 ms, attention to
# 4,000 tokens as much again as all else.
EMULATED = CostModel(attention_s=2.5e-8, token_s=1e-4, chunk_s=1e-3, shared_s=8e-4, prefix_s=2e-7)
JITTER = 0.03


@dataclass(frozen=True)
class Run:
    mode: str
    repetition: int
    wall_s: float
    backlog_s: float
    tokens_per_s: float
    bubble: float  # over the whole run
    backlog_bubble: float  # while requests waited
    network_s: float
    steps: int
    mean_first_token_s: float


def backlog_bubble(served: Served, spans: Sequence[Sequence[Span]]) -> float:
    """Of the time in which requests waited, all stages together. Raises ValueError if the windows do not reach back."""
    begin_s, end_s = served.began_at_s, served.began_at_s + served.backlog_s
    busy_s = 0.0
    for stage in spans:
        runs = [s for s in stage if s.kind == "run"]
        if not runs or runs[0].began_s > begin_s + 0.1 * served.backlog_s:
            raise ValueError("a stage's window of spans is shorter than the run: fewer requests, or larger batches")
        busy_s += sum(max(0.0, min(s.ended_s, end_s) - max(s.began_s, begin_s)) for s in runs)
    return 1 - busy_s / (len(spans) * served.backlog_s)


def to_run(mode: str, repetition: int, served: Served, times: Sequence[StageTimes], spans: list[list[Span]]) -> Run:
    busy_s, idle_s = sum(t.busy_s for t in times), sum(t.idle_s for t in times)
    return Run(
        mode,
        repetition,
        served.wall_s,
        served.backlog_s,
        served.token_count / served.wall_s,
        idle_s / (busy_s + idle_s),
        backlog_bubble(served, spans),
        sum(t.network_s for t in times),
        times[0].steps,
        statistics.mean(served.first_token_s),
    )


def draw(
    lengths: Sequence[tuple[int, int]], count: int, scale: tuple[float, float], seed: int
) -> list[tuple[int, int]]:
    rng = random.Random(seed)
    drawn = (rng.choice(lengths) for _ in range(count))
    return [(max(2, round(p * scale[0])), max(2, round(o * scale[1]))) for p, o in drawn]


def measure(spec: RigSpec, requests: list[tuple[int, int]], repetitions: int) -> list[Run]:
    runs: list[Run] = []
    with Rig(spec) as rig:
        for mode in MODES:  # warm: links, caches, and the cost model, which is fitted from what is executed
            rig.serve(mode, requests[: max(8, len(requests) // 4)])
        for repetition in range(repetitions):
            for mode in MODES if repetition % 2 == 0 else MODES[::-1]:
                served, times = rig.serve(mode, requests)
                runs.append(to_run(mode, repetition, served, times, rig.spans()))
                print(runs[-1], flush=True)
    return runs


def table(runs: Sequence[Run]) -> list[str]:
    lines = [
        "| | bubble while requests wait | bubble, whole run | tokens/s | first token, mean s | microbatches | runs |",
        "|---|---|---|---|---|---|---|",
    ]
    for mode in MODES:
        own = [run for run in runs if run.mode == mode]
        median = {
            name: statistics.median(getattr(run, name) for run in own)
            for name in ("backlog_bubble", "bubble", "tokens_per_s", "mean_first_token_s", "steps")
        }
        lines.append(
            f"| {mode} | {median['backlog_bubble']:.1%} | {median['bubble']:.1%} | {median['tokens_per_s']:.0f} |"
            f" {median['mean_first_token_s']:.2f} | {median['steps']:.0f} | {len(own)} |"
        )
    pairs = [
        (one, other)
        for one in runs
        for other in runs
        if one.repetition == other.repetition and (one.mode, other.mode) == MODES
    ]
    faster = statistics.median(other.tokens_per_s / one.tokens_per_s for one, other in pairs)
    left = statistics.median(other.backlog_bubble / one.backlog_bubble for one, other in pairs)
    lines += ["", f"Lookahead in pairs of runs: {faster:.3f} x the tokens/s, {left:.2f} x the bubble (medians)."]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, nargs="+", required=True, metavar="FILE")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--emulate", action="store_true", help="stages sleep")
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--input-scale", type=float, default=0.5)
    parser.add_argument("--output-scale", type=float, default=0.05)
    parser.add_argument("--batch-tokens", type=int, default=512)
    parser.add_argument("--running", type=int, default=16, metavar="N", help="sequences for each stage")
    parser.add_argument("--memory-bytes", type=int, help="of each worker (default: much)")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="JSON and table into benchmarks/results")
    given = parser.parse_args()
    scale = given.input_scale, given.output_scale
    requests = draw(read_lengths(given.lengths), given.requests, scale, 0)
    shape = HOLLOW if given.emulate else REAL
    text = [
        f"{len(requests)} requests of {sum(p for p, _ in requests)} prompt and {sum(o for _, o in requests)} output"
        f" tokens, lengths of {', '.join(p.name for p in given.lengths)} x {scale[0]:g} and {scale[1]:g}; at most"
        f" {given.batch_tokens} tokens a microbatch and {given.running} sequences a stage;"
        f" stages {'sleep' if given.emulate else 'execute'}.",
    ]
    results: dict[str, list[Run]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model_dir = write_checkpoint("llama", Path(folder) / "model", shape)
        for stages in given.stages:
            spec = RigSpec(
                model_dir=model_dir,
                layer_count=shape.layers,
                stage_count=stages,
                memory_bytes=given.memory_bytes or (256 << 20 if given.emulate else 1 << 30),
                max_running_count=given.running,
                max_batch_tokens=given.batch_tokens,
                emulated=EMULATED if given.emulate else None,
                jitter=JITTER if given.emulate else 0.0,
            )
            results[str(stages)] = measure(spec, requests, given.repetitions)
            text += ["", f"{stages} stages:", "", *table(results[str(stages)])]
    print("\n".join(text))
    if given.write:
        name = f"{datetime.now(UTC):%Y-%m-%d}-pipeline-bubbles-{'emulated' if given.emulate else 'executed'}"
        command = "python -m benchmarks.pipeline_bubbles " + " ".join(
            f"--{key.replace('_', '-')} {' '.join(map(str, value)) if isinstance(value, list) else value}"
            for key, value in vars(given).items()
            if value not in (None, False, True)
        )
        command += " --emulate" * given.emulate
        head = ["# Bubbles of pipelines under backlog", "", environment(), ""]
        (RESULTS / f"{name}.md").write_text("\n".join([*head, *text, "", f"Repeat with `{command}`.", ""]))
        kept = {stages: [asdict(run) for run in runs] for stages, runs in results.items()}
        document = {"environment": environment(), "command": command, "runs": kept}
        (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
