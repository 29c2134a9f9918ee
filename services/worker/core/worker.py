"""The deciding half of a worker: requests in, batches and tokens out.

Owns every sequence from its submission to its one ending, or until another leader takes it over. Knows no clock, no
thread, no tensor. Whoever drives it calls `handle` from one thread, asks for a batch when the first stage is free, and
reports the steps in their order.

A sequence that can never run is turned away at once. One that has outgrown the whole KV cache while it ran ends with
ERROR and not with LENGTH: a cut answer must not look complete, and a larger group may go on with it.
"""

import sys
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

from ballast.common.errors import InvariantViolation
from ballast.common.load import LoadReport, MemoryReport
from ballast.common.sampling import FinishReason
from services.worker.core.batch import SequenceId, TokenLogprobs
from services.worker.core.blocks import BlockBook, blocks_for
from services.worker.core.events import (
    Aborted,
    BatchWanted,
    BlocksAdded,
    CapacityChanged,
    Command,
    Drained,
    DrainRequested,
    Event,
    Execute,
    GroupLost,
    HandedOver,
    HandOver,
    Removed,
    RoleChanged,
    StepDone,
    StepFailed,
    StreamClosed,
    StreamOpened,
    StreamsLost,
    Submitted,
    Tick,
    WithdrawnTooLate,
)
from services.worker.core.flights import Flight, Flights
from services.worker.core.group import ANOTHER_LEADS, Group
from services.worker.core.handover import stop_rule
from services.worker.core.intake import fault_of, with_seed
from services.worker.core.limits import WorkerLimits
from services.worker.core.plain import PlainSteps, foresee, take
from services.worker.core.residents import Residents, Stream
from services.worker.core.scheduler import Scheduler
from services.worker.core.sequence import Sequence, SequenceState
from services.worker.policy.departure import Decoding
from services.worker.policy.microbatching import Microbatching, by_token_count
from services.worker.policy.placement import PlacementView


@dataclass(frozen=True, slots=True)
class Totals:
    """Since the start of the worker."""

    steps: int
    preemptions: int
    prompt_tokens: int  # of prompts that got their first token
    generation_tokens: int
    endings: Mapping[FinishReason, int]
    refused: int
    stale_events: int  # of closed streams, repeated or unknown handles or ids
    adopted: int  # sequences of other leaders
    moved: int  # to other leaders


