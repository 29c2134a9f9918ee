"""A state server that dies repeatedly, with a keeper that restarts processes and a breaker that injects faults."""

import asyncio
import contextlib
import random
import signal
from collections.abc import AsyncGenerator
from pathlib import Path

from tests.support.shells import until
from tools.local.cluster import LocalCluster, ServiceProcess
from tools.local.faults import Breaker, Proxies
from tools.local.keeper import Keeper
from tools.local.process import ChildProcess
from tools.local.state_server import PrivateStateServer


@contextlib.asynccontextmanager
async def lone_state_server(folder: Path) -> AsyncGenerator[tuple[LocalCluster, PrivateStateServer]]:
    """A cluster that consists of a state server only."""
    async with LocalCluster(folder, workers=0, dispatchers=0, monitors=0, planners=0) as cluster:
        assert cluster.state_server is not None
        yield cluster, cluster.state_server


async def test_a_state_server_that_is_killed_while_it_starts_is_started_once_more(tmp_path: Path) -> None:
    async with lone_state_server(tmp_path) as (cluster, server):
        told = list[str]()
        keeping = asyncio.create_task(Keeper(cluster, told.append).run())
        first = server.pid
        server.send_signal(signal.SIGKILL)
        while not server.is_running or server.pid == first:  # noqa: ASYNC110 - the kill must precede the keeper's check
            await asyncio.sleep(0)
        server.send_signal(signal.SIGKILL)
        await until(lambda: any("is back" in line for line in told))
        keeping.cancel()
        await asyncio.wait([keeping])
        assert [line.split(",")[0].split(":")[0] for line in told] == [
            "the state server has ended",
            "the state server did not come up again",
            "the state server is back",
        ]
        assert server.is_running


async def test_a_state_server_that_does_not_run_cannot_be_broken(tmp_path: Path) -> None:
    async with lone_state_server(tmp_path) as (cluster, server):
        breaker = Breaker(cluster, random.Random(0), print, Proxies())
        faults = {fault.name: fault for fault in breaker.faults()}
        stopped = await faults["stop the state server"].begin()
        assert stopped is not None
        server.send_signal(signal.SIGKILL)
        await until(lambda: not server.is_running)
        for name in ("kill the state server", "stop the state server"):
            assert await faults[name].begin() is None, "the server has ended"
        server.stop()
        for name in ("kill the state server", "stop the state server"):
            assert await faults[name].begin() is None, "no server exists between two restart attempts"
        _, _, go_on = stopped
        await go_on()
        assert not server.is_running


async def test_a_worker_that_is_ended_while_it_is_being_restarted_stays_ended(tmp_path: Path) -> None:
    cluster, told = LocalCluster(tmp_path, workers=0), list[str]()
    child = ChildProcess("worker-0", ["false"], log_path=tmp_path / "worker-0.log")
    worker = ServiceProcess("worker", "worker-0", child)
    cluster.processes["worker"].append(worker)
    keeping = asyncio.create_task(Keeper(cluster, told.append).run())
    await until(lambda: any("did not come up again" in line for line in told))
    assert cluster.processes["worker"] != [worker], "the keeper has replaced it"
    await cluster.end_worker(worker)
    await asyncio.sleep(1.5)  # the pause before its next restart
    assert cluster.processes["worker"] == []
    keeping.cancel()
    await asyncio.wait([keeping])
    assert len(told) == 2
