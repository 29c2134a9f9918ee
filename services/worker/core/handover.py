"""Sequences that change their leader: those that go, those that come, and requests that are here before theirs."""

from collections.abc import Callable
from dataclasses import replace

from ballast.common.errors import InvariantViolation
from ballast.common.ids import WorkerId
from ballast.common.sampling import PriorityClass
from services.worker.core.batch import SequenceId
from services.worker.core.events import Adopted, HandedOver, HandOver, MovedOver, OrphanWithdrawn, Submitted
from services.worker.core.group_scheduler import GroupScheduler
from services.worker.core.intake import with_seed
from services.worker.core.limits import WorkerLimits
from services.worker.core.request_table import RequestTable
from services.worker.core.sequence import NOBODY, Sequence, SequenceState, Unsent
from services.worker.core.snapshot import SequenceSnapshot
from services.worker.core.stop import StopRule, StopText

ANOTHER_LEADS = "another worker leads this group"
_CLASSES = tuple(PriorityClass)  # in order of rank


class Handovers:
    def __init__(self, limits: WorkerLimits, request_table: RequestTable, new_id: Callable[[], SequenceId]) -> None:
        self._limits = limits
        self._new_id = new_id
        self._request_table = request_table
        self.stale_total = 0
        self.adopted_total = 0
        self.moved_total = 0

    # ---------------------------------------------------------------- going

    def hand_over(self, group_scheduler: GroupScheduler, event: HandOver) -> HandedOver:
        group_scheduler.hand_over(event.at_s, None if isinstance(event.to, str) else event.to)
        target = _target(event)
        packed: dict[WorkerId, list[SequenceSnapshot]] = {}
        for sequence in self._all(group_scheduler):
            to = target(sequence.sequence_id)
            if to is None:
                continue
            if event.by_tokens:
                group_scheduler.give_up(sequence, event.at_s, f"goes to {to}")
            suspended = sequence.sequence_id in group_scheduler.scheduler.suspended
            packed.setdefault(to, []).append(pack(sequence, event.at_s, suspended=suspended))
            if suspended and sequence.state is SequenceState.ENDED:
                group_scheduler.give_away(sequence)
            self._move_out(sequence, to, event.at_s)
            if event.frees:
                group_scheduler.batches_in_flight.forget(sequence)
        if isinstance(event.to, str):
            for sequence in self._request_table.held.sequences:
                self._move_out(sequence, event.to, event.at_s)
        return HandedOver(tuple((to, tuple(snapshots)) for to, snapshots in sorted(packed.items())))

    def _all(self, group_scheduler: GroupScheduler) -> list[Sequence]:
        """Whatever there is to hand over: also what has ended and either holds blocks or has not been told."""
        untold = [s for s in self._request_table.orphans.sequences if s.state is SequenceState.ENDED]
        found = {s.sequence_id: s for s in (*group_scheduler.sequences, *untold)}
        return [found[sequence_id] for sequence_id in sorted(found)]

    def _move_out(self, sequence: Sequence, to: WorkerId, at_s: float) -> None:
        if sequence.state is not SequenceState.ENDED and sequence.unsent is None:
            self._request_table.outbox.moved(sequence.key, to)
            self._request_table.remember_moved(sequence)
        self._request_table.move_out(sequence, at_s, f"moved to {to}")
        self.moved_total += 1

    def move_over(self, source: GroupScheduler, target: GroupScheduler, event: MovedOver) -> None:
        """From one group of this worker to the other."""
        for sequence in [s for s in source.sequences if s.sequence_id in event.sequence_ids]:
            suspended = sequence.sequence_id in event.suspended_ids
            if not suspended:
                source.give_up(sequence, event.at_s, "its group dissolves")
            source.give_away(sequence)
            sequence.step_id, sequence.in_engine = 0, False  # those of the other group
            sequence.may_overfill = True
            self._request_table.place(sequence, target, event.at_s, suspended=suspended, waits=suspended)
            self._request_table.turned.append(sequence)  # what waits behind others here may go where there is room
        target.make_room(event.at_s)
        target.scheduler.admit(event.at_s)

    # ---------------------------------------------------------------- coming

    def adopt(self, group_scheduler: GroupScheduler, event: Adopted) -> None:
        if not (event.by_tokens or event.in_order):
            group_scheduler.batches_in_flight.require_none("sequences are adopted")
        if not group_scheduler.leads:
            raise InvariantViolation("a follower is handed sequences over")
        for snapshot in event.snapshots:
            self._adopt(
                group_scheduler, replace(snapshot, sequence_id=self._new_id()) if event.by_tokens else snapshot, event
            )
        group_scheduler.make_room(event.at_s)
        if event.last:
            for sequence in self._request_table.held.sequences:
                self._give_up(group_scheduler, sequence, event.at_s)
        group_scheduler.scheduler.admit(event.at_s)

    def _adopt(self, group_scheduler: GroupScheduler, snapshot: SequenceSnapshot, event: Adopted) -> None:
        sequence_id, at_s = snapshot.sequence_id, event.at_s
        if sequence_id in self._request_table.live or sequence_id in group_scheduler.scheduler.suspended:
            self.stale_total += 1
            return
        self.adopted_total += 1
        sequence = unpack(snapshot, at_s, self._limits)
        suspended = sequence_id in event.suspended_ids and sequence.computed_tokens > 0
        waits = suspended and sequence_id in event.waiting_ids
        if suspended and sequence.state is SequenceState.ENDED:
            group_scheduler.enter(sequence, at_s, suspended=True, waits=waits)
        elif sequence.state is SequenceState.ENDED or sequence_id in event.lost_ids:
            group_scheduler.batches_in_flight.forget(sequence)
            sequence.computed_tokens = 0
        if sequence.unsent is None:
            return
        if other := self._request_table.orphans.get(sequence.request_id):
            self._request_table.drop_orphan(other, at_s, "the request was handed over twice")
        if sequence.state is SequenceState.ENDED:
            self._request_table.orphans.add(sequence, at_s)
        else:
            self._request_table.enter(sequence, at_s)
            self._request_table.place(sequence, group_scheduler, at_s, suspended=suspended, waits=waits)
        if forsaken := self._request_table.forsaken.get(sequence.request_id):
            self._request_table.forsaken.discard(forsaken)
            self._request_table.drop_orphan(sequence, at_s, "it was ended before it came")
        elif held := self._request_table.held.get(sequence.request_id):
            self._meet(group_scheduler, sequence, held, at_s)

    def _meet(self, group_scheduler: GroupScheduler, orphan: Sequence, held: Sequence, at_s: float) -> None:
        claim = self._request_table.claims[held.sequence_id]
        if why := disagreement(orphan, claim):
            self._request_table.drop_orphan(orphan, at_s, why)
            self._give_up(group_scheduler, held, at_s)
        else:
            self._request_table.move_out(held, at_s, f"is {orphan.name}")
            self._request_table.attach(orphan, claim)

    def withdraw(self, event: OrphanWithdrawn) -> None:
        orphan = next((s for s in self._request_table.orphans.sequences if s.sequence_id == event.sequence_id), None)
        if orphan is None:
            self.stale_total += 1
        else:
            self._request_table.drop_orphan(orphan, event.at_s, "its client has gone")

    def claim(self, event: Submitted) -> bool:
        """Whether the request was an orphan here and is its dispatcher's again."""
        orphan = self._request_table.orphans.get(event.request_id)
        if orphan is None:
            return False
        if why := disagreement(orphan, event):
            self._request_table.drop_orphan(orphan, event.at_s, why)
            return False
        self._request_table.attach(orphan, event)
        return True

    # ---------------------------------------------------------------- requests that come before their sequence

    def may_hold(self, event: Submitted) -> bool:
        return event.expects_handover and len(self._request_table.held) < self._limits.max_held_count

    def hold(self, group_scheduler: GroupScheduler, sequence: Sequence, event: Submitted) -> None:
        """`group_scheduler`: for one of the same request that is held already."""
        if earlier := self._request_table.held.get(sequence.request_id):
            self._give_up(group_scheduler, earlier, event.at_s)
        sequence.move(SequenceState.HELD, event.at_s, "it is to be handed over")
        sequence.may_overfill = True
        self._request_table.hold(sequence, event)

    def expire(self, group_scheduler: GroupScheduler, at_s: float) -> None:
        """Who has been held for too long goes into `group_scheduler`."""
        for sequence in self._request_table.held.pop_due(at_s):
            self._give_up(group_scheduler, sequence, at_s)

    def _give_up(self, group_scheduler: GroupScheduler, sequence: Sequence, at_s: float) -> None:
        """Nobody hands it over: it is an ordinary resumption."""
        self._request_table.unhold(sequence)
        if not group_scheduler.leads:
            self._request_table.move_out(sequence, at_s, "refused")
            self._request_table.turn_away(sequence.key, ANOTHER_LEADS, invalid=False)
            return
        sequence.move(SequenceState.WAITING, at_s, "nobody has handed it over")
        self._request_table.place(sequence, group_scheduler, at_s)
        self._request_table.turned.append(sequence)
        if group_scheduler.scheduler.too_big(sequence):
            self._request_table.end_too_big(sequence, at_s)
        else:
            group_scheduler.scheduler.admit(at_s)


