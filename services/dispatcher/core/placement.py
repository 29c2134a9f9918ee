"""Places requests from the backlog on workers, in order, except that later ones may overtake a request that does not
fit yet.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ballast.common.errors import InvariantViolation
from ballast.common.marks import marks_of
from services.dispatcher.core.backlog import Backlog, DrainRate, Order
from services.dispatcher.core.events import AbortOnWorker, PlaceOnWorker, Request
from services.dispatcher.core.feed import Feed
from services.dispatcher.core.fleet import Fleet, Worker
from services.dispatcher.core.growth import Growth
from services.dispatcher.core.long_requests import LongRequests, has_room, holds
from services.dispatcher.core.prefix_map import PrefixMap
from services.dispatcher.core.recall import candidate, may_go
from services.dispatcher.core.story import What
from services.dispatcher.core.tracked import Tracked
from services.dispatcher.policy.freeness import (
    NO_HITS,
    Hits,
    Need,
    RoutingRules,
    WorkerKey,
    blocks_for,
    has_place,
    may_queue,
    runs_at_once,
)
from services.dispatcher.policy.ranking import Ranking

_BATCH_COUNT = 16
# Subtracted from the deadline passed to a worker, so that the worker's ending arrives before the dispatcher's own
# timeout.
_DEADLINE_MARGIN_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRules:
    order: Order = Order.FIRST_COME
    large_patience_s: float = 2.0  # how long a large request lets others overtake it
    refused_hold_s: float = 0.05  # pause in sending to a worker after a refusal
    scan_count: int = 64  # maximum requests examined when the first ones do not fit
    lift_s: float = 10.0  # requests that have waited longer alternate with those of the class above
    prefix_marks: int = 1 << 17  # maximum number of prefix marks stored for all workers; LRU
    recall_after_s: float = 0.1  # wait on a worker before a recall, if another worker has room; inf: never


@dataclass(frozen=True, slots=True)
class PlacementOutcome:
    placed: Sequence[PlaceOnWorker]
    hopeless: Sequence[Tracked]  # requests too large for every worker; still in their queue


class Placement:
    """Moves requests from the backlog to workers."""

    def __init__(
        self,
        backlog: Backlog,
        long: LongRequests,
        feed: Feed,
        fleet: Fleet,
        rules: PlacementRules,
        routing: RoutingRules,
        growth: Growth,
    ) -> None:
        self.drain_rate = DrainRate()
        self.retry_at_s = math.inf  # time of the next end of a worker's pause or of a request's patience
        self.rules = rules
        self._routing = routing
        self._growth = growth
        self._backlog = backlog
        self._long = long
        self._feed = feed
        self._fleet = fleet
        self._ranking = Ranking(routing)
        self.prefixes = PrefixMap(rules.prefix_marks)
        self._held: dict[WorkerKey, None] = {}  # workers that recently refused a request
        self._next_handle = 1

    def run(self, at_s: float) -> PlacementOutcome:
        """Place all online requests that fit, skipping at most `scan_count`."""
        self.retry_at_s = math.inf
        placed: list[PlaceOnWorker] = []
        hopeless: list[Tracked] = []
        if not len(self._backlog) and not len(self._long):
            return PlacementOutcome(placed, hopeless)
        self._look_around(at_s)
        if len(self._long):
            placed += self._run_long(at_s)
        passed_over_count = 0
        while len(self._ranking) and passed_over_count < self.rules.scan_count:
            batch = self._backlog.slice(passed_over_count, _BATCH_COUNT, at_s)
            for tracked in batch:
                key = self._choose(tracked, at_s)
                if key is None:
                    passed_over_count += 1
                    if self._fleet.fits_nobody(tracked.token_count + 1):
                        hopeless.append(tracked)
                    continue
                placed.append(self._place(tracked, key, at_s))
                self._look_around(at_s)
                if not len(self._ranking):
                    break
            if len(batch) < _BATCH_COUNT:
                break
        return PlacementOutcome([*placed, *self._claim(at_s)], hopeless)

    def _claim(self, at_s: float) -> list[PlaceOnWorker]:
        """Send requests of light callers to full workers, which will preempt requests of heavy callers for them."""
        placed, refused = list[PlaceOnWorker](), set[str]()
        for tracked in self._backlog.slice(0, _BATCH_COUNT, at_s):
            caller = tracked.request.caller
            if caller in refused:
                continue
            workers = [worker for worker in self._fleet if worker.yields_memory_to(tracked, at_s)]
            if not workers:
                refused.add(caller)
                continue
            best = min(workers, key=lambda worker: (worker.placed_by[caller], worker.waiting_count, worker.key))
            placed.append(self._place(tracked, best.key, at_s))
        return placed

    def _run_long(self, at_s: float) -> list[PlaceOnWorker]:
        """Place long requests, each in the fitting group with the most room. If one of them has to wait for a group,
        later ones wait too.
        """
        placed, waited_for = list[PlaceOnWorker](), set[WorkerKey]()
        usable = [worker for worker in self._fleet.usable if worker.hold_until_s <= at_s]
        for tracked in list(self._long)[: self.rules.scan_count]:
            groups = [worker for worker in usable if holds(worker, tracked)]
            if not groups:
                tracked.groupless_since_s = at_s if tracked.groupless_since_s is None else tracked.groupless_since_s
                continue
            tracked.groupless_since_s = None
            open_ones = [w for w in groups if w.key not in waited_for and has_room(w, tracked)]
            worker = max(open_ones, key=lambda w: (w.view().free_block_count, w.key), default=None)
            if worker is None or not self._may_go(tracked, worker, at_s):
                waited_for.update(w.key for w in groups)
                continue
            self._long.remove(tracked)
            self.drain_rate.count(at_s)
            placed.append(self._take_out(tracked, worker, at_s))
            self._look_around(at_s)
        return placed

    def _may_go(self, tracked: Tracked, worker: Worker, at_s: float) -> bool:
        """True if the request would run on the worker at once, or may queue there because others have overtaken it for
        long enough. Otherwise the next check is scheduled.
        """
        view = worker.view()
        if runs_at_once(view, blocks_for(tracked.token_count + 1, view.block_tokens)):
            return True
        if tracked.blocked_since_s is None:
            tracked.blocked_since_s = at_s
        ends_s = tracked.blocked_since_s + self.rules.large_patience_s
        if at_s < ends_s:
            self.retry_at_s = min(self.retry_at_s, ends_s)
            return False
        return may_queue(view, self._routing)

    def pull(self, at_s: float) -> PlacementOutcome:
        """Place offline requests on workers that pull."""
        feed, placed = self._feed, list[PlaceOnWorker]()
        while (found := feed.next(self._fleet, at_s)) is not None:
            tracked, worker = found
            feed.remove(tracked)
            feed.count(at_s)
            placed.append(self._take_out(tracked, worker, at_s))
        return PlacementOutcome(placed, feed.hopeless(self._fleet) if len(feed) else ())

    def move(self, tracked: Tracked, worker: Worker, at_s: float) -> PlaceOnWorker:
        """Submit a handed-over request to its new worker, regardless of room.

        Precondition: the request is neither in the backlog nor assigned to a worker.
        """
        return self._send(tracked, worker, at_s, expects_handover=True)

    def recall(self, worker: Worker, at_s: float) -> AbortOnWorker | None:
        """Recall a request that waits on a worker and would run elsewhere at once; None if there is no such request."""
        tracked = candidate(worker, at_s, self.rules.recall_after_s)
        if tracked is None:
            return None
        self._look_around(at_s)
        found = self._ranking.at_once(self._need(tracked), self._hits(tracked))
        if found is None or found == worker.key:
            return None
        tracked.recalled = True
        tracked.recall_count += 1
        return AbortOnWorker(worker.key, tracked.handle)

    def recall_offline(self) -> list[AbortOnWorker]:
        """Recall the offline requests of workers that are draining or about to be parked, so that these workers need
        not wait for them to end. Without another usable worker, the requests stay.
        """
        closed = [worker for worker in self._fleet if worker.closed_in_layout] if self._fleet.has_usable else []
        found = [t for worker in closed for t in worker.placed.values() if t.offline and may_go(t)]
        for tracked in found:
            tracked.recalled = True
        return [AbortOnWorker(t.worker, t.handle) for t in found if t.worker is not None]

    def contenders(self, request: Request, at_s: float) -> list[WorkerKey]:
        """Return, for each worker shape, the worker that would run a new request at once, and the workers that have
        cached a part of its prefix.
        """
        self._look_around(at_s)
        growth_tokens = min(request.sampling.max_tokens, self._growth.tokens(request.priority))
        found = self._ranking.contenders(Need(tokens=len(request.prompt_token_ids) + 1, growth_tokens=growth_tokens))
        if len(self.prefixes):
            hits = self.prefixes.hits(marks_of(request.prompt_token_ids, request.cache_salt))
            found += [worker for worker in hits if self._ranking.get(worker) is not None]
        return found

    def hold(self, worker: Worker, at_s: float) -> None:
        """Pause sending to a worker that has refused a request."""
        worker.hold_until_s = at_s + self.rules.refused_hold_s
        worker.touch()

    def _look_around(self, at_s: float) -> None:
        """Update the ranking with the workers that have changed or whose pause has ended."""
        fleet, ranking = self._fleet, self._ranking
        keys = [*fleet.changed, *self._held]
        fleet.changed.clear()
        self._held.clear()
        for key in keys:
            worker = fleet.get(key)
            if worker is None or not worker.usable:
                ranking.remove(key)
            elif worker.hold_until_s > at_s:
                self._held[key] = None
                self.retry_at_s = min(self.retry_at_s, worker.hold_until_s)
                ranking.remove(key)
            else:
                ranking.update(worker.view())

    def _choose(self, tracked: Tracked, at_s: float) -> WorkerKey | None:
        since_s = tracked.blocked_since_s
        # Computed exactly like the timer below, because otherwise rounding could make it due forever.
        patience_ended = since_s is not None and at_s >= since_s + self.rules.large_patience_s
        found = self._ranking.choose(self._need(tracked), self._hits(tracked), may_queue_large=patience_ended)
        if found is None and not patience_ended:
            if since_s is None:
                since_s = tracked.blocked_since_s = at_s
            self.retry_at_s = min(self.retry_at_s, since_s + self.rules.large_patience_s)
        return found

    def _hits(self, tracked: Tracked) -> Hits:
        return self.prefixes.hits(tracked.marks) if len(self.prefixes) else NO_HITS

    def _need(self, tracked: Tracked) -> Need:
        left_tokens = tracked.request.sampling.max_tokens - len(tracked.output_token_ids)
        growth_tokens = min(left_tokens, self._growth.tokens(tracked.request.priority))
        return Need(tokens=tracked.token_count + 1, growth_tokens=growth_tokens)

    def _place(self, tracked: Tracked, key: WorkerKey, at_s: float) -> PlaceOnWorker:
        self._backlog.serve(tracked)
        self.drain_rate.count(at_s)
        worker = self._fleet.get(key)
        assert worker is not None  # a usable worker
        return self._take_out(tracked, worker, at_s)

    def _take_out(self, tracked: Tracked, worker: Worker, at_s: float) -> PlaceOnWorker:
        tracked.queue_s += at_s - tracked.queued_at_s
        return self._send(tracked, worker, at_s, expects_handover=False)

    def _send(self, tracked: Tracked, worker: Worker, at_s: float, *, expects_handover: bool) -> PlaceOnWorker:
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        worker.place(tracked, handle, self._hits(tracked).get(worker.key, 0))
        if len(self.prefixes):
            self.prefixes.note(worker.key, tracked.marks, at_s)
        tracked.worker, tracked.handle = worker.key, handle
        tracked.placed_at_s, tracked.recalled = at_s, False
        tracked.attempt += 1
        tracked.move_count += expects_handover
        tracked.awaits_token = True
        tracked.note(at_s, What.MOVED if expects_handover else What.PLACED, worker.key.worker_id)
        return PlaceOnWorker(
            worker=worker.key,
            handle=handle,
            attempt=tracked.attempt,
            request=tracked.request,
            output_token_ids=tuple(tracked.output_token_ids),
            delivered_text_chars=tracked.text_chars,
            deadline_s=max(0.0, tracked.request.deadline_at_s - at_s - _DEADLINE_MARGIN_S),
            expects_handover=expects_handover,
        )

    def check(self) -> None:
        """Raise InvariantViolation unless the ranking has every worker's current state, except for pending changes."""
        unseen = {*self._fleet.changed, *self._held}
        for worker in self._fleet:
            if worker.key in unseen:
                continue
            view = worker.view() if worker.usable else None
            expected = view if view is not None and has_place(view, self._routing) else None
            if self._ranking.get(worker.key) != expected:
                raise InvariantViolation(
                    f"{worker.key} has changed, but its ranking is old: {self._ranking.get(worker.key)}"
                )
        gone = [key for key in self._ranking if key not in unseen and self._fleet.get(key) is None]
        if gone:
            raise InvariantViolation(f"requests may be placed on {gone}, which do not exist")
