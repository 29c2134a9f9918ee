"""The deciding half of a worker: requests in, batches and tokens out.

Owns every sequence from its submission to its one ending. Knows no clock, no thread, no tensor. Whoever drives it
calls `handle` from one thread, asks for a batch when the engine is free, and reports the step before asking again.

A sequence that can never run is turned away at once. One that has outgrown the whole KV cache while it ran ends with
ERROR and not with LENGTH: the same request would have gone on elsewhere, and a cut answer must not look complete.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ballast.common.errors import InvariantViolation
from ballast.common.load import LoadReport, MemoryReport
from ballast.common.sampling import FinishReason
from services.worker.core.batch import Batch, NewSequence, SequenceId, Slice, StepResult, TokenLogprobs
from services.worker.core.blocks import BlockBook, blocks_for
from services.worker.core.deadlines import Deadlines
from services.worker.core.events import (
    Aborted,
    BatchWanted,
    BlocksAdded,
    Command,
    Drained,
    DrainRequested,
    Event,
    Execute,
    StepDone,
    StepFailed,
    StreamClosed,
    StreamOpened,
    Submitted,
    Tick,
)
from services.worker.core.intake import fault_of, with_seed
from services.worker.core.limits import WorkerLimits
from services.worker.core.outbox import Outbox
from services.worker.core.scheduler import Plan, Scheduler
from services.worker.core.sequence import Sequence, SequenceState
from services.worker.core.stop import StopRule, StopText


class _Stream:
    __slots__ = ("live", "seen_handle")

    def __init__(self) -> None:
        self.live: dict[int, Sequence] = {}  # handle -> sequence
        self.seen_handle = 0


class _Flight:
    """The batch that the engine runs."""

    __slots__ = ("sampled_count", "shares", "step_id")

    def __init__(self, step_id: int) -> None:
        self.step_id = step_id
        self.shares: list[tuple[Sequence, int, bool]] = []  # sequence, its tokens with KV afterwards, samples
        self.sampled_count = 0


@dataclass(frozen=True, slots=True)
class Totals:
    """Since the start of the worker."""

    steps: int
    preemptions: int
    prompt_tokens: int  # of prompts that got their first token
    generation_tokens: int
    endings: Mapping[FinishReason, int]
    refused: int
    stale_events: int  # of closed streams, repeated or unknown handles


class WorkerCore:
    def __init__(self, limits: WorkerLimits, block_count: int) -> None:
        self._limits = limits
        self._scheduler = Scheduler(limits, block_count)
        self._book = BlockBook(block_count, limits.block_tokens)
        self._streams: dict[int, _Stream] = {}  # stream id -> what came over it
        self._live: dict[SequenceId, Sequence] = {}
        self._deadlines = Deadlines()
        self._outbox = Outbox()
        self._removed: list[SequenceId] = []  # what the engine is to forget with the next batch
        self._flight: _Flight | None = None
        self._last_sequence_id = 0
        self._last_step_id = 0
        self._draining = False
        self._drained = False
        self._progress_at_s = 0.0  # last completed step, or end of the last idle time
        self._steps_total = 0
        self._prompt_tokens_total = 0
        self._generation_tokens_total = 0
        self._endings_total = dict.fromkeys(FinishReason, 0)
        self._refused_total = 0
        self._stale_events_total = 0

    # ---------------------------------------------------------------- the one door

    def handle(self, event: Event) -> list[Command]:
        """News for dispatchers comes first in the answer, Execute last. Stale events are counted, nothing else."""
        execute: Execute | None = None
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
                self._streams.setdefault(event.stream_id, _Stream())
            case StreamClosed():
                self._close(event)
            case StepFailed():
                self._step_failed(event)
            case DrainRequested():
                self._draining = True
            case BlocksAdded():
                self._scheduler.grow(event.block_count)
                self._book.grow(event.block_count)
        commands: list[Command] = [*self._outbox.take(self._seen_handle)]
        if self._draining and not self._drained and not self._live and self._flight is None:
            self._drained = True
            commands.append(Drained())
        if execute is not None:
            commands.append(execute)
        return commands

    # ---------------------------------------------------------------- what the outside may look at

    @property
    def has_work(self) -> bool:
        """Whether BatchWanted would be answered with a batch."""
        return bool(self._live)

    @property
    def next_deadline_at_s(self) -> float | None:
        """When a Tick is due at the latest. May be early: the sequence it belonged to may have ended."""
        return self._deadlines.next_at_s

    @property
    def totals(self) -> Totals:
        return Totals(
            self._steps_total,
            self._scheduler.preemptions_total,
            self._prompt_tokens_total,
            self._generation_tokens_total,
            dict(self._endings_total),
            self._refused_total,
            self._stale_events_total,
        )

    def load(self, at_s: float, memory: MemoryReport) -> LoadReport:
        scheduler = self._scheduler
        return LoadReport(
            block_tokens=self._limits.block_tokens,
            block_count=scheduler.block_count,
            used_block_count=scheduler.reserved_block_count,
            waiting_block_count=scheduler.waiting_block_count,
            running_count=len(scheduler.running),
            waiting_count=scheduler.waiting_count,
            max_running_count=self._limits.max_running_count,
            steps_total=self._steps_total,
            preemptions_total=scheduler.preemptions_total,
            prompt_tokens_total=self._prompt_tokens_total,
            generation_tokens_total=self._generation_tokens_total,
            step_age_s=max(0.0, at_s - self._progress_at_s) if self._live else 0.0,
            draining=self._draining,
            memory=memory,
        )

    def story(self, sequence_id: SequenceId) -> list[str]:
        """What has happened to a live sequence; nothing about others."""
        sequence = self._live.get(sequence_id)
        return [] if sequence is None else sequence.story()

    # ---------------------------------------------------------------- coming and going

    def _submit(self, event: Submitted) -> None:
        stream = self._streams.get(event.key.stream_id)
        if stream is None or event.key.handle <= stream.seen_handle:
            self._stale_events_total += 1
            return
        stream.seen_handle = event.key.handle
        if fault := fault_of(event, self._limits, self._scheduler.block_count):
            self._endings_total[FinishReason.ERROR] += 1
            self._outbox.turned_away(event.key, fault, invalid=True)
        elif refusal := self._refusal(event):
            self._refused_total += 1
            self._outbox.turned_away(event.key, refusal, invalid=False)
        else:
            self._accept(event, stream)

    def _seen_handle(self, stream_id: int) -> int:
        return self._streams[stream_id].seen_handle

    def _refusal(self, event: Submitted) -> str:
        limits, scheduler = self._limits, self._scheduler
        token_count = len(event.prompt_token_ids) + len(event.output_token_ids)
        if self._draining:
            return "this worker is draining"
        if scheduler.waiting_count >= limits.max_waiting_count:
            return f"{scheduler.waiting_count} requests are waiting, max_num_queued_reqs is {limits.max_waiting_count}"
        if scheduler.waiting_count and scheduler.waiting_tokens + token_count > limits.max_waiting_tokens:
            return (
                f"{scheduler.waiting_tokens} tokens are waiting, {token_count} more would exceed max_num_queued_tokens"
                f" {limits.max_waiting_tokens}"
            )
        return ""

    def _accept(self, event: Submitted, stream: _Stream) -> None:
        if not self._live:
            self._progress_at_s = event.at_s
        self._last_sequence_id += 1
        sequence = Sequence(self._last_sequence_id, event, self._stop_rule(event))
        sequence.sampling = with_seed(event.sampling)
        sequence.note(event.at_s, f"submitted: {sequence.token_count} tokens, class {event.priority.value}")
        self._live[sequence.sequence_id] = sequence
        stream.live[event.key.handle] = sequence
        self._scheduler.enqueue(sequence)
        if event.output_token_ids:
            sequence.stop.resume(sequence.output_token_ids)
        if sequence.stop.finish_reason is not None:
            self._end(sequence, event.at_s, sequence.stop.finish_reason)
        elif event.deadline_at_s is not None and event.deadline_at_s <= event.at_s:
            self._end(sequence, event.at_s, FinishReason.DEADLINE)
        else:
            if event.deadline_at_s is not None:
                self._deadlines.add(event.deadline_at_s, sequence.sequence_id)
                self._deadlines.tidy(self._live)
            self._scheduler.admit(event.at_s)

    def _stop_rule(self, event: Submitted) -> StopRule:
        sampling = event.sampling
        room = self._limits.max_model_len - len(event.prompt_token_ids)
        text = None
        if event.wants_text or sampling.stop:
            text = StopText(
                sampling.stop, sampling.include_stop_str_in_output, event.output_text, event.delivered_text_chars
            )
        return StopRule(sampling, self._limits.eos_token_ids, min(sampling.max_tokens, room), text)

    def _abort(self, event: Aborted) -> None:
        stream = self._streams.get(event.key.stream_id)
        sequence = stream.live.get(event.key.handle) if stream else None
        if sequence is None:
            self._stale_events_total += 1
        else:
            self._end(sequence, event.at_s, FinishReason.CANCELLED)

    def _close(self, event: StreamClosed) -> None:
        stream = self._streams.get(event.stream_id)
        if stream is None:
            self._stale_events_total += 1
            return
        for sequence in list(stream.live.values()):
            self._remove(sequence, event.at_s, FinishReason.CANCELLED, "its stream has closed")
        del self._streams[event.stream_id]

    def _expire(self, at_s: float) -> None:
        for sequence_id in self._deadlines.pop_due(at_s):
            if sequence := self._live.get(sequence_id):
                self._end(sequence, at_s, FinishReason.DEADLINE)

    def _end(
        self, sequence: Sequence, at_s: float, reason: FinishReason, error: str = "", *, invalid: bool = False
    ) -> None:
        """The one place where a dispatcher learns of an ending."""
        self._outbox.text(sequence, sequence.stop.flush())
        self._remove(sequence, at_s, reason, error)
        self._outbox.ended(sequence, reason, error, invalid)

    def _remove(self, sequence: Sequence, at_s: float, reason: FinishReason, why: str) -> None:
        """Everything the sequence holds is free afterwards, even if the engine is computing it: see `Execute`."""
        self._scheduler.release(sequence)
        self._forget_kv(sequence)
        sequence.move(SequenceState.ENDED, at_s, f"{reason.value} {why}".rstrip())
        del self._live[sequence.sequence_id]
        del self._streams[sequence.key.stream_id].live[sequence.key.handle]
        self._endings_total[reason] += 1

    def _forget_kv(self, sequence: Sequence) -> None:
        self._book.free(sequence.sequence_id)
        if sequence.in_engine:
            sequence.in_engine = False
            self._removed.append(sequence.sequence_id)

    # ---------------------------------------------------------------- steps

    def _form(self, at_s: float) -> Execute | None:
        if self._flight is not None:
            raise InvariantViolation(f"a batch is wanted while step {self._flight.step_id} runs")
        self._expire(at_s)
        for sequence in self._scheduler.stranded():
            self._end(sequence, at_s, FinishReason.ERROR, self._too_big(sequence), invalid=True)
        plan = self._scheduler.plan(at_s)
        for sequence in plan.preempted:
            self._forget_kv(sequence)
        if not plan.decodes and not plan.chunks:
            return None
        return self._execute(plan)

    def _too_big(self, sequence: Sequence) -> str:
        return (
            f"{sequence.token_count} tokens do not fit into the KV cache of this worker"
            f" ({self._scheduler.block_count} blocks of {self._limits.block_tokens} tokens), even alone"
        )

    def _execute(self, plan: Plan) -> Execute:
        self._last_step_id += 1
        flight = self._flight = _Flight(self._last_step_id)
        slices: list[Slice] = []
        tables: list[tuple[int, ...]] = []
        added: list[Sequence] = []
        cover, shares = self._book.cover, flight.shares
        for sequence in plan.decodes:
            if not sequence.in_engine:
                added.append(sequence)
            end = sequence.token_count
            slices.append(Slice(sequence.sequence_id, end - 1, (sequence.last_token_id,), True))
            tables.append(cover(sequence.sequence_id, end))
            shares.append((sequence, end, True))
        flight.sampled_count = len(shares)
        for sequence, count in plan.chunks:
            if not sequence.in_engine:
                added.append(sequence)
            first = sequence.computed_tokens
            samples = first + count == sequence.token_count
            slices.append(Slice(sequence.sequence_id, first, sequence.token_ids(first, count), samples))
            tables.append(cover(sequence.sequence_id, first + count))
            shares.append((sequence, first + count, samples))
            flight.sampled_count += samples
        removed, self._removed = tuple(self._removed), []
        batch = Batch(flight.step_id, removed, tuple(self._enter(s) for s in added), tuple(slices))
        return Execute(batch, tuple(tables), tuple(s.stop.needs_text for s in added))

    def _enter(self, sequence: Sequence) -> NewSequence:
        sequence.in_engine = True
        return sequence.as_new()

    def _step_done(self, event: StepDone) -> None:
        result, texts = event.result, event.texts
        flight = self._land(result.step_id, event.at_s)
        self._check_result(flight, result, len(texts))
        index = 0
        for sequence, computed_tokens, samples in flight.shares:
            if sequence.state is not SequenceState.ENDED:
                sequence.computed_tokens = computed_tokens
                if samples:
                    self._token(sequence, event.at_s, result.token_ids[index], texts[index], result.logprobs[index])
            index += samples

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
        self._outbox.token(sequence, token_id, stop.take(token_id, output_count, delta), logprobs)
        if stop.finish_reason is not None:
            self._end(sequence, at_s, stop.finish_reason)

    def _step_failed(self, event: StepFailed) -> None:
        for sequence, _, _ in self._land(event.step_id, event.at_s).shares:
            if sequence.state is not SequenceState.ENDED:
                self._end(sequence, event.at_s, FinishReason.ERROR, f"step {event.step_id} failed: {event.why}")

    def _land(self, step_id: int, at_s: float) -> _Flight:
        flight, self._flight = self._flight, None
        if flight is None or flight.step_id != step_id:
            running = "none" if flight is None else f"step {flight.step_id}"
            raise InvariantViolation(f"step {step_id} is reported, {running} was running")
        self._steps_total += 1
        self._progress_at_s = at_s
        return flight

    def _check_result(self, flight: _Flight, result: StepResult, text_count: int) -> None:
        counts = (len(result.token_ids), len(result.logprobs), text_count)
        if counts != (flight.sampled_count,) * 3:
            raise InvariantViolation(
                f"step {flight.step_id} samples {flight.sampled_count} tokens, the result has {counts[0]} tokens,"
                f" {counts[1]} logprobs and {counts[2]} texts"
            )

    # ---------------------------------------------------------------- inspector

    def check(self) -> None:
        """Raise InvariantViolation unless the books balance. For tests and simulation: takes time linear in all."""
        self._scheduler.check()
        self._book.check()
        for sequence_id, sequence in self._live.items():
            self._check_live(sequence_id, sequence)
        streamed = sum(len(stream.live) for stream in self._streams.values())
        scheduled = len(self._scheduler.running) + self._scheduler.waiting_count
        if not len(self._live) == streamed == scheduled:
            raise InvariantViolation(f"{len(self._live)} sequences live, {streamed} streamed, {scheduled} scheduled")
        for sequence_id in self._book.sequence_ids:
            sequence = self._live.get(sequence_id)
            if sequence is None or sequence.state is not SequenceState.RUNNING:
                raise InvariantViolation(f"sequence {sequence_id} holds blocks and does not run")
        for sequence, _, _ in self._flight.shares if self._flight else ():
            if sequence.state is SequenceState.WAITING:
                raise InvariantViolation(f"{sequence.name} is computed and waits", sequence.story())

    def _check_live(self, sequence_id: SequenceId, sequence: Sequence) -> None:
        if sequence.sequence_id != sequence_id or sequence.state is SequenceState.ENDED:
            raise InvariantViolation(f"{sequence.name} is listed as {sequence_id}", sequence.story())
        if self._streams[sequence.key.stream_id].live.get(sequence.key.handle) is not sequence:
            raise InvariantViolation(f"{sequence.name} is unknown to its stream", sequence.story())
        if sequence.token_count != len(sequence.prompt_token_ids) + len(sequence.output_token_ids):
            raise InvariantViolation(f"{sequence.name} miscounts its tokens", sequence.story())
        table_count = len(self._book.table(sequence_id))
        if table_count > sequence.reserved_block_count:
            raise InvariantViolation(f"{sequence.name} holds {table_count} blocks", sequence.story())
        if blocks_for(sequence.computed_tokens, self._limits.block_tokens) > table_count:
            raise InvariantViolation(f"{sequence.name} has KV in no block", sequence.story())
