"""Every error class has a gRPC status, and a real call preserves an error's class and fields."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeAlias, cast

import grpc
import grpc.aio
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from ballast.common import errors
from ballast.common.errors import BallastError
from ballast.rpc.channel import MAX_MESSAGE_BYTES, open_channel
from ballast.rpc.errors import asking, code_of, from_rpc_error
from ballast.rpc.server import RpcServer
from ballastpb.planner.v1 import planner_pb2 as pb
from ballastpb.planner.v1 import planner_pb2_grpc

EXAMPLES: list[BallastError] = [
    errors.InvalidRequest("temperature", "must not be negative, got -1"),
    errors.Unauthenticated("a token is needed"),
    errors.PermissionDenied("Drain needs the role operate"),
    errors.AlreadyExists("request r1 is being served"),
    errors.NotFound("no such worker"),
    errors.NotPossible("a transition is under way"),
    errors.Overloaded("queue full", 2.25),
    errors.Unavailable("worker w1", "draining"),
    errors.Unavailable("d1", "is shutting down", gone=True),
    errors.DeadlineExceeded("too late"),
    errors.Cancelled("withdrawn"),
    errors.StaleEpoch("incarnation", 3, 4),
    errors.NotActive("planner-1"),
    errors.PeerViolation("worker w1", "sent a token twice"),
    errors.CallFailed("unexpected KeyError"),
    errors.ConfigError("worker.port", "taken"),
    errors.InvariantViolation("blocks do not add up", ("first", "then")),
]


def all_errors() -> set[type[BallastError]]:
    """Error classes that travel over gRPC; those of stores and HTTP are defined next to the code that raises them."""
    found, todo = set[type[BallastError]](), [BallastError]
    while todo:
        for error in todo.pop().__subclasses__():
            if error.__module__ == errors.__name__:
                found.add(error)
            todo.append(error)
    return found


def test_every_error_has_a_status_and_an_example_here() -> None:
    assert {type(example) for example in EXAMPLES} == all_errors()
    for example in EXAMPLES:
        assert code_of(example) is not grpc.StatusCode.OK


class Failing(planner_pb2_grpc.PlannerServiceServicer):
    """Raises `error`: GetLayout at once, WatchLayout after one message."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    async def GetLayout(self, request: pb.GetLayoutRequest, context: Any) -> pb.GetLayoutResponse:
        raise self.error

    async def WatchLayout(self, request: pb.WatchLayoutRequest, context: Any) -> AsyncIterator[pb.WatchLayoutResponse]:
        yield pb.WatchLayoutResponse()
        raise self.error

    async def DrainWorker(self, request: pb.DrainWorkerRequest, context: Any) -> pb.DrainWorkerResponse:
        return pb.DrainWorkerResponse(epoch=len(request.worker_id))


# The generated async stub exists for type checkers only.
Stub: TypeAlias = "planner_pb2_grpc.PlannerServiceAsyncStub"
Bugs = list[errors.InvariantViolation]


def call(error: BaseException, story: Callable[[Stub, Bugs], Any]) -> None:
    async def run() -> None:
        bugs: Bugs = []

        def register(server: grpc.aio.Server) -> None:
            planner_pb2_grpc.add_PlannerServiceServicer_to_server(
                Failing(error),  # pyright: ignore[reportAbstractUsage]
                server,
            )

        descriptor = pb.DESCRIPTOR.services_by_name["PlannerService"]
        server = RpcServer(host="127.0.0.1", port=0, services=[(descriptor, register)], on_bug=bugs.append)
        port = await server.start()
        try:
            async with open_channel(f"127.0.0.1:{port}") as channel:
                await story(planner_pb2_grpc.PlannerServiceStub(channel), bugs)
        finally:
            await server.stop(0)

    asyncio.run(run())


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda e: type(e).__name__)
def test_the_caller_catches_the_raised_error(error: BallastError) -> None:
    async def story(stub: Stub, bugs: Bugs) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as unary:
            await stub.GetLayout(pb.GetLayoutRequest(), timeout=60)
        watch = stub.WatchLayout(pb.WatchLayoutRequest(), timeout=60)
        assert isinstance(await watch.read(), pb.WatchLayoutResponse)
        with pytest.raises(grpc.aio.AioRpcError) as streamed:
            await watch.read()
        for caught in (unary.value, streamed.value):
            assert caught.code() is code_of(error)
            again = from_rpc_error(caught, "planner")
            if isinstance(error, errors.InvariantViolation):
                # A broken invariant ends the process that found it, and no other.
                assert isinstance(again, errors.PeerViolation)
                assert (again.peer, error.why in again.why) == ("planner", True)
                continue
            assert type(again) is type(error)
            assert vars(again) == vars(error)
            assert str(again) == str(error)
        assert bool(bugs) == isinstance(error, errors.InvariantViolation)

    call(error, story)


