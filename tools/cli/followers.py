"""Load reports of followers, which do not report to dispatchers and are therefore queried directly."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import grpc

from ballast.client import ClusterStatus, WorkerStatus
from ballast.client.access import Access
from ballast.rpc.codec import LOAD
from ballastpb.worker.v1 import worker_pb2, worker_pb2_grpc

_TIMEOUT_S = 0.5
_MAX_AT_ONCE = 32


def with_followers(status: ClusterStatus) -> ClusterStatus:
    """The status with the load reports of followers added. Followers that do not answer have none."""
    leaders = {group.leader_id for group in status.groups}
    asked = [worker for worker in status.workers if worker.load is None and worker.worker_id not in leaders]
    if not asked:
        return status
    with ThreadPoolExecutor(min(len(asked), _MAX_AT_ONCE)) as threads:
        told = {worker.worker_id: worker for worker in threads.map(_ask, asked)}
    workers = tuple(told.get(worker.worker_id, worker) for worker in status.workers)
    return dataclasses.replace(status, workers=workers)


def _ask(worker: WorkerStatus) -> WorkerStatus:
    """The worker with its load report; unchanged if it does not answer or has restarted."""
    with Access.of().open_sync(worker.address, "worker") as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        try:
            answer = stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=_TIMEOUT_S)
        except grpc.RpcError:
            return worker
    if answer.incarnation != worker.incarnation:
        return worker
    return dataclasses.replace(worker, load=LOAD.record(answer.load))
