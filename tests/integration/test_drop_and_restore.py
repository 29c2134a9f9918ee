"""A manual drop and restore under load on a real cluster: no request waits for another one to end, and no token
changes.
"""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from ballast.client import AsyncClient, ClusterStatus
from ballast.client.access import Access
from ballast.common.errors import NotPossible
from ballast.common.sampling import SamplingParams
from ballast.rpc.channel import open_channel
from ballast.rpc.errors import from_rpc_error
from ballastpb.planner.v1 import planner_pb2 as pb
from ballastpb.planner.v1 import planner_pb2_grpc
from tests.support.cluster import RunningCluster, idle, running_cluster, until
from tools.cli.main import main as ballast
from tools.model.tiny import make_tiny

PROMPTS = [[3 + i, 9, 4 + 2 * i, 7] * (3 + i % 4) for i in range(12)]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    model = make_tiny("llama", tmp_path_factory.mktemp("model") / "tiny", max_len=512)
    flags = {"worker": ["--dtype", "float64", "--log-level", "debug"], "planner": ["--overload-policy", "recompute"]}
    with running_cluster(Path(model), workers=2, device_memory_bytes=8 << 20, flags=flags) as cluster:
        yield cluster


LONG = 350  # tokens, enough that requests still run when the drop begins


async def answer(client: AsyncClient, i: int, max_tokens: int) -> tuple[int, ...]:
    """The tokens of request `i`: greedy for odd i, seeded sampling for even i."""
    sampling = SamplingParams(temperature=0.0 if i % 2 else 1.0, seed=i, max_tokens=max_tokens + 7 * i, ignore_eos=True)
    return (await client.generate(token_ids=PROMPTS[i], sampling=sampling)).token_ids


async def answers(client: AsyncClient, max_tokens: int) -> list[tuple[int, ...]]:
    """The answers of all requests, sent at once."""
    return list(await asyncio.gather(*(answer(client, i, max_tokens) for i in range(len(PROMPTS)))))


@contextlib.asynccontextmanager
async def load(client: AsyncClient, expected: list[tuple[int, ...]]) -> AsyncGenerator[None]:
    """Repeats every request until the block ends, however slow this machine is; on exit, waits for the last answers.

    Each answer must be as expected.
    """
    over = asyncio.Event()

    async def again_and_again(i: int) -> None:
        while not over.is_set():
            assert await answer(client, i, LONG) == expected[i]

    async with asyncio.TaskGroup() as tasks:
        for i in range(len(PROMPTS)):
            tasks.create_task(again_and_again(i))
        await until(client, _has_kv)
        yield
        over.set()


def _has_kv(now: ClusterStatus) -> bool:
    """Whether the running requests hold more KV than their prompts need. A request that has not reached a worker yet
    cannot be a victim.
    """
    return sum(group.load.used_block_count for group in now.groups if group.load is not None) >= 30


class Planner:
    def __init__(self, address: str) -> None:
        self._channel = open_channel(address)
        self.stub = planner_pb2_grpc.PlannerServiceStub(self._channel)

    async def end(self, epoch: int) -> pb.Transition:
        loop = asyncio.get_running_loop()
        give_up_at_s = loop.time() + 60.0
        while True:
            listed = (await self.stub.ListTransitions(pb.ListTransitionsRequest(), timeout=60)).transitions
            found = next((one for one in listed if one.epoch == epoch), None)
            if found is not None and found.phase in ("done", "aborted"):
                return found
            assert loop.time() < give_up_at_s, f"epoch {epoch} is still in transition: {listed}"
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        await self._channel.close()


