"""One worker in virtual time: the engine's turns around the real core, as `services.worker.shell` has them.

The engine does one thing at a time. What comes meanwhile waits in the inbox until the step boundary, and what the core
has to say to dispatchers goes out when a turn has ended.
"""

from collections import deque
from collections.abc import Callable, Generator, Sequence

from ballast.common.errors import ConfigError, InvariantViolation
from ballast.common.ids import WorkerId
from ballast.common.load import LoadReport
from services.worker.core.batch import Batch, StepResult
from services.worker.core.events import (
    BatchWanted,
    BlockCopy,
    Command,
    Emit,
    Event,
    Execute,
    Removed,
    StepDone,
    StreamClosed,
    StreamOpened,
    StreamsLost,
    Submitted,
    Tick,
)
from services.worker.core.worker import WorkerCore
from services.worker.policy.telling import is_due
from sim.clock import Clock
from sim.cost import ExecutionModel, Roofline, Work
from sim.cruise import Cruise
from sim.flight import BATCH_BYTES, InFlight, flight_of
from sim.member import GroupMember
from sim.network import Network
from sim.processors import Processors
from sim.streams import Listener, Stream

_MAX_FRUITLESS = 4
_MIN_CRUISE = 2  # steps: one by itself is as cheap
_NO_TEXTS: dict[int, tuple[str, ...]] = {}
_NO_LOGPROBS: dict[int, tuple[None, ...]] = {}

Turns = Generator[float, None, None]  # seconds that the engine is busy; below 0: until something comes