class WorkerCore:
    def __init__(
        self,
        limits: WorkerLimits,
        block_count: int,
        *,
        book: BlockBook | None = None,
        first_sequence_id: int = 0,
        microbatching: Microbatching = by_token_count,
    ) -> None:
        """`block_count`: of the smallest stage. `book`: the tables of this worker's own stage, which outlive its being
        a leader; without one, the core is that of a lone worker and keeps its own. Ids follow on `first_sequence_id`.
        `microbatching` forms the batches of a group of several stages.
        """
        self._limits = limits
        self._keeps_book = book is None
        self._book = BlockBook(block_count, limits.block_tokens) if book is None else book
        self._scheduler = Scheduler(limits, block_count, microbatching)
        self._flights = Flights(self._book)
        self._residents = Residents(limits, self._scheduler, self._flights)
        self._group = Group(limits, self._residents, self._scheduler, self._flights)
        self._outbox = self._residents.outbox
        self._first_sequence_id = self._last_sequence_id = first_sequence_id
        self._draining = False
        self._drained = False
        self._progress_at_s = 0.0  # last completed step, or end of the last idle time
        self._steps_total = 0
        self._prompt_tokens_total = 0
        self._generation_tokens_total = 0
        self._stale_events_total = 0
        self._withdrawn_too_late: SequenceId | None = None

    # ---------------------------------------------------------------- the one door

    def handle(self, event: Event) -> list[Command]:
        """News for dispatchers comes first in the answer, Execute last. Stale events are counted, nothing else."""
        if not self._busy:
            self._progress_at_s = event.at_s
        execute: Execute | Removed | None = None
        handed_over: HandedOver | None = None
        lost = isinstance(event, GroupLost)
        match event:
            case BatchWanted():
                execute = self._form(event.at_s)
            case StepDone():
                self._step_done(event)
            case Submitted():
                self._submit(event)
            case Aborted():
                self._abort(event)
            case Tick():
                self._expire(event.at_s)
            case StreamOpened():
                self._residents.streams.setdefault(event.stream_id, Stream())
            case StreamClosed():
                self._close(event)
            case StepFailed():
                self._step_failed(event)
            case DrainRequested():
                self._draining = True
            case BlocksAdded():
                self._scheduler.resize(self._scheduler.block_count + event.block_count, 0)
                self._book.grow(event.block_count)
            case GroupLost():
                self._residents.abandon(event.at_s)
            case HandOver():
                handed_over = self._group.hand_over(event)
            case _:
                self._group.handle(event)
        commands: list[Command] = [*self._outbox.take(self._seen_handle)]
        if self._flights.to_remove and (not self._busy or isinstance(event, _TELLS_REMOVED)):
            commands.append(self._flights.tell_removed())
        if handed_over is not None:
            commands.append(handed_over)
        if self._withdrawn_too_late is not None:
            commands.append(WithdrawnTooLate(self._withdrawn_too_late))
            self._withdrawn_too_late = None
        if self._draining and not self._drained and self._empty:
            self._drained = True
            commands.append(Drained())
        if lost:
            commands.append(StreamsLost())
        if execute is not None:
            commands.append(execute)
        return commands

    @property
    def _busy(self) -> bool:
        """A step runs, or one could."""
        return bool(self._flights) or self._scheduler.has_ready(self._flights.landed_step_id)

    @property
    def _empty(self) -> bool:
        residents = self._residents
        return not (residents.live or residents.orphans or self._scheduler.suspended or self._flights)

    # ---------------------------------------------------------------- what the outside may look at

    @property
    def has_work(self) -> bool:
        """Whether a batch may be asked for. While others are in flight there may yet be none to give."""
        scheduler, flights = self._scheduler, self._flights
        return len(flights) < scheduler.max_in_flight_count and scheduler.has_ready(flights.landed_step_id)

    @property
    def in_flight_count(self) -> int:
        return len(self._flights)

    @property
    def landed_step_id(self) -> int:
        """Of the last batch that has."""
        return self._flights.landed_step_id

    @property
    def departed_step_id(self) -> int:
        """Of the last batch that is in flight, or has landed."""
        return self._flights.departed_step_id

    @property
    def settled(self) -> bool:
        """Whether all that is held is within the group's capacity, and the stages know of all that is not."""
        return self._scheduler.settled and not self._flights.to_remove

    @property
    def sequence_ids(self) -> tuple[SequenceId, ...]:
        """Of all sequences that are alive here."""
        return tuple(self._residents.live)

    @property
    def suspended_ids(self) -> tuple[SequenceId, ...]:
        """Of those whose KV is on its way; some may have ended meanwhile."""
        return tuple(self._scheduler.suspended)

    @property
    def orphan_count(self) -> int:
        """Sequences that no dispatcher has claimed since they were handed over."""
        return len(self._residents.orphans)

    @property
    def kv_tokens(self) -> dict[SequenceId, int]:
        """Of each sequence with KV on the stages, for how many of its tokens: what has to travel when layers move."""
        scheduler = self._scheduler
        held = (*scheduler.running, *scheduler.suspended.values())
        return {s.sequence_id: s.computed_tokens for s in held if s.computed_tokens}

    def decoding(self) -> tuple[Decoding, ...]:
        """The sequences that are past their prompts and could go on elsewhere: those of dispatchers, no orphans."""
        return tuple(
            Decoding(s.sequence_id, s.rank, s.token_count, s.reserved_block_count)
            for s in self._scheduler.running
            if s.unsent is None and s.token_count - s.computed_tokens == 1 and s.output_token_ids
        )

    def running_kv_tokens(self, sequence_id: SequenceId) -> int | None:
        """Of a sequence that runs: how many of its tokens have KV."""
        sequence = self._residents.live.get(sequence_id)
        if sequence is None or sequence.state is not SequenceState.RUNNING:
            return None
        return sequence.computed_tokens

    def why_no_room(self, block_count: int, *, new: bool) -> str:
        """Why a sequence of another leader that takes so many blocks more cannot come, or (not `new`) not go on coming;
        empty: it can.
        """
        if self._draining:
            return "this worker is draining"
        if block_count > self._book.free_count and self._flights.to_remove:  # who has left holds its blocks until then
            return f"{self._book.free_count} blocks are free before the next batch, {block_count} are needed"
        return self._scheduler.why_no_room(block_count, new=new)

    @property
    def first_sequence_id(self) -> SequenceId:
        """Where this worker's ids begin: the part of them that no other worker has."""
        return self._first_sequence_id

    @property
    def reserved_block_count(self) -> int:
        """Of all that has room on every stage."""
        return self._scheduler.reserved_block_count

    def weight(self, sequence_id: SequenceId) -> tuple[int, float, int]:
        """Rank of its class, instant of its arrival and the blocks that it needs, of a sequence with KV."""
        scheduler = self._scheduler
        sequence = scheduler.suspended.get(sequence_id) or self._residents.live[sequence_id]
        need_blocks = max(sequence.reserved_block_count, blocks_for(sequence.token_count, self._limits.block_tokens))
        return sequence.rank, sequence.arrival[0], need_blocks

    @property
    def wanted_block_count(self) -> int:
        """By all that runs, waits or is suspended."""
        return self._scheduler.reserved_block_count + self._scheduler.waiting_block_count

    @property
    def longest_token_count(self) -> int:
        """Of the sequences that run, wait or are suspended."""
        return self._scheduler.longest_token_count

    @property
    def memory_is_awaited(self) -> bool:
        """Requests have not been let in. Some may wait for a place in a batch, which more memory does not give them."""
        return self._scheduler.waiting_count > 0

    def placements(self) -> tuple[PlacementView, ...]:
        """What `policy.placement.place` needs to know of all that waits, runs or is suspended."""
        return self._group.placements()

    @property
    def next_deadline_at_s(self) -> float | None:
        """When a Tick is due at the latest. May be early: the sequence it belonged to may have ended."""
        return self._residents.next_deadline_at_s

    @property
    def totals(self) -> Totals:
        return Totals(
            self._steps_total,
            self._scheduler.preemptions_total,
            self._prompt_tokens_total,
            self._generation_tokens_total,
            dict(self._residents.endings_total),
            self._residents.refused_total,
            self._stale_events_total + self._group.stale_total,
            self._group.adopted_total,
            self._group.moved_total,
        )

    def load(self, at_s: float, memory: MemoryReport, newest_epoch: int = 0) -> LoadReport:
        """`newest_epoch`: of a transition that this worker has heard of."""
        scheduler = self._scheduler
        waiting_count, waiting_block_count = scheduler.waiting_count, scheduler.waiting_block_count
        if swapped_count := len(scheduler.swap):
            waiting_count += swapped_count - scheduler.swap.returning_count
            waiting_block_count += sum(scheduler.need(s) for s in scheduler.swap.away)
        return LoadReport(
            block_tokens=self._limits.block_tokens,
            block_count=scheduler.block_count,
            used_block_count=scheduler.block_count - scheduler.free_block_count,
            waiting_block_count=waiting_block_count,
            running_count=scheduler.running_count,
            waiting_count=waiting_count,
            max_running_count=scheduler.max_running_count,
            steps_total=self._steps_total,
            preemptions_total=scheduler.preemptions_total,
            prompt_tokens_total=self._prompt_tokens_total,
            generation_tokens_total=self._generation_tokens_total,
            step_age_s=max(0.0, at_s - self._progress_at_s) if self._busy else 0.0,
            draining=self._draining,
            memory=memory,
            newest_epoch=newest_epoch,
        )

    def story(self, sequence_id: SequenceId) -> list[str]:
        """What has happened to a live sequence; nothing about others."""
        sequence = self._residents.live.get(sequence_id)
        return [] if sequence is None else sequence.story()

    # ---------------------------------------------------------------- coming and going

    def _submit(self, event: Submitted) -> None:
        stream = self._residents.streams.get(event.key.stream_id)
        if stream is None or event.key.handle <= stream.seen_handle:
            self._stale_events_total += 1
            return
        stream.seen_handle = event.key.handle
        if self._group.claim(event):
            return
        may_hold = self._group.may_hold(event)
        # What is held may run in a larger group than this one is now.
        if fault := fault_of(event, self._limits, sys.maxsize if may_hold else self._scheduler.block_count):
            self._residents.turn_away(event.key, fault, invalid=True)
        elif not may_hold and (refusal := self._refusal(event)):
            self._residents.turn_away(event.key, refusal, invalid=False)
        else:
            self._accept(event, may_hold)

    def _seen_handle(self, stream_id: int) -> int:
        return self._residents.streams[stream_id].seen_handle

    def _refusal(self, event: Submitted) -> str:
        limits, scheduler = self._limits, self._scheduler
        token_count = len(event.prompt_token_ids) + len(event.output_token_ids)
        if self._draining:
            return "this worker is draining"
        if not self._group.leads:
            return ANOTHER_LEADS
        if scheduler.waiting_count >= limits.max_waiting_count:
            return f"{scheduler.waiting_count} requests are waiting, max_num_queued_reqs is {limits.max_waiting_count}"
        if scheduler.waiting_count and scheduler.waiting_tokens + token_count > limits.max_waiting_tokens:
            return (
                f"{scheduler.waiting_tokens} tokens are waiting, {token_count} more would exceed max_num_queued_tokens"
                f" {limits.max_waiting_tokens}"
            )
        return ""

    def _accept(self, event: Submitted, hold: bool) -> None:
        self._last_sequence_id += 1
        rule = stop_rule(event, self._limits, (event.output_text, event.delivered_text_chars, 0))
        sequence = Sequence(self._last_sequence_id, event, rule)
        sequence.sampling = with_seed(event.sampling)
        sequence.note(event.at_s, f"submitted: {sequence.token_count} tokens, class {event.priority.value}")
        self._residents.enter(sequence, event.at_s)
        if hold:
            self._group.hold(sequence, event)
        else:
            self._scheduler.enqueue(sequence)
        if event.output_token_ids:
            sequence.stop.resume(sequence.output_token_ids)
        if sequence.stop.finish_reason is not None:
            self._residents.end(sequence, event.at_s, sequence.stop.finish_reason)
        elif event.deadline_at_s is not None and event.deadline_at_s <= event.at_s:
            self._residents.end(sequence, event.at_s, FinishReason.DEADLINE)
        elif not hold:
            self._scheduler.admit(event.at_s)

    def _abort(self, event: Aborted) -> None:
        stream = self._residents.streams.get(event.key.stream_id)
        sequence = stream.live.get(event.key.handle) if stream else None
        if sequence is None:
            self._stale_events_total += 1
            self._withdrawn_too_late = self._residents.take_moved(event.key)
        else:
            self._residents.end(sequence, event.at_s, FinishReason.CANCELLED)

    def _close(self, event: StreamClosed) -> None:
        if event.stream_id in self._residents.streams:
            self._residents.close(event.stream_id, event.at_s)
        else:
            self._stale_events_total += 1

    def _expire(self, at_s: float) -> None:
        self._residents.expire(at_s)
        self._group.expire(at_s)

    # ---------------------------------------------------------------- steps

    def _form(self, at_s: float) -> Execute | Removed | None:
        flights = self._flights
        if len(flights) >= self._scheduler.max_in_flight_count:
            flights.demand_none("a batch is wanted")
        self._expire(at_s)
        for sequence in self._scheduler.stranded():
            self._residents.end_too_big(sequence, at_s)
        plan = self._scheduler.plan(at_s, flights.landed_step_id, len(flights))
        for sequence in plan.preempted:
            flights.forget(sequence)
        for sequence_id in plan.swaps.left:
            self._book.release(sequence_id)
        if plan.decodes or plan.chunks:
            execute = flights.depart(plan)
            copies = self._scheduler.swap.block_copies(plan.swaps.copies, self._book)
            return replace(execute, copies=copies) if copies else execute
        if not plan.swaps.copies:
            return None
        removed = flights.tell_removed()
        return replace(removed, copies=self._scheduler.swap.block_copies(plan.swaps.copies, self._book))

    def _step_done(self, event: StepDone) -> None:
        result, texts = event.result, event.texts
        flight = self._land(result.step_id, event.at_s)
        flight.check_result(result, len(texts))
        self._scheduler.swap.measured(result.execute_s, result.copy_s)
        at_s, token_ids, logprobs, ended = event.at_s, result.token_ids, result.logprobs, SequenceState.ENDED
        plain: dict[int, tuple[list[int], list[int]]] = {}  # stream -> handles, a token for each
        index = 0
        for sequence, computed_tokens, samples in flight.shares:
            if sequence.state is not ended:
                sequence.computed_tokens = computed_tokens
                if samples:
                    output = sequence.output_token_ids
                    if (
                        len(output) + 1 < sequence.stop.watched_from
                        and sequence.first_token_at_s is not None
                        and sequence.unsent is None
                        and logprobs[index] is None
                    ):
                        output.append(token_ids[index])
                        sequence.token_count += 1
                        stream_id, handle = sequence.key
                        news = plain.get(stream_id) or plain.setdefault(stream_id, ([], []))
                        news[0].append(handle)
                        news[1].append(token_ids[index])
                    else:
                        self._token(sequence, at_s, token_ids[index], texts[index], logprobs[index])
            index += samples
        for stream_id, (handles, ids) in plain.items():
            self._generation_tokens_total += len(ids)
            self._outbox.tokens(stream_id, handles, ids)
        self._group.shed(event.at_s)

    def _token(
        self, sequence: Sequence, at_s: float, token_id: int, delta: str, logprobs: TokenLogprobs | None
    ) -> None:
        stop = sequence.stop
        if sequence.first_token_at_s is None:
            sequence.first_token_at_s = at_s
            sequence.note(at_s, "first token")
            self._prompt_tokens_total += len(sequence.prompt_token_ids)
        self._generation_tokens_total += 1
        output_count = sequence.append(token_id)
        text = stop.take(token_id, output_count, delta) if output_count >= stop.watched_from else ""
        if sequence.unsent is None:
            self._outbox.token(sequence, token_id, text, logprobs)
        else:
            sequence.unsent.add(text, logprobs)
        if stop.finish_reason is not None:
            self._residents.end(sequence, at_s, stop.finish_reason)

    def _step_failed(self, event: StepFailed) -> None:
        for sequence, _, _ in self._land(event.step_id, event.at_s).shares:
            if sequence.state is not SequenceState.ENDED:
                error = f"step {event.step_id} failed: {event.why}"
                self._residents.end(sequence, event.at_s, FinishReason.ERROR, error)
        self._group.shed(event.at_s)

    def plain_steps(self) -> PlainSteps | None:
        """The steps that follow if nothing is told meanwhile and that only give tokens. None: there is none."""
        return foresee(self._scheduler, self._flights, self._residents)

    def take_plain_steps(self, plain: PlainSteps, token_ids: Iterable[Items[int]], count: int, at_s: float) -> None:
        """The first `count` of them have been run, the last at `at_s`, and their tokens (as many for each sequence)
        have been told to the dispatchers.
        """
        take(plain, token_ids, count, scheduler=self._scheduler, flights=self._flights, book=self._book)
        self._steps_total += count
        self._generation_tokens_total += count * len(plain.sequences)
        self._progress_at_s = at_s

    def _land(self, step_id: int, at_s: float) -> Flight:
        flight = self._flights.land(step_id)
        self._steps_total += 1
        self._progress_at_s = at_s
        return flight

    # ---------------------------------------------------------------- inspector

    def check(self) -> None:
        """Raise InvariantViolation unless the books balance. For tests and simulation: takes time linear in all."""
        self._scheduler.check(self._flights.landed_step_id)
        self._book.check()
        self._flights.check()
        self._residents.check()
        scheduler, residents = self._scheduler, self._residents
        suspended = sum(s.state is SequenceState.SUSPENDED for s in scheduler.suspended.values())
        scheduled = len(scheduler.running) + scheduler.waiting_count + suspended + len(residents.held)
        scheduled += len(scheduler.swap)
        if len(residents.live) != scheduled:
            raise InvariantViolation(f"{len(residents.live)} sequences live, {scheduled} are scheduled or held")
        holders = {s.sequence_id: s for s in (*scheduler.running, *scheduler.suspended.values())}
        returning = scheduler.swap.sequences  # and leaving, and away with blocks that the next batch frees
        if self._keeps_book:
            self._check_holders({*holders, *(s.sequence_id for s in returning), *self._flights.to_remove})
        for sequence_id, sequence in holders.items():
            if sequence_id not in scheduler.without_blocks:
                self._check_tables(sequence)

    def _check_holders(self, may_hold: set[SequenceId]) -> None:
        for sequence_id in self._book.sequence_ids:
            if sequence_id not in may_hold:
                raise InvariantViolation(f"sequence {sequence_id} holds blocks and does not run")

    def _check_tables(self, sequence: Sequence) -> None:
        table_count = len(self._book.table(sequence.sequence_id))
        if table_count > sequence.reserved_block_count:
            raise InvariantViolation(f"{sequence.name} holds {table_count} blocks", sequence.story())
        if blocks_for(sequence.computed_tokens, self._limits.block_tokens) > table_count:
            raise InvariantViolation(f"{sequence.name} has KV in no block", sequence.story())


# Events after which the stages must know what was removed, though no batch may follow for a while.
_TELLS_REMOVED = (CapacityChanged, HandOver, RoleChanged)
