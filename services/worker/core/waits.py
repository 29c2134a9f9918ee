"""Sequences that wait with a timeout."""

from collections import deque

from ballast.common.ids import RequestId
from services.worker.core.sequence import Sequence


class Waits:
    """Waiting sequences, at most one per request. All timeouts are equal, so they expire in order of insertion."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._by_request: dict[RequestId, Sequence] = {}
        self._queue: deque[tuple[float, Sequence]] = deque()  # with expiry times; includes sequences that have left

    def __len__(self) -> int:
        return len(self._by_request)

    @property
    def next_at_s(self) -> float | None:
        while self._queue and not self._waits(self._queue[0][1]):
            self._queue.popleft()
        return self._queue[0][0] if self._queue else None

    @property
    def sequences(self) -> list[Sequence]:
        return list(self._by_request.values())

    def get(self, request_id: RequestId) -> Sequence | None:
        return self._by_request.get(request_id)

    def add(self, sequence: Sequence, at_s: float) -> None:
        """Add a sequence. It replaces an earlier one of the same request, which the caller must already have
        handled.
        """
        self._by_request[sequence.request_id] = sequence
        self._queue.append((at_s + self._timeout_s, sequence))
        if len(self._queue) > 2 * len(self._by_request) + 64:
            self._queue = deque(entry for entry in self._queue if self._waits(entry[1]))

    def discard(self, sequence: Sequence) -> None:
        if self._waits(sequence):
            del self._by_request[sequence.request_id]

    def pop_due(self, at_s: float) -> list[Sequence]:
        due: list[Sequence] = []
        if not self._by_request:
            return due
        while (next_at_s := self.next_at_s) is not None and next_at_s <= at_s:
            sequence = self._queue.popleft()[1]
            self.discard(sequence)
            due.append(sequence)
        return due

    def _waits(self, sequence: Sequence) -> bool:
        return self._by_request.get(sequence.request_id) is sequence
