"""Scheduler of one pipeline group, run by its leader: running sequences, batches in flight, and the block tables of the
leader's own stage.

A lone worker leads a group of one. The scheduler knows sequences, but not their clients: the owner of a sequence calls
`enter` for it, sends its tokens when a batch completes, and removes it (`end`, `give_away`).
"""

from collections.abc import Callable, Collection, Container, Iterable
from dataclasses import replace

from ballast.common.errors import InvariantViolation
from ballast.common.ids import WorkerId
from ballast.common.marks import Mark
from services.worker.core.batch import BlockNumber, SequenceId, StepResult
from services.worker.core.blocks import BlockBook, Table, blocks_for
from services.worker.core.counts import SchedulingPolicies
from services.worker.core.events import (
    AdmissionLimited,
    CapacityChanged,
    Execute,
    GroupEvent,
    KvAdmitted,
    KvArrived,
    KvLost,
    KvTravels,
    OfflinePaused,
    PrefillLimited,
    Removed,
    RoleChanged,
    RoomExpected,
    RoomWanted,
    StepPreempted,
)
from services.worker.core.in_flight import InFlightBatch, InFlightBatches, Steps
from services.worker.core.limits import WorkerLimits
from services.worker.core.line import OFFLINE_RANK
from services.worker.core.plan import Victim
from services.worker.core.scheduler import Scheduler
from services.worker.core.scheduler_check import check as check_scheduler
from services.worker.core.sequence import Sequence, SequenceState
from services.worker.policy.departure import Decoding


