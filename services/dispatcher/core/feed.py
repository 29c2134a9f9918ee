"""Waiting offline requests. Workers pull them by reporting how many more prompt tokens they can admit.

The feed is independent of online requests: it has its own limit, order and rate.
"""

from ballast.common.errors import Overloaded
from services.dispatcher.core.arrival_order import ArrivalOrder
from services.dispatcher.core.backlog import DrainRate
from services.dispatcher.core.fleet import Fleet, Worker
from services.dispatcher.core.tracked import Tracked
from services.dispatcher.policy.freeness import blocks_for

_TAKEN_OVER_FACTOR = 2  # factor on the limit for a request taken over from another dispatcher
_SCAN_COUNT = 64  # maximum requests examined if the first ones do not fit on any worker


class Feed(ArrivalOrder):
    """The queue of offline requests."""

    def __init__(self) -> None:
        super().__init__()
        self._drain_rate = DrainRate()

    def too_full(self, newcomer: Tracked, most: int, at_s: float) -> Overloaded | None:
        """Return the refusal of a request that exceeds the limit, or None. `most`: maximum number of requests."""
        count = len(self._entries)
        if count <= most * (_TAKEN_OVER_FACTOR if newcomer.request.taken_over else 1):
            return None
        why = f"{count - 1} offline requests are waiting, which is the limit (--max-offline-queued)"
        return Overloaded(why, self._drain_rate.until_half_s(count, at_s))

    def next(self, fleet: Fleet, at_s: float) -> tuple[Tracked, Worker] | None:
        """Return the first request that fits on a pulling worker, with the worker that requests the most tokens among
        those on which it fits; None if no request fits.
        """
        wanting = [(worker.offline_room_tokens, worker) for worker in fleet.usable if worker.hold_until_s <= at_s]
        wanting = [(room, worker) for room, worker in wanting if room > 0]
        if not wanting:
            return None
        wanting.sort(key=lambda pair: -pair[0])  # stable sort: ties go to the smallest id
        for tracked in self._entries[:_SCAN_COUNT]:
            for _, worker in wanting:
                load = worker.load
                if load is not None and blocks_for(tracked.token_count + 1, load.block_tokens) <= load.block_count:
                    return tracked, worker
        return None

    def hopeless(self, fleet: Fleet) -> list[Tracked]:
        """Return those of the first `_SCAN_COUNT` requests that are too long for every worker; empty while there is no
        worker.
        """
        loads = [worker.load for worker in fleet.usable if worker.load is not None]
        most = max([load.block_count * load.block_tokens for load in loads], default=0)
        return [one for one in self._entries[:_SCAN_COUNT] if one.token_count >= most] if most else []

    def count(self, at_s: float) -> None:
        """Count a request that was sent to a worker."""
        self._drain_rate.count(at_s)
