"""Deadlines of sequences."""

import heapq
from collections.abc import Collection

from services.worker.core.batch import SequenceId

_STALE_ENTRIES_KEPT = 64


class SequenceDeadlines:
    """A heap of deadlines. Entries of ended sequences are dropped lazily: when due, or once they are the majority."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, SequenceId]] = []

    @property
    def next_at_s(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def add(self, deadline_at_s: float, sequence_id: SequenceId) -> None:
        heapq.heappush(self._heap, (deadline_at_s, sequence_id))

    def pop_due(self, at_s: float) -> list[SequenceId]:
        """Ids of sequences whose deadline has passed, earliest first. May contain ended ones."""
        due: list[SequenceId] = []
        while self._heap and self._heap[0][0] <= at_s:
            due.append(heapq.heappop(self._heap)[1])
        return due

    def tidy(self, live: Collection[SequenceId]) -> None:
        """Drop the entries of ended sequences once they are the majority, which bounds the heap by the peak number of
        live ones.
        """
        if len(self._heap) > 2 * len(live) + _STALE_ENTRIES_KEPT:
            self._heap = [entry for entry in self._heap if entry[1] in live]
            heapq.heapify(self._heap)
