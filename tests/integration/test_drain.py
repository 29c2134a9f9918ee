"""A draining process moves its running requests elsewhere, and no token changes."""

import asyncio
import signal
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from ballast.client import AsyncClient
from ballast.client.types import ClusterStatus
from ballast.common.sampling import SamplingParams
from ballast.rpc.channel import open_channel
from ballastpb.planner.v1 import planner_pb2 as pb
from ballastpb.planner.v1 import planner_pb2_grpc
from tests.support.cluster import running_cluster, until
from tests.support.reference import reference_greedy_batch
from tools.model.tiny import make_tiny

pytestmark = pytest.mark.rotating

PROMPTS = [[3 + i, 9, 4 + 2 * i, 7] * 5 for i in range(6)]
ENDLESS = SamplingParams(temperature=0.0, max_tokens=8000, ignore_eos=True)  # the test stops when it has enough


def test_running_requests_leave_a_draining_worker(tmp_path: Path) -> None:
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


def test_a_terminated_stage_exits_once_its_pipeline_is_dissolved(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "tiny", max_len=1024)
    flags = {"worker": ["--dtype", "float64"], "planner": ["--overload-policy", "recompute"]}
    prompts, sampling = PROMPTS[:3], replace(ENDLESS, max_tokens=250)

    def shape(status: ClusterStatus) -> list[list[str]]:
        groups = status.layout.groups if status.layout is not None else ()
        return [[member.worker_id for member in group.members] for group in groups]

    with running_cluster(model, workers=2, device_memory_bytes=16 << 20, flags=flags) as cluster:

        async def story() -> tuple[list[list[int]], list[pb.Transition]]:
            local = cluster.cluster
            async with AsyncClient(local.address) as client, open_channel(local.address) as channel:
                planner = planner_pb2_grpc.PlannerServiceStub(channel)
                names = ["worker-0", "worker-1"]
                await planner.Drop(pb.DropRequest(worker_ids=names, request_id=uuid.uuid4().hex), timeout=30.0)
                await until(client, lambda now: shape(now) == [names])
                asked = [
                    asyncio.create_task(client.generate(token_ids=prompt, sampling=sampling, deadline_s=120))
                    for prompt in prompts
                ]
                await until(client, lambda now: now.running_request_count == len(prompts))
                stage = local.kill("worker", 1, signal.SIGTERM)
                await until(client, lambda now: shape(now) == [["worker-0"]])
                answers = [list((await answer).token_ids) for answer in asked]
                assert await stage.child.wait(30.0)
                assert stage.child.returncode == 0
                listed = await planner.ListTransitions(pb.ListTransitionsRequest(), timeout=30.0)
                return answers, list(listed.transitions)

        answers, transitions = cluster.run(story())
    reference = reference_greedy_batch(model, prompts, [250] * len(prompts), "float64")
    assert answers == [list(one.token_ids) for one in reference]
    assert [(t.kind, t.phase, t.reason) for t in transitions] == [
        ("restore", "done", "drain: restore"),
        ("drop", "done", "operator: worker-0+worker-1"),
    ]
