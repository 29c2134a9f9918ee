"""A replay target that emulates a cluster with timers."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from ballast.common.errors import Unavailable
from tools.bench.records import StatusSample


@dataclass
class TimerTarget:
    """The first token arrives after `first_s`, each later one after another `token_s`. `failures`: request index ->
    error raised.
    """

    first_s: float = 0.0
    token_s: float = 0.0
    failures: dict[int, Exception] = field(default_factory=dict[int, Exception])
    short_by: int = 0
    failing_samples: bool = False
    epochs: list[int] = field(default_factory=lambda: [0])
    prompts: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    cancelled_ids: list[str] = field(default_factory=list[str])

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        max_tokens: int,
        deadline_s: float,
        last_token: int | None = None,
    ) -> AsyncIterator[Sequence[int]]:
        self.prompts[request_id] = list(prompt_token_ids)
        failure = self.failures.get(int(request_id.rpartition("-")[2]))
        try:
            await asyncio.sleep(self.first_s)
            if failure is not None:
                raise failure
            yield [7]
            for _ in range(max_tokens - 1 - self.short_by):
                await asyncio.sleep(self.token_s)
                yield [8]
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled_ids.append(request_id)
            raise

    async def sample(self) -> StatusSample:
        if self.failing_samples:
            raise Unavailable("dispatcher-0")
        epoch = self.epochs.pop(0) if len(self.epochs) > 1 else self.epochs[0]
        return StatusSample(
            at_s=0.0,
            kv_demand_bytes=300 << 20,
            kv_capacity_bytes=512 << 20,
            kv_used_bytes=200 << 20,
            running_count=3,
            waiting_count=1,
            preemptions_total=0,
            epoch=epoch,
            epoch_reason="overload" if epoch else "start",
        )
