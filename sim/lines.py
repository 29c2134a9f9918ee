"""Connectivity between processes: directed network paths (lines) that can be cut or slow for a time.

Messages over a cut line arrive when it is restored, in order, as with TCP, unless the receiver has closed the
connection. Processes are identified by name: workers, dispatchers, monitors, planners.
"""

from collections.abc import Callable

from sim.clock import Clock

Act = Callable[[], None]
_LATE = b"late"


class Lines:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.troubled = False  # some line is, or recently was, cut or slow
        self.forgets = False  # calls that timed out at the caller are not delivered
        self._cut: dict[tuple[str, str], list[Act]] = {}
        self._late_s: dict[tuple[str, str], float] = {}
        self._last_s: dict[tuple[str, str], float] = {}  # arrival of the last message over a slow line

    def cut(self, source: str, to: str) -> None:
        self.troubled = True
        self._cut.setdefault((source, to), [])

    def mend(self, source: str, to: str) -> None:
        for act in self._cut.pop((source, to), ()):
            act()

    @property
    def whole(self) -> bool:
        """True if no line is cut or slow."""
        return not (self._cut or any(self._late_s.values()))

    def is_cut(self, source: str, to: str) -> bool:
        return (source, to) in self._cut

    def slow(self, source: str, to: str, late_s: float) -> None:
        """Delay a line's messages. `late_s` 0: normal again."""
        self.troubled = True
        self._late_s[source, to] = late_s

    def holds(self, source: str, to: str, act: Act) -> bool:
        """Delay a message if it must not arrive now; `act` is then called later. Returns False if it may arrive
        now. Call this only if `troubled`.
        """
        line, now_s = (source, to), self._clock.now_s
        if (held := self._cut.get(line)) is not None:
            held.append(act)
            return True
        at_s = max(now_s + self._late_s.get(line, 0.0), self._last_s.get(line, 0.0))
        if at_s <= now_s:
            return False
        self._last_s[line] = at_s
        self._clock.at(at_s, _LATE, lambda: self._arrive(line, act))
        return True

    def _arrive(self, line: tuple[str, str], act: Act) -> None:
        if (held := self._cut.get(line)) is not None:
            held.append(act)
        else:
            act()

    def bring(self, source: str, to: str, act: Act) -> None:
        """Deliver a message now, or later if the line is cut or slow."""
        if not (self.troubled and self.holds(source, to, act)):
            act()
