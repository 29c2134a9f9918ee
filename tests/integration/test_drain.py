"""What drains gives what runs there to others, and no token changes."""

import asyncio
from pathlib import Path

from ballast.client import AsyncClient
from ballast.client.types import ClusterStatus
from ballast.common.sampling import SamplingParams
from ballast.model.tiny import make_tiny
from tests.support.cluster import running_cluster, until
from tests.support.reference import reference_greedy_batch

PROMPTS = [[3 + i, 9, 4 + 2 * i, 7] * 5 for i in range(6)]
ENDLESS = SamplingParams(temperature=0.0, max_tokens=8000, ignore_eos=True)  # read until the test has seen enough


def test_running_requests_leave_a_worker_that_drains(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "tiny", max_len=8192)
    flags = {"worker": ["--dtype", "float64"]}

    def running(status: ClusterStatus) -> tuple[int, ...]:
        loads = {worker.worker_id: worker.load for worker in status.workers}
        return tuple(load.running_count if (load := loads.get(f"worker-{i}")) is not None else 0 for i in range(2))

    with running_cluster(model, workers=2, device_memory_bytes=64 << 20, flags=flags) as cluster:

        async def story() -> list[list[int]]:
            answers: list[list[int]] = [[] for _ in PROMPTS]
            enough = asyncio.Event()

            async def read(client: AsyncClient, answer: list[int], prompt: list[int]) -> None:
                async with client.stream(token_ids=prompt, sampling=ENDLESS, deadline_s=180) as stream:
                    async for chunk in stream:
                        answer += chunk.token_ids
                        if enough.is_set():
                            return

            async with AsyncClient(cluster.cluster.address) as client, asyncio.TaskGroup() as tasks:
                for answer, prompt in zip(answers, PROMPTS, strict=True):
                    tasks.create_task(read(client, answer, prompt))
                await until(client, lambda now: min(running(now)) >= 2)
                await client.drain_worker("worker-0")
                await until(client, lambda now: running(now) == (0, len(PROMPTS)))
                counts = [len(answer) for answer in answers]
                await until(client, lambda _: all(len(a) > n for a, n in zip(answers, counts, strict=True)))
                enough.set()
            return answers

        answers = cluster.run(story())
    reference = reference_greedy_batch(model, PROMPTS, [len(answer) for answer in answers], "float64")
    assert answers == [list(one.token_ids) for one in reference]
