"""Offline requests that no worker has. They are pulled: a worker says for how many tokens of new prompts it has room.

Nothing about online requests depends on what is in here: the feed has a bound, an order and a rate of its own.
"""

import bisect
from collections.abc import Iterator

from ballast.common.errors import InvariantViolation, Overloaded
from services.dispatcher.core.backlog import DrainRate
from services.dispatcher.core.fleet import Fleet, Worker
from services.dispatcher.core.tracked import Tracked
from services.dispatcher.policy.freeness import blocks_for

_TAKEN_OVER_FACTOR = 2  # with requests that other dispatchers were serving, so many times as many may wait
_SCAN_COUNT = 64  # requests that are looked at when the first ones fit no worker that wants some


def _key(tracked: Tracked) -> int:
    return tracked.serial


class Feed:
    """In order of arrival; a replayed request stands where it stood."""

    def __init__(self) -> None:
        self.token_count = 0
        self._entries: list[Tracked] = []
        self._drain_rate = DrainRate()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Tracked]:
        return iter(self._entries)

    def count_before(self, tracked: Tracked) -> int:
        """Requests behind which this one stands, or would."""
        return bisect.bisect_left(self._entries, _key(tracked), key=_key)

    def add(self, tracked: Tracked) -> None:
        bisect.insort(self._entries, tracked, key=_key)
        self.token_count += tracked.token_count

    def remove(self, tracked: Tracked) -> None:
        at = self.count_before(tracked)
        if at == len(self._entries) or self._entries[at] is not tracked:
            raise InvariantViolation(f"{tracked.request.request_id} is not in the feed")
        del self._entries[at]
        self.token_count -= tracked.token_count

    def too_full(self, newcomer: Tracked, most: int, at_s: float) -> Overloaded | None:
        """Why one that is in the feed cannot wait there. `most`: requests that may."""
        count = len(self._entries)
        if count <= most * (_TAKEN_OVER_FACTOR if newcomer.request.taken_over else 1):
            return None
        why = f"{count - 1} offline requests are waiting, the most allowed (--max-offline-queued)"
        return Overloaded(why, self._drain_rate.until_half_s(count, at_s))

    def next(self, fleet: Fleet, at_s: float) -> tuple[Tracked, Worker] | None:
        """The first request that a worker has room for, and the worker with the most; None: no worker wants any."""
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
        """Those of the first that are larger than any worker; none while there is no worker."""
        loads = [worker.load for worker in fleet.usable if worker.load is not None]
        most = max([load.block_count * load.block_tokens for load in loads], default=0)
        return [one for one in self._entries[:_SCAN_COUNT] if one.token_count >= most] if most else []

    def count(self, at_s: float) -> None:
        """One has gone to a worker."""
        self._drain_rate.count(at_s)

    def check(self) -> None:
        """Raise InvariantViolation unless it is in order, and all in it are offline requests that no worker has."""
        serials = [tracked.serial for tracked in self._entries]
        if serials != sorted(set(serials)):
            raise InvariantViolation(f"the feed is out of order: {serials}")
        for tracked in self._entries:
            if not tracked.offline or tracked.worker is not None or tracked.handle or tracked.moving:
                raise InvariantViolation(f"{tracked.request.request_id} does not belong into the feed")
        if self.token_count != sum(tracked.token_count for tracked in self._entries):
            raise InvariantViolation(f"the feed counts {self.token_count} tokens")
