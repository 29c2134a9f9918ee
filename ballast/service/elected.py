"""Lifecycle of a service with one active replica and standbys."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ballast.rpc.server import RpcServer
from ballast.service.leadership import Floor, Leadership
from ballast.service.lifecycle import say_ready
from ballast.service.state import StateServer
from ballast.service.tasks import run_supervised

_HEALTH_INTERVAL_S = 0.2


@dataclass(frozen=True, slots=True)
class ElectionCandidate:
    """A replica that competes for its service's lease."""

    service: str  # name of the service and of its lease
    instance: str
    address: str  # host:port at which other processes reach this replica
    ttl_s: float  # duration of the lease


async def serve_elected(
    candidate: ElectionCandidate,
    *,
    state: StateServer,
    server: RpcServer | None,
    stopping: asyncio.Event,
    work: Callable[[], Awaitable[None]],
    on_change: Callable[[int | None], None],
    floor: Floor | None = None,
) -> None:
    """Wait for the state server, then run `work` and compete for the lease until `stopping` is set, then release the
    lease.

    The service is ready while this replica is the leader and the state server answers; a standby serves no requests.
    `on_change` is called with the fencing token, which is above `floor`, when this replica becomes the leader, and with
    None when it becomes a standby and before `work` is cancelled. `server`: the gRPC server whose readiness is set;
    None: the service reports its readiness in another way.
    """
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(
            _serve(candidate, state, server, work, on_change, floor or Floor()), name=candidate.service
        )
        await stopping.wait()
        if server is not None:
            await server.set_ready(False)
        serving.cancel()


async def _serve(
    candidate: ElectionCandidate,
    state: StateServer,
    server: RpcServer | None,
    work: Callable[[], Awaitable[None]],
    on_change: Callable[[int | None], None],
    floor: Floor,
) -> None:
    incarnation = await state.take_incarnation("replica", candidate.service)
    leadership = Leadership(
        state,
        name=candidate.service,
        holder=f"{candidate.instance}#{incarnation}",
        address=candidate.address,
        ttl_s=candidate.ttl_s,
        on_change=on_change,
        floor=floor,
    )
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_run(work), name="work")
            tasks.create_task(run_supervised(leadership.run, "leadership"), name="leadership")
            try:
                await leadership.decided.wait()
                say_ready(candidate.service, candidate.instance, candidate.address)
                if server is None:
                    await asyncio.Event().wait()  # until cancelled
                else:
                    await run_supervised(lambda: _report_readiness(leadership, state, server), "readiness")
            finally:
                on_change(None)
    finally:
        await leadership.resign()


async def _run(work: Callable[[], Awaitable[None]]) -> None:
    await work()


async def _report_readiness(leadership: Leadership, state: StateServer, server: RpcServer) -> None:
    told: bool | None = None
    while True:
        ready = leadership.token is not None and state.reachable
        if ready != told:
            await server.set_ready(ready)
            told = ready
        await asyncio.sleep(_HEALTH_INTERVAL_S)
