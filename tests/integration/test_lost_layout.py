"""The state server loses all data and no planner is left. Running requests continue, and a new planner rediscovers the
groups.
"""

import asyncio
import signal
from pathlib import Path

import grpc.aio
import pytest
import redis.asyncio

from ballast.client import AsyncClient, ClusterStatus
from ballast.common.sampling import SamplingParams
from ballast.rpc.channel import open_channel
from ballastpb.planner.v1 import planner_pb2 as pb
from ballastpb.planner.v1 import planner_pb2_grpc
from tests.support.cluster import idle, running_cluster, until
from tools.model.tiny import make_tiny

PROMPT = [5, 6, 7, 8] * 4
SAMPLING = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def sizes(status: ClusterStatus) -> list[int]:
    return [] if status.layout is None else [len(group.members) for group in status.layout.groups]


def epoch(status: ClusterStatus) -> int:
    return 0 if status.layout is None else status.layout.epoch


@pytest.mark.rotating
def test_a_pipeline_outlives_its_planner_and_the_state(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "tiny", max_len=256)
    flags = {"worker": ["--dtype", "float64"], "planner": ["--overload-policy", "recompute"]}
    with running_cluster(model, workers=2, device_memory_bytes=8 << 20, flags=flags) as running:
        cluster = running.cluster

        async def ask(client: AsyncClient) -> tuple[int, ...]:
            return (await client.generate(token_ids=PROMPT, sampling=SAMPLING)).token_ids

        async def story() -> None:
            async with AsyncClient(cluster.address) as client:
                expected = await ask(client)
                async with open_channel(cluster.processes["planner"][0].address) as channel:
                    stub = planner_pb2_grpc.PlannerServiceStub(channel)
                    names = [worker.id for worker in cluster.processes["worker"]]
                    await stub.Drop(pb.DropRequest(worker_ids=names, request_id="drop"), timeout=60)
                await until(client, lambda now: sizes(now) == [2] and idle(now))
                assert await ask(client) == expected

                cluster.kill("planner")
                async with redis.asyncio.from_url(cluster.redis_url) as state:
                    await state.flushall()
                before = await client.status()
                assert await ask(client) == expected
                planner = await cluster.start_planner()
                after = await until(client, lambda now: epoch(now) > epoch(before))
                assert sizes(after) == [2]
                assert await ask(client) == expected

                async with open_channel(planner.address) as channel:
                    stub = planner_pb2_grpc.PlannerServiceStub(channel)
                    await stub.Restore(pb.RestoreRequest(request_id="restore"), timeout=60)
                await until(client, lambda now: sizes(now) == [1, 1])
                assert await ask(client) == expected

        running.run(story())


def test_after_the_loss_of_a_member_layers_come_from_their_holders(tmp_path: Path) -> None:
    """The checkpoint has been deleted: the survivors hold two thirds of the layers, and the worker outside the group
    holds all.
    """
    model = make_tiny("llama", tmp_path / "tiny", max_len=256, layers=6)
    with running_cluster(model, workers=4, device_memory_bytes=8 << 20) as running:
        cluster = running.cluster

        async def story() -> None:
            async with AsyncClient(cluster.address) as client:
                expected = (await client.generate(token_ids=PROMPT, sampling=SAMPLING)).token_ids
                async with open_channel(cluster.processes["planner"][0].address) as channel:
                    stub = planner_pb2_grpc.PlannerServiceStub(channel)
                    names = [worker.id for worker in cluster.processes["worker"]][:3]
                    await stub.Drop(pb.DropRequest(worker_ids=names, request_id="drop"), timeout=60)
                await until(client, lambda now: sizes(now) == [3, 1] and idle(now))
                for weights in model.glob("*.safetensors"):
                    weights.unlink()
                cluster.kill("worker", 1)
                await until(client, lambda now: sizes(now) == [1, 1, 1] and idle(now))
                answers = [client.generate(token_ids=PROMPT, sampling=SAMPLING) for _ in range(12)]
                assert {answer.token_ids for answer in await asyncio.gather(*answers)} == {expected}

        running.run(story())


