"""The core of a worker: requests in, batches and tokens out.

The core owns every sequence from its submission until it ends or another leader takes it over. Its group's scheduler
(`core.group_scheduler`) decides which sequences run when. While a group dissolves there are two schedulers: one of the
current group, which takes new requests, and one of the draining group. No clock, no threads, no tensors. The caller
calls `handle` from one thread, requests a batch when the first stage is free, and reports steps in order.

A request that can never run is refused at once. A sequence that outgrows the whole KV cache ends with ERROR, not
LENGTH: a truncated answer must not look complete, and a larger group may continue it.
"""

import sys
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

from ballast.common.errors import InvariantViolation
from ballast.common.load import LoadReport, MemoryReport
from ballast.common.sampling import FinishReason
from services.worker.core.batch import SequenceId, TokenLogprobs
from services.worker.core.blocks import BlockBook
from services.worker.core.counts import SchedulingPolicies
from services.worker.core.events import (
    Aborted,
    Adopted,
    BatchesLost,
    BatchWanted,
    CapacityChanged,
    Command,
    DrainRequested,
    Event,
    Execute,
    GroupClosed,
    GroupLost,
    GroupOpened,
    HandedOver,
    HandOver,
    LeavingStopped,
    MovedOver,
    OfflinePaused,
    OfLeaving,
    Removed,
    RoleChanged,
    RoomWanted,
    StepDone,
    StepFailed,
    StepPreempted,
    StepsLost,
    StreamClosed,
    StreamOpened,
    StreamsLost,
    Submitted,
    Tick,
)
from services.worker.core.group_scheduler import GroupScheduler
from services.worker.core.handover import ANOTHER_LEADS, Handovers, stop_rule
from services.worker.core.in_flight import Steps
from services.worker.core.intake import fault_of, with_seed
from services.worker.core.limits import WorkerLimits
from services.worker.core.line import OFFLINE_RANK
from services.worker.core.plain import PlainSteps, foresee, take
from services.worker.core.report import IN_SERVICE, GroupTotals, Parks, ReportTotals, load_of
from services.worker.core.request_table import DispatcherStream, RequestTable
from services.worker.core.sequence import Sequence, SequenceState
from services.worker.policy.harvest import Harvest
from services.worker.policy.microbatching import Microbatching, by_token_count
from services.worker.policy.token_target import TokenTarget


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals since the start of the worker."""

    steps: int
    preemptions: int
    prompt_tokens: int  # tokens of prompts whose first output token has been sampled
    generation_tokens: int
    endings: Mapping[FinishReason, int]
    refused: int
    stale_events: int  # events of closed streams, or with repeated or unknown handles or ids
    adopted: int  # sequences taken over from other leaders
    moved: int  # sequences handed over to other leaders


class WorkerCore:
    def __init__(
        self,
        limits: WorkerLimits,
        block_count: int,
        *,
        book: BlockBook | None = None,
        first_sequence_id: int = 0,
        microbatching: Microbatching = by_token_count,
        target: TokenTarget | None = None,
        harvest: Harvest | None = None,
    ) -> None:
        """`block_count`, `book`: see `GroupScheduler`; the policies: see `SchedulingPolicies`. Sequence ids begin after
        `first_sequence_id`.
        """
        self._limits = limits
        self._request_table = request_table = RequestTable(limits)
        self._handovers = Handovers(limits, request_table)
        self._policies = SchedulingPolicies(microbatching, target, Harvest() if harvest is None else harvest)
        self._steps = Steps()
        self._first_sequence_id = self._last_sequence_id = first_sequence_id
        self._group_schedulers = [
            self._new_group_scheduler(block_count, book)
        ]  # the draining group's scheduler, if any; the current group's
        self._last_formed: GroupScheduler | None = None
        self._closed = GroupTotals()  # counters of groups that have ended
        self._stale_groups_total = 0  # stale events of groups that have ended
        self._outbox = request_table.outbox
        self._draining = False
        self._progress_at_s = 0.0  # last completed step, or end of the last idle time
        self._steps_total = 0
        self._prompt_tokens_total = 0
        self._generation_tokens_total = 0
        self._offline_tokens_total = 0  # tokens of offline prompts and answers
        self._stale_events_total = 0

    # ---------------------------------------------------------------- events

    def handle(self, event: Event) -> list[Command]:
        """Handle an event. Among the returned commands, output for dispatchers is first and Execute last. Stale events
        are only counted.
        """
        if not self._is_busy:
            self._progress_at_s = event.at_s
        group_scheduler = self.group_scheduler
        if isinstance(event, OfLeaving):
            event, group_scheduler = event.event, self._leaving()
        for each in self._group_schedulers:
            each.scheduler.prefixes.at_s = event.at_s
        execute: Execute | Removed | None = None
        handed_over: HandedOver | None = None
        lost, steps_lost = isinstance(event, GroupLost), tuple[int, ...]()
        match event:
            case BatchWanted():
                execute = self._form(event.at_s)
            case StepDone():
                self._step_done(self._group_scheduler_of(event.result.step_id), event)
            case Submitted():
                self._submit(group_scheduler, event)
            case Aborted():
                self._abort(event)
            case Tick():
                self._expire(event.at_s)
            case StreamOpened():
                self._request_table.streams.setdefault(event.stream_id, DispatcherStream())
                self._outbox.marks((event.stream_id,), self.group_scheduler.scheduler.prefixes.marks)
            case StreamClosed():
                self._close(event)
            case StepFailed():
                self._step_failed(self._group_scheduler_of(event.step_id), event)
            case StepPreempted():
                self._group_scheduler_of(event.step_id).step_preempted(event)
                self._count_step(event.at_s)
            case DrainRequested():
                self._draining = True
            case GroupLost():
                self._request_table.abandon(event.at_s)
                for each in self._group_schedulers:
                    each.abandon()
                self._close_leaving()
            case HandOver():
                handed_over = self._handovers.hand_over(group_scheduler, event)
            case Adopted():
                self._handovers.adopt(group_scheduler, event)
            case GroupOpened():
                self._open(event)
            case LeavingStopped():
                self._leaving().stopped = True
            case MovedOver():
                self._handovers.move_over(self._leaving(), group_scheduler, event)
            case BatchesLost(in_force=in_force):
                of = group_scheduler if in_force else self._leaving()
                steps_lost = of.lose_batches(event.at_s, for_good=not in_force)
            case GroupClosed():
                self._close_leaving()
            case _:
                group_scheduler.handle(event)
        if self._request_table.turned:
            self._request_table.report_preempted()
        if self.group_scheduler.scheduler.prefixes.new_marks:
            self._outbox.marks(self._request_table.streams, self.group_scheduler.take_marks())
        commands: list[Command] = [*self._outbox.take(self._seen_handle)]
        tells = isinstance(event, _TELLS_REMOVED)
        for each in self._group_schedulers:
            told = tells or (each.batches_in_flight.needs_release_batch and not each.is_busy)
            if told and (removed := each.release_batch()) is not None:
                commands.append(removed if each is self._group_schedulers[-1] else replace(removed, leaving=True))
        if handed_over is not None:
            commands.append(handed_over)
        if lost:
            commands.append(StreamsLost())
        if steps_lost:
            commands.append(StepsLost(steps_lost))
        if execute is not None:
            commands.append(execute)
        return commands

    @property
    def group_scheduler(self) -> GroupScheduler:
        """The scheduler of the current group, which gets new requests and the events about a group."""
        return self._group_schedulers[-1]

    def _new_group_scheduler(self, block_count: int, book: BlockBook | None) -> GroupScheduler:
        return GroupScheduler(
            self._limits,
            block_count,
            self._request_table.end_too_big,
            book=book,
            steps=self._steps,
            turned=self._request_table.turned,
            policies=self._policies,
            first_number=self._first_sequence_id,
        )

    @property
    def leaving(self) -> GroupScheduler | None:
        """The scheduler of the draining group that this worker led before."""
        return self._group_schedulers[0] if len(self._group_schedulers) > 1 else None

    def _leaving(self) -> GroupScheduler:
        group_scheduler = self.leaving
        if group_scheduler is None:
            raise InvariantViolation("there is no draining group")
        return group_scheduler

    def _group_scheduler_of(self, step_id: int) -> GroupScheduler:
        found = [each for each in self._group_schedulers if each.batches_in_flight.next_completion == step_id]
        return found[0] if found else self.group_scheduler

    def _open(self, event: GroupOpened) -> None:
        before, group_scheduler = self.group_scheduler, self._new_group_scheduler(event.book.block_count, event.book)
        if len(self._group_schedulers) > 1:
            raise InvariantViolation("a group is opened while another one is draining")
        before.dissolve(event.at_s)
        group_scheduler.scheduler.prefixes.kept_since_s = event.at_s
        self._handovers.forget_kv(before, event.at_s)
        self._group_schedulers.append(group_scheduler)
        if not before.leads:
            self._close_leaving()

    def _close_leaving(self) -> None:
        """Remove the draining group, if any, and add its counters to the totals of closed groups."""
        if (group_scheduler := self.leaving) is None:
            return
        in_flight = group_scheduler.batches_in_flight
        if group_scheduler.sequences or in_flight or in_flight.needs_release_batch:
            raise InvariantViolation(f"a group is closed with {len(group_scheduler.sequences)} sequences")
        self._closed = self._closed.plus(group_scheduler.scheduler)
        self._stale_groups_total += group_scheduler.stale_total
        del self._group_schedulers[0]

    @property
    def _is_busy(self) -> bool:
        """True if a step runs or could run."""
        return True in [each.is_busy for each in self._group_schedulers]  # a generator would take longer

    @property
    def is_drained(self) -> bool:
        """True if this worker takes no new requests and no request depends on it."""
        return self._draining and self.is_empty

    @property
    def is_empty(self) -> bool:
        """True if this worker has no request, and no KV whose request may still arrive."""
        request_table = self._request_table
        return not (
            request_table.live
            or request_table.kept
            or any(group_scheduler.is_occupied for group_scheduler in self._group_schedulers)
        )

    # ---------------------------------------------------------------- queries

    @property
    def has_work(self) -> bool:
        """True if a batch may be requested. While other batches are in flight, there may still be none to run."""
        return True in [each.has_work for each in self._group_schedulers]  # a generator would take longer

    @property
    def in_flight_count(self) -> int:
        return sum([len(each.batches_in_flight) for each in self._group_schedulers])

    @property
    def sequence_ids(self) -> tuple[SequenceId, ...]:
        """Ids of all live sequences."""
        return tuple(self._request_table.live)

    @property
    def limits(self) -> WorkerLimits:
        return self._limits

    @property
    def kept_count(self) -> int:
        """Number of sequences handed over to this worker whose requests have not been submitted here."""
        return len(self._request_table.kept)

    def running_kv_tokens(self, sequence_id: SequenceId) -> int | None:
        """Tokens of a running sequence that have KV; None: the sequence does not run here."""
        sequence = self._request_table.live.get(sequence_id)
        if sequence is None or sequence.state is not SequenceState.RUNNING:
            return None
        return sequence.computed_tokens

    def in_flight(self, sequence_id: SequenceId) -> bool:
        """True if a batch containing the sequence has been dispatched and not completed."""
        sequence = self._request_table.live.get(sequence_id)
        return sequence is not None and sequence.step_id > self.group_scheduler.completed_step_id

    def why_no_room(self, block_count: int, *, new: bool) -> str:
        """Return why `block_count` more blocks cannot be reserved for a sequence of another leader that is new (`new`)
        or already arriving; empty if they can.
        """
        return _DRAINS if self._draining else self.group_scheduler.why_no_room(block_count, new=new)

    @property
    def first_sequence_id(self) -> SequenceId:
        """First id of this worker's range of sequence ids, which no other worker uses."""
        return self._first_sequence_id

    @property
    def next_deadline_at_s(self) -> float | None:
        """Time at which the next Tick is due. It may be too early, because its sequence may have ended."""
        return self._request_table.next_deadline_at_s

    @property
    def totals(self) -> Totals:
        return Totals(
            self._steps_total,
            self._closed.preemptions
            + sum(group_scheduler.scheduler.preemptions_total for group_scheduler in self._group_schedulers),
            self._prompt_tokens_total,
            self._generation_tokens_total,
            dict(self._request_table.endings_total),
            self._request_table.refused_total,
            self._stale_events_total
            + self._handovers.stale_total
            + self._stale_groups_total
            + sum(group_scheduler.stale_total for group_scheduler in self._group_schedulers),
            self._handovers.adopted_total,
            self._handovers.moved_total,
        )

    def load(self, at_s: float, memory: MemoryReport, newest_epoch: int = 0, parks: Parks = IN_SERVICE) -> LoadReport:
        """Return the load report. `newest_epoch`: newest epoch of a transition known to this worker."""
        totals = ReportTotals(
            self._steps_total,
            self._prompt_tokens_total,
            self._generation_tokens_total,
            self._offline_tokens_total,
            self._closed,
        )
        step_age_s = max(0.0, at_s - self._progress_at_s) if self._is_busy else 0.0
        groups = [group_scheduler.scheduler for group_scheduler in self._group_schedulers]
        return load_of(groups, totals, step_age_s, memory, newest_epoch, parks, draining=self._draining)

    def story(self, sequence_id: SequenceId) -> list[str]:
        """State changes of a live sequence; empty for others."""
        sequence = self._request_table.live.get(sequence_id)
        return [] if sequence is None else sequence.story()

    # ---------------------------------------------------------------- arrival and end of requests

    def _submit(self, group_scheduler: GroupScheduler, event: Submitted) -> None:
        stream = self._request_table.streams.get(event.key.stream_id)
        handle = event.key.handle
        if stream is None or handle in stream.live or (handle <= stream.seen_handle and not event.overtaken):
            self._stale_events_total += 1
            return
        stream.seen_handle = max(handle, stream.seen_handle)
        if self._handovers.follow(event):
            return
        kept, waits = self._handovers.kept(event.request_id), self._handovers.may_wait(event)
        moves = kept is not None or waits
        # A moved request may have begun in a larger group than this one.
        if fault := fault_of(
            event, self._limits, sys.maxsize if moves else group_scheduler.scheduler.ceiling_block_count
        ):
            self._request_table.turn_away(event.key, fault, invalid=True)
        elif not moves and (refusal := self._refusal(group_scheduler, event)):
            self._request_table.turn_away(event.key, refusal, invalid=False)
        else:
            self._accept(group_scheduler, event, kept, waits=waits)

    def _new_sequence_id(self) -> SequenceId:
        self._last_sequence_id += 1
        return self._last_sequence_id

    def _seen_handle(self, stream_id: int) -> int:
        return self._request_table.streams[stream_id].seen_handle

    def _refusal(self, group_scheduler: GroupScheduler, event: Submitted) -> str:
        limits, scheduler = self._limits, group_scheduler.scheduler
        token_count = len(event.prompt_token_ids) + len(event.output_token_ids)
        if self._draining:
            return _DRAINS
        if not group_scheduler.leads:
            return ANOTHER_LEADS
        line, offline = scheduler.line, event.priority.offline
        waiting_count = line.offline_count if offline else line.count
        if waiting_count >= limits.max_waiting_count:
            return f"{waiting_count} requests are waiting, max_num_queued_reqs is {limits.max_waiting_count}"
        if not offline and waiting_count and line.token_count + token_count > limits.max_waiting_tokens:
            return (
                f"{line.token_count} tokens are waiting, {token_count} more would exceed max_num_queued_tokens"
                f" {limits.max_waiting_tokens}"
            )
        return ""

    def _accept(self, group_scheduler: GroupScheduler, event: Submitted, kept: Sequence | None, *, waits: bool) -> None:
        at_s, sequence = event.at_s, Sequence(self._new_sequence_id(), event, stop_rule(event, self._limits))
        sequence.sampling = with_seed(event.sampling)
        sequence.targets = event.targets.or_else(self._policies.harvest.targets_of(event.priority))
        sequence.note(at_s, f"submitted: {sequence.token_count} tokens, class {event.priority.value}")
        self._request_table.enter(sequence)
        if event.output_token_ids:
            sequence.stop.resume(sequence.output_token_ids)
        ending = sequence.stop.finish_reason
        if ending is None and event.deadline_at_s is not None and event.deadline_at_s <= at_s:
            ending = FinishReason.DEADLINE
        if ending is not None:
            self._request_table.end(sequence, at_s, ending)
            if kept is not None:
                self._handovers.free(group_scheduler, kept, at_s, "its request has ended")
        elif kept is not None:
            self._handovers.bind(group_scheduler, kept, sequence, at_s)
            group_scheduler.make_room(at_s)
            group_scheduler.admit(at_s)
        elif waits:
            self._handovers.wait(group_scheduler, sequence, at_s)
        else:
            self._request_table.place(sequence, group_scheduler, at_s)
            if event.output_token_ids:
                self._request_table.turned.append(sequence)  # it was admitted elsewhere
            group_scheduler.admit_new(sequence, at_s)

    def _abort(self, event: Aborted) -> None:
        stream = self._request_table.streams.get(event.key.stream_id)
        sequence = stream.live.get(event.key.handle) if stream else None
        if sequence is None:
            self._stale_events_total += 1
        else:
            self._request_table.end(sequence, event.at_s, FinishReason.CANCELLED)
            self._shed(event.at_s)

    def _close(self, event: StreamClosed) -> None:
        if event.stream_id in self._request_table.streams:
            self._request_table.close(event.stream_id, event.at_s)
            self._shed(event.at_s)
        else:
            self._stale_events_total += 1

    def _shed(self, at_s: float) -> None:
        """Preempt until reservations fit, after sequences have ended. The next victim may have been in flight and
        ended; the one after it may be in no batch, so that it can be preempted now.
        """
        for group_scheduler in self._group_schedulers:
            group_scheduler.shed(at_s)

    def _expire(self, at_s: float) -> None:
        self._request_table.expire(at_s)
        self._handovers.expire(self.group_scheduler, at_s)
        self._shed(at_s)

    # ---------------------------------------------------------------- steps

    def _form(self, at_s: float) -> Execute | Removed | None:
        """Form a batch for one of the groups, in alternation."""
        self._expire(at_s)
        if len(self._group_schedulers) == 1:
            self.group_scheduler.demand_place()
            return self.group_scheduler.form(at_s)
        for group_scheduler in sorted(self._group_schedulers, key=lambda each: each is self._last_formed):
            if group_scheduler.has_work and (formed := group_scheduler.form(at_s)) is not None:
                self._last_formed = group_scheduler
                return replace(formed, leaving=group_scheduler is not self._group_schedulers[-1])
        return None

    def _step_done(self, group_scheduler: GroupScheduler, event: StepDone) -> None:
        result, texts = event.result, event.texts
        in_flight_batch = group_scheduler.complete(result, len(texts))
        self._count_step(event.at_s)
        at_s, token_ids, logprobs, ended = event.at_s, result.token_ids, result.logprobs, SequenceState.ENDED
        plain: dict[int, list[tuple[int, int]]] = {}  # stream -> (handle, token)
        errors, index, offline_count, last_id, news = dict(result.errors), 0, 0, -1, list[tuple[int, int]]()
        for sequence, computed_tokens, samples in in_flight_batch.shares:
            if sequence.state is not ended:
                sequence.computed_tokens = computed_tokens
                if samples and errors and index in errors:
                    self._request_table.end(sequence, at_s, FinishReason.ERROR, errors[index], invalid=True)
                elif samples:
                    output = sequence.output_token_ids
                    if (
                        len(output) + 1 < sequence.stop.watched_from
                        and sequence.first_token_at_s is not None
                        and logprobs[index] is None
                    ):
                        output.append(token_ids[index])
                        sequence.token_count += 1
                        offline_count += sequence.rank == OFFLINE_RANK
                        stream_id, handle = sequence.key
                        if stream_id != last_id:
                            last_id, news = stream_id, plain.setdefault(stream_id, [])
                        news.append((handle, token_ids[index]))
                    else:
                        self._token(sequence, at_s, token_ids[index], texts[index], logprobs[index])
            index += samples
        for stream_id, news in plain.items():
            self._generation_tokens_total += len(news)
            self._outbox.tokens(stream_id, [handle for handle, _ in news], [token_id for _, token_id in news])
        self._generation_tokens_total -= offline_count
        self._offline_tokens_total += offline_count
        if in_flight_batch.chunked:
            group_scheduler.name_computed(in_flight_batch)
        group_scheduler.shed(event.at_s)

    def _token(
        self, sequence: Sequence, at_s: float, token_id: int, delta: str, logprobs: TokenLogprobs | None
    ) -> None:
        stop = sequence.stop
        if sequence.first_token_at_s is None:
            sequence.first_token_at_s = at_s
            sequence.note(at_s, "first token")
            self._count_tokens(sequence, len(sequence.prompt_token_ids), 0)
        self._count_tokens(sequence, 0, 1)
        output_count = sequence.append(token_id)
        text = stop.take(token_id, output_count, delta) if output_count >= stop.watched_from else ""
        self._outbox.token(sequence, token_id, text, logprobs)
        if stop.finish_reason is not None:
            self._request_table.end(sequence, at_s, stop.finish_reason)

    def _step_failed(self, group_scheduler: GroupScheduler, event: StepFailed) -> None:
        in_flight_batch = group_scheduler.batches_in_flight.complete(event.step_id)
        group_scheduler.scheduler.swap.landed(in_flight_batch.swaps, good=False)
        self._count_step(event.at_s)
        for sequence, _, _ in in_flight_batch.shares:
            if sequence.state is not SequenceState.ENDED:
                error = f"step {event.step_id} failed: {event.why}"
                self._request_table.end(sequence, event.at_s, FinishReason.ERROR, error)
        group_scheduler.shed(event.at_s)

    def plain_steps(self) -> PlainSteps | None:
        """Return the decode-only steps that will run if no event arrives; None if they cannot be predicted."""
        return None if self._request_table.waits or len(self._group_schedulers) > 1 else foresee(self.group_scheduler)

    def take_plain_steps(self, plain: PlainSteps, token_ids: Iterable[Items[int]], count: int, at_s: float) -> None:
        """Record the first `count` plain steps as run, the last at `at_s`, and their tokens (as many for each sequence)
        as sent to the dispatchers.
        """
        take(plain, token_ids, count, self.group_scheduler)
        self._steps_total += count
        self._generation_tokens_total += count * len(plain.sequences)
        self._progress_at_s = at_s

    def _count_tokens(self, sequence: Sequence, prompt_count: int, answer_count: int) -> None:
        if sequence.rank == OFFLINE_RANK:
            self._offline_tokens_total += prompt_count + answer_count
        else:
            self._prompt_tokens_total += prompt_count
            self._generation_tokens_total += answer_count

    def _count_step(self, at_s: float) -> None:
        self._steps_total += 1
        self._progress_at_s = at_s

    # ---------------------------------------------------------------- inspector

    def check(self) -> None:
        """Raise InvariantViolation unless all tables agree. For tests and simulations: takes time linear in the size of
        all tables.
        """
        request_table = self._request_table
        request_table.check()
        placed_count = 0
        for group_scheduler in self._group_schedulers:
            group_scheduler.check()
            for sequence in group_scheduler.sequences:
                if sequence.state is SequenceState.ENDED or sequence.snapshot is not None:
                    continue
                placed_count += 1
                if request_table.group_schedulers.get(sequence.sequence_id) is not group_scheduler:
                    raise InvariantViolation(f"{sequence.name} is in a wrong group_scheduler", sequence.story())
        if len(request_table.group_schedulers) != placed_count:
            raise InvariantViolation(
                f"{len(request_table.group_schedulers)} sequences have a group_scheduler, but {placed_count} are in one"
            )


# Events after which removals must be sent to the stages even if no batch follows soon.
_TELLS_REMOVED = (CapacityChanged, GroupOpened, HandOver, MovedOver, OfflinePaused, RoleChanged, RoomWanted)
_DRAINS = "this worker is draining"
