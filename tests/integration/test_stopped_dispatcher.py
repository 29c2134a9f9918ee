"""Pausing a dispatcher at the height of a burst must not cause a drop that does not pay.

BALLAST_STOPPED_BURSTS sets the number of bursts, which cycle through the pauses of STOPPED_S.
"""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ballast.client import AsyncClient
from ballast.common.sampling import SamplingParams
from ballastpb.planner.v1 import planner_pb2 as pb
from tests.integration.test_drop_and_restore import Planner
from tests.support.cluster import RunningCluster, idle, running_cluster, until
from tools.model.tiny import make_preset

pytestmark = pytest.mark.rotating

BURSTS = int(os.environ.get("BALLAST_STOPPED_BURSTS", "3"))
STOPPED_S = (4.0, 1.0, 2.0, 0.5, 10.0)
REQUESTS, TOKENS = 48, 300  # for two workers with memory for some 8,000 tokens each


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    model = make_preset("ballast-half", tmp_path_factory.mktemp("model") / "half")
    flags = {"planner": ["--ttft-target-s", "1000"]}  # no wait is too long, so no drop pays
    with running_cluster(
        Path(model), workers=2, device_memory_bytes=48 << 20, flags=flags, environ={"BALLAST_WORKER__DEV": "{}"}
    ) as cluster:
        yield cluster


@pytest.mark.timeout(60 + 120 * BURSTS)
def test_a_dispatcher_that_is_stopped_causes_no_drop(running: RunningCluster) -> None:
    async def burst(client: AsyncClient, stopped_s: float) -> int:
        """Returns the number of requests that waited for memory when the dispatcher was stopped."""
        sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
        waited = 0
        async with asyncio.TaskGroup() as tasks:
            for i in range(REQUESTS):
                tasks.create_task(client.generate(token_ids=[3 + i] * 200, sampling=sampling, include_text=False))
            begun_s = time.monotonic()
            while not waited and time.monotonic() < begun_s + 60.0:
                status = await client.status()
                waited = sum(group.load.waiting_count for group in status.groups if group.load is not None)
                waited += status.backlog_request_count
            running.cluster.kill("dispatcher", 0, signal.SIGSTOP)
            await asyncio.sleep(stopped_s)
            running.cluster.kill("dispatcher", 0, signal.SIGCONT)
        await until(client, idle)
        return waited

    async def story() -> None:
        planner = Planner(running.cluster.processes["planner"][0].address)
        async with AsyncClient(running.cluster.address) as client:
            await until(client, idle)
            for i in range(BURSTS):
                assert await burst(client, STOPPED_S[i % len(STOPPED_S)]) > 0, "no request waited for memory"
            status = await client.status()
        transitions = (await planner.stub.ListTransitions(pb.ListTransitionsRequest(), timeout=60)).transitions
        await planner.close()
        assert [one.summary for one in transitions if one.kind == "drop"] == []
        assert status.layout is not None
        assert len(status.layout.groups) == 2

    running.run(story(), timeout_s=60.0 + 110.0 * BURSTS)
