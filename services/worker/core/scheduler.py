"""Decides by counts which sequences run: waiting line, KV reservations, preemption.

It knows how many blocks there are (in a pipeline the minimum over the stages) and how many each running sequence has
reserved, and no block id: every stage keeps its own tables (`core.blocks.BlockBook`) and can cover whatever the counts
allow.

Order of service is (class, arrival). A running online sequence is not preempted for a waiting one, whatever their
classes; classes decide who is admitted first and who gives way when the cache is full. Offline ones give way to all
online ones, and what they hold counts as free for these (`core.offline`).

With several batches in flight, a sequence that is in one of them can be neither scheduled nor preempted. Who needs
the block of such a one skips a batch; as it comes before its victim in the order of service, it is the first to get
the block when the victim has landed.
"""

import bisect
from collections.abc import Container
from dataclasses import replace

from ballast.common.errors import InvariantViolation
from ballast.common.record import record
from services.worker.core.batch import BlockNumber, SequenceId
from services.worker.core.batch_former import BatchFormer, Plan
from services.worker.core.blocks import blocks_for
from services.worker.core.limits import WorkerLimits
from services.worker.core.line import OFFLINE_RANK, WaitingLine, order
from services.worker.core.offline import OfflineWork
from services.worker.core.prefixes import PrefixIndex
from services.worker.core.sequence import Sequence, SequenceState
from services.worker.core.suspended import Suspended
from services.worker.core.swapping import SwapOrders, SwapSpace
from services.worker.policy.admission import AdmissionView, admits, most_prompt_tokens, reserved
from services.worker.policy.harvest import Harvest
from services.worker.policy.microbatching import Microbatching, by_token_count
from services.worker.policy.preemption import VictimView, choose_victim
from services.worker.policy.token_target import Decoders, TokenTarget


@record()
class SchedulingPolicies:
    """What a scheduler decides by."""

    microbatching: Microbatching = by_token_count  # forms the batches of a group of several stages
    target: TokenTarget | None = None  # what a token may take
    harvest: Harvest = Harvest()  # by what offline work is bounded


def _rank(sequence: Sequence) -> int:
    return sequence.rank


