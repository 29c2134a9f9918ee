"""The interface of a worker's links for its member. Free of threads and sockets, as there are
several implementations.
"""

from collections.abc import Collection
from concurrent.futures import Future
from typing import Protocol

from services.worker.links.connection import Link
from services.worker.links.pace import StagePace


class Plane(Protocol):
    """All links of a worker, for its member."""

    @property
    def pace(self) -> StagePace:
        """Updated by the engine."""
        ...

    def link(self, peer_id: str, epoch: int) -> Link | None:
        """The link if it is up."""
        ...

    def warm(
        self, peer_id: str, address: str, epoch: int, timeout_s: float | None = None, incarnation: int = 0
    ) -> Future[Link]:
        """Connect in the background. The peer has to do the same."""
        ...

    def retire(self, before_epoch: int, peers: Collection[str] | None = None) -> None:
        """Links of older epochs (to these peers, or all) refuse what still arrives; the peers are notified."""
        ...

    def close(self, timeout_s: float | None = None) -> None:
        """End everything."""
        ...