class GroupScheduler:
    def __init__(
        self,
        limits: WorkerLimits,
        block_count: int,
        outgrown: Callable[[Sequence, float], None],
        *,
        book: BlockBook | None = None,
        steps: Steps | None = None,
        turned: list[Sequence] | None = None,
        policies: SchedulingPolicies | None = None,
        first_number: BlockNumber = 0,
    ) -> None:
        """`block_count`: blocks of the smallest stage. `book`: block tables of this worker's own stage, which outlive
        the group; None: created here for a lone worker. `outgrown(sequence, at_s)` ends a sequence that has outgrown
        the whole cache. `steps` numbers the batches, and `turned` collects preempted and resumed sequences; both are
        shared by a worker's groups. `first_number`: see `GroupCounts`.
        """
        self._limits = limits
        self._keeps_book = book is None
        self._outgrown = outgrown
        self.book = BlockBook(block_count, limits.block_tokens) if book is None else book
        self.scheduler = Scheduler(limits, block_count, policies, first_number=first_number)
        if turned is not None:
            self.scheduler.turned = turned
        prefixes = self.scheduler.prefixes
        self.batches_in_flight = InFlightBatches(self.book, Steps() if steps is None else steps, prefixes)
        self.leads = True
        self.stopped = False  # True: forms no more batches
        self.stale_total = 0

    # ---------------------------------------------------------------- queries

    @property
    def has_work(self) -> bool:
        """True if a batch may be requested. While other batches are in flight, `form` may still return None."""
        scheduler, batches_in_flight = self.scheduler, self.batches_in_flight
        count, completed_step_id = len(batches_in_flight), batches_in_flight.completed_step_id
        if self.stopped or count >= scheduler.max_in_flight_count:
            return False
        if count and scheduler.stage_count == 1:
            return not batches_in_flight.may_be_preempted and scheduler.has_ready_ahead(completed_step_id)
        return scheduler.has_ready(completed_step_id)

    @property
    def goes_ahead(self) -> bool:
        """True if the next batch may be formed while a launched one has not completed."""
        return self._limits.async_scheduling

    @property
    def is_busy(self) -> bool:
        """True if a batch is in flight or one could be formed."""
        batches_in_flight = self.batches_in_flight
        return bool(batches_in_flight) or self.scheduler.has_ready(batches_in_flight.completed_step_id)

    @property
    def is_occupied(self) -> bool:
        """True if KV is being transferred or a batch is in flight. Sequences in other states do not count, because
        their owner tracks them.
        """
        return bool(self.scheduler.suspended or self.batches_in_flight)

    @property
    def in_flight_count(self) -> int:
        return len(self.batches_in_flight)

    @property
    def completed_step_id(self) -> int:
        """Step id of the last completed batch."""
        return self.batches_in_flight.completed_step_id

    @property
    def settled(self) -> bool:
        """True if all reservations are within the capacity and all releases have been sent to the stages."""
        return self.scheduler.settled and not self.batches_in_flight.needs_release_batch

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences of the group, including ended ones whose KV is still being transferred."""
        scheduler = self.scheduler
        return [*scheduler.running, *scheduler.waiting, *scheduler.suspended.values(), *scheduler.swap.sequences]

    @property
    def sequence_ids(self) -> tuple[SequenceId, ...]:
        """Ids of all live sequences of the group."""
        return tuple(s.sequence_id for s in self.sequences if s.state is not SequenceState.ENDED)

    @property
    def suspended_ids(self) -> tuple[SequenceId, ...]:
        """Ids of the sequences whose KV is being transferred; some may have ended."""
        return tuple(i for i in self.scheduler.suspended if i not in self.scheduler.suspended.arrived)

    @property
    def _with_kv(self) -> list[Sequence]:
        """Sequences whose KV is on the stages, or being transferred to them."""
        scheduler = self.scheduler
        return [s for s in (*scheduler.running, *scheduler.suspended.values()) if s.computed_tokens]

    @property
    def kv_tokens(self) -> dict[SequenceId, int]:
        """Number of tokens with KV on the stages, per sequence. This KV is transferred when layers move."""
        return {s.sequence_id: s.computed_tokens for s in self._with_kv}

    def shared_blocks(self, sequences: Iterable[Sequence]) -> dict[SequenceId, Table]:
        """For each of `sequences`, its leading blocks on this stage that other sequences share."""
        return self.book.shared({s.sequence_id: s.computed_tokens for s in sequences if s.computed_tokens})

    def victims(self, sequences: Iterable[Sequence], me: WorkerId) -> tuple[Victim, ...]:
        """Return the given sequences that have KV, as victims of a group change, sorted by id. `me`: their leader."""
        shared, counts = self.shared_blocks(sequences), {s.sequence_id: s.computed_tokens for s in sequences}
        return tuple(Victim(i, counts[i], me, blocks) for i, blocks in sorted(shared.items()))

    def own_victims(self, me: WorkerId) -> tuple[Victim, ...]:
        return self.victims(self._with_kv, me)

    def with_donors(self, admitted: Iterable[Victim]) -> tuple[Victim, ...]:
        """The victims of a roster, each with its donor, a sequence with which it shares blocks on all stages."""
        coming, waiting = [victim.sequence_id for victim in admitted], self.scheduler.suspended.without_blocks
        donors = self.scheduler.prefixes.donors(coming, waiting)
        return tuple(
            replace(victim, donor=donor, donated_count=count)
            for victim in admitted
            for donor, count in [donors.get(victim.sequence_id, (SequenceId(0), 0))]
        )

    def weights(self) -> dict[SequenceId, tuple[int, float, int]]:
        """Class rank, arrival time (s) and needed blocks of each sequence with KV."""
        size = self._limits.block_tokens
        return {
            s.sequence_id: (s.rank, s.arrival[0], max(s.reserved_block_count, blocks_for(s.token_count, size)))
            for s in self._with_kv
        }

    def decoding(self) -> tuple[Decoding, ...]:
        """Sequences past their prompts that could be migrated."""
        return tuple(
            Decoding(s.sequence_id, s.rank, s.token_count, s.reserved_block_count)
            for s in self.scheduler.running
            if s.token_count - s.computed_tokens == 1 and s.output_token_ids
        )

    def why_no_room(self, block_count: int, *, new: bool) -> str:
        """Why `block_count` more blocks cannot be reserved for a sequence of another leader that is new (`new`) or
        already arriving; empty if they can.
        """
        if not self.leads:
            return "another worker leads its group, or it is parked"
        # Blocks that are free on every stage.
        free_count = min(self.book.block_count, self.scheduler.block_count) - self.book.used_count
        offline = self.scheduler.offline
        if offline:  # their blocks become free once they are preempted
            free_count = min(free_count, self.scheduler.free_block_count)
        # Sequences that have ended, or are preempted when their batch completes, hold their blocks until then.
        if block_count > free_count and (self.batches_in_flight.needs_release_batch or offline):
            return f"{free_count} blocks are free before the next batch, but {block_count} are needed"
        return self.scheduler.why_no_room(block_count, new=new)

    @property
    def reserved_block_count(self) -> int:
        """Blocks reserved by sequences that have room on every stage."""
        return self.scheduler.reserved_block_count

    @property
    def free_block_count(self) -> int:
        return self.scheduler.free_block_count

    @property
    def longest_token_count(self) -> int:
        """Tokens of the longest online sequence."""
        return max((s.token_count for s in self.sequences if s.rank != OFFLINE_RANK), default=0)

    @property
    def memory_is_awaited(self) -> bool:
        """True if requests wait for admission. Some may wait for a place in a batch, not for memory."""
        return self.scheduler.line.count > 0

    # ---------------------------------------------------------------- steps

    def demand_place(self) -> None:
        """Raise InvariantViolation if no further batch may be in flight."""
        if len(self.batches_in_flight) >= self.scheduler.max_in_flight_count:
            self.batches_in_flight.require_none("a batch is requested")

    def form(self, at_s: float) -> Execute | Removed | None:
        batches_in_flight, scheduler = self.batches_in_flight, self.scheduler
        for sequence in scheduler.stranded():
            self._outgrown(sequence, at_s)
        plan = scheduler.plan(at_s, batches_in_flight.completed_step_id, len(batches_in_flight))
        for sequence in plan.preempted:
            batches_in_flight.forget(sequence)
        for sequence in plan.swaps.left:
            batches_in_flight.forget(sequence)
        for sequence in (*plan.begun, *plan.swaps.back):  # some were preempted by this plan
            sequence.on_stages = True
        if plan.decodes or plan.chunks:
            return batches_in_flight.dispatch(plan)
        if plan.swaps.copies or scheduler.prefixes.needs_release_batch:
            return batches_in_flight.release_batch(plan.swaps.copies)
        return None

    def release_batch(self) -> Removed | None:
        """Form a batch without slices if the stages must release blocks or begin tables."""
        self.scheduler.fit_prefixes()
        return self.batches_in_flight.release_batch() if self.batches_in_flight.needs_release_batch else None

    def admit(self, at_s: float) -> None:
        """Admit waiting sequences while there is room."""
        for sequence in self.scheduler.admit(at_s, self.completed_step_id):
            self.batches_in_flight.forget(sequence)

    def admit_new(self, sequence: Sequence, at_s: float) -> None:
        """Admit waiting sequences after a new one has entered the queue. A new offline one changes nothing while online
        ones wait.
        """
        scheduler = self.scheduler
        if sequence.rank != OFFLINE_RANK or not (scheduler.line.count or len(scheduler.swap.away)):
            self.admit(at_s)

    def complete(self, result: StepResult, text_count: int) -> InFlightBatch:
        """Complete the oldest batch in flight and return it. The caller calls `shed` after sending its tokens."""
        in_flight_batch = self.batches_in_flight.complete(result.step_id)
        in_flight_batch.check_result(result, text_count)
        self.scheduler.swap.measured(result.execute_s, in_flight_batch.swaps.block_count, result.copy_s)
        self.scheduler.swap.landed(in_flight_batch.swaps, good=True)
        return in_flight_batch

    def step_preempted(self, event: StepPreempted) -> None:
        """Undo the oldest batch in flight, of offline sequences, which was preempted within its step."""
        lost_tokens, in_flight_batch = 0, self.batches_in_flight.complete(event.step_id)
        self.scheduler.swap.landed(in_flight_batch.swaps, good=True)
        for sequence, end, _ in in_flight_batch.shares:
            if sequence.state is not SequenceState.ENDED:
                lost_tokens += end - sequence.computed_tokens
                sequence.dispatched_tokens = sequence.computed_tokens
                if not sequence.computed_tokens:  # a sequence without KV holds no blocks on the stages
                    self.batches_in_flight.forget(sequence)
        self.scheduler.offline_work.note_preempted(lost_tokens)
        self.shed(event.at_s)

    def give_up_retained(self) -> None:
        """Evict retained blocks that no longer fit after reservations grew without a batch. Only for a lone
        worker, where no other stage must be notified.
        """
        self.scheduler.fit_prefixes()
        _, forgotten, _ = self.scheduler.prefixes.drain_changes()
        self.book.forget(forgotten)

    def take_marks(self) -> list[Mark]:
        """Prefix marks of prompts computed or reused here since the last call."""
        prefixes = self.scheduler.prefixes
        marks, prefixes.new_marks = prefixes.new_marks, []
        return marks

    def name_computed(self, in_flight_batch: InFlightBatch) -> None:
        """Number the full prompt blocks of a batch that has run on all stages, so that they can be shared."""
        for sequence in in_flight_batch.chunked:
            if sequence.state is SequenceState.RUNNING:
                self.scheduler.prefixes.name(sequence)

    def shed(self, at_s: float) -> None:
        """Preempt until reservations fit a reduced capacity. Sequences in flight are preempted when their batch
        completes.
        """
        if not self.scheduler.settled or self.scheduler.offline_work.paused:
            for sequence in self.scheduler.shed(at_s, self.batches_in_flight.completed_step_id):
                self.batches_in_flight.forget(sequence)

    # ---------------------------------------------------------------- entering and leaving

    def enter(
        self,
        sequence: Sequence,
        at_s: float,
        *,
        travels: bool = False,
        waits: bool = False,
        shared: Collection[BlockNumber] = (),
    ) -> None:
        """Add a sequence to the waiting queue, or, if it has KV, to the suspended ones. `travels`: its KV is being
        transferred; `waits`: its KV waits for room; `shared`: numbers of its shared first blocks.
        """
        if sequence.computed_tokens:
            self.scheduler.suspended.add(sequence, at_s, travels=travels, waits=waits)
            self.scheduler.share(sequence, shared)
        else:
            self.scheduler.line.add(sequence)

    def bind(self, kept: Sequence, request: Sequence, at_s: float) -> None:
        """Attach a request to its KV, which the sequence `kept` represents. The caller calls `make_room` afterwards."""
        if request.output_token_ids:
            request.first_token_at_s = at_s
        self.scheduler.bind(kept, request, at_s)

    def forget_kv(self, kept: Sequence, at_s: float, why: str) -> None:
        """Free KV whose request has not arrived."""
        if kept.sequence_id in self.scheduler.suspended.arrived:
            self.scheduler.suspended.forget_kv(kept, at_s, why)
            self.batches_in_flight.forget(kept)

    def make_room(self, at_s: float) -> None:
        """Make room for adopted sequences: end those larger than the cache, and preempt until the others fit."""
        self._end_outgrown(at_s)
        self.shed(at_s)

    def end(self, sequence: Sequence) -> None:
        """Remove an ended sequence; the caller changes its state afterwards. Its blocks are free for the next batch
        even while the sequence is in flight (see `core.blocks`). If KV is being written into them, the sequence stays
        until the write has ended.
        """
        target = self.scheduler.target
        if target is not None and sequence.state is SequenceState.RUNNING and sequence.output_token_ids:
            target.ended(len(sequence.prompt_token_ids), len(sequence.output_token_ids))
        if sequence.state is not SequenceState.SUSPENDED or sequence.sequence_id in self.scheduler.suspended.arrived:
            self.scheduler.release(sequence)
            self.batches_in_flight.forget(sequence)

    def give_away(self, sequence: Sequence) -> None:
        """Remove a sequence that another leader or group has taken over. The caller changes its state afterwards."""
        self.scheduler.release(sequence, kept=False)

    def hand_over(self, at_s: float, who: Container[SequenceId] | None) -> None:
        """Prepare to hand over the sequences in `who` (None: all) by dropping their KV in host memory."""
        if who is None:
            self.batches_in_flight.require_none("all sequences are to be handed over")
            self._forget_prefixes()
        self._forget_swapped(at_s, who)

    def lose_batches(self, at_s: float, *, for_good: bool) -> tuple[int, ...]:
        """Drop the batches in flight and return their step ids; with `for_good`, also drop pending messages to the
        stages.
        """
        lost = self.batches_in_flight.lose()
        if for_good:
            self.batches_in_flight.abandon()
            for sequence in self.scheduler.running:
                sequence.on_stages = sequence.in_engine = False
        self.shed(at_s)
        return lost

    def may_leave(self, *, running: bool) -> list[Sequence]:
        """Waiting sequences, and with `running` also running ones that are in no batch in flight."""
        found = self.scheduler.waiting
        if running:
            found += [s for s in self.scheduler.running if not self.batches_in_flight.in_flight(s)]
        return found

    def need(self, sequence: Sequence) -> int:
        """Number of blocks that the sequence holds or would need, whichever is larger."""
        return max(sequence.reserved_block_count, self.scheduler.need(sequence))

    def give_up(self, sequence: Sequence, at_s: float, why: str) -> None:
        """Preempt a sequence that will be recomputed elsewhere. Until then it waits here without KV."""
        if sequence.state is SequenceState.RUNNING:
            if self.batches_in_flight.in_flight(sequence):
                raise InvariantViolation(f"{sequence.name} is given up while it is in flight", sequence.story())
            self.scheduler.start_over(sequence, at_s, why)
            self.batches_in_flight.forget(sequence)

    def abandon(self) -> None:
        """Drop pending messages to the stages, because the group is lost and all its sequences have ended."""
        self.scheduler.admission_limit = None
        self._forget_prefixes()
        for sequence in list(self.scheduler.suspended.values()):
            self.scheduler.suspended.let_go(sequence)
        self.scheduler.offline_work.paused = False
        self.batches_in_flight.abandon()

    # ---------------------------------------------------------------- capacity and role

    def handle(self, event: GroupEvent) -> None:
        match event:
            case RoleChanged():
                self._change_role(event)
            case CapacityChanged():
                self._resize(event)
            case AdmissionLimited():
                self.scheduler.admission_limit = event.block_count
            case PrefillLimited():
                self.scheduler.former.limit_prefill(event.token_count, always=event.always, count=event.batch_count)
            case RoomWanted():
                self._make_way(event)
            case OfflinePaused():
                self.scheduler.offline_work.paused = event.paused
                self.shed(event.at_s)
            case RoomExpected():
                self.scheduler.expected_block_count = event.block_count
                self.scheduler.expected_count = event.running_count
            case KvTravels():
                self._suspend(event)
            case KvAdmitted():
                self._admit_kv(event)
            case KvArrived():
                self._kv_arrived(event)
            case KvLost():
                self._kv_lost(event)

    def _make_way(self, event: RoomWanted) -> None:
        """Preempt offline sequences that are in no batch, and release retained blocks."""
        scheduler = self.scheduler
        # The blocks will receive KV outside of any batch, so no copy may still read or write them.
        still = not (self.batches_in_flight or scheduler.swap.used_block_count)
        if still and not scheduler.why_no_room(event.block_count, new=False):
            for sequence in scheduler.preempt_offline(event.at_s, self.completed_step_id, event.block_count):
                self.batches_in_flight.forget(sequence)
        scheduler.fit_prefixes(event.block_count)

    def _change_role(self, event: RoleChanged) -> None:
        scheduler = self.scheduler
        self.batches_in_flight.require_none("the role is changed")
        if event.stage_count < 1:
            raise InvariantViolation(f"a group of {event.stage_count} stages")
        busy_count = scheduler.running_count + len(scheduler.waiting)
        if not event.leads and busy_count:
            raise InvariantViolation(f"a follower has {busy_count} sequences that were not handed over")
        self._forget_swapped(event.at_s)
        self._forget_prefixes()
        self.leads = event.leads
        if not event.leads:
            scheduler.resize(scheduler.block_count, 0)
        scheduler.stage_count = event.stage_count
        scheduler.swap.limit(0 if event.stage_count > 1 else self._limits.swap_block_count)
        scheduler.former.limit_prefill(None)
        for sequence in self.sequences:
            sequence.enter_engine()  # the stages of the new group do not know it yet
        self.shed(event.at_s)

    def _resize(self, event: CapacityChanged) -> None:
        fits = event.swap_block_count is None or self.scheduler.swap.limit(event.swap_block_count)
        if event.block_count < self.scheduler.block_count or not fits:
            self._forget_swapped(event.at_s)
        self.scheduler.resize(event.block_count, event.lent_block_count, event.before_block_count)
        self.make_room(event.at_s)

    def dissolve(self, at_s: float) -> None:
        """Release retained blocks, and host memory, which belongs to another group from now on."""
        if not self.scheduler.swap.limit(0):
            self._forget_swapped(at_s)
        self.scheduler.prefixes.close()

    def _forget_prefixes(self) -> None:
        """Drop all prefix numbers. Each member drops its own independently when the group changes."""
        self.scheduler.forget_prefixes()
        self.book.forget_numbers()

    def _forget_swapped(self, at_s: float, who: Container[SequenceId] | None = None) -> None:
        for sequence in self.scheduler.forget_swapped(at_s, "its KV is of no use to the new group", who):
            self.batches_in_flight.forget(sequence)

    def _end_outgrown(self, at_s: float) -> None:
        scheduler = self.scheduler
        for sequence in [s for s in (*scheduler.running, *scheduler.waiting) if scheduler.too_big(s)]:
            self._outgrown(sequence, at_s)

    # ---------------------------------------------------------------- KV transfers

    def _suspend(self, event: KvTravels) -> None:
        self.batches_in_flight.require_none("KV is to be transferred")
        scheduler = self.scheduler
        for sequence in [
            s for s in (*scheduler.running, *scheduler.suspended.kept) if s.sequence_id in event.sequence_ids
        ]:
            if sequence.computed_tokens:
                scheduler.suspend(sequence, event.at_s, waits=sequence.sequence_id in event.waiting_ids)
                scheduler.share(sequence, event.shared.get(sequence.sequence_id, ()))

    def _admit_kv(self, event: KvAdmitted) -> None:
        for sequence_id in sorted(event.sequence_ids):
            sequence = self.scheduler.suspended.get(sequence_id)
            if sequence is None:
                self.stale_total += 1
            else:
                self.scheduler.share(sequence, event.shared.get(sequence_id, ()))
                self.scheduler.suspended.take_blocks(sequence, event.at_s)

    def _kv_arrived(self, event: KvArrived) -> None:
        sequence = self.scheduler.suspended.get(event.sequence_id)
        if sequence is None:
            self.stale_total += 1
        elif sequence.state is SequenceState.ENDED:
            self._let_go(sequence)
        else:
            self.scheduler.resume(sequence, event.at_s)
            self.make_room(event.at_s)

    def _kv_lost(self, event: KvLost) -> None:
        running = (s for s in self.scheduler.running if s.sequence_id == event.sequence_id)
        sequence = self.scheduler.suspended.get(event.sequence_id) or next(running, None)
        if sequence is None:
            self.stale_total += 1
        elif sequence.state is SequenceState.ENDED:
            self._let_go(sequence)
        else:
            if self.batches_in_flight.in_flight(sequence):
                raise InvariantViolation(f"{sequence.name} loses its KV while it is in flight", sequence.story())
            self.scheduler.lose(sequence, event.at_s)
            self.batches_in_flight.forget(sequence)
            self._end_outgrown(event.at_s)

    def _let_go(self, sequence: Sequence) -> None:
        self.scheduler.suspended.let_go(sequence)
        self.batches_in_flight.forget(sequence)

    # ---------------------------------------------------------------- inspector

    def check(self) -> None:
        """Raise InvariantViolation unless counts, tables and batches agree."""
        scheduler = self.scheduler
        check_scheduler(scheduler, self.batches_in_flight.completed_step_id)
        self.book.check()
        self.batches_in_flight.check()
        holding = (*scheduler.running, *scheduler.swap.holders, *scheduler.suspended.values())
        reserved = {s.sequence_id: s.reserved_block_count for s in holding}
        scheduler.prefixes.check(self.book.numbers if self.leads else None, reserved)
        holders = {s.sequence_id: s for s in (*scheduler.running, *scheduler.suspended.values())}
        returning = scheduler.swap.sequences  # also includes swapped-out sequences whose blocks the next batch frees
        if self._keeps_book:
            self._check_holders({*holders, *(s.sequence_id for s in returning), *self.batches_in_flight.to_remove})
        for sequence_id, sequence in holders.items():
            if sequence_id not in scheduler.suspended.without_blocks:
                self._check_tables(sequence)

    def _check_holders(self, may_hold: set[SequenceId]) -> None:
        for sequence_id in self.book.sequence_ids:
            if sequence_id not in may_hold:
                raise InvariantViolation(f"sequence {sequence_id} holds blocks and does not run")

    def _check_tables(self, sequence: Sequence) -> None:
        table_count = len(self.book.table(sequence.sequence_id))
        if table_count > sequence.reserved_block_count:
            raise InvariantViolation(f"{sequence.name} holds {table_count} blocks", sequence.story())
        if blocks_for(sequence.computed_tokens, self._limits.block_tokens) > table_count:
            raise InvariantViolation(f"{sequence.name} has KV in no block", sequence.story())
