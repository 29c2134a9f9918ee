"""The dispatcher's decisions: admission, placement, and the ending of each request.

The dispatcher owns a request from `RequestSubmitted` until the single `Refuse`, `Finish` or `Fail` that ends it (I6).
It stores the generated tokens, so that another worker can continue if the request's worker is lost. Each placement has
its own handle, and late messages about an earlier placement are dropped and counted (I5).

When groups form or dissolve, workers end requests and name the worker that gets their KV. The dispatcher submits each
of these requests to the named worker with all its tokens, as in a replay, so that no token is lost or repeated.
"""

import math
from collections import Counter
from collections.abc import Sequence

from ballast.common.errors import (
    AlreadyExists,
    BallastError,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    InvariantViolation,
    Overloaded,
    PeerViolation,
    Unavailable,
)
from ballast.common.ids import DispatcherId, RequestId, WorkerId
from ballast.common.sampling import FinishReason
from ballast.common.traffic import Traffic
from services.dispatcher.core import events as d
from services.dispatcher.core.backlog import Backlog
from services.dispatcher.core.deadlines import Deadlines
from services.dispatcher.core.feed import Feed
from services.dispatcher.core.fleet import Fleet, Worker
from services.dispatcher.core.growth import Growth
from services.dispatcher.core.limits import MOST_SHARED, Limits, long_too_full, too_full
from services.dispatcher.core.long_requests import LongRequests
from services.dispatcher.core.moves import Moves
from services.dispatcher.core.placement import Placement, PlacementOutcome, PlacementRules
from services.dispatcher.core.relay import Relay
from services.dispatcher.core.story import What
from services.dispatcher.core.tracked import Tracked, tracked_of
from services.dispatcher.core.traffic import TrafficCounter
from services.dispatcher.policy.freeness import RoutingRules, WorkerKey

_NO_WORKER_CHECK_S = 0.5
_MAX_IDLE_MOVES = 16  # maximum consecutive handovers of a request without a new token; more would mean a loop
_FRONT = -(1 << 62)  # added to the serials of requests taken over, so that they precede all others
_OUTGROWN_WAIT_S = 1.0  # retry delay for a request that no worker can hold, because a drop may form larger groups
ENDING_OF: dict[type[BallastError], str] = {
    Cancelled: FinishReason.CANCELLED.value,
    DeadlineExceeded: FinishReason.DEADLINE.value,
}


