"""Whether urgent traffic is due on a link: what the bulk sender looks at before each chunk."""

import time
from threading import Condition, Lock

from services.worker.transport.pacing import TokenBucket


class UrgentGate:
    """Counts reasons for bulk to stand back: urgent messages in flight, and callers who know that one is due."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._reasons = 0

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
        """Return when nothing urgent is due, at `until_s` at the latest."""
        with self._changed:
            self._changed.wait_for(lambda: not self._reasons, timeout=max(until_s - time.monotonic(), 0))


class SharedBucket(TokenBucket):
    """One bucket for both lanes of a link."""

    def __init__(self, rate_bytes_per_s: float) -> None:
        super().__init__(rate_bytes_per_s)
        self._lock = Lock()

    def take(self, size_bytes: int, at_s: float) -> None:
        with self._lock:
            super().take(size_bytes, at_s)
