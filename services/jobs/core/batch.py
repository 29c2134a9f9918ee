"""A batch and its states, with OpenAI's names."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from ballast.common.errors import NotPossible


class State(StrEnum):
    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    CANCELLING = "cancelling"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


_ENDED: Final = frozenset({State.COMPLETED, State.FAILED, State.EXPIRED, State.CANCELLED})
_NEXT: Final[Mapping[State, frozenset[State]]] = {
    State.VALIDATING: frozenset({State.IN_PROGRESS, State.FAILED, State.CANCELLING, State.FINALIZING}),
    State.IN_PROGRESS: frozenset({State.CANCELLING, State.FINALIZING}),
    State.CANCELLING: frozenset({State.FINALIZING}),
    State.FINALIZING: frozenset({State.COMPLETED, State.EXPIRED, State.CANCELLED}),
}


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with an input file. `line` counts from 1; None: with all of it."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One job.

    Attributes:
        owner: Name of the token that made it; "" where there are no tokens.
        url: Path that all of its lines are sent to.
        outcome: What it is after FINALIZING.
        at_s: When it came into each state.
        total, completed, failed: Lines; the last two have a result.
    """

    id: str
    owner: str
    url: str
    input_file_id: str
    window: str
    created_s: float
    expires_s: float
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    state: State = State.VALIDATING
    outcome: State = State.COMPLETED
    at_s: Mapping[State, float] = field(default_factory=dict[State, float])
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    problems: tuple[Problem, ...] = ()

    @property
    def has_ended(self) -> bool:
        return self.state in _ENDED

    @property
    def is_sending(self) -> bool:
        return self.state is State.IN_PROGRESS

    def checked(self, total: int, now_s: float) -> "Batch":
        """The batch in progress: all `total` lines are valid."""
        return replace(self._become(State.IN_PROGRESS, now_s), total=total)

    def refused(self, problems: tuple[Problem, ...], now_s: float) -> "Batch":
        return replace(self._become(State.FAILED, now_s), problems=problems)

    def cancel(self, now_s: float) -> "Batch":
        """Itself if that is under way already.

        Raises:
            NotPossible: it has ended, or is about to.
        """
        if self.state is State.CANCELLING or (self.state is State.FINALIZING and self.outcome is State.CANCELLED):
            return self
        return self._become(State.CANCELLING, now_s)

    def counted(self, completed: int, failed: int) -> "Batch":
        return replace(self, completed=self.completed + completed, failed=self.failed + failed)

    def due(self, now_s: float, *, calls: int) -> "Batch":
        """What time and its lines make of it: itself, or FINALIZING. `calls`: those of its lines that are open."""
        if self.state is State.CANCELLING:
            return self if calls else self._finalize(State.CANCELLED, now_s)
        if self.state not in (State.VALIDATING, State.IN_PROGRESS):
            return self
        if self.is_sending and self.completed + self.failed == self.total:
            return self._finalize(State.COMPLETED, now_s)
        return self._finalize(State.EXPIRED, now_s) if now_s >= self.expires_s else self

    def finished(self, output_file_id: str | None, error_file_id: str | None, now_s: float) -> "Batch":
        """Both files are in place."""
        ended = self._become(self.outcome, now_s)
        return replace(ended, output_file_id=output_file_id, error_file_id=error_file_id)

    def _finalize(self, outcome: State, now_s: float) -> "Batch":
        return replace(self._become(State.FINALIZING, now_s), outcome=outcome)

    def _become(self, state: State, now_s: float) -> "Batch":
        if state not in _NEXT.get(self.state, ()):
            raise NotPossible(f"batch {self.id} is {self.state} and cannot become {state}")
        return replace(self, state=state, at_s={**self.at_s, state: now_s})
