"""One member's part in a draining group, which runs alongside the member's own group until it is empty.

`core.draining` decides, on the worker that led the group. Used by the engine thread only.
"""

from collections.abc import Callable, Collection, Iterable

from ballast.common.ids import Epoch, WorkerId
from services.worker.core.draining import Draining
from services.worker.core.events import CapacityChanged, Event, GroupClosed, HandOver, OfLeaving
from services.worker.pipeline.context import MemberContext
from services.worker.pipeline.handover import Handover
from services.worker.pipeline.progress import TransitionProgress
from services.worker.pipeline.stage_runner import StageRunner
from services.worker.pipeline.wire import Topic, room_to_bytes


class Leaving:
    def __init__(
        self,
        context: MemberContext,
        stage: StageRunner,
        handover: Handover,
        draining: Draining,
        *,
        epoch: Epoch,
        grown: Callable[[int], None],
    ) -> None:
        """`context`, `stage`: of the draining group; `epoch`: of its restore. `grown` is called with the new number of
        blocks of this worker's own group.
        """
        self._context = context
        self.role = context.role
        self.stage = stage
        self._handover = handover
        self._draining = draining
        self._progress: TransitionProgress = context.published.counted
        self._epoch = epoch
        self._grown = grown
        self._began_s = context.now()

    @property
    def wakes_at_s(self) -> float | None:
        """Time at which `poll` must be called even without an event. Batches that complete wake the engine anyway."""
        if not self.role.leads or self._draining.hurried:
            return None
        at_s = self._draining.over_at_s(self._context.group_scheduler)
        return at_s if at_s > self._context.now() else None

    @property
    def request_count(self) -> int:
        return len(self._context.book.sequence_ids)

    def poll(self) -> bool:
        """Advance draining between two batches, on the leader only. Returns True when no batch is in flight and all
        sequences have been handed over.
        """
        if not self.role.leads:
            return False
        draining, group_scheduler, now_s = self._draining, self._context.group_scheduler, self._context.now()
        draining.is_short = self._context.core.group_scheduler.memory_is_awaited
        self._carry_out(draining.place_waiting(now_s, group_scheduler))
        self._progress.victims_waiting = len(group_scheduler.sequences)
        if draining.has_progress(now_s, group_scheduler) and self._context.published.counted is self._progress:
            self._progress.exchange_s = now_s - self._began_s
            self._context.published.publish_as(self._epoch, self._progress.phase)
        self._carry_out(draining.go_on(now_s, group_scheduler))
        return draining.over

    def empty(self, lost: Collection[WorkerId]) -> None:
        """Leader: hand over all sequences without KV, because members are lost."""
        self._carry_out(self._draining.empty(self._context.now(), self._context.group_scheduler, lost))

    def _carry_out(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, OfLeaving) and isinstance(event.event, HandOver):
                self._handover.send_away(self._epoch, event)
                continue
            self._context.answers.tell(event)
            if isinstance(event, OfLeaving) and isinstance(event.event, CapacityChanged):
                self.limited(event.event.block_count)
        self._progress.victims_recomputed += self._draining.recomputed_count
        self._draining.recomputed_count = 0

    def limited(self, block_count: int) -> None:
        """Shrink to `block_count` blocks, beyond which the group holds none, and notify the next stage in order with
        batches.
        """
        context, book = self._context, self._context.book
        context.links.pass_down(Topic.ROOM, room_to_bytes(self._epoch, block_count))
        if block_count < book.block_count:
            began_s = context.now()
            if moves := book.compaction_plan(block_count):
                context.memory.move_leaving(moves)
                book.compacted(moves)
            book.shrink(block_count)
            self._grown(context.memory.shrink_leaving(block_count))
            self._progress.remap_s += context.now() - began_s

    # ------------------------------------------------------------ end

    def pass_end_on(self) -> None:
        self._context.links.pass_on(Topic.EPOCH_ENDED, self._epoch)

    def close(self) -> None:
        """Stop computing for the group. Its KV blocks are still read until `release`."""
        self.stage.forget(self._context.book.sequence_ids)
        if self.role.leads:
            self._context.answers.tell(GroupClosed(self._context.now()))

    def release(self) -> None:
        began_s = self._context.now()
        self._grown(self._context.memory.close_leaving())
        self._progress.remap_s += self._context.now() - began_s

    def check(self) -> None:
        self._context.book.check()
