"""Busy and idle time of the workers' stages, for the bubble fraction of a run."""

import asyncio

import grpc

from ballast.client import AsyncClient
from ballast.client.access import Access
from ballast.common.errors import BallastError
from ballastpb.worker.v1 import worker_pb2, worker_pb2_grpc

_TIMEOUT_S = 5.0

StageSeconds = dict[str, tuple[float, float]]  # worker -> (seconds busy, seconds idle with work) since its start


async def stage_seconds(client: AsyncClient) -> StageSeconds | None:
    """Busy and idle seconds of all workers; None if one of them does not answer."""
    try:
        workers = (await client.status()).workers
        told = await asyncio.gather(*(_ask(worker.address) for worker in workers))
    except (BallastError, grpc.RpcError):
        return None
    return {worker.worker_id: times for worker, times in zip(workers, told, strict=True)}


async def _ask(address: str) -> tuple[float, float]:
    async with Access.of().open_peer(address, "worker") as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        told = await stub.GetTrace(worker_pb2.GetTraceRequest(), timeout=_TIMEOUT_S)
        return told.busy_s, told.idle_s


def bubble_fraction(before: StageSeconds | None, after: StageSeconds | None) -> float | None:
    """Idle share of the stages' time between two readings; None if the workers differ or no stage was busy."""
    if before is None or after is None or before.keys() != after.keys():
        return None
    busy_s = sum(after[worker][0] - before[worker][0] for worker in after)
    idle_s = sum(after[worker][1] - before[worker][1] for worker in after)
    return idle_s / (busy_s + idle_s) if busy_s > 0 and idle_s >= 0 else None
