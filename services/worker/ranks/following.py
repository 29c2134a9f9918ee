"""A worker on several hosts: its hosts according to the settings, and the process on each host but the first."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from services.worker.ranks.nodes import Nodes, follow

if TYPE_CHECKING:
    from services.worker.config import WorkerSettings

_EVERYWHERE = ("0.0.0.0", "::", "[::]")


def nodes_of(settings: WorkerSettings, secret: bytes | None) -> Nodes | None:
    """Return the hosts of an instance; None: there is only one. `secret`: the cluster's secret."""
    if settings.nnodes == 1 or settings.dist_init_addr is None:
        return None
    is_chosen = "host" in settings.model_fields_set and settings.host not in _EVERYWHERE
    own_host = settings.host if is_chosen else None
    return Nodes(settings.nnodes, settings.tensor_parallel_size, settings.dist_init_addr, secret, own_host)


async def run_ranks(stopping: asyncio.Event, settings: WorkerSettings, nodes: Nodes, devices: Sequence[str]) -> None:
    """Run this host's ranks of the first host's worker, until the signal to stop.

    Raises:
        ConfigError: the first host has refused them.
    """
    stop = threading.Event()
    following = asyncio.create_task(
        asyncio.to_thread(follow, nodes, settings.node_rank, devices, settings.model, stop), name="ranks"
    )
    waiting = asyncio.create_task(stopping.wait(), name="stop")
    try:
        await asyncio.wait((following, waiting), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stop.set()
        waiting.cancel()
        await following
