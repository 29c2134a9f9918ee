"""Which sequences have run out of time."""

import heapq
from collections.abc import Collection

from services.worker.core.batch import SequenceId

_STALE_ENTRIES_KEPT = 64


class Deadlines:
    """A heap of instants. Entries of sequences that have ended stay until their time or until there are too many."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, SequenceId]] = []

    @property
    def next_at_s(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def add(self, deadline_at_s: float, sequence_id: SequenceId) -> None:
        heapq.heappush(self._heap, (deadline_at_s, sequence_id))

    def pop_due(self, at_s: float) -> list[SequenceId]:
        """Those whose deadline has come, earliest first. May name sequences that have ended."""
        due: list[SequenceId] = []
        while self._heap and self._heap[0][0] <= at_s:
            due.append(heapq.heappop(self._heap)[1])
        return due

    def tidy(self, live: Collection[SequenceId]) -> None:
        """Forget ended sequences once they are the majority: the heap is bounded by the most that ever lived."""
        if len(self._heap) > 2 * len(live) + _STALE_ENTRIES_KEPT:
            self._heap = [entry for entry in self._heap if entry[1] in live]
            heapq.heapify(self._heap)