class Instance:
    # There may be thousands, and a dictionary for each is what an event would spend its time on.
    # fmt: off
    __slots__ = (
        "_activation_bytes", "_alarm_at_s", "_alarm_label", "_batch_label", "_block_tokens", "_clock", "_costs",
        "_cruise", "_debts", "_early", "_execution", "_flying_since_s", "_fruitless", "_goes_on_label",
        "_host_bytes_per_s", "_inbox", "_network", "_next_stream_id", "_peers", "_processors", "_report",
        "_requests_came", "_resting", "_result_label", "_streams", "_to_run", "_told", "_turns", "busy_s", "core",
        "crashed", "member", "pipelined_busy_s", "pipelined_s", "slowness", "touched", "worker_id",
    )
    # fmt: on

    def __init__(
        self,
        worker_id: WorkerId,
        core: WorkerCore,
        member: GroupMember,
        *,
        clock: Clock,
        network: Network,
        execution: ExecutionModel,
        peers: "dict[WorkerId, Instance]",
        block_tokens: int,
        activation_bytes_per_token: int,
        host_bytes_per_s: float,
        cruises: bool,
        processors: Processors | None,
    ) -> None:
        """`host_bytes_per_s`: of KV from the device to host memory, and as much at the same time the other way.
        `processors` that it shares with others, if any.
        `cruises`: steps in which nothing is decided are taken together, which changes nothing but the time it takes.
        """
        self.worker_id = worker_id
        self.core = core
        self.member = member
        self.crashed = False
        self.slowness = 1.0  # everything that is executed takes so many times as long
        self.touched = True  # something has happened here since somebody set it back
        self.busy_s = 0.0  # executing batches
        self.pipelined_busy_s = 0.0  # of those, as a stage of several
        self.pipelined_s = 0.0  # leader: stages times the time in which its pipeline had something in flight
        self._clock = clock
        self._network = network
        self._execution = execution
        self._costs = execution.costs if cruises and isinstance(execution, Roofline) else None
        self._processors = processors
        self._cruise: Cruise | None = None
        self._peers = peers
        self._block_tokens = block_tokens
        self._activation_bytes = activation_bytes_per_token
        self._host_bytes_per_s = host_bytes_per_s
        self._inbox: deque[Event | Callable[[], None]] = deque()
        self._streams: dict[int, Stream] = {}
        self._next_stream_id = 1
        self._debts: deque[tuple[float, Callable[[], None]]] = deque()  # the engine is busy, and what it does then
        self._early: list[InFlight] = []  # of a leader that is ahead of this member
        self._to_run: deque[InFlight] = deque()
        self._told: list[Command] = []
        self._requests_came: Callable[[LoadReport], None] | None = None
        self._resting = True
        self._fruitless = 0  # batches wanted in a row, and none formed
        self._alarm_at_s = 0.0
        self._flying_since_s = 0.0
        self._goes_on_label, self._alarm_label, self._batch_label, self._result_label = (
            f"{worker_id} {what}".encode() for what in ("goes on", "alarm", "batch", "result")
        )
        self._report = core.load(clock.now_s, member.memory.report())
        self._turns = self._run()
        next(self._turns)
        member.pass_on, member.roster_came = self._forward_removed, self._release_early

    # ------------------------------------------------------------ from outside

    def post(self, what: Event | Callable[[], None]) -> None:
        """Into the engine's inbox; a resting engine looks at it at once."""
        if self.crashed:
            return
        self._inbox.append(what)
        if self._resting:
            self._go_on()

    def tell_of_requests(self, came: Callable[[LoadReport], None]) -> None:
        self._requests_came = came

    def open_stream(self, listener: Listener) -> int:
        stream_id = self._next_stream_id
        self._next_stream_id += 1
        self._streams[stream_id] = Stream(listener)
        self.post(StreamOpened(self._clock.now_s, stream_id))
        return stream_id

    def close_stream(self, stream_id: int) -> None:
        if (stream := self._streams.pop(stream_id, None)) is not None:
            stream.open = False
            self.post(StreamClosed(self._clock.now_s, stream_id))

    def crash(self) -> None:
        """The process ends.

        Raises:
            ConfigError: it is a member of a group.
        """
        if self.member.role.stages:
            raise ConfigError(
                f"faults: crash of {self.worker_id} at {self._clock.now_s:.1f} s of the world",
                "it is a member of a pipeline then, which is not simulated yet; choose another instant or worker",
            )
        self.catch_up()
        self.crashed = True
        self._turns.close()
        self._inbox.clear()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.open = False
            stream.listener.lost("its process has ended")

    def load(self) -> LoadReport:
        """The state after the last turn."""
        return self._report if self._cruise is None else self._cruise.load()

    def spend(self, seconds: float, then: Callable[[], None]) -> None:
        """Whatever is handled now keeps the engine busy for so long."""
        self._debts.append((seconds, then))

    def catch_up(self) -> None:
        """The books say what the steps of a cruise that have landed have done. Only once nothing else will happen:
        the cruise does not go on.
        """
        if self._cruise is not None:
            self._end_cruise(self._cruise)

    def check(self) -> None:
        self.core.check()
        self.member.check()

    # ------------------------------------------------------------ the engine

    def _go_on(self) -> None:
        if self.crashed:
            return
        self._resting = False
        if self._cruise is None:
            self.touched = True
        busy_s = next(self._turns)
        if busy_s < 0.0:
            self._rest()
        else:
            self._clock.after(busy_s, self._goes_on_label, self._go_on)

    def _rest(self) -> None:
        self._resting = True
        due_at_s = self.core.next_deadline_at_s
        if due_at_s is not None and not self._clock.now_s < self._alarm_at_s <= due_at_s:
            self._alarm_at_s = max(due_at_s, self._clock.now_s)
            self._clock.at(self._alarm_at_s, self._alarm_label, self._wake)

    def _wake(self) -> None:
        if self._resting:
            self._go_on()

    def _run(self) -> Turns:
        """One turn after the other, for ever."""
        inbox, core, member = self._inbox, self.core, self.member
        yield -1.0
        while True:
            events = list(inbox)
            inbox.clear()
            for event in events:
                if callable(event):
                    event()
                else:
                    self._feed(event)
                if self._debts or self._to_run:
                    yield from self._pay()
            due_at_s = core.next_deadline_at_s
            if due_at_s is not None and due_at_s <= self._clock.now_s:
                self._feed(Tick(self._clock.now_s))
            member.poll()
            if self._debts:
                yield from self._pay()
            if member.answers:
                self._take_answers()
            stepping = core.has_work and member.may_form
            if stepping and not events and (cruise := self._cruise_ahead()) is not None:
                yield from self._on_cruise(cruise)
                continue
            if stepping:
                yield from self._steps()
            if events or stepping or self._told:
                self._tell(events)
            if not inbox and not self._may_step:
                yield -1.0

    @property
    def _may_step(self) -> bool:
        """What lacks blocks waits for those in flight to land."""
        if not (self.core.has_work and self.member.may_form) or (self._fruitless and self.core.in_flight_count):
            self._fruitless = 0
            return False
        if self._fruitless > _MAX_FRUITLESS:
            raise InvariantViolation(f"{self.worker_id} has work and forms no batch of it")
        return True

    def _pay(self) -> Turns:
        while self._debts or self._to_run:
            if self._debts:
                seconds, then = self._debts.popleft()
                yield seconds
                then()
                self._release_early()
            else:
                flight = self._to_run.popleft()
                yield self._begin(flight.work, self._token_count(flight.batch))
                self._pass_on(flight)

    def _steps(self) -> Turns:
        """Forms batches while it may; alone, what has come in meanwhile is looked at after each."""
        core, member = self.core, self.member
        while True:
            formed = self._form()
            if formed is None:
                self._fruitless += 1
                return
            self._fruitless = 0
            copy_s = self._copy_s(formed.copies) if formed.copies else 0.0
            if isinstance(formed, Removed):  # nothing to compute meanwhile
                yield copy_s
                return
            batch = formed.batch
            if core.in_flight_count == 1:
                self._flying_since_s = self._clock.now_s
            work = self._execution.work(batch)
            seconds = self._begin(work, self._token_count(batch))
            yield max(seconds, copy_s)
            if not member.role.stages:
                self._land(batch, seconds, copy_s)
                return
            self._pass_on(self._flight(batch, work))
            if not (core.has_work and member.may_form):
                return

    def _cruise_ahead(self) -> Cruise | None:
        """If what comes is a number of steps in which nothing is decided, and each dispatcher has tokens in each."""
        if self._costs is None or self.member.role.stages or self._told or not self.member.at_rest:
            return None
        plain = self.core.plain_steps()
        if plain is None or plain.limit < _MIN_CRUISE:
            return None
        load = self.core.load(self._clock.now_s, self.member.memory.report())
        cruise = Cruise(plain, load)
        if load.used_block_count + plain.growth(0) > load.block_count or cruise.shares.keys() != self._streams.keys():
            return None
        for stream_id, share in cruise.shares.items():
            share.seen_handle = self._streams[stream_id].seen_handle
        return cruise

    def _on_cruise(self, cruise: Cruise) -> Turns:
        """Step by step, as `_steps` and `_tell` do it, until something has come or a step is another one."""
        assert self._costs is not None, "asked before"
        # What each step looks at is at hand: there may be thousands of instances, and what one needs is in no cache.
        plain, inbox, growth = cruise.plain, self._inbox, cruise.plain.growth
        decodes, layer_count = self._costs.decodes, len(self.member.role.layers)
        count, context, limit = len(plain.sequences), plain.context_tokens, plain.limit
        hearers = [(self._streams[stream_id], share) for stream_id, share in cruise.shares.items()]
        before = cruise.load()
        used, step, added, block_count = before.used_block_count, 0, growth(0), before.block_count
        due_at_s = self.core.next_deadline_at_s
        self._fruitless = 0
        self._cruise = cruise
        while True:
            used += added
            yield self._busy(decodes(count, context).on(layer_count, is_last=True), count)
            context += count
            step += 1
            cruise.landed, cruise.used_block_count = step, used
            for stream, share in hearers:
                if stream.open:
                    stream.listener.hear_step(share, step, used)
            added = growth(step)
            if inbox or step == limit or used + added > block_count:
                break
            if due_at_s is not None and due_at_s <= self._clock.now_s:
                break
        self._end_cruise(cruise)
        if inbox:
            self._tell([])

    def _end_cruise(self, cruise: Cruise) -> None:
        now_s = self._clock.now_s
        self._cruise, self._report, self.touched = None, cruise.load(), True
        if cruise.landed:
            self.core.take_plain_steps(cruise.plain, cruise.token_ids(), cruise.landed, now_s)
        for stream_id, share in cruise.shares.items():
            if stream_id in self._streams:
                stream = self._streams[stream_id]
                stream.told, stream.told_handle, stream.sent_at_s = self._report, share.seen_handle, now_s

    def _form(self) -> Execute | Removed | None:
        """A batch, or copies of KV without one."""
        formed: Execute | Removed | None = None
        for command in self.core.handle(BatchWanted(self._clock.now_s)):
            if isinstance(command, Execute) or (isinstance(command, Removed) and command.copies):
                formed = command
            else:
                self._note(command)
        return formed

    def _copy_s(self, copies: Sequence[BlockCopy]) -> float:
        """Both ways at once."""
        out_count = sum(len(copy.device_blocks) for copy in copies if copy.out)
        in_count = sum(len(copy.device_blocks) for copy in copies if not copy.out)
        geometry = self.member.memory.geometry
        return max(out_count, in_count) * geometry.block_bytes * geometry.layer_count / self._host_bytes_per_s

    def _token_count(self, batch: Batch) -> int:
        """Of new ones; nobody asks where no processors are shared."""
        return 0 if self._processors is None else sum([part.samples for part in batch.slices])

    def _begin(self, work: Work, token_count: int) -> float:
        """Of a batch that gives so many tokens."""
        role = self.member.role
        is_last = role.is_last
        seconds = self._busy(work.on(len(role.layers), is_last=is_last), token_count if is_last else 0)
        if role.stages:
            self.pipelined_busy_s += seconds
        return seconds

    def _busy(self, seconds: float, token_count: int) -> float:
        """With what would take so long on a machine as it should be, and by itself."""
        seconds *= self.slowness
        if self._processors is not None:
            seconds *= self._processors.slowdown(self.worker_id, self._clock.now_s, seconds, token_count)
        self.busy_s += seconds
        return seconds

    def _feed(self, event: Event) -> None:
        for command in self.core.handle(event):
            self._note(command)

    def _note(self, command: Command) -> None:
        if isinstance(command, Removed):
            self._forward_removed(command)
        else:
            self._told.append(command)

    def _take_answers(self) -> None:
        answers, self.member.answers = self.member.answers, []
        self._told += answers

    # ------------------------------------------------------------ batches between stages

    def _land(self, batch: Batch, execute_s: float = 0.0, copy_s: float = 0.0) -> None:
        """All stages have run it. A token is the number of its place, so that whoever gets it sees gaps."""
        token_ids = tuple([first + len(ids) for _, first, ids, samples in batch.slices if samples])
        count = len(token_ids)
        if count not in _NO_TEXTS:
            _NO_TEXTS[count], _NO_LOGPROBS[count] = ("",) * count, (None,) * count
        result = StepResult(batch.step_id, token_ids, _NO_LOGPROBS[count], execute_s, copy_s)
        for command in self.core.handle(StepDone(self._clock.now_s, result, _NO_TEXTS[count])):
            self._note(command)

    def _pass_on(self, flight: InFlight) -> None:
        """This stage has run it: to the next one, or back to the leader."""
        member, batch = self.member, flight.batch
        if not member.role.is_last:
            self._send_batch(flight)
        elif batch.slices:
            leader = self._peers[member.role.stages[0].worker_id]
            label = self._result_label
            self._network.send(
                self.worker_id,
                leader.worker_id,
                BATCH_BYTES * len(batch.slices),
                label,
                lambda: leader.post(lambda: leader.result_came(flight)),
            )

    def _flight(self, batch: Batch, work: Work) -> InFlight:
        epoch = self.member.role.epoch
        return flight_of(epoch, batch, work, block_tokens=self._block_tokens, token_bytes=self._activation_bytes)

    def _send_batch(self, flight: InFlight) -> None:
        stage = self._peers[self.member.role.next_stage]
        self._network.send(
            self.worker_id,
            stage.worker_id,
            flight.size_bytes,
            self._batch_label,
            lambda: stage.post(lambda: stage.batch_came(flight)),
        )

    def _forward_removed(self, command: Removed) -> None:
        """A batch without work: the stages behind are to forget sequences."""
        if not self.member.role.is_last:
            self._send_batch(self._flight(command.batch, Work(0.0, 0.0, 0.0)))

    def batch_came(self, flight: InFlight) -> None:
        member = self.member
        if member.is_early(flight.epoch):
            self._early.append(flight)
        elif flight.epoch < member.role.epoch or member.role.leads:
            raise InvariantViolation(f"{self.worker_id} gets a batch of epoch {flight.epoch} in {member.role.epoch}")
        else:
            member.book.apply(flight.growing)
            self._to_run.append(flight)

    def _release_early(self) -> None:
        """After a change of the role, or a roster."""
        early, self._early = self._early, []
        for flight in early:
            self.batch_came(flight)

    def result_came(self, flight: InFlight) -> None:
        if flight.epoch != self.member.role.epoch:
            raise InvariantViolation(f"{self.worker_id} gets a result of epoch {flight.epoch}")
        self._land(flight.batch)
        if self.core.in_flight_count == 0:
            self.pipelined_s += (self._clock.now_s - self._flying_since_s) * len(self.member.role.stages)

    # ------------------------------------------------------------ news for dispatchers

    def _tell(self, events: list[Event | Callable[[], None]]) -> None:
        now_s = self._clock.now_s
        if self.member.answers:
            self._take_answers()
        told, self._told = self._told, []
        self._report = report = self.core.load(now_s, self.member.memory.report())
        for event in events:
            if isinstance(event, Submitted) and (stream := self._streams.get(event.key.stream_id)):
                stream.seen_handle = event.key.handle
        if self._requests_came is not None and any(isinstance(event, Submitted) for event in events):
            self._requests_came(report)
        for command in told:
            if isinstance(command, Emit):
                stream = self._streams.get(command.stream_id)
                if stream is not None:
                    stream.seen_handle = max(stream.seen_handle, command.seen_handle)
                    stream.tell(command, report, now_s)
            elif isinstance(command, StreamsLost):
                raise InvariantViolation(f"{self.worker_id} loses its group; losses are not simulated yet")
        stream_count = len(self._streams)
        for stream in self._streams.values():
            silent_s, more = now_s - stream.sent_at_s, stream.seen_handle > stream.told_handle
            if is_due(stream.told, report, silent_s, stream_count, counts_more=more):
                stream.tell(None, report, now_s)
