"""A planner with real services parks an unneeded worker, and wakes it when load returns."""

import asyncio
from pathlib import Path

import pytest

from ballast.client import AsyncClient
from ballast.common.layout import Standing
from ballast.common.sampling import SamplingParams
from tests.integration.test_parking import GREEDY, PROMPTS, standing
from tests.support.cluster import running_cluster, until
from tests.support.reference import reference_greedy_batch
from tools.model.tiny import make_tiny

pytestmark = pytest.mark.rotating

SHORT = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


def test_an_idle_cluster_parks_a_worker_and_a_burst_wakes_it(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "tiny", max_len=8192)
    flags = {
        "worker": ["--dtype", "float64", "--dev", "self_profile_s=1"],
        "planner": ["--park", "on", "--park-dwell-s", "1"],
    }
    with running_cluster(model, workers=2, device_memory_bytes=16 << 20, flags=flags) as cluster:

        async def story() -> list[list[int]]:
            async with AsyncClient(cluster.cluster.address) as client:

                async def now_and_then() -> None:
                    while True:
                        await client.generate(token_ids=PROMPTS[0], sampling=SHORT, deadline_s=60)
                        await asyncio.sleep(0.3)

                little = asyncio.create_task(now_and_then())
                await until(client, lambda now: Standing.PARKED in (standing(now, 0), standing(now, 1)))
                little.cancel()
                answers: list[list[int]] = [[] for _ in PROMPTS]

                async def read(answer: list[int], prompt: list[int]) -> None:
                    async with client.stream(token_ids=prompt, sampling=GREEDY, deadline_s=180) as stream:
                        async for chunk in stream:
                            answer += chunk.token_ids
                            if woken.is_set():
                                return

                woken = asyncio.Event()
                async with asyncio.TaskGroup() as tasks:
                    for answer, prompt in zip(answers, PROMPTS, strict=True):
                        tasks.create_task(read(answer, prompt))
                    await until(client, lambda now: {standing(now, 0), standing(now, 1)} == {Standing.SERVING})
                    woken.set()
                return answers

        answers = cluster.run(story())
    reference = reference_greedy_batch(model, PROMPTS, [len(answer) for answer in answers], "float64")
    assert answers == [list(one.token_ids) for one in reference]
