"""The planner probes whether a worker is alive."""

import asyncio
from typing import Any

import grpc.aio
import pytest

from ballast.common.errors import Unavailable
from ballast.common.ids import Incarnation, WorkerId
from ballast.common.layout import Member
from ballast.rpc.channel import open_channel
from ballast.rpc.server import RpcServer
from ballastpb.worker.v1 import worker_pb2 as pb
from ballastpb.worker.v1 import worker_pb2_grpc
from services.planner import peers
from services.planner.core.messages import Probed
from services.planner.peers import Members
from tests.support.reporting_worker import ReportingWorker
from tools.local.ports import free_port


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


async def test_connections_to_workers_that_have_left_are_closed() -> None:
    dialled: list[str] = []

    def dial(address: str) -> grpc.aio.Channel:
        dialled.append(address)
        return open_channel(address)

    members = Members(lambda _: None, dial)
    here, gone = (Member(WorkerId(name), Incarnation(1), f"127.0.0.1:{free_port()}", 0, 4) for name in ("w1", "w2"))
    for member in (here, gone):
        with pytest.raises(Unavailable):
            await members.order_standing(member, 5.0, park=True)
    await members.keep({here.address})
    for member in (here, gone):
        with pytest.raises(Unavailable):
            await members.order_standing(member, 5.0, park=True)
    assert dialled == [here.address, gone.address, gone.address]
    await members.close()
