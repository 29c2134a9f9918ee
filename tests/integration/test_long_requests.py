"""Requests too long for any single worker, on a cluster of three: a group is formed for each, and no token changes.

`BALLAST_LONG_ANSWER=8` lets the answer grow to eight times what a worker holds (two minutes).
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest

from ballast.client import AsyncClient
from ballast.common.errors import InvalidRequest
from ballast.common.sampling import SamplingParams
from tests.support.cluster import RunningCluster, idle, running_cluster, until
from tests.support.reference import NEAR_TIE, reference_greedy
from tools.model.tiny import make_tiny

pytestmark = pytest.mark.rotating

ALONE = 512  # tokens of KV that one worker holds
GROWS_TO = int(os.environ.get("BALLAST_LONG_ANSWER", "2")) * ALONE
ORDINARY = [[3 + i, 9, 4 + 2 * i, 7] * (3 + i % 4) for i in range(6)]
LONG = [3 + (7 * i) % 900 for i in range(4 * ALONE)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "half"
    return make_tiny(
        "llama", folder, hidden=256, layers=8, heads=8, kv_heads=1, intermediate=1024, vocab=1024, max_len=16 * ALONE
    )


@pytest.fixture
def running(model: Path) -> Iterator[RunningCluster]:
    flags = {"monitor": ["--lease-s", "30"]}
    with running_cluster(model, workers=3, device_memory_bytes=32_400 << 10, flags=flags) as cluster:
        yield cluster


async def answer(client: AsyncClient, ids: list[int], count: int) -> tuple[int, ...]:
    sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    return (await client.generate(token_ids=ids, sampling=sampling)).token_ids


@contextlib.asynccontextmanager
async def ordinary(client: AsyncClient, expected: list[tuple[int, ...]]) -> AsyncGenerator[None]:
    """Repeats short requests until the block ends; each answer must be as expected."""
    over = asyncio.Event()

    async def again(i: int) -> None:
        while not over.is_set():
            assert await answer(client, ORDINARY[i], 40) == expected[i]
            await asyncio.sleep(0.5)

    async with asyncio.TaskGroup() as tasks:
        for i in range(len(ORDINARY)):
            tasks.create_task(again(i))
        yield
        over.set()


async def context(client: AsyncClient, tokens: int) -> None:
    """Waits until the dispatcher reports a `max_model_len` of at least `tokens`."""
    async with asyncio.timeout(60.0):
        while (await client.model_info()).max_model_len < tokens:  # noqa: ASYNC110 - polls another process
            await asyncio.sleep(0.1)


def check(model: Path, prompt: list[int], tokens: tuple[int, ...]) -> None:
    """Checks the tokens against the reference, up to the first near-tie."""
    reference = reference_greedy(model, prompt, len(tokens))
    for ours, theirs, gap in zip(tokens, reference.token_ids, reference.gaps, strict=True):
        if gap < NEAR_TIE:
            return
        assert ours == theirs


def test_a_prompt_and_an_answer_longer_than_a_worker_holds(running: RunningCluster, model: Path) -> None:
    async def story() -> None:
        async with AsyncClient(running.cluster.address) as client:
            whole = await until(client, idle)
            assert [group.capacity_tokens for group in whole.groups] == [ALONE] * 3
            await context(client, 8 * ALONE)
            expected = [await answer(client, ids, 40) for ids in ORDINARY]
            async with ordinary(client, expected):
                prompt = await answer(client, LONG, 16)
                grown = await answer(client, LONG[:100], GROWS_TO - 100)
            check(model, LONG, prompt)
            check(model, LONG[:100], grown)
            with pytest.raises(InvalidRequest, match="max_model_len"):
                await answer(client, LONG * 5, 1)

    running.run(story(), timeout_s=400.0)
