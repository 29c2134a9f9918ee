"""The planner, as the dispatcher reaches it."""

import grpc

from ballast.common.errors import Unavailable
from ballast.common.ids import Epoch, WorkerId
from ballast.rpc.channel import open_channel
from ballast.rpc.errors import from_rpc_error
from ballast.service.leadership import LeaderAddress
from ballastpb.planner.v1 import planner_pb2, planner_pb2_grpc


class PlannerClient:
    """A PlannerPort. `where` is kept up to date by its owner."""

    def __init__(self, where: LeaderAddress) -> None:
        self._where = where

    @property
    def address(self) -> str:
        return self._where.current or ""

    async def drain_worker(self, worker_id: WorkerId, request_id: str, timeout_s: float) -> Epoch:
        if not self.address:
            raise Unavailable("planner", "none is known yet; is one running?")
        request = planner_pb2.DrainWorkerRequest(worker_id=worker_id, request_id=request_id)
        async with open_channel(self.address) as channel:
            stub = planner_pb2_grpc.PlannerServiceStub(channel)
            try:
                answer = await stub.DrainWorker(request, timeout=timeout_s)
            except grpc.RpcError as error:
                raise from_rpc_error(error, f"planner at {self.address}") from error
        return Epoch(answer.epoch)
