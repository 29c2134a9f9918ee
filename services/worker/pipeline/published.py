"""What others may read of this worker's part in its group: how far transitions are, and where its stage's time goes."""

from collections.abc import Callable
from dataclasses import replace

from ballast.common.errors import InvariantViolation
from ballast.common.ids import Epoch
from ballast.common.transition import Phase
from services.worker.core.transition import Transition
from services.worker.core.transition_messages import Event, LinksUp, MemoryReady
from services.worker.pipeline.migration_totals import MigrationTotals
from services.worker.pipeline.stage_clock import StageClock
from services.worker.pipeline.status import Progress

_KEPT_TRANSITIONS = 16
_OVER = (Phase.DONE, Phase.ABORTED, Phase.FAILED)


def _nothing() -> None:
    """Nobody waits for what is published."""


class Published:
    """Counted and published on the engine thread, read on any."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.clock = StageClock()
        self.migrations = MigrationTotals()
        self.stale_total = 0  # events of another time, which have changed nothing
        self.newest_epoch = Epoch(0)  # the highest that this worker has heard of: it takes part in no lower one
        self.progress: dict[Epoch, Progress] = {}  # replaced, never changed
        self.on_publish: Callable[[], None] = _nothing  # called after that, on the engine thread
        self._counted: Progress | None = None

    @property
    def counted(self) -> Progress:
        """Progress of the latest transition, while it is being counted."""
        if self._counted is None:
            raise InvariantViolation("no transition has begun")
        return self._counted

    def begin(self, epoch: Epoch, block_count: int) -> Progress:
        """Nothing is published by that yet."""
        self._counted = Progress(epoch=epoch, began_s=self._now(), block_count_before=block_count)
        return self._counted

    def note(self, event: Event) -> None:
        """Some that the transition is told are the end of something whose time is counted."""
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
        """This worker leaves its group: no status names a transition that it takes part in no more."""
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
