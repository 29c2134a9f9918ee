"""Deadlines of requests: a heap whose stale entries are removed before they outnumber the live ones."""

import heapq
import math

from ballast.common.ids import RequestId

_SLACK = 64


class Deadlines:
    def __init__(self) -> None:
        self._heap: list[tuple[float, int, RequestId]] = []  # (deadline, serial, request)
        self._live: dict[RequestId, int] = {}  # request -> serial, of requests that have not ended

    def add(self, at_s: float, serial: int, request_id: RequestId) -> None:
        self._live[request_id] = serial
        heapq.heappush(self._heap, (at_s, serial, request_id))

    def forget(self, request_id: RequestId) -> None:
        del self._live[request_id]
        if len(self._heap) > 2 * len(self._live) + _SLACK:
            self._heap = [entry for entry in self._heap if self._live.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def next_s(self) -> float:
        """Earliest deadline, possibly that of an ended request; infinity if there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def due(self, at_s: float) -> list[RequestId]:
        """Return the requests whose deadline has passed, each once."""
        found: list[RequestId] = []
        while self._heap and self._heap[0][0] <= at_s:
            _, serial, request_id = heapq.heappop(self._heap)
            if self._live.get(request_id) == serial:
                found.append(request_id)
        return found
