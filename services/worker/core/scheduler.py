"""Decides by counts which sequences run: waiting line, KV reservations, preemption.

It knows how many blocks there are (in a pipeline the minimum over the stages) and how many each running sequence has
reserved, and no block id: every stage keeps its own tables (`core.blocks.BlockBook`) and can cover whatever the counts
allow.

Order of service is (class, arrival). A running sequence is not preempted for a waiting one, whatever their classes;
classes decide who is admitted first and who gives way when the cache is full.

With several batches in flight, a sequence that is in one of them can be neither scheduled nor preempted. Who needs
the block of such a one skips a batch; as it comes before its victim in the order of service, it is the first to get
the block when the victim has landed.
"""

import bisect
from collections import OrderedDict
from collections.abc import Container
from dataclasses import replace
from itertools import islice

from ballast.common.errors import InvariantViolation
from ballast.common.record import record
from ballast.common.sampling import PriorityClass
from services.worker.core.batch import SequenceId
from services.worker.core.blocks import blocks_for
from services.worker.core.limits import WorkerLimits
from services.worker.core.sequence import Sequence, SequenceState
from services.worker.core.suspended import Suspended
from services.worker.core.swapping import NOTHING, SwapOrders, SwapSpace
from services.worker.policy.admission import AdmissionView, admits, most_prompt_tokens, reserved
from services.worker.policy.batching import PrefillView, chunk_prefills
from services.worker.policy.microbatching import Candidate, Microbatching, PipelineView, by_token_count
from services.worker.policy.preemption import VictimView, choose_victim
from services.worker.policy.token_target import Decoders, TokenTarget

_FEW = 0.25  # of a microbatch's decodes
_LIMITED_BATCHES = 4  # however small the limit, over no more than these are the prompts spread that there are at once


@record()
class Plan:
    """What the next step computes."""

    decodes: list[Sequence]  # one token each
    chunks: list[tuple[Sequence, int]]  # with the number of tokens, at least 1
    preempted: list[Sequence]  # they wait again
    swaps: SwapOrders = NOTHING  # besides; never of sequences that are computed


def _order(sequence: Sequence) -> tuple[int, tuple[float, SequenceId]]:
    return sequence.rank, sequence.arrival


