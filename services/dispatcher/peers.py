"""The planner, as the dispatcher reaches it."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

import grpc

from ballast.common.errors import Unavailable
from ballast.common.ids import Epoch, WorkerId
from ballast.rpc.channel import open_channel
from ballast.rpc.errors import from_rpc_error
from ballast.service.leadership import LeaderAddress
from ballastpb.planner.v1 import planner_pb2, planner_pb2_grpc

if TYPE_CHECKING:
    from ballastpb.planner.v1.planner_pb2_grpc import PlannerServiceAsyncStub

T = TypeVar("T")


class PlannerClient:
    """A PlannerPort. `where` is kept up to date by its owner."""

    def __init__(self, where: LeaderAddress) -> None:
        self._where = where

    @property
    def address(self) -> str:
        return self._where.current or ""

    async def drain_worker(self, worker_id: WorkerId, request_id: str, timeout_s: float) -> Epoch:
        request = planner_pb2.DrainWorkerRequest(worker_id=worker_id, request_id=request_id)
        return Epoch((await self.ask(lambda planner: planner.DrainWorker(request, timeout=timeout_s))).epoch)

    async def ask(self, call: "Callable[[PlannerServiceAsyncStub], Awaitable[T]]") -> T:
        """Raises BallastError: what the planner answers, or that it does not."""
        async with self._stub() as planner:
            return await call(planner)

    async def watch_layout(
        self, request: planner_pb2.WatchLayoutRequest
    ) -> AsyncGenerator[planner_pb2.WatchLayoutResponse, None]:
        """Until the planner ends the stream. Raises as `ask`."""
        async with self._stub() as planner:
            async for response in planner.WatchLayout(request):
                yield response

    @asynccontextmanager
    async def _stub(self) -> "AsyncGenerator[PlannerServiceAsyncStub]":
        address = self.address
        if not address:
            raise Unavailable("planner", "none is known yet; is one running?")
        async with open_channel(address) as channel:
            try:
                yield planner_pb2_grpc.PlannerServiceStub(channel)
            except grpc.RpcError as error:
                raise from_rpc_error(error, f"planner at {address}") from error
