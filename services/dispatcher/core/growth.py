"""How many tokens an answer is still going to have, learnt from the answers so far.

Tokens of all answers over the number that have ended: those that run count with what they have, else only the short
ones would be known at first. It is what a memoryless answer has left on average, however long it has been running, so
it is asked for newcomers and for answers that go on alike. Classes of requests are kept apart; a dispatcher serves one
model. Both sums begin with a few answers of the length that the setting says, and forget what is long ago.
"""

from collections.abc import Iterable

from ballast.common.errors import InvariantViolation
from ballast.common.sampling import PriorityClass
from services.dispatcher.core.tracked import Tracked

_PRIOR_COUNT = 4.0  # answers of the length in the setting
_MEMORY_COUNT = 1_000.0  # after so many answers what was before counts for a third
_INTERVAL_S = 1.0  # between two looks at all that runs


class _Class:
    __slots__ = ("ended_count", "gone_tokens", "known_tokens", "new_count", "tokens")

    def __init__(self, prior_tokens: int) -> None:
        self.ended_count = _PRIOR_COUNT
        self.tokens = _PRIOR_COUNT * prior_tokens
        self.new_count = 0  # ended since the last look
        self.gone_tokens = 0  # ever, of answers that are no more
        self.known_tokens = 0  # ever, of all answers, at the last look


class Growth:
    def __init__(self, prior_tokens: int) -> None:
        """`prior_tokens`: of an answer, before any is known."""
        self._classes = {priority: _Class(prior_tokens) for priority in PriorityClass}
        self._looked_at_s = 0.0

    def tokens(self, priority: PriorityClass) -> int:
        one = self._classes[priority]
        return round(one.tokens / one.ended_count)

    def leave(self, tracked: Tracked, *, ended: bool) -> None:
        """The request is no more. `ended`: its answer came to its end, and was not cut short."""
        one = self._classes[tracked.request.priority]
        one.gone_tokens += len(tracked.output_token_ids)
        one.new_count += ended

    def is_due(self, at_s: float) -> bool:
        return at_s >= self._looked_at_s + _INTERVAL_S

    def look(self, live: Iterable[Tracked], at_s: float) -> None:
        """`live`: all requests that have not left."""
        self._looked_at_s = at_s
        totals = self._totals(live)
        for priority, one in self._classes.items():
            kept = (1.0 - 1.0 / _MEMORY_COUNT) ** one.new_count
            one.tokens = one.tokens * kept + totals[priority] - one.known_tokens
            one.ended_count = one.ended_count * kept + one.new_count
            one.known_tokens, one.new_count = totals[priority], 0

    def _totals(self, live: Iterable[Tracked]) -> dict[PriorityClass, int]:
        """Tokens of all answers ever."""
        totals = {priority: one.gone_tokens for priority, one in self._classes.items()}
        for tracked in live:
            totals[tracked.request.priority] += len(tracked.output_token_ids)
        return totals

    def check(self, live: Iterable[Tracked]) -> None:
        """Raise InvariantViolation unless no token has been counted that is not there."""
        totals = self._totals(live)
        for priority, one in self._classes.items():
            if one.known_tokens > totals[priority] or one.tokens < 0.0 or one.ended_count <= 0.0:
                raise InvariantViolation(f"{priority}: {one.known_tokens} tokens are known of {totals[priority]}")
