"""Workers are started and ended as a planner wants."""

import asyncio
from types import SimpleNamespace
from typing import cast

from ballast.common.errors import Unavailable
from ballast.common.wanted import Wanted
from tools.local.cluster import LocalCluster
from tools.local.scaling import Scaler


def wanted(count: int) -> Wanted:
    return Wanted(count, (), ())


class Cluster:
    """A stand-in for a local cluster: workers start at once, unless `fails`; a worker that ends takes until `may_go` is
    set.
    """

    def __init__(self, count: int) -> None:
        self.processes = {"worker": [SimpleNamespace(id=f"worker-{n}", may_end=False) for n in range(count)]}
        self.address, self.credentials = "127.0.0.1:1", {"token": "t"}
        self.fails, self.may_go = False, asyncio.Event()

    async def start_worker(self) -> SimpleNamespace:
        self.processes["worker"].append(SimpleNamespace(id=f"worker-{len(self.processes['worker'])}", may_end=False))
        await asyncio.sleep(0.05)
        if self.fails:
            raise Unavailable("worker", "not ready")
        return self.processes["worker"][-1]

    async def end_worker(self, process: SimpleNamespace) -> None:
        await self.may_go.wait()
        self.processes["worker"].remove(process)


async def scaled(cluster: Cluster, *counts: int, after_s: float = 0.02) -> list[str]:
    """Send the wanted numbers shortly after one another. Returns the workers that neither end nor have ended."""
    scaler = Scaler(1, 8, lambda _: None)
    running = asyncio.create_task(scaler.run(cast(LocalCluster, cluster)))
    for count in counts:
        scaler.take(wanted(count))
        await asyncio.sleep(after_s)
    await asyncio.sleep(0.5)
    running.cancel()
    await asyncio.wait([running])
    return [one.id for one in cluster.processes["worker"] if not one.may_end]


async def test_a_number_that_arrives_during_a_failing_start_counts() -> None:
    cluster = Cluster(2)
    cluster.fails = True
    cluster.may_go.set()
    assert await scaled(cluster, 3, 1) == ["worker-0"]


async def test_a_worker_is_started_while_another_one_ends() -> None:
    cluster = Cluster(2)
    assert await scaled(cluster, 1, 2, after_s=0.3) == ["worker-0", "worker-2"]


async def test_workers_end_one_after_another() -> None:
    cluster = Cluster(4)
    assert await scaled(cluster, 1) == ["worker-0", "worker-1", "worker-2"]
    cluster.may_go.set()
    assert await scaled(Cluster(1), 1) == ["worker-0"]
