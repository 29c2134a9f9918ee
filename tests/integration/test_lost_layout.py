"""The state server loses everything and no planner is left: what runs goes on, and the groups are known again."""

from pathlib import Path

import redis.asyncio

from ballast.client import AsyncClient, ClusterStatus
from ballast.common.sampling import SamplingParams
from ballast.model.tiny import make_tiny
from ballast.rpc.channel import open_channel
from ballastpb.planner.v1 import planner_pb2 as pb
from ballastpb.planner.v1 import planner_pb2_grpc
from tests.support.cluster import idle, running_cluster, until

PROMPT = [5, 6, 7, 8] * 4
SAMPLING = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def sizes(status: ClusterStatus) -> list[int]:
    return [] if status.layout is None else [len(group.members) for group in status.layout.groups]


def epoch(status: ClusterStatus) -> int:
    return 0 if status.layout is None else status.layout.epoch


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


def test_nothing_is_made_up_about_workers_that_are_alone(tmp_path: Path) -> None:
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
