"""What changes when the group does: capacity, KV on its way, sequences that come from other leaders and go to them."""

from collections.abc import Callable, Container

from ballast.common.errors import InvariantViolation
from ballast.common.ids import WorkerId
from services.worker.core.batch import SequenceId
from services.worker.core.events import (
    AdmissionLimited,
    Adopted,
    CapacityChanged,
    HandedOver,
    HandOver,
    KvAdmitted,
    KvArrived,
    KvLost,
    KvTravels,
    MicrobatchesJoined,
    OrphanWithdrawn,
    PrefillLimited,
    RoleChanged,
    RoomExpected,
    Submitted,
)
from services.worker.core.flights import Flights
from services.worker.core.handover import disagreement, pack, unpack
from services.worker.core.limits import WorkerLimits
from services.worker.core.residents import Residents
from services.worker.core.scheduler import Scheduler
from services.worker.core.sequence import Sequence, SequenceState
from services.worker.core.snapshot import SequenceSnapshot
from services.worker.policy.placement import PlacementView

_WITHOUT_KV = (SequenceState.WAITING, SequenceState.HELD, SequenceState.SWAPPED)  # on the stages
ANOTHER_LEADS = "another worker leads this group"


class Group:
    """A worker's place in its group. A lone worker leads a group of one."""

    def __init__(self, limits: WorkerLimits, residents: Residents, scheduler: Scheduler, flights: Flights) -> None:
        self._limits = limits
        self._residents = residents
        self._scheduler = scheduler
        self._flights = flights
        self.leads = True
        self.stale_total = 0
        self.adopted_total = 0
        self.moved_total = 0

    def handle(
        self,
        event: RoleChanged
        | CapacityChanged
        | AdmissionLimited
        | PrefillLimited
        | MicrobatchesJoined
        | KvTravels
        | KvAdmitted
        | KvArrived
        | KvLost
        | Adopted
        | RoomExpected
        | OrphanWithdrawn,
    ) -> None:
        match event:
            case RoleChanged():
                self._change_role(event)
            case CapacityChanged():
                self._resize(event)
            case AdmissionLimited():
                self._scheduler.admission_limit = event.block_count
            case PrefillLimited():
                self._scheduler.limit_prefill(event.token_count)
            case MicrobatchesJoined():
                self._scheduler.joined = True
            case KvTravels():
                self._suspend(event)
            case KvAdmitted():
                self._admit_kv(event)
            case KvArrived():
                self._kv_arrived(event)
            case KvLost():
                self._kv_lost(event)
            case Adopted():
                self._adopt_all(event)
            case RoomExpected():
                self._scheduler.expected_block_count = event.block_count
                self._scheduler.expected_count = event.running_count
            case OrphanWithdrawn():
                self._drop(event)

    def _change_role(self, event: RoleChanged) -> None:
        self._flights.demand_none("the role is changed")
        if event.stage_count < 1:
            raise InvariantViolation(f"a group of {event.stage_count} stages")
        busy_count = self._scheduler.running_count + self._scheduler.waiting_count
        if not event.leads and busy_count:
            raise InvariantViolation(f"a follower has {busy_count} sequences that were not handed over")
        self._forget_swapped(event.at_s)
        self.leads = event.leads
        if not event.leads:
            self._scheduler.resize(self._scheduler.block_count, 0)
        self._scheduler.stage_count = event.stage_count
        self._scheduler.limit_prefill(None)
        self._scheduler.joined = False
        for sequence in self._residents.live.values():
            sequence.in_engine = False  # the stages of the new group have yet to hear of it
        self.shed(event.at_s)

    # ---------------------------------------------------------------- capacity

    def _resize(self, event: CapacityChanged) -> None:
        if event.block_count < self._scheduler.block_count:
            self._forget_swapped(event.at_s)
        self._scheduler.resize(event.block_count, event.lent_block_count, event.before_block_count)
        self._end_too_big(event.at_s)
        self.shed(event.at_s)

    def _forget_swapped(self, at_s: float, who: Container[SequenceId] | None = None) -> None:
        for sequence in self._scheduler.forget_swapped(at_s, "its KV is of no use to the new group", who):
            self._flights.forget(sequence)

    def shed(self, at_s: float) -> None:
        """What there is has become less: preempt what is too much, as far as it is not in flight."""
        if not self._scheduler.settled:
            for sequence in self._scheduler.shed(at_s, self._flights.landed_step_id):
                self._flights.forget(sequence)

    def _end_too_big(self, at_s: float) -> None:
        scheduler = self._scheduler
        for sequence in [s for s in (*scheduler.running, *scheduler.waiting) if scheduler.too_big(s)]:
            self._residents.end_too_big(sequence, at_s)

    # ---------------------------------------------------------------- KV on its way

    def _suspend(self, event: KvTravels) -> None:
        self._flights.demand_none("KV begins to travel")
        for sequence in [s for s in self._scheduler.running if s.sequence_id in event.sequence_ids]:
            if sequence.computed_tokens:
                self._scheduler.suspend(sequence, event.at_s, waits=sequence.sequence_id in event.waiting_ids)

    def _admit_kv(self, event: KvAdmitted) -> None:
        for sequence_id in sorted(event.sequence_ids):
            sequence = self._scheduler.suspended.get(sequence_id)
            if sequence is None:
                self.stale_total += 1
            else:
                self._scheduler.take_blocks(sequence, event.at_s)

    def _kv_arrived(self, event: KvArrived) -> None:
        sequence = self._scheduler.suspended.get(event.sequence_id)
        if sequence is None:
            self.stale_total += 1
        elif sequence.state is SequenceState.ENDED:
            self._let_go(sequence)
        else:
            self._scheduler.resume(sequence, event.at_s)
            self._end_too_big(event.at_s)
            self.shed(event.at_s)

    def _kv_lost(self, event: KvLost) -> None:
        sequence = self._scheduler.suspended.get(event.sequence_id) or self._residents.live.get(event.sequence_id)
        if sequence is None or sequence.state in _WITHOUT_KV:
            self.stale_total += 1
        elif sequence.state is SequenceState.ENDED:
            self._let_go(sequence)
        else:
            if self._flights.in_flight(sequence):
                raise InvariantViolation(f"{sequence.name} loses its KV while it is in flight", sequence.story())
            self._scheduler.lose(sequence, event.at_s)
            self._flights.forget(sequence)
            self._end_too_big(event.at_s)

    def _let_go(self, sequence: Sequence) -> None:
        self._scheduler.let_go(sequence)
        self._flights.forget(sequence)

    # ---------------------------------------------------------------- going

    def placements(self) -> tuple[PlacementView, ...]:
        scheduler = self._scheduler
        running = (*scheduler.running, *scheduler.suspended.values())
        return (
            *(PlacementView(s.sequence_id, s.reserved_block_count, True) for s in running),
            *(PlacementView(s.sequence_id, scheduler.need(s), False) for s in scheduler.waiting),
        )

    def hand_over(self, event: HandOver) -> HandedOver:
        self._flights.demand_none("sequences are handed over")
        self._forget_swapped(event.at_s, None if isinstance(event.to, str) else event.to)
        target = _target(event)
        packed: dict[WorkerId, list[SequenceSnapshot]] = {}
        for sequence in self._all():
            to = target(sequence.sequence_id)
            if to is None:
                continue
            suspended = sequence.sequence_id in self._scheduler.suspended
            packed.setdefault(to, []).append(pack(sequence, event.at_s, suspended=suspended))
            self._move_out(sequence, to, event.at_s)
            if event.frees:
                self._flights.forget(sequence)
        if isinstance(event.to, str):
            for sequence in self._residents.held.sequences:
                self._move_out(sequence, event.to, event.at_s)
        return HandedOver(tuple((to, tuple(snapshots)) for to, snapshots in sorted(packed.items())))

    def _all(self) -> list[Sequence]:
        """Whatever there is to hand over: also what has ended and either holds blocks or has not been told."""
        found = {s.sequence_id: s for s in self._residents.live.values() if s.state is not SequenceState.HELD}
        found.update(self._scheduler.suspended)
        found.update((s.sequence_id, s) for s in self._residents.orphans.sequences)
        return [found[sequence_id] for sequence_id in sorted(found)]

    def _move_out(self, sequence: Sequence, to: WorkerId, at_s: float) -> None:
        if sequence.state is not SequenceState.ENDED and sequence.unsent is None:
            self._residents.outbox.moved(sequence.key, to)
            self._residents.remember_moved(sequence)
        self._residents.move_out(sequence, at_s, f"moved to {to}")
        self.moved_total += 1

    # ---------------------------------------------------------------- coming

    def _adopt_all(self, event: Adopted) -> None:
        self._flights.demand_none("sequences are adopted")
        if not self.leads:
            raise InvariantViolation("a follower is handed sequences over")
        for snapshot in event.snapshots:
            self._adopt(snapshot, event)
        self._end_too_big(event.at_s)
        self.shed(event.at_s)
        if event.last:
            for sequence in self._residents.held.sequences:
                self._give_up(sequence, event.at_s)
        self._scheduler.admit(event.at_s)

    def _adopt(self, snapshot: SequenceSnapshot, event: Adopted) -> None:
        sequence_id, at_s = snapshot.sequence_id, event.at_s
        if sequence_id in self._residents.live or sequence_id in self._scheduler.suspended:
            self.stale_total += 1
            return
        self.adopted_total += 1
        sequence = unpack(snapshot, at_s, self._limits)
        suspended = sequence_id in event.suspended_ids and sequence.computed_tokens > 0
        waits = suspended and sequence_id in event.waiting_ids
        if suspended and sequence.state is SequenceState.ENDED:
            self._scheduler.adopt(sequence, at_s, suspended=True, waits=waits)
        elif sequence.state is SequenceState.ENDED or sequence_id in event.lost_ids:
            self._flights.forget(sequence)
            sequence.computed_tokens = 0
        if sequence.unsent is None:
            return
        if other := self._residents.orphans.get(sequence.request_id):
            self._residents.drop_orphan(other, at_s, "the request was handed over twice")
        if sequence.state is SequenceState.ENDED:
            self._residents.orphans.add(sequence, at_s)
        else:
            self._residents.enter(sequence, at_s)
            if sequence.computed_tokens:
                self._scheduler.adopt(sequence, at_s, suspended=suspended, waits=waits)
            else:
                self._scheduler.enqueue(sequence)
        if forsaken := self._residents.forsaken.get(sequence.request_id):
            self._residents.forsaken.discard(forsaken)
            self._residents.drop_orphan(sequence, at_s, "it was ended before it came")
        elif held := self._residents.held.get(sequence.request_id):
            self._meet(sequence, held, at_s)

    def _meet(self, orphan: Sequence, held: Sequence, at_s: float) -> None:
        claim = self._residents.claims[held.sequence_id]
        if why := disagreement(orphan, claim):
            self._residents.drop_orphan(orphan, at_s, why)
            self._give_up(held, at_s)
        else:
            self._residents.move_out(held, at_s, f"is {orphan.name}")
            self._residents.attach(orphan, claim)

    def _drop(self, event: OrphanWithdrawn) -> None:
        orphan = next((s for s in self._residents.orphans.sequences if s.sequence_id == event.sequence_id), None)
        if orphan is None:
            self.stale_total += 1
        else:
            self._residents.drop_orphan(orphan, event.at_s, "its client has gone")

    def claim(self, event: Submitted) -> bool:
        """Whether the request was an orphan here and is its dispatcher's again."""
        orphan = self._residents.orphans.get(event.request_id)
        if orphan is None:
            return False
        if why := disagreement(orphan, event):
            self._residents.drop_orphan(orphan, event.at_s, why)
            return False
        self._residents.attach(orphan, event)
        return True

    # ---------------------------------------------------------------- requests that come before their sequence

    def may_hold(self, event: Submitted) -> bool:
        return event.expects_handover and len(self._residents.held) < self._limits.max_held_count

    def hold(self, sequence: Sequence, event: Submitted) -> None:
        if earlier := self._residents.held.get(sequence.request_id):
            self._give_up(earlier, event.at_s)
        sequence.move(SequenceState.HELD, event.at_s, "it is to be handed over")
        sequence.may_overfill = True
        self._residents.hold(sequence, event)

    def expire(self, at_s: float) -> None:
        for sequence in self._residents.held.pop_due(at_s):
            self._give_up(sequence, at_s)

    def _give_up(self, sequence: Sequence, at_s: float) -> None:
        """Nobody hands it over: it is an ordinary resumption."""
        self._residents.unhold(sequence)
        if not self.leads:
            self._residents.move_out(sequence, at_s, "refused")
            self._residents.turn_away(sequence.key, ANOTHER_LEADS, invalid=False)
            return
        sequence.move(SequenceState.WAITING, at_s, "nobody has handed it over")
        self._scheduler.enqueue(sequence)
        if self._scheduler.too_big(sequence):
            self._residents.end_too_big(sequence, at_s)
        else:
            self._scheduler.admit(at_s)


def _target(event: HandOver) -> Callable[[SequenceId], WorkerId | None]:
    to = event.to
    return (lambda _: to) if isinstance(to, str) else to.get
