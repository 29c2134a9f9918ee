"""The state server in virtual time: a model of its scripts, compared with the real server by a differential test."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from ballast.common.ids import DispatcherId, Epoch, Incarnation
from ballast.common.layout import Layout
from ballast.common.model import ModelInfo
from ballast.common.reach import Reach
from services.monitor.core.messages import BacklogWord
from services.planner.core.messages import StoredLayout, WriteJournal, WriteLayout, WriteOutcome
from services.planner.core.stages import Stage
from services.planner.core.transition import Journal
from services.planner.policy.replicate import Partial
from sim.clock import Clock
from sim.lines import Lines
from sim.process import Process

STATE = "state"  # the server's name in `Lines`
_TIMEOUT_S = 2.0  # timeout of an operation, as in the services
_POLL_S = 1.0  # interval at which dispatchers poll the layout
_BEGAN_S = 1e6  # initial value of the server's clock, so that tokens differ from epochs
_REMEMBERED_S = 10.0
NOBODY = "?"  # holder of the leases after a corruption


@dataclass(frozen=True, slots=True)
class Delays:
    """Delays of calls between services, and to the state server."""

    rpc_s: float
    state_s: float


@dataclass(frozen=True, slots=True)
class Lease:
    holder: str
    token: int
    until_s: float


@dataclass(slots=True)
class Contents:
    """Contents of the server; each method is one script. Times are the server's, in seconds."""

    leases: dict[str, Lease] = field(default_factory=dict[str, Lease])
    counters: dict[str, int] = field(default_factory=dict[str, int])
    layout: Layout | None = None
    model: ModelInfo | None = None
    partial: Partial = ()
    journal: Journal | None = None

    def acquire(self, name: str, holder: str, ttl_s: float, now_s: float, above: int = 0) -> int | None:
        lease = self._lease(name, now_s)
        if lease is not None and lease.until_s == math.inf and lease.holder != holder:
            lease = None  # a lease without expiry counts as free
        if lease is not None and lease.holder != holder:
            return None
        token = lease.token if lease is not None else 0
        if lease is None or token <= above:
            token = self.counters[name] = max(self._grown(name, now_s), above + 1)
        self.leases[name] = Lease(holder, token, now_s + ttl_s)
        return token

    def release(self, name: str, holder: str, now_s: float) -> None:
        if (lease := self._lease(name, now_s)) is not None and lease.holder == holder:
            del self.leases[name]

    def next_incarnation(self, kind: str, name: str, now_s: float) -> Incarnation:
        key = f"{kind} {name}"
        self.counters[key] = self._grown(key, now_s)
        return Incarnation(self.counters[key])

    def load(self) -> StoredLayout | None:
        return None if self.layout is None else StoredLayout(self.layout, self.model, self.partial, self.journal)

    def write(self, command: WriteLayout, now_s: float) -> WriteOutcome:
        if self._token(now_s) != command.token:
            return WriteOutcome.FENCED
        if self.epoch != command.expected_epoch:
            return WriteOutcome.CONFLICT
        self.layout, self.model, self.partial = command.layout, command.model, command.partial
        return WriteOutcome.WRITTEN

    def write_journal(self, command: WriteJournal, now_s: float) -> WriteOutcome:
        journal, old = command.journal, self.journal
        if self._token(now_s) != command.token:
            return WriteOutcome.FENCED
        if old == journal:
            return WriteOutcome.WRITTEN
        if old is not None and old.epoch > journal.epoch:
            return WriteOutcome.CONFLICT
        if journal.stage in (Stage.PREPARING, Stage.COMMITTING) and self.epoch != command.expected_epoch:
            return WriteOutcome.CONFLICT
        if journal.stage is Stage.COMMITTING:
            self.layout, self.model, self.partial = journal.target, command.model, command.partial
        self.journal = journal
        return WriteOutcome.WRITTEN

    @property
    def epoch(self) -> Epoch | None:
        return None if self.layout is None else self.layout.epoch

    def _lease(self, name: str, now_s: float) -> Lease | None:
        lease = self.leases.get(name)
        return lease if lease is not None and lease.until_s > now_s else None

    def _token(self, now_s: float) -> int | None:
        lease = self._lease("planner", now_s)
        return None if lease is None else lease.token

    def _grown(self, key: str, now_s: float) -> int:
        return max(self.counters.get(key, 0) + 1, int(now_s * 1000))

    def copied(self) -> "Contents":
        made = copy.copy(self)
        made.leases, made.counters = dict(self.leases), dict(self.counters)
        return made


