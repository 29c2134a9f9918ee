"""A real cluster for tests: a process per service, a private state server, and a small model created on the spot."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from typing import Any, TypeVar

from ballast.client import AsyncClient
from ballast.client.types import ClusterStatus
from ballast.common.errors import DeadlineExceeded
from tests.support import canaries
from tools.local.cluster import LocalCluster

T = TypeVar("T")
_MEMORY_BYTES = 64 << 20


class RunningCluster:
    """A cluster and its event loop, which runs only inside `run`."""

    def __init__(self, runner: asyncio.Runner, cluster: LocalCluster) -> None:
        self._runner = runner
        self.cluster = cluster

    def run(self, story: Coroutine[Any, Any, T], timeout_s: float = 200.0) -> T:
        async def bounded() -> T:
            async with asyncio.timeout(timeout_s):
                return await story

        return self._runner.run(bounded())


@contextlib.contextmanager
def running_cluster(model: Path, **arguments: Any) -> Generator[RunningCluster]:
    """Runs a cluster until the block ends. `arguments`: as for LocalCluster. Fails at the end if a service has crashed
    in the meantime.

    Unless `arguments` say otherwise, workers get little memory, since they touch all of it at startup.
    """
    arguments.setdefault("device_memory_bytes", _MEMORY_BYTES)
    # Workers check all invariants at every step: slow, but it is the purpose of these tests.
    environ = {"BALLAST_WORKER__DEV": "{check_every_steps: 1}", **canaries.DEBUG, **arguments.pop("environ", {})}
    with asyncio.Runner() as runner:
        cluster = LocalCluster(model, environ=environ, **arguments)
        runner.run(cluster.__aenter__())
        try:
            yield RunningCluster(runner, cluster)
        finally:
            if cluster.crash() is None:
                runner.run(canaries.ask(cluster))
            runner.run(cluster.__aexit__(None, None, None))


async def until(client: AsyncClient, holds: Callable[[ClusterStatus], bool], within_s: float = 60.0) -> ClusterStatus:
    """Polls the cluster's status until `holds`; returns it, or fails with the last one."""
    loop = asyncio.get_running_loop()
    give_up_at_s = loop.time() + within_s
    status: ClusterStatus | None = None
    while True:
        with contextlib.suppress(DeadlineExceeded):  # of this call only; the next one may succeed
            if holds(status := await client.status()):
                return status
        assert loop.time() < give_up_at_s, f"after {within_s} s the cluster's status is still {status}"
        await asyncio.sleep(0.02)


def idle(status: ClusterStatus) -> bool:
    """Whether no request runs or waits, and no block is held."""
    loads = [group.load for group in status.groups]
    return (
        status.backlog_request_count == 0
        and status.backlog_token_count == 0
        and status.running_request_count == 0
        and all(
            load is not None
            and (load.running_count, load.waiting_count, load.used_block_count, load.waiting_block_count) == (0,) * 4
            for load in loads
        )
    )