def test_drop_and_restore_under_load_change_no_token(running: RunningCluster) -> None:
    async def story() -> None:
        planner = Planner(running.cluster.processes["planner"][0].address)
        async with AsyncClient(running.cluster.address) as client:
            expected = await answers(client, LONG)
            before = await until(client, idle)

            async with load(client, expected):
                request = pb.DropRequest(worker_ids=["worker-1", "worker-0"], request_id="drop-1")
                begun = await planner.stub.Drop(request, timeout=60)
                again = await planner.stub.Drop(request, timeout=60)
                assert again.epoch == begun.epoch, "a repeated request gets the same answer"
                dropped = await planner.end(begun.epoch)
            assert dropped.phase == "done", dropped.summary
            assert dropped.victim_count > 0
            assert dropped.kv_bytes_exchanged > 0
            # The member with more KV leads, which depends on the prefixes that requests share.
            says = r"group \{(worker-\d),(worker-\d)\}: dropped layers 2-3 of \1, 0-1 of \2"
            assert re.match(says, dropped.summary), dropped.summary
            grouped = await until(client, idle)
            assert grouped.layout is not None
            assert [len(group.members) for group in grouped.layout.groups] == [2]
            capacity = [sum(group.capacity_tokens for group in status.groups) for status in (before, grouped)]
            assert capacity[1] > capacity[0]
            assert await answers(client, 20) == [tokens[: 20 + 7 * i] for i, tokens in enumerate(expected)]

            async with load(client, expected):
                begun = await planner.stub.Restore(pb.RestoreRequest(request_id="restore-1"), timeout=60)
                restored = await planner.end(begun.epoch)
            assert restored.phase == "done", restored.summary
            assert restored.parameter_bytes_pulled > 0
            after = await until(client, idle)
            assert after.layout is not None
            assert before.layout is not None
            assert after.layout.groups == before.layout.groups
            assert [w.load and w.load.memory for w in after.workers] == [
                w.load and w.load.memory for w in before.workers
            ]
        await planner.close()
        logs = [(running.cluster.log_dir / f"worker-{i}.log").read_text() for i in range(2)]
        made = [line for log in logs for line in log.splitlines() if "link is up" in line]
        assert made, "no link was logged"

    running.run(story())


def test_impossible_drops_and_restores_are_refused(running: RunningCluster) -> None:
    async def story() -> None:
        planner = Planner(running.cluster.processes["planner"][0].address)
        for request, why in (
            (pb.DropRequest(worker_ids=["worker-0", "nobody"], request_id="r1"), "not in the layout: nobody"),
            (pb.DropRequest(worker_ids=["worker-0"], request_id="r2"), "2 to 4 different workers"),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                await planner.stub.Drop(request, timeout=60)
            error = from_rpc_error(caught.value, "planner")
            assert isinstance(error, NotPossible)
            assert why in str(error)
        with pytest.raises(grpc.RpcError) as caught:
            await planner.stub.Restore(pb.RestoreRequest(request_id="r3"), timeout=60)
        assert "no group is a pipeline" in str(from_rpc_error(caught.value, "planner"))
        await planner.close()

    running.run(story())


def test_the_command_line_does_it_too(
    running: RunningCluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command line talks only to the dispatcher."""

    reach = Access.open

    def only_the_dispatcher(access: Access, address: str) -> grpc.aio.Channel:
        assert address == running.cluster.address
        return reach(access, address)

    monkeypatch.setattr(Access, "open", only_the_dispatcher)
    address = ["--address", running.cluster.address]
    assert ballast(["plan", "--explain", "--bytes", "1000", *address]) == 0
    assert "dropped layers " in capsys.readouterr().out
    assert ballast(["drop", "--bytes", "1000", *address]) == 0
    assert "drop done" in capsys.readouterr().out
    assert ballast(["restore", *address]) == 0
    assert "dissolved, restored after" in capsys.readouterr().out
    assert ballast(["transitions", "--json", *address]) == 0
    listed = json.loads(capsys.readouterr().out)["transitions"]
    assert [(one["kind"], one["phase"]) for one in listed[:2]] == [("restore", "done"), ("drop", "done")]
    assert ballast(["restore", *address]) == 1
    assert "no group is a pipeline" in capsys.readouterr().err