class SimStateServer:
    """The state server. It may be unreachable, slow, emptied, or reset to an earlier state."""

    def __init__(self, clock: Clock, delays: Delays, lines: Lines) -> None:
        self._clock = clock
        self._delays = delays
        self._lines = lines
        self.contents = Contents()
        self.backlogs: dict[DispatcherId, BacklogWord] = {}
        self.is_up = True
        self.slow_s = 0.0  # additional time per operation
        self._watchers: list[tuple[str, Callable[[Layout], None]]] = []
        self._reach_watchers: list[tuple[str, Callable[[Reach], None]]] = []
        self.on_journal: Callable[[Journal], None] = lambda _: None  # called with each written journal
        self._leaders: dict[tuple[str, str], str] = {}  # last answer by (lease, caller)
        self._past: list[tuple[float, Contents]] | None = None

    @property
    def stored(self) -> StoredLayout | None:
        return self.contents.load()

    @property
    def now_s(self) -> float:
        return self._clock.now_s + _BEGAN_S

    def watch(self, told: Callable[[Layout], None], name: str = STATE) -> None:
        """Add a watcher. `name`: the watching process."""
        self._watchers.append((name, told))

    def reaches(self, name: str) -> bool:
        """True if the process can reach the server."""
        lines = self._lines
        return self.is_up and not (lines.troubled and (lines.is_cut(name, STATE) or lines.is_cut(STATE, name)))

    # ------------------------------------------------------------ operations

    def ask(
        self, what: str, operation: Callable[[], Callable[[], None]], failed: Callable[[], None], by: Process
    ) -> None:
        """Execute an operation after one delay, and deliver its result after another; `failed` is called if there is no
        answer.
        """

        def arrive() -> None:
            if not self.reaches(by.name):
                self._clock.after(_TIMEOUT_S, f"{what} fails".encode(), lambda: by.run(failed))
                return
            answered = operation()
            label = f"{what} answered".encode()
            if self.slow_s >= _TIMEOUT_S:  # executed, but the caller has timed out
                self._clock.after(_TIMEOUT_S, label, lambda: by.run(failed))
            else:
                self._clock.after(self._delays.state_s, label, lambda: by.run(answered))

        self._clock.after(self._delays.state_s + min(self.slow_s, _TIMEOUT_S), what.encode(), arrive)

    def write(self, command: WriteLayout) -> WriteOutcome:
        outcome = self.contents.write(command, self.now_s)
        if outcome is WriteOutcome.WRITTEN:
            self._tell(command.layout)
        return outcome

    def write_journal(self, command: WriteJournal) -> WriteOutcome:
        outcome = self.contents.write_journal(command, self.now_s)
        if outcome is WriteOutcome.WRITTEN:
            self._take_snapshot()
            self.on_journal(command.journal)
            if command.journal.stage is Stage.COMMITTING:
                self._tell(command.journal.target)
        return outcome

    def acquire(self, name: str, holder: str, ttl_s: float, above: int = 0) -> int | None:
        return self.contents.acquire(name, holder, ttl_s, self.now_s, above)

    def leader(self, name: str, by: str) -> str | None:
        """The leader as seen by `by`; the last known one while there is none or the server does not answer."""
        lease = self.contents.leases.get(name)
        if self.reaches(by) and lease is not None and lease.until_s > self.now_s and lease.holder != NOBODY:
            self._leaders[name, by] = lease.holder
        return self._leaders.get((name, by))

    def watch_reach(self, told: Callable[[Reach], None], name: str = STATE) -> None:
        self._reach_watchers.append((name, told))

    def write_reach(self, reach: Reach) -> None:
        for name, told in self._reach_watchers:
            bring = partial(self._lines.bring, STATE, name, partial(told, reach))
            self._clock.after(3 * self._delays.state_s, b"reach", bring)

    def _tell(self, layout: Layout) -> None:
        """Notify the watchers, which then read the layout."""
        for name, told in self._watchers:
            bring = partial(self._lines.bring, STATE, name, partial(told, layout))
            self._clock.after(3 * self._delays.state_s, b"layout", bring)

    # ------------------------------------------------------------ faults

    def remember(self) -> None:
        """Record snapshots from now on, for `go_back`."""
        self._past = []
        self._clock.every(0.25, b"snapshot", self._take_snapshot)

    def _take_snapshot(self) -> None:
        if self._past is not None and self.is_up:
            self._past.append((self._clock.now_s, self.contents.copied()))
            self._past = [(at_s, c) for at_s, c in self._past if at_s >= self._clock.now_s - _REMEMBERED_S]

    def stop_for(self, for_s: float) -> None:
        if self.is_up:
            self.is_up = False
            self._clock.after(for_s, b"state server is back", self._come_back)

    def _come_back(self) -> None:
        self.is_up = True
        self._clock.after(_POLL_S, b"dispatchers look", self._look)

    def become_corrupt(self) -> None:
        """Corrupt the contents: leases get an unknown holder and no expiry, and dispatchers' entries are lost."""
        for name, lease in self.contents.leases.items():
            self.contents.leases[name] = Lease(NOBODY, lease.token, math.inf)
        self.backlogs.clear()

    def lose_everything(self) -> None:
        self.contents = Contents()
        self.backlogs.clear()

    def go_back(self, by_s: float) -> None:
        """Reset to a snapshot of that age."""
        then_s = self._clock.now_s - by_s
        older = [contents for at_s, contents in self._past or () if at_s <= then_s]
        if older:
            self.contents = older[-1].copied()
            self._clock.after(_POLL_S, b"dispatchers look", self._look)

    def _look(self) -> None:
        if self.is_up and self.contents.layout is not None:
            self._tell(self.contents.layout)


