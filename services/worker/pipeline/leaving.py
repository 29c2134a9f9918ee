"""A group that dissolves, as one of its members: it goes on beside the member's own until nothing is left in it.

Nothing comes into it any more. What waits in it goes at once to one of the members, by its tokens; what runs goes on
until it ends, or until `policy.leaving.over_at_s`, and then goes to a member with its KV. Meanwhile the leader
limits the group to what it still needs, and each stage gives the rest of its memory to its own blocks. Engine thread
only.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence

from ballast.common.ids import Epoch, WorkerId
from services.worker.core.batch import SequenceId
from services.worker.core.events import (
    BatchesLost,
    CapacityChanged,
    GroupClosed,
    LeavingStopped,
    MovedOver,
    OfLeaving,
)
from services.worker.core.plan import Victim
from services.worker.core.sequence import Sequence as Request
from services.worker.core.sequence import SequenceState
from services.worker.pipeline.context import MemberContext
from services.worker.pipeline.handover import Handover
from services.worker.pipeline.stage_runner import StageRunner
from services.worker.pipeline.status import Progress
from services.worker.pipeline.wire import Topic, room_to_bytes
from services.worker.policy.leaving import over_at_s, tightened
from services.worker.policy.placement import MemberView, PlacementView, place

_TELLS_EVERY_S = 5.0
_TIGHTENS_WITHIN_S = 1.0


class Leaving:
    def __init__(
        self,
        context: MemberContext,
        stage: StageRunner,
        handover: Handover,
        progress: Progress,
        *,
        epoch: Epoch,
        targets: Sequence[MemberView],
        grown: Callable[[int], None],
    ) -> None:
        """`context` and `stage` of the group that dissolves, with the restore of that epoch. `targets`: its members,
        with what each has room for. `grown` is told how many blocks this worker's own group has.
        """
        self._context = context
        self.role = context.role
        self.stage = stage
        self._handover = handover
        self._progress = progress
        self.epoch = epoch
        self._targets = {target.worker_id: target for target in targets}
        self._grown = grown
        self.closed = False
        self.own_victims: tuple[Victim, ...] = ()  # leader, at its end: what stays here, with its KV
        self._first_blocks = self._limit = context.book.block_count
        layers = {stage.worker_id: stage.last_layer - stage.first_layer for stage in self.role.stages}
        layer_count = sum(layers.values())
        self._stages = [(layers[target.worker_id] / layer_count, target.block_count) for target in targets]
        self._began_s = self._left_s = context.now()
        self._left_count = math.inf  # that had not left it then
        self._told_s = context.now()
        self._told_tokens: int = 0
        self._tight_by_s = math.inf
        self._hurried = False

    @property
    def wakes_at_s(self) -> float | None:
        """When `poll` wants to be called although nothing has happened. What is in flight then wakes it in landing."""
        if not self.role.leads or self.closed or self._hurried:
            return None
        at_s = self._over_at_s()
        return at_s if at_s > self._context.now() else None

    @property
    def request_count(self) -> int:
        return len(self._context.book.sequence_ids)

    def give_way(self) -> None:
        """The next transition waits for its end."""
        self._hurried = True

    def poll(self) -> bool:
        """Between two batches. True at its leader, once: no batch is in flight, and what was left is handed over."""
        if not self.role.leads or self.closed:
            return False
        group_scheduler, now_s = self._context.group_scheduler, self._context.now()
        self._send_away(group_scheduler.may_leave(running=False), now_s, by_tokens=True)
        self._progress.victims_waiting = count = len(group_scheduler.sequences)
        if count < self._left_count:
            self._left_count, self._left_s = count, now_s
            self._tell_progress(now_s)
        elif now_s - self._told_s >= _TELLS_EVERY_S:
            self._tell_progress(now_s)
        if count and not (group_scheduler.stopped or self._hurried or now_s >= self._over_at_s()):
            self._tighten(now_s)
            return False
        if count and not group_scheduler.stopped and not self._is_tight(now_s):
            return False
        if group_scheduler.sequences and not group_scheduler.stopped:
            self._context.answers.tell(LeavingStopped(now_s))
        if group_scheduler.batches_in_flight:
            return False
        self._send_away(group_scheduler.may_leave(running=True), now_s, by_tokens=False)
        return not group_scheduler.batches_in_flight.to_remove

    def _tell_progress(self, now_s: float) -> None:
        """That requests have left or have had tokens is news to the planner, which waits for long and not for ever."""
        token_count: int = sum(request.token_count for request in self._context.group_scheduler.sequences)
        if token_count != self._told_tokens and self._context.published.counted is self._progress:
            self._told_s, self._told_tokens = now_s, token_count
            self._progress.exchange_s = now_s - self._began_s
            self._context.published.publish_as(self.epoch, self._progress.phase)

    def _over_at_s(self) -> float:
        reserved = self._context.group_scheduler.reserved_block_count
        return over_at_s(self._began_s, self._left_s, reserved, self._stages)

    def empty(self, lost: Collection[WorkerId]) -> None:
        """Its leader: those members are gone, and nothing can be computed in it any more."""
        now_s = self._context.now()
        self._targets = {worker_id: target for worker_id, target in self._targets.items() if worker_id not in lost}
        self._context.answers.tell(BatchesLost(now_s))
        self._send_away(self._context.group_scheduler.may_leave(running=True), now_s, by_tokens=True)

    def _place(self, requests: Iterable[Request]) -> dict[SequenceId, WorkerId]:
        """Where each goes: to the member with most room left of those that a member has at home."""
        views = [
            PlacementView(
                r.sequence_id, max(1, self._context.group_scheduler.need(r)), r.state is SequenceState.RUNNING
            )
            for r in requests
        ]
        placed = place(views, list(self._targets.values()))
        for view in views:
            target = self._targets[placed[view.sequence_id]]
            left_blocks, left_count = target.block_count - view.block_count, target.running_count - view.running
            self._targets[target.worker_id] = MemberView(target.worker_id, left_blocks, left_count)
        return placed

    def _send_away(self, requests: Sequence[Request], now_s: float, *, by_tokens: bool) -> None:
        """By their tokens, while others may follow; or at the end, with their KV."""
        if not requests:
            return
        placed, me = self._place(requests), self.role.me
        mine = [r for r in requests if placed[r.sequence_id] == me]
        ids = frozenset(r.sequence_id for r in mine)
        if by_tokens:
            self._progress.victims_recomputed += len(placed)
        kept = [Victim(r.sequence_id, r.computed_tokens, me) for r in mine if r.computed_tokens and not by_tokens]
        self.own_victims = (*self.own_victims, *kept)
        if ids:
            self._context.answers.tell(MovedOver(now_s, ids, frozenset(victim.sequence_id for victim in kept)))
        if going := {i: to for i, to in placed.items() if i not in ids}:
            self._handover.send_away(self.epoch, going, now_s, by_tokens=by_tokens)

    # ------------------------------------------------------------ its room

    def _tighten(self, now_s: float) -> None:
        group_scheduler = self._context.group_scheduler
        running_count, block_tokens = group_scheduler.scheduler.running_count, group_scheduler.scheduler.block_tokens
        limit = tightened(
            self._limit, self._first_blocks, group_scheduler.reserved_block_count, running_count, block_tokens
        )
        self._keep(limit, now_s)

    def _is_tight(self, now_s: float) -> bool:
        """Whether the group holds little more than it needs, so that members have room for what comes; or has had the
        time for that. Its next batch tells the stages what to give up.
        """
        scheduler = self._context.group_scheduler.scheduler
        limit = self._context.group_scheduler.reserved_block_count + scheduler.running_count
        self._tight_by_s = min(self._tight_by_s, now_s + _TIGHTENS_WITHIN_S)
        self._keep(limit, now_s)
        return self._limit <= limit or now_s >= self._tight_by_s

    def _keep(self, limit: int, now_s: float) -> None:
        """Of its blocks so many only, if it has more and no batch may still take one of the others."""
        if limit < self._limit and self._context.group_scheduler.settled:
            change = CapacityChanged(now_s, limit, before_block_count=self._first_blocks)
            self._context.answers.tell(OfLeaving(now_s, change))
            self.limited(limit)

    def limited(self, block_count: int) -> None:
        """The group holds no block beyond, and will take none: told down the pipeline, behind its batches."""
        context, book = self._context, self._context.book
        context.links.pass_down(Topic.ROOM, room_to_bytes(self.epoch, block_count))
        self._limit = min(self._limit, block_count)
        if block_count < book.block_count:
            began_s = context.now()
            if moves := book.compaction_plan(block_count):
                context.memory.move_leaving(moves)
                book.compacted(moves)
            book.shrink(block_count)
            self._grown(context.memory.shrink_leaving(block_count))
            self._progress.remap_s += context.now() - began_s

    # ------------------------------------------------------------ its end

    def pass_end_on(self) -> None:
        self._context.links.pass_on(Topic.EPOCH_ENDED, self.epoch)

    def close(self) -> None:
        """It computes nothing any more. Its blocks are read until `release`."""
        self.closed = True
        self.stage.forget(self._context.book.sequence_ids)
        if self.role.leads:
            self._context.answers.tell(GroupClosed(self._context.now()))

    def release(self) -> None:
        began_s = self._context.now()
        self._grown(self._context.memory.close_leaving())
        self._progress.remap_s += self._context.now() - began_s

    def check(self) -> None:
        self._context.book.check()
