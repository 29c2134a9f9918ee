"""Estimates the remaining tokens of an answer from past answers.

The estimate is the tokens of all answers divided by the number of ended ones. Tokens of running answers are included,
because otherwise short answers would dominate at first. For memoryless lengths this is the expected remainder at any
time, so it is used for both new and running answers. There is one estimate per class, since a dispatcher serves a
single model. Both sums start with a few pseudo-answers of the configured length, and decay.
"""

from collections.abc import Iterable

from ballast.common.errors import InvariantViolation
from ballast.common.sampling import PriorityClass
from services.dispatcher.core.tracked import Tracked

_PRIOR_COUNT = 4.0  # pseudo-answers of the configured length
_MEMORY_COUNT = 1_000.0  # ended answers after which an older one's weight has decayed to 1/e
_INTERVAL_S = 1.0  # interval of scans of running answers


class _Class:
    __slots__ = ("ended_count", "gone_tokens", "known_tokens", "new_count", "tokens")

    def __init__(self, prior_tokens: int) -> None:
        self.ended_count = _PRIOR_COUNT
        self.tokens = _PRIOR_COUNT * prior_tokens
        self.new_count = 0  # number of answers ended since the last scan
        self.gone_tokens = 0  # total tokens of removed answers
        self.known_tokens = 0  # total tokens of all answers at the last scan


class Growth:
    def __init__(self, prior_tokens: int) -> None:
        """`prior_tokens`: assumed length of an answer."""
        self._classes = {priority: _Class(prior_tokens) for priority in PriorityClass}
        self._evaluated_at_s = 0.0

    def tokens(self, priority: PriorityClass) -> int:
        one = self._classes[priority]
        return round(one.tokens / one.ended_count)

    def leave(self, tracked: Tracked, *, ended: bool) -> None:
        """Remove a request. `ended`: its answer is complete."""
        one = self._classes[tracked.request.priority]
        one.gone_tokens += tracked.made_count
        one.new_count += ended

    def is_due(self, at_s: float) -> bool:
        return at_s >= self._evaluated_at_s + _INTERVAL_S

    def look(self, live: Iterable[Tracked], at_s: float) -> None:
        """Update the sums from all answers. `live`: all requests that have not been removed."""
        self._evaluated_at_s = at_s
        totals = self._totals(live)
        for priority, one in self._classes.items():
            kept = (1.0 - 1.0 / _MEMORY_COUNT) ** one.new_count
            one.tokens = one.tokens * kept + totals[priority] - one.known_tokens
            one.ended_count = one.ended_count * kept + one.new_count
            one.known_tokens, one.new_count = totals[priority], 0

    def _totals(self, live: Iterable[Tracked]) -> dict[PriorityClass, int]:
        """Return the total tokens of all answers by class, including those of removed requests."""
        totals = {priority: one.gone_tokens for priority, one in self._classes.items()}
        for tracked in live:
            totals[tracked.request.priority] += tracked.made_count
        return totals

    def check(self, live: Iterable[Tracked]) -> None:
        """Raise InvariantViolation if more tokens are counted than were generated."""
        totals = self._totals(live)
        for priority, one in self._classes.items():
            if one.known_tokens > totals[priority] or one.tokens < 0.0 or one.ended_count <= 0.0:
                raise InvariantViolation(f"{priority}: {one.known_tokens} tokens counted of {totals[priority]}")
