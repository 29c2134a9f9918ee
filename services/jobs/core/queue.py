"""Selects the next line to send: owners share the concurrency evenly, batches of an owner alternate, lines are sent in
order.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field

from services.jobs.core.lines import JobLine


@dataclass(frozen=True, slots=True)
class Pick:
    """A line to send. `failed_count`: failed tries that count."""

    batch_id: str
    line: JobLine
    failed_count: int = 0


@dataclass(slots=True)
class _Open:
    """State of a batch in progress. `last_number`: last line read from the store."""

    owner: str
    ready: deque[Pick] = field(default_factory=deque[Pick])
    later: list[tuple[float, int, Pick]] = field(default_factory=list[tuple[float, int, Pick]])
    last_number: int = 0
    is_read: bool = False
    in_flight: int = 0
    served_at: int = 0  # value of a counter of picks


class Queue:
    """Lines that may be sent. Lines of a batch are read in portions: `wants` says which to read."""

    def __init__(self, low: int) -> None:
        """`low`: number of buffered lines below which a batch wants more."""
        self._low = low
        self._open: dict[str, _Open] = {}
        self._in_flight: dict[str, int] = {}  # by owner
        self._served: dict[str, int] = {}
        self._count = 0

    def open(self, batch_id: str, owner: str) -> None:
        self._open.setdefault(batch_id, _Open(owner))

    def close(self, batch_id: str) -> None:
        """Remove a batch."""
        closed = self._open.pop(batch_id, None)
        if closed is not None:
            self._give_back(closed.owner, closed.in_flight)

    def wants(self) -> list[tuple[str, int]]:
        """(batch, last line already read) for batches whose next lines should be read."""
        return [
            (batch_id, one.last_number)
            for batch_id, one in self._open.items()
            if not one.is_read and len(one.ready) < self._low
        ]

    def add(self, batch_id: str, lines: list[JobLine]) -> None:
        """Add a batch's next lines without results; an empty list marks the end."""
        one = self._open.get(batch_id)
        if one is None:
            return
        one.is_read = not lines
        if lines:
            one.last_number = lines[-1].number
            one.ready.extend(Pick(batch_id, line) for line in lines)

    def pick(self, now_s: float) -> Pick | None:
        """The next line of the owner with the fewest lines in flight, from its least recently served batch."""
        found: tuple[tuple[int, int, int], _Open] | None = None
        for one in self._open.values():
            while one.later and one.later[0][0] <= now_s:
                one.ready.appendleft(heapq.heappop(one.later)[2])
            if one.ready:
                rank = (self._in_flight.get(one.owner, 0), self._served.get(one.owner, 0), one.served_at)
                if found is None or rank < found[0]:
                    found = rank, one
        if found is None:
            return None
        one = found[1]
        self._count += 1
        self._served[one.owner] = one.served_at = self._count
        self._in_flight[one.owner] = self._in_flight.get(one.owner, 0) + 1
        one.in_flight += 1
        return one.ready.popleft()

    def ended(self, pick: Pick) -> None:
        """Release the slot of a line that is no longer in flight."""
        one = self._open.get(pick.batch_id)
        if one is not None:
            one.in_flight -= 1
            self._give_back(one.owner, 1)

    def again(self, pick: Pick, at_s: float) -> None:
        """Send the line again at `at_s`."""
        one = self._open.get(pick.batch_id)
        if one is not None:
            self.ended(pick)
            heapq.heappush(one.later, (at_s, pick.line.number, pick))

    def next_s(self) -> float | None:
        """Earliest time at which a delayed line may be sent."""
        return min((one.later[0][0] for one in self._open.values() if one.later), default=None)

    def in_flight(self, batch_id: str) -> int:
        one = self._open.get(batch_id)
        return 0 if one is None else one.in_flight

    def _give_back(self, owner: str, count: int) -> None:
        left = self._in_flight.get(owner, 0) - count
        if left:
            self._in_flight[owner] = left
        else:
            self._in_flight.pop(owner, None)
            if not any(one.owner == owner for one in self._open.values()):
                self._served.pop(owner, None)
