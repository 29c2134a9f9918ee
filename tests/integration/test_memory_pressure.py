"""The monitor of a real cluster detects the beginning and the end of a burst from the KV bytes."""

import asyncio
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ballast.client import AsyncClient
from ballast.common.sampling import SamplingParams
from ballast.rpc.channel import open_channel
from ballastpb.monitor.v1 import monitor_pb2, monitor_pb2_grpc
from tests.support.cluster import RunningCluster, idle, running_cluster, until
from tools.local.ports import free_port
from tools.model.tiny import make_tiny

WORKERS = 2
PROMPT_TOKENS, OUTPUT_TOKENS = 40, 24


@pytest.fixture(scope="module")
def metrics_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, metrics_port: int) -> Iterator[RunningCluster]:
    model = make_tiny("llama", tmp_path_factory.mktemp("model") / "tiny", max_len=256)
    flags = {
        "planner": ["--overload-policy", "recompute"],
        "monitor": ["--dwell-s", "1", "--metrics-port", str(metrics_port)],
    }
    with running_cluster(Path(model), workers=WORKERS, device_memory_bytes=2 << 20, flags=flags) as cluster:
        yield cluster


def metrics(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}


async def generate(client: AsyncClient, count: int) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    async with asyncio.TaskGroup() as tasks:
        for i in range(count):
            token_ids = [3 + i % 500] * PROMPT_TOKENS
            tasks.create_task(client.generate(token_ids=token_ids, sampling=sampling, include_text=False))


def test_a_burst_is_an_overload_and_a_moderate_load_is_not(running: RunningCluster, metrics_port: int) -> None:
    async def story() -> None:
        async with AsyncClient(running.cluster.address) as client:
            status = await until(client, idle)
            blocks = sum(worker.load.block_count * worker.load.block_tokens for worker in status.workers if worker.load)
            assert status.model is not None
            kv_bytes = blocks * status.model.kv_bytes_per_token

            def groups_bytes(now: dict[str, float]) -> list[float]:
                return [value for name, value in now.items() if name.startswith("ballast_kv_capacity_bytes{")]

            await metrics_until(metrics_port, lambda now: now["ballast_cluster_kv_capacity_bytes"] == kv_bytes)
            # The sum is updated every tick, the groups' values once a second.
            await metrics_until(metrics_port, lambda now: sum(groups_bytes(now)) == kv_bytes)

            for _ in range(20):
                await generate(client, 4)
            quiet = metrics(metrics_port)
            assert quiet["ballast_overloads_total"] == 0
            assert len(groups_bytes(quiet)) == WORKERS
            assert sum(groups_bytes(quiet)) == quiet["ballast_cluster_kv_undropped_bytes"] == kv_bytes

            listening = asyncio.Event()
            told = asyncio.create_task(first_overload(running, listening))
            await listening.wait()
            full = asyncio.create_task(
                metrics_until(metrics_port, lambda now: now["ballast_cluster_kv_demand_bytes"] > 0.7 * kv_bytes)
            )

            async def as_long_as_it_takes() -> None:
                while not (told.done() and full.done()):
                    await generate(client, 600)

            burst = asyncio.create_task(as_long_as_it_takes())
            overload = await told
            await full
            assert overload.required_bytes > 0
            assert {group.leader_id for group in overload.groups} == {w.worker_id for w in status.workers}
            assert sum(group.capacity_bytes for group in overload.groups) == kv_bytes
            assert all(group.used_bytes <= group.capacity_bytes for group in overload.groups)
            await metrics_until(metrics_port, lambda now: now["ballast_overloads_total"] > 0)
            await burst
            await metrics_until(metrics_port, lambda now: now["ballast_cluster_kv_demand_bytes"] == 0)
            assert metrics(metrics_port)["ballast_reliefs_total"] == 0, "no relief may be started"

    running.run(story())


async def first_overload(running: RunningCluster, listening: asyncio.Event) -> monitor_pb2.Overload:
    """The first overload event that a planner would receive. Sets `listening` once the subscription is active."""
    async with open_channel(running.cluster.processes["monitor"][0].address) as channel:
        watch = monitor_pb2_grpc.MonitorServiceStub(channel).WatchEvents(monitor_pb2.WatchEventsRequest())
        async with asyncio.timeout(60):
            while True:
                event = await watch.read()
                assert isinstance(event, monitor_pb2.WatchEventsResponse), "the monitor ended the stream"
                listening.set()  # the first event describes the current state
                if event.WhichOneof("event") == "overload":
                    assert event.cause_id
                    return event.overload


async def metrics_until(
    port: int, holds: Callable[[dict[str, float]], bool], within_s: float = 60.0
) -> dict[str, float]:
    loop = asyncio.get_running_loop()
    give_up_at_s = loop.time() + within_s
    while True:
        now = await asyncio.to_thread(metrics, port)
        if holds(now):
            return now
        assert loop.time() < give_up_at_s, f"after {within_s} s the metrics are {now}"
        await asyncio.sleep(0.05)
