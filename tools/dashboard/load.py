"""Generates load for trying a cluster out: steady traffic, and a burst that needs more KV than the cluster has.

A burst needs about twice the KV capacity of the cluster without drops. Bursts to several clusters consist of identical
requests.
"""

import asyncio
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from ballast.client import AsyncClient, SamplingParams
from ballast.common.errors import BallastError
from tools.dashboard.watched import Watched

_BURST_OF_CAPACITY: Final = 2.2
_BURST_OVER_S: Final = 12.0  # duration of a burst, short enough that memory becomes scarce and not only compute
_MAX_BURST_COUNT: Final = 400
_STEADY_OF_CAPACITY: Final = 0.25
_MAX_STEADY_COUNT: Final = 64
_PROMPT_SHARE: Final = 0.6
_REQUESTS_PER_WORKER: Final = 40  # number of requests that fit into a worker's KV, which determines their size
_DEADLINE_S: Final = 300.0
_FIRST_TOKEN_ID: Final = 16  # lower ids are usually special tokens


@dataclass(frozen=True, slots=True)
class LoadShape:
    """Lengths of a request's prompt and answer, in tokens."""

    prompt: int
    output: int


@dataclass(slots=True)
class BurstResult:
    """Progress and result of one burst on one cluster. Latencies are measured by the dispatchers."""

    sent_count: int
    began_at_s: float
    ttfts_s: list[float] = field(default_factory=list[float])
    tpots_s: list[float] = field(default_factory=list[float])
    token_count: int = 0
    replay_count: int = 0
    failures: list[str] = field(default_factory=list[str])
    took_s: float = 0.0

    @property
    def done_count(self) -> int:
        return len(self.ttfts_s) + len(self.failures)

    def as_json(self) -> dict[str, object]:
        ttfts_s, tpots_s = sorted(self.ttfts_s), sorted(self.tpots_s)
        return {
            "began_at_s": time.time() - (time.monotonic() - self.began_at_s),
            "sent": self.sent_count,
            "done": self.done_count,
            "failed": len(self.failures),
            "why": self.failures[:1],
            "tokens": self.token_count,
            "replayed": self.replay_count,
            "ttft_p50_s": _at(ttfts_s, 0.5),
            "ttft_p99_s": _at(ttfts_s, 0.99),
            "tpot_p50_s": _at(tpots_s, 0.5),
            "took_s": self.took_s,
        }


