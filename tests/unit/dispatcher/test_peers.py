"""Calls to the planner are retried while no planner can answer, up to a timeout."""

import asyncio
from typing import Any

import grpc.aio
import pytest

from ballast.common.errors import BallastError, NotActive, NotFound, Unavailable
from ballast.rpc.server import RpcServer
from ballast.service.leadership import LeaderAddress
from ballast.service.state import StateServer
from ballastpb.planner.v1 import planner_pb2 as pb
from ballastpb.planner.v1 import planner_pb2_grpc
from services.dispatcher.peers import PlannerClient


class Refusing(planner_pb2_grpc.PlannerServiceServicer):
    """GetLayout raises the `errors` one after the other, and then succeeds."""

    def __init__(self, errors: list[BallastError]) -> None:
        self.errors = errors

    async def GetLayout(self, request: pb.GetLayoutRequest, context: Any) -> pb.GetLayoutResponse:
        if self.errors:
            raise self.errors.pop(0)
        return pb.GetLayoutResponse(planner_id="planner-0")


async def ask(errors: list[BallastError], timeout_s: float) -> str:
    def register(server: grpc.aio.Server) -> None:
        servicer = Refusing(errors)  # pyright: ignore[reportAbstractUsage]
        planner_pb2_grpc.add_PlannerServiceServicer_to_server(servicer, server)

    descriptor = pb.DESCRIPTOR.services_by_name["PlannerService"]
    server = RpcServer(host="127.0.0.1", port=0, services=[(descriptor, register)], on_bug=lambda bug: None)
    port = await server.start()
    state = StateServer("redis://127.0.0.1:1")  # never contacted, because the address is given
    try:
        client = PlannerClient(LeaderAddress(state, "planner", f"127.0.0.1:{port}"))
        request = pb.GetLayoutRequest()
        return (
            await client.ask(lambda planner, left_s: planner.GetLayout(request, timeout=left_s), timeout_s)
        ).planner_id
    finally:
        await server.stop(0)


def test_a_fail_over_is_waited_for() -> None:
    errors: list[BallastError] = [Unavailable("planner-0", "has just become active"), NotActive("planner-0")]
    assert asyncio.run(ask(errors, 30.0)) == "planner-0"
    assert not errors


def test_a_definite_answer_is_not_retried() -> None:
    errors: list[BallastError] = [NotFound("no such worker"), NotFound("asked twice")]
    with pytest.raises(NotFound, match="no such worker"):
        asyncio.run(ask(errors, 30.0))
    assert len(errors) == 1


def test_the_reason_is_reported_before_the_deadline() -> None:
    with pytest.raises(Unavailable, match="does not know"):
        asyncio.run(ask([Unavailable("planner-0", "does not know yet")] * 1000, 1.0))
