"""What the dispatcher asks of the outside beyond workers and clients."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ballast.common.ids import Epoch, RequestId, WorkerId


@dataclass(frozen=True, slots=True)
class Claim:
    """The claim of one request on its id.

    Attributes:
        serial: Another one for each request of this dispatcher.
        attempt: How often its client has sent it.
        secret_hash: Of what the client proves by that it is the same one; empty: no other dispatcher may go on with it.
    """

    request_id: RequestId
    serial: int
    attempt: int = 1
    secret_hash: str = ""

    def follows(self, other: "Claim") -> bool:
        """Whether it is a later attempt of the same client."""
        return bool(self.secret_hash) and self.secret_hash == other.secret_hash and self.attempt > other.attempt


class RequestClaims(Protocol):
    """Keeps two dispatchers from serving one request id. Works as well as the state server does."""

    @property
    def reachable(self) -> bool:
        """Whether the state server answered last time."""
        ...

    async def claim(self, claim: Claim, ttl_s: float) -> bool:
        """
        Returns:
            Whether another dispatcher was serving this very request: an earlier attempt with the same secret. If it
            still does, it is told to stop.

        Raises:
            AlreadyExists: another dispatcher serves this id, and this is no later attempt of the same client.
            Cancelled: this client's request was cancelled by its id.
        """
        ...

    async def cancel(self, claim: Claim) -> None:
        """No later attempt of its client is served anywhere."""
        ...

    def release(self, claim: Claim) -> None:
        """Gives it up; a younger one on the same id stays."""
        ...


class PlannerPort(Protocol):
    """What operators may ask of the planner through the dispatcher: they need not reach the inner network."""

    @property
    def address(self) -> str:
        """host:port of the active one; empty while nobody knows."""
        ...

    async def kept_out(self) -> Mapping[str, str]:
        """Workers that are put into no group for now, and why; none while nobody answers."""
        ...

    async def drain_worker(self, worker_id: WorkerId, request_id: str, timeout_s: float) -> Epoch:
        """
        Returns:
            The epoch from which on the worker gets nothing new.

        Raises:
            BallastError: what the planner answers, or that it does not.
        """
        ...
