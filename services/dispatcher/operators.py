"""PlannerService on a dispatcher, which forwards calls to the active planner, so that operators only need to reach
dispatchers.

Any caller of a dispatcher may request a drop or a restore, like a drain (`InferenceService.DrainWorker`); the planner
decides. Request ids are chosen by the caller, so repetitions are recognised.
"""

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from ballast.rpc.deadline import remaining_s
from ballastpb.planner.v1 import planner_pb2 as pb
from ballastpb.planner.v1 import planner_pb2_grpc
from services.dispatcher.peers import PlannerClient

_TIMEOUT_S = 15.0  # maximum timeout of a call, and the timeout for callers without a deadline

# Any: grpc.aio has no better type for the context's messages.
Context = grpc.aio.ServicerContext[Any, Any]


class OperatorServicer(planner_pb2_grpc.PlannerServiceServicer):
    def __init__(self, planner: PlannerClient) -> None:
        self._planner = planner

    async def ExplainPlan(self, request: pb.ExplainPlanRequest, context: Context) -> pb.ExplainPlanResponse:
        return await self._planner.ask(
            lambda planner, left_s: planner.ExplainPlan(request, timeout=left_s), _left_s(context)
        )

    async def Drop(self, request: pb.DropRequest, context: Context) -> pb.DropResponse:
        return await self._planner.ask(lambda planner, left_s: planner.Drop(request, timeout=left_s), _left_s(context))

    async def Restore(self, request: pb.RestoreRequest, context: Context) -> pb.RestoreResponse:
        return await self._planner.ask(
            lambda planner, left_s: planner.Restore(request, timeout=left_s), _left_s(context)
        )

    async def ListTransitions(self, request: pb.ListTransitionsRequest, context: Context) -> pb.ListTransitionsResponse:
        return await self._planner.ask(
            lambda planner, left_s: planner.ListTransitions(request, timeout=left_s), _left_s(context)
        )

    async def DrainWorker(self, request: pb.DrainWorkerRequest, context: Context) -> pb.DrainWorkerResponse:
        return await self._planner.ask(
            lambda planner, left_s: planner.DrainWorker(request, timeout=left_s), _left_s(context)
        )

    async def ParkWorker(self, request: pb.ParkWorkerRequest, context: Context) -> pb.ParkWorkerResponse:
        return await self._planner.ask(
            lambda planner, left_s: planner.ParkWorker(request, timeout=left_s), _left_s(context)
        )

    async def WakeWorker(self, request: pb.WakeWorkerRequest, context: Context) -> pb.WakeWorkerResponse:
        return await self._planner.ask(
            lambda planner, left_s: planner.WakeWorker(request, timeout=left_s), _left_s(context)
        )

    async def GetLayout(self, request: pb.GetLayoutRequest, context: Context) -> pb.GetLayoutResponse:
        return await self._planner.ask(
            lambda planner, left_s: planner.GetLayout(request, timeout=left_s), _left_s(context)
        )

    async def WatchLayout(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: pb.WatchLayoutRequest, context: Context
    ) -> AsyncIterator[pb.WatchLayoutResponse]:
        async for response in self._planner.watch_layout(request):
            yield response


def _left_s(context: Context) -> float:
    left_s = remaining_s(context)
    return _TIMEOUT_S if left_s is None else min(left_s, _TIMEOUT_S)
