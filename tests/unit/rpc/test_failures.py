"""A mistake of a client, a peer or a library ends one call and is counted, and affects no other call."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias, cast

import grpc
import grpc.aio
import pytest

from ballast.common.errors import BallastError, CallFailed, InvalidRequest, InvariantViolation, PeerViolation
from ballast.rpc.channel import open_channel
from ballast.rpc.errors import from_rpc_error
from ballast.rpc.failures import GONE, MALFORMED, CallFailure
from ballast.rpc.server import RpcServer
from ballast.rpc.wire import has_too_many
from ballastpb.inference.v1 import inference_pb2
from ballastpb.monitor.v1 import monitor_pb2, monitor_pb2_grpc
from ballastpb.planner.v1 import planner_pb2, planner_pb2_grpc

_REPORT = "/ballastpb.monitor.v1.MonitorService/Report"
_DRAIN = "/ballastpb.planner.v1.PlannerService/DrainWorker"
_HEALTH = "/grpc.health.v1.Health/Check"
_GARBAGE = b"\xff\xff\xff\xff"


class Monitor(monitor_pb2_grpc.MonitorServiceServicer):
    """Reads all reports, like the real monitor, and floods its watchers."""

    async def Report(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request_iterator: AsyncIterator[monitor_pb2.ReportRequest], context: Any
    ) -> AsyncIterator[monitor_pb2.ReportResponse]:
        async for _ in request_iterator:
            yield monitor_pb2.ReportResponse()

    async def WatchEvents(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: monitor_pb2.WatchEventsRequest, context: Any
    ) -> None:
        big = monitor_pb2.WatchEventsResponse(cause_id="x" * (1 << 20))
        while True:
            await context.write(big)


class Planner(planner_pb2_grpc.PlannerServiceServicer):
    def __init__(self) -> None:
        self.error: Exception | None = None

    async def DrainWorker(
        self, request: planner_pb2.DrainWorkerRequest, context: Any
    ) -> planner_pb2.DrainWorkerResponse:
        if self.error is not None:
            raise self.error
        return planner_pb2.DrainWorkerResponse(epoch=3)


class Served:
    """A server with the planner and the monitor, and the bugs and failures that it reports to its owner."""

    def __init__(self) -> None:
        self.planner = Planner()  # pyright: ignore[reportAbstractUsage]
        self.bugs: list[InvariantViolation] = []
        self.failures: list[CallFailure] = []
        self.address = ""

    @property
    def causes(self) -> list[str]:
        return [failure.cause for failure in self.failures]

    async def assert_serves(self) -> None:
        async with open_channel(self.address) as channel:
            stub = planner_pb2_grpc.PlannerServiceStub(channel)
            assert (await stub.DrainWorker(planner_pb2.DrainWorkerRequest(), timeout=60)).epoch == 3
        assert not self.bugs


Story: TypeAlias = Callable[[Served, grpc.aio.Channel], Awaitable[None]]


def serve(story: Story) -> None:
    async def run() -> None:
        served = Served()

        def register_monitor(server: grpc.aio.Server) -> None:
            monitor_pb2_grpc.add_MonitorServiceServicer_to_server(
                Monitor(),  # pyright: ignore[reportAbstractUsage]
                server,
            )

        def register_planner(server: grpc.aio.Server) -> None:
            planner_pb2_grpc.add_PlannerServiceServicer_to_server(served.planner, server)

        server = RpcServer(
            host="127.0.0.1",
            port=0,
            services=[
                (monitor_pb2.DESCRIPTOR.services_by_name["MonitorService"], register_monitor),
                (planner_pb2.DESCRIPTOR.services_by_name["PlannerService"], register_planner),
            ],
            on_bug=served.bugs.append,
            on_failure=served.failures.append,
        )
        served.address = f"127.0.0.1:{await server.start()}"
        try:
            async with open_channel(served.address) as channel, asyncio.timeout(60):
                await story(served, channel)
        finally:
            await server.stop(0)

    asyncio.run(run())


async def error_of(channel: grpc.aio.Channel, method: str, message: bytes) -> BallastError:
    """The error that a call with these bytes ends with."""

    # Any: raw bytes in, raw bytes out.
    async def call() -> None:
        if method == _REPORT:
            stream = cast(Any, channel.stream_stream)(method)(timeout=60)
            await stream.write(message)
            await stream.read()
        else:
            await cast(Any, channel.unary_unary)(method)(message, timeout=60)

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call()
    return from_rpc_error(caught.value, "server")


@pytest.mark.parametrize("method", [_REPORT, _DRAIN, _HEALTH])
def test_garbage_is_a_client_error(method: str, caplog: pytest.LogCaptureFixture) -> None:
    async def story(served: Served, channel: grpc.aio.Channel) -> None:
        error = await error_of(channel, method, _GARBAGE)
        assert isinstance(error, InvalidRequest)
        assert served.causes == [MALFORMED]
        assert served.failures[0].method == method
        await served.assert_serves()

    serve(story)
    assert "Traceback" not in caplog.text


def test_a_disconnect_during_a_blocked_write_ends_only_its_call() -> None:
    """Flow control holds back the server's writes, which fail inside the handler when the connection breaks."""

    async def story(served: Served, channel: grpc.aio.Channel) -> None:
        narrow = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16))
        for _ in range(3):
            hostile = grpc.aio.insecure_channel(served.address, options=narrow)
            call = monitor_pb2_grpc.MonitorServiceStub(hostile).WatchEvents(monitor_pb2.WatchEventsRequest())
            await call.read()
            await asyncio.sleep(0.2)  # long enough for the windows to be full
            await hostile.close()
        await served.assert_serves()
        assert set(served.causes) == {GONE}

    serve(story)


