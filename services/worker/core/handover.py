"""Requests that move from one leader to the next. The dispatcher submits the request, and the previous leader sends its
KV.

A request without its KV is WAITING_FOR_KV; KV without its request is a suspended sequence without tokens, stored by
request id. The first to arrive waits for the other for a limited time; when both are here, they are bound.
"""

from array import array
from collections import OrderedDict
from dataclasses import replace
from zlib import crc32

from ballast.common.errors import InvariantViolation
from ballast.common.ids import RequestId, WorkerId
from ballast.common.sampling import PriorityClass, SamplingParams
from services.worker.core.blocks import Table
from services.worker.core.events import Adopted, HandedOver, HandOver, MovedOver, Submitted
from services.worker.core.group_scheduler import GroupScheduler
from services.worker.core.limits import WorkerLimits
from services.worker.core.request_table import RequestTable
from services.worker.core.sequence import NOBODY, Sequence, SequenceState
from services.worker.core.snapshot import SequenceSnapshot
from services.worker.core.stop import StopRule, StopText

ANOTHER_LEADS = "another worker leads this group, or this one is parked"
_CLASSES = tuple(PriorityClass)  # in order of rank


class Handovers:
    def __init__(self, limits: WorkerLimits, request_table: RequestTable) -> None:
        self._limits = limits
        self._request_table = request_table
        self._moved_on: OrderedDict[RequestId, WorkerId] = OrderedDict()  # request -> receiver of its KV
        self.stale_total = 0
        self.adopted_total = 0
        self.moved_total = 0

    def hand_over(self, group_scheduler: GroupScheduler, event: HandOver) -> HandedOver:
        table, at_s = self._request_table, event.at_s
        moving = group_scheduler.sequences
        if isinstance(event.to, str):
            moving += table.waiting_for_kv.sequences
        group_scheduler.hand_over(at_s, None if isinstance(event.to, str) else event.to)
        packed: dict[WorkerId, list[SequenceSnapshot]] = {}
        shared = group_scheduler.shared_blocks(moving)
        for sequence in sorted(moving, key=lambda s: s.sequence_id):
            to = event.to if isinstance(event.to, str) else event.to.get(sequence.sequence_id)
            if to is None:
                continue
            if sequence.sequence_id in group_scheduler.suspended_ids:
                raise InvariantViolation(f"{sequence.name} is handed over while its KV travels", sequence.story())
            if event.by_tokens:
                group_scheduler.give_up(sequence, at_s, f"goes to {to}")
            packed.setdefault(to, []).append(snapshot_of(sequence, at_s, shared.get(sequence.sequence_id, ())))
            if sequence.snapshot is None:
                table.outbox.moved(sequence.key, to, sequence.cached_tokens or 0)
                table.move_out(sequence, at_s, f"moved to {to}")
                self.moved_total += 1
            else:
                table.kept.discard(sequence)
                group_scheduler.give_away(sequence)
                sequence.move(SequenceState.ENDED, at_s, f"moved to {to}")
                self._moved_on[sequence.request_id] = to
                if len(self._moved_on) > self._limits.max_moving_count:
                    self._moved_on.popitem(last=False)
            if event.frees:
                group_scheduler.batches_in_flight.forget(sequence)
        if isinstance(event.to, str):
            for kept in table.kept.sequences:
                self.free(group_scheduler, kept, at_s, "its group continues elsewhere")
        return HandedOver(tuple((to, tuple(snapshots)) for to, snapshots in sorted(packed.items())))

    def move_over(self, source: GroupScheduler, target: GroupScheduler, event: MovedOver) -> None:
        """Move sequences from one group of this worker to its other one."""
        for sequence in [s for s in source.sequences if s.sequence_id in event.sequence_ids]:
            suspended = sequence.sequence_id in event.suspended_ids
            if not suspended:
                source.give_up(sequence, event.at_s, "its group dissolves")
            source.give_away(sequence)
            sequence.step_id, sequence.in_engine = 0, False  # both refer to the source group
            sequence.may_overfill = True
            self._request_table.place(sequence, target, event.at_s, waits=suspended)
            self._request_table.turned.append(sequence)  # lets its dispatcher place other waiting requests elsewhere
        target.make_room(event.at_s)
        target.admit(event.at_s)

    # ---------------------------------------------------------------- arrival of KV

    def adopt(self, group_scheduler: GroupScheduler, event: Adopted) -> None:
        if not event.in_order and any(snapshot.computed_tokens for snapshot in event.snapshots):
            group_scheduler.batches_in_flight.require_none("sequences are adopted")
        if not group_scheduler.leads:
            raise InvariantViolation("sequences are handed over to a follower")
        for snapshot in event.snapshots:
            self._adopt(group_scheduler, snapshot, event)
        group_scheduler.make_room(event.at_s)
        if event.last:
            for request in self._request_table.waiting_for_kv.sequences:
                self._recompute(group_scheduler, request, event.at_s, "its KV has not arrived")
        group_scheduler.admit(event.at_s)

    def _adopt(self, group_scheduler: GroupScheduler, snapshot: SequenceSnapshot, event: Adopted) -> None:
        table, sequence_id, at_s = self._request_table, snapshot.sequence_id, event.at_s
        earlier = table.kept.get(snapshot.request_id)
        if (
            sequence_id in table.live
            or sequence_id in group_scheduler.scheduler.suspended
            or (earlier is not None and earlier.sequence_id == sequence_id)
        ):
            self.stale_total += 1
            return
        self.adopted_total += 1
        self._moved_on.pop(snapshot.request_id, None)
        if earlier is not None:
            self.free(group_scheduler, earlier, at_s, "the request was handed over twice")
        kept = _without_request(snapshot, at_s)
        if sequence_id in event.lost_ids:
            kept.on_stages, kept.computed_tokens = True, 0
            group_scheduler.batches_in_flight.forget(kept)
        elif kept.computed_tokens:
            group_scheduler.enter(
                kept,
                at_s,
                travels=sequence_id in event.suspended_ids,
                waits=sequence_id in event.waiting_ids,
                shared=event.shared.get(sequence_id, ()),
            )
        table.kept.add(kept, at_s)
        if (request := table.waiting_for_kv.get(snapshot.request_id)) is not None:
            self.bind(group_scheduler, kept, request, at_s)

    def forget_kv(self, group_scheduler: GroupScheduler, at_s: float) -> None:
        """Free KV that waits for its requests, because the group dissolves. The requests are recomputed without
        waiting.
        """
        for kept in self._request_table.kept.sequences:
            group_scheduler.forget_kv(kept, at_s, "its group dissolves")

    def free(self, group_scheduler: GroupScheduler, kept: Sequence, at_s: float, why: str) -> None:
        """Free KV that no request will use. Blocks being written stay reserved until the write has ended."""
        self._request_table.kept.discard(kept)
        if kept.sequence_id in group_scheduler.scheduler.suspended:
            group_scheduler.end(kept)
        kept.move(SequenceState.ENDED, at_s, why)

    # ---------------------------------------------------------------- arrival of requests

    def follow(self, event: Submitted) -> bool:
        """Redirect a request whose KV was here and has moved on to another leader. Returns False for all others."""
        to = self._moved_on.pop(event.request_id, None) if event.expects_handover else None
        if to is not None:
            self._request_table.outbox.moved(event.key, to)
        return to is not None

    def may_wait(self, event: Submitted) -> bool:
        return event.expects_handover and len(self._request_table.waiting_for_kv) < self._limits.max_moving_count

    def kept(self, request_id: RequestId) -> Sequence | None:
        """The sequence that another leader has handed over for this request, with or without KV; None if there is none
        yet.
        """
        return self._request_table.kept.get(request_id)

    def wait(self, group_scheduler: GroupScheduler, request: Sequence, at_s: float) -> None:
        """Make a request wait for its KV. An earlier submission that still waits is recomputed in `group_scheduler`."""
        if earlier := self._request_table.waiting_for_kv.get(request.request_id):
            self._recompute(group_scheduler, earlier, at_s, "it was submitted twice")
        request.move(SequenceState.WAITING_FOR_KV, at_s, "its KV will arrive")
        request.may_overfill = True
        self._request_table.waiting_for_kv.add(request, at_s)

    def bind(self, group_scheduler: GroupScheduler, kept: Sequence, request: Sequence, at_s: float) -> None:
        """Bind a request to its KV: it resumes when the KV is complete, or is recomputed if the KV belongs to other
        tokens.
        """
        table, snapshot = self._request_table, kept.snapshot
        assert snapshot is not None
        table.waiting_for_kv.discard(request)
        table.kept.discard(kept)
        request.arrival = kept.arrival
        request.may_overfill = True
        count = kept.computed_tokens
        if not count or count >= request.token_count or checksum_of(request, count) != snapshot.checksum:
            if count:
                self.free(group_scheduler, kept, at_s, "its KV belongs to other tokens")
            self._recompute(group_scheduler, request, at_s, "there is no KV for it")
            return
        table.rename(request, kept.sequence_id)
        table.group_schedulers[request.sequence_id] = group_scheduler
        group_scheduler.bind(kept, request, at_s)

    def expire(self, group_scheduler: GroupScheduler, at_s: float) -> None:
        """End waits that have timed out: recompute the requests in `group_scheduler`, free KV without a request."""
        for request in self._request_table.waiting_for_kv.pop_due(at_s):
            self._recompute(group_scheduler, request, at_s, "its KV has not arrived")
        for kept in self._request_table.kept.pop_due(at_s):
            self.free(group_scheduler, kept, at_s, "no dispatcher has submitted its request")

    def _recompute(self, group_scheduler: GroupScheduler, request: Sequence, at_s: float, why: str) -> None:
        """Resume a request by recomputation; refuse it if this worker does not lead the group."""
        table = self._request_table
        table.waiting_for_kv.discard(request)
        if not group_scheduler.leads:
            table.move_out(request, at_s, "refused")
            table.turn_away(request.key, ANOTHER_LEADS, invalid=False)
            return
        if request.state is SequenceState.WAITING_FOR_KV:
            request.move(SequenceState.WAITING, at_s, why)
        table.place(request, group_scheduler, at_s)
        table.turned.append(request)
        if group_scheduler.scheduler.too_big(request):
            table.end_too_big(request, at_s)
        else:
            group_scheduler.admit(at_s)


