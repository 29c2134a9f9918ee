"""A cluster with emulated engines: real processes and transitions, and every token is checked."""

import asyncio
import itertools
import random
from pathlib import Path

import pytest

from ballast.client import AsyncClient, SamplingParams
from ballast.rpc.channel import open_channel
from ballastpb.planner.v1 import planner_pb2 as pb
from ballastpb.planner.v1 import planner_pb2_grpc
from services.worker.emulation.tokens import answer
from sim.jobs.machines import catalogue_machine, stand_in
from tests.support.cluster import running_cluster, until

pytestmark = pytest.mark.rotating

VOCABULARY = 4096
_MAX_ANONYMOUS_KIB = 80 << 10


async def ask(client: AsyncClient, seed: int) -> bool:
    """Sends a request, and returns whether its answer has the expected tokens."""
    draw = random.Random(seed)
    prompt = [draw.randrange(VOCABULARY) for _ in range(draw.randrange(5, 1500))]
    sampling, tokens = SamplingParams(max_tokens=draw.randrange(20, 200), ignore_eos=True), list[int]()
    async for chunk in client.stream(token_ids=prompt, sampling=sampling, include_text=False):
        tokens += chunk.token_ids
    return tokens == answer(prompt, len(tokens), VOCABULARY) and len(tokens) == sampling.max_tokens


def anonymous_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


async def ended(stub: "planner_pb2_grpc.PlannerServiceAsyncStub", epoch: int) -> pb.Transition:
    async with asyncio.timeout(120):
        while True:
            listed = (await stub.ListTransitions(pb.ListTransitionsRequest(), timeout=60)).transitions
            found = [one for one in listed if one.epoch == epoch and one.phase in ("done", "aborted")]
            if found:
                return found[0]
            await asyncio.sleep(0.05)


def test_drops_and_restores_of_emulated_workers(tmp_path: Path) -> None:
    made = stand_in(tmp_path / "stand-in", catalogue_machine("A800", "Qwen2.5-14B", VOCABULARY))
    flags = {"worker": made.worker_flags, "planner": ["--overload-policy", "recompute"]}
    # The fork server lacks this variable, so workers are not forked from it: other tests may have made it import torch.
    environ = {"NOT_FORKED": "1"}
    with running_cluster(made.model, workers=2, device_memory_bytes=None, flags=flags, environ=environ) as running:

        async def story() -> None:
            cluster = running.cluster
            async with (
                AsyncClient(cluster.address) as client,
                open_channel(cluster.processes["planner"][0].address) as channel,
            ):
                stub = planner_pb2_grpc.PlannerServiceStub(channel)
                seeds, over = itertools.count(), asyncio.Event()

                async def load() -> None:
                    """Sends one request after another, so that one can always be a victim, however long the drop
                    takes.
                    """
                    while not over.is_set():
                        assert await ask(client, next(seeds))

                async with asyncio.TaskGroup() as tasks:
                    for _ in range(24):
                        tasks.create_task(load())
                    await until(client, lambda now: now.running_request_count >= 12)
                    begun = await stub.Drop(
                        pb.DropRequest(worker_ids=["worker-0", "worker-1"], request_id="drop"), timeout=60
                    )
                    dropped = await ended(stub, begun.epoch)
                    assert dropped.phase == "done", dropped.summary
                    assert dropped.victim_count > 0
                    begun = await stub.Restore(pb.RestoreRequest(request_id="restore"), timeout=60)
                    restored = await ended(stub, begun.epoch)
                    assert restored.phase == "done", restored.summary
                    over.set()

        running.run(story())
        for worker in running.cluster.processes["worker"]:
            assert anonymous_kib(worker.pid) < _MAX_ANONYMOUS_KIB
            assert "libtorch" not in Path(f"/proc/{worker.pid}/maps").read_text()


def test_migrations_between_emulated_workers(tmp_path: Path) -> None:
    made = stand_in(tmp_path / "stand-in", catalogue_machine("A800", "Qwen2.5-14B", VOCABULARY))
    flags = {
        "worker": [*made.worker_flags, "--overload-policy", "migrate"],
        "planner": ["--overload-policy", "migrate", "--dev", "migrate_below_tokens=1000000,migrate_above_tokens=0"],
    }
    with running_cluster(made.model, workers=2, device_memory_bytes=None, flags=flags) as running:

        def migrated() -> bool:
            return any(" migrated " in log.read_text() for log in running.cluster.log_dir.glob("worker-*.log"))

        async def story() -> None:
            seeds = itertools.count()

            async def load(client: AsyncClient) -> None:
                while not migrated():
                    assert await ask(client, next(seeds))

            async with (
                AsyncClient(running.cluster.address) as client,
                asyncio.timeout(180),
                asyncio.TaskGroup() as tasks,
            ):
                for _ in range(5):
                    tasks.create_task(load(client))

        running.run(story())
