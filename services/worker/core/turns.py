"""The turns of an engine: what has come in goes to the core and to the member of a group, then batches are run.

A worker's engine thread and the simulator take the same turns. `take_in` and `step` stop where what has been asked of
the engine takes its time: for a thread that has passed by then, in a simulation it is let pass.
"""

from abc import ABC, abstractmethod
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
    """Base of what concerns this worker as a member of a group; handled by `Member`, not by the core."""

    __slots__ = ()

    @property
    def preempts(self) -> bool:
        """Whether offline work makes way for it within its step."""
        return False


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """A batch has come back: its result, or why it could not be run."""

    step_id: int
    result: StepResult | None
    why: str = ""


class Member(Protocol):
    """This worker's place in its group. All calls come from the engine thread."""

    @property
    def newest_epoch(self) -> int:
        """The newest epoch of a transition that this worker has heard of."""
        ...

    @property
    def parks(self) -> Parks: ...

    @property
    def may_form(self) -> bool:
        """Whether batches may be formed: not while the layout changes."""
        ...

    @property
    def wakes_at_s(self) -> float | None:
        """When `poll` wants to be called although nothing has happened."""
        ...

    @property
    def pipeline_request_count(self) -> int | None:
        """Requests in the pipeline of which this worker holds a part, or is about to; None: there is none."""
        ...

    def handle(self, event: MemberEvent) -> list[Command | StepOutcome]:
        """It has carried out each `Removed` of the answer itself."""
        ...

    def poll(self) -> list[Command | StepOutcome]:
        """Between two turns: whatever waits for a step boundary or for room."""
        ...

    def run(self, command: Execute | Removed) -> StepOutcome | None:
        """Executes a batch. None: it has gone on to the next stage, its outcome follows, or there is none."""
        ...

    def check(self) -> None: ...

    def close(self) -> None: ...


class Turns(ABC):
    """Base of those of a thread and of a simulation, which say how a batch is run. A turn is `take_in`, `step` while
    `may_step`, and then what is in `commands` is for dispatchers.
    """

    __slots__ = ("_member", "_now", "commands", "core", "fruitless_count")

    def __init__(self, core: WorkerCore, now: Callable[[], float]) -> None:
        self.core = core
        self._member: Member | None = None
        self.commands: list[Command] = []
        self.fruitless_count = 0  # batches wanted in a row, and none formed
        self._now = now

    # ---------------------------------------------------------------- of a thread, or of a simulation

    @abstractmethod
    def run(self, command: Execute | Removed) -> StepOutcome | None:
        """Execute a batch, or forget a sequence. None: the outcome follows, or there is none."""

    @abstractmethod
    def texts_of(self, outcome: StepOutcome) -> tuple[str, ...]:
        """One for each token of a batch that has come back, or has failed or been preempted."""

    def note(self, command: Command) -> None:
        """The core, or the member, has answered with it. What is `Removed` is no news for dispatchers."""
        if not isinstance(command, Removed):
            self.commands.append(command)

    # ---------------------------------------------------------------- turns

    @property
    def may_step(self) -> bool:
        return self.core.has_work and (self._member is None or self._member.may_form)

    @property
    def rests(self) -> bool:
        """Nothing is to be done until something comes. What lacks blocks waits for batches in flight to land."""
        return not self.may_step or (self.fruitless_count > 0 and self.core.in_flight_count > 0)

    def take_in(self, events: Iterable[Event | MemberEvent]) -> Iterator[None]:
        core, member = self.core, self._member
        for event in events:
            if not isinstance(event, MemberEvent):
                self._feed(event)
            elif member is None:
                raise InvariantViolation("an event for a member of a group, and this worker is none")
            else:
                self._take(member.handle(event))
            yield
        due_at_s, now_s = core.next_deadline_at_s, self._now()
        if due_at_s is not None and due_at_s <= now_s:
            self._feed(Tick(now_s))
        if member is not None:
            self._take(member.poll())
            yield

    def step(self) -> Iterator[None]:
        """Forms batches while it may; alone, what has come in meanwhile is looked at after each."""
        while True:
            formed = self._form()
            self.fruitless_count = 0 if formed is not None else self.fruitless_count + 1
            if formed is None:
                return
            outcome = self.run(formed)
            yield
            if outcome is not None:
                self._land(outcome)
                return
            if isinstance(formed, Removed) or not self.may_step:
                return

    def _form(self) -> Execute | Removed | None:
        """A batch, or copies of KV without one."""
        formed: Execute | Removed | None = None
        for command in self.core.handle(BatchWanted(self._now())):
            if isinstance(command, Execute) or (isinstance(command, Removed) and command.copies):
                formed = command
            else:
                self._answered(command)
        return formed

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
