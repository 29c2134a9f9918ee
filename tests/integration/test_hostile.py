"""No data sent to a port ends a process or withholds tokens from other clients."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from ballast.client import AsyncClient
from ballast.common.errors import BallastError, InvalidRequest, NotActive
from ballast.common.sampling import SamplingParams
from ballast.rpc.channel import open_channel
from ballast.rpc.errors import from_rpc_error
from ballastpb.cluster.v1 import cluster_pb2
from ballastpb.inference.v1 import inference_pb2, inference_pb2_grpc
from ballastpb.monitor.v1 import monitor_pb2, monitor_pb2_grpc
from ballastpb.planner.v1 import planner_pb2, planner_pb2_grpc
from benchmarks.fuzz import Fuzz, link_addresses
from tests.support.cluster import RunningCluster, idle, running_cluster, until
from tests.support.crowd import (
    DRIP,
    EMPTY,
    HUGE,
    LARGE,
    PREFACE,
    READERS,
    SILENT,
    STALLED,
    Case,
    Clients,
    every_port,
)
from tools.local.cluster import LocalCluster, ServiceProcess
from tools.model.tiny import make_tiny

GARBAGE = b"\xff\xff\xff\xff"
REPORT, ATTACH = "/ballastpb.monitor.v1.MonitorService/Report", "/ballastpb.worker.v1.WorkerService/Attach"
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    model = make_tiny("llama", tmp_path_factory.mktemp("model") / "tiny", max_len=4096)
    arguments: dict[str, Any] = {
        "workers": 2,
        "dispatchers": 2,
        "monitors": 2,
        "planners": 2,
        "device_memory_bytes": 16 << 20,
    }
    arguments |= {"gateways": 1, "metrics_port": 0, "flags": {"dispatcher": ["--max-connections", "64"]}}
    with running_cluster(
        Path(model), environ={"BALLAST_WORKER__DEV": "{check_every_steps: 0}"}, **arguments
    ) as cluster:
        yield cluster


async def serves(cluster: LocalCluster) -> list[int]:
    """Sends a plain request and returns its tokens. Checks that no process has ended."""
    async with AsyncClient(cluster.address) as client:
        answer = await client.generate(token_ids=(5, 6, 7), sampling=GREEDY, deadline_s=60.0)
    await asyncio.sleep(0.5)  # a crash shows within this time
    assert cluster.crash() is None
    return list(answer.token_ids)


async def sent_raw(process: ServiceProcess, method: str, data: bytes) -> BallastError:
    async with open_channel(process.address) as channel:
        call = cast(Any, channel.stream_stream)(method)(timeout=60)
        await call.write(data)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    return from_rpc_error(caught.value, process.id)


def test_four_bytes_that_are_not_a_message_fail_one_call(running: RunningCluster) -> None:
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
        await asyncio.sleep(4.0)  # until flow control blocks the dispatcher's writes to this client
        await channel.close()
        assert await serves(running.cluster)

    running.run(story())


async def known_model(cluster: LocalCluster) -> cluster_pb2.ModelInfo:
    """The model as the active monitor reports it, once a worker has registered."""
    async with asyncio.timeout(60):
        while True:
            for process in cluster.processes["monitor"]:
                async with open_channel(process.address) as channel:
                    stub = monitor_pb2_grpc.MonitorServiceStub(channel)
                    status = await stub.GetClusterStatus(monitor_pb2.GetClusterStatusRequest(), timeout=60)
                if status.instances:
                    return status.instances[0].instance.model
            await asyncio.sleep(0.1)


def test_an_impossible_position_is_refused_and_crashes_no_planner(running: RunningCluster) -> None:
    async def story() -> None:
        refused = 0
        model = await known_model(running.cluster)
        for process in running.cluster.processes["monitor"]:
            async with open_channel(process.address) as channel:
                stub = monitor_pb2_grpc.MonitorServiceStub(channel)
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


def test_compressed_messages_that_expand_beyond_the_limit_are_refused(running: RunningCluster) -> None:
    async def story() -> None:
        options = (("grpc.max_send_message_length", -1),)
        gzip = grpc.Compression.Gzip
        async with grpc.aio.insecure_channel(running.cluster.address, options=options, compression=gzip) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Tokenize(inference_pb2.TokenizeRequest(text="x " * (24 << 20)), timeout=60)
        assert isinstance(from_rpc_error(caught.value, "dispatcher"), InvalidRequest)
        assert await serves(running.cluster)

    running.run(story())


def test_slow_connections_to_link_ports_delay_no_drop(running: RunningCluster) -> None:
    """Slow connections to all link ports, including those of a worker that has no links yet, must not delay a drop."""
    cluster = running.cluster

    async def drip(address: str) -> None:
        host, _, port = address.rpartition(":")
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(host, int(port))
                with contextlib.closing(writer):
                    while True:
                        writer.write(b"{")
                        await writer.drain()
                        await asyncio.sleep(0.35)

    async def story() -> None:
        dripping = [asyncio.create_task(drip(address)) for address in await link_addresses(cluster)]
        try:
            fresh = await cluster.start_worker()
            dripping += [asyncio.create_task(drip(address)) for address in await link_addresses(cluster)]
            await asyncio.sleep(0.5)
            async with open_channel(cluster.address) as channel:
                planner = planner_pb2_grpc.PlannerServiceStub(channel)
                workers = [cluster.processes["worker"][0].id, fresh.id]
                dropped = planner_pb2.DropRequest(worker_ids=workers, request_id="while it drips")
                await settled(planner, (await planner.Drop(dropped, timeout=60)).epoch)
                assert await serves(cluster)
                restored = planner_pb2.RestoreRequest(request_id="while it drips still")
                await settled(planner, (await planner.Restore(restored, timeout=60)).epoch)
        finally:
            for task in dripping:
                task.cancel()
            await asyncio.gather(*dripping, return_exceptions=True)
        assert await serves(cluster)

    running.run(story())


async def settled(planner: "planner_pb2_grpc.PlannerServiceAsyncStub", epoch: int) -> None:
    async with asyncio.timeout(90.0):
        while True:
            listed = (await planner.ListTransitions(planner_pb2.ListTransitionsRequest(), timeout=60)).transitions
            [found] = [one for one in listed if one.epoch == epoch]
            if found.phase in ("done", "aborted"):
                assert found.phase == "done", found.summary
                return
            await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    "case",
    [
        Case(SILENT, 600, 1.5, everywhere=True),
        Case(PREFACE, 600, 1.5, everywhere=True),
        Case(DRIP, 100, 2.0, everywhere=True),
        Case(STALLED, 60, 3.0),
        Case(READERS, 120, 2.0),
        Case(HUGE, 6, 1.5),
        Case(LARGE, 12, 1.5),
        Case(EMPTY, 2_000_000, 1.0),
    ],
    ids=lambda case: case.kind,
)
def test_an_attack_leaks_nothing_and_other_clients_are_served(running: RunningCluster, case: Case) -> None:
    async def story() -> None:
        clients = Clients(running.cluster, await every_port(running.cluster))
        outcome = await clients.run(case)
        assert outcome.there
        assert (outcome.ended, outcome.left, outcome.during.failures) == ("", "", [])
        # An idle machine needs less than 0.1 s (benchmarks/results: hostile).
        assert outcome.during.ms(0.5) < outcome.before.ms(1.0) + 1000
        assert outcome.during.tokens_s, "no tokens were generated during the attack"
        if case.kind in (HUGE, LARGE, EMPTY):
            bounds = {HUGE: "larger than max", LARGE: "at most", EMPTY: "more than"}
            assert outcome.answers
            assert all(bounds[case.kind] in answer for answer in outcome.answers), "an answer does not name the bound"

    running.run(story())


@pytest.mark.rotating
def test_ten_thousand_mutated_messages_crash_no_process(running: RunningCluster) -> None:
    async def story() -> None:
        report = await Fuzz(running.cluster, seed=7, ports=await link_addresses(running.cluster)).run(10_000)
        assert report.ended == []
        assert report.same_tokens
        assert report.waits_s, "the real client made no progress"
        grown = {name: after - before for name, (before, after) in report.memory_mib.items() if after - before > 200}
        assert grown == {}
        assert await serves(running.cluster)

    running.run(story(), timeout_s=250.0)


@pytest.mark.parametrize("stopped_s", [0.0, 2.0], ids=["killed", "stopped, then killed"])
def test_killing_a_dispatcher_under_load_crashes_no_worker(running: RunningCluster, stopped_s: float) -> None:
    async def story() -> None:
        cluster = running.cluster
        victim = cluster.processes["dispatcher"][1]
        crowd = Clients(cluster, [victim.address]).crowd(Case(READERS, 120, 0.0, everywhere=True))
        async with crowd as outcome:
            await asyncio.sleep(1.0)
            victim.may_end = True
            if stopped_s:
                os.kill(victim.pid, signal.SIGSTOP)
                await asyncio.sleep(stopped_s)
            victim.child.kill()
            await asyncio.sleep(1.0)
        assert outcome.there == 120
        cluster.respawn(victim.id)
        assert await serves(cluster), "the cluster does not serve"
        async with AsyncClient(cluster.address) as client:
            await until(client, idle)

    running.run(story())
