"""Decides which transfer sends the next chunk, or how long bulk is held back. No threads, clock or tensors.

Chunks are ordered by class, then by rank, then by the fewest bytes sent of their transfer. Two limits prevent
starvation: a waiting class may send one chunk after `patience_chunks` chunks of higher classes, and bulk as a whole may
send one after being held back for `hold_s`.
"""

from dataclasses import dataclass

from ballast.common.errors import InvariantViolation
from services.worker.links.traffic import TrafficClass

CATCH_UP_S = 0.05


@dataclass(frozen=True, slots=True)
class Grant:
    """Permission to send at most `limit_bytes` from `offset_bytes` on. The caller reports the sent bytes with
    `sent`.
    """

    transfer: int
    offset_bytes: int
    limit_bytes: int


@dataclass(frozen=True, slots=True)
class Hold:
    """No chunk may be sent before `until_s`, unless all urgent traffic has been sent before that."""

    until_s: float


class Wire:
    """An emulated link of `rate_bytes_per_s`, which transmits one message at a time, urgent ones first.

    It has no threads and no clock; the two lanes of a link share it through `gate.SharedWire`.
    """

    def __init__(self, rate_bytes_per_s: float, *, urgent_first: bool = True) -> None:
        self.rate_bytes_per_s = rate_bytes_per_s
        self.free_at_s = 0.0
        self._urgent_first = urgent_first  # False: in the order of requests
        self._urgent_waiting = 0

    def urgent_waits(self) -> None:
        """Announce an urgent message, which waits until `take` or `urgent_goes`."""
        self._urgent_waiting += 1

    def urgent_goes(self) -> None:
        self._urgent_waiting -= 1
        if self._urgent_waiting < 0:
            raise InvariantViolation("more urgent messages were sent than announced")

    def take(self, size_bytes: int, *, urgent: bool, since_s: float, at_s: float) -> float | None:
        """Return the time at which the message will have crossed the wire; None if another message is first. An urgent
        message then no longer counts as waiting.

        A message that has been ready since `since_s` follows the previous one without a gap even if its thread calls
        this method late, because a real link with a queue would not idle. At most `CATCH_UP_S` is compensated, so that
        a pause of the machine does not look like a faster link.
        """
        if at_s < self.free_at_s or (self._urgent_first and self._urgent_waiting and not urgent):
            return None
        if urgent:
            self.urgent_goes()
        begin_s = max(self.free_at_s, since_s, at_s - CATCH_UP_S)
        self.free_at_s = begin_s + size_bytes / self.rate_bytes_per_s
        return self.free_at_s


@dataclass(slots=True)
class _BulkEntry:
    transfer: int
    traffic: TrafficClass
    rank: int
    total_bytes: int
    sent_bytes: int
    served_bytes: int  # sent bytes plus an initial handicap, so that a new transfer does not take the whole link


