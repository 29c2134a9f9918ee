"""What the dispatcher asks of the outside beyond workers and clients."""

from typing import Protocol

from ballast.common.ids import RequestId


class RequestClaims(Protocol):
    """Keeps two dispatchers from serving one request id. Works as well as the state server does."""

    @property
    def reachable(self) -> bool:
        """Whether the state server answered last time."""
        ...

    async def claim(self, request_id: RequestId, ttl_s: float) -> None:
        """Raises AlreadyExists when another dispatcher serves this id."""
        ...

    def release(self, request_id: RequestId) -> None: ...
