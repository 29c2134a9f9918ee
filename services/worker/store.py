"""Allocation of this machine's GPUs: a lease per GPU in the state server, renewed while the worker lives."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import NamedTuple, Protocol

from ballast.common.errors import ConfigError, Unavailable
from ballast.common.ids import WorkerId
from ballast.service.logs import get_logger

ANY_GPU = "cuda:auto"
_TTL_S = 15.0
_RENEW_S = 5.0
_RETRY_S = 0.5
_ANSWER_WITHIN_S = 60.0  # maximum silence of the state server before the worker exits and is restarted


class StoredGpu(NamedTuple):
    device: str  # cuda:0 ...
    uuid: str


class Leases(Protocol):
    """The state server's methods used here."""

    async def acquire_lease(self, name: str, holder: str, ttl_s: float, address: str) -> int | None: ...

    async def release_lease(self, name: str, holder: str) -> None: ...


@contextlib.asynccontextmanager
async def claimed_device(
    wanted: str, gpus: Callable[[], Sequence[StoredGpu]], leases: Leases, worker_id: WorkerId
) -> AsyncGenerator[str]:
    """Provide the configured device, or for `cuda:auto` the first free GPU, leased to this worker.

    A restarted worker of the same name gets its GPU again. `gpus` is slow and called in a thread.

    Raises:
        ConfigError: there is no GPU, or all are leased.
        Unavailable: the state server has not answered for a minute.
    """
    if wanted != ANY_GPU:
        yield wanted
        return
    there = await asyncio.to_thread(gpus)
    gpu = await _first_free(there, leases, worker_id)
    if gpu is None:
        why = f"other workers have claimed all {len(there)} GPUs" if there else "torch sees no GPU here"
        raise ConfigError("worker.device", why)
    get_logger().info("GPU claimed", device=gpu.device, uuid=gpu.uuid)
    renewing = asyncio.create_task(_renew(gpu, leases, worker_id), name="GPU lease")
    try:
        yield gpu.device
    finally:
        renewing.cancel()
        await asyncio.wait([renewing])
        with contextlib.suppress(Unavailable):  # the lease expires anyway
            await leases.release_lease(_lease(gpu), worker_id)


@contextlib.asynccontextmanager
async def claimed_devices(
    wanted: str, count: int, gpus: Callable[[], Sequence[StoredGpu]], leases: Leases, worker_id: WorkerId
) -> AsyncGenerator[tuple[str, ...]]:
    """Provide a device for each rank, from the configured one on, or for `cuda:auto` as many free GPUs.

    Raises:
        ConfigError, Unavailable: see `claimed_device`.
    """
    if wanted != ANY_GPU:
        kind, _, first = wanted.partition(":")
        if kind == "cpu" or count == 1:
            yield (wanted,) * count
        else:
            yield tuple(f"{kind}:{int(first or 0) + rank}" for rank in range(count))
        return
    claimed: list[str] = []
    async with contextlib.AsyncExitStack() as claims:
        for _ in range(count):  # the state server grants a worker its own leases again, so their GPUs are excluded

            def others() -> Sequence[StoredGpu]:
                return [gpu for gpu in gpus() if gpu.device not in claimed]

            claimed.append(await claims.enter_async_context(claimed_device(wanted, others, leases, worker_id)))
        yield tuple(claimed)


async def _first_free(there: Sequence[StoredGpu], leases: Leases, worker_id: WorkerId) -> StoredGpu | None:
    give_up_at_s = time.monotonic() + _ANSWER_WITHIN_S
    for gpu in there:
        while True:
            try:
                got = await leases.acquire_lease(_lease(gpu), worker_id, _TTL_S, "")
                break
            except Unavailable as error:
                if time.monotonic() >= give_up_at_s:
                    raise
                get_logger().warning("state server does not answer: no GPU can be claimed", why=error.why)
                await asyncio.sleep(_RETRY_S)
        if got is not None:
            return gpu
    return None


async def _renew(gpu: StoredGpu, leases: Leases, worker_id: WorkerId) -> None:
    while True:
        await asyncio.sleep(_RENEW_S)
        with contextlib.suppress(Unavailable):
            if await leases.acquire_lease(_lease(gpu), worker_id, _TTL_S, "") is None:
                get_logger().error("another worker has claimed this worker's GPU", device=gpu.device, uuid=gpu.uuid)


def _lease(gpu: StoredGpu) -> str:
    return f"gpu:{gpu.uuid}"