class Scheduler:
    def __init__(self, limits: WorkerLimits, block_count: int, microbatching: Microbatching = by_token_count) -> None:
        self._limits = limits
        self.block_tokens = limits.block_tokens
        self._microbatching = microbatching
        self.block_count = block_count
        self.lent_block_count = 0
        self.expected_block_count = 0  # for sequences that come from other leaders, and
        self.expected_count = 0  # so many of these
        self.ceiling_block_count = block_count  # that there are, or may be soon
        self.admission_limit: int | None = None  # blocks; nothing new above it
        self.target: TokenTarget | None = None  # nothing new that would make tokens take longer
        self.prefill_limit: int | None = None  # tokens of prompts in a batch that has decodes
        self._limits_always = False  # in others too
        self._limited_tokens = 0  # the most of prompts that were to be computed since there were none, while limited
        self.stage_count = 1
        self.reserved_block_count = 0
        self.running: list[Sequence] = []  # in order of service
        self.suspended = Suspended(limits.block_tokens, self._reserve)
        self._waiting: tuple[OrderedDict[SequenceId, Sequence], ...] = tuple(OrderedDict() for _ in PriorityClass)
        self.waiting_count = 0
        self.waiting_tokens = 0
        self.waiting_block_count = 0
        self.preemptions_total = 0
        self.turned: list[Sequence] = []  # let in, or put back into the line, since somebody looked
        self._awaited_block_count = 0  # blocks about to be free, for which sequences skip a step
        self.swap = SwapSpace(limits.swap_block_count, limits.block_tokens, limits.swap_blocks_per_step)

    @property
    def free_block_count(self) -> int:
        return self.block_count - self.lent_block_count - self.expected_block_count - self.reserved_block_count

    @property
    def kept_block_count(self) -> int:
        """Of the free blocks those that no newcomer gets while anything runs."""
        limited = self._limited_block_count
        return self.block_count - limited + reserved(limited, self._limits.admission_reserve_fraction)

    @property
    def _limited_block_count(self) -> int:
        """Blocks within which newcomers are let in."""
        return self.block_count if self.admission_limit is None else min(self.block_count, self.admission_limit)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of running prompts in no batch yet. A long one counts as a full batch: another may come beside it."""
        most = self._limits.max_batch_tokens
        left = [s.token_count - max(s.computed_tokens, s.dispatched_tokens) for s in self.running]
        return sum([min(count, most) for count in left if count > 1])

    @property
    def max_prompt_tokens(self) -> int:
        return most_prompt_tokens(self._limits.max_batch_tokens, self.stage_count)

    @property
    def max_running_count(self) -> int:
        """Each of the microbatches in flight may be a full one."""
        return self._limits.max_running_count * self.stage_count

    @property
    def place_count(self) -> int:
        """Sequences that may run before newcomers wait. What already runs, or comes to run, is never too much by it."""
        if self.target is None:
            return self.max_running_count
        count = self.running_count + self.expected_count
        token_count = (self.reserved_block_count + self.expected_block_count) * self.block_tokens
        return self.target.place_count(Decoders(count, token_count, self.stage_count), self.max_running_count)

    @property
    def max_in_flight_count(self) -> int:
        """Batches."""
        ahead = self.stage_count > 1 and self.waiting_count > 0
        return self.stage_count + self._microbatching.ahead if ahead else self.stage_count

    @property
    def ceiling_tokens(self) -> int:
        """Tokens of the longest sequence that the whole cache can hold, or will be able to."""
        return self.ceiling_block_count * self.block_tokens

    @property
    def decides_nothing(self) -> bool:
        """Whether the next plan lets nothing in and puts nothing off, if no block is lacking: everything runs on."""
        if self.stage_count > 1 or not self.running or self.suspended or self.swap.enabled:
            return False
        head = self._head()
        return self.settled and not (head is not None and self._lets_in(head))

    @property
    def running_count(self) -> int:
        returning_count = self.swap.returning_count if len(self.swap) else 0
        return len(self.running) + len(self.suspended) + returning_count

    @property
    def waiting(self) -> list[Sequence]:
        """Sequences that wait, in order of service."""
        return [s for line in self._waiting for s in line.values()]

    @property
    def settled(self) -> bool:
        """Whether what is reserved and what runs is within what there is."""
        return self.free_block_count >= 0 and self.running_count <= self.max_running_count

    def resize(self, block_count: int, lent_block_count: int, before_block_count: int = 0) -> None:
        """What waits may need a block more or less than counted before, so its needs are counted anew. Of what there
        was before there may be that much again soon: what needs it waits, and is not too big.
        """
        self.ceiling_block_count = max(block_count, before_block_count)
        self.block_count = block_count
        self.lent_block_count = lent_block_count
        self.waiting_block_count = sum(self.need(s) for s in self.waiting)

    def has_ready(self, completed_step_id: int) -> bool:
        """Whether the next plan may have something to run. None of it is certain: it may lack blocks, and only some
        microbatchings let a prompt go on while a part of it is in flight.
        """
        for sequence in self.running:
            if sequence.step_id <= completed_step_id or sequence.dispatched_tokens < sequence.token_count:
                return True
        head = self._head()
        return self.swap.has_copies or (head is not None and self._lets_in(head))

    # ---------------------------------------------------------------- waiting

    def enqueue(self, sequence: Sequence) -> None:
        """It goes to its class by arrival: a newcomer to the end, one that gave way to the head, others in between."""
        line = self._waiting[sequence.rank]
        line[sequence.sequence_id] = sequence
        self._count_waiting(sequence, 1)
        if len(line) > 1 and next(islice(reversed(line.values()), 1, None)).arrival > sequence.arrival:
            if next(iter(line.values())).arrival > sequence.arrival:
                line.move_to_end(sequence.sequence_id, last=False)
            else:
                for other in sorted(line.values(), key=_order):
                    line.move_to_end(other.sequence_id)

    def admit(self, at_s: float) -> None:
        """Let the head of the line in while it fits. Nothing overtakes it: it would starve."""
        if not self.waiting_count and not len(self.swap):
            return
        while (sequence := self._head()) is not None:
            if not self._lets_in(sequence):
                return
            need = self.need(sequence)
            if sequence.state is SequenceState.SWAPPED:
                self._reserve(sequence, need)
                self.swap.come_back(sequence)
                self.turned.append(sequence)
                sequence.note(at_s, "its KV comes back")
                continue
            self._leave_line(sequence)
            self._run(sequence, need, at_s, f"{need} of {self.free_block_count} free blocks")

    def why_no_room(self, block_count: int, *, new: bool) -> str:
        """Why a sequence of another leader that takes so many blocks more cannot come, or (not `new`) not go on coming;
        empty: it can.
        """
        if self._admits(block_count) if new else block_count <= self.free_block_count:
            return ""
        return (
            f"{self.free_block_count} of {self.block_count} blocks are free, {block_count} are needed;"
            f" {self.running_count} of {self.place_count} sequences run"
        )

    def _lets_in(self, sequence: Sequence) -> bool:
        """There is room for it, and its tokens would be computed soon. One whose KV comes back has few."""
        if not self._admits(self.need(sequence)):
            return False
        return sequence.state is SequenceState.SWAPPED or self.prompt_tokens < self.max_prompt_tokens

    def _lacks_room(self) -> bool:
        """Whether what waits would not fit; else it waits only until prompts that came before it are computed."""
        head = self._head() if self.waiting_count else None
        return head is not None and not self._admits(self.need(head))

    def _admits(self, need_block_count: int) -> bool:
        block_count = self._limited_block_count
        view = AdmissionView(
            block_count,
            block_count - self.block_count + self.free_block_count,
            self.running_count + self.expected_count,
            self.place_count,
        )
        return admits(view, need_block_count, self._limits.admission_reserve_fraction)

    def _run(self, sequence: Sequence, added_block_count: int, at_s: float, why: str) -> None:
        sequence.move(SequenceState.RUNNING, at_s, why)
        if sequence.preempted:
            self.turned.append(sequence)
        self._reserve(sequence, added_block_count)
        bisect.insort(self.running, sequence, key=_order)

    def _head(self) -> Sequence | None:
        """First in the order of service, of those that wait and those that are swapped out."""
        waiting = next((next(iter(line.values())) for line in self._waiting if line), None)
        away = min(self.swap.away, key=_order, default=None) if len(self.swap) else None
        if waiting is None or away is None:
            return waiting or away
        return min(waiting, away, key=_order)

    def need(self, sequence: Sequence) -> int:
        """Blocks for all its tokens and the next one. Less by that one only where the cache ends."""
        with_next = blocks_for(sequence.token_count + 1, self.block_tokens)
        return min(with_next, max(self.block_count, blocks_for(sequence.token_count, self.block_tokens)))

    def _leave_line(self, sequence: Sequence) -> None:
        del self._waiting[sequence.rank][sequence.sequence_id]
        self._count_waiting(sequence, -1)

    def _count_waiting(self, sequence: Sequence, sign: int) -> None:
        self.waiting_count += sign
        self.waiting_tokens += sign * sequence.token_count
        self.waiting_block_count += sign * self.need(sequence)

    # ---------------------------------------------------------------- running

    def release(self, sequence: Sequence) -> None:
        """The sequence leaves (its state has not changed yet): out of the line, or its reservation is given back."""
        match sequence.state:
            case SequenceState.WAITING:
                self._leave_line(sequence)
            case SequenceState.RUNNING:
                self.running.remove(sequence)
                self._reserve(sequence, -sequence.reserved_block_count)
            case SequenceState.SWAPPED:
                self._reserve(sequence, -sequence.reserved_block_count)
                self.swap.forget(sequence)
            case _:
                self.suspended.let_go(sequence)

    def _reserve(self, sequence: Sequence, added_block_count: int) -> None:
        self.reserved_block_count += added_block_count
        sequence.reserved_block_count += added_block_count
        sequence.reserved_tokens = sequence.reserved_block_count * self.block_tokens

    def stranded(self) -> list[Sequence]:
        """Running sequences that have outgrown the whole cache, to be ended before the next plan: no victim helps."""
        ceiling_tokens = self.ceiling_tokens
        return [s for s in self.running if s.token_count > ceiling_tokens]

    def too_big(self, sequence: Sequence) -> bool:
        return sequence.token_count > self.ceiling_tokens

    def reserve_for(self, sequence: Sequence, token_count: int) -> None:
        """At least as much as so many tokens of a running sequence take."""
        missing = blocks_for(token_count, self.block_tokens) - sequence.reserved_block_count
        if missing > 0:
            self._reserve(sequence, missing)

    def plan(self, at_s: float, completed_step_id: int, in_flight_count: int) -> Plan:
        """The next step, without those that take part in one after `completed_step_id`."""
        preempted: list[Sequence] = []
        left = self._settle_swaps(at_s) if len(self.swap) else ()
        self._awaited_block_count = 0
        for sequence in [s for s in self.running if s.token_count > s.reserved_tokens]:
            if sequence.state is SequenceState.RUNNING:  # not a victim of the ones before it
                preempted += self._make_room(sequence, at_s, completed_step_id)
        if self.swap.enabled:
            self._leave_ahead(at_s, completed_step_id)
        # What just gave way does not fit: it needs at least what it had, and a part of that is taken.
        self.admit(at_s)
        if self.stage_count > 1:
            plan = self._next_microbatch(completed_step_id, in_flight_count, preempted)
        else:
            plan = self._next_batch(completed_step_id, in_flight_count, preempted)
        busy = bool(plan.decodes or plan.chunks)
        if len(self.swap) and (busy or not in_flight_count):  # alone, copies would hold up what is in flight
            return replace(plan, swaps=self.swap.order(left, busy=busy))
        return replace(plan, swaps=SwapOrders(left)) if left else plan

    def _next_batch(self, completed_step_id: int, in_flight_count: int, preempted: list[Sequence]) -> Plan:
        ready = self.running
        if in_flight_count or len(self.swap):
            ready = [s for s in ready if s.step_id <= completed_step_id and s.token_count <= s.reserved_tokens]
        decodes = [s for s in ready if s.token_count - s.computed_tokens == 1]
        prefills = [] if len(decodes) == len(ready) else [s for s in ready if s.token_count - s.computed_tokens != 1]
        prompt_tokens = sum(s.token_count - s.computed_tokens for s in prefills) if self.prefill_limit else 0
        budget = min(
            self._limits.max_batch_tokens, len(decodes) + self._most_prompt_tokens(len(decodes), prompt_tokens)
        )
        return Plan(decodes, self._chunks(len(decodes), prefills, budget), preempted)

    def _ready_decodes(self, completed_step_id: int) -> list[Sequence]:
        ready = [s for s in self.running if s.step_id <= completed_step_id and s.token_count <= s.reserved_tokens]
        return [s for s in ready if s.token_count - s.computed_tokens == 1]

    def _next_microbatch(self, completed_step_id: int, in_flight_count: int, preempted: list[Sequence]) -> Plan:
        candidates = [
            Candidate(
                s.rank,
                s.computed_tokens,
                s.dispatched_tokens if s.step_id > completed_step_id else s.computed_tokens,
                s.token_count,
                s.step_id,
                s.token_count <= s.reserved_tokens,
            )
            for s in self.running
        ]
        limited = self.prefill_limit is not None
        prompts = [c for c in candidates if c.token_count - c.computed_tokens != 1] if limited else []
        decode_count = len(candidates) - len(prompts) if limited else 0
        prompt_tokens = sum(c.token_count - c.dispatched_tokens for c in prompts)
        view = PipelineView(
            self.stage_count,
            completed_step_id,
            self._limits.max_batch_tokens,
            self.waiting_count,
            candidates,
            in_flight_count,
            self._most_prompt_tokens(decode_count, prompt_tokens),
            self._lacks_room(),
        )
        plan = Plan([], [], preempted)
        for index, count in self._microbatching(view):
            sequence, candidate = self.running[index], candidates[index]
            left = candidate.token_count - candidate.dispatched_tokens
            if not (0 < count <= left and candidate.has_room):
                raise InvariantViolation(f"{count} of {left} tokens are to be computed", sequence.story())
            if candidate.token_count - candidate.computed_tokens == 1:
                plan.decodes.append(sequence)
            else:
                plan.chunks.append((sequence, count))
        if limited and plan.decodes:
            self._take_along(plan, completed_step_id)
        return plan

    def _take_along(self, plan: Plan, completed_step_id: int) -> None:
        """A transition is prepared, and batches take longer than usual. Those few that would be put off to the next
        microbatch, so that all are alike, would wait half a trip through the pipeline on top of it.
        """
        taken = {s.sequence_id for s in plan.decodes}
        left = [s for s in self._ready_decodes(completed_step_id) if s.sequence_id not in taken]
        room = self._limits.max_batch_tokens - len(plan.decodes) - sum(count for _, count in plan.chunks)
        if len(left) <= min(room, max(1, int(len(plan.decodes) * _FEW))):
            plan.decodes.extend(left)

    def limit_prefill(self, token_count: int | None, *, always: bool = False) -> None:
        self.prefill_limit, self._limits_always = token_count, always
        self._limited_tokens = 0

    def _most_prompt_tokens(self, decode_count: int, prompt_tokens: int) -> int:
        """The most tokens of prompts in a batch, while so many sequences decode and so many such tokens wait."""
        limit = self.prefill_limit
        if limit is None or not (decode_count or self._limits_always):
            return self._limits.max_batch_tokens
        if not limit:
            return 0
        self._limited_tokens = max(self._limited_tokens, prompt_tokens) if prompt_tokens else 0
        return max(limit, -(-self._limited_tokens // _LIMITED_BATCHES))

    def _chunks(self, decode_count: int, prefills: list[Sequence], budget_tokens: int) -> list[tuple[Sequence, int]]:
        if not prefills:
            return []
        views = [PrefillView(s.rank, s.computed_tokens, s.token_count - s.computed_tokens) for s in prefills]
        counts = chunk_prefills(decode_count, views, budget_tokens)
        return [(sequence, count) for sequence, count in zip(prefills, counts, strict=True) if count]

    def _make_room(self, sequence: Sequence, at_s: float, completed_step_id: int) -> list[Sequence]:
        """Reserve the block for the next token, if it is not one of a sequence in flight. Returns the victims, the
        sequence itself perhaps among them.
        """
        victims: list[Sequence] = []
        while self.free_block_count < 1:
            if self._awaited_block_count < self.swap.leaving_block_count:
                self._awaited_block_count += 1  # one of those that are being copied will do: it skips a step
                return victims
            victim = self._victim()
            if victim.step_id > completed_step_id:
                return victims
            if self.swap.takes(victim):
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
        """Sequences that may have to give way."""
        return [*self.running, *self.suspended.kept] if self.suspended.arrived else self.running

    def _victim(self) -> Sequence:
        """The sequence, of all candidates, that gives way first."""
        candidates = self._candidates
        views = [VictimView(s.rank, s.arrival, s.reserved_block_count, s.computed_tokens) for s in candidates]
        return candidates[choose_victim(views)]

    def shed(self, at_s: float, completed_step_id: int) -> list[Sequence]:
        """Preempt until all is within what there is, or until the next victim is one in flight."""
        victims: list[Sequence] = []
        while not self.settled and self._candidates:
            victim = self._victim()
            if victim.step_id > completed_step_id:
                break
            self._preempt(victim, at_s, "the group has become smaller")
            victims.append(victim)
        return victims

    def _settle_swaps(self, at_s: float) -> tuple[Sequence, ...]:
        """What the copies of the last step have brought. Returns those whose blocks on the device are free."""
        left, back = self.swap.settle()
        for sequence in left:
            self._reserve(sequence, -sequence.reserved_block_count)
            self.turned.append(sequence)
            sequence.note(at_s, "its KV is in host memory")
        for sequence in back:
            self._run(sequence, 0, at_s, "its KV is back")
        return tuple(left)

    def _leave_ahead(self, at_s: float, completed_step_id: int) -> None:
        """What will have to give way within the time that copying its KV takes leaves now, and nothing has to wait."""
        while len(self.running) > 1:
            victim = self._victim()
            if victim.step_id > completed_step_id:
                return
            batches = -(-victim.reserved_block_count // self.swap.budget_blocks)
            ahead_tokens = min(-(-batches // self.stage_count), self.block_tokens)
            growing = sum(s.token_count + ahead_tokens > s.reserved_tokens for s in self.running if s is not victim)
            soon_free = self.free_block_count + self.swap.leaving_block_count - self._awaited_block_count
            if growing <= soon_free or not self.swap.takes(victim):
                return
            self._swap_out(victim, at_s, "the cache is about to be full")

    def _swap_out(self, victim: Sequence, at_s: float, why: str) -> None:
        self.running.remove(victim)
        self.preemptions_total += 1
        victim.move(SequenceState.SWAPPED, at_s, f"preempted, {why}")
        self.swap.leave(victim)

    def forget_swapped(self, at_s: float, why: str, who: Container[SequenceId] | None = None) -> list[Sequence]:
        """They, or those named, are computed anew: the group changes, and with it whose KV is where."""
        lost = [s for s in self.swap.sequences if who is None or s.sequence_id in who]
        for sequence in lost:
            self.swap.forget(sequence)
            self._recompute(sequence, at_s, why)
        return lost

    def _preempt(self, victim: Sequence, at_s: float, why: str) -> None:
        self.preemptions_total += 1
        self.start_over(victim, at_s, f"preempted, {why}")

    def _recompute(self, sequence: Sequence, at_s: float, why: str) -> None:
        self._reserve(sequence, -sequence.reserved_block_count)
        sequence.computed_tokens = sequence.dispatched_tokens = 0
        sequence.may_overfill = True
        sequence.move(SequenceState.WAITING, at_s, why)
        self.turned.append(sequence)
        self.enqueue(sequence)

    def start_over(self, sequence: Sequence, at_s: float, why: str) -> None:
        """A running sequence, of which nothing is in flight, waits again, with nothing computed."""
        if sequence.snapshot is not None:
            self.suspended.forget_kv(sequence, at_s, why)
            return
        self.running.remove(sequence)
        self._recompute(sequence, at_s, why)

    # ---------------------------------------------------------------- KV on its way

    def suspend(self, sequence: Sequence, at_s: float, *, waits: bool = False) -> None:
        """It runs, or is KV without a request."""
        if sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
        self.suspended.add(sequence, at_s, travels=True, waits=waits)

    def resume(self, sequence: Sequence, at_s: float) -> None:
        """All its KV is here."""
        if self.suspended.complete(sequence, at_s):
            self._run(sequence, 0, at_s, "its KV is complete")

    def bind(self, kept: Sequence, request: Sequence, at_s: float) -> None:
        """The request of that KV is here, under its id. Room is made afterwards, if need be, by `shed`."""
        if self.suspended.bind(kept, request, at_s):
            self.resume(request, at_s)

    def lose(self, sequence: Sequence, at_s: float) -> None:
        """It loses its KV, suspended or running."""
        if sequence.snapshot is not None:
            self.suspended.forget_kv(sequence, at_s, "its KV is lost")
            return
        if sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
        else:
            self.suspended.leave(sequence)
        self._recompute(sequence, at_s, "its KV is lost")

    # ---------------------------------------------------------------- inspector

    def check(self, completed_step_id: int) -> None:
        """Raise InvariantViolation unless counts equal sums, orders hold and every sequence has what it needs."""
        victim = self._victim() if self._candidates and not self.settled else None
        if victim is not None and victim.step_id <= completed_step_id:
            raise InvariantViolation(
                f"{self.reserved_block_count} of {self.block_count} blocks are reserved, {self.running_count} of"
                f" {self.max_running_count} sequences run"
            )
        waiting = self.waiting
        held = [*self.running, *self.suspended.values(), *self.swap.holders]
        self.swap.check()
        self.suspended.check()
        for what, have, want in (
            ("waiting_count", self.waiting_count, len(waiting)),
            ("waiting_tokens", self.waiting_tokens, sum(s.token_count for s in waiting)),
            ("waiting_block_count", self.waiting_block_count, sum(self.need(s) for s in waiting)),
            ("reserved_block_count", self.reserved_block_count, sum(s.reserved_block_count for s in held)),
        ):
            if have != want:
                raise InvariantViolation(f"{what} is {have}, the sum is {want}")
        bound = self._limits.max_waiting_count
        if sum(not s.may_overfill for s in waiting) > bound:
            raise InvariantViolation(f"{len(waiting)} sequences wait, {bound} may")
        for sequences in (self.running, waiting):
            if [_order(s) for s in sequences] != sorted(_order(s) for s in sequences):
                raise InvariantViolation(f"out of order: {[_order(s) for s in sequences]}")
        for sequence in self.running:
            sequence.check_running(self.block_tokens)
        for sequence in waiting:
            sequence.check_waiting()
