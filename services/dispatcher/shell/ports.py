"""Interfaces of the dispatcher to services other than workers and clients."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ballast.common.ids import Epoch, RequestId, WorkerId


@dataclass(frozen=True, slots=True)
class Claim:
    """A request's claim on its id.

    Attributes:
        serial: Unique among this dispatcher's requests.
        attempt: How many times its client has sent it.
        secret_hash: Hash of the client's secret; empty: it cannot be resumed on another dispatcher.
    """

    request_id: RequestId
    serial: int
    attempt: int = 1
    secret_hash: str = ""

    def follows(self, other: "Claim") -> bool:
        """True if this claim is a later attempt of the same client."""
        return bool(self.secret_hash) and self.secret_hash == other.secret_hash and self.attempt > other.attempt


class RequestClaims(Protocol):
    """Prevents two dispatchers from serving the same request id. This is only as reliable as the state server."""

    @property
    def reachable(self) -> bool:
        """True if the last call to the state server succeeded."""
        ...

    async def claim(self, claim: Claim, ttl_s: float) -> bool:
        """Claim a request id.

        Returns:
            True if another dispatcher was serving an earlier attempt with the same secret; that one is notified to
            stop.

        Raises:
            AlreadyExists: another dispatcher serves this id, and this is not a later attempt of the same client.
            Cancelled: this client's request was cancelled by its id.
        """
        ...

    async def cancel(self, claim: Claim) -> None:
        """Make every dispatcher refuse later attempts of the request."""
        ...

    def release(self, claim: Claim) -> None:
        """Release the claim. A newer claim on the same id is not released."""
        ...


class PlannerPort(Protocol):
    """Calls to the planner on behalf of operators, who cannot reach the internal network."""

    @property
    def address(self) -> str:
        """host:port of the active planner; empty while unknown."""
        ...

    async def kept_out(self) -> Mapping[str, str]:
        """Return the workers currently kept out of groups, with the reasons; empty if the planner does not answer."""
        ...

    async def drain_worker(self, worker_id: WorkerId, request_id: str, timeout_s: float) -> Epoch:
        """Drain a worker.

        Returns:
            The first epoch in which the worker gets no new requests.

        Raises:
            BallastError: the planner refused, or did not answer.
        """
        ...