def _target(event: HandOver) -> Callable[[SequenceId], WorkerId | None]:
    to = event.to
    return (lambda _: to) if isinstance(to, str) else to.get


def pack(sequence: Sequence, at_s: float, *, suspended: bool) -> SequenceSnapshot:
    """The sequence as it is at `at_s`. `suspended`: its KV is on its way."""
    stop, unsent = sequence.stop, sequence.unsent
    text = stop.text
    skip_chars, passed_chars = (text.skip_chars, text.passed_chars) if text else (0, 0)
    return SequenceSnapshot(
        sequence_id=sequence.sequence_id,
        request_id=sequence.request_id,
        attempt=sequence.attempt,
        priority=_CLASSES[sequence.rank],
        age_s=at_s - sequence.arrival[0],
        deadline_s=None if sequence.deadline_at_s is None else sequence.deadline_at_s - at_s,
        prompt_token_ids=sequence.prompt_token_ids,
        output_token_ids=tuple(sequence.output_token_ids),
        sampling=sequence.sampling,
        wants_text=sequence.wants_text,
        computed_tokens=sequence.computed_tokens if sequence.on_stages else 0,  # an orphan that has ended has none
        on_stages=sequence.on_stages,
        suspended=suspended,
        gone=unsent is None and sequence.state is SequenceState.ENDED,
        held_text=text.held if text else "",
        skip_chars=skip_chars,
        passed_chars=passed_chars,
        emitted_token_count=unsent.token_count if unsent else len(sequence.output_token_ids),
        emitted_chars=unsent.char_count if unsent else passed_chars + skip_chars,
        unsent_text="".join(unsent.texts) if unsent else "",
        unsent_logprobs=tuple(unsent.logprobs) if unsent else (),
        finish_reason=unsent.finish_reason if unsent else None,
        matched_stop=stop.matched_stop,
        error=unsent.error if unsent else "",
        invalid=unsent is not None and unsent.invalid,
    )


