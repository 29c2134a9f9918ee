"""Waiting offline requests. Workers pull them: each reports for how many new prompt tokens it has room.

Nothing about online requests depends on it: the feed has its own bound, order and rate.
"""

from ballast.common.errors import Overloaded
from services.dispatcher.core.arrival_order import ArrivalOrder
from services.dispatcher.core.backlog import DrainRate
from services.dispatcher.core.fleet import Fleet, Worker
from services.dispatcher.core.tracked import Tracked
from services.dispatcher.policy.freeness import blocks_for

_TAKEN_OVER_FACTOR = 2  # with requests taken over from other dispatchers, so many times the bound
_SCAN_COUNT = 64  # requests examined when the first ones fit no worker


class Feed(ArrivalOrder):
    """All of them are offline requests."""

    def __init__(self) -> None:
        super().__init__()
        self._drain_rate = DrainRate()

    def too_full(self, newcomer: Tracked, most: int, at_s: float) -> Overloaded | None:
        """Why a request in the feed exceeds the bounds. `most`: maximum number of requests."""
        count = len(self._entries)
        if count <= most * (_TAKEN_OVER_FACTOR if newcomer.request.taken_over else 1):
            return None
        why = f"{count - 1} offline requests are waiting, the most allowed (--max-offline-queued)"
        return Overloaded(why, self._drain_rate.until_half_s(count, at_s))

    def next(self, fleet: Fleet, at_s: float) -> tuple[Tracked, Worker] | None:
        """The first request for which a worker has room, and the worker with most room; None if no worker wants any."""
        wanting = [(worker.offline_room_tokens, worker) for worker in fleet.usable if worker.hold_until_s <= at_s]
        wanting = [(room, worker) for room, worker in wanting if room > 0]
        if not wanting:
            return None
        wanting.sort(key=lambda pair: -pair[0])  # stable: ties go to the smallest id
        for tracked in self._entries[:_SCAN_COUNT]:
            for _, worker in wanting:
                load = worker.load
                if load is not None and blocks_for(tracked.token_count + 1, load.block_tokens) <= load.block_count:
                    return tracked, worker
        return None

    def hopeless(self, fleet: Fleet) -> list[Tracked]:
        """The requests among the first ones that are larger than any worker; none while there is no worker."""
        loads = [worker.load for worker in fleet.usable if worker.load is not None]
        most = max([load.block_count * load.block_tokens for load in loads], default=0)
        return [one for one in self._entries[:_SCAN_COUNT] if one.token_count >= most] if most else []

    def count(self, at_s: float) -> None:
        """A request has gone to a worker."""
        self._drain_rate.count(at_s)
