"""A pipeline in virtual time, without threads: the leader's real core, and stages whose durations follow a cost
model.
"""

import random
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ballast.common.cost import Chunk, CostModel
from ballast.common.ids import RequestId
from ballast.common.load import MemoryReport
from ballast.common.sampling import SamplingParams
from services.worker.core import events as w
from services.worker.core.batch import Batch, StepResult
from services.worker.core.blocks import BlockBook
from services.worker.core.limits import WorkerLimits
from services.worker.core.worker import WorkerCore
from services.worker.policy.microbatching import Microbatching

# For all layers of a fictitious model: a full batch of 512 tokens takes 51 ms without attention; attention to 4,000
# tokens doubles that.
COST = CostModel(attention_s=2.5e-8, token_s=1e-4, chunk_s=1e-3, shared_s=8e-4, prefix_s=2e-7)
HOP_S, HOST_S, JITTER = 0.0005, 0.0005, 0.03
BATCH_TOKENS, RUNNING = 512, 32
PLENTY = 1 << 20
_NO_MEMORY = MemoryReport(budget_bytes=4, parameter_bytes=2, kv_bytes=1, free_bytes=1)


@dataclass(frozen=True)
class Outcome:
    wall_s: float
    backlog_bubble: float  # bubble fraction while requests waited
    bubble: float
    first_token_s: float
    steps: int


class Pipeline:
    """A leader's core with stages in virtual time. `true`: cost of a batch on all stages together; the policy uses its
    own cost model.
    """

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
        self._core = WorkerCore(limits, blocks, book=BlockBook(blocks, 16), microbatching=policy)
        self._cost = true.scaled(1 / stages)
        self._rng = random.Random(0)
        self._at_s = 0.0
        self._free_s = [0.0] * stages
        self._busy_s = [0.0] * stages
        self._flying: deque[tuple[float, Batch]] = deque()
        self._first_s: dict[int, float] = {}
        self._core.handle(w.StreamOpened(0.0, 1))
        self._core.handle(w.RoleChanged(0.0, leads=True, stage_count=stages))
        for handle, (prompt_tokens, output_tokens) in enumerate(requests, 1):
            sampling = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
            self._core.handle(
                w.Submitted(
                    at_s=0.0,
                    key=w.SequenceKey(1, handle),
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
            self._hear(self._core.handle(w.StepDone(self._at_s, result, ("",) * count)))

    def _form(self) -> Batch | None:
        commands = self._core.handle(w.BatchWanted(self._at_s)) if self._core.has_work else []
        self._hear(commands)
        return next((c.batch for c in commands if isinstance(c, w.Execute)), None)

    def _hear(self, commands: Iterable[w.Command]) -> None:
        for command in commands:
            if isinstance(command, w.Emit):
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
