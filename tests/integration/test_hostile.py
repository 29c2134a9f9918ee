"""Whatever comes over a port, no process ends, and whoever wants its tokens gets them."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from ballast.client import AsyncClient
from ballast.common.errors import BallastError, InvalidRequest, NotActive
from ballast.common.sampling import SamplingParams
from ballast.local.cluster import LocalCluster, ServiceProcess
from ballast.model.tiny import make_tiny
from ballast.rpc.channel import open_channel
from ballast.rpc.errors import from_rpc_error
from ballastpb.cluster.v1 import cluster_pb2
from ballastpb.inference.v1 import inference_pb2, inference_pb2_grpc
from ballastpb.monitor.v1 import monitor_pb2, monitor_pb2_grpc
from benchmarks.fuzz import Fuzz, link_addresses
from tests.support.cluster import RunningCluster, running_cluster

GARBAGE = b"\xff\xff\xff\xff"
REPORT, ATTACH = "/ballastpb.monitor.v1.MonitorService/Report", "/ballastpb.worker.v1.WorkerService/Attach"
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    model = make_tiny("llama", tmp_path_factory.mktemp("model") / "tiny", max_len=4096)
    arguments: dict[str, Any] = {"workers": 2, "monitors": 2, "planners": 2, "device_memory_bytes": 16 << 20}
    with running_cluster(Path(model), environ={"BALLAST_WORKER__CHECK_EVERY_STEPS": "0"}, **arguments) as cluster:
        yield cluster


async def serves(cluster: LocalCluster) -> list[int]:
    """The tokens of a plain request; nobody has ended meanwhile."""
    async with AsyncClient(cluster.address) as client:
        answer = await client.generate(token_ids=(5, 6, 7), sampling=GREEDY, deadline_s=60.0)
    await asyncio.sleep(0.5)  # whoever stops does so by now
    assert cluster.crash() is None
    return list(answer.token_ids)


async def sent_raw(process: ServiceProcess, method: str, data: bytes) -> BallastError:
    async with open_channel(process.address) as channel:
        call = cast(Any, channel.stream_stream)(method)(timeout=30)
        await call.write(data)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    return from_rpc_error(caught.value, process.id)


def test_four_bytes_that_are_no_message_end_one_call(running: RunningCluster) -> None:
    async def story() -> None:
        cluster = running.cluster
        for process in cluster.processes["monitor"]:
            assert isinstance(await sent_raw(process, REPORT, GARBAGE), InvalidRequest)
        for process in cluster.processes["worker"]:
            assert isinstance(await sent_raw(process, ATTACH, GARBAGE), InvalidRequest)
        assert await serves(cluster)

    running.run(story())


def test_a_client_that_reads_nothing_and_leaves_ends_its_own_stream(running: RunningCluster) -> None:
    async def story() -> None:
        narrow = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16))
        channel = grpc.aio.insecure_channel(running.cluster.address, options=narrow)
        request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[5, 6, 7]), omit_text=True)
        request.sampling.MergeFrom(cluster_pb2.SamplingParams(max_tokens=3000, ignore_eos=True, logprobs=20))
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request)
        await call.read()
        await asyncio.sleep(4.0)  # until flow control holds the dispatcher's writes back
        await channel.close()
        assert await serves(running.cluster)

    running.run(story())


def test_an_impossible_place_is_refused_and_ends_no_planner(running: RunningCluster) -> None:
    async def story() -> None:
        refused = 0
        for process in running.cluster.processes["monitor"]:
            async with open_channel(process.address) as channel:
                stub = monitor_pb2_grpc.MonitorServiceStub(channel)
                status = await stub.GetClusterStatus(monitor_pb2.GetClusterStatusRequest(), timeout=30)
                model = status.instances[0].instance.model
                half = cluster_pb2.Member(worker_id="zz", incarnation=1, last_layer=1)
                rest = cluster_pb2.Member(worker_id="zz", incarnation=1, first_layer=1, last_layer=model.layer_count)
                group = cluster_pb2.Group(group_id="zz", members=[half, rest])
                announce = monitor_pb2.Announce(worker_id="zz", incarnation=1, address="127.0.0.1:1", model=model)
                place = cluster_pb2.Place(epoch=1000, group=group)
                call = stub.Report()
                await call.write(monitor_pb2.ReportRequest(announce=announce, place=place))
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call.read()
                error = from_rpc_error(caught.value, process.id)
                assert isinstance(error, (InvalidRequest, NotActive))
                refused += isinstance(error, InvalidRequest)
        assert refused
        assert await serves(running.cluster)

    running.run(story())


def test_millions_of_empty_turns_are_refused_while_everybody_is_served(running: RunningCluster) -> None:
    async def story() -> None:
        bomb = inference_pb2.TokenizeRequest()
        bomb.conversation.messages.extend([inference_pb2.ChatMessage()] * 2_000_000)
        data = bomb.SerializeToString()
        async with open_channel(running.cluster.address) as channel:
            tokenize = cast(Any, channel.unary_unary)("/ballastpb.inference.v1.InferenceService/Tokenize")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await tokenize(data, timeout=60)
        assert isinstance(from_rpc_error(caught.value, "dispatcher"), InvalidRequest)
        assert await serves(running.cluster)

    running.run(story())


def test_ten_thousand_mutated_messages_end_nobody(running: RunningCluster) -> None:
    async def story() -> None:
        report = await Fuzz(running.cluster, seed=7, ports=await link_addresses(running.cluster)).run(10_000)
        assert report.ended == []
        assert report.same_tokens
        assert report.waits_s, "the real client went on meanwhile"
        grown = {name: after - before for name, (before, after) in report.memory_mib.items() if after - before > 200}
        assert grown == {}
        assert await serves(running.cluster)

    running.run(story(), timeout_s=250.0)
