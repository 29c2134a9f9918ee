"""A server as in every service: health with Watch, reflection, a port in use, and calls that end."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from ballast.common.errors import ConfigError
from ballast.rpc.channel import is_refused, open_channel
from ballast.rpc.server import RpcServer, when_done
from ballastpb.planner.v1 import planner_pb2 as pb
from ballastpb.planner.v1 import planner_pb2_grpc
from tests.support.name_server import NameServer

NAME = "ballastpb.planner.v1.PlannerService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Endless(planner_pb2_grpc.PlannerServiceServicer):
    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def GetLayout(self, request: pb.GetLayoutRequest, context: Any) -> pb.GetLayoutResponse:
        return pb.GetLayoutResponse(planner_id="p")

    async def WatchLayout(self, request: pb.WatchLayoutRequest, context: Any) -> AsyncIterator[pb.WatchLayoutResponse]:
        when_done(context, self.ended.set)
        while True:
            yield pb.WatchLayoutResponse()
            await asyncio.sleep(0.01)

    async def DrainWorker(self, request: pb.DrainWorkerRequest, context: Any) -> pb.DrainWorkerResponse:
        return pb.DrainWorkerResponse()


def serve(story: Callable[[RpcServer, grpc.aio.Channel, Endless], Awaitable[None]]) -> None:
    async def run() -> None:
        servicer = Endless()  # pyright: ignore[reportAbstractUsage]
        server = make(servicer, 0)
        port = await server.start()
        try:
            async with open_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(60):
                await story(server, channel, servicer)
        finally:
            await server.stop(0)

    asyncio.run(run())


def make(servicer: Endless, port: int, host: str = "127.0.0.1", connection_age_s: float | None = None) -> RpcServer:
    def register(server: grpc.aio.Server) -> None:
        planner_pb2_grpc.add_PlannerServiceServicer_to_server(servicer, server)

    descriptor = pb.DESCRIPTOR.services_by_name["PlannerService"]
    return RpcServer(
        host=host,
        port=port,
        services=[(descriptor, register)],
        on_bug=lambda bug: None,
        connection_age_s=connection_age_s,
    )


def test_liveness_and_readiness_are_separate_and_watch_delivers_every_change() -> None:
    async def story(server: RpcServer, channel: grpc.aio.Channel, servicer: Endless) -> None:
        stub = cast(Any, health_pb2_grpc).HealthStub(channel)

        async def check(name: str) -> int:
            return (await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=60)).status

        assert (await check(""), await check(NAME)) == (SERVING, NOT_SERVING)
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await check("nobody")
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=NAME))
        seen: list[int] = []
        for ready in (True, False, True):
            seen.append((await watch.read()).status)
            await server.set_ready(ready)
        seen.append((await watch.read()).status)
        assert seen == [NOT_SERVING, SERVING, NOT_SERVING, SERVING]
        watch.cancel()

    serve(story)


def test_reflection_names_the_services() -> None:
    async def story(server: RpcServer, channel: grpc.aio.Channel, servicer: Endless) -> None:
        stub = cast(Any, reflection_pb2_grpc).ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        answer = await call.read()
        names = {service.name for service in answer.list_services_response.service}
        assert {NAME, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} <= names

    serve(story)


def test_a_call_ends_at_once_when_the_client_disconnects() -> None:
    async def story(server: RpcServer, channel: grpc.aio.Channel, servicer: Endless) -> None:
        call = planner_pb2_grpc.PlannerServiceStub(channel).WatchLayout(pb.WatchLayoutRequest())
        await call.read()
        call.cancel()
        async with asyncio.timeout(60):
            await servicer.ended.wait()

    serve(story)


def test_stopping_ends_running_calls() -> None:
    async def story(server: RpcServer, channel: grpc.aio.Channel, servicer: Endless) -> None:
        call = planner_pb2_grpc.PlannerServiceStub(channel).WatchLayout(pb.WatchLayoutRequest())
        await call.read()
        async with asyncio.timeout(60):
            await server.stop(0.1)
            await servicer.ended.wait()
        call.cancel()

    serve(story)


async def test_a_port_in_use_is_a_configuration_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = make(Endless(), port)  # pyright: ignore[reportAbstractUsage]
        with pytest.raises(ConfigError, match=str(port)):
            await server.start()
        await server.stop(0)


async def test_only_a_refused_connection_counts_as_refused() -> None:
    with socket.socket() as listening, socket.socket() as free:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        free.bind(("127.0.0.1", 0))
        assert not await is_refused(f"127.0.0.1:{listening.getsockname()[1]}")
        assert await is_refused(f"127.0.0.1:{free.getsockname()[1]}")
    assert not await is_refused("no.such.host.invalid:1", timeout_s=2.0)


class Named(Endless):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    async def GetLayout(self, request: pb.GetLayoutRequest, context: Any) -> pb.GetLayoutResponse:
        return pb.GetLayoutResponse(planner_id=self.name)


def test_calls_alternate_between_all_servers_of_a_name_including_later_ones() -> None:
    """Calls in progress continue when their connection reaches its maximum age."""

    async def story() -> None:
        first = make(Named("first"), 0, "127.0.0.2", connection_age_s=1.0)  # pyright: ignore[reportAbstractUsage]
        port = await first.start()
        second = make(Named("second"), port, "127.0.0.3", connection_age_s=1.0)  # pyright: ignore[reportAbstractUsage]
        await second.start()
        with NameServer(["127.0.0.2"]).running() as names:
            channel = open_channel(f"dns://127.0.0.1:{names.port}/all.test:{port}", to_all=True)
            stub = planner_pb2_grpc.PlannerServiceStub(channel)

            async def answered() -> str:
                return (await stub.GetLayout(pb.GetLayoutRequest(), timeout=10)).planner_id

            assert {await answered() for _ in range(4)} == {"first"}
            running = stub.WatchLayout(pb.WatchLayoutRequest())
            await running.read()
            names.addresses.append("127.0.0.3")
            seen = set[str]()
            while seen != {"first", "second"}:
                seen = {await answered() for _ in range(4)}
                await asyncio.sleep(0.05)
            for _ in range(10):
                assert await running.read() is not grpc.aio.EOF
            running.cancel()
            await channel.close()
        await first.stop(0)
        await second.stop(0)

    asyncio.run(asyncio.wait_for(story(), 60))
