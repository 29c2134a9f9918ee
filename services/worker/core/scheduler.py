"""Decides by counts which sequences run: waiting line, KV reservations, preemption.

It knows how many blocks there are (in a pipeline the minimum over the stages) and how many each running sequence has
reserved, and no block id: every stage keeps its own tables (`core.blocks.BlockBook`) and can cover whatever the counts
allow.

Order of service is (class, arrival). A running sequence is not preempted for a waiting one, whatever their classes;
classes decide who is admitted first and who gives way when the cache is full.
"""

import bisect
from collections import OrderedDict
from dataclasses import dataclass

from ballast.common.errors import InvariantViolation
from ballast.common.sampling import PriorityClass
from services.worker.core.batch import SequenceId
from services.worker.core.blocks import blocks_for
from services.worker.core.limits import WorkerLimits
from services.worker.core.sequence import Sequence, SequenceState
from services.worker.policy.admission import AdmissionView, admits
from services.worker.policy.batching import PrefillView, chunk_prefills
from services.worker.policy.preemption import VictimView, choose_victim


@dataclass(frozen=True, slots=True)
class Plan:
    """What the next step computes."""

    decodes: list[Sequence]  # one token each
    chunks: list[tuple[Sequence, int]]  # with the number of tokens, at least 1
    preempted: list[Sequence]  # they wait again


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank, sequence.arrival


