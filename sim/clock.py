"""Virtual time: an event queue with a deterministic order.

Simultaneous events run in the order of scheduling. The hash over all (instant, label) pairs identifies a run: runs that
differ in any decision differ in some instant.
"""

import heapq
from collections.abc import Callable
from hashlib import blake2b
from struct import Struct

from ballast.common.errors import InvariantViolation

_INSTANT = Struct("<d")
_FLUSH_BYTES = 1 << 14

Act = Callable[[], None]


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.event_count = 0
        self._queue: list[tuple[float, int, bytes, Act]] = []
        self._serial = 0
        self._halted = False
        self._digest = blake2b(digest_size=16)
        self._story = bytearray()  # instants and labels that are not yet hashed

    def at(self, at_s: float, label: bytes, act: Act) -> None:
        """Schedule an event. `label` describes it, and is hashed."""
        if at_s < self.now_s:
            raise InvariantViolation(f"{label!r} is scheduled for {at_s}, and it is {self.now_s}")
        self._serial += 1
        heapq.heappush(self._queue, (at_s, self._serial, label, act))

    def after(self, delay_s: float, label: bytes, act: Act) -> None:
        if delay_s < 0.0:
            raise InvariantViolation(f"{label!r} is scheduled {-delay_s} s before now, and it is {self.now_s}")
        self._serial += 1
        heapq.heappush(self._queue, (self.now_s + delay_s, self._serial, label, act))

    def every(self, interval_s: float, label: bytes, act: Act, *, first_s: float = 0.0) -> None:
        """Call `act` periodically, for the first time after `first_s`."""

        def step() -> None:
            act()
            self.after(interval_s, label, step)

        self.after(first_s, label, step)

    def step(self) -> bool:
        """Run the next event. Returns False if there is none."""
        return self.run(1) == 1

    def run(self, count: int) -> int:
        """Run the next `count` events, until none is left or `halt` is called."""
        queue, story, pop, pack = self._queue, self._story, heapq.heappop, _INSTANT.pack
        self._halted = False
        done = 0
        while queue and done < count and not self._halted:
            self.now_s, _, label, act = pop(queue)
            done += 1
            story += pack(self.now_s)
            story += label
            act()
        self.event_count += done
        if len(story) >= _FLUSH_BYTES:
            self._flush()
        return done

    def halt(self) -> None:
        """Make `run` return after the current event."""
        self._halted = True

    @property
    def trace_hash(self) -> str:
        self._flush()
        return self._digest.hexdigest()

    def _flush(self) -> None:
        self._digest.update(self._story)
        self._story.clear()
