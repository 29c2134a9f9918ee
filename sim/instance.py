"""One worker in virtual time: the turns of `services.worker.core.turns` around the real core and member.

The engine does one thing at a time. Events are queued until the step boundary, and the core's output is sent to
dispatchers at the end of a turn.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator

from ballast.common.errors import InvariantViolation
from ballast.common.ids import Incarnation, WorkerId
from ballast.common.load import LoadReport
from ballast.rpc.fencing import Fence
from services.worker.core import events as w
from services.worker.core.batch import PREEMPTED, Batch
from services.worker.core.turns import LaunchedBatch, MemberEvent, StepOutcome, Turns
from services.worker.core.worker import WorkerCore
from services.worker.pipeline.member import GroupMember
from services.worker.pipeline.planner_side import Transitions
from services.worker.policy.telling import is_due
from sim.clock import Clock
from sim.cost import BatchCost, ExecutionModel, SimRoofline
from sim.engine import SimCopier, no_texts, result_of
from sim.fast_forward import FastForward
from sim.processors import Processors
from sim.streams import Listener, SimStream

_MAX_FRUITLESS = 4
_MIN_CRUISE = 2  # minimum steps of a fast-forward, which does not speed up a single step
_LOOK_S = 1.0  # polling interval of an idle engine whose member waits, as in the shell

Times = Generator[float, None, None]  # seconds for which the engine is busy; negative: until an event


class SimInstance(Turns):
    # Slots save memory, because there may be thousands of instances.
    __slots__ = (
        "_acts",
        "_alarm_at_s",
        "_alarm_label",
        "_clock",
        "_copier",
        "_costs",
        "_engine",
        "_execution",
        "_fast_forward",
        "_flying_since_s",
        "_goes_on_label",
        "_inbox",
        "_next_stream_id",
        "_owes_turn",
        "_preempted",
        "_processors",
        "_report",
        "_requests_came",
        "_resting",
        "_sliced",
        "_streams",
        "_through_member",
        "ahead_s",
        "busy_s",
        "crash_links",
        "crashed",
        "fence",
        "incarnation",
        "member",
        "paused",
        "pipelined_busy_s",
        "pipelined_s",
        "slowness",
        "touched",
        "transitions",
        "worker_id",
    )

    def __init__(
        self,
        worker_id: WorkerId,
        incarnation: Incarnation,
        core: WorkerCore,
        *,
        clock: Clock,
        execution: ExecutionModel,
        fast_forwards: bool,
        processors: Processors | None,
    ) -> None:
        """`processors`: shared with other engines, if any. `fast_forwards`: combine decode-only steps, which only
        shortens the simulation's own run time.
        """
        super().__init__(core, lambda: clock.now_s)
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.fence = Fence()
        self.crashed = False
        self.paused = False  # the process is stopped
        self._owes_turn = False  # a turn was due while it was stopped
        self._through_member = False
        self.ahead_s = 0.0  # remaining time of the current activity
        self.slowness = 1.0  # factor on all execution times
        self.touched = True  # an event was handled since this was reset
        self.busy_s = 0.0  # time executing batches
        self.pipelined_busy_s = 0.0  # time executing batches as a pipeline stage
        self.pipelined_s = 0.0  # on the leader: number of stages times the time with batches in flight
        self._clock = clock
        self._execution = execution
        self._costs = execution.costs if fast_forwards and isinstance(execution, SimRoofline) else None
        self._processors = processors
        self._fast_forward: FastForward | None = None
        self._acts: list[Callable[[], None]] = []  # executed at the end of the current activity
        self._sliced: tuple[float, float, int] | None = None  # arguments of `_run_slices` for the next batch
        self._preempted = False  # True: that batch was preempted
        self._inbox: deque[w.Event | MemberEvent] = deque()
        self._streams: dict[int, SimStream] = {}
        self._next_stream_id = 1
        self._requests_came: Callable[[LoadReport], None] | None = None
        self._resting = False
        self._alarm_at_s = 0.0
        self._flying_since_s = 0.0
        self._goes_on_label, self._alarm_label = (f"{worker_id} {what}".encode() for what in ("goes on", "alarm"))

    def join(
        self,
        member: GroupMember,
        transitions: Transitions,
        crash_links: Callable[[], None],
        copier: SimCopier,
        *,
        through_member: bool,
    ) -> None:
        """Set up the instance; call it first. `crash_links`: ends the links when the process crashes. `through_member`:
        the member also runs the batches of an instance that serves alone.
        """
        self._through_member = through_member
        self._copier = copier
        self.member = self._member = member
        self.transitions = transitions
        self.crash_links = crash_links
        self._report = self._load()
        self._engine = self._run()
        next(self._engine)
        self._go_on()

    # ------------------------------------------------------------ called from outside

    def post(self, what: w.Event | MemberEvent) -> None:
        """Queue an event for the engine; an idle engine handles it at once."""
        if self.crashed:
            return
        self._inbox.append(what)
        if self._resting and not self.paused:
            self._go_on()

    def on_requests(self, came: Callable[[LoadReport], None]) -> None:
        self._requests_came = came

    def open_stream(self, listener: Listener) -> int:
        stream_id = self._next_stream_id
        self._next_stream_id += 1
        self._streams[stream_id] = SimStream(listener)
        self.post(w.StreamOpened(self._clock.now_s, stream_id))
        return stream_id

    def close_stream(self, stream_id: int) -> None:
        if (stream := self._streams.pop(stream_id, None)) is not None:
            stream.open = False
            self.post(w.StreamClosed(self._clock.now_s, stream_id))

    def crash(self) -> None:
        """End the process."""
        self.catch_up()
        self.crashed = True
        self._engine.close()
        self._inbox.clear()
        self.crash_links()
        self._lose_streams("its process has ended")

    def go_on(self) -> None:
        """Continue after a pause."""
        self.paused = False
        if self._owes_turn or (self._resting and self._inbox):
            self._owes_turn = False
            self._go_on()

    def _lose_streams(self, why: str) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.open = False
            stream.listener.lost(why)

    def load(self) -> LoadReport:
        """The load after the last turn or step of a fast-forward."""
        return self._report if self._fast_forward is None else self._fast_forward.load(self._clock.now_s)

    def now(self) -> float:
        """Current time of the engine."""
        return self._clock.now_s + self.ahead_s

    def spend(self, seconds: float) -> None:
        """Extend the current activity."""
        self.ahead_s += seconds

    def afterwards(self, act: Callable[[], None]) -> None:
        """Execute `act` at the end of the current activity; at once if idle."""
        if self.ahead_s:
            self._acts.append(act)
        else:
            act()

    def catch_up(self) -> None:
        """Pass the completed steps of a fast-forward, if there is one, to the core."""
        if self._fast_forward is not None:
            self._end_fast_forward(self._fast_forward)

    def check(self) -> None:
        self.core.check()
        self.member.check()
        place, me = self.member.place, (self.worker_id, self.incarnation)
        if place is not None and me not in {(m.worker_id, m.incarnation) for m in place.group.members}:
            raise InvariantViolation(f"{me} is not a member of the group that it reports: {place.group}")

    # ------------------------------------------------------------ the engine

    def _go_on(self) -> None:
        if self.crashed:
            return
        if self.paused:
            self._owes_turn = True
            return
        self._resting = False
        if self._fast_forward is None:
            self.touched = True
        busy_s = next(self._engine)
        if busy_s < 0.0:
            self._rest()
        else:
            self._clock.after(busy_s, self._goes_on_label, self._go_on)

    def _rest(self) -> None:
        self._resting = True
        due_at_s, member = self.core.next_deadline_at_s, self.member
        if (wakes_at_s := member.wakes_at_s) is not None and (due_at_s is None or wakes_at_s < due_at_s):
            due_at_s = wakes_at_s
        if not member.at_rest and (due_at_s is None or due_at_s > self._clock.now_s + _LOOK_S):
            due_at_s = self._clock.now_s + _LOOK_S
        if due_at_s is not None and not self._clock.now_s < self._alarm_at_s <= due_at_s:
            self._alarm_at_s = max(due_at_s, self._clock.now_s)
            self._clock.at(self._alarm_at_s, self._alarm_label, self._wake)

    def _wake(self) -> None:
        if self._resting:
            self._go_on()

    def _run(self) -> Times:
        """Endless sequence of turns."""
        inbox = self._inbox
        yield -1.0
        while True:
            events = list(inbox)
            inbox.clear()
            yield from self._lapse(self.take_in(events))
            stepping = self.may_step
            if stepping and not events and (fast_forward := self._fast_forward_ahead()) is not None:
                yield from self._step_fast_forward(fast_forward)
                continue
            if stepping:
                yield from self._lapse(self.step())
            if events or stepping or self.commands:
                self._tell(events)
            if not inbox and self._is_idle_now():
                yield -1.0

    def _is_idle_now(self) -> bool:
        if self.rests:
            self.fruitless_count = 0
            return True
        if self.fruitless_count > _MAX_FRUITLESS:
            raise InvariantViolation(f"{self.worker_id} has work but forms no batch")
        return False

    def _lapse(self, turn: Iterator[None]) -> Times:
        """Let the time of each part of a turn pass."""
        for _ in turn:
            if self._sliced is not None:
                sliced, self._sliced = self._sliced, None
                self._preempted = yield from self._run_slices(*sliced)
            if self.ahead_s:
                yield from self._be_busy()

    def _run_slices(self, seconds: float, copy_s: float, count: int) -> Generator[float, None, bool]:
        """Run a batch in slices, with its copies. Returns True if online work preempted it."""
        for done in range(1, count):
            yield seconds / count
            if any(isinstance(event, w.Submitted) and not event.priority.offline for event in self._inbox):
                left_s = seconds * (1.0 - done / count)
                self.busy_s -= left_s
                yield max(0.0, copy_s - (seconds - left_s))
                return True
        yield max(seconds / count, copy_s - seconds * (count - 1) / count)
        return False

    def _be_busy(self) -> Times:
        """Keep the engine busy for the accumulated time, then execute the queued actions."""
        acts, self._acts = self._acts, []
        seconds, self.ahead_s = self.ahead_s, 0.0
        yield seconds
        for act in acts:
            act()

    def run(self, command: w.Execute | w.Removed) -> StepOutcome | LaunchedBatch | None:
        if isinstance(command, w.Execute) and self.core.in_flight_count == 1:
            self._flying_since_s = self._clock.now_s
        member = self.member
        if isinstance(command, w.Removed) or member.role.stages or command.leaving or self._through_member:
            return member.run(command)
        batch, layers = command.batch, member.role.layers
        copy_s = self._copier.copy(command.copies, layers) if command.copies else 0.0
        seconds = self.begin(self._execution.work(batch), self._token_count(batch), len(layers))
        self._sliced = seconds, copy_s, -(-len(layers) // (batch.safepoint_layers or len(layers)))
        return StepOutcome(batch.step_id, result_of(batch, seconds, copy_s))

    def texts_of(self, outcome: StepOutcome) -> tuple[str, ...]:
        return () if outcome.result is None else no_texts(len(outcome.result.token_ids))

    def _fast_forward_ahead(self) -> FastForward | None:
        """A fast-forward of the next steps; None unless they are decode-only and have tokens for each dispatcher."""
        if self._costs is None or self.member.role.stages or self.commands or not self.member.at_rest:
            return None
        plain = self.core.plain_steps()
        if plain is None or plain.limit < _MIN_CRUISE:
            return None
        load = self._load()
        fast_forward = FastForward(plain, load, self._clock.now_s)
        if (
            load.used_block_count + plain.growth(0) > load.block_count
            or fast_forward.shares.keys() != self._streams.keys()
        ):
            return None
        for stream_id, share in fast_forward.shares.items():
            share.seen_handle = self._streams[stream_id].seen_handle
        return fast_forward

    def _step_fast_forward(self, fast_forward: FastForward) -> Times:
        """Fast-forward decode-only steps until an event arrives or the batch changes."""
        assert self._costs is not None, "asked before"
        # Everything that a step needs is in local variables, because with thousands of instances nothing stays in the
        # CPU cache.
        plain, inbox, growth = fast_forward.plain, self._inbox, fast_forward.plain.growth
        count, context, limit = len(plain.sequences), plain.context_tokens, plain.limit
        # Only the cost of reading KV differs between steps: `RooflineCosts.decodes(count, context).on(layer_count)`.
        layer_s, head_s, stage_s = self._costs.decodes(count, 0)
        context_s, layer_count = self._costs.context_s, len(self.member.role.layers)
        hearers = [(self._streams[stream_id], share) for stream_id, share in fast_forward.shares.items()]
        before = fast_forward.load(self._clock.now_s)
        used, step, added, block_count = before.used_block_count, 0, growth(0), before.block_count
        due_at_s = self.core.next_deadline_at_s
        self.fruitless_count = 0
        self._fast_forward = fast_forward
        while True:
            used += added
            yield self._busy(stage_s + (layer_s + context * context_s) * layer_count + head_s, count)
            if self._fast_forward is not fast_forward:  # the process was stopped and caught up: run this step again
                return
            context += count
            step += 1
            fast_forward.landed, fast_forward.used_block_count = step, used
            for stream, share in hearers:
                if stream.open:
                    stream.listener.hear_step(share, step, used)
            added = growth(step)
            if inbox or step == limit or used + added > block_count:
                break
            if due_at_s is not None and due_at_s <= self._clock.now_s:
                break
        self._end_fast_forward(fast_forward)
        if inbox:
            self._tell([])

    def _end_fast_forward(self, fast_forward: FastForward) -> None:
        now_s = self._clock.now_s
        self._fast_forward, self._report, self.touched = None, fast_forward.load(self._clock.now_s), True
        if fast_forward.landed:
            self.core.take_plain_steps(fast_forward.plain, fast_forward.token_ids(), fast_forward.landed, now_s)
        for stream_id, share in fast_forward.shares.items():
            if stream_id in self._streams:
                stream = self._streams[stream_id]
                stream.told, stream.told_handle, stream.sent_at_s = self._report, share.seen_handle, now_s

    def _load(self) -> LoadReport:
        member = self.member
        return self.core.load(self._clock.now_s, member.memory.report(), member.newest_epoch, member.parks)

    def _token_count(self, batch: Batch) -> int:
        """Tokens sampled by the batch; 0 without shared processors, because only these need the count."""
        return 0 if self._processors is None else sum([part.samples for part in batch.slices])

    def begin(self, work: BatchCost, token_count: int, layer_count: int, *, is_last: bool = True) -> float:
        """Begin a batch in `layer_count` layers and return its duration in seconds, including sampling if `is_last`."""
        seconds = self._busy(work.on(layer_count, is_last=is_last), token_count if is_last else 0)
        if layer_count < self.member.role.layer_count:
            self.pipelined_busy_s += seconds
        return seconds

    def _busy(self, seconds: float, token_count: int) -> float:
        """Return an execution time, slowed down by a fault and by shared processors, and count it as busy."""
        seconds *= self.slowness
        if self._processors is not None:
            seconds *= self._processors.slowdown(self.worker_id, self._clock.now_s, seconds, token_count)
        self.busy_s += seconds
        return seconds

    def _land(self, outcome: StepOutcome) -> None:
        if self._preempted:
            outcome, self._preempted = StepOutcome(outcome.step_id, None, PREEMPTED), False
        super()._land(outcome)
        now_s = self._clock.now_s
        self.pipelined_s += (now_s - self._flying_since_s) * self.member.led_stage_count
        self._flying_since_s = now_s

    # ------------------------------------------------------------ output for dispatchers

    def _tell(self, events: list[w.Event | MemberEvent]) -> None:
        now_s = self._clock.now_s
        told, self.commands = self.commands, []
        self._report = report = self._load()
        for event in events:
            if isinstance(event, w.Submitted) and (stream := self._streams.get(event.key.stream_id)):
                stream.seen_handle = event.key.handle
        if self._requests_came is not None and any(isinstance(event, w.Submitted) for event in events):
            self._requests_came(report)
        for command in told:
            if isinstance(command, w.Emit):
                stream = self._streams.get(command.stream_id)
                if stream is not None:
                    stream.seen_handle = max(stream.seen_handle, command.seen_handle)
                    stream.tell(command, report, now_s)
            elif isinstance(command, w.StreamsLost):
                self._lose_streams("a member of its group is gone")
        stream_count = len(self._streams)
        for stream in self._streams.values():
            silent_s, more = now_s - stream.sent_at_s, stream.seen_handle > stream.told_handle
            if is_due(stream.told, report, silent_s, stream_count, counts_more=more):
                stream.tell(None, report, now_s)
