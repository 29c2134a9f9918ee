"""Progress of transitions and totals of this worker, for the planner and operators."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ballast.common.errors import InvariantViolation
from ballast.common.ids import Epoch
from ballast.common.transition import Phase, Status
from services.worker.core.migration_messages import Report
from services.worker.core.transition import Transition
from services.worker.core.transition_messages import Event, LinksUp, MemoryReady
from services.worker.pipeline.stage_clock import StageClock


@dataclass(slots=True, kw_only=True)
class TransitionProgress(Status):
    """Counters and durations of one transition."""

    began_s: float
    phase: Phase = Phase.PREPARING
    links_s: float = 0.0  # since the plan arrived
    memory_s: float = 0.0
    commit_at_s: float = 0.0
    halted_at_s: float = 0.0  # time from which on moved sequences get no tokens
    taken_up_at_s: float = 0.0
    stalls_s: list[float] = field(default_factory=list[float])  # per moved sequence, the time until it may resume

    def before_takeover(self) -> dict[str, float]:
        """Durations between the plan's arrival and the new layout."""
        waited_s = self.commit_at_s - self.began_s - self.prepare_s
        return {
            "links_s": round(self.links_s, 4),
            "layers_s": round(self.layers_s, 4),
            "memory_s": round(self.memory_s, 4),
            "prepare_s": round(self.prepare_s, 4),
            "commit_awaited_s": round(waited_s, 4),
            "boundary_wait_s": round(self.boundary_wait_s, 4),
            "remap_s": round(self.remap_s, 4),
        }

    def note_stall(self, stall_s: float) -> None:
        self.stalls_s.append(stall_s)
        self.stalls_s.sort()
        self.max_stall_s = self.stalls_s[-1]
        self.p99_stall_s = self.stalls_s[math.ceil(0.99 * len(self.stalls_s)) - 1]


_KEPT_TRANSITIONS = 16
_OVER = (Phase.DONE, Phase.ABORTED, Phase.FAILED)


def _nothing() -> None:
    """Default of `on_publish`."""


class Published:
    """Progress and totals, counted and published on the engine thread, read on any thread."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.clock = StageClock()
        self.migrations = MigrationTotals()
        self.stale_total = 0  # number of outdated events, which are ignored
        self.newest_epoch = Epoch(0)  # highest epoch known; plans of lower ones are refused
        self.progress: dict[Epoch, TransitionProgress] = {}  # replaced, never changed
        self.on_publish: Callable[[], None] = _nothing  # called after publishing, on the engine thread
        self._counted: TransitionProgress | None = None

    @property
    def counted(self) -> TransitionProgress:
        """Progress of the latest transition while it is being counted."""
        if self._counted is None:
            raise InvariantViolation("no transition has begun")
        return self._counted

    def begin(self, epoch: Epoch, block_count: int) -> TransitionProgress:
        """Start counting. This alone publishes nothing."""
        self._counted = TransitionProgress(epoch=epoch, began_s=self._now(), block_count_before=block_count)
        return self._counted

    def note(self, event: Event) -> None:
        """Record how long connecting or preparing memory took, if the event ends it."""
        progress = self.counted
        if isinstance(event, LinksUp):
            progress.links_s = event.at_s - progress.began_s
        elif isinstance(event, MemoryReady) and not progress.memory_s:
            progress.memory_s = event.at_s - progress.began_s

    def note_commit(self) -> None:
        progress = self.counted
        progress.commit_at_s = progress.commit_at_s or self._now()

    def publish(self, transition: Transition) -> None:
        self.counted.why = transition.why
        self.publish_as(transition.epoch, transition.phase)

    def fail_open(self, why: str) -> None:
        """Mark transitions in progress as failed, because this worker leaves its group."""
        open_ = {e: replace(p, phase=Phase.FAILED, why=why) for e, p in self.progress.items() if p.phase not in _OVER}
        if open_:
            self.progress = {**self.progress, **open_}
            self.on_publish()

    def publish_as(self, epoch: Epoch, phase: Phase) -> None:
        progress = self.counted
        if progress.phase is not phase:
            self.clock.note_transition(self._now(), epoch, phase.name.lower())
        progress.phase = phase
        if progress.phase is Phase.PREPARED and not progress.prepare_s:
            progress.prepare_s = self._now() - progress.began_s
        published = dict(list(self.progress.items())[-_KEPT_TRANSITIONS:])
        published[epoch] = replace(progress)
        self.progress, self.newest_epoch = published, max(self.newest_epoch, epoch)
        self.on_publish()


# Upper bounds of the downtime histogram (seconds); the first ones are about a decode step.
DOWNTIME_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


@dataclass(slots=True)
class MigrationTotals:
    moved: int = 0
    not_moved: int = 0
    recomputed: int = 0  # part of `moved`: sequences whose KV was lost or may have been lost
    blocks: int = 0
    downtime_s: float = 0.0  # sum over all moved sequences
    max_downtime_s: float = 0.0
    downtime_counts: list[int] = field(default_factory=lambda: [0] * (len(DOWNTIME_BOUNDS_S) + 1))

    def count(self, report: Report) -> None:
        if not report.moved:
            self.not_moved += 1
            return
        self.moved += 1
        self.recomputed += not report.with_kv
        self.blocks += report.copied_blocks + report.last_blocks
        self.downtime_s += report.downtime_s
        self.max_downtime_s = max(self.max_downtime_s, report.downtime_s)
        index = sum(report.downtime_s > bound for bound in DOWNTIME_BOUNDS_S)
        self.downtime_counts[index] += 1
