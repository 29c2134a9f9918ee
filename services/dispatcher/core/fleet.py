"""State of the workers: group leaders, connections and placed requests.

Only leaders get requests. The stream to a former leader stays open until its requests have moved or ended.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from ballast.common.errors import InvariantViolation
from ballast.common.ids import Incarnation, WorkerId
from ballast.common.layout import Layout
from ballast.common.load import LoadReport
from ballast.common.model import ModelInfo
from services.dispatcher.core.events import StepReceived
from services.dispatcher.core.tracked import Tracked
from services.dispatcher.policy.freeness import WorkerKey, WorkerView, blocks_for, claims

# Limit per worker for removed handles whose logprobs may still arrive.
_MAX_DEPARTED = 1024


@dataclass(slots=True, kw_only=True)
class Worker:
    """The leader of a group, or a former leader."""

    key: WorkerKey
    address: str
    group_id: str
    instance_count: int = 1  # instances of the group
    closed_in_layout: bool = False  # True: draining, leaving or parked in the layout
    leads: bool = True
    connected: bool = False
    load: LoadReport | None = None
    max_waiting_count: int = 0
    placed: dict[int, Tracked] = field(default_factory=dict[int, Tracked])  # handle -> request
    unseen: dict[int, int] = field(default_factory=dict[int, int])  # handles in no load report yet, ascending -> blocks
    unseen_block_count: int = 0
    unseen_tokens: dict[int, int] = field(default_factory=dict[int, int])  # handle, ascending -> uncomputed tokens
    preempted: dict[int, float] = field(default_factory=dict[int, float])  # handle, ascending -> time of its preemption
    long_handles: set[int] = field(default_factory=set[int])  # handles of requests that do not fit on a single instance
    offline_unseen: dict[int, int] = field(default_factory=dict[int, int])  # handle, ascending -> its tokens
    placed_by: Counter[str] = field(default_factory=Counter[str])  # caller -> number of its online requests here
    hold_until_s: float = 0.0  # no request is sent before this time, after a refusal
    # Workers changed since the last update of the ranking; shared with the fleet. Call `touch` after changing a field.
    changed: dict[WorkerKey, None] = field(default_factory=dict[WorkerKey, None])
    departed: dict[int, None] = field(default_factory=dict[int, None])  # removed handles with logprobs, oldest first

    @property
    def usable(self) -> bool:
        load = self.load
        return self.connected and self.leads and load is not None and not (self.closed_in_layout or load.draining)

    @property
    def offline_room_tokens(self) -> int:
        """Number of tokens of further offline requests that the worker would admit."""
        if self.load is None:
            return 0
        return self.load.offline_wanted_tokens - sum(self.offline_unseen.values())

    @property
    def waiting_count(self) -> int:
        """Estimated number of requests that wait on the worker."""
        return len(self.unseen) + (self.load.waiting_count if self.load is not None else 0)

    def touch(self) -> None:
        self.changed[self.key] = None

    def view(self) -> WorkerView:
        """The worker's state for routing. Raises InvariantViolation if it has no load report."""
        load = self.load
        if load is None:
            raise InvariantViolation(f"{self.key} has no load report")
        return WorkerView(
            worker=self.key,
            block_tokens=load.block_tokens,
            block_count=load.block_count,
            used_block_count=load.used_block_count,
            kept_block_count=load.kept_block_count,
            prompt_token_count=load.prompt_token_count + sum(self.unseen_tokens.values()),
            uncomputed_token_count=load.uncomputed_token_count + sum(self.unseen_tokens.values()),
            max_prompt_token_count=load.max_prompt_token_count,
            waiting_block_count=load.waiting_block_count,
            unseen_block_count=self.unseen_block_count,
            running_count=load.running_count,
            waiting_count=load.waiting_count,
            unseen_count=len(self.unseen),
            max_running_count=load.max_running_count,
            max_waiting_count=self.max_waiting_count,
            draining=not self.usable,
            instance_count=self.instance_count,
            has_long_prompt=any(self.placed[handle].awaits_token for handle in self.long_handles),
        )

    def yields_memory_to(self, tracked: Tracked, at_s: float) -> bool:
        """True if the worker is expected to preempt a request of its busiest caller in favour of this request."""
        load, caller = self.load, tracked.request.caller
        if not caller or load is None or not self.usable or self.hold_until_s > at_s:
            return False
        need = blocks_for(tracked.token_count + 1, load.block_tokens)
        if need > load.block_count or self.waiting_count >= self.max_waiting_count:
            return False
        return claims(self.view(), need, self.placed_by[caller], load.busiest_caller_count)

    def place(self, tracked: Tracked, handle: int, hit_tokens: int = 0) -> None:
        """Add a request that is sent to the worker. `hit_tokens`: prompt tokens cached there."""
        load = self.load
        if load is None:
            raise InvariantViolation(f"{tracked.request.request_id} placed on {self.key}, which is not connected")
        self.placed[handle] = tracked
        if tracked.offline:
            self.offline_unseen[handle] = tracked.token_count
            return
        self.touch()
        if tracked.long:
            self.long_handles.add(handle)
        self.placed_by[tracked.request.caller] += 1
        need = blocks_for(tracked.token_count + 1, load.block_tokens)
        self.unseen[handle] = need
        self.unseen_tokens[handle] = need * load.block_tokens - hit_tokens
        self.unseen_block_count += need

    def remove_request(self, handle: int) -> None:
        self.touch()
        tracked = self.placed.pop(handle)
        self.unseen_block_count -= self.unseen.pop(handle, 0)
        self.unseen_tokens.pop(handle, None)
        self.offline_unseen.pop(handle, None)
        if not tracked.offline:
            self.placed_by[tracked.request.caller] -= 1
            if not self.placed_by[tracked.request.caller]:
                del self.placed_by[tracked.request.caller]
        self.preempted.pop(handle, None)
        self.long_handles.discard(handle)
        if tracked.request.sampling.logprobs is not None:
            self.departed[handle] = None
            if len(self.departed) > _MAX_DEPARTED:
                del self.departed[next(iter(self.departed))]

    def cut_off(self) -> list[Tracked]:
        """Mark the worker as disconnected. Returns its requests, which are removed."""
        self.connected = False
        self.touch()
        lost = list(self.placed.values())
        for handle in list(self.placed):
            self.remove_request(handle)
        self.departed.clear()
        return lost

    def update_waiting(self, step: StepReceived) -> int:
        """Update the preempted requests from a step. A request that got a token runs again. Returns the number of
        unknown handles.
        """
        preempted, stale_count = self.preempted, 0
        if preempted:
            for handle in step.handles:
                preempted.pop(handle, None)
        for handle in step.preempted:
            tracked = self.placed.get(handle)
            if tracked is None:
                stale_count += 1
            elif not tracked.offline:
                preempted.setdefault(handle, step.at_s)
        for handle in step.resumed:
            preempted.pop(handle, None)
            stale_count += handle not in self.placed
        return stale_count

    def report(self, load: LoadReport, seen_handle: int) -> None:
        self.touch()
        self.load = load
        for handle in list(self.unseen):
            if handle > seen_handle:
                break
            self.unseen_block_count -= self.unseen.pop(handle)
            del self.unseen_tokens[handle]
        for handle in [handle for handle in self.offline_unseen if handle <= seen_handle]:
            del self.offline_unseen[handle]

    def check(self) -> None:
        if self.unseen_block_count != sum(self.unseen.values()) or not set(self.unseen) <= set(self.placed):
            raise InvariantViolation(f"{self.key}: unseen requests are counted wrongly")
        if self.placed_by != Counter(t.request.caller for t in self.placed.values() if not t.offline):
            raise InvariantViolation(f"{self.key}: callers are counted as {self.placed_by}")
        if not self.offline_unseen.keys() <= self.placed.keys():
            raise InvariantViolation(f"{self.key}: unseen offline requests are counted wrongly")
        if self.long_handles != {handle for handle, tracked in self.placed.items() if tracked.long}:
            raise InvariantViolation(f"{self.key}: long requests are not {sorted(self.long_handles)}")
        if not self.preempted.keys() <= self.placed.keys():
            raise InvariantViolation(f"{self.key}: {sorted(self.preempted)} wait, but {sorted(self.placed)} are placed")
        if list(self.unseen) != sorted(self.unseen) or self.unseen.keys() != self.unseen_tokens.keys():
            raise InvariantViolation(f"{self.key}: unseen handles are out of order")
        if self.placed and not self.connected:
            raise InvariantViolation(f"{self.key}: is not connected but holds {sorted(self.placed)}")
        for handle, tracked in self.placed.items():
            if tracked.worker != self.key or tracked.handle != handle:
                raise InvariantViolation(f"{self.key}: {tracked.request.request_id} records another worker")