def unpack(snapshot: SequenceSnapshot, at_s: float, limits: WorkerLimits) -> Sequence:
    """An orphan: waiting, or ended if it had ended."""
    submitted = Submitted(
        at_s=at_s - snapshot.age_s,
        key=NOBODY,
        request_id=snapshot.request_id,
        attempt=snapshot.attempt,
        prompt_token_ids=snapshot.prompt_token_ids,
        sampling=snapshot.sampling,
        output_token_ids=snapshot.output_token_ids,
        priority=snapshot.priority,
        deadline_at_s=None if snapshot.deadline_s is None else at_s + snapshot.deadline_s,
        wants_text=snapshot.wants_text,
    )
    text = (snapshot.held_text, snapshot.skip_chars, snapshot.passed_chars)
    sequence = Sequence(snapshot.sequence_id, submitted, stop_rule(submitted, limits, text))
    sequence.computed_tokens = snapshot.computed_tokens
    sequence.on_stages = snapshot.on_stages
    sequence.may_overfill = True
    if snapshot.output_token_ids:
        sequence.first_token_at_s = at_s
    sequence.note(at_s, f"handed over: {sequence.token_count} tokens, {sequence.computed_tokens} with KV")
    if snapshot.gone:
        sequence.move(SequenceState.ENDED, at_s, "had ended, its KV travels")
        return sequence
    unsent = sequence.unsent = Unsent(snapshot.emitted_token_count, snapshot.emitted_chars)
    unsent.add(snapshot.unsent_text)
    unsent.logprobs.extend(snapshot.unsent_logprobs)
    if snapshot.finish_reason is not None:
        sequence.stop.matched_stop = snapshot.matched_stop
        unsent.finish_reason, unsent.error, unsent.invalid = snapshot.finish_reason, snapshot.error, snapshot.invalid
        sequence.move(SequenceState.ENDED, at_s, f"had ended: {snapshot.finish_reason.value}")
    return sequence


def stop_rule(submitted: Submitted, limits: WorkerLimits, text: tuple[str, int, int]) -> StopRule:
    """`text`: what is held back, the characters not to be passed on, and those that have gone through before."""
    sampling = submitted.sampling
    room = limits.max_model_len - len(submitted.prompt_token_ids)
    matcher = None
    if submitted.wants_text or sampling.stop:
        matcher = StopText(sampling.stop, sampling.include_stop_str_in_output, *text)
    return StopRule(sampling, limits.eos_token_ids, min(sampling.max_tokens, room), matcher)


def disagreement(orphan: Sequence, claim: Submitted) -> str:
    """Why `claim` is not for `orphan`, or cannot be answered from what was kept of it; empty if it is and can."""
    unsent = orphan.unsent
    assert unsent is not None
    output, claimed = orphan.output_token_ids, claim.output_token_ids
    if claim.prompt_token_ids != orphan.prompt_token_ids or with_seed(claim.sampling) != orphan.sampling:
        return "the dispatcher submits another request"
    if list(claimed) != output[: len(claimed)]:
        return "the dispatcher has other tokens"
    if claim.wants_text and not orphan.wants_text:
        return "the dispatcher wants text, and none was kept"
    if len(claimed) < unsent.token_count and (claim.wants_text or orphan.sampling.logprobs is not None):
        return f"the dispatcher lacks {unsent.token_count - len(claimed)} tokens that were sent, with their text"
    if claim.wants_text:
        end_chars = unsent.char_count + sum(map(len, unsent.texts))
        if not unsent.char_count <= claim.delivered_text_chars <= end_chars:
            return (
                f"the dispatcher has {claim.delivered_text_chars} characters, those from {unsent.char_count} to"
                f" {end_chars} were kept"
            )
    return ""
