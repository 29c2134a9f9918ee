"""Decides which sequences run, from block and token counts: waiting queue, KV reservations, preemption.

The scheduler knows the number of blocks (in a pipeline the minimum over the stages) and each running sequence's
reservation, but no block ids. Every stage has its own tables (`core.blocks.BlockBook`) and can provide the blocks that
the counts allow.

Order of service is (class, arrival). Classes decide which sequences are admitted first, and which are preempted when
the cache is full. A running online sequence is preempted for a waiting one only if its caller holds much more than the
other caller, and never for a sequence of a worse class (`policy.preemption`). Any online sequence may preempt offline
sequences, whose blocks count as free for it (`core.offline`).

With several batches in flight, a sequence in one of them can be neither scheduled nor preempted. A sequence that needs
such a victim's block skips a batch. Because it precedes the victim in the order of service, it gets the block first
when the victim's batch has completed.
"""

import bisect
import math
import sys
from collections.abc import Container
from dataclasses import replace

from services.worker.core.batch import BlockKey, SequenceId
from services.worker.core.batch_former import BatchPlan, growing_ahead, ready_ahead, ready_alone
from services.worker.core.blocks import blocks_for
from services.worker.core.counts import GroupCounts
from services.worker.core.line import OFFLINE_RANK, order
from services.worker.core.sequence import Sequence, SequenceState
from services.worker.core.swapping import NOTHING, SwapOrders
from services.worker.policy.admission import AdmissionView, admits, reserved
from services.worker.policy.preemption import VictimView, choose_victim, claimed, held_by_caller, outweighs


def _views(sequences: list[Sequence]) -> list[VictimView]:
    return [VictimView(s.rank, s.arrival, s.reserved_block_count, s.computed_tokens, s.caller) for s in sequences]


