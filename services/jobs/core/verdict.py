"""Decides whether a gateway's answer becomes a line's result or the line is sent again."""

from dataclasses import dataclass
from typing import Final

_BUSY: Final = frozenset({429, 503})
_IN_VAIN: Final = frozenset({408, 409, 425, 499})  # client errors that may not recur on a retry
_MOST_TRIES: Final = 5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_NO_RIGHTS_PAUSE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class KeepResult:
    """The answer is the line's result."""

    is_success: bool


@dataclass(frozen=True, slots=True)
class Again:
    """The line is sent again after `after_s`. `counts`: whether the failed try counts towards the limit on tries."""

    after_s: float
    counts: bool
    why: str


Verdict = KeepResult | Again


def of_answer(status: int, retry_after_s: float | None, failed_count: int) -> Verdict:
    """Decide about a gateway's answer with this HTTP status. `failed_count`: earlier failed tries that count."""
    if 200 <= status < 300:
        return KeepResult(is_success=True)
    if status in _BUSY:
        return Again(min(retry_after_s or _FIRST_PAUSE_S, _LONGEST_PAUSE_S), counts=False, why="busy")
    if status in (401, 403):  # the cluster's token, with which lines are sent, was refused
        return Again(_NO_RIGHTS_PAUSE_S, counts=False, why="no_rights")
    if status == 504:  # a deadline set by the operator, because batches set none
        return Again(_FIRST_PAUSE_S, counts=False, why="deadline")
    if status >= 500 or status in _IN_VAIN:
        return _once_more(failed_count, "error") or KeepResult(is_success=False)
    return KeepResult(is_success=False)


def of_no_connection() -> Again:
    """Decide about a line for which no gateway could be reached."""
    return Again(_FIRST_PAUSE_S, counts=False, why="no_gateway")


def of_timeout() -> Again:
    """Decide about a line whose call this service ended after its time limit for lines."""
    return Again(_FIRST_PAUSE_S, counts=False, why="deadline")


def of_broken_call(failed_count: int) -> Again | None:
    """Decide about a line whose connection was lost during the call. None: this was the last try."""
    return _once_more(failed_count, "broken")


def _once_more(failed_count: int, why: str) -> Again | None:
    if failed_count + 1 >= _MOST_TRIES:
        return None
    return Again(min(_FIRST_PAUSE_S * 2**failed_count, _LONGEST_PAUSE_S), counts=True, why=why)
