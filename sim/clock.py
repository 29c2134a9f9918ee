"""Virtual time: what happens next, in an order that is the same in every process.

Two events of the same instant happen in the order in which they were scheduled. The hash over all (instant, label)
pairs is the story of a run: two runs that differ in any decision differ in an instant sooner or later.
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
        self._story = bytearray()  # not yet hashed

    def at(self, at_s: float, label: bytes, act: Act) -> None:
        """`label` says who does what; it goes into the hash."""
        if at_s < self.now_s:
            raise InvariantViolation(f"{label!r} is scheduled for {at_s}, and it is {self.now_s}")
        self._serial += 1
        heapq.heappush(self._queue, (at_s, self._serial, label, act))

    def after(self, delay_s: float, label: bytes, act: Act) -> None:
        self.at(self.now_s + delay_s, label, act)

    def every(self, interval_s: float, label: bytes, act: Act, *, first_s: float = 0.0) -> None:
        """`act` is called for ever, for the first time `first_s` from now."""

        def step() -> None:
            act()
            self.after(interval_s, label, step)

        self.after(first_s, label, step)

    def step(self) -> bool:
        """The next event. False if there is none."""
        return self.run(1) == 1

    def run(self, count: int) -> int:
        """The next `count` events, or as many as there are until none is left or `halt` is called."""
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
        """`run` returns after the event that is happening."""
        self._halted = True

    @property
    def trace_hash(self) -> str:
        self._flush()
        return self._digest.hexdigest()

    def _flush(self) -> None:
        self._digest.update(self._story)
        self._story.clear()
