"""A batch and its states, which have OpenAI's names."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from ballast.common.errors import NotPossible


class BatchState(StrEnum):
    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    CANCELLING = "cancelling"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


_ENDED: Final = frozenset({BatchState.COMPLETED, BatchState.FAILED, BatchState.EXPIRED, BatchState.CANCELLED})
_NEXT: Final[Mapping[BatchState, frozenset[BatchState]]] = {
    BatchState.VALIDATING: frozenset(
        {BatchState.IN_PROGRESS, BatchState.FAILED, BatchState.CANCELLING, BatchState.FINALIZING}
    ),
    BatchState.IN_PROGRESS: frozenset({BatchState.CANCELLING, BatchState.FINALIZING}),
    BatchState.CANCELLING: frozenset({BatchState.FINALIZING}),
    BatchState.FINALIZING: frozenset({BatchState.COMPLETED, BatchState.EXPIRED, BatchState.CANCELLED}),
}


@dataclass(frozen=True, slots=True)
class Problem:
    """An error in an input file. `line`: its number, from 1; None: the error concerns the whole file."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobBatch:
    """One batch.

    Attributes:
        owner: Name of the token with which the batch was created; "" without tokens.
        url: Path to which all lines are sent.
        outcome: The state after FINALIZING.
        at_s: Time at which the batch entered each state.
        total: Number of lines; 0 until they are validated.
        completed: Number of lines with a successful answer.
        failed: Number of lines with another result.
    """

    id: str
    owner: str
    url: str
    input_file_id: str
    window: str
    created_s: float
    expires_s: float
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    state: BatchState = BatchState.VALIDATING
    outcome: BatchState = BatchState.COMPLETED
    at_s: Mapping[BatchState, float] = field(default_factory=dict[BatchState, float])
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
        return self.state is BatchState.IN_PROGRESS

    def checked(self, total: int, now_s: float) -> "JobBatch":
        """Return the batch as IN_PROGRESS, after its `total` lines were validated."""
        return replace(self._change_state(BatchState.IN_PROGRESS, now_s), total=total)

    def refused(self, problems: tuple[Problem, ...], now_s: float) -> "JobBatch":
        return replace(self._change_state(BatchState.FAILED, now_s), problems=problems)

    def cancel(self, now_s: float) -> "JobBatch":
        """Return the batch as CANCELLING, or unchanged if it is already being cancelled.

        Raises:
            NotPossible: the batch has ended, or is FINALIZING without having been cancelled.
        """
        if self.state is BatchState.CANCELLING or (
            self.state is BatchState.FINALIZING and self.outcome is BatchState.CANCELLED
        ):
            return self
        return self._change_state(BatchState.CANCELLING, now_s)

    def counted(self, completed: int, failed: int) -> "JobBatch":
        return replace(self, completed=self.completed + completed, failed=self.failed + failed)

    def due(self, now_s: float, *, calls: int) -> "JobBatch":
        """Return the batch as FINALIZING if all lines have results, its completion window is over, or it is cancelled
        and has no open calls; otherwise unchanged. `calls`: number of its open calls.
        """
        if self.state is BatchState.CANCELLING:
            return self if calls else self._finalize(BatchState.CANCELLED, now_s)
        if self.state not in (BatchState.VALIDATING, BatchState.IN_PROGRESS):
            return self
        if self.is_sending and self.completed + self.failed == self.total:
            return self._finalize(BatchState.COMPLETED, now_s)
        return self._finalize(BatchState.EXPIRED, now_s) if now_s >= self.expires_s else self

    def finished(self, output_file_id: str | None, error_file_id: str | None, now_s: float) -> "JobBatch":
        """Return the batch in its final state `outcome`, after its output files were stored."""
        ended = self._change_state(self.outcome, now_s)
        return replace(ended, output_file_id=output_file_id, error_file_id=error_file_id)

    def _finalize(self, outcome: BatchState, now_s: float) -> "JobBatch":
        return replace(self._change_state(BatchState.FINALIZING, now_s), outcome=outcome)

    def _change_state(self, state: BatchState, now_s: float) -> "JobBatch":
        if state not in _NEXT.get(self.state, ()):
            raise NotPossible(f"batch {self.id} is {self.state} and cannot become {state}")
        return replace(self, state=state, at_s={**self.at_s, state: now_s})
