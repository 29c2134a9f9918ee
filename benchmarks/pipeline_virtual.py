"""Bubbles of pipelines in virtual time: the real core, stages that take what a cost model says, no threads.

    python -m benchmarks.pipeline_virtual --lengths FILE [FILE ...] [--write]

The same on any machine and under any load, which `benchmarks.pipeline_bubbles` is not. Token counts, with as many
microbatches in flight as stages and with one more while requests wait, against lookahead on several backlogs: plenty of
KV, so that the number of running sequences is what limits, and little of it, so that requests are let in as others end.
"""

import argparse
import random
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ballast.common.ids import RequestId
from ballast.common.load import MemoryReport
from ballast.common.sampling import SamplingParams
from benchmarks.engine_throughput import RESULTS
from benchmarks.pipeline_rig import LOOKAHEAD, TOKEN_COUNT, TOKEN_COUNT_AHEAD, policies, read_lengths
from services.worker.core.batch import Batch, StepResult
from services.worker.core.events import (
    BatchWanted,
    Command,
    Emit,
    Execute,
    RoleChanged,
    SequenceKey,
    StepDone,
    StreamOpened,
    Submitted,
)
from services.worker.core.limits import WorkerLimits
from services.worker.core.stage import StageBook
from services.worker.core.worker import WorkerCore
from services.worker.policy.cost import Chunk, CostModel
from services.worker.policy.microbatching import Microbatching

# Of all layers of no model in particular: a full batch of 512 tokens without attention takes 51 ms, attention to 4,000
# tokens as much again as all else.
COST = CostModel(attention_s=2.5e-8, token_s=1e-4, chunk_s=1e-3, shared_s=8e-4, prefix_s=2e-7)
HOP_S, HOST_S, JITTER = 0.0005, 0.0005, 0.03
BATCH_TOKENS, RUNNING = 512, 32
PLENTY = 1 << 20
_NO_MEMORY = MemoryReport(budget_bytes=4, parameter_bytes=2, kv_bytes=1, free_bytes=1)


@dataclass(frozen=True)
class Backlog:
    name: str
    input_scale: float
    output_scale: float
    request_count: int
    blocks_per_stage: int


BACKLOGS = (
    Backlog("long prompts, short answers", 1.0, 0.1, 150, PLENTY),
    Backlog("the same, little KV", 1.0, 0.1, 150, 2400),
    Backlog("half as long", 0.5, 0.05, 200, PLENTY),
    Backlog("a quarter, long answers", 0.25, 0.25, 200, PLENTY),
    Backlog("the same, little KV", 0.25, 0.25, 200, 600),
    Backlog("a quarter, short answers, little KV", 0.25, 0.05, 300, 600),
)


@dataclass(frozen=True)
class Outcome:
    wall_s: float
    backlog_bubble: float  # while requests waited
    bubble: float
    first_token_s: float
    steps: int


