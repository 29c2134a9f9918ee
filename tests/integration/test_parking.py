"""Real workers are parked and woken while requests run: parked ones release their memory, and no token changes."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from ballast.client import AsyncClient
from ballast.client.types import ClusterStatus
from ballast.common.layout import Standing
from ballast.common.load import LoadReport
from ballast.common.sampling import SamplingParams
from services.worker.memory.host_copy import HostCopy
from services.worker.memory.parameters import ParameterStore
from services.worker.pipeline.events import ParkOrdered
from tests.support.cluster import running_cluster, until
from tests.support.group import running_group
from tests.support.reference import reference_greedy_batch
from tests.support.shells import until as until_true
from tools.cli.main import main
from tools.model.tiny import make_tiny

PROMPTS = [[3 + i, 9, 4 + 2 * i, 7] * 5 for i in range(6)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8000, ignore_eos=True)


def load_of(status: ClusterStatus, number: int) -> LoadReport | None:
    return next((w.load for w in status.workers if w.worker_id == f"worker-{number}"), None)


def standing(status: ClusterStatus, number: int) -> Standing | None:
    members = (m for g in (status.layout.groups if status.layout else ()) for m in g.members)
    return next((m.standing for m in members if m.worker_id == f"worker-{number}"), None)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_worker_is_parked_and_woken_while_requests_run(
    ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tiny("llama", tmp_path / "tiny", max_len=8192)
    flags = {"worker": ["--dtype", "float64", "--tensor-parallel-size", str(ranks)]}
    with running_cluster(model, workers=2, device_memory_bytes=64 << 20, flags=flags) as cluster:
        address = cluster.cluster.address

        def told(*command: str) -> dict[str, str]:
            assert main([*command, "--address", address, "--json"]) == 0
            return json.loads(capsys.readouterr().out)

        async def story() -> list[list[int]]:
            answers: list[list[int]] = [[] for _ in PROMPTS]
            enough = asyncio.Event()

            async def read(client: AsyncClient, answer: list[int], prompt: list[int]) -> None:
                async with client.stream(token_ids=prompt, sampling=GREEDY, deadline_s=180) as stream:
                    async for chunk in stream:
                        answer += chunk.token_ids
                        if enough.is_set():
                            return

            async with AsyncClient(address) as client, asyncio.TaskGroup() as tasks:
                for answer, prompt in zip(answers, PROMPTS, strict=True):
                    tasks.create_task(read(client, answer, prompt))
                await until(client, lambda now: all((load := load_of(now, i)) and load.running_count for i in range(2)))
                for _ in range(2):
                    parked = await asyncio.to_thread(told, "park", "worker-0", "--wait")
                    assert parked == {"name": "worker-0", "standing": "parked"}
                    await until(client, lambda now: (load := load_of(now, 0)) is not None and not load.memory.kv_bytes)
                    short = replace(GREEDY, max_tokens=5)
                    await asyncio.gather(
                        *(client.generate(token_ids=prompt, sampling=short, deadline_s=60) for prompt in PROMPTS)
                    )
                    now = await client.status()
                    assert standing(now, 0) is Standing.PARKED
                    assert (load := load_of(now, 0)) is not None
                    assert not load.running_count
                    woken = await asyncio.to_thread(told, "wake", "worker-0", "--wait")
                    assert woken == {"name": "worker-0", "standing": "serving"}
                    await until(client, lambda now: (load := load_of(now, 0)) is not None and load.block_count > 0)
                    several = [
                        asyncio.create_task(client.generate(token_ids=p, sampling=replace(GREEDY, max_tokens=300)))
                        for p in PROMPTS
                    ]
                    await until(client, lambda now: (load := load_of(now, 0)) is not None and load.running_count > 0)
                    for one in several:
                        one.cancel()
                    await asyncio.gather(*several, return_exceptions=True)
                enough.set()
            return answers

        answers = cluster.run(story())
    assert min(map(len, answers)) > 5
    reference = reference_greedy_batch(model, PROMPTS, [len(answer) for answer in answers], "float64")
    assert answers == [list(one.token_ids) for one in reference]


async def test_a_worker_without_host_memory_for_its_parameters_continues_to_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keep(self: HostCopy, parameters: ParameterStore, layer: int) -> None:
        raise RuntimeError("host memory is full")

    monkeypatch.setattr(HostCopy, "keep", keep)
    async with running_group(make_tiny("llama", tmp_path / "tiny", layers=2), ["w0"]) as cluster:
        for _ in range(2):
            cluster.post("w0", ParkOrdered(park=True))
            await until_true(lambda: not cluster.workers["w0"].member.parks.wake_s)
            answer = await cluster.dispatcher.submit("w0", PROMPTS[0], replace(GREEDY, max_tokens=5))
            async with asyncio.timeout(60):
                await cluster.dispatcher.end(answer)
            assert len(answer.token_ids) == 5
        await cluster.quiet()
