"""The backlog: requests that no worker has, by priority class, and in it in an order that is chosen. Bounded by its
owner."""

import bisect
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from ballast.common.errors import InvariantViolation
from ballast.common.sampling import PriorityClass
from services.dispatcher.core.events import Facts, Request
from services.dispatcher.core.story import Moment, Recent, Story, What
from services.dispatcher.policy.freeness import WorkerKey

_MIN_RETRY_S, _MAX_RETRY_S = 0.1, 30.0


@dataclass(slots=True, kw_only=True)
class Tracked:
    """One accepted request, from arrival to its ending: in the backlog, on one worker, or `moving` between two."""

    request: Request
    serial: int  # of arrival; kept over replays, so that a replayed request stands where it stood
    arrived_at_s: float
    queued_at_s: float  # entered the backlog for the last time
    worker: WorkerKey | None = None
    handle: int = 0
    placed_at_s: float = 0.0  # there
    recalled: bool = False  # asked back from there, because another worker has room
    recall_count: int = 0
    moving: bool = False  # the worker it has gone to has no stream yet
    attempt: int = 0
    replay_count: int = 0
    idle_move_count: int = 0  # since its last token
    output_token_ids: list[int] = field(default_factory=list[int])
    text_chars: int = 0
    queue_s: float = 0.0  # spent in the backlog so far
    first_token_at_s: float | None = None
    last_token_at_s: float = 0.0
    longest_gap_s: float = 0.0  # between two tokens
    longest_gap_token: int = 0  # it came after so many tokens
    awaits_token: bool = True  # none has come since it was placed for the last time
    move_count: int = 0
    story: Story = field(default_factory=Story)
    blocked_since_s: float | None = None  # large, and no worker could run it at once

    @property
    def token_count(self) -> int:
        """Tokens that an attempt begins with."""
        return len(self.request.prompt_token_ids) + len(self.output_token_ids)

    def facts(self, at_s: float) -> Facts:
        waited_s = at_s - self.queued_at_s if self.worker is None and not self.moving else 0.0
        first_s = self.first_token_at_s
        return Facts(
            prompt_token_count=len(self.request.prompt_token_ids),
            completion_token_count=len(self.output_token_ids),
            replay_count=self.replay_count,
            queue_s=self.queue_s + waited_s,
            ttft_s=None if first_s is None or self.request.output_token_ids else first_s - self.arrived_at_s,
            e2e_s=at_s - self.arrived_at_s,
            caller=self.request.caller,
            traceparent=self.request.traceparent,
            priority=self.request.priority,
            max_token_count=self.request.sampling.max_tokens,
            arrived_at_s=self.arrived_at_s,
            worker_id=next((m.worker_id for m in reversed(self.story.moments) if m.worker_id), ""),
            move_count=self.move_count,
            recall_count=self.recall_count,
            longest_gap_s=self.longest_gap_s,
            longest_gap_token=self.longest_gap_token,
            story=self.story,
        )

    def note(self, at_s: float, what: What, worker_id: str = "", detail: str = "") -> None:
        self.story.add(Moment(at_s, what, len(self.output_token_ids), worker_id, detail))

    def take_first_token(self, at_s: float, recent: Recent, layout: str) -> None:
        """The first token of a placement has come. `layout`: which one is in force."""
        self.awaits_token = False
        self.idle_move_count = 0
        worker_id = self.worker.worker_id if self.worker is not None else ""
        if self.first_token_at_s is None:
            self.first_token_at_s = self.last_token_at_s = at_s
            recent.add(at_s, at_s - self.arrived_at_s)
            self.note(at_s, What.FIRST_TOKEN, worker_id)
        else:
            gap_s = at_s - self.last_token_at_s
            self.story.add(Moment(at_s, What.RESUMED, len(self.output_token_ids), worker_id, layout, gap_s))


class Order(StrEnum):
    """Which goes first of the requests of one class that wait. What was being served elsewhere always does."""

    FIRST_COME = "first-come"
    SHORTEST_FIRST = "shortest-first"  # the fewest tokens to compute: low waits on average, and long prompts may starve
    DEADLINE = "deadline"  # the earliest


def _key_of(order: Order) -> Callable[[Tracked], tuple[float, int]]:
    """Does not change while the request waits."""
    match order:
        case Order.FIRST_COME:
            return lambda tracked: (0.0, tracked.serial)
        case Order.SHORTEST_FIRST:
            return lambda tracked: (tracked.token_count if tracked.serial > 0 else -1.0, tracked.serial)
        case Order.DEADLINE:
            return lambda tracked: (tracked.request.deadline_at_s if tracked.serial > 0 else -1.0, tracked.serial)


class Backlog:
    """Sorted by rank and key. Insertion at the end, removal anywhere and a look at the first few are cheap."""

    def __init__(self, order: Order = Order.FIRST_COME) -> None:
        self._key = _key_of(order)
        self._classes: list[list[Tracked]] = [[] for _ in PriorityClass]  # by rank; each sorted by key
        self._count = 0
        self.token_count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Tracked]:
        return itertools.chain.from_iterable(self._classes)

    def slice(self, begin: int, count: int) -> list[Tracked]:
        return list(itertools.islice(self, begin, begin + count))

    def count_before(self, tracked: Tracked) -> int:
        """Requests behind which this one stands, or would."""
        *better, own = self._classes[: tracked.request.priority.rank + 1]
        return sum(map(len, better)) + bisect.bisect_left(own, self._key(tracked), key=self._key)

    def add(self, tracked: Tracked) -> None:
        entries = self._classes[tracked.request.priority.rank]
        bisect.insort(entries, tracked, key=self._key)
        self._count += 1
        self.token_count += tracked.token_count

    def remove(self, tracked: Tracked) -> None:
        entries = self._classes[tracked.request.priority.rank]
        at = bisect.bisect_left(entries, self._key(tracked), key=self._key)
        if at == len(entries) or entries[at] is not tracked:
            raise InvariantViolation(f"{tracked.request.request_id} is not in the backlog")
        del entries[at]
        self._count -= 1
        self.token_count -= tracked.token_count

    def check(self) -> None:
        for rank, entries in enumerate(self._classes):
            keys = [self._key(tracked) for tracked in entries]
            if keys != sorted(set(keys)):
                raise InvariantViolation(f"backlog of rank {rank} is out of order: {keys}")
            for tracked in entries:
                if (
                    tracked.request.priority.rank != rank
                    or tracked.worker is not None
                    or tracked.handle
                    or tracked.moving
                ):
                    raise InvariantViolation(f"{tracked.request.request_id} does not belong into the backlog")
        counts = self._count, self.token_count
        if counts != (sum(map(len, self._classes)), sum(tracked.token_count for tracked in self)):
            raise InvariantViolation(f"backlog counts {self._count} requests and {self.token_count} tokens")


class DrainRate:
    """How fast the backlog empties, smoothed over about `memory_s`."""

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
        """Advice to whoever is refused: by then half of so many have gone."""
        rate = self.per_s(at_s)
        return min(_MAX_RETRY_S, max(_MIN_RETRY_S, request_count / 2 / rate if rate > 0.0 else 1.0))

    def _decayed(self, at_s: float) -> float:
        return self._weight * math.exp(-max(0.0, at_s - self._at_s) / self._memory_s)
