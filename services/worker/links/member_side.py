"""The links of a worker, as its member sees them. No threads, no sockets: there are several implementations."""

from collections.abc import Collection
from concurrent.futures import Future
from typing import Protocol

from services.worker.links.connection import Link
from services.worker.links.pace import StagePace


class Plane(Protocol):
    """All links of a worker, as its member sees them."""

    @property
    def pace(self) -> StagePace:
        """Where the engine tells what the stage does."""
        ...

    def link(self, peer_id: str, epoch: int) -> Link | None:
        """The link if it is up."""
        ...

    def warm(
        self, peer_id: str, address: str, epoch: int, timeout_s: float | None = None, incarnation: int = 0
    ) -> Future[Link]:
        """Make one, in the background. The peer has to do the same."""
        ...

    def retire(self, before_epoch: int, peers: Collection[str] | None = None) -> None:
        """Links of older epochs (to these peers, or all) refuse what they still bring; the peers are told."""
        ...

    def close(self, timeout_s: float | None = None) -> None:
        """End everything."""
        ...
