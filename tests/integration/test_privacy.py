"""No log contains a client's text or the state server's password, not even at debug level or after failures."""

import asyncio
import contextlib
from pathlib import Path

import grpc.aio
import pytest

from ballast.client import AsyncClient
from ballast.common.errors import BallastError
from ballast.common.sampling import SamplingParams
from ballast.rpc.channel import open_channel
from ballastpb.cluster.v1 import cluster_pb2
from ballastpb.inference.v1 import inference_pb2, inference_pb2_grpc
from tests.support.cluster import running_cluster, until
from tools.local.cluster import LocalCluster
from tools.local.state_server import PrivateStateServer
from tools.model.tiny import make_tiny

pytestmark = pytest.mark.rotating

PROMPT, STOP, PASSWORD = "diarycanary", "stopcanary", "passwordcanary"
# Token ids that occur in this order nowhere else in the logs.
IDS = (411, 422, 433)


async def ask(cluster: LocalCluster) -> None:
    """Sends valid and invalid requests of every kind, with words that must not appear in any log."""
    sampling = SamplingParams(max_tokens=20, stop=(STOP,), ignore_eos=True)
    async with AsyncClient(cluster.address) as client:
        await client.generate(PROMPT, sampling=sampling)
        await client.generate(token_ids=IDS, sampling=sampling)
        async for _ in client.stream(PROMPT, sampling=SamplingParams(max_tokens=3000, stop=(STOP,), ignore_eos=True)):
            break  # the client disconnects
        with contextlib.suppress(BallastError):
            await client.generate(PROMPT * 5000, sampling=sampling)  # too long for the model
    async with open_channel(cluster.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        messages = [inference_pb2.ChatMessage(role=PROMPT, content=PROMPT)]
        bad = [
            inference_pb2.GenerateRequest(conversation=inference_pb2.Conversation(messages=messages)),
            inference_pb2.GenerateRequest(text=PROMPT, sampling=cluster_pb2.SamplingParams(temperature=-1)),
            inference_pb2.GenerateRequest(text=PROMPT, sampling=cluster_pb2.SamplingParams(stop=[STOP, ""])),
            inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[*IDS, 1 << 20])),
        ]
        for request in bad:
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for _ in stub.Generate(request, timeout=60):
                    pass


async def lose_a_worker(cluster: LocalCluster) -> None:
    """Kills a worker while it answers."""
    async with AsyncClient(cluster.address) as client:
        sampling = SamplingParams(max_tokens=3000, stop=(STOP,), ignore_eos=True)
        answers = [asyncio.ensure_future(client.generate(PROMPT, sampling=sampling)) for _ in range(4)]
        await until(client, lambda now: now.running_request_count == len(answers))
        cluster.kill("worker", 0)
        await asyncio.gather(*answers)


def test_no_log_shows_client_text_or_a_password(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "model", max_len=4096)
    logs = tmp_path / "logs"
    user = ("--user", "app", "on", f">{PASSWORD}", "~*", "&*", "+@all")
    with PrivateStateServer(flags=user) as state:
        url = state.url.replace("redis://", f"redis://app:{PASSWORD}@")
        environ = {
            f"BALLAST_{service}__LOG_LEVEL": "debug" for service in ("MONITOR", "PLANNER", "WORKER", "DISPATCHER")
        }
        arguments = {"workers": 2, "device_memory_bytes": 16 << 20, "log_dir": logs, "redis_url": url}
        with running_cluster(model, environ=environ, **arguments) as running:
            running.run(ask(running.cluster))
            running.run(lose_a_worker(running.cluster))
            state.stop()  # every service logs the loss
            running.run(asyncio.sleep(3.0))
    said = {path.name: path.read_text() for path in logs.iterdir()}
    assert len(said) == 5
    everything = "\n".join(said.values())
    assert "redis://***@127.0.0.1" in everything
    for secret in (PROMPT, STOP, PASSWORD, f"{IDS[0]}, {IDS[1]}"):
        assert [name for name, log in said.items() if secret in log] == []
