"""How the last leader of a draining group empties it after the commit of a restore (pure).

The group admits no sequences. Its waiting sequences move to members at once, without KV. Running ones continue until
they end or until `policy.leaving.over_at_s`, and then move to a member with their KV. Meanwhile the group's blocks are
limited to what it still needs, and each stage returns the rest to its own cache.
"""

import math
from collections.abc import Collection, Iterator, Sequence

from ballast.common.ids import WorkerId
from ballast.common.layout import Member
from services.worker.core.batch import SequenceId
from services.worker.core.events import (
    BatchesLost,
    CapacityChanged,
    Event,
    HandOver,
    LeavingStopped,
    MovedOver,
    OfLeaving,
)
from services.worker.core.group_scheduler import GroupScheduler
from services.worker.core.plan import Victim
from services.worker.core.sequence import Sequence as Request
from services.worker.core.sequence import SequenceState
from services.worker.policy.leaving import over_at_s, tightened
from services.worker.policy.placement import MemberView, PlacementView, place

_TELLS_EVERY_S = 5.0  # interval of progress reports while no sequence leaves
_TIGHTENS_WITHIN_S = 1.0  # at the end of draining, maximum wait for the group to shrink to the blocks that it needs


class Draining:
    """Empties a draining group. Methods return events for the worker's core, or yield them one at a time; each must be
    handled before the next is requested. They read the group and never change it.
    """

    def __init__(
        self, me: WorkerId, began_s: float, stages: Sequence[Member], targets: Sequence[MemberView], block_count: int
    ) -> None:
        """`targets`: the members with their free blocks. `block_count`: the group's blocks at the commit."""
        self._me = me
        self._targets = {target.worker_id: target for target in targets}
        self._first_blocks = self._limit = block_count
        layers = {stage.worker_id: stage.last_layer - stage.first_layer for stage in stages}
        layer_count = sum(layers.values())
        self._stages = [(layers[target.worker_id] / layer_count, target.block_count) for target in targets]
        self._began_s = self._left_s = self._told_s = began_s
        self._left_count = math.inf  # sequences left when progress was last reported
        self._told_tokens: int = 0
        self._tight_by_s = math.inf
        self.is_short = False  # requests outside the draining group wait for memory
        self.hurried = False  # the next transition waits for this group's end
        self.recomputed_count = 0  # requests moved to members without KV since this count was last read
        self.own_victims: tuple[Victim, ...] = ()  # sequences that this worker continues to lead, with their KV
        self.over = False  # True: no batch is in flight and all sequences have been handed over

    def over_at_s(self, group: GroupScheduler) -> float:
        blocks = group.reserved_block_count
        return over_at_s(self._began_s, self._left_s, blocks, self._stages, is_short=self.is_short)

    def place_waiting(self, now_s: float, group: GroupScheduler) -> list[Event]:
        return self._send_away(group.may_leave(running=False), now_s, group, by_tokens=True)

    def has_progress(self, now_s: float, group: GroupScheduler) -> bool:
        """True if progress must be reported to the planner, which would otherwise end the phase. Progress means that
        sequences have left or, `_TELLS_EVERY_S` after the last report, that tokens were generated. It counts as
        reported once this returns True.
        """
        if (count := len(group.sequences)) < self._left_count:
            self._left_count, self._left_s = count, now_s
        elif now_s - self._told_s < _TELLS_EVERY_S:
            return False
        token_count: int = sum(request.token_count for request in group.sequences)
        if token_count == self._told_tokens:
            return False
        self._told_s, self._told_tokens = now_s, token_count
        return True

    def go_on(self, now_s: float, group: GroupScheduler) -> Iterator[Event]:
        """Advance draining between two batches. Sets `over` when the group is empty."""
        if group.sequences and not group.stopped:
            if not self.hurried and now_s < self.over_at_s(group):
                yield from self._keep(self._tightened(group), now_s, group)
                return
            # The group ends once it holds few unneeded blocks, so that members have room for new requests, or when its
            # time is over. Its next batch makes the stages release blocks.
            self._tight_by_s = min(self._tight_by_s, now_s + _TIGHTENS_WITHIN_S)
            needed = group.reserved_block_count + group.scheduler.running_count
            yield from self._keep(needed, now_s, group)
            if self._limit > needed and now_s < self._tight_by_s:
                return
            if group.sequences:
                yield LeavingStopped(now_s)
        if not group.batches_in_flight:
            yield from self._send_away(group.may_leave(running=True), now_s, group, by_tokens=False)
            self.over = not group.batches_in_flight.to_remove

    def empty(self, now_s: float, group: GroupScheduler, lost: Collection[WorkerId]) -> Iterator[Event]:
        """Hand over all sequences without KV, because the members in `lost` are lost and the group can run no batch."""
        self._targets = {worker_id: target for worker_id, target in self._targets.items() if worker_id not in lost}
        yield BatchesLost(now_s)
        yield from self._send_away(group.may_leave(running=True), now_s, group, by_tokens=True)

    def _tightened(self, group: GroupScheduler) -> int:
        scheduler, reserved = group.scheduler, group.reserved_block_count
        return tightened(self._limit, self._first_blocks, reserved, scheduler.running_count, scheduler.block_tokens)

    def _keep(self, limit: int, now_s: float, group: GroupScheduler) -> Iterator[Event]:
        """Lower the group's limit to `limit` blocks, if that is lower and the group has settled."""
        if limit < self._limit and group.settled:
            self._limit = limit
            yield OfLeaving(now_s, CapacityChanged(now_s, limit, before_block_count=self._first_blocks))

    def _send_away(
        self, requests: Sequence[Request], now_s: float, group: GroupScheduler, *, by_tokens: bool
    ) -> list[Event]:
        """Hand sequences over to members, with their KV or (`by_tokens`) without it."""
        if not requests:
            return []
        placed = self._place(requests, group)
        mine = [r for r in requests if placed[r.sequence_id] == self._me]
        ids = frozenset(r.sequence_id for r in mine)
        kept = () if by_tokens else group.victims(mine, self._me)
        self.own_victims = (*self.own_victims, *kept)
        self.recomputed_count += len(placed) if by_tokens else 0
        going = {i: to for i, to in placed.items() if i not in ids}
        events: list[Event] = []
        if ids:
            events.append(MovedOver(now_s, ids, frozenset(victim.sequence_id for victim in kept)))
        if going:
            events.append(OfLeaving(now_s, HandOver(now_s, going, by_tokens=by_tokens)))
        return events

    def _place(self, requests: Sequence[Request], group: GroupScheduler) -> dict[SequenceId, WorkerId]:
        """Choose a member for each sequence, according to `policy.placement`, and deduct its blocks from the member's
        room.
        """
        views = [
            PlacementView(r.sequence_id, max(1, group.need(r)), r.state is SequenceState.RUNNING) for r in requests
        ]
        placed = place(views, list(self._targets.values()))
        for view in views:
            target = self._targets[placed[view.sequence_id]]
            left_blocks, left_count = target.block_count - view.block_count, target.running_count - view.running
            self._targets[target.worker_id] = MemberView(target.worker_id, left_blocks, left_count)
        return placed