class BulkSchedule:
    """The transfers of one link that still have bytes to send."""

    def __init__(self, *, chunk_bytes: int, hold_s: float, patience_chunks: int) -> None:
        self.chunk_bytes = chunk_bytes
        self._hold_s = hold_s
        self._patience_chunks = patience_chunks
        self._entries: dict[int, _BulkEntry] = {}
        self._passed_over: dict[TrafficClass, int] = {}  # waiting class -> chunks of higher classes since its last one
        self._holding_since_s: float | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, transfer: int) -> bool:
        return transfer in self._entries

    @property
    def queued_bytes(self) -> int:
        return sum(entry.total_bytes - entry.sent_bytes for entry in self._entries.values())

    @property
    def has_above_parameters(self) -> bool:
        return any(traffic < TrafficClass.PARAMETERS for traffic in self._passed_over)

    def add(self, transfer: int, traffic: TrafficClass, total_bytes: int, rank: int = 0) -> None:
        if transfer in self._entries or total_bytes <= 0:
            raise InvariantViolation(f"transfer {transfer} of {total_bytes} bytes cannot be added")
        self._entries[transfer] = _BulkEntry(transfer, traffic, rank, total_bytes, 0, self._least_served(traffic, rank))
        self._passed_over.setdefault(traffic, 0)

    def remove(self, transfer: int) -> bool:
        """Remove a transfer. Returns False if it has no bytes left to send or is unknown."""
        entry = self._entries.pop(transfer, None)
        if entry is not None:
            self._forget_empty_class(entry.traffic)
        return entry is not None

    def reprioritise(self, transfer: int, traffic: TrafficClass, rank: int = 0) -> bool:
        """Change a transfer's class and rank; its progress is not lost. Returns False if the transfer is unknown."""
        entry = self._entries.pop(transfer, None)
        if entry is None:
            return False
        self._forget_empty_class(entry.traffic)
        served = self._least_served(traffic, rank)
        self._entries[transfer] = _BulkEntry(transfer, traffic, rank, entry.total_bytes, entry.sent_bytes, served)
        self._passed_over.setdefault(traffic, 0)
        return True

    def next(self, at_s: float, *, urgent: bool) -> Grant | Hold | None:
        """Return the next chunk or hold; None: there are no bytes to send. The only side effect is that the start of a
        hold is recorded.
        """
        if not self._entries:
            self._holding_since_s = None
            return None
        if urgent:
            if self._holding_since_s is None:
                self._holding_since_s = at_s
            until_s = self._holding_since_s + self._hold_s
            if at_s < until_s:
                return Hold(until_s)
        else:
            self._holding_since_s = None
        entry = min(
            (e for e in self._entries.values() if e.traffic is self._next_class()),
            key=lambda e: (e.rank, e.served_bytes, e.transfer),
        )
        return Grant(entry.transfer, entry.sent_bytes, min(self.chunk_bytes, entry.total_bytes - entry.sent_bytes))

    def sent(self, transfer: int, size_bytes: int) -> bool:
        """Record that a grant was used, in whole or in part. Returns True if it was the transfer's last grant, so that
        the transfer is removed.
        """
        entry = self._entries[transfer]
        if not 0 < size_bytes <= entry.total_bytes - entry.sent_bytes:
            raise InvariantViolation(f"transfer {transfer}: sent {size_bytes} bytes after {entry.sent_bytes}")
        entry.sent_bytes += size_bytes
        entry.served_bytes += size_bytes
        self._holding_since_s = None  # the next hold is a new one
        for traffic in self._passed_over:
            if traffic > entry.traffic:
                self._passed_over[traffic] += 1
        self._passed_over[entry.traffic] = 0
        if entry.sent_bytes < entry.total_bytes:
            return False
        del self._entries[transfer]
        self._forget_empty_class(entry.traffic)
        return True

    def check(self) -> None:
        waiting = {entry.traffic for entry in self._entries.values()}
        if waiting != set(self._passed_over):
            raise InvariantViolation(f"waiting classes {sorted(waiting)}, but counted {sorted(self._passed_over)}")
        for entry in self._entries.values():
            if not 0 <= entry.sent_bytes < entry.total_bytes:
                raise InvariantViolation(f"transfer {entry.transfer}: {entry.sent_bytes} of {entry.total_bytes} sent")

    def _next_class(self) -> TrafficClass:
        starving = [c for c, passed in self._passed_over.items() if passed >= self._patience_chunks]
        if starving:
            return max(starving, key=lambda c: (self._passed_over[c], c))
        return min(self._passed_over)

    def _least_served(self, traffic: TrafficClass, rank: int) -> int:
        served = (e.served_bytes for e in self._entries.values() if (e.traffic, e.rank) == (traffic, rank))
        return min(served, default=0)

    def _forget_empty_class(self, traffic: TrafficClass) -> None:
        if not any(entry.traffic is traffic for entry in self._entries.values()):
            del self._passed_over[traffic]
