"""What a pipeline costs each token of running requests, and where, when its workers share the cores of one machine.

    python -m benchmarks.pipeline_decode [--requests 8 16 32] [--tokens 300] [--repetitions 5]

The same requests decode in a pipeline of two workers, and shared out to two workers that serve alone; in turn, so that
other load hits both alike. In an ideal pipeline both take equally long: each worker executes half of the layers twice
as often. Where the rest goes is told by what threads have had of the processors (/proc, Linux only): the engine's
thread, whose time is executing (packing, and preparing attention, once for each stage) and what is between (forming,
sending, taking in); and all others, of links, gloo and the event loop. What remains of a step, the engine's thread has
waited for: for a core, and else for its neighbour or a message.
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from ballast.model.tiny import make_preset
from benchmarks.pipeline_rig import LOOKAHEAD, Rig, RigSpec

PRESET, LAYERS = "ballast", 8
PROMPT_TOKENS = 8
WARM_TOKENS = 50


class Cost(NamedTuple):
    """Milliseconds per token of a request; of each worker, the mean of both."""

    step: float  # wall clock
    executing: float  # wall clock
    engine: float  # processor time of its thread
    others: float  # of all other threads
    for_core: float  # the engine's thread could have run


def cost_of(rigs: Sequence[Rig], count: int, tokens: int) -> Cost:
    """Each rig serves `count` requests at the same time."""
    before = [threads for rig in rigs for threads in rig.threads()]
    with ThreadPoolExecutor(len(rigs)) as pool:
        under_way = [pool.submit(rig.serve, LOOKAHEAD, [(PROMPT_TOKENS, tokens)] * count) for rig in rigs]
        ran = [future.result() for future in under_way]
    after = [threads for rig in rigs for threads in rig.threads()]
    pairs = list(zip(before, after, strict=True))
    seconds = [
        sum(stage.busy_s for _, stages in ran for stage in stages),
        *(sum(b[i] - a[i] for a, b in pairs) for i in range(3)),
    ]
    wall_s = max(served.wall_s for served, _ in ran)
    return Cost(wall_s * 1e3 / tokens, *(s * 1e3 / tokens / len(pairs) for s in seconds))


def measure(model_dir: Path, counts: Sequence[int], tokens: int, repetitions: int) -> dict[tuple[int, str], list[Cost]]:
    def rig(stages: int) -> Rig:
        return Rig(
            RigSpec(
                model_dir=model_dir,
                layer_count=LAYERS,
                stage_count=stages,
                memory_bytes=256 << 20,
                max_running_count=max(counts),
                max_batch_tokens=512,
            )
        )

    costs: dict[tuple[int, str], list[Cost]] = {}
    print("starting a pipeline of two workers and two workers alone ...", flush=True)
    with rig(2) as pipeline, rig(1) as one, rig(1) as other:
        for rigs, count in (((one, other), 2), ((pipeline,), 4)):
            cost_of(rigs, count, WARM_TOKENS)
        for count in counts:
            for repetition in range(repetitions):
                alone = cost_of((one, other), count // 2, tokens)
                joined = cost_of((pipeline,), count, tokens)
                costs.setdefault((count, "alone"), []).append(alone)
                costs.setdefault((count, "pipeline"), []).append(joined)
                print(
                    f"{count} requests, {repetition + 1} of {repetitions}: {joined.step / alone.step:.2f} x", flush=True
                )
    return costs


def table(costs: dict[tuple[int, str], list[Cost]]) -> Table:
    made = Table(title="Milliseconds per token, medians, of each worker")
    for head in ("requests", "", "per token", "executing", "engine's thread", "other threads", "waits for a core"):
        made.add_column(head, justify="right")
    for (count, name), runs in costs.items():
        made.add_row(str(count), name, *(f"{statistics.median(values):.2f}" for values in zip(*runs, strict=True)))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[8, 16, 32], metavar="N", help="at once, even")
    parser.add_argument("--tokens", type=int, default=300, help="of each answer")
    parser.add_argument("--repetitions", type=int, default=5)
    given = parser.parse_args()
    if odd := [count for count in given.requests if count < 2 or count % 2]:
        parser.error(f"--requests: {odd[0]} cannot be shared out to two workers")
    with tempfile.TemporaryDirectory() as folder:
        model_dir = make_preset(PRESET, Path(folder) / "model")
        costs = measure(model_dir, given.requests, given.tokens, given.repetitions)
    Console().print(table(costs))


if __name__ == "__main__":
    main()
