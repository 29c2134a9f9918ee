"""What this worker's core answers to something that it is told here, on its way to the shell."""

from collections.abc import Callable

from services.worker.core.events import Command, Event, Removed
from services.worker.core.worker import WorkerCore
from services.worker.shell import StepOutcome

Answer = Command | StepOutcome


class Answers:
    """The shell hears of every answer: it tells dispatchers, and forgets texts."""

    def __init__(self, core: WorkerCore, run: Callable[[Removed], StepOutcome | None]) -> None:
        """`run` tells this member's stages of sequences that have ended."""
        self._core = core
        self._run = run
        self._answers: list[Answer] = []

    def tell(self, event: Event) -> list[Command]:
        commands = self._core.handle(event)
        for command in commands:
            if isinstance(command, Removed):
                outcome = self._run(command)
                assert outcome is None or not command.batch.slices
            self._answers.append(command)
        return commands

    def add(self, outcome: StepOutcome) -> None:
        self._answers.append(outcome)

    def take(self) -> list[Answer]:
        answers, self._answers = self._answers, []
        return answers
