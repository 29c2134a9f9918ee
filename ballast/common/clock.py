"""Source of time. Cores read no clock; shells read it once per event."""

from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Monotonic time in seconds, comparable only within one process."""
        ...