class Scheduler:
    def __init__(self, limits: WorkerLimits, block_count: int) -> None:
        self._limits = limits
        self._block_tokens = limits.block_tokens
        self.block_count = block_count
        self.reserved_block_count = 0
        self.running: list[Sequence] = []  # in order of service
        self._waiting: tuple[OrderedDict[SequenceId, Sequence], ...] = tuple(OrderedDict() for _ in PriorityClass)
        self.waiting_count = 0
        self.waiting_tokens = 0
        self.waiting_block_count = 0
        self.preemptions_total = 0

    @property
    def free_block_count(self) -> int:
        return self.block_count - self.reserved_block_count

    def grow(self, added_block_count: int) -> None:
        """More blocks. What waits may need a block more than counted before, so its needs are counted anew."""
        self.block_count += added_block_count
        self.waiting_block_count = sum(self._need(s) for line in self._waiting for s in line.values())

    # ---------------------------------------------------------------- waiting

    def enqueue(self, sequence: Sequence) -> None:
        """At the end of its class."""
        self._waiting[sequence.rank][sequence.sequence_id] = sequence
        self._count_waiting(sequence, 1)

    def admit(self, at_s: float) -> None:
        """Let the head of the line in while it fits. Nobody overtakes it: it would starve."""
        while (sequence := self._head()) is not None:
            need = self._need(sequence)
            view = AdmissionView(
                self.block_count, self.free_block_count, len(self.running), self._limits.max_running_count
            )
            if not admits(view, need, self._limits.admission_reserve_fraction):
                return
            self._leave_line(sequence)
            sequence.move(SequenceState.RUNNING, at_s, f"{need} of {self.free_block_count} free blocks")
            self._reserve(sequence, need)
            bisect.insort(self.running, sequence, key=_order)

    def _head(self) -> Sequence | None:
        if self.waiting_count:
            for line in self._waiting:
                if line:
                    return next(iter(line.values()))
        return None

    def _need(self, sequence: Sequence) -> int:
        """Blocks for all its tokens and the next one. Less by that one only where the cache ends."""
        return min(blocks_for(sequence.token_count + 1, self._block_tokens), self.block_count)

    def _leave_line(self, sequence: Sequence) -> None:
        del self._waiting[sequence.rank][sequence.sequence_id]
        self._count_waiting(sequence, -1)

    def _count_waiting(self, sequence: Sequence, sign: int) -> None:
        self.waiting_count += sign
        self.waiting_tokens += sign * sequence.token_count
        self.waiting_block_count += sign * self._need(sequence)

    # ---------------------------------------------------------------- running

    def release(self, sequence: Sequence) -> None:
        """The sequence ends (its state has not changed yet): out of the line, or its reservation is given back."""
        if sequence.state is SequenceState.WAITING:
            self._leave_line(sequence)
        else:
            self.running.remove(sequence)
            self._reserve(sequence, -sequence.reserved_block_count)

    def _reserve(self, sequence: Sequence, added_block_count: int) -> None:
        self.reserved_block_count += added_block_count
        sequence.reserved_block_count += added_block_count
        sequence.reserved_tokens = sequence.reserved_block_count * self._block_tokens

    def stranded(self) -> list[Sequence]:
        """Running sequences that have outgrown the whole cache. They are to be ended before the next plan: no
        preemption can help them.
        """
        capacity_tokens = self.block_count * self._block_tokens
        return [s for s in self.running if s.token_count > capacity_tokens]

    def plan(self, at_s: float) -> Plan:
        """The next step. Called between two steps only: whoever is preempted here takes part in none."""
        preempted: list[Sequence] = []
        for sequence in [s for s in self.running if s.token_count > s.reserved_tokens]:
            if sequence.state is SequenceState.RUNNING:  # not a victim of the ones before it
                preempted += self._make_room(sequence, at_s)
        self.admit(
            at_s
        )  # whoever just gave way does not fit: it needs at least what it had, and a part of that is taken
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for sequence in self.running:
            if sequence.token_count - sequence.computed_tokens == 1:
                decodes.append(sequence)
            else:
                prefills.append(sequence)
        return Plan(decodes, self._chunks(len(decodes), prefills), preempted)

    def _chunks(self, decode_count: int, prefills: list[Sequence]) -> list[tuple[Sequence, int]]:
        if not prefills:
            return []
        views = [PrefillView(s.rank, s.computed_tokens, s.token_count - s.computed_tokens) for s in prefills]
        counts = chunk_prefills(decode_count, views, self._limits.max_batch_tokens)
        return [(sequence, count) for sequence, count in zip(prefills, counts, strict=True) if count]

    def _make_room(self, sequence: Sequence, at_s: float) -> list[Sequence]:
        """Reserve the block for the next token. Returns the victims, the sequence itself perhaps among them."""
        victims: list[Sequence] = []
        while not self.free_block_count:
            views = [VictimView(s.rank, s.arrival, s.reserved_block_count, s.computed_tokens) for s in self.running]
            victim = self.running[choose_victim(views)]
            self._preempt(victim, at_s, f"no block free for {sequence.name}")
            victims.append(victim)
            if victim is sequence:
                return victims
        self._reserve(sequence, 1)
        return victims

    def _preempt(self, victim: Sequence, at_s: float, why: str) -> None:
        """Back to the head of its class: all that wait there arrived later."""
        self.running.remove(victim)
        self._reserve(victim, -victim.reserved_block_count)
        victim.computed_tokens = 0
        victim.preemption_count += 1
        self.preemptions_total += 1
        victim.move(SequenceState.WAITING, at_s, f"preempted, {why}")
        line = self._waiting[victim.rank]
        line[victim.sequence_id] = victim
        line.move_to_end(victim.sequence_id, last=False)
        self._count_waiting(victim, 1)

    # ---------------------------------------------------------------- inspector

    def check(self) -> None:
        """Raise InvariantViolation unless counts equal sums, orders hold and every sequence has what it needs."""
        waiting = [s for line in self._waiting for s in line.values()]
        for what, have, want in (
            ("waiting_count", self.waiting_count, len(waiting)),
            ("waiting_tokens", self.waiting_tokens, sum(s.token_count for s in waiting)),
            ("waiting_block_count", self.waiting_block_count, sum(self._need(s) for s in waiting)),
            ("reserved_block_count", self.reserved_block_count, sum(s.reserved_block_count for s in self.running)),
        ):
            if have != want:
                raise InvariantViolation(f"{what} is {have}, the sum is {want}")
        if self.reserved_block_count > self.block_count:
            raise InvariantViolation(f"{self.reserved_block_count} of {self.block_count} blocks are reserved")
        if len(self.running) > self._limits.max_running_count:
            raise InvariantViolation(f"{len(self.running)} sequences run, {self._limits.max_running_count} may")
        bound = self._limits.max_waiting_count + self._limits.max_running_count  # preempted ones are not turned away
        if len(waiting) > bound:
            raise InvariantViolation(f"{len(waiting)} sequences wait, {bound} may")
        for sequences in (self.running, waiting):
            if [_order(s) for s in sequences] != sorted(_order(s) for s in sequences):
                raise InvariantViolation(f"out of order: {[_order(s) for s in sequences]}")
        for sequence in self.running:
            self._check_running(sequence)
        for sequence in waiting:
            if sequence.state is not SequenceState.WAITING or sequence.computed_tokens or sequence.reserved_tokens:
                raise InvariantViolation(f"{sequence.name} waits and holds something", sequence.story())

    def _check_running(self, sequence: Sequence) -> None:
        if sequence.state is not SequenceState.RUNNING:
            raise InvariantViolation(f"{sequence.name} is in the running set", sequence.story())
        if not 0 <= sequence.computed_tokens < sequence.token_count:
            raise InvariantViolation(f"{sequence.name} has nothing left to compute", sequence.story())
        if sequence.reserved_tokens != sequence.reserved_block_count * self._block_tokens:
            raise InvariantViolation(f"{sequence.name} miscounts its reservation", sequence.story())
        if sequence.computed_tokens > sequence.reserved_tokens:
            raise InvariantViolation(f"{sequence.name} has KV beyond its reservation", sequence.story())