def test_details_follow_google_rpc() -> None:
    async def story(stub: Stub, bugs: Bugs) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetLayout(pb.GetLayoutRequest(), timeout=60)
        status = rpc_status.from_call(cast(Any, caught.value))
        retry, info = error_details_pb2.RetryInfo(), error_details_pb2.ErrorInfo()
        assert status is not None
        assert [detail.Unpack(retry) or detail.Unpack(info) for detail in status.details] == [True, True]
        assert (retry.retry_delay.seconds, retry.retry_delay.nanos) == (2, 250_000_000)
        assert (info.domain, info.reason) == ("ballast", "Overloaded")

    call(errors.Overloaded("queue full", 2.25), story)


def test_malformed_details_of_a_status_are_a_peer_violation() -> None:
    info = error_details_pb2.ErrorInfo(reason="StaleEpoch", domain="ballast", metadata={"have": "many"})
    detail = any_pb2.Any()
    detail.Pack(info)
    status = rpc_status.to_status(status_pb2.Status(code=9, message="old", details=[detail]))
    trailing = grpc.aio.Metadata(*cast(Any, status).trailing_metadata)
    error = grpc.aio.AioRpcError(grpc.StatusCode.FAILED_PRECONDITION, grpc.aio.Metadata(), trailing, details="old")
    assert isinstance(from_rpc_error(error, "planner"), errors.PeerViolation)


def test_a_message_over_the_limit_is_refused_and_affects_no_other() -> None:
    async def story(stub: Stub, bugs: Bugs) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.DrainWorker(pb.DrainWorkerRequest(worker_id="x" * (MAX_MESSAGE_BYTES + 1)), timeout=60)
        assert isinstance(from_rpc_error(caught.value, "planner"), errors.InvalidRequest)
        assert (await stub.DrainWorker(pb.DrainWorkerRequest(worker_id="abc"), timeout=60)).epoch == 3

    call(errors.NotFound(""), story)


async def test_an_unreachable_server_is_unavailable() -> None:
    async with open_channel("127.0.0.1:1") as channel:
        stub = planner_pb2_grpc.PlannerServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetLayout(pb.GetLayoutRequest(), timeout=60)
    error = from_rpc_error(caught.value, "planner-9")
    assert isinstance(error, errors.Unavailable)
    assert error.target == "planner-9"


@pytest.mark.parametrize(
    "error",
    [
        asyncio.InvalidStateError("RPC already finished."),
        grpc.aio.UsageError("Can't write after done writing."),
        grpc.aio.InternalError("a call has failed"),
        RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed"),
        asyncio.CancelledError(),
    ],
)
async def test_every_failure_of_a_call_is_a_ballast_error(error: BaseException) -> None:
    with pytest.raises(errors.Unavailable, match="worker w1"), asking("worker w1"):
        raise error


async def test_a_task_cancelled_during_a_call_ends() -> None:
    async def ask() -> None:
        with asking("worker w1"):
            await asyncio.sleep(60)

    task = asyncio.create_task(ask())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
