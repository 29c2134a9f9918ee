"""Followers report their own memory. Followers that do not answer, or that have restarted, keep their entries
unchanged.
"""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from ballast.client import WorkerStatus
from ballastpb.worker.v1 import worker_pb2, worker_pb2_grpc
from tests.support.scripted_dispatcher import worker_status
from tests.unit.cli.test_render import cluster, line_of, merge, shown
from tools.cli.followers import with_followers


class Follower(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(self) -> None:
        self.asked_count = 0

    def GetStatus(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: worker_pb2.GetStatusRequest, context: Any
    ) -> worker_pb2.GetStatusResponse:
        self.asked_count += 1
        load = worker_status(kv_bytes=300 << 20).load
        return worker_pb2.GetStatusResponse(worker_id="worker-1", incarnation=2, load=load)


def test_followers_report_their_own_memory() -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    follower = Follower()  # pyright: ignore[reportAbstractUsage]
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(follower, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        status = merge(cluster(worker_status("worker-0"), worker_status("worker-1"), worker_status("worker-2")))
        leader, there, silent = status.workers
        reachable = dataclasses.replace(there, address=address)
        nowhere = dataclasses.replace(silent, address="127.0.0.1:1")
        asked = with_followers(dataclasses.replace(status, workers=(leader, reachable, nowhere)))
        row = " ".join(line_of(shown(asked), "worker-1", "adds up").split())
        assert row == "worker-1 100.0 MiB 300.0 MiB 624.0 MiB 1.0 GiB adds up"
        assert asked.workers[2].load is None
        assert asked.groups[0].capacity_tokens == status.groups[0].capacity_tokens

        reborn: WorkerStatus = dataclasses.replace(reachable, incarnation=3)
        assert with_followers(dataclasses.replace(status, workers=(leader, reborn))).workers[1].load is None
        assert follower.asked_count == 2
        alone = cluster(worker_status("worker-0"))
        assert with_followers(alone) is alone
    finally:
        server.stop(None).wait()