@dataclass(frozen=True, slots=True)
class Site:
    """State shared by all processes of a cluster."""

    clock: Clock
    delays: Delays
    lines: Lines
    state: SimStateServer


class Candidacy:
    """A replica's part in leader election, as in `ballast.service.leadership`."""

    def __init__(
        self,
        clock: Clock,
        state: SimStateServer,
        process: Process,
        lease: str,
        ttl_s: float,
        on_change: Callable[[int | None], None],
    ) -> None:
        self._state = state
        self._process = process
        self._lease = lease
        self._ttl_s = ttl_s
        self._on_change = on_change
        self._token: int | None = None
        self._decided = False
        self.floor = 0  # the highest token known to be in use
        label = f"{process.name} renews"
        clock.every(ttl_s / 3, label.encode(), lambda: process.run_due("lease", self._renew))

    def _renew(self) -> None:
        def acquire() -> Callable[[], None]:
            token = self._state.acquire(self._lease, self._process.name, self._ttl_s, self.floor)
            return lambda: self._answered(token)

        self._state.ask(f"{self._process.name} lease", acquire, lambda: None, self._process)

    def _answered(self, token: int | None) -> None:
        if token != self._token or not self._decided:
            self._token, self._decided = token, True
            self._on_change(token)


def lead_for_ever(state: SimStateServer, lease: str, holder: str) -> int:
    """Make a single replica the permanent leader. Returns its token."""
    state.contents.leases[lease] = Lease(holder, 1, math.inf)
    return 1
