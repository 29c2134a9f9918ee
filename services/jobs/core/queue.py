"""Selects the next line to send. Owners share the concurrency evenly, batches of an owner alternate, and lines of a
batch are sent in order.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from services.jobs.core.lines import JobLine

_MAX_LATER: Final = 512


@dataclass(frozen=True, slots=True)
class Pick:
    """A line to send. `failed_count`: number of failed tries that count towards their limit."""

    batch_id: str
    line: JobLine
    failed_count: int = 0


@dataclass(slots=True)
class _Open:
    """A batch in progress, as seen by the queue.

    Attributes:
        ready: Lines that may be sent now.
        later: Heap of (time, line number, line) for lines that may be sent again from that time on.
        last_number: Number of the last line read from the store.
        is_read: All lines were read from the store.
        in_flight: Number of lines being answered.
        served_at: Serial number of the last pick from this batch.
    """

    owner: str
    ready: deque[Pick] = field(default_factory=deque[Pick])
    later: list[tuple[float, int, Pick]] = field(default_factory=list[tuple[float, int, Pick]])
    last_number: int = 0
    is_read: bool = False
    in_flight: int = 0
    served_at: int = 0


class Queue:
    """The lines of all batches that may be sent. They are read from the store in portions; `wants` lists the batches
    that need more.
    """

    def __init__(self, low: int) -> None:
        """`low`: a batch with fewer ready lines than this is listed by `wants`."""
        self._low = low
        self._open: dict[str, _Open] = {}
        self._in_flight: dict[str, int] = {}  # number of lines being answered, by owner
        self._served: dict[str, int] = {}
        self._count = 0

    def open(self, batch_id: str, owner: str) -> None:
        self._open.setdefault(batch_id, _Open(owner))

    def close(self, batch_id: str) -> None:
        """Remove a batch and release its slots."""
        closed = self._open.pop(batch_id, None)
        if closed is not None:
            self._give_back(closed.owner, closed.in_flight)

    def wants(self) -> list[tuple[str, int]]:
        """Return (batch, number of its last line read) of each batch whose next lines should be read: none while many
        lines wait to be sent again, because gateways are busy.
        """
        return [
            (batch_id, one.last_number)
            for batch_id, one in self._open.items()
            if not one.is_read and len(one.ready) < self._low and len(one.later) < _MAX_LATER
        ]

    def add(self, batch_id: str, lines: list[JobLine]) -> None:
        """Add a batch's next lines without a result. An empty list means that there are no more."""
        one = self._open.get(batch_id)
        if one is None:
            return
        one.is_read = not lines
        if lines:
            one.last_number = lines[-1].number
            one.ready.extend(Pick(batch_id, line) for line in lines)

    def pick(self, now_s: float) -> Pick | None:
        """Take the next line of the owner with the fewest lines in flight, from its least recently served batch; None
        if no line may be sent now.
        """
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
        """Release the slot of a line that `pick` has returned."""
        one = self._open.get(pick.batch_id)
        if one is not None:
            one.in_flight -= 1
            self._give_back(one.owner, 1)

    def again(self, pick: Pick, at_s: float) -> None:
        """Release the slot of a line, which may be picked again from `at_s` on."""
        one = self._open.get(pick.batch_id)
        if one is not None:
            self.ended(pick)
            heapq.heappush(one.later, (at_s, pick.line.number, pick))

    def next_s(self) -> float | None:
        """Return the earliest time from which a delayed line may be picked; None if there is none."""
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
