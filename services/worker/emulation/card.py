"""All network cards of an instance, modelled as one that sends bulk transfers one after another, in order of priority.

Only marks (see `phantom`) are transferred, but a transfer takes as long as its bytes would. Receivers' cards are not
modelled. Concurrent reception halves the rate, like in the simulator, because both directions share the card.
"""

import asyncio
import heapq
from collections.abc import Callable
from dataclasses import dataclass

_QUANTUM_S = 0.02  # interval after which a more urgent transfer may overtake


@dataclass(slots=True)
class CardTransfer:
    order: tuple[int, int, int]  # traffic class, rank, sequence number
    left_bytes: float
    sent: Callable[[], None]
    is_over: bool = False  # cancelled or refused, or the link has ended

    def __lt__(self, other: "CardTransfer") -> bool:
        return self.order < other.order


class Card:
    """The network cards of an instance. Used on the event loop only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, bytes_per_s: float) -> None:
        self._loop = loop
        self._bytes_per_s = bytes_per_s
        self._queue: list[CardTransfer] = []
        self._timer: asyncio.TimerHandle | None = None
        self.incoming_count = 0

    def message_s(self, size_bytes: int) -> float:
        return size_bytes / self._bytes_per_s

    def add(self, outgoing: CardTransfer) -> None:
        heapq.heappush(self._queue, outgoing)
        if self._timer is None:
            self._serve()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._queue.clear()

    def _serve(self) -> None:
        self._timer = None
        while self._queue and self._queue[0].is_over:
            heapq.heappop(self._queue)
        if not self._queue:
            return
        first = self._queue[0]
        rate = self._bytes_per_s / (2 if self.incoming_count else 1)
        part_s = min(first.left_bytes / rate, _QUANTUM_S)
        self._timer = self._loop.call_later(part_s, self._sent, first, part_s * rate)

    def _sent(self, outgoing: CardTransfer, size_bytes: float) -> None:
        outgoing.left_bytes -= size_bytes
        if outgoing.left_bytes < 1.0 and not outgoing.is_over:
            outgoing.is_over = True
            outgoing.sent()
        self._serve()