def _key_of(worker: Worker) -> WorkerKey:
    return worker.key


class Fleet:
    """The group leaders of the layout, and former leaders that still have requests of this dispatcher."""

    def __init__(self) -> None:
        self.layout: Layout | None = None
        self.model: ModelInfo | None = None  # model of the last worker that connected; all serve the same
        self.lives: dict[WorkerId, Incarnation] = {}  # incarnations of all members of the layout
        self.changed: dict[WorkerKey, None] = {}  # see `Worker.changed`; may contain removed workers
        self.most_tokens = 0  # largest capacity of any worker so far, in tokens
        self._workers: dict[WorkerKey, Worker] = {}
        self._former: set[WorkerKey] = set()  # workers that are no longer leaders

    def __iter__(self) -> Iterator[Worker]:
        """Workers sorted by id."""
        return iter(sorted(self._workers.values(), key=_key_of))

    def get(self, key: WorkerKey) -> Worker | None:
        return self._workers.get(key)

    def member(self, worker_id: WorkerId) -> Worker | None:
        """Return the current incarnation of a worker if it leads a group or is a former leader, else None."""
        incarnation = self.lives.get(worker_id)
        return None if incarnation is None else self._workers.get(WorkerKey(worker_id, incarnation))

    def request_count_at(self, worker_id: WorkerId) -> int:
        """Return the number of running and waiting requests of the worker's group, from its leader's last load report;
        0 if unknown.
        """
        groups = self.layout.groups if self.layout is not None else ()
        for group in groups:
            if any(member.worker_id == worker_id for member in group.members):
                leader = self.member(group.leader.worker_id)
                load = leader.load if leader is not None else None
                return load.running_count + load.waiting_count if load is not None else 0
        return 0

    @property
    def usable(self) -> list[Worker]:
        """Usable workers sorted by id."""
        return [worker for worker in self if worker.usable]

    @property
    def has_usable(self) -> bool:
        return any(worker.usable for worker in self._workers.values())

    def fits_nobody(self, token_count: int) -> bool:
        """True if no usable worker can hold a request of this many tokens. A worker that has not reported its blocks
        yet, such as one that was just woken from parking, counts as large enough.
        """
        for worker in self._workers.values():
            load = worker.load
            if not worker.usable:
                continue
            if load is None or not load.block_count or blocks_for(token_count, load.block_tokens) <= load.block_count:
                return False
        return True

    def remember(self, load: LoadReport) -> None:
        """Record the largest capacity seen on any worker. Requests up to this size were rightly accepted."""
        self.most_tokens = max(self.most_tokens, load.block_count * load.block_tokens)

    @property
    def placed_count(self) -> int:
        return sum([len(worker.placed) for worker in list(self._workers.values())])

    def adopt(self, layout: Layout) -> tuple[list[Worker], list[Worker]]:
        """Adopt a layout. Returns new leaders and removed workers, sorted by id."""
        self.layout = layout
        members = {WorkerKey(m.worker_id, m.incarnation): (group, m) for group in layout.groups for m in group.members}
        self.lives = {key.worker_id: key.incarnation for key in members}
        gone = [w for w in self if w.key not in members or w.address != members[w.key][1].address]
        for worker in gone:
            worker.touch()
            del self._workers[worker.key]
        new: list[Worker] = []
        for key, (group, member) in sorted(members.items()):
            leads = member is group.leader
            worker = self._workers.get(key)
            if worker is None:
                if not leads:
                    continue
                worker = self._workers[key] = Worker(
                    key=key, address=member.address, group_id=group.group_id, changed=self.changed
                )
                new.append(worker)
            worker.touch()
            worker.leads = leads
            worker.group_id = group.group_id
            worker.instance_count = len(group.members)
            worker.closed_in_layout = not member.takes_new
        self._former = {worker.key for worker in self._workers.values() if not worker.leads}
        return new, gone

    def release_former(self) -> list[WorkerKey]:
        """Remove former leaders without requests of this dispatcher."""
        if not self._former:
            return []
        former = {key: self._workers[key] for key in self._former}
        done = sorted(key for key, worker in former.items() if not worker.placed)
        for key in done:
            self._former.remove(key)
            self._workers.pop(key).touch()
        return done

    def check(self) -> None:
        for worker in self:
            worker.check()
        if self._former != {worker.key for worker in self if not worker.leads}:
            raise InvariantViolation(f"former leaders are not {sorted(self._former)}")
        groups = self.layout.groups if self.layout is not None else ()
        leaders = {WorkerKey(group.leader.worker_id, group.leader.incarnation) for group in groups}
        if leaders != {worker.key for worker in self if worker.leads}:
            raise InvariantViolation(f"leaders of the layout are {sorted(leaders)}")
