"""The local cluster as tests and tools use it: crashes, kills, late workers, several dispatchers."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from ballast.client import AsyncClient, SamplingParams
from ballast.common.errors import Unavailable
from ballast.local.cluster import LocalCluster
from ballast.model.tiny import make_preset
from tests.support.cluster import until

SAMPLING = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_preset("tiny", tmp_path_factory.mktemp("model") / "tiny")


def test_dispatchers_and_workers_come_and_go_while_requests_are_answered(model: Path) -> None:
    async def story() -> None:
        async with (
            LocalCluster(model, workers=1, dispatchers=2, device_memory_bytes=8 << 20) as cluster,
            AsyncClient(cluster.addresses) as client,
        ):
            expected = (await client.generate("A ship", SAMPLING)).token_ids
            late = await cluster.start_worker()
            assert {w.worker_id for w in (await client.status()).workers} == {"worker-0", late.id}
            cluster.kill("dispatcher", 0)
            for _ in range(4):
                assert (await client.generate("A ship", SAMPLING, deadline_s=20)).token_ids == expected
            cluster.kill("worker", 0)
            for _ in range(4):
                assert (await client.generate("A ship", SAMPLING, deadline_s=20)).token_ids == expected
            await until(client, lambda status: [w.worker_id for w in status.workers] == [late.id])
            assert cluster.crash() is None
            # A stopped process does not hold up the end.
            cluster.kill("worker", 1, signal.SIGSTOP)

    asyncio.run(story())


def test_a_crash_is_reported_on_leaving(model: Path) -> None:
    pids: list[int] = []

    async def story() -> None:
        async with LocalCluster(model, workers=1, device_memory_bytes=8 << 20) as cluster:
            pids.extend(p.pid for processes in cluster.processes.values() for p in processes)
            os.kill(cluster.processes["planner"][0].pid, signal.SIGKILL)
            async with asyncio.timeout(5):
                assert (await cluster.wait_crash()).target == "planner-0"

    with pytest.raises(Unavailable, match=r"planner-0: was killed by SIGKILL; its log ends with\n"):
        asyncio.run(story())
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
