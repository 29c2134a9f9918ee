"""Drives core and engine in a thread, and connects them with asyncio.

Only the engine thread accesses core, engine and device memory. Events arrive through a bounded inbox and are handled at
step boundaries. The core's output is passed to the event loop once per step. The event loop never runs a step, and the
engine thread never touches a socket.
"""

import asyncio
import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from ballast.common.errors import InvariantViolation, Unavailable
from ballast.common.load import LoadReport, MemoryReport
from ballast.service.logs import get_logger
from services.worker.core import events as w
from services.worker.core.batch import PREEMPTED, Batch, NewSequence, SequenceId, StepResult
from services.worker.core.turns import LaunchedBatch, MemberEvent, StepOutcome, TurnMember, Turns
from services.worker.core.worker import WorkerCore
from services.worker.output_stream import OutputStream
from services.worker.policy.ending import may_end
from services.worker.policy.telling import is_due

INBOX_EVENTS = 1024
_IDLE_WAIT_S = 1.0
_SLOTLESS = (w.StreamClosed, w.DrainRequested)  # events without a slot in the inbox
_LAST_STEP_S = 30.0  # maximum wait for the running step when stopping
_FAILED_STEPS = 3  # consecutive failures after which the engine counts as broken


class StepEngine(Protocol):
    """Executes batches. Once the engine thread runs, only it calls this."""

    def compute_here(self) -> None:
        """Bind the engine to the calling thread, before it executes batches."""
        ...

    def step(self, batch: Batch, block_tables: Sequence[Sequence[int]]) -> StepResult: ...

    def memory_report(self) -> MemoryReport: ...

    def check(self) -> None: ...

    def close(self) -> None: ...


class Detokenizing(Protocol):
    def push(self, token_id: int) -> str: ...


class EngineTurns(Turns):
    """Turns of the engine thread, with detokenisation."""

    __slots__ = ("_check_every_steps", "_detokenizer", "_engine", "_failed_steps", "_in_flight", "texts")

    def __init__(
        self,
        core: WorkerCore,
        engine: StepEngine,
        detokenizer: Callable[[NewSequence], Detokenizing],
        check_every_steps: int,
    ) -> None:
        super().__init__(core, time.monotonic)
        self._engine = engine
        self._detokenizer = detokenizer
        self._check_every_steps = check_every_steps
        self._in_flight: dict[int, Batch] = {}  # step id -> dispatched batch
        self._failed_steps = 0
        self.texts: dict[SequenceId, Detokenizing] = {}

    def join_group(self, member: TurnMember) -> None:
        self._member = member

    def run(self, command: w.Execute | w.Removed) -> StepOutcome | LaunchedBatch | None:
        tables: Sequence[Sequence[int]] = ()
        if isinstance(command, w.Execute):
            tables = command.block_tables
            self._drop_texts(command.batch.removed)
            for new, wanted in zip(command.batch.added, command.text_wanted, strict=True):
                if wanted:
                    self.texts[new.sequence_id] = self._detokenizer(new)
            self._in_flight[command.batch.step_id] = command.batch
        if self._member is not None:
            return self._member.run(command)
        try:
            result = self._engine.step(command.batch, tables)
        except (RuntimeError, ValueError, IndexError) as error:
            return StepOutcome(command.batch.step_id, None, f"{type(error).__name__}: {error}")
        return StepOutcome(command.batch.step_id, result) if isinstance(command, w.Execute) else None

    def note(self, command: w.Command) -> None:
        super().note(command)
        if isinstance(command, w.Removed):
            self._drop_texts(command.batch.removed)
        elif isinstance(command, w.HandedOver):
            self._drop_texts(s.sequence_id for _, snapshots in command.snapshots for s in snapshots)
        elif isinstance(command, w.StreamsLost):
            self.texts.clear()
            self._in_flight.clear()
        elif isinstance(command, w.StepsLost):
            for step_id in command.step_ids:
                self._in_flight.pop(step_id, None)

    def texts_of(self, outcome: StepOutcome) -> tuple[str, ...]:
        batch, result, texts = self._in_flight.pop(outcome.step_id), outcome.result, self.texts
        if outcome.why == PREEMPTED:
            return ()
        if result is None:
            self._count_failed(batch, outcome.why)
            return ()
        self._failed_steps = 0
        if not texts:
            return ("",) * len(result.token_ids)
        sampling = (s.sequence_id for s in batch.slices if s.samples)
        return tuple(
            texts[sequence_id].push(token_id) if sequence_id in texts else ""
            for sequence_id, token_id in zip(sampling, result.token_ids, strict=True)
        )

    def _land(self, outcome: StepOutcome) -> None:
        super()._land(outcome)
        if outcome.result and self._check_every_steps and outcome.step_id % self._check_every_steps == 0:
            self.core.check()
            self._engine.check()
            if self._member is not None:
                self._member.check()

    def _drop_texts(self, sequence_ids: Iterable[SequenceId]) -> None:
        for sequence_id in sequence_ids:
            self.texts.pop(sequence_id, None)

    def _count_failed(self, batch: Batch, why: str) -> None:
        """Count a failed step, whose requests end with an error. Dispatchers replay each request at most `replay_limit`
        times, so a request that causes failures does not fail more steps than that. After several consecutive failures
        the worker ends, because it is then probably the cause.
        """
        get_logger().error("engine step failed", step_id=batch.step_id, sequences=len(batch.slices), why=why)
        self._failed_steps += 1
        if self._failed_steps >= _FAILED_STEPS:
            raise InvariantViolation(f"{_FAILED_STEPS} engine steps in a row have failed, the last with {why}")