def test_an_unforeseen_exception_ends_only_its_call() -> None:
    async def story(served: Served, channel: grpc.aio.Channel) -> None:
        served.planner.error = ZeroDivisionError("secret prompt")
        error = await error_of(channel, _DRAIN, b"")
        assert isinstance(error, CallFailed)
        assert "ZeroDivisionError" in str(error)
        assert "secret" not in str(error)
        assert served.causes == ["ZeroDivisionError"]
        served.planner.error = None
        await served.assert_serves()

    serve(story)


def test_an_own_broken_invariant_stops_the_server_and_a_peers_does_not() -> None:
    async def story(served: Served, channel: grpc.aio.Channel) -> None:
        served.planner.error = InvariantViolation("blocks do not add up")
        relayed = await error_of(channel, _DRAIN, b"")
        assert [bug.why for bug in served.bugs] == ["blocks do not add up"]
        assert isinstance(relayed, PeerViolation)
        served.bugs.clear()
        served.planner.error = relayed  # as a dispatcher relays the planner's error
        again = await error_of(channel, _DRAIN, b"")
        assert isinstance(again, PeerViolation)
        served.planner.error = None
        await served.assert_serves()

    serve(story)


def test_an_untranslated_error_of_a_peer_ends_only_the_call() -> None:
    async def story(served: Served, channel: grpc.aio.Channel) -> None:
        nobody = grpc.aio.Metadata()
        served.planner.error = grpc.aio.AioRpcError(grpc.StatusCode.UNKNOWN, nobody, nobody, details="what?")
        assert isinstance(await error_of(channel, _DRAIN, b""), PeerViolation)
        served.planner.error = None
        await served.assert_serves()

    serve(story)


def test_millions_of_empty_messages_are_refused_before_they_are_parsed() -> None:
    async def story(served: Served, channel: grpc.aio.Channel) -> None:
        bomb = inference_pb2.GenerateRequest()
        bomb.conversation.messages.extend([inference_pb2.ChatMessage()] * 1_000_000)
        data = bomb.SerializeToString()
        assert has_too_many(data, inference_pb2.GenerateRequest.DESCRIPTOR)
        deep = inference_pb2.TokenizeRequest(conversation=bomb.conversation).SerializeToString()
        assert has_too_many(deep, inference_pb2.TokenizeRequest.DESCRIPTOR)
        fine = inference_pb2.GenerateRequest(text="\n\0" * 4_000_000).SerializeToString()
        assert not has_too_many(fine, inference_pb2.GenerateRequest.DESCRIPTOR)
        packed = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[1] * 4_000_000))
        assert not has_too_many(packed.SerializeToString(), inference_pb2.GenerateRequest.DESCRIPTOR)
        assert not has_too_many(data[:20_001], inference_pb2.GenerateRequest.DESCRIPTOR), "a truncated message"
        await served.assert_serves()

    serve(story)
