"""What the dispatcher asks of the outside beyond workers and clients."""

from typing import Protocol

from ballast.common.ids import Epoch, RequestId, WorkerId


class RequestClaims(Protocol):
    """Keeps two dispatchers from serving one request id. Works as well as the state server does."""

    @property
    def reachable(self) -> bool:
        """Whether the state server answered last time."""
        ...

    async def claim(self, request_id: RequestId, serial: int, ttl_s: float) -> None:
        """`serial` is another one for each request. Raises AlreadyExists when another dispatcher serves this id."""
        ...

    def release(self, request_id: RequestId, serial: int) -> None:
        """Gives up the claim of that serial; a younger one on the same id stays."""
        ...


class PlannerPort(Protocol):
    """What operators may ask of the planner through the dispatcher: they need not reach the inner network."""

    @property
    def address(self) -> str:
        """host:port of the active one; empty while nobody knows."""
        ...

    async def drain_worker(self, worker_id: WorkerId, request_id: str, timeout_s: float) -> Epoch:
        """
        Returns:
            The epoch from which on the worker gets nothing new.

        Raises:
            BallastError: what the planner answers, or that it does not.
        """
        ...