class Scheduler(GroupCounts):
    @property
    def offline_wanted_tokens(self) -> int:
        """Number of prompt tokens of further offline sequences that the group could admit."""
        if self._offline_head() is not None or not self._takes_offline:
            return 0
        return self.offline_work.wanted_tokens(self.offline)

    @property
    def _takes_offline(self) -> bool:
        """True if offline sequences may be admitted: no online sequence waits, and the group is not about to change."""
        return not (
            self.line.count or len(self.swap.away) or self.offline_work.paused or self.admission_limit is not None
        )

    @property
    def decides_nothing(self) -> bool:
        """True if the next plan will neither admit nor defer a sequence, unless blocks run out."""
        if self.stage_count > 1 or not self.running or self.suspended or self.swap.enabled:
            return False
        if self.line.offline_count or self.line.overtakes or self.swap.entries or self.offline or self._keeps_on_host:
            return False
        head = self._head()
        if head is None:
            return self.settled
        claims = any(s.caller != head.caller for s in self.running)  # the head may claim blocks once these hold more
        return self.settled and not claims and self._preemption_candidates(head, 0) is None

    def has_ready_ahead(self, completed_step_id: int) -> bool:
        """True if a lone instance may have a batch to run behind the one in flight. False while it preempts or swaps,
        because sequences in flight cannot be preempted and copies must not touch blocks that are still being written.
        """
        swap = self.swap
        if swap.entries or swap.enabled or self.suspended or self.expected_block_count or not self.settled:
            return False
        if self.offline_work.paused and self.offline:
            return False
        for sequence in self.running:
            if (
                sequence.step_id <= completed_step_id
                or sequence.dispatched_tokens < sequence.token_count
                or sequence.token_count in sequence.ahead
            ):
                return True
        return False

    def has_ready(self, completed_step_id: int) -> bool:
        """True if the next plan may have sequences to run. It is not certain, because blocks may be lacking, and only
        some microbatching policies continue a prompt that has a chunk in flight.
        """
        for sequence in self.running:
            if sequence.step_id <= completed_step_id:
                return True
            if sequence.dispatched_tokens < sequence.token_count and sequence.rank != OFFLINE_RANK:
                return True
        head, offline = self._head(), self._offline_head()
        if self.swap.has_copies or (
            head is not None and self._preemption_candidates(head, completed_step_id) is not None
        ):
            return True
        return offline is not None and (self.too_big(offline) or self._lets_offline_in(offline))

    # ---------------------------------------------------------------- admission

    def admit(self, at_s: float, completed_step_id: int, *, offline: bool = True) -> list[Sequence]:
        """Admit the head of the queue while it fits. No sequence overtakes the head, so it cannot starve. Returns the
        preempted sequences; sequences in a batch after `completed_step_id` are not preempted. `offline`: whether
        offline sequences may be admitted.
        """
        yielded: list[Sequence] = []
        if not self.line.count and not self.line.offline_count and not self.swap.entries:
            return yielded
        self.line.lift(at_s)
        while (sequence := self._head()) is not None:
            if (yielding := self._preemption_candidates(sequence, completed_step_id)) is None:
                return yielded
            while (
                (yielding and yielding[-1].rank != OFFLINE_RANK)
                or self._cost(sequence) > self.free_block_count
                or self.running_count >= self.max_running_count
            ):
                victim = yielding.pop()
                self._preempt(victim, at_s, f"{sequence.name} is admitted")
                yielded.append(victim)
            self._let_in(sequence, at_s)
        while offline and not yielded and (sequence := self._offline_head()) and self._lets_offline_in(sequence):
            self._let_in(sequence, at_s)
        return yielded

    def _let_in(self, sequence: Sequence, at_s: float) -> None:
        free_count, need = self.free_block_count, self.need(sequence)
        if sequence.state is SequenceState.SWAPPED:
            self._reserve(sequence, need)
            self.swap.come_back(sequence)
            self.turned.append(sequence)
            sequence.note(at_s, "its KV is swapped in")
            return
        self.line.remove(sequence)
        first, keys = self._brought(sequence)
        shared_count = self.prefixes.take(sequence, len(keys))
        self.reserved_block_count -= shared_count
        why = f"{need - shared_count} of {free_count} free blocks, {shared_count} shared"
        if not keys:
            self._run(sequence, need, at_s, why)
            return
        self._reserve(sequence, need)
        sequence.move(SequenceState.SWAPPED, at_s, f"{why}; {len(keys)} from host memory")
        self.swap.bring(sequence, first, keys)
        if sequence.preempted:
            self.turned.append(sequence)

    def _brought(self, sequence: Sequence) -> tuple[int, tuple[BlockKey, ...]]:
        """Return the index of the sequence's first block that the device lacks, and the keys of the blocks that
        admission copies back from the host; no keys if recomputing is faster.
        """
        if not len(self.swap.prefixes) or sequence.rank == OFFLINE_RANK:
            return 0, ()
        first, size = len(self.prefixes.match(sequence)), self.block_tokens
        keys = self.prefixes.on_host(sequence, first)
        cost = self.policies.harvest.cost()
        computing_s = cost.own_s(first * size, len(keys) * size) if keys and cost is not None else math.inf
        return first, keys if self.swap.brings_within(len(keys), computing_s) else ()

    def _cost(self, sequence: Sequence, without: list[Sequence] | None = None) -> int:
        """Number of blocks that the sequence needs and no other one holds once those in `without` are preempted."""
        need = self.need(sequence)
        if sequence.state is SequenceState.SWAPPED or not (numbers := self.prefixes.match(sequence)):
            return need
        return need - self.prefixes.held_count(numbers, without)

    def _lets_offline_in(self, sequence: Sequence) -> bool:
        """True if an offline sequence may be admitted: without preemption, and with some blocks left for growth."""
        if not self._takes_offline or self.running_count + self.expected_count >= self.max_running_count:
            return False
        kept = reserved(self.block_count, self.limits.admission_reserve_fraction) if self.running_count else 0
        if self._cost(sequence) + kept > self.free_block_count:
            return False
        return sequence.state is SequenceState.SWAPPED or self.offline_work.wanted_tokens(self.offline) > 0

    def why_no_room(self, block_count: int, *, new: bool) -> str:
        """Return why `block_count` more blocks cannot be reserved for a sequence of another leader that is new (`new`)
        or already arriving; empty if they can.
        """
        offline = self.offline
        free_count = self.free_block_count + self.prefixes.freed_count(offline)
        if self._admits(block_count, offline) if new else block_count <= free_count:
            return ""
        return (
            f"{free_count} of {self.block_count} blocks are free, but {block_count} are needed;"
            f" {self.running_count - len(offline)} of {self.place_count} sequences run"
        )

    def _preemption_candidates(self, sequence: Sequence, completed_step_id: int) -> list[Sequence] | None:
        """Return the sequences to preempt for `sequence`, the last in the order of service first; empty if there is
        room. None: it cannot be admitted, or would not be computed soon. Candidates are offline sequences and those of
        a caller that holds much more than this one's, if in no batch after `completed_step_id`.
        """
        begins = sequence.state is not SequenceState.SWAPPED
        if begins and self.prompt_tokens >= self.max_prompt_tokens:
            return None
        yielding = [s for s in self.offline if s.step_id <= completed_step_id]
        if not self._admits(self._cost(sequence, yielding), yielding):
            yielding = self._claim(sequence, yielding, completed_step_id)
            if not yielding:
                return None
        coming = [*self.online, *self.swap.returning] if self.swap.entries else self.online
        return None if begins and self.prefixes.is_being_computed(sequence, coming) else yielding

    def _claim(self, sequence: Sequence, offline: list[Sequence], completed_step_id: int) -> list[Sequence]:
        """Return the sequences to preempt: `offline`, and as few online sequences as make room for `sequence`, from a
        caller that holds much more than this one's. Empty if they do not make enough room.
        """
        running = self.online
        if self.admission_limit is not None or all(s.caller == sequence.caller for s in running):
            return []
        candidates, yielding = _views(running), offline
        for index in claimed(candidates, sequence.caller, sequence.rank, self.need(sequence)):
            if running[index].step_id > completed_step_id:
                continue
            yielding = [*yielding, running[index]]
            if self._admits(self._cost(sequence, yielding), yielding):
                return yielding
        return []

    def _lacks_room(self) -> bool:
        """True if the head does not fit; otherwise it only waits for the prompts of earlier sequences."""
        head, offline = self._head() if self.line.count else None, self.offline
        return head is not None and not self._admits(self._cost(head, offline), offline)

    def _admits(self, need_block_count: int, yielding: list[Sequence]) -> bool:
        """True if a sequence that needs this many blocks may be admitted once the blocks of the `yielding` sequences
        are free.
        """
        block_count = self._limited_block_count
        lent_count = self.prefixes.freed_count(yielding) if yielding else 0
        view = AdmissionView(
            block_count,
            block_count - self.block_count + self.free_block_count + lent_count,
            self.running_count + self.expected_count - len(yielding),
            self.place_count,
        )
        return admits(view, need_block_count, self.limits.admission_reserve_fraction)

    def _run(self, sequence: Sequence, added_block_count: int, at_s: float, why: str) -> None:
        sequence.move(SequenceState.RUNNING, at_s, why)
        if not sequence.in_engine:
            sequence.enter_engine()
        if sequence.preempted:
            self.turned.append(sequence)
        self._reserve(sequence, added_block_count)
        bisect.insort(self.running, sequence, key=order)

    def _head(self) -> Sequence | None:
        """Return the online sequence to admit next, waiting or swapped out, in the order of service. If the caller of a
        waiting one holds far more blocks than another caller, return the other caller's first one of that class.
        """
        waiting = self.line.online
        if waiting is not None and len(self.line.callers) > 1:
            waiting = self._lightest(waiting)
        away = min(self.swap.away, key=order, default=None) if self.swap.entries else None
        if waiting is None or away is None:
            return waiting or away
        return min(waiting, away, key=order)

    def _lightest(self, first: Sequence) -> Sequence:
        held = held_by_caller(_views(self.online))
        for other in self.line.firsts(first.rank):
            if other.caller != first.caller and outweighs(held[first.caller], held[other.caller] + self.need(other)):
                return other
        return first

    def _offline_head(self) -> Sequence | None:
        """The offline sequence to be admitted next."""
        waiting, away = self.line.offline, None
        if self.swap.entries:
            away = min(self.swap.offline_away, key=order, default=None)
        if waiting is None or away is None:
            return waiting or away
        return min(waiting, away, key=order)

    # ---------------------------------------------------------------- running

    def release(self, sequence: Sequence, *, kept: bool = True) -> None:
        """Remove a sequence; its state changes afterwards. `kept`: its KV is valid and may be retained."""
        match sequence.state:
            case SequenceState.WAITING:
                self.line.remove(sequence)
            case SequenceState.RUNNING:
                self.running.remove(sequence)
                self.swap.drop_mirror(sequence)
                self._unreserve(sequence, kept=kept)
            case SequenceState.SWAPPED:
                self._unreserve(sequence, kept=kept and self.swap.brings(sequence))
                self.swap.forget(sequence)
            case _:
                self.suspended.let_go(sequence)

    def fit_prefixes(self, wanted_block_count: int = 0) -> None:
        """Evict retained blocks until `wanted_block_count` blocks are free, and all of them while suspended KV waits
        for room.
        """
        if self.prefixes.retained_count:
            waits = self.lent_block_count or self.suspended.without_blocks
            self.prefixes.fit(0 if waits else self.free_block_count - wanted_block_count)

    def forget_prefixes(self) -> None:
        """Drop all prefix numbers. The stages drop theirs independently; see `PrefixIndex.forget_all`."""
        self.reserved_block_count += self.prefixes.forget_all(self.running)

    def stranded(self) -> list[Sequence]:
        """Return the sequences that have outgrown the whole cache: running ones, and the first waiting offline one,
        which may just have been preempted. They are ended before the next plan, because no preemption helps.
        """
        ceiling_tokens = self.ceiling_tokens
        found = [s for s in self.running if s.token_count > ceiling_tokens]
        offline = self._offline_head()
        return [*found, offline] if offline is not None and offline.token_count > ceiling_tokens else found

    def too_big(self, sequence: Sequence) -> bool:
        return sequence.token_count > self.ceiling_tokens

    def reserve_for(self, sequence: Sequence, token_count: int) -> None:
        """Reserve blocks for at least `token_count` tokens of a running sequence."""
        missing = blocks_for(token_count, self.block_tokens) - sequence.reserved_block_count
        if missing > 0:
            self._reserve(sequence, missing)

    def plan(self, at_s: float, completed_step_id: int, in_flight_count: int) -> BatchPlan:
        """Plan the next step, without sequences that are in a batch after `completed_step_id`."""
        preempted: list[Sequence] = []
        ahead = in_flight_count > 0 and self.stage_count == 1
        left = self._settle_swaps(at_s) if self.swap.entries else ()
        self._awaited_block_count = 0
        if ahead and not self._reserve_ahead(completed_step_id):
            return BatchPlan([], [], [], [])
        for sequence in [s for s in self.running if s.token_count > s.reserved_tokens]:
            if sequence.state is SequenceState.RUNNING:  # not preempted for an earlier one
                preempted += self._make_room(sequence, at_s, completed_step_id)
        if self.swap.enabled:
            self._leave_ahead(at_s, completed_step_id)
        # A sequence that was just preempted does not fit, because it needs at least its former blocks, and some of them
        # are taken.
        preempted += self.admit(at_s, completed_step_id, offline=not (preempted and self.running))
        begun = self.prefixes.begin()
        if self.stage_count > 1:
            decodes, chunks = self.former.microbatch(
                self.online,
                completed_step_id,
                stage_count=self.stage_count,
                waiting_count=self.line.count,
                in_flight_count=in_flight_count,
                lacks_room=self._lacks_room(),
            )
        else:
            all_ready = not (in_flight_count or self.swap.entries)
            decodes, chunks = self.former.batch(self.online, completed_step_id, all_ready=all_ready, ahead=ahead)
            in_flight_count = 0  # a lone instance's batch in flight counts as completed
        plan, online_busy = BatchPlan(decodes, chunks, preempted, begun), bool(decodes or chunks)
        self.fit_prefixes()
        if offline := self.offline:
            safepoint_layers = self._fill(plan, offline, at_s, completed_step_id, in_flight_count, ahead=ahead)
            plan = replace(plan, safepoint_layers=safepoint_layers) if safepoint_layers else plan
        busy = bool(plan.decodes or plan.chunks)
        swaps = SwapOrders(left) if left else NOTHING
        # Without a batch to hide them, copies would delay the batches in flight.
        if self.swap.entries and not ahead and (busy or not in_flight_count):
            swaps = self.swap.order(left, busy=online_busy)
        if offline and busy:
            swaps = self.swap.mirror(swaps, [s for s in reversed(offline) if s.state is SequenceState.RUNNING])
        if busy and self._keeps_on_host:
            swaps = self.swap.keep(swaps, self.prefixes)
        return plan if swaps is NOTHING else replace(plan, swaps=swaps)

    @property
    def _keeps_on_host(self) -> bool:
        """True if there are retained blocks to copy to the host, and the host has room."""
        return self.swap.has_space and self.prefixes.wants_copies

    def _reserve_ahead(self, completed_step_id: int) -> bool:
        """Reserve the blocks that sequences need including the tokens in flight. Returns False if there are too few, or
        if the head of the queue needs another sequence's blocks. In both cases, planning waits until no batch is in
        flight and any sequence may be preempted.
        """
        growing = growing_ahead(self.running, completed_step_id)
        if len(growing) > self.free_block_count:
            return False
        if (head := self._head()) is not None and self._preemption_candidates(head, sys.maxsize):
            return False
        for sequence in growing:
            self._reserve(sequence, 1)
        return True

    def _fill(
        self,
        plan: BatchPlan,
        offline: list[Sequence],
        at_s: float,
        completed_step_id: int,
        in_flight_count: int,
        *,
        ahead: bool,
    ) -> int:
        """Add offline sequences to the batch while it has room. Returns its `safepoint_layers`."""
        running = [s for s in offline if s.state is SequenceState.RUNNING]
        return self.offline_work.fill(
            plan.decodes,
            plan.chunks,
            ready_ahead(running, completed_step_id) if ahead else ready_alone(running, completed_step_id),
            stage_count=self.stage_count,
            in_flight_count=in_flight_count,
            prefill_limit=self.former.prefill_limit,
            online_in_flight=in_flight_count > 0 and any(s.step_id > completed_step_id for s in self.online),
            online=self.online,
            place_count=self.place_count,
            at_s=at_s,
        )

    def _make_room(self, sequence: Sequence, at_s: float, completed_step_id: int) -> list[Sequence]:
        """Reserve the block for the sequence's next token, unless only sequences in flight could yield one. Returns the
        preempted sequences, possibly including the sequence itself.
        """
        victims: list[Sequence] = []
        while self.free_block_count < 1:
            victim = self._victim(completed_step_id)
            if victim.rank != OFFLINE_RANK and self._awaited_block_count < self.swap.leaving_block_count:
                self._awaited_block_count += 1  # it gets a block that is being swapped out, and skips a step
                return victims
            if victim.step_id > completed_step_id:
                return victims
            if victim.rank != OFFLINE_RANK and self.swap.takes(victim):
                self._swap_out(victim, at_s, f"no block free for {sequence.name}")
            else:
                self._preempt(victim, at_s, f"no block free for {sequence.name}")
                victims.append(victim)
            if victim is sequence:
                return victims
        self._reserve(sequence, 1)
        return victims

    @property
    def _candidates(self) -> list[Sequence]:
        """Sequences that may be preempted."""
        return [*self.running, *self.suspended.kept] if self.suspended.arrived else self.running

    def _victim(self, completed_step_id: int) -> Sequence:
        """Return the candidate to preempt first: the newest running offline sequence that is in no batch, or the newest
        one if all are in a batch. Without offline sequences, the policy chooses.
        """
        if offline := self.offline:
            return next((s for s in reversed(offline) if s.step_id <= completed_step_id), offline[-1])
        candidates = self._candidates
        return candidates[choose_victim(_views(candidates))]

    def surplus(self, completed_step_id: int) -> Sequence | None:
        """Return the next sequence to preempt if more blocks are held than exist, or offline work is paused. None: that
        sequence is in flight, or there is no surplus.
        """
        pauses = self.offline_work.paused and bool(self.offline)
        if (self.settled and not pauses) or not (self._candidates or pauses):
            return None
        victim = self._victim(completed_step_id)
        return None if victim.step_id > completed_step_id else victim

    def shed(self, at_s: float, completed_step_id: int) -> list[Sequence]:
        """Preempt until reservations fit the capacity, or the next victim is in flight."""
        victims: list[Sequence] = []
        while (victim := self.surplus(completed_step_id)) is not None:
            self._preempt(victim, at_s, "the group has fewer blocks")
            victims.append(victim)
        return victims

    def preempt_offline(self, at_s: float, completed_step_id: int, block_count: int) -> list[Sequence]:
        """Preempt offline sequences that are in no batch until `block_count` blocks are free."""
        yielded: list[Sequence] = []
        while self.free_block_count < block_count and self.offline:
            victim = self._victim(completed_step_id)
            if victim.step_id > completed_step_id:
                break
            self._preempt(victim, at_s, "incoming KV needs room")
            yielded.append(victim)
        return yielded

    def _settle_swaps(self, at_s: float) -> tuple[Sequence, ...]:
        """Account for the copies of the last step. Returns the sequences whose device blocks are free now."""
        left, back = self.swap.settle()
        for sequence in left:
            self._unreserve(sequence, kept=True)
            self.turned.append(sequence)
            sequence.note(at_s, "its KV is in host memory")
        for sequence in back:
            self._run(sequence, 0, at_s, "its KV is swapped in")
        return tuple(left)

    def _leave_ahead(self, at_s: float, completed_step_id: int) -> None:
        """Start swapping out sequences that would be preempted before their copy could finish."""
        while len(online := self.online) > 1:
            victim = online[-1]
            if victim.step_id > completed_step_id:
                return
            batches = -(-victim.reserved_block_count // self.swap.budget_blocks)
            ahead_tokens = min(-(-batches // self.stage_count), self.block_tokens)
            growing = sum(s.token_count + ahead_tokens > s.reserved_tokens for s in online if s is not victim)
            soon_free = (
                self.free_block_count
                + self.offline_block_count
                + self.swap.leaving_block_count
                - self._awaited_block_count
            )
            if growing <= soon_free or not self.swap.takes(victim):
                return
            self._swap_out(victim, at_s, "the cache is almost full")

    def _swap_out(self, victim: Sequence, at_s: float, why: str) -> None:
        self.running.remove(victim)
        self.preemptions_total += 1
        victim.move(SequenceState.SWAPPED, at_s, f"preempted, {why}")
        for lost in self.swap.leave(victim):
            self.offline_work.lost_tokens_total += lost.computed_tokens
            self._recompute(lost, at_s, f"host memory is needed for {victim.name}")

    def forget_swapped(self, at_s: float, why: str, who: Container[SequenceId] | None = None) -> list[Sequence]:
        """Drop swapped KV of all sequences, or of those in `who`, and recompute them, because the group changes."""
        self.swap.drop_mirrors(who)
        lost = [s for s in self.swap.sequences if who is None or s.sequence_id in who]
        self.offline_work.lost_tokens_total += sum([s.computed_tokens for s in lost if s.rank == OFFLINE_RANK])
        for sequence in lost:
            self.swap.forget(sequence)
            self._recompute(sequence, at_s, why)
        return lost

    def _preempt(self, victim: Sequence, at_s: float, why: str) -> None:
        if victim.rank == OFFLINE_RANK:
            self._yield(victim, at_s, f"yields, {why}")
        else:
            self.preemptions_total += 1
            self.start_over(victim, at_s, f"preempted, {why}")

    def _yield(self, victim: Sequence, at_s: float, why: str) -> None:
        """Preempt an offline sequence. Its blocks are free at once, and its mirror on the host stays valid."""
        computed_tokens = victim.computed_tokens
        if victim.state is SequenceState.SWAPPED:
            self._unreserve(victim, kept=False)
            self.swap.delay_return(victim)
            self.turned.append(victim)
            victim.note(at_s, why)
        elif mirrored_tokens := self.swap.leave_by_mirror(victim):
            self.running.remove(victim)
            self._unreserve(victim, kept=True)
            victim.computed_tokens = victim.dispatched_tokens = mirrored_tokens
            victim.move(SequenceState.SWAPPED, at_s, why)
            self.turned.append(victim)
        else:
            self.start_over(victim, at_s, why)
        self.offline_work.note_yield(computed_tokens - victim.computed_tokens)

    def _recompute(self, sequence: Sequence, at_s: float, why: str, *, kept: bool = False) -> None:
        self.swap.drop_mirror(sequence)
        self._unreserve(sequence, kept=kept)
        sequence.computed_tokens = sequence.dispatched_tokens = 0
        sequence.may_overfill = True
        sequence.move(SequenceState.WAITING, at_s, why)
        self.turned.append(sequence)
        self.line.add(sequence)

    def start_over(self, sequence: Sequence, at_s: float, why: str) -> None:
        """Preempt a running sequence that is not in flight. Its computed KV is retained."""
        if sequence.snapshot is not None:
            self.suspended.forget_kv(sequence, at_s, why)
            return
        self.running.remove(sequence)
        self._recompute(sequence, at_s, why, kept=True)

    # ---------------------------------------------------------------- KV transfers

    def suspend(self, sequence: Sequence, at_s: float, *, waits: bool = False) -> None:
        """Suspend a sequence, or KV whose request has not arrived, while its KV is transferred."""
        if sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
            self.swap.drop_mirror(sequence)
        self.reserved_block_count += self.prefixes.leave(sequence, kept=False)
        self.suspended.add(sequence, at_s, travels=True, waits=waits)

    def resume(self, sequence: Sequence, at_s: float) -> None:
        """Run a suspended sequence whose KV has arrived, unless its request is missing."""
        if self.suspended.complete(sequence, at_s):
            self._run(sequence, 0, at_s, "its KV is complete")

    def bind(self, kept: Sequence, request: Sequence, at_s: float) -> None:
        """Bind KV to its request, which has been given the KV's sequence id. The caller calls `shed` afterwards."""
        if self.suspended.bind(kept, request, at_s):
            self.resume(request, at_s)

    def lose(self, sequence: Sequence, at_s: float) -> None:
        """Recompute a suspended or running sequence whose KV is lost."""
        if sequence.snapshot is not None:
            self.suspended.forget_kv(sequence, at_s, "its KV is lost")
            return
        if sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
        else:
            self.suspended.leave(sequence)
        self._recompute(sequence, at_s, "its KV is lost")
