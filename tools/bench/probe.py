"""Measures a cluster's speed, and warms it up, before a replay."""

import asyncio
import itertools
import time
from collections.abc import Coroutine, Sequence
from contextlib import aclosing
from typing import Any

from ballast.client import AsyncClient
from ballast.common.errors import BallastError, Unavailable
from tools.bench.replay import random_prompt
from tools.bench.sizing import SizingPace
from tools.bench.target import ClusterTarget

PROBE_S = 5.0
_WARMUP_SHARE = 0.4  # duration of the warm-up before a probe, as a fraction of `probe_s`
_DEADLINE_S = 60.0


async def probe(
    address: str, *, concurrency: int, input_tokens: int, output_tokens: int, probe_s: float = PROBE_S
) -> SizingPace:
    """Keep `concurrency` requests running, and measure the speed for `probe_s` after a warm-up.

    Raises:
        Unavailable: no token was generated.
    """
    times_s: list[float] = []
    async with AsyncClient(address) as client:
        target = ClusterTarget(client)
        vocab_size = (await target.model()).vocab_size
        begin_s = time.monotonic() + _WARMUP_SHARE * probe_s
        end_s = begin_s + probe_s
        numbers = itertools.count()

        async def keep_running() -> None:
            while time.monotonic() < end_s:
                prompt = random_prompt(0, next(numbers), input_tokens, vocab_size)
                stream = target.generate("", prompt, output_tokens, _DEADLINE_S)
                async with aclosing(stream):
                    async for token_ids in stream:
                        now_s = time.monotonic()
                        if now_s >= end_s:
                            break
                        if now_s >= begin_s:
                            times_s.extend([now_s] * len(token_ids))

        await _all_of([keep_running() for _ in range(concurrency)])
    if not times_s:
        raise Unavailable(address, f"no token within {(1 + _WARMUP_SHARE) * probe_s:g} s")
    rate = len(times_s) / probe_s
    return SizingPace(rate, concurrency / rate)


async def warm_up(address: str, *, lanes: int, rounds: int, input_tokens: int, output_tokens: int) -> None:
    """Run `lanes` sequences of `rounds` requests, so that all code and memory has been used once. Only `lanes` requests
    run at a time, so that no overload policy acts.
    """
    async with AsyncClient(address) as client:
        target = ClusterTarget(client)
        vocab_size = (await target.model()).vocab_size

        async def lane(number: int) -> None:
            for index in range(rounds):
                prompt = random_prompt(1, number * rounds + index, input_tokens, vocab_size)
                async for _ in target.generate("", prompt, output_tokens, _DEADLINE_S):
                    pass

        await _all_of([lane(number) for number in range(lanes)])


async def _all_of(what: Sequence[Coroutine[Any, Any, None]]) -> None:  # Any: unused coroutine types
    """Await all coroutines. The first error is raised without its exception group if it is a BallastError."""
    try:
        async with asyncio.TaskGroup() as running:
            for number, one in enumerate(what):
                running.create_task(one, name=f"request {number}")
    except ExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first if isinstance(first, BallastError) else errors from errors
