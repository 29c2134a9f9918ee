"""Limits per connection, per token and for large messages. Calls beyond a limit are refused, others are served."""

import asyncio
import gc
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc.aio
import pytest

from ballast.common.errors import BallastError, Overloaded
from ballast.rpc.bounds import CallBook, CallBounds
from ballast.rpc.callers import Caller
from ballast.rpc.channel import open_channel
from ballast.rpc.errors import from_rpc_error
from ballast.rpc.server import RpcServer
from ballastpb.inference.v1 import inference_pb2, inference_pb2_grpc
from ballastpb.planner.v1 import planner_pb2 as pb
from ballastpb.planner.v1 import planner_pb2_grpc


class Endless(planner_pb2_grpc.PlannerServiceServicer):
    async def WatchLayout(self, request: pb.WatchLayoutRequest, context: Any) -> AsyncIterator[pb.WatchLayoutResponse]:
        yield pb.WatchLayoutResponse()
        await asyncio.Event().wait()


class Reader(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self) -> None:
        self.go_on = asyncio.Event()

    async def Tokenize(self, request: inference_pb2.TokenizeRequest, context: Any) -> inference_pb2.TokenizeResponse:
        await self.go_on.wait()
        return inference_pb2.TokenizeResponse(ids=[len(request.text)])


def serve(story: Callable[[str, Reader], Awaitable[None]], bounds: CallBounds) -> None:
    def admit(method: str, context: Any) -> Caller:
        name = next((str(value) for key, value in context.invocation_metadata() if key == "name"), "")
        return Caller(name, operates=True)

    async def run() -> None:
        reader = Reader()  # pyright: ignore[reportAbstractUsage]

        def register(server: grpc.aio.Server) -> None:
            servicer = Endless()  # pyright: ignore[reportAbstractUsage]
            planner_pb2_grpc.add_PlannerServiceServicer_to_server(servicer, server)
            inference_pb2_grpc.add_InferenceServiceServicer_to_server(reader, server)

        names = [pb.DESCRIPTOR.services_by_name["PlannerService"]]
        server = RpcServer(
            host="127.0.0.1",
            port=0,
            services=[(names[0], register)],
            on_bug=lambda bug: None,
            admit=admit,
            bounds=bounds,
        )
        address = f"127.0.0.1:{await server.start()}"
        try:
            async with asyncio.timeout(60):
                await story(address, reader)
        finally:
            await server.stop(0)

    asyncio.run(run())


# Any: a gRPC call.
async def begun(channel: grpc.aio.Channel, name: str = "") -> Any:
    call = planner_pb2_grpc.PlannerServiceStub(channel).WatchLayout(
        pb.WatchLayoutRequest(), timeout=60, metadata=(("name", name),)
    )
    try:
        await call.read()
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, "server") from None
    return call


async def begun_at_last(channel: grpc.aio.Channel, name: str = "") -> Any:
    """Begin a call; retry while the server still counts one that has ended."""
    while True:
        try:
            return await begun(channel, name)
        except Overloaded:
            await asyncio.sleep(0.01)


def test_calls_per_connection_are_limited_and_other_connections_are_served() -> None:
    async def story(address: str, _: Reader) -> None:
        async with open_channel(address) as greedy, open_channel(address) as other:
            first = await begun(greedy)
            await begun(greedy)
            with pytest.raises(Overloaded, match="max_calls_per_connection") as refused:
                await begun(greedy)
            assert refused.value.retry_after_s > 0
            await begun(other)
            first.cancel()
            await begun_at_last(greedy)

    serve(story, CallBounds(per_connection=2))


def test_calls_per_token_are_limited_over_all_its_connections() -> None:
    async def story(address: str, reader: Reader) -> None:
        async with open_channel(address) as one, open_channel(address) as two:
            first = await begun(one, "alice")
            await begun(two, "alice")
            with pytest.raises(Overloaded, match=r"alice.*max_calls_per_token"):
                await begun(two, "alice")
            await begun(two, "bob")
            for _ in range(3):
                await begun(one)  # a call without a token is not counted
            first.cancel()
            await begun_at_last(two, "alice")

    serve(story, CallBounds(per_caller=2))


def test_large_messages_share_a_limit_and_small_ones_do_not_count() -> None:
    async def tokenize(channel: grpc.aio.Channel, length: int) -> int:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        try:
            answer = await stub.Tokenize(inference_pb2.TokenizeRequest(text="x" * length), timeout=60)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, "server") from None
        return answer.ids[0]

    async def story(address: str, reader: Reader) -> None:
        async with open_channel(address) as channel:
            large = [asyncio.ensure_future(tokenize(channel, 400_000)) for _ in range(3)]
            small = [asyncio.ensure_future(tokenize(channel, 1_000)) for _ in range(20)]
            done, held = await asyncio.wait(large, return_when=asyncio.FIRST_COMPLETED)
            [refused] = done
            with pytest.raises(Overloaded, match="max_request_bytes"):
                refused.result()
            reader.go_on.set()
            assert await asyncio.gather(*held) == [400_000] * 2
            assert await asyncio.gather(*small) == [1_000] * 20
            gc.collect()
            for _ in range(5):  # the bytes are free again
                assert await tokenize(channel, 400_000) == 400_000

    serve(story, CallBounds(large_bytes=1_000_000))


def test_ended_calls_do_not_count() -> None:
    book = CallBook(CallBounds())
    held = book.hold(100)
    assert book.large_bytes == 100
    del held
    gc.collect()
    assert (book.large_bytes, book.call_count) == (0, 0)


def test_connections_beyond_the_limit_are_closed_and_existing_ones_are_served() -> None:
    async def story(address: str, reader: Reader) -> None:
        host, _, port = address.rpartition(":")
        async with open_channel(address) as known:
            await begun(known)
            idle = [socket.create_connection((host, int(port)), 5) for _ in range(20)]
            try:
                await asyncio.sleep(0.5)
                closed = await asyncio.gather(*(asyncio.to_thread(_is_closed, each) for each in idle))
                assert sum(closed) >= 12
                await begun(known)
            finally:
                for each in idle:
                    each.close()
            async with open_channel(address) as later:

                async def comes() -> None:
                    while True:
                        try:
                            await begun(later)
                        except BallastError:
                            await asyncio.sleep(0.1)
                        else:
                            return

                await comes()

    serve(story, CallBounds(connections=8))


def _is_closed(connection: socket.socket) -> bool:
    """Whether the peer has closed the connection."""
    connection.settimeout(0.05)
    try:
        while True:
            if not connection.recv(4096):
                return True
    except TimeoutError:
        return False
    except OSError:
        return True