class Scheduler:
    def __init__(
        self,
        limits: WorkerLimits,
        block_count: int,
        policies: SchedulingPolicies | None = None,
        first_number: BlockNumber = 0,
    ) -> None:
        """Numbers of blocks follow on `first_number`."""
        policies = SchedulingPolicies() if policies is None else policies
        self._limits = limits
        self.block_tokens = limits.block_tokens
        self.former = BatchFormer(limits, policies.microbatching)
        self.block_count = block_count
        self.lent_block_count = 0
        self.expected_block_count = 0  # for sequences that come from other leaders, and
        self.expected_count = 0  # so many of these
        self.ceiling_block_count = block_count  # that there are, or may be soon
        self.admission_limit: int | None = None  # blocks; nothing new above it
        self.target = policies.target  # nothing new that would make tokens take longer
        self.stage_count = 1
        self.reserved_block_count = 0
        self.running: list[Sequence] = []  # in order of service
        self.suspended = Suspended(limits.block_tokens, self._reserve)
        self.line = WaitingLine()
        self.prefixes = PrefixIndex(limits, first_number)
        self.preemptions_total = 0
        self.turned: list[Sequence] = []  # let in, or put back into the line, since somebody looked
        self._awaited_block_count = 0  # blocks about to be free, for which sequences skip a step
        self.offline_work = OfflineWork(limits, policies.harvest)
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
        """Tokens of running online prompts in no batch yet. A long one counts as a full batch: another may come beside
        it.
        """
        most = self._limits.max_batch_tokens
        left = [s.token_count - max(s.computed_tokens, s.dispatched_tokens) for s in self.online]
        return sum([min(count, most) for count in left if count > 1])

    @property
    def online(self) -> list[Sequence]:
        """Online sequences that run, in order of service."""
        running = self.running
        if not running or running[-1].rank != OFFLINE_RANK:
            return running
        return running[: bisect.bisect_left(running, OFFLINE_RANK, key=_rank)]

    @property
    def offline(self) -> list[Sequence]:
        """Offline sequences that run, by arrival."""
        running = self.running
        if not running or running[-1].rank != OFFLINE_RANK:
            return []
        return running[bisect.bisect_left(running, OFFLINE_RANK, key=_rank) :]

    @property
    def offline_block_count(self) -> int:
        """Blocks that only offline sequences hold. Online ones get them when they need them."""
        return self.prefixes.freed_count(self.offline)

    @property
    def wanted_by_waiting(self) -> tuple[int, int]:
        """Blocks, and tokens to be computed, that waiting online sequences want: what they share counts once."""
        return self.prefixes.wanted([(s, self.need(s)) for s in self.line.all_online])

    @property
    def offline_wanted_tokens(self) -> int:
        """Prompt tokens of more offline sequences that it could begin."""
        if self.line.offline_count or not self._takes_offline:
            return 0
        return self.offline_work.wanted_tokens(self.offline)

    @property
    def _takes_offline(self) -> bool:
        """Whether offline sequences may be let in: no online one waits, and the group is not about to change."""
        return not (
            self.line.count or len(self.swap.away) or self.offline_work.paused or self.admission_limit is not None
        )

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
        count = self.running_count + self.expected_count - len(self.offline)
        block_count = self.reserved_block_count + self.prefixes.shared_count + self.expected_block_count
        block_count -= sum([s.reserved_block_count for s in self.offline])
        token_count = block_count * self.block_tokens  # that a batch reads
        return self.target.place_count(Decoders(count, token_count, self.stage_count), self.max_running_count)

    @property
    def max_in_flight_count(self) -> int:
        """Batches."""
        ahead = self.stage_count > 1 and self.line.count > 0
        return self.stage_count + self.former.ahead_count if ahead else self.stage_count

    @property
    def ceiling_tokens(self) -> int:
        """Tokens of the longest sequence that the whole cache can hold, or will be able to."""
        return self.ceiling_block_count * self.block_tokens

    @property
    def decides_nothing(self) -> bool:
        """Whether the next plan lets nothing in and puts nothing off, if no block is lacking: everything runs on."""
        if self.stage_count > 1 or not self.running or self.suspended or self.swap.enabled:
            return False
        if self.line.offline_count or self.offline:
            return False
        head = self._head()
        return self.settled and not (head is not None and self._lets_in(head, 0))

    @property
    def running_count(self) -> int:
        returning_count = self.swap.returning_count if len(self.swap) else 0
        return len(self.running) + len(self.suspended) + returning_count

    @property
    def waiting(self) -> list[Sequence]:
        """Sequences that wait, in order of service."""
        return list(self.line)

    @property
    def settled(self) -> bool:
        """Whether what is reserved and what runs is within what there is."""
        return self.free_block_count >= 0 and self.running_count <= self.max_running_count

    def resize(self, block_count: int, lent_block_count: int, before_block_count: int = 0) -> None:
        """Of what there was before there may be that much again soon: what needs it waits, and is not too big."""
        self.ceiling_block_count = max(block_count, before_block_count)
        self.block_count = block_count
        self.lent_block_count = lent_block_count

    def has_ready(self, completed_step_id: int) -> bool:
        """Whether the next plan may have something to run. None of it is certain: it may lack blocks, and only some
        microbatchings let a prompt go on while a part of it is in flight.
        """
        for sequence in self.running:
            if sequence.step_id <= completed_step_id:
                return True
            if sequence.dispatched_tokens < sequence.token_count and sequence.rank != OFFLINE_RANK:
                return True
        head, offline = self._head(), self.line.offline
        if self.swap.has_copies or (head is not None and self._lets_in(head, completed_step_id)):
            return True
        return offline is not None and (self.too_big(offline) or self._lets_offline_in(offline))

    # ---------------------------------------------------------------- waiting

    def admit(self, at_s: float, completed_step_id: int, *, offline: bool = True) -> list[Sequence]:
        """Let the head of the line in while it fits. Nothing overtakes it: it would starve. Returns the offline
        sequences that have yielded; those in a batch after `completed_step_id` cannot. `offline`: ones of these may be
        let in.
        """
        yielded: list[Sequence] = []
        if not self.line.count and not self.line.offline_count and not len(self.swap):
            return yielded
        while (sequence := self._head()) is not None:
            if not self._lets_in(sequence, completed_step_id):
                return yielded
            while self._cost(sequence) > self.free_block_count or self.running_count >= self.max_running_count:
                victim = self._victim(completed_step_id)
                self._preempt(victim, at_s, f"{sequence.name} is let in")
                yielded.append(victim)
            if sequence.state is SequenceState.SWAPPED:
                self._reserve(sequence, self.need(sequence))
                self.swap.come_back(sequence)
                self.turned.append(sequence)
                sequence.note(at_s, "its KV comes back")
            else:
                self._let_in(sequence, at_s)
        while offline and not yielded and (sequence := self.line.offline) and self._lets_offline_in(sequence):
            self._let_in(sequence, at_s)
        return yielded

    def _let_in(self, sequence: Sequence, at_s: float) -> None:
        free_count, need = self.free_block_count, self.need(sequence)
        self.line.remove(sequence)
        shared_count = self.prefixes.take(sequence)
        self.reserved_block_count -= shared_count
        self._run(sequence, need, at_s, f"{need - shared_count} of {free_count} free blocks, {shared_count} shared")

    def _cost(self, sequence: Sequence, without: list[Sequence] | None = None) -> int:
        """Blocks that it needs and no other sequence holds; those `without` are about to hold none."""
        need = self.need(sequence)
        if sequence.state is SequenceState.SWAPPED or not (numbers := self.prefixes.match(sequence)):
            return need
        return need - self.prefixes.held_count(numbers, without)

    def _lets_offline_in(self, sequence: Sequence) -> bool:
        """Nothing yields to it, and a share of the blocks is left for the growth of what runs."""
        if not self._takes_offline or self.running_count + self.expected_count >= self.max_running_count:
            return False
        kept = reserved(self.block_count, self._limits.admission_reserve_fraction) if self.running_count else 0
        if self._cost(sequence) + kept > self.free_block_count:
            return False
        return self.offline_work.wanted_tokens(self.offline) > 0

    def why_no_room(self, block_count: int, *, new: bool) -> str:
        """Why a sequence of another leader cannot come, or (not `new`) go on coming, with so many blocks more."""
        offline = self.offline
        free_count = self.free_block_count + self.prefixes.freed_count(offline)
        if self._admits(block_count, offline) if new else block_count <= free_count:
            return ""
        return (
            f"{free_count} of {self.block_count} blocks are free, {block_count} are needed;"
            f" {self.running_count - len(offline)} of {self.place_count} sequences run"
        )

    def _lets_in(self, sequence: Sequence, completed_step_id: int) -> bool:
        """There is room for it, and its tokens would be computed soon. One whose KV comes back has few. Room is what
        is free, and what offline sequences hold that are in no batch after `completed_step_id`.
        """
        if sequence.state is not SequenceState.SWAPPED and self.prompt_tokens >= self.max_prompt_tokens:
            return False
        offline = [s for s in self.offline if s.step_id <= completed_step_id]
        return self._admits(self._cost(sequence, offline), offline)

    def _lacks_room(self) -> bool:
        """Whether what waits would not fit; else it waits only until prompts that came before it are computed."""
        head, offline = self._head() if self.line.count else None, self.offline
        return head is not None and not self._admits(self._cost(head, offline), offline)

    def _admits(self, need_block_count: int, offline: list[Sequence]) -> bool:
        """What these offline sequences hold counts as free."""
        block_count = self._limited_block_count
        lent_count = self.prefixes.freed_count(offline) if offline else 0
        view = AdmissionView(
            block_count,
            block_count - self.block_count + self.free_block_count + lent_count,
            self.running_count + self.expected_count - len(offline),
            self.place_count,
        )
        return admits(view, need_block_count, self._limits.admission_reserve_fraction)

    def _run(self, sequence: Sequence, added_block_count: int, at_s: float, why: str) -> None:
        sequence.move(SequenceState.RUNNING, at_s, why)
        if not sequence.in_engine:
            sequence.enter_engine()
        if sequence.preempted:
            self.turned.append(sequence)
        self._reserve(sequence, added_block_count)
        bisect.insort(self.running, sequence, key=order)

    def _head(self) -> Sequence | None:
        """The online sequence that is first in the order of service, of those that wait and those swapped out."""
        waiting = self.line.online
        away = min(self.swap.away, key=order, default=None) if len(self.swap) else None
        if waiting is None or away is None:
            return waiting or away
        return min(waiting, away, key=order)

    def need(self, sequence: Sequence) -> int:
        """Blocks for all its tokens and the next one. Less by that one only where the cache ends."""
        with_next = blocks_for(sequence.token_count + 1, self.block_tokens)
        return min(with_next, max(self.block_count, blocks_for(sequence.token_count, self.block_tokens)))

    # ---------------------------------------------------------------- running

    def release(self, sequence: Sequence, *, kept: bool = True) -> None:
        """The sequence leaves (its state has not changed yet). `kept`: its KV is good, and may be retained."""
        match sequence.state:
            case SequenceState.WAITING:
                self.line.remove(sequence)
            case SequenceState.RUNNING:
                self.running.remove(sequence)
                self._unreserve(sequence, kept=kept)
            case SequenceState.SWAPPED:
                self._unreserve(sequence, kept=False)
                self.swap.forget(sequence)
            case _:
                self.suspended.let_go(sequence)

    def _reserve(self, sequence: Sequence, added_block_count: int) -> None:
        self.reserved_block_count += added_block_count
        sequence.reserved_block_count += added_block_count
        sequence.reserved_tokens = sequence.reserved_block_count * self.block_tokens

    def _unreserve(self, sequence: Sequence, *, kept: bool) -> None:
        """It holds nothing any more. `kept`: what it has computed is good, and may be retained."""
        if kept:
            self.prefixes.name(sequence)
        self.reserved_block_count += self.prefixes.leave(sequence, kept=kept)
        self._reserve(sequence, -sequence.reserved_block_count)

    def fit_prefixes(self, wanted_block_count: int = 0) -> None:
        """No more is retained than there is room for beside `wanted_block_count`; nothing while KV waits for room."""
        if self.prefixes.retained_count:
            waits = self.lent_block_count or self.suspended.without_blocks
            self.prefixes.fit(0 if waits else self.free_block_count - wanted_block_count)

    def forget_prefixes(self) -> None:
        """All stages forget all numbers, each by itself. Who shares blocks needs as many of its own elsewhere."""
        self.reserved_block_count += self.prefixes.forget_all(self.running)

    def stranded(self) -> list[Sequence]:
        """Sequences that have outgrown the whole cache, to be ended before the next plan: no victim helps. All that
        run; of those that wait the offline one that is first, which may have yielded at that very moment.
        """
        ceiling_tokens = self.ceiling_tokens
        found = [s for s in self.running if s.token_count > ceiling_tokens]
        offline = self.line.offline
        return [*found, offline] if offline is not None and offline.token_count > ceiling_tokens else found

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
        preempted += self.admit(at_s, completed_step_id, offline=not (preempted and self.running))
        self.prefixes.begin()
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
            all_ready = not (in_flight_count or len(self.swap))
            decodes, chunks = self.former.batch(self.online, completed_step_id, all_ready=all_ready)
        plan = Plan(decodes, chunks, preempted)
        self.fit_prefixes()
        if offline := self.offline:
            self._fill(plan, offline, completed_step_id, in_flight_count)
        busy = bool(plan.decodes or plan.chunks)
        if len(self.swap) and (busy or not in_flight_count):  # alone, copies would hold up what is in flight
            return replace(plan, swaps=self.swap.order(left, busy=busy))
        return replace(plan, swaps=SwapOrders(left)) if left else plan

    def _fill(self, plan: Plan, offline: list[Sequence], completed_step_id: int, in_flight_count: int) -> None:
        """Offline sequences go along, as far as the batch has room for them."""
        self.offline_work.fill(
            plan.decodes,
            plan.chunks,
            [s for s in offline if s.step_id <= completed_step_id and s.token_count <= s.reserved_tokens],
            stage_count=self.stage_count,
            in_flight_count=in_flight_count,
            prefill_limit=self.former.prefill_limit,
            online_in_flight=in_flight_count > 0 and any(s.step_id > completed_step_id for s in self.online),
        )

    def _make_room(self, sequence: Sequence, at_s: float, completed_step_id: int) -> list[Sequence]:
        """Reserve the block for the next token, if it is not one of a sequence in flight. Returns the victims, the
        sequence itself perhaps among them.
        """
        victims: list[Sequence] = []
        while self.free_block_count < 1:
            if self._awaited_block_count < self.swap.leaving_block_count:
                self._awaited_block_count += 1  # one of those that are being copied will do: it skips a step
                return victims
            victim = self._victim(completed_step_id)
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
        """Sequences that may have to give way."""
        return [*self.running, *self.suspended.kept] if self.suspended.arrived else self.running

    def _victim(self, completed_step_id: int) -> Sequence:
        """The sequence, of all candidates, that gives way first: of offline ones that run the newest in no batch; one
        in a batch only if all are.
        """
        if offline := self.offline:
            return next((s for s in reversed(offline) if s.step_id <= completed_step_id), offline[-1])
        candidates = self._candidates
        views = [VictimView(s.rank, s.arrival, s.reserved_block_count, s.computed_tokens) for s in candidates]
        return candidates[choose_victim(views)]

    def shed(self, at_s: float, completed_step_id: int) -> list[Sequence]:
        """Preempt until all is within what there is, or the next victim is in flight."""
        victims: list[Sequence] = []
        while not self.settled and self._candidates:
            victim = self._victim(completed_step_id)
            if victim.step_id > completed_step_id:
                break
            self._preempt(victim, at_s, "the group has become smaller")
            victims.append(victim)
        return victims

    def _settle_swaps(self, at_s: float) -> tuple[Sequence, ...]:
        """What the copies of the last step have brought. Returns those whose blocks on the device are free."""
        left, back = self.swap.settle()
        for sequence in left:
            self._unreserve(sequence, kept=True)
            self.turned.append(sequence)
            sequence.note(at_s, "its KV is in host memory")
        for sequence in back:
            self._run(sequence, 0, at_s, "its KV is back")
        return tuple(left)

    def _leave_ahead(self, at_s: float, completed_step_id: int) -> None:
        """What will have to give way within the time that copying its KV takes leaves now, and nothing has to wait."""
        while len(self.running) > 1 and not self.offline:
            victim = self._victim(completed_step_id)
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
        if victim.rank == OFFLINE_RANK:
            self.offline_work.note_yield(victim)
        else:
            self.preemptions_total += 1
        self.start_over(victim, at_s, f"preempted, {why}")

    def _recompute(self, sequence: Sequence, at_s: float, why: str, *, kept: bool = False) -> None:
        self._unreserve(sequence, kept=kept)
        sequence.computed_tokens = sequence.dispatched_tokens = 0
        sequence.may_overfill = True
        sequence.move(SequenceState.WAITING, at_s, why)
        self.turned.append(sequence)
        self.line.add(sequence)

    def start_over(self, sequence: Sequence, at_s: float, why: str) -> None:
        """A running sequence, of which nothing is in flight, waits again. What it has computed is retained."""
        if sequence.snapshot is not None:
            self.suspended.forget_kv(sequence, at_s, why)
            return
        self.running.remove(sequence)
        self._recompute(sequence, at_s, why, kept=True)

    # ---------------------------------------------------------------- KV on its way

    def suspend(self, sequence: Sequence, at_s: float, *, waits: bool = False) -> None:
        """It runs, or is KV without a request."""
        if sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
            self.reserved_block_count += self.prefixes.leave(sequence, kept=False)
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
        victim = self._victim(completed_step_id) if self._candidates and not self.settled else None
        if victim is not None and victim.step_id <= completed_step_id:
            raise InvariantViolation(
                f"{self.reserved_block_count} of {self.block_count} blocks are reserved, {self.running_count} of"
                f" {self.max_running_count} sequences run"
            )
        waiting = self.waiting
        held = [*self.running, *self.suspended.values(), *self.swap.holders]
        self.swap.check()
        self.line.check()
        self.suspended.check()
        reserved_count = sum(s.reserved_block_count for s in held) - self.prefixes.shared_count
        if self.reserved_block_count != reserved_count:
            raise InvariantViolation(f"{self.reserved_block_count} blocks are reserved, the sum is {reserved_count}")
        bound = self._limits.max_waiting_count
        bounded = [s.rank == OFFLINE_RANK for s in waiting if not s.may_overfill]
        if max(sum(bounded), len(bounded) - sum(bounded)) > bound:
            raise InvariantViolation(f"{len(waiting)} sequences wait, {bound} online ones and as many offline may")
        if [order(s) for s in self.running] != sorted(order(s) for s in self.running):
            raise InvariantViolation(f"out of order: {[order(s) for s in self.running]}")
        for sequence in self.running:
            sequence.check_running(self.block_tokens)
