"""Which line is sent next: keys share what may be in flight, a key's batches take turns, lines go in order."""

import heapq
from collections import deque
from dataclasses import dataclass, field

from services.jobs.core.lines import JobLine


@dataclass(frozen=True, slots=True)
class Pick:
    """A line to be sent; `failed_count`: times that it was sent in vain, as far as that counts."""

    batch_id: str
    line: JobLine
    failed_count: int = 0


@dataclass(slots=True)
class _Open:
    """What is known of one batch that sends. `last_number`: of the last line that was read from the store."""

    owner: str
    ready: deque[Pick] = field(default_factory=deque[Pick])
    later: list[tuple[float, int, Pick]] = field(default_factory=list[tuple[float, int, Pick]])
    last_number: int = 0
    is_read: bool = False
    in_flight: int = 0
    served_at: int = 0  # of a count of picks


class Queue:
    """Lines that may be sent. Those of a batch are read some at a time: `wants` says of which."""

    def __init__(self, low: int) -> None:
        """`low`: a batch with fewer lines here wants more."""
        self._low = low
        self._open: dict[str, _Open] = {}
        self._in_flight: dict[str, int] = {}  # by owner
        self._served: dict[str, int] = {}
        self._count = 0

    def open(self, batch_id: str, owner: str) -> None:
        self._open.setdefault(batch_id, _Open(owner))

    def close(self, batch_id: str) -> None:
        """Nothing of it is picked any more."""
        closed = self._open.pop(batch_id, None)
        if closed is not None:
            self._give_back(closed.owner, closed.in_flight)

    def wants(self) -> list[tuple[str, int]]:
        """Batches of which lines should be read, and the number after which."""
        return [
            (batch_id, one.last_number)
            for batch_id, one in self._open.items()
            if not one.is_read and len(one.ready) < self._low
        ]

    def add(self, batch_id: str, lines: list[JobLine]) -> None:
        """The next lines that have no result; none: there are no others."""
        one = self._open.get(batch_id)
        if one is None:
            return
        one.is_read = not lines
        if lines:
            one.last_number = lines[-1].number
            one.ready.extend(Pick(batch_id, line) for line in lines)

    def pick(self, now_s: float) -> Pick | None:
        """Of the key with the fewest lines in flight, and of its batches the one that waits longest."""
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
        """It has a result."""
        one = self._open.get(pick.batch_id)
        if one is not None:
            one.in_flight -= 1
            self._give_back(one.owner, 1)

    def again(self, pick: Pick, at_s: float) -> None:
        """It is to be sent once more."""
        one = self._open.get(pick.batch_id)
        if one is not None:
            self.ended(pick)
            heapq.heappush(one.later, (at_s, pick.line.number, pick))

    def next_s(self) -> float | None:
        """When the first of those that wait for their time may be sent."""
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