class DashboardLoad:
    """Sends load to several clusters at the same time."""

    def __init__(self, clusters: Sequence[Watched]) -> None:
        self._clusters = clusters
        self._tasks: set[asyncio.Task[None]] = set()
        self._steady: list[asyncio.Task[None]] = []
        self._seed = 0
        self.results: list[BurstResult] = []  # results of the last burst, one per cluster

    @property
    def is_steady(self) -> bool:
        return bool(self._steady)

    @property
    def is_bursting(self) -> bool:
        return any(result.done_count < result.sent_count for result in self.results)

    async def burst(self) -> str:
        if self.is_bursting:
            return "the last burst is still under way"
        shape, capacity_tokens, vocab_size = await self._sizes()
        count = _BURST_OF_CAPACITY * capacity_tokens / (shape.prompt + shape.output)
        prompts = self._prompts(min(_MAX_BURST_COUNT, max(4, math.ceil(count))), shape, vocab_size)
        self.results = [BurstResult(len(prompts), time.monotonic()) for _ in self._clusters]
        for cluster, result in zip(self._clusters, self.results, strict=True):
            self._keep(asyncio.create_task(self._send(cluster.client, prompts, shape, result), name="burst"))
        return f"{len(prompts)} requests of {shape.prompt} + {shape.output} tokens come within {_BURST_OVER_S:g} s"

    async def steady(self) -> str:
        """Switch steady traffic on or off."""
        if self._steady:
            for task in self._steady:
                task.cancel()
            self._steady = []
            return "steady traffic ends"
        shape, capacity_tokens, vocab_size = await self._sizes()
        count = math.ceil(_STEADY_OF_CAPACITY * capacity_tokens / (shape.prompt + shape.output))
        count = min(_MAX_STEADY_COUNT, max(1, count))
        for cluster in self._clusters:
            for number, prompt in enumerate(self._prompts(count, shape, vocab_size)):
                task = asyncio.create_task(self._repeat(cluster.client, prompt, shape, number / count))
                self._keep(task)
                self._steady.append(task)
        return f"{count} clients, each of them with one request after the other"

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _sizes(self) -> tuple[LoadShape, int, int]:
        """(request shape, KV capacity in tokens, vocabulary size) of the smallest cluster, used for all of them."""
        infos = [await cluster.client.model_info() for cluster in self._clusters]
        capacities = [await _capacity_tokens(cluster) for cluster in self._clusters]
        smallest, worker_count = min(capacities)
        tokens = smallest // worker_count // _REQUESTS_PER_WORKER
        tokens = max(16, min(tokens, min(info.max_model_len for info in infos) * 3 // 4))
        prompt = max(1, int(tokens * _PROMPT_SHARE))
        return LoadShape(prompt, tokens - prompt), smallest, min(info.vocab_size for info in infos)

    def _prompts(self, count: int, shape: LoadShape, vocab_size: int) -> list[tuple[int, ...]]:
        self._seed += 1
        rng = random.Random(self._seed)
        low = min(_FIRST_TOKEN_ID, vocab_size - 1)
        return [tuple(rng.randrange(low, vocab_size) for _ in range(shape.prompt)) for _ in range(count)]

    async def _send(
        self, client: AsyncClient, prompts: Sequence[tuple[int, ...]], shape: LoadShape, result: BurstResult
    ) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number, prompt in enumerate(prompts):
                delay_s = _BURST_OVER_S * number / len(prompts)
                tasks.create_task(_send_one(client, prompt, shape, delay_s, number, result))
        result.took_s = time.monotonic() - result.began_at_s

    async def _repeat(self, client: AsyncClient, prompt: tuple[int, ...], shape: LoadShape, share: float) -> None:
        await asyncio.sleep(4.0 * share)
        while True:
            try:
                await client.generate(
                    token_ids=prompt, sampling=_sampling(shape, 0), include_text=False, deadline_s=_DEADLINE_S
                )
            except BallastError:
                await asyncio.sleep(1.0)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _capacity_tokens(cluster: Watched) -> tuple[int, int]:
    """(KV capacity in tokens without drops, or the current one if that is unknown; number of workers)."""
    status = await cluster.client.status()
    now = sum(group.capacity_tokens for group in status.groups)
    return max(1, cluster.capacity_tokens or now), max(1, len(status.workers))


async def _send_one(
    client: AsyncClient, prompt: tuple[int, ...], shape: LoadShape, delay_s: float, seed: int, result: BurstResult
) -> None:
    await asyncio.sleep(delay_s)
    try:
        answer = await client.generate(
            token_ids=prompt, sampling=_sampling(shape, seed), include_text=False, deadline_s=_DEADLINE_S
        )
    except BallastError as error:
        result.failures.append(str(error))
        return
    usage = answer.usage
    result.ttfts_s.append(usage.ttft_s)
    if usage.completion_token_count > 1:
        result.tpots_s.append((usage.e2e_s - usage.ttft_s) / (usage.completion_token_count - 1))
    result.token_count += usage.completion_token_count
    result.replay_count += usage.replay_count


def _sampling(shape: LoadShape, seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=shape.output, temperature=1.0, seed=seed, ignore_eos=True)


def _at(ascending: Sequence[float], fraction: float) -> float | None:
    return ascending[max(0, math.ceil(fraction * len(ascending)) - 1)] if ascending else None
