"""The interface through which a worker's group member uses its links. Some implementations have no threads or
sockets.
"""

from collections.abc import Collection
from concurrent.futures import Future
from typing import Protocol

from services.worker.links.connection import Link
from services.worker.links.pace import StagePace


class Plane(Protocol):
    """All links of a worker, as used by its member."""

    @property
    def pace(self) -> StagePace:
        """Speed of this worker's stage, updated by the engine."""
        ...

    def link(self, peer_id: str, epoch: int) -> Link | None:
        """The link to a peer for an epoch; None unless it is up."""
        ...

    def warm(
        self, peer_id: str, address: str, epoch: int, timeout_s: float | None = None, incarnation: int = 0
    ) -> Future[Link]:
        """Connect in the background. The peer must do the same."""
        ...

    def retire(self, before_epoch: int, peers: Collection[str] | None = None) -> None:
        """Make links of older epochs (to these peers, or all) refuse further messages, and notify the peers."""
        ...

    def close(self, timeout_s: float | None = None) -> None:
        """Close all connections."""
        ...
