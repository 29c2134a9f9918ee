"""The planner probes whether a worker is alive."""

import asyncio
from typing import Any

import grpc.aio
import pytest

from ballast.common.ids import Incarnation, WorkerId
from ballast.rpc.server import RpcServer
from ballastpb.worker.v1 import worker_pb2 as pb
from ballastpb.worker.v1 import worker_pb2_grpc
from services.planner import peers
from services.planner.core.messages import Probed
from services.planner.peers import Members
from tests.support.reporting_worker import ReportingWorker


async def test_a_worker_is_alive_gone_or_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PROBE_TIMEOUT_S", 0.3)
    stuck = asyncio.Event()

    class Worker(ReportingWorker):
        async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
            if stuck.is_set():
                await asyncio.sleep(10)
            return await super().GetStatus(request, context)

    worker = Worker(WorkerId("w1"), Incarnation(3))  # pyright: ignore[reportAbstractUsage]

    def register(server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)

    descriptor = pb.DESCRIPTOR.services_by_name["WorkerService"]
    server = RpcServer(host="127.0.0.1", port=0, services=[(descriptor, register)], on_bug=print)
    address = f"127.0.0.1:{await server.start()}"
    members = Members(lambda _: None)
    assert await members.probe(address, WorkerId("w1"), Incarnation(3)) is Probed.ALIVE
    assert await members.probe(address, WorkerId("w1"), Incarnation(2)) is Probed.GONE
    assert await members.probe(address, WorkerId("w2"), Incarnation(3)) is Probed.GONE
    stuck.set()
    assert await members.probe(address, WorkerId("w1"), Incarnation(3)) is Probed.SILENT
    await server.stop(0)
    assert await members.probe(address, WorkerId("w1"), Incarnation(3)) is Probed.GONE
    await members.close()