@dataclass(frozen=True, slots=True)
class _Turn:
    """The engine thread's message to the event loop after a turn."""

    slots: int  # freed slots of the inbox
    seen_handles: dict[int, int]  # stream id -> highest handle counted by the report, for streams where it has grown
    emits: list[w.Emit]
    report: LoadReport
    drained: bool
    lost: bool  # True: the group is lost, so all streams end


class WorkerShell:
    """The engine thread, and the servicer's interface to it."""

    def __init__(
        self,
        *,
        core: WorkerCore,
        engine: StepEngine,
        detokenizer: Callable[[NewSequence], Detokenizing],
        check_every_steps: int = 0,
    ) -> None:
        self._core = core
        self._engine = engine
        self._turns = EngineTurns(core, engine, detokenizer, check_every_steps)
        self._member: TurnMember | None = None
        self._requests_came: Callable[[LoadReport], None] | None = None
        self._inbox: queue.SimpleQueue[w.Event | MemberEvent | None] = queue.SimpleQueue()
        self._preempting = threading.Event()  # set while the inbox has online work
        self._slots = asyncio.Semaphore(INBOX_EVENTS)
        self._streams: dict[int, OutputStream] = {}  # stream id -> its outputs
        self._next_stream_id = 1
        self._busy_since_s: float | None = None
        self._turned_at_s = math.inf  # start of the latest turn; inf: not running yet
        self._report = core.load(time.monotonic(), engine.memory_report())
        self._stopping = False
        self._stop_asked = asyncio.Event()
        self._draining = False
        self._idle_since_s = math.inf  # time since which the worker is drained and its pipeline idle
        self._loop: asyncio.AbstractEventLoop | None = None
        self.drained = asyncio.Event()

    @property
    def stream_count(self) -> int:
        return len(self._streams)

    # ------------------------------------------------------------ event loop side

    async def run(self) -> None:
        """Run the engine thread until `stop`. Raises its error."""
        self._loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = self._loop.create_future()
        thread = threading.Thread(target=self._thread, args=(ended,), name="engine", daemon=True)
        thread.start()
        stopped = asyncio.ensure_future(self._stop_asked.wait())
        try:
            await asyncio.wait((ended, stopped), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            self.stop()
            for stream in self._streams.values():
                stream.close()
            if not ended.done():
                await asyncio.wait((ended,), timeout=_LAST_STEP_S)
            if ended.done():
                thread.join()
                ended.result()  # an engine error is the cause of other errors
        if not ended.done():
            raise InvariantViolation(f"the engine's last step has not ended within {_LAST_STEP_S:g} s")

    def stop(self) -> None:
        """End the engine thread after the running step."""
        self._stopping = True
        self._stop_asked.set()
        self._inbox.put(None)

    def drain(self) -> None:
        """Refuse new requests; `drained` is set when no request or pipeline needs this worker."""
        if not self._draining:
            self._draining = True
            self._inbox.put(w.DrainRequested(time.monotonic()))

    def join_group(self, member: TurnMember) -> None:
        """Set the group member. Must be called before `run`."""
        self._member = member
        self._turns.join_group(member)

    def on_requests(self, came: Callable[[LoadReport], None]) -> None:
        """Register a callback. Must be called before `run`. `came` is called on the event loop, with the load, after
        new requests have arrived.
        """
        self._requests_came = came

    def post_member(self, event: MemberEvent) -> None:
        """Queue an event for the group member. Thread-safe. The queue has no bound, because links and the planner limit
        their events.
        """
        self._inbox.put(event)
        if event.preempts:
            self._preempting.set()

    async def post(self, event: w.Event) -> None:
        """Queue an event for the engine thread. Waits while the inbox is full, which applies backpressure to the
        caller.
        """
        await self._slots.acquire()
        self._inbox.put(event)
        if isinstance(event, w.Submitted) and not event.priority.offline:
            self._preempting.set()

    @property
    def preempts(self) -> Callable[[], bool]:
        """Return a function that returns True if online work has arrived since the engine thread last took events."""
        return self._preempting.is_set

    async def open_stream(self) -> OutputStream:
        stream = OutputStream(self._next_stream_id)
        self._next_stream_id += 1
        await self.post(w.StreamOpened(time.monotonic(), stream.stream_id))
        self._streams[stream.stream_id] = stream  # last: the caller may be cancelled while the inbox is full
        return stream

    def close_stream(self, stream: OutputStream) -> None:
        """Close the stream of a dispatcher that has disconnected. The event needs no slot, because there is only one
        per stream.
        """
        if self._streams.pop(stream.stream_id, None) is not None:
            self._inbox.put(w.StreamClosed(time.monotonic(), stream.stream_id))

    def load(self) -> LoadReport:
        """Load report after the last step, with the time since the engine thread last made progress."""
        now_s, since_s = time.monotonic(), self._busy_since_s
        age_s = 0.0 if since_s is None else now_s - since_s
        # Even an idle engine thread begins a turn every second. If it does not, it hangs outside a step.
        hangs_s = now_s - self._turned_at_s
        return replace(self._report, step_age_s=max(age_s, hangs_s) if hangs_s > 2 * _IDLE_WAIT_S else age_s)

    def _on_turn(self, turn: _Turn) -> None:
        for _ in range(turn.slots):
            self._slots.release()
        self._report = report = turn.report
        now_s = time.monotonic()
        for stream_id, handle in turn.seen_handles.items():
            if stream := self._streams.get(stream_id):
                stream.seen_handle = max(handle, stream.seen_handle)  # see `Submitted.overtaken`
        if turn.seen_handles and self._requests_came is not None:
            self._requests_came(report)
        for emit in turn.emits:
            if stream := self._streams.get(emit.stream_id):
                stream.put(emit, report, now_s)
        stream_count = len(self._streams)
        for stream in list(self._streams.values()):
            silent_s, more = now_s - stream.sent_at_s, stream.counts_more
            if not stream.backlog_count and is_due(stream.told, report, silent_s, stream_count, counts_more=more):
                stream.put(None, report, now_s)
            if stream.broken.is_set():
                self.close_stream(stream)
        if turn.lost:
            for stream in list(self._streams.values()):
                stream.close(Unavailable("group", "a member of its group is lost"))
                self.close_stream(stream)
        if turn.drained:
            self.drained.set()

    # ------------------------------------------------------------ engine thread

    def _thread(self, ended: asyncio.Future[None]) -> None:
        assert self._loop is not None
        failure: BaseException | None = None
        _name_thread("engine")
        try:
            self._engine.compute_here()
            while not self._stopping:
                self._turn()
        except BaseException as error:  # noqa: BLE001 handed to the event loop, which owns this thread
            failure = error
        failure = self._close_all(failure)
        with contextlib.suppress(RuntimeError):  # the loop may be closed during shutdown
            self._loop.call_soon_threadsafe(_finish, ended, failure)

    def _close_all(self, failure: BaseException | None) -> BaseException | None:
        """Close member and engine. Returns the failure to report, which must reach the event loop, because otherwise
        this worker would seem alive.
        """
        try:
            if self._member is not None:
                self._member.close()
            self._engine.close()  # not reached if links that write into its memory may remain
        except Exception as error:  # noqa: BLE001 - as above
            if failure is None:
                return error
            failure.add_note(f"then, while it was closed: {type(error).__name__}: {error}")
        return failure

    def _turn(self) -> None:
        turns, rested = self._turns, self._turns.rests
        self._turned_at_s = time.monotonic()
        events = self._wait_for_events()
        for _ in turns.take_in(events):
            pass
        stepping = turns.steps
        if stepping and any(isinstance(command, w.Emit) for command in turns.commands):
            self._tell(events)  # output of a pipeline need not wait for the next batch
            events = []
        if stepping:
            self._busy_since_s = self._busy_since_s or time.monotonic()
            for _ in turns.step():
                pass
        busy = self._core.has_work or self._core.in_flight_count
        self._busy_since_s = time.monotonic() if busy else None
        if events or stepping or turns.commands or rested:  # while it rests, the member's memory may still change
            self._tell(events)

    def _tell(self, events: Sequence[w.Event | MemberEvent]) -> None:
        assert self._loop is not None
        commands, self._turns.commands = self._turns.commands, []
        turn = _Turn(
            slots=sum(not isinstance(event, (*_SLOTLESS, MemberEvent)) for event in events),
            seen_handles=dict(sorted(event.key for event in events if isinstance(event, w.Submitted))),
            emits=[command for command in commands if isinstance(command, w.Emit)],
            report=self._load(),
            drained=self._is_drained(),
            lost=any(isinstance(command, w.StreamsLost) for command in commands),
        )
        self._loop.call_soon_threadsafe(self._on_turn, turn)

    def _is_drained(self) -> bool:
        """True if no request or pipeline needs this worker."""
        if not self._core.is_drained:
            return False
        now_s = time.monotonic()
        count = None if self._member is None else self._member.pipeline_request_count
        self._idle_since_s = math.inf if count else min(self._idle_since_s, now_s)
        return may_end(count, now_s - self._idle_since_s)

    def _load(self) -> LoadReport:
        now_s, memory, member = time.monotonic(), self._engine.memory_report(), self._member
        if member is None:
            return self._core.load(now_s, memory)
        return self._core.load(now_s, memory, member.newest_epoch, member.parks)

    def _wait_for_events(self) -> list[w.Event | MemberEvent]:
        """Take the pending events; wait for one if there is nothing to do."""
        events: list[w.Event | MemberEvent] = []
        wait_s = 0.0
        if self._turns.rests:
            wakes_at_s = None if self._member is None else self._member.wakes_at_s
            due = [at_s for at_s in (self._core.next_deadline_at_s, wakes_at_s) if at_s is not None]
            wait_s = min(_IDLE_WAIT_S, max(0.0, min(due) - time.monotonic())) if due else _IDLE_WAIT_S
        self._preempting.clear()
        with contextlib.suppress(queue.Empty):
            event = self._inbox.get(timeout=wait_s) if wait_s else self._inbox.get_nowait()
            while event is not None:
                events.append(event)
                event = self._inbox.get_nowait()
        return events


def _name_thread(name: str) -> None:
    """Name this thread for `top -H`, debuggers and `ballast chaos`, which Python before 3.14 does not do."""
    with contextlib.suppress(OSError):  # not Linux
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)


def _finish(ended: asyncio.Future[None], failure: BaseException | None) -> None:
    if ended.done():
        return
    if failure is None:
        ended.set_result(None)
    else:
        ended.set_exception(failure)
