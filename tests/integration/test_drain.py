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
MAX_TOKENS = 700  # seconds, while a drain takes a moment


def test_running_requests_leave_a_worker_that_drains(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "tiny", max_len=1024)
    flags = {"worker": ["--dtype", "float64"]}

    def running(status: ClusterStatus, name: str) -> int:
        loads = {worker.worker_id: worker.load for worker in status.workers}
        load = loads.get(name)
        return load.running_count if load is not None else 0

    with running_cluster(model, workers=2, device_memory_bytes=48 << 20, flags=flags) as cluster:

        async def story() -> list[tuple[int, ...]]:
            sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
            async with AsyncClient(cluster.cluster.address) as client, asyncio.TaskGroup() as tasks:
                asked = [
                    tasks.create_task(client.generate(token_ids=prompt, sampling=sampling, deadline_s=90))
                    for prompt in PROMPTS
                ]
                await until(client, lambda now: min(running(now, "worker-0"), running(now, "worker-1")) >= 2)
                await client.drain_worker("worker-0")
                await until(
                    client, lambda now: (running(now, "worker-0"), running(now, "worker-1")) == (0, len(PROMPTS))
                )
                assert not any(task.done() for task in asked)
            return [task.result().token_ids for task in asked]

        tokens = cluster.run(story())
    reference = reference_greedy_batch(model, PROMPTS, [MAX_TOKENS] * len(PROMPTS), "float64")
    assert tokens == [one.token_ids for one in reference]
