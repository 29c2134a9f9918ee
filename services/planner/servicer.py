"""PlannerService: protobuf stops here."""

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from ballast.common.errors import InvalidRequest
from ballast.common.ids import WorkerId
from ballast.rpc import codec
from ballast.rpc.deadline import remaining_s
from ballast.rpc.server import when_done
from ballastpb.planner.v1 import planner_pb2 as pb
from ballastpb.planner.v1 import planner_pb2_grpc
from services.planner.shell import PlannerShell

# Any: the message types of a call do not matter to its context.
_Context = grpc.aio.ServicerContext[Any, Any]


class PlannerServicer(planner_pb2_grpc.PlannerServiceServicer):
    def __init__(self, shell: PlannerShell, drain_timeout_s: float) -> None:
        self._shell = shell
        self._drain_timeout_s = drain_timeout_s

    async def GetLayout(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: pb.GetLayoutRequest, context: _Context
    ) -> pb.GetLayoutResponse:
        return pb.GetLayoutResponse(
            layout=codec.layout_to_proto(self._shell.core.layout),
            planner_id=self._shell.planner_id,
            active=self._shell.core.active,
        )

    async def WatchLayout(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: pb.WatchLayoutRequest, context: _Context
    ) -> AsyncIterator[pb.WatchLayoutResponse]:
        watcher = self._shell.watch()
        when_done(context, lambda: self._shell.unwatch(watcher))
        while True:
            yield pb.WatchLayoutResponse(layout=codec.layout_to_proto(await watcher.next()))

    async def DrainWorker(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: pb.DrainWorkerRequest, context: _Context
    ) -> pb.DrainWorkerResponse:
        if not request.worker_id:
            raise InvalidRequest("worker_id", "must not be empty")
        if not request.request_id:
            raise InvalidRequest("request_id", "must not be empty; any unique name will do")
        left_s = remaining_s(context)
        timeout_s = self._drain_timeout_s if left_s is None else min(left_s, self._drain_timeout_s)
        epoch = await self._shell.drain(request.request_id, WorkerId(request.worker_id), timeout_s)
        return pb.DrainWorkerResponse(epoch=epoch)
