"""A worker without an engine, as a process: it reports to the monitor and answers GetStatus and Drain.

`python -m tests.support.reporting_worker --redis-url URL --worker-id w0 [--layers 4] [--incarnation N] [--port P]`
"""

import argparse
import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from ballast.common.errors import Unavailable
from ballast.common.ids import Incarnation, WorkerId
from ballast.common.instance import Instance
from ballast.common.load import LoadReport, MemoryReport
from ballast.common.model import ModelInfo
from ballast.rpc import codec
from ballast.rpc.server import RpcServer
from ballast.service import logs
from ballast.service.lifecycle import Lifecycle, run_service, say_ready
from ballast.service.state import StateServer
from ballastpb.worker.v1 import worker_pb2 as pb
from ballastpb.worker.v1 import worker_pb2_grpc
from services.worker.reporter import MonitorReporter


def model_info(layer_count: int = 4) -> ModelInfo:
    return ModelInfo(
        name="tiny",
        architecture="llama",
        layer_count=layer_count,
        vocab_size=512,
        max_model_len=1024,
        dtype="float32",
        parameter_count=1_000_000,
        kv_bytes_per_token=1024,
        eos_token_ids=(2,),
    )


def load_report(used_block_count: int = 0, *, draining: bool = False) -> LoadReport:
    return LoadReport(
        block_tokens=16,
        block_count=100,
        used_block_count=used_block_count,
        waiting_block_count=0,
        running_count=used_block_count,
        waiting_count=0,
        max_running_count=64,
        steps_total=0,
        preemptions_total=0,
        prompt_tokens_total=0,
        generation_tokens_total=0,
        step_age_s=0.0,
        draining=draining,
        memory=MemoryReport(budget_bytes=100, parameter_bytes=40, kv_bytes=50, free_bytes=10),
    )


class ReportingWorker(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.draining = False

    def load(self) -> LoadReport:
        return load_report(25, draining=self.draining)

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        return pb.GetStatusResponse(
            worker_id=self.worker_id, incarnation=self.incarnation, load=codec.LOAD.message(self.load())
        )

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        self.draining = True
        return pb.DrainResponse(running_request_count=25)

    async def Attach(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.AttachResponse]:
        raise Unavailable(self.worker_id, "has no engine")
        yield pb.AttachResponse()  # a generator, like the real one


async def main(life: Lifecycle) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--redis-url", required=True)
    parser.add_argument("--worker-id", required=True)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--incarnation", type=int)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--monitor-address")
    parser.add_argument("--heeds-no-other", action="store_true", help="use only the monitor at that address")
    arguments = parser.parse_args()
    logs.configure(service="worker", instance=arguments.worker_id, level="info", form="console")
    state = StateServer(arguments.redis_url)
    worker_id = WorkerId(arguments.worker_id)
    incarnation = arguments.incarnation or await state.next_incarnation("worker", worker_id)
    worker = ReportingWorker(worker_id, Incarnation(incarnation))  # pyright: ignore[reportAbstractUsage]

    def register(server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)

    descriptor = pb.DESCRIPTOR.services_by_name["WorkerService"]
    server = RpcServer(host="127.0.0.1", port=arguments.port, services=[(descriptor, register)], on_bug=life.report_bug)
    port = await server.start()
    reporter = MonitorReporter(
        instance=Instance(worker_id, worker.incarnation, f"127.0.0.1:{port}", model_info(arguments.layers)),
        load=worker.load,
        monitor_address=arguments.monitor_address,
        state=state,
        interval_s=0.1,
    )
    if arguments.heeds_no_other:
        reporter._target = lambda attempts: arguments.monitor_address  # pyright: ignore[reportPrivateUsage]
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(reporter.run())
            say_ready("worker", worker_id, f"127.0.0.1:{port}")
            await life.stopping.wait()
            reporter.leave()
    finally:
        await server.stop(1.0)
        await state.close()


if __name__ == "__main__":
    run_service(main)
