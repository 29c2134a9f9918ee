"""The backlog: online requests that are not on any worker, ordered by priority class and a configurable order within
each class. The core limits its size (`limits.py`).
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum

from ballast.common.errors import InvariantViolation
from ballast.common.marks import MARK_TOKENS, Mark
from ballast.common.sampling import PriorityClass
from services.dispatcher.core.fair_queue import FairQueue
from services.dispatcher.core.tracked import Tracked

_MIN_RETRY_S, _MAX_RETRY_S = 0.1, 30.0


class Order(StrEnum):
    """Order within a class. Requests taken over from another dispatcher are always first."""

    FIRST_COME = "first-come"
    SHORTEST_FIRST = "shortest-first"  # fewest uncomputed tokens: low mean waits, but long prompts may starve
    DEADLINE = "deadline"  # earliest deadline


def _key_of(order: Order) -> Callable[[Tracked], tuple[float, int]]:
    """Sort key of a request within its class; constant while the request waits."""
    match order:
        case Order.FIRST_COME:
            return lambda tracked: (0.0, tracked.serial)
        case Order.SHORTEST_FIRST:
            return lambda tracked: (tracked.token_count if tracked.serial > 0 else -1.0, tracked.serial)
        case Order.DEADLINE:
            return lambda tracked: (tracked.request.deadline_at_s if tracked.serial > 0 else -1.0, tracked.serial)


class Backlog:
    """Requests ordered by class rank, then in the order of `FairQueue`. Requests that have waited for `lift_s`
    alternate with those of the class above.

    Insertion, removal of any request and iteration over the first few are cheap.
    """

    def __init__(self, order: Order = Order.FIRST_COME, lift_s: float = math.inf) -> None:
        key = _key_of(order)
        self._classes = [FairQueue(key) for _ in PriorityClass]  # one queue per class, by rank
        self._lift_s = lift_s
        self._now_s = 0.0
        self._callers: Counter[str] = Counter()  # caller -> number of requests
        self._caller_tokens: Counter[str] = Counter()
        self.count = 0
        self.token_count = 0
        self.shares = False  # True: workers cache prompt prefixes
        self._marks: dict[int, tuple[Mark, ...]] = {}  # serial -> prefix marks of its prompt
        self._mark_counts: Counter[Mark] = Counter()
        self._repeated_count = 0  # number of marks minus the number of distinct marks

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Tracked]:
        if self._lift_s == math.inf:
            return itertools.chain.from_iterable(self._classes)
        return self._each_once()

    @property
    def distinct_token_count(self) -> int:
        """Number of waiting prompt tokens. Shared prefixes count once."""
        return self.token_count - self._repeated_count * MARK_TOKENS

    @property
    def callers(self) -> Mapping[str, int]:
        """Number of waiting requests by caller."""
        return self._callers

    def most_of(self, count: int) -> list[tuple[str, int]]:
        """Return up to `count` callers with the most waiting requests, as (caller, number of its waiting requests)."""
        return self._callers.copy().most_common(count)  # a copy: metrics are read in another thread

    def tokens_of(self, caller: str) -> int:
        return self._caller_tokens[caller]

    def slice(self, begin: int, count: int, at_s: float = 0.0) -> list[Tracked]:
        self._now_s = max(self._now_s, at_s)
        return list(itertools.islice(self, begin, begin + count))

    def count_before(self, tracked: Tracked) -> int:
        """Return the number of requests ahead of this one's current or future position; a lower bound if there are
        many.
        """
        *better, own = self._classes[: tracked.request.priority.rank + 1]
        return sum(map(len, better)) + own.count_before(tracked)

    def add(self, tracked: Tracked) -> None:
        self._classes[tracked.request.priority.rank].add(tracked)
        self._tally(tracked, 1)

    def remove(self, tracked: Tracked) -> None:
        self._classes[tracked.request.priority.rank].remove(tracked)
        self._tally(tracked, -1)

    def serve(self, tracked: Tracked) -> None:
        """Remove a request that is sent to a worker. Its tokens are charged to its caller and, in each higher class
        with waiting requests, to the pseudo-caller of the class below.
        """
        rank = tracked.request.priority.rank
        for better in self._classes[:rank]:
            if len(better):
                better.serve_lower(tracked.token_count)
        if tracked.serial > 0:
            self._classes[rank].serve(tracked.request.caller, tracked.token_count)
        self.remove(tracked)

    def end(self, tracked: Tracked) -> None:
        """Charge the tokens generated for an ended request to its caller."""
        if tracked.made_count:
            self._classes[tracked.request.priority.rank].serve(tracked.request.caller, tracked.made_count)

    def _tally(self, tracked: Tracked, sign: int) -> None:
        caller = tracked.request.caller
        if marks := self._marks.pop(tracked.serial, ()) if sign < 0 else tracked.marks if self.shares else ():
            self._count_marks(tracked, marks, sign)
        self.count += sign
        self.token_count += sign * tracked.token_count
        self._callers[caller] += sign
        self._caller_tokens[caller] += sign * tracked.token_count
        if not self._callers[caller]:
            del self._callers[caller], self._caller_tokens[caller]

    def _count_marks(self, tracked: Tracked, marks: tuple[Mark, ...], sign: int) -> None:
        counts = self._mark_counts
        before = len(counts)
        if sign > 0:
            self._marks[tracked.serial] = marks
            counts.update(marks)
        else:
            counts.subtract(marks)
            for mark in marks:
                if not counts[mark]:
                    del counts[mark]
        self._repeated_count += sign * len(marks) - (len(counts) - before)

    def _each_once(self) -> Iterator[Tracked]:
        seen: set[int] = set()
        for rank in range(len(self._classes)):
            for tracked in self._in_turn(rank):
                if tracked.serial not in seen:
                    seen.add(tracked.serial)
                    yield tracked

    def _in_turn(self, rank: int) -> Iterator[Tracked]:
        """Yield the requests of a class, with those lifted from the class below."""
        lower = self._lifted(rank + 1) if rank + 1 < len(self._classes) else iter(())
        return self._classes[rank].in_turn(lower)

    def _lifted(self, rank: int) -> Iterator[Tracked]:
        """Yield the requests of a class in order, up to the first one that has not waited for `lift_s`."""
        since_s = self._now_s - self._lift_s
        return itertools.takewhile(lambda tracked: tracked.queued_at_s <= since_s, self._in_turn(rank))

    def check(self) -> None:
        for rank, queue in enumerate(self._classes):
            queue.check()
            for tracked in queue:
                if (
                    tracked.request.priority.rank != rank
                    or tracked.worker is not None
                    or tracked.handle
                    or tracked.moving
                ):
                    raise InvariantViolation(f"{tracked.request.request_id} does not belong in the backlog")
        counts = self.count, self.token_count, +self._callers
        each = list(itertools.chain.from_iterable(self._classes))
        if counts != (len(each), sum(t.token_count for t in each), Counter(t.request.caller for t in each)):
            raise InvariantViolation(f"backlog counts {self.count} requests and {self.token_count} tokens")
        marks = Counter(itertools.chain.from_iterable(self._marks.values()))
        if marks != self._mark_counts or self._repeated_count != marks.total() - len(marks):
            raise InvariantViolation(f"backlog counts {self._repeated_count} repeated marks, of {marks}")


class DrainRate:
    """Rate at which the backlog drains, smoothed over about `memory_s`."""

    def __init__(self, memory_s: float = 10.0) -> None:
        self._memory_s = memory_s
        self._weight = 0.0
        self._at_s = 0.0

    def count(self, at_s: float) -> None:
        self._weight = self._decayed(at_s) + 1.0
        self._at_s = at_s

    def per_s(self, at_s: float) -> float:
        return self._decayed(at_s) / self._memory_s

    def until_half_s(self, request_count: int, at_s: float) -> float:
        """Return the retry delay for refused requests: the time until half of the backlog has drained."""
        rate = self.per_s(at_s)
        return min(_MAX_RETRY_S, max(_MIN_RETRY_S, request_count / 2 / rate if rate > 0.0 else 1.0))

    def _decayed(self, at_s: float) -> float:
        return self._weight * math.exp(-max(0.0, at_s - self._at_s) / self._memory_s)
