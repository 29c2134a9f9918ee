"""The local cluster as tests and tools use it: crashes, kills, late workers, several dispatchers."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path

import pytest

from ballast.client import AsyncClient, ClusterStatus, SamplingParams
from ballast.common.errors import Unavailable
from ballast.rpc.channel import open_channel
from tests.support.attached import status_of
from tests.support.cluster import idle, until
from tools.local.cluster import LocalCluster
from tools.model.tiny import make_preset

SAMPLING = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_preset("tiny", tmp_path_factory.mktemp("model") / "tiny")


async def test_dispatchers_and_workers_join_and_leave_while_requests_are_answered(model: Path) -> None:
    async with (
        LocalCluster(model, workers=1, dispatchers=2, device_memory_bytes=8 << 20) as cluster,
        AsyncClient(cluster.addresses) as client,
    ):
        expected = (await client.generate("A ship", SAMPLING)).token_ids
        late = await cluster.start_worker()
        await until(client, lambda status: {w.worker_id for w in status.workers} == {"worker-0", late.id})
        cluster.kill("dispatcher", 0)
        for _ in range(4):
            assert (await client.generate("A ship", SAMPLING, deadline_s=60)).token_ids == expected
        cluster.kill("worker", 0)
        for _ in range(4):
            assert (await client.generate("A ship", SAMPLING, deadline_s=60)).token_ids == expected
        await until(client, lambda status: [w.worker_id for w in status.workers] == [late.id])
        assert cluster.crash() is None
        # A stopped process must not delay the shutdown of the cluster.
        cluster.kill("worker", 1, signal.SIGSTOP)


@pytest.mark.rotating
async def test_a_drained_worker_gets_no_new_requests_and_finishes_its_own(model: Path) -> None:
    async with (
        LocalCluster(model, workers=2, dispatchers=2, device_memory_bytes=8 << 20) as cluster,
        AsyncClient(cluster.addresses) as client,
    ):
        long = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
        drained = asyncio.Event()

        async def load(i: int) -> None:
            """Sends one request after another, so that both workers always have some."""
            while not drained.is_set():
                assert len((await client.generate(f"A ship {i}", long, deadline_s=60)).token_ids) == 400

        running = [asyncio.create_task(load(i)) for i in range(8)]
        await until(client, lambda status: all(w.load and w.load.running_count for w in status.workers))
        # Both drain requests are sent only to dispatchers; the second repeats the first.
        for address in cluster.addresses:
            assert "worker-0 takes nothing new; " in await ballast("drain", "worker-0", "--address", address)
        assert "no worker is called worker-7" in await ballast("drain", "worker-7", "--address", cluster.address)
        drained.set()
        await asyncio.gather(*running)

        for address in cluster.addresses:
            async with AsyncClient(address) as one:  # each dispatcher follows the layout independently
                await until(one, lambda status: draining(status) == {"worker-0"})
        await until(client, idle)
        before = await prompt_tokens(cluster)
        for _ in range(6):
            await client.generate("A ship", SAMPLING, deadline_s=60)
        after = await prompt_tokens(cluster)
        assert after["worker-0"] == before["worker-0"]
        assert after["worker-1"] > before["worker-1"]


@pytest.mark.rotating
def test_a_drained_dispatcher_can_be_undrained(model: Path) -> None:
    async def story() -> None:
        async with (
            LocalCluster(model, workers=1, device_memory_bytes=8 << 20) as cluster,
            AsyncClient(cluster.address) as client,
        ):
            expected = (await client.generate("A ship", SAMPLING)).token_ids
            assert "takes nothing new" in await ballast("drain", cluster.address)
            with pytest.raises(Unavailable, match="draining"):
                await client.generate("A ship", SAMPLING)
            assert (await client.status()).draining
            assert "takes requests again" in await ballast("undrain", cluster.address)
            assert (await client.generate("A ship", SAMPLING)).token_ids == expected
            assert "is healthy" in await ballast("health", "dispatcher", cluster.address)

    asyncio.run(story())


async def ballast(*arguments: str) -> str:
    """The output of the command."""
    command = [sys.executable, "-m", "tools.cli.main", *arguments]
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=STDOUT)
    output, _ = await asyncio.wait_for(process.communicate(), 120)
    return output.decode()


def draining(status: ClusterStatus) -> set[str]:
    assert status.layout is not None
    return {member.worker_id for group in status.layout.groups for member in group.members if member.draining}


async def prompt_tokens(cluster: LocalCluster) -> dict[str, int]:
    """Prompt tokens as counted by the workers themselves, since a dispatcher's figures may be slightly outdated."""
    found: dict[str, int] = {}
    for worker in cluster.processes["worker"]:
        async with open_channel(worker.address) as channel:
            found[worker.id] = (await status_of(channel)).load.prompt_tokens_total
    return found


def test_a_crash_is_reported_on_exit(model: Path, tmp_path: Path) -> None:
    pids: list[int] = []

    async def story() -> None:
        async with LocalCluster(model, workers=0, dispatchers=0, log_dir=tmp_path) as cluster:
            pids.extend(p.pid for processes in cluster.processes.values() for p in processes)
            os.kill(cluster.processes["planner"][0].pid, signal.SIGKILL)
            async with asyncio.timeout(60):
                assert (await cluster.wait_crash()).target == "planner-0"

    with pytest.raises(Unavailable, match=r"planner-0: was killed by SIGKILL; its log ends with\n"):
        asyncio.run(story())
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_restarted_process_never_runs_twice(model: Path, tmp_path: Path) -> None:
    async def story() -> None:
        async with LocalCluster(model, workers=0, dispatchers=0, log_dir=tmp_path) as cluster:
            [old] = cluster.processes["planner"]
            [fresh] = cluster.respawn(old.id)
            assert old.child.returncode == -signal.SIGKILL, "the old process was still running"
            async with asyncio.timeout(60):
                while not fresh.read_ready():  # noqa: ASYNC110 -- another process cannot set an asyncio.Event
                    await asyncio.sleep(0.05)
            assert cluster.processes["planner"] == [fresh]

    asyncio.run(story())
