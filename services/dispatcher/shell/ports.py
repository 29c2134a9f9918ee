"""Interfaces of the dispatcher besides workers and clients."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ballast.common.ids import Epoch, RequestId, WorkerId


@dataclass(frozen=True, slots=True)
class Claim:
    """A request's claim on its id.

    Attributes:
        serial: Unique per request of this dispatcher.
        attempt: How often its client has sent it.
        secret_hash: Of the client's secret; empty: it cannot be resumed at another dispatcher.
    """

    request_id: RequestId
    serial: int
    attempt: int = 1
    secret_hash: str = ""

    def follows(self, other: "Claim") -> bool:
        """True if it is a later attempt of the same client."""
        return bool(self.secret_hash) and self.secret_hash == other.secret_hash and self.attempt > other.attempt


class RequestClaims(Protocol):
    """Prevents two dispatchers from serving one request id. As reliable as the state server."""

    @property
    def reachable(self) -> bool:
        """True if the last call to the state server succeeded."""
        ...

    async def claim(self, claim: Claim, ttl_s: float) -> bool:
        """Returns:
            True if another dispatcher was serving an earlier attempt with the same secret, which is told to stop.

        Raises:
            AlreadyExists: another dispatcher serves this id, and this is no later attempt of the same client.
            Cancelled: this client's request was cancelled by its id.
        """
        ...

    async def cancel(self, claim: Claim) -> None:
        """Refuse later attempts at every dispatcher."""
        ...

    def release(self, claim: Claim) -> None:
        """Release the claim; a newer one on the same id stays."""
        ...


class PlannerPort(Protocol):
    """Calls to the planner for operators, who need not reach the inner network."""

    @property
    def address(self) -> str:
        """host:port of the active one; empty while unknown."""
        ...

    async def kept_out(self) -> Mapping[str, str]:
        """Workers that enter no new group for now, with reasons; none without an answer."""
        ...

    async def drain_worker(self, worker_id: WorkerId, request_id: str, timeout_s: float) -> Epoch:
        """Returns:
            The epoch from which on the worker gets no new requests.

        Raises:
            BallastError: the planner's error, or no answer.
        """
        ...