def snapshot_of(sequence: Sequence, at_s: float, shared_blocks: Table = ()) -> SequenceSnapshot:
    if sequence.snapshot is not None:  # its request has not arrived
        return replace(sequence.snapshot, age_s=at_s - sequence.arrival[0], shared_blocks=shared_blocks)
    count = sequence.computed_tokens if sequence.on_stages else 0
    return SequenceSnapshot(
        sequence_id=sequence.sequence_id,
        request_id=sequence.request_id,
        computed_tokens=count,
        checksum=checksum_of(sequence, count),
        token_count=sequence.token_count,
        priority=_CLASSES[sequence.rank],
        age_s=at_s - sequence.arrival[0],
        shared_blocks=shared_blocks,
    )


def checksum_of(sequence: Sequence, count: int) -> int:
    """CRC-32 of the sequence's first `count` token ids."""
    return crc32(array("I", sequence.token_ids(0, count)).tobytes())


def _without_request(snapshot: SequenceSnapshot, at_s: float) -> Sequence:
    """Create a sequence for KV that arrives before its request."""
    submitted = Submitted(
        at_s=at_s - snapshot.age_s,
        key=NOBODY,
        request_id=snapshot.request_id,
        attempt=0,
        prompt_token_ids=(),
        sampling=SamplingParams(),
        priority=snapshot.priority,
    )
    sequence = Sequence(snapshot.sequence_id, submitted, StopRule(submitted.sampling, frozenset(), 0, None))
    sequence.snapshot = snapshot
    sequence.token_count, sequence.computed_tokens = snapshot.token_count, snapshot.computed_tokens
    sequence.on_stages = snapshot.computed_tokens > 0
    sequence.note(at_s, f"handed over: {sequence.token_count} tokens, {sequence.computed_tokens} with KV")
    return sequence


def stop_rule(submitted: Submitted, limits: WorkerLimits) -> StopRule:
    sampling = submitted.sampling
    room = limits.max_model_len - len(submitted.prompt_token_ids)
    matcher = None
    if submitted.wants_text or sampling.stop:
        text, delivered_chars = submitted.output_text, submitted.delivered_text_chars
        matcher = StopText(sampling.stop, sampling.include_stop_str_in_output, text, delivered_chars)
    return StopRule(sampling, limits.eos_token_ids, min(sampling.max_tokens, room), matcher)
