"""Waiting requests of one class: a queue per caller, served fairly by tokens (pure).

Deficit round robin with a quantum of one request: the next caller is the one that has received the fewest tokens while
it had waiting requests. A returning caller starts level with the others, so credits do not accumulate.
"""

import bisect
import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator

from ballast.common.errors import InvariantViolation
from services.dispatcher.core.tracked import Tracked

_MOST_REMEMBERED = 4096  # callers without waiting requests whose served tokens are remembered; LRU
_MOST_COUNTED = 256
_LOWER = "\0"  # the class below, as a pseudo-caller

_Key = Callable[[Tracked], tuple[float, int]]
_Turn = tuple[float, str]  # tokens served, caller


class FairQueue:
    """Requests whose callers alternate; those of one caller are sorted by `key`. Requests taken over from other
    dispatchers are first.
    """

    def __init__(self, key: _Key) -> None:
        self._key = key
        self._front: list[Tracked] = []  # requests taken over, sorted by key
        self._queues: dict[str, list[Tracked]] = {}  # caller -> its requests sorted by key; never empty
        self._turns: list[_Turn] = []  # turns of the callers in `_queues`, sorted
        self._served: dict[str, float] = {}  # caller in `_queues` -> tokens served
        self._remembered: OrderedDict[str, float] = OrderedDict()
        self._reached = 0.0  # largest number of served tokens that a caller had at its turn
        self._lower_served = 0.0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Tracked]:
        return self.in_turn(iter(()))

    def in_turn(self, lower: Iterator[Tracked]) -> Iterator[Tracked]:
        """Yield requests in the order in which they will be served. `lower`: lifted requests of the class below, which
        alternate with the callers as if from one more caller.
        """
        yield from self._front
        if len(self._turns) == 1:
            first = next(lower, None)
            if first is None:
                yield from self._queues[self._turns[0][1]]
                return
            lower = itertools.chain((first,), lower)
        self._lower_served = max(self._lower_served, self._turns[0][0] if self._turns else self._reached)
        heap: list[tuple[float, str, int]] = [(self._lower_served, _LOWER, 0)]
        begun = 0
        while heap or begun < len(self._turns):
            while begun < len(self._turns) and (not heap or self._turns[begun] <= heap[0][:2]):
                heapq.heappush(heap, (*self._turns[begun], 0))
                begun += 1
            served, caller, at = heapq.heappop(heap)
            if caller == _LOWER:
                if (tracked := next(lower, None)) is None:
                    continue
            elif at < len(queue := self._queues[caller]):
                tracked = queue[at]
            else:
                continue
            yield tracked
            heapq.heappush(heap, (served + tracked.token_count, caller, at + 1))

    def count_before(self, tracked: Tracked) -> int:
        """Return the number of requests ahead of this one's current or future position; a lower bound if there are
        many.
        """
        if tracked.serial <= 0:
            return bisect.bisect_left(self._front, self._key(tracked), key=self._key)
        caller = tracked.request.caller
        own = self._queues.get(caller, [])
        count = bisect.bisect_left(own, self._key(tracked), key=self._key)
        begins = self._begins(caller) + sum(one.token_count for one in own[: min(count, _MOST_COUNTED)])
        count += len(self._front)
        for served, other in self._turns:
            if served > begins or count > _MOST_COUNTED:
                break
            if other != caller:
                for one in self._queues[other]:
                    if served > begins or count > _MOST_COUNTED:
                        break
                    served += one.token_count
                    count += 1
        return count

    def add(self, tracked: Tracked) -> None:
        self._count += 1
        if tracked.serial <= 0:
            bisect.insort(self._front, tracked, key=self._key)
            return
        caller = tracked.request.caller
        begins = self._begins(caller)
        if tracked.attempt:  # a replayed request was already charged for its tokens
            begins -= tracked.token_count
        if caller not in self._queues:
            self._queues[caller] = []
        self._move(caller, begins)
        bisect.insort(self._queues[caller], tracked, key=self._key)

    def remove(self, tracked: Tracked) -> None:
        caller = tracked.request.caller
        queue = self._front if tracked.serial <= 0 else self._queues.get(caller, [])
        at = bisect.bisect_left(queue, self._key(tracked), key=self._key)
        if at == len(queue) or queue[at] is not tracked:
            raise InvariantViolation(f"{tracked.request.request_id} is not in the backlog")
        del queue[at]
        self._count -= 1
        if tracked.serial > 0 and not queue:
            del self._queues[caller]
            served = self._served.pop(caller)
            self._turns.remove((served, caller))
            self._remember(caller, served)

    def serve(self, caller: str, token_count: int) -> None:
        """Charge tokens to a caller."""
        self._reached = max(self._reached, self._turns[0][0]) if self._turns else self._reached
        if caller in self._queues:
            self._move(caller, self._served[caller] + token_count)
        else:
            self._remember(caller, self._begins(caller) + token_count)

    def serve_lower(self, token_count: int) -> None:
        """Charge a lifted request's tokens to the class below."""
        self._lower_served += token_count

    def _begins(self, caller: str) -> float:
        if caller in self._served:
            return self._served[caller]
        reached = self._turns[0][0] if self._turns else self._reached
        return max(reached, self._remembered.get(caller, 0.0))

    def _move(self, caller: str, served: float) -> None:
        if (before := self._served.get(caller)) is not None:
            del self._turns[bisect.bisect_left(self._turns, (before, caller))]
        self._remembered.pop(caller, None)
        self._served[caller] = served
        bisect.insort(self._turns, (served, caller))

    def _remember(self, caller: str, served: float) -> None:
        self._remembered[caller] = served
        self._remembered.move_to_end(caller)
        if len(self._remembered) > _MOST_REMEMBERED:
            self._remembered.popitem(last=False)

    def check(self) -> None:
        for entries in (self._front, *self._queues.values()):
            keys = [self._key(tracked) for tracked in entries]
            if keys != sorted(set(keys)):
                raise InvariantViolation(f"a queue is out of order: {keys}")
        if not all(self._queues.values()) or sorted(self._turns) != sorted((s, c) for c, s in self._served.items()):
            raise InvariantViolation("the waiting callers are not those that have turns")
        if self._queues.keys() != self._served.keys() or self._turns != sorted(self._turns):
            raise InvariantViolation("turns are out of order")
        if self._count != len(self._front) + sum(map(len, self._queues.values())):
            raise InvariantViolation(f"{self._count} requests are counted")