@pytest.mark.rotating
def test_no_group_is_invented_for_workers_that_serve_alone(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "tiny", max_len=256)
    with running_cluster(model, workers=2, device_memory_bytes=8 << 20) as running:

        async def story() -> None:
            async with AsyncClient(running.cluster.address) as client:
                running.cluster.kill("planner")
                async with redis.asyncio.from_url(running.cluster.redis_url) as state:
                    await state.flushall()
                await running.cluster.start_planner()
                late = await running.cluster.start_worker()
                status = await until(client, lambda now: len(sizes(now)) == 3)
                assert status.layout is not None
                assert late.id in {m.worker_id for g in status.layout.groups for m in g.members}
                assert sizes(status) == [1, 1, 1]

        running.run(story())


@pytest.mark.rotating
def test_a_state_server_that_loses_a_commit_freezes_nothing(tmp_path: Path) -> None:
    """Resembles a failover to a lagging replica: the planner knows only what the replica has."""
    model = make_tiny("llama", tmp_path / "tiny", max_len=256)
    flags = {"worker": ["--dtype", "float64"], "planner": ["--overload-policy", "recompute"]}
    with running_cluster(model, workers=3, device_memory_bytes=8 << 20, flags=flags) as running:
        cluster = running.cluster

        async def story() -> None:
            async with (
                AsyncClient(cluster.address) as client,
                redis.asyncio.from_url(cluster.redis_url) as state,  # pyright: ignore[reportUnknownMemberType]
            ):
                expected = (await client.generate(token_ids=PROMPT, sampling=SAMPLING)).token_ids
                async with open_channel(cluster.processes["planner"][0].address) as channel:
                    stub = planner_pb2_grpc.PlannerServiceStub(channel)
                    names = [worker.id for worker in cluster.processes["worker"][:2]]
                    cluster.kill("worker", 1, signal.SIGSTOP)  # otherwise the preparation might end unobserved
                    asked = stub.Drop(pb.DropRequest(worker_ids=names, request_id="drop"), timeout=60)
                    before = await _while_preparing(state)
                    cluster.kill("worker", 1, signal.SIGCONT)
                    await asked
                await until(client, lambda now: sorted(sizes(now)) == [1, 2] and idle(now))
                cluster.kill("planner")
                await state.delete(*before)
                for key, (value, left_ms) in before.items():
                    await state.restore(key, left_ms, value, replace=True)
                planner = await cluster.start_planner()
                async with open_channel(planner.address) as channel:
                    stub = planner_pb2_grpc.PlannerServiceStub(channel)
                    for number in range(300):  # until the planner has rediscovered the groups
                        try:
                            await stub.Restore(pb.RestoreRequest(request_id=f"restore {number}"), timeout=60)
                        except grpc.aio.AioRpcError:
                            await asyncio.sleep(0.2)
                        else:
                            break
                await until(client, lambda now: sizes(now) == [1, 1, 1])
                cluster.kill("worker", 2)
                await until(client, lambda now: sizes(now) == [1, 1])
                assert (await client.generate(token_ids=PROMPT, sampling=SAMPLING)).token_ids == expected

        running.run(story())


async def _while_preparing(state: redis.asyncio.Redis) -> dict[str, tuple[bytes, int]]:
    """Returns the keys of layout and transition as dumped before the commit: name -> (value, TTL in ms)."""
    keys = ("ballast:transition", "ballast:layout", "ballast:layout:meta")
    while True:
        found: dict[str, tuple[bytes, int]] = {}
        for key in keys:
            value, left_ms = await state.dump(key), await state.pttl(key)
            if value is not None:
                found[key] = value, max(0, left_ms)
        if await state.hget("ballast:transition", "stage") == b"preparing" and len(found) == len(keys):  # pyright: ignore[reportGeneralTypeIssues]
            return found
        await asyncio.sleep(0)
