"""Waiting requests of dispatchers, as published in the state server.

Clocks of two machines are never compared: an entry is fresh while its serial number changes.
"""

from dataclasses import dataclass, field

from ballast.common.ids import DispatcherId
from ballast.common.traffic import LongDemand, Traffic, sum_traffic
from services.monitor.core.messages import BacklogWord
from services.monitor.policy.demand import BacklogDemand

_NOTHING = Traffic()


@dataclass(slots=True)
class Backlogs:
    lease_s: float  # a dispatcher without a new entry for longer counts as lost, and its requests are not demand
    forget_s: float  # time for which the last entry of a silent dispatcher counts as its traffic
    _words: dict[DispatcherId, tuple[BacklogWord, float]] = field(  # dispatcher -> (entry, time of its last change)
        default_factory=dict[DispatcherId, tuple[BacklogWord, float]]
    )
    _read_at_s: float | None = None

    def read(self, at_s: float, words: tuple[BacklogWord, ...]) -> bool:
        """Adopt the entries that have been read. Returns True if more tokens wait than before."""
        known, self._read_at_s = self._words, at_s
        news = [w for w in words if w.dispatcher_id not in known or known[w.dispatcher_id][0].serial != w.serial]
        if not news and len(words) == len(known):
            return False
        before = self.total(at_s).token_count
        self._words = {w.dispatcher_id: (w, at_s if w in news else known[w.dispatcher_id][1]) for w in words}
        return self.total(at_s).token_count > before

    def traffic(self, at_s: float) -> tuple[Traffic, Traffic | None]:
        """Return (traffic of all dispatchers according to their last entries, traffic of the live ones alone). The
        latter is None if all are live.
        """
        known = [word.traffic for word, since_s in self._words.values() if at_s - since_s <= self.forget_s]
        fresh = self._fresh(at_s)
        return _sum(known), None if len(fresh) == len(known) else _sum(fresh)

    def total(self, at_s: float) -> BacklogDemand:
        """Number of requests and tokens that wait in live dispatchers."""
        fresh = self._fresh(at_s)
        return BacklogDemand(sum([one.queued_count for one in fresh]), sum([one.queued_tokens for one in fresh]))

    def long(self, at_s: float) -> LongDemand:
        """Long requests that wait in live dispatchers."""
        waiting = [one for one in self._fresh(at_s) if one.long.count]
        return _sum(waiting).long

    def _fresh(self, at_s: float) -> list[Traffic]:
        return [word.traffic for word, since_s in self._words.values() if at_s - since_s <= self.lease_s]

    def known(self, at_s: float) -> bool:
        """True if the state server was read recently. Otherwise an empty backlog does not mean that
        no requests wait.
        """
        return self._read_at_s is not None and at_s - self._read_at_s <= self.lease_s

    def silent(self, at_s: float) -> tuple[DispatcherId, ...]:
        """Dispatchers whose entry has not changed for `forget_s`, so that it should be deleted."""
        silent = [name for name, (_, since_s) in self._words.items() if at_s - since_s > self.forget_s]
        return tuple(sorted(silent)) if silent else ()

    def clear(self) -> None:
        self._words.clear()
        self._read_at_s = None


def _sum(parts: list[Traffic]) -> Traffic:
    return sum_traffic(parts) if len(parts) > 1 else parts[0] if parts else _NOTHING
