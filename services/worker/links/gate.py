"""State shared by the two lanes of a link: whether urgent traffic is due, and the emulated wire."""

import time
from threading import Condition, Event

from services.worker.links.pacing import Wire


class UrgentGate:
    """Counts the reasons for holding back bulk: urgent messages not yet sent, and callers that have announced one."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._reasons = 0
        self.activation_at_s = float("-inf")  # time at which the last activation was queued

    @property
    def is_due(self) -> bool:
        return self._reasons > 0

    def enter(self) -> None:
        with self._changed:
            self._reasons += 1

    def leave(self) -> None:
        with self._changed:
            self._reasons -= 1
            if not self._reasons:
                self._changed.notify_all()

    def wait_clear(self, until_s: float) -> None:
        """Wait until no urgent message is due, but at most until `until_s`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._reasons, timeout=max(until_s - time.monotonic(), 0))


class SharedWire:
    """An emulated wire shared by both lanes. The urgent lane polls, the bulk lane blocks in `cross`."""

    def __init__(self, rate_bytes_per_s: float, *, urgent_first: bool = True) -> None:
        self._wire = Wire(rate_bytes_per_s, urgent_first=urgent_first)
        self._changed = Condition()
        self._ended = Event()

    @property
    def free_at_s(self) -> float:
        return self._wire.free_at_s

    def urgent_waits(self) -> None:
        with self._changed:
            self._wire.urgent_waits()

    def urgent_goes(self) -> None:
        """Cancel an announced urgent message."""
        with self._changed:
            self._wire.urgent_goes()
            self._changed.notify_all()

    def take_urgent(self, size_bytes: int, since_s: float) -> float | None:
        """Send an urgent message over the wire; see `Wire.take`."""
        with self._changed:
            crossed_at_s = self._wire.take(size_bytes, urgent=True, since_s=since_s, at_s=time.monotonic())
            self._changed.notify_all()
            return crossed_at_s

    def cross(self, size_bytes: int, since_s: float, timeout_s: float) -> bool:
        """Wait until bulk may use the wire, and then until the bytes have crossed it. Returns False if the link has
        ended, or if urgent traffic never paused.
        """
        give_up_at_s = time.monotonic() + timeout_s
        with self._changed:
            while (now_s := time.monotonic()) < give_up_at_s and not self._ended.is_set():
                crossed_at_s = self._wire.take(size_bytes, urgent=False, since_s=since_s, at_s=now_s)
                if crossed_at_s is not None:
                    break
                ahead_s = self._wire.free_at_s - now_s
                self._changed.wait(ahead_s if ahead_s > 0 else give_up_at_s - now_s)
            else:
                return False
        return not self._ended.wait(max(crossed_at_s - time.monotonic(), 0))

    def end(self) -> None:
        """End the wire together with its link, so that every waiting or later `cross` returns False."""
        with self._changed:
            self._ended.set()
            self._changed.notify_all()