class Pipeline:
    """`true` is what a batch takes in all stages together; the policy goes by its own idea of it."""

    def __init__(
        self, policy: Microbatching, true: CostModel, requests: Sequence[tuple[int, int]], stages: int, blocks: int
    ) -> None:
        limits = WorkerLimits(
            block_tokens=16,
            max_model_len=1 << 20,
            vocab_size=100,
            max_running_count=RUNNING,
            max_batch_tokens=BATCH_TOKENS,
            max_waiting_count=1 << 20,
            max_waiting_tokens=1 << 40,
        )
        self._core = WorkerCore(limits, blocks, book=StageBook(blocks, 16), microbatching=policy)
        self._cost = true.scaled(1 / stages)
        self._rng = random.Random(0)
        self._at_s = 0.0
        self._free_s = [0.0] * stages
        self._busy_s = [0.0] * stages
        self._flying: deque[tuple[float, Batch]] = deque()
        self._first_s: dict[int, float] = {}
        self._core.handle(StreamOpened(0.0, 1))
        self._core.handle(RoleChanged(0.0, leads=True, stage_count=stages))
        for handle, (prompt_tokens, output_tokens) in enumerate(requests, 1):
            sampling = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
            self._core.handle(
                Submitted(
                    at_s=0.0,
                    key=SequenceKey(1, handle),
                    request_id=RequestId(str(handle)),
                    attempt=1,
                    prompt_token_ids=(7,) * prompt_tokens,
                    sampling=sampling,
                    wants_text=False,
                )
            )

    def run(self) -> Outcome:
        backlog: tuple[float, float] | None = None
        steps = 0
        while True:
            self._land()
            batch = self._form()
            if batch is None:
                if not self._flying:
                    break
                self._at_s = self._flying[0][0]
                continue
            steps += 1
            if backlog is None and self._at_s and not self._core.load(0.0, _NO_MEMORY).waiting_count:
                backlog = self._at_s, sum(self._busy_s)
            self._execute(batch)
        stages, wall_s = len(self._free_s), max(self._free_s)
        if backlog is None:
            backlog = wall_s, sum(self._busy_s)
        return Outcome(
            wall_s,
            1 - backlog[1] / (stages * backlog[0]),
            1 - sum(self._busy_s) / (stages * wall_s),
            statistics.mean(self._first_s.values()),
            steps,
        )

    def _land(self) -> None:
        while self._flying and self._flying[0][0] <= self._at_s:
            _, batch = self._flying.popleft()
            count = sum(part.samples for part in batch.slices)
            result = StepResult(batch.step_id, (1,) * count, (None,) * count, 0.0)
            self._hear(self._core.handle(StepDone(self._at_s, result, ("",) * count)))

    def _form(self) -> Batch | None:
        commands = self._core.handle(BatchWanted(self._at_s)) if self._core.has_work else []
        self._hear(commands)
        return next((c.batch for c in commands if isinstance(c, Execute)), None)

    def _hear(self, commands: Iterable[Command]) -> None:
        for command in commands:
            if isinstance(command, Emit):
                for handle in command.handles:
                    self._first_s.setdefault(handle, self._at_s)

    def _execute(self, batch: Batch) -> None:
        cost_s = self._cost.batch_cost_s(Chunk(s.first_position, len(s.token_ids)) for s in batch.slices)
        ready_s = self._at_s + HOST_S
        for stage in range(len(self._free_s)):
            took_s = cost_s * (1 + JITTER * self._rng.uniform(-1, 1))
            ready_s = max(ready_s + (HOP_S if stage else 0.0), self._free_s[stage]) + took_s
            self._free_s[stage] = ready_s
            self._busy_s[stage] += took_s
        self._at_s = self._free_s[0]
        self._flying.append((ready_s + HOP_S, batch))


def compare(lengths: Sequence[tuple[int, int]]) -> list[str]:
    lines = [
        "| backlog | stages | bubble while requests wait: token count | with one ahead | lookahead"
        " | throughput over token count | over that with one ahead | first token, in this order |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for backlog in BACKLOGS:
        for stages in (2, 4):
            rng = random.Random(3)
            drawn = (rng.choice(lengths) for _ in range(backlog.request_count))
            requests = [(max(2, int(p * backlog.input_scale)), max(2, int(o * backlog.output_scale))) for p, o in drawn]
            own = COST.scaled(1 / stages)
            by_mode = policies(lambda cost=own: cost)
            blocks = backlog.blocks_per_stage * (stages if backlog.blocks_per_stage < PLENTY else 1)
            outcomes = [
                Pipeline(by_mode[mode], COST, requests, stages, blocks).run()
                for mode in (TOKEN_COUNT, TOKEN_COUNT_AHEAD, LOOKAHEAD)
            ]
            bubbles = " | ".join(f"{outcome.backlog_bubble:.1%}" for outcome in outcomes)
            *rivals, ours = outcomes
            faster = " | ".join(f"{rival.wall_s / ours.wall_s - 1:+.1%}" for rival in rivals)
            first = ", ".join(f"{outcome.first_token_s:.2f}" for outcome in outcomes)
            lines.append(f"| {backlog.name} | {stages} | {bubbles} | {faster} | {first} s |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, nargs="+", required=True, metavar="FILE")
    parser.add_argument("--write", action="store_true", help="into benchmarks/results")
    given = parser.parse_args()
    lines = compare(read_lengths(given.lengths))
    print("\n".join(lines))
    if given.write:
        names = ", ".join(path.name for path in given.lengths)
        head = [
            f"# Bubbles in virtual time, lengths of {names}",
            "",
            f"At most {BATCH_TOKENS} tokens a microbatch and {RUNNING} sequences a stage; a hop takes {HOP_S * 1e3:g}"
            f" ms, forming a batch {HOST_S * 1e3:g} ms, stages vary by {JITTER:.0%}.",
            "",
        ]
        spaced = " ".join(path.name for path in given.lengths)
        repeat = f"Repeat with `python -m benchmarks.pipeline_virtual --lengths {spaced} --write`."
        page = RESULTS / f"{datetime.now(UTC):%Y-%m-%d}-pipeline-virtual.md"
        page.write_text("\n".join([*head, *lines, "", repeat, ""]))


if __name__ == "__main__":
    main()
