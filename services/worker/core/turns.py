"""One turn of the engine loop: the core and the group member handle pending events, then batches are run.

A worker's engine thread and the simulator execute the same turns. `take_in` and `step` yield after requesting work that
takes time. In a thread that time has already passed; a simulation lets virtual time pass.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ballast.common.errors import InvariantViolation
from services.worker.core.batch import PREEMPTED, StepResult
from services.worker.core.events import (
    BatchWanted,
    Command,
    Event,
    Execute,
    Removed,
    StepDone,
    StepFailed,
    StepPreempted,
    Tick,
)
from services.worker.core.report import Parks
from services.worker.core.worker import WorkerCore


class MemberEvent:
    """Base of events for this worker as a member of a group; handled by `TurnMember`, not by the core."""

    __slots__ = ()

    @property
    def preempts(self) -> bool:
        """True if offline work is preempted within its step for this event."""
        return False


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """A batch has completed or failed."""

    step_id: int
    result: StepResult | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class LaunchedBatch:
    """A batch that was launched on the device."""

    step_id: int
    collect: Callable[[], StepOutcome]  # waits for the outcome


class TurnMember(Protocol):
    """This worker as a member of its group. Called only from the engine thread."""

    @property
    def newest_epoch(self) -> int:
        """Newest epoch of a transition known to this worker."""
        ...

    @property
    def parks(self) -> Parks: ...

    @property
    def may_form(self) -> bool:
        """True if batches may be formed; False while the layout changes."""
        ...

    @property
    def at_rest(self) -> bool:
        """True if `poll` has nothing to do."""
        ...

    @property
    def wakes_at_s(self) -> float | None:
        """Time at which `poll` must be called even without an event."""
        ...

    @property
    def pipeline_request_count(self) -> int | None:
        """Number of requests in the pipeline in which this worker is, or is about to become, a stage; None: no
        pipeline.
        """
        ...

    def handle(self, event: MemberEvent) -> list[Command | StepOutcome]:
        """Handle an event. Any `Removed` among the returned commands has already been executed."""
        ...

    def poll(self) -> list[Command | StepOutcome]:
        """Continue work that waits for a step boundary or for room; called between two turns."""
        ...

    def run(self, command: Execute | Removed) -> StepOutcome | LaunchedBatch | None:
        """Execute a batch, or launch it. None: its outcome follows when it has passed all stages, or it has no
        outcome.
        """
        ...

    def check(self) -> None: ...

    def close(self) -> None: ...


class Turns(ABC):
    """Base of the turns of the engine thread and of the simulator, which define how a batch is run. A turn is
    `take_in`, then `step` while `steps`; `commands` then holds the output for dispatchers.

    With asynchronous scheduling one batch stays launched between two turns, and the next one is launched before its
    outcome is collected. The member does not notice, because launched batches are collected before it handles an event,
    and at once while it is not at rest.
    """

    __slots__ = ("_launched", "_member", "_now", "commands", "core", "fruitless_count")

    def __init__(self, core: WorkerCore, now: Callable[[], float]) -> None:
        self.core = core
        self._member: TurnMember | None = None
        self._launched: deque[LaunchedBatch] = deque()
        self.commands: list[Command] = []
        self.fruitless_count = 0  # consecutive `BatchWanted` events that gave no batch
        self._now = now

    # ---------------------------------------------------------------- for subclasses

    @abstractmethod
    def run(self, command: Execute | Removed) -> StepOutcome | LaunchedBatch | None:
        """Execute a batch, or a removal. None: the outcome follows, or there is none."""

    @abstractmethod
    def texts_of(self, outcome: StepOutcome) -> tuple[str, ...]:
        """One text for each token of a batch that has completed, failed or been preempted."""

    def note(self, command: Command) -> None:
        """Collect a command of the core or the member in `commands`, except `Removed`, which is not for dispatchers."""
        if not isinstance(command, Removed):
            self.commands.append(command)

    # ---------------------------------------------------------------- turns

    @property
    def may_step(self) -> bool:
        return self.core.has_work and (self._member is None or self._member.may_form)

    @property
    def steps(self) -> bool:
        """True if a batch may be formed, or one is launched."""
        return bool(self._launched) or self.may_step

    @property
    def rests(self) -> bool:
        """True if there is nothing to do until the next event, because no batch may be formed or none could be
        (sequences wait for blocks of batches in flight).
        """
        if self._launched:
            return False
        return not self.may_step or (self.fruitless_count > 0 and self.core.in_flight_count > 0)

    def take_in(self, events: Iterable[Event | MemberEvent]) -> Iterator[None]:
        core, member = self.core, self._member
        for event in events:
            if not isinstance(event, MemberEvent):
                self._feed(event)
            elif member is None:
                raise InvariantViolation("an event for a group member, which this worker is not")
            else:
                self._collect()
                self._take(member.handle(event))
            yield
        due_at_s, now_s = core.next_deadline_at_s, self._now()
        if due_at_s is not None and due_at_s <= now_s:
            self._feed(Tick(now_s))
        if member is not None:
            if not member.at_rest:
                self._collect()
            self._take(member.poll())
            yield

    def step(self) -> Iterator[None]:
        """Form and run at most one batch. The next turn then begins, so that events need not wait until a pipeline is
        full.
        """
        formed = self._form() if self.may_step or not self._launched else None
        self.fruitless_count = 0 if formed is not None else self.fruitless_count + 1
        if formed is None:
            self._collect()
            return
        outcome = self.run(formed)
        yield
        if isinstance(outcome, LaunchedBatch):
            self._launched.append(outcome)
            at_rest = self._member is None or self._member.at_rest
            self._collect(1 if at_rest and self.core.group_scheduler.goes_ahead else 0)
            return
        self._collect()
        if outcome is not None:
            self._land(outcome)

    def _form(self) -> Execute | Removed | None:
        """Form a batch, or a removal with copies of KV."""
        formed: Execute | Removed | None = None
        for command in self.core.handle(BatchWanted(self._now())):
            if isinstance(command, Execute) or (isinstance(command, Removed) and command.copies):
                formed = command
            else:
                self._answered(command)
        return formed

    def _collect(self, left_count: int = 0) -> None:
        """Collect all launched batches but the latest `left_count`."""
        while len(self._launched) > left_count:
            self._land(self._launched.popleft().collect())

    def _feed(self, event: Event) -> None:
        for command in self.core.handle(event):
            self._answered(command)

    def _answered(self, command: Command) -> None:
        self.note(command)
        if isinstance(command, Removed):
            self.run(command)

    def _take(self, answers: Sequence[Command | StepOutcome]) -> None:
        for answer in answers:
            if isinstance(answer, StepOutcome):
                self._land(answer)
            else:
                self.note(answer)

    def _land(self, outcome: StepOutcome) -> None:
        texts = self.texts_of(outcome)
        if outcome.why == PREEMPTED:
            self._feed(StepPreempted(self._now(), outcome.step_id))
        elif outcome.result is None:
            self._feed(StepFailed(self._now(), outcome.step_id, outcome.why))
        else:
            self._feed(StepDone(self._now(), outcome.result, texts))
