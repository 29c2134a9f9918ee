"""Requests handed over to another worker whose stream is not open yet.

The layout that makes the other worker a leader, and the stream to it, may arrive shortly after the handover. The wait
is limited. After a timeout the request continues from the backlog, as after the loss of a worker.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ballast.common.errors import InvariantViolation
from ballast.common.ids import Incarnation, RequestId, WorkerId
from services.dispatcher.core.fleet import Fleet
from services.dispatcher.core.tracked import Tracked


@dataclass(slots=True)
class _Waiting:
    tracked: Tracked
    worker_id: WorkerId
    incarnation: Incarnation | None  # incarnation of the new worker; None: no layout has contained it yet
    until_s: float


class Moves:
    """Handed-over requests in order of handover; all have the same timeout."""

    def __init__(self, wait_s: float, fleet: Fleet) -> None:
        self._wait_s = wait_s
        self._fleet = fleet
        self._waiting: dict[RequestId, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def tracked(self) -> list[Tracked]:
        return [waiting.tracked for waiting in self._waiting.values()]

    def next_s(self) -> float:
        """Time of the first timeout; infinity without requests."""
        return next((waiting.until_s for waiting in self._waiting.values()), float("inf"))

    def add(self, tracked: Tracked, worker_id: WorkerId, at_s: float) -> None:
        """Add a request that is neither on a worker nor in the backlog."""
        tracked.moving = True
        incarnation = self._fleet.lives.get(worker_id)
        self._waiting[tracked.request.request_id] = _Waiting(tracked, worker_id, incarnation, at_s + self._wait_s)

    def remove(self, tracked: Tracked) -> None:
        del self._waiting[tracked.request.request_id]
        tracked.moving = False

    def take_arrivals(self, worker_id: WorkerId) -> list[Tracked]:
        """Remove and return the requests for `worker_id`, whose stream is open now."""
        return self._take(lambda w: w.worker_id == worker_id)

    def take_overdue(self, at_s: float) -> list[Tracked]:
        return self._take(lambda w: w.until_s <= at_s)

    def take_stranded(self) -> list[Tracked]:
        """Remove and return the requests whose new worker was lost or restarted. Call it after a change of layout."""
        for waiting in self._waiting.values():
            if waiting.incarnation is None:
                waiting.incarnation = self._fleet.lives.get(waiting.worker_id)
        return self._take(lambda w: w.incarnation != self._fleet.lives.get(w.worker_id))

    def _take(self, wanted: Callable[[_Waiting], bool]) -> list[Tracked]:
        found = [waiting.tracked for waiting in self._waiting.values() if wanted(waiting)]
        for tracked in found:
            self.remove(tracked)
        return found

    def check(self) -> None:
        for request_id, waiting in self._waiting.items():
            tracked = waiting.tracked
            if not tracked.moving or tracked.worker is not None or tracked.handle:
                raise InvariantViolation(f"{request_id} is not moving to {waiting.worker_id}")
            target = self._fleet.member(waiting.worker_id)
            if target is not None and (target.connected or target.key.incarnation != waiting.incarnation):
                raise InvariantViolation(f"{request_id} waits for {target.key}, connected: {target.connected}")
        ends = [waiting.until_s for waiting in self._waiting.values()]
        if ends != sorted(ends):
            raise InvariantViolation(f"moves are out of order: {ends}")