class DispatcherCore:
    """State of a dispatcher. Only `handle` changes it; every event may arrive late or twice."""

    def __init__(
        self, dispatcher_id: DispatcherId, limits: Limits, placement: PlacementRules, routing: RoutingRules
    ) -> None:
        self.limits = limits
        self.fleet = Fleet()
        self.backlog = Backlog(placement.order, placement.lift_s)
        self.long = LongRequests(limits.long_wait_s)
        self.feed = Feed()  # waiting offline requests
        self.requests: dict[RequestId, Tracked] = {}  # requests that have been accepted and have not ended
        self.draining = False
        self._for_good = False  # True: draining because the process is going to exit
        self.endings: Counter[str] = Counter()  # finish reason, or "refused" -> count
        self.accepted_count = 0
        self.replay_count = 0
        self.recall_count = 0  # requests recalled from a worker's queue
        self._traffic = TrafficCounter()
        self.relay = Relay(self.fleet, self._traffic)
        self.move_counts: Counter[str] = Counter()  # "at_once", "waited" or "replayed" -> handed-over requests
        self._id = dispatcher_id
        self.growth = Growth(routing.growth_tokens)
        self._placement = Placement(self.backlog, self.long, self.feed, self.fleet, placement, routing, self.growth)
        self._moves = Moves(limits.move_wait_s, self.fleet)
        self._deadlines = Deadlines()
        self.taken_over_count = 0
        self._next_serial = 1
        self._no_worker_since_s: float | None = None  # None: there is a worker, or no event has arrived yet
        self._no_worker_check_at_s = math.inf

    def next_timer_s(self) -> float:
        """Time at which the next `DispatcherTick` is needed; infinity: never."""
        due_s = self._deadlines.next_s()
        if len(self._moves):
            due_s = min(due_s, self._moves.next_s())
        if len(self.long):
            due_s = min(due_s, self.long.next_timer_s())
        return min(due_s, self._placement.retry_at_s, self._no_worker_check_at_s)

    @property
    def waits(self) -> bool:
        """True if an online request is not on any worker."""
        return self.backlog.count > 0 or len(self.long) > 0

    def carries_changes(self, at_s: float) -> bool:
        """True if the traffic should be published again, because it has changed or was last read a while ago."""
        return self._traffic.carries_changes(at_s, self.backlog.count)

    def traffic(self, at_s: float) -> Traffic:
        """Return recent arrivals, answer lengths and the waiting requests."""
        long = self.long.demand(self.growth, at_s)
        return self._traffic.read(at_s, self.backlog.count, self.backlog.distinct_token_count, long)

    @property
    def moving_count(self) -> int:
        """Number of requests handed over to a worker whose stream is not open yet."""
        return len(self._moves)

    def handle(self, event: d.Event) -> Sequence[d.Command]:
        commands = self._handle(event)
        if released := self.fleet.release_former():
            for key in released:
                self._placement.prefixes.forget(key)
            return [*commands, *map(d.Disconnect, released)]
        return commands

    def _handle(self, event: d.Event) -> Sequence[d.Command]:
        match event:
            case d.StepReceived():
                return self._step(event)
            case d.RequestSubmitted():
                return self._submit(event)
            case d.Withdrawn():
                return self._withdraw(event)
            case d.DispatcherTick():
                return self._tick(event.at_s)
            case d.WorkerConnected():
                return self._connected(event)
            case d.WorkerLost():
                worker = self.fleet.get(event.worker)
                if worker is None or not worker.connected:
                    return []
                return [*self._lose(worker, event.at_s, event.why), *self._dispatch(event.at_s)]
            case d.LayoutChanged():
                return self._adopt(event)
            case d.ReachChanged():
                return self._on_reach(event)
            case d.DispatcherDrainRequested(for_good=for_good):
                self.draining, self._for_good = True, self._for_good or for_good
                return []
            case d.UndrainRequested():
                self.draining = self._for_good
                return []
            case d.TimeIsUp():
                self.draining = self._for_good = True
                gone = Unavailable(self._id, "is shutting down; the request can be repeated elsewhere", gone=True)
                return [c for t in list(self.requests.values()) for c in self._fail(t, gone, event.at_s)]

    # --------------------------------------------------------------------------------------------- workers

    def _adopt(self, event: d.LayoutChanged) -> list[d.Command]:
        """Adopt any layout that differs, even one with a lower epoch. The store reads values in order, so a lower epoch
        means that the cluster's state was lost and rebuilt.
        """
        if event.layout == self.fleet.layout:
            return []
        new, gone = self.fleet.adopt(event.layout)
        commands: list[d.Command] = []
        for worker in gone:
            commands.append(d.Disconnect(worker.key))
            commands += self._lose(worker, event.at_s, "left the layout")
        commands += [d.Connect(worker.key, worker.address) for worker in new]
        for tracked in self._moves.take_stranded():
            self._resume_from_backlog(tracked, event.at_s)
        self._watch_usable(event.at_s)
        return [*commands, *self._placement.recall_offline(), *self._dispatch(event.at_s)]

    def _on_reach(self, event: d.ReachChanged) -> list[d.Command]:
        """Adopt the published reach, and move requests that now count as too long for an instance from the backlog to
        `long`.
        """
        self.long.reach = event.reach
        for tracked in [one for one in self.backlog if self.long.takes(one)]:
            self.backlog.remove(tracked)
            self._line_up(tracked)
        return self._dispatch(event.at_s)

    def _connected(self, event: d.WorkerConnected) -> list[d.Command]:
        worker = self.fleet.get(event.worker)
        if worker is None:
            return []
        commands = self._lose(worker, event.at_s, "connected anew") if worker.connected else []
        worker.connected = True
        worker.load = event.load
        self.fleet.remember(event.load)
        worker.max_waiting_count = event.max_waiting_count
        worker.hold_until_s = 0.0
        worker.touch()
        self.fleet.model = event.model
        for tracked in self._moves.take_arrivals(worker.key.worker_id):
            self.move_counts["waited"] += 1
            commands.append(self._placement.move(tracked, worker, event.at_s))
        self._watch_usable(event.at_s)
        return commands + self._dispatch(event.at_s)

    def _lose(self, worker: Worker, at_s: float, why: str) -> list[d.Command]:
        """Return a lost worker's requests to their places in the backlog, so that they are replayed."""
        commands: list[d.Command] = []
        self._placement.prefixes.forget(worker.key)
        for tracked in worker.cut_off():
            commands += self._replay(tracked, at_s, f"worker {worker.key.worker_id}: {why}")
        self._watch_usable(at_s)
        return commands

    def _replay(self, tracked: Tracked, at_s: float, why: str) -> list[d.Command]:
        """Enqueue a request that was removed from its worker, or fail it if it was replayed too often."""
        lost_from = tracked.worker.worker_id if tracked.worker is not None else ""
        tracked.note(at_s, What.LOST, lost_from, why)
        if tracked.replay_count >= self.limits.replay_limit:
            self._enqueue(tracked, at_s)
            times = f"lost {tracked.replay_count + 1} times, the last time by {why}"
            return self._fail(tracked, Unavailable("worker", f"the request was {times}"), at_s)
        tracked.replay_count += 1
        self.replay_count += 1
        self._enqueue(tracked, at_s)
        return []

    def _enqueue(self, tracked: Tracked, at_s: float) -> None:
        tracked.worker, tracked.handle = None, 0
        tracked.queued_at_s = at_s
        tracked.blocked_since_s = tracked.groupless_since_s = None
        tracked.recalled = False
        self._line_up(tracked)

    def _line_up(self, tracked: Tracked) -> None:
        if self.long.takes(tracked) and not tracked.long:
            tracked.long = True
            self._traffic.mark_long(tracked.request.request_id)
        self._line_of(tracked).add(tracked)

    def _line_of(self, tracked: Tracked) -> Backlog | LongRequests | Feed:
        """The queue in which a request waits while no worker has it."""
        if tracked.offline:
            return self.feed
        return self.long if tracked.long else self.backlog

    def _move(self, tracked: Tracked, worker_id: WorkerId, at_s: float) -> list[d.Command]:
        """Submit a handed-over request to its new worker, or make it wait until the stream to that worker is open."""
        tracked.worker, tracked.handle = None, 0
        tracked.idle_move_count += 1
        if tracked.idle_move_count > _MAX_IDLE_MOVES:
            tracked.idle_move_count = 0
            return self._replay(tracked, at_s, f"workers that kept passing it on, at last to {worker_id}")
        target = self.fleet.member(worker_id)
        if target is None or not target.connected:
            tracked.note(at_s, What.MOVING, worker_id)
            self._moves.add(tracked, worker_id, at_s)
            return []
        self.move_counts["at_once"] += 1
        return [self._placement.move(tracked, target, at_s)]

    def _resume_from_backlog(self, tracked: Tracked, at_s: float) -> None:
        """Return a handed-over request to the backlog because its new worker cannot be reached. This does not count
        towards its replay limit.
        """
        self.move_counts["replayed"] += 1
        tracked.note(at_s, What.STRANDED)
        self._enqueue(tracked, at_s)

    def _watch_usable(self, at_s: float) -> None:
        if self.fleet.has_usable:
            self._no_worker_since_s = None
            self._no_worker_check_at_s = math.inf
        elif self._no_worker_since_s is None:
            self._no_worker_since_s = at_s
            self._no_worker_check_at_s = at_s + self.limits.no_worker_timeout_s

    # --------------------------------------------------------------------------------------------- requests

    def _submit(self, event: d.RequestSubmitted) -> list[d.Command]:
        request, at_s = event.request, event.at_s
        refusal = self._refusal(event)
        if refusal is not None:
            self.endings["refused"] += 1
            return [d.Refuse(request.request_id, refusal)]
        tracked = self._tracked(request, at_s)
        self._watch_usable(at_s)
        tracked.long = self.long.takes(tracked)
        commands: list[d.Command] = []
        ahead_count = self._line_of(tracked).count_before(tracked)
        self._admit(tracked)
        # No search is needed for requests ahead of this one, because nothing has changed for them, nor for a request
        # beyond the scan limit.
        if tracked.offline:
            commands = self._pull(at_s)
        elif ahead_count < self._placement.rules.scan_count:
            commands = self._dispatch(at_s)
        overload = self._overload(tracked, at_s)
        if overload is not None:
            self._drop(tracked)
            self.accepted_count -= 1
            self.endings["refused"] += 1
            commands.append(d.Refuse(request.request_id, overload))
        elif request.taken_over or request.output_token_ids:
            self.taken_over_count += 1
        return commands

    def _tracked(self, request: d.Request, at_s: float) -> Tracked:
        """Create a new request's state. Requests taken over from other dispatchers precede all others, in order of
        arrival.
        """
        serial = self._next_serial + (_FRONT if request.taken_over else 0)
        self._next_serial += 1
        return tracked_of(request, serial, at_s)

    def _admit(self, tracked: Tracked) -> None:
        request = tracked.request
        self.accepted_count += 1
        self.requests[request.request_id] = tracked
        made_count = len(request.output_token_ids)
        if tracked.long:
            self._traffic.long_arrived(made_count)
        elif not tracked.offline:
            self._traffic.arrived(request.request_id, tracked.arrived_at_s, tracked.token_count, made_count)
        self._deadlines.add(request.deadline_at_s, tracked.serial, request.request_id)
        self._line_of(tracked).add(tracked)

    def _refusal(self, event: d.RequestSubmitted) -> BallastError | None:
        request = event.request
        if self.draining:
            return Unavailable(self._id, "is draining; use another dispatcher")
        if request.request_id in self.requests:
            return AlreadyExists(f"request {request.request_id} is being served")
        if request.deadline_at_s <= event.at_s:
            return DeadlineExceeded("the deadline had passed when the request arrived")
        if request.priority.offline:
            return None
        return self.long.refusal(len(request.prompt_token_ids) + len(request.output_token_ids))

    def _overload(self, newcomer: Tracked, at_s: float) -> Overloaded | None:
        """Return the refusal if the new request exceeds the limits of its queue; None if it is accepted."""
        if newcomer.worker is not None or newcomer.request.request_id not in self.requests:
            return None
        if newcomer.offline:
            return self.feed.too_full(newcomer, self.limits.max_offline_queued_count, at_s)
        if newcomer.long:
            return long_too_full(newcomer, self.long, self.backlog, self.limits)
        return too_full(newcomer, self.backlog, self.limits, self._placement.drain_rate, at_s)

    def _withdraw(self, event: d.Withdrawn) -> list[d.Command]:
        tracked = self.requests.get(event.request_id)
        if tracked is None:
            return []
        place = self._pull if tracked.offline else self._dispatch
        return [*self._fail(tracked, Cancelled(event.why), event.at_s), *place(event.at_s)]

    def _tick(self, at_s: float) -> list[d.Command]:
        commands: list[d.Command] = []
        for request_id in self._deadlines.due(at_s):
            tracked = self.requests[request_id]
            commands += self._fail(tracked, DeadlineExceeded("the deadline of the request has passed"), at_s)
        for tracked in self._moves.take_overdue(at_s):
            self._resume_from_backlog(tracked, at_s)
        if self._no_worker_since_s is not None:
            latest_s = at_s - self.limits.no_worker_timeout_s
            if at_s >= self._no_worker_since_s + self.limits.no_worker_timeout_s:  # computed like the timer
                gone = Unavailable("workers", f"none for {at_s - self._no_worker_since_s:.1f} s")
                self._no_worker_check_at_s = at_s + _NO_WORKER_CHECK_S
                overdue = [t for t in (*self.backlog, *self.long, *self.feed) if t.queued_at_s <= latest_s]
                commands += [c for tracked in overdue for c in self._fail(tracked, gone, at_s)]
        return commands + self._dispatch(at_s)

    def _fail(self, tracked: Tracked, error: BallastError, at_s: float) -> list[d.Command]:
        commands: list[d.Command] = []
        if tracked.worker is not None:
            commands.append(d.AbortOnWorker(tracked.worker, tracked.handle))
        facts = tracked.facts(at_s)
        self._drop(tracked)
        self.endings[ENDING_OF.get(type(error), "error")] += 1
        return [*commands, d.Fail(tracked.request.request_id, error, facts)]

    def _drop(self, tracked: Tracked, *, ended: bool = False) -> None:
        """Remove a request. `ended`: its answer is complete."""
        self.growth.leave(tracked, ended=ended)
        if tracked.moving:
            self._moves.remove(tracked)
        elif tracked.worker is None:
            self._line_of(tracked).remove(tracked)
        else:
            worker = self.fleet.get(tracked.worker)
            if worker is None:
                raise InvariantViolation(f"{tracked.request.request_id} runs on {tracked.worker}, which is lost")
            worker.remove_request(tracked.handle)
        request_id = tracked.request.request_id
        if not tracked.offline:
            self._traffic.left(request_id, len(tracked.output_token_ids))
            self.backlog.end(tracked)
        self._deadlines.forget(request_id)
        del self.requests[request_id]

    # --------------------------------------------------------------------------------------------- steps

    def _step(self, event: d.StepReceived) -> list[d.Command]:
        worker = self.fleet.get(event.worker)
        if worker is None or not worker.connected:
            self.relay.stale_count += (
                len(event.handles) + len(event.endings) + len(event.preempted) + len(event.resumed)
            )
            return []
        commands: list[d.Command] = []
        self.relay.deliver(worker, event, commands)
        if worker.preempted or event.preempted or event.resumed:
            self.relay.stale_count += worker.update_waiting(event)
        for ending in event.endings:
            tracked = worker.placed.get(ending.handle)
            if tracked is None:
                self.relay.stale_count += 1
            else:
                commands += self._end(worker, tracked, ending, event.at_s)
        if event.endings and self.growth.is_due(event.at_s):
            self.growth.look(self.requests.values(), event.at_s)
        was_usable = worker.usable
        worker.report(event.load, event.seen_handle)
        self._placement.prefixes.report(worker.key, event.at_s - event.load.prefixes_kept_s)
        if event.marks:
            self.backlog.shares = True
            self._placement.prefixes.note(worker.key, event.marks, event.at_s)
        self.fleet.remember(event.load)
        if worker.usable != was_usable:
            self._watch_usable(event.at_s)
        if self.waits:
            commands += self._dispatch(event.at_s)
        elif event.load.waiting_count and (recall := self._placement.recall(worker, event.at_s)) is not None:
            commands.append(recall)
        if len(self.feed) and worker.offline_room_tokens > 0:
            commands += self._pull(event.at_s)
        return commands

    def _end(self, worker: Worker, tracked: Tracked, ending: d.Ending, at_s: float) -> list[d.Command]:
        """Handle an `Ending` from a worker: end the request, or move, enqueue or replay it."""
        request_id = tracked.request.request_id
        tracked.cached_token_count = max(tracked.cached_token_count, ending.cached_token_count)
        if ending.refused:
            tracked.note(at_s, What.SENT_BACK, worker.key.worker_id)
            worker.remove_request(tracked.handle)
            self._placement.hold(worker, at_s)
            self._enqueue(tracked, at_s)
            return []
        match ending.finish_reason:
            case FinishReason.STOP | FinishReason.LENGTH as reason:
                self._drop(tracked, ended=True)
                self.endings[reason.value] += 1
                if not tracked.offline:
                    self._traffic.ended(at_s, len(tracked.output_token_ids))
                return [d.Finish(request_id, reason, ending.matched_stop, tracked.facts(at_s))]
            case FinishReason.DEADLINE:
                error: BallastError = DeadlineExceeded("the deadline of the request has passed")
            case FinishReason.ERROR if ending.invalid:
                error = InvalidRequest("request", ending.error)
            case FinishReason.ERROR:
                worker.remove_request(tracked.handle)
                return self._replay(tracked, at_s, f"worker {worker.key.worker_id}: {ending.error}")
            case None if ending.moved_to:
                worker.remove_request(tracked.handle)
                return self._move(tracked, WorkerId(ending.moved_to), at_s)
            case FinishReason.CANCELLED if tracked.recalled:
                tracked.note(at_s, What.RECALLED, worker.key.worker_id)
                worker.remove_request(tracked.handle)
                self.recall_count += 1
                self._enqueue(tracked, at_s)
                return []
            case FinishReason.CANCELLED | None:
                error = PeerViolation(f"worker {worker.key.worker_id}", "ended a request that nobody cancelled")
        self._drop(tracked)
        self.endings[ENDING_OF.get(type(error), "error")] += 1
        return [d.Fail(request_id, error, tracked.facts(at_s))]

    # --------------------------------------------------------------------------------------------- placing

    def _dispatch(self, at_s: float) -> list[d.Command]:
        commands = self._settle(self._placement.run(at_s), at_s)
        if len(self.long):
            for tracked, error in list(self.long.overdue(at_s)):
                commands += self._fail(tracked, error, at_s)
        return [*commands, *self._pull(at_s)] if len(self.feed) else commands

    def _pull(self, at_s: float) -> list[d.Command]:
        """Place offline requests on workers that have requested some."""
        return self._settle(self._placement.pull(at_s), at_s)

    def _settle(self, outcome: PlacementOutcome, at_s: float) -> list[d.Command]:
        commands: list[d.Command] = [*outcome.placed]
        for tracked in outcome.hopeless:
            why = f"{tracked.token_count} tokens need more KV blocks than any worker has"
            error: BallastError = InvalidRequest("prompt", why)
            if answered := len(tracked.output_token_ids):  # accepting it was right: groups may have been larger
                error = Overloaded(f"after {answered} tokens of the answer, {why}", _OUTGROWN_WAIT_S)
            elif tracked.token_count < self.fleet.most_tokens:  # accepting it was right: a group was lost or dissolved
                error = Overloaded(f"{why}; one had enough earlier, and may again", _OUTGROWN_WAIT_S)
            commands += self._fail(tracked, error, at_s)
        return commands

    def contenders(self, request: d.Request, at_s: float) -> list[WorkerKey]:
        """Return the workers that could be chosen for the request if it were submitted now with an empty backlog; empty
        if it would wait.

        If a caller has newer load reports that differ only in fewer free blocks on workers other than these, the choice
        stays the same.
        """
        return self._placement.contenders(request, at_s)

    # --------------------------------------------------------------------------------------------- inspection

    def check(self) -> None:
        """Raise InvariantViolation unless every accepted request is in exactly one place and all counts agree."""
        self.backlog.check()
        self.long.check()
        self.feed.check()
        self.fleet.check()
        self._moves.check()
        self._placement.check()
        self.growth.check(self.requests.values())
        online = [tracked for tracked in self.requests.values() if not tracked.offline]
        ordinary = [tracked for tracked in online if not tracked.long]
        waiting = {tracked.request.request_id for tracked in ordinary if tracked.first_token_at_s is None}
        self._traffic.check(waiting, sum(len(tracked.output_token_ids) for tracked in online))
        moving = {tracked.request.request_id: tracked for tracked in self._moves.tracked}
        queued = {tracked.request.request_id: tracked for tracked in (*self.backlog, *self.long, *self.feed)}
        placed = {t.request.request_id: t for worker in self.fleet for t in worker.placed.values()}
        count = len(queued) + len(placed) + len(moving)
        if {**queued, **placed, **moving} != self.requests or count != len(self.requests):
            raise InvariantViolation(
                f"queued {sorted(queued)}, placed {sorted(placed)} and moving {sorted(moving)} are not"
                f" {sorted(self.requests)}"
            )
        newcomers = [
            tracked
            for tracked in (*self.backlog, *self.long)
            if tracked.attempt == 0 and not tracked.request.taken_over
        ]
        if len(newcomers) > MOST_SHARED * self.limits.max_queued_request_count:
            raise InvariantViolation(f"{len(newcomers)} requests in the backlog")
        if sum(tracked.token_count for tracked in newcomers) > MOST_SHARED * self.limits.max_queued_token_count:
            raise InvariantViolation(f"{self.backlog.token_count} tokens in the backlog")
        ended_count = sum(count for ending, count in self.endings.items() if ending != "refused")
        if self.accepted_count != ended_count + len(self.requests):
            raise InvariantViolation(f"{self.accepted_count} accepted, {ended_count} ended, {len(self.requests)} here")
        if (self._no_worker_since_s is not None) and self.fleet.has_usable:
            raise InvariantViolation("a worker is usable, but the dispatcher has not noticed")

    def check_step(self, key: WorkerKey) -> None:
        """A cheaper `check`, for use after a step that only delivered tokens. It checks the requests of this worker,
        but only the count of all other requests.
        """
        worker = self.fleet.get(key)
        if worker is None:
            return
        worker.check()
        for tracked in worker.placed.values():
            if self.requests.get(tracked.request.request_id) is not tracked:
                raise InvariantViolation(f"{tracked.request.request_id} runs on {key} but is unknown")
        if (
            count := len(self.backlog) + len(self.long) + len(self.feed) + self.fleet.placed_count + len(self._moves)
        ) != len(self.requests):
            raise InvariantViolation(f"{count} requests are queued, placed or moving, but {len(self.requests)} exist")
