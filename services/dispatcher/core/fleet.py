"""The books on the workers: who leads a group, who is connected, what was placed where."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from ballast.common.errors import InvariantViolation
from ballast.common.layout import Layout
from ballast.common.load import LoadReport
from ballast.common.model import ModelInfo
from services.dispatcher.core.backlog import Tracked
from services.dispatcher.policy.freeness import WorkerKey, WorkerView, blocks_for

# Handles that were given up while their logprobs may still be on the way, for each worker.
_MAX_DEPARTED = 1024


@dataclass(slots=True, kw_only=True)
class Worker:
    """The leader of one group."""

    key: WorkerKey
    address: str
    group_id: str
    draining_in_layout: bool
    connected: bool = False
    load: LoadReport | None = None
    max_waiting_count: int = 0
    placed: dict[int, Tracked] = field(default_factory=dict[int, Tracked])  # handle -> request
    unseen: dict[int, int] = field(default_factory=dict[int, int])  # handle, ascending -> blocks it needs
    unseen_block_count: int = 0
    hold_until_s: float = 0.0  # it has refused a request: not asked again until then
    departed: dict[int, None] = field(default_factory=dict[int, None])  # handles that wanted logprobs, oldest first

    @property
    def usable(self) -> bool:
        return self.connected and self.load is not None and not (self.draining_in_layout or self.load.draining)

    def view(self) -> WorkerView:
        """Only of a connected worker."""
        load = self.load
        if load is None:
            raise InvariantViolation(f"{self.key} has no load report")
        return WorkerView(
            worker=self.key,
            block_tokens=load.block_tokens,
            block_count=load.block_count,
            used_block_count=load.used_block_count,
            waiting_block_count=load.waiting_block_count,
            unseen_block_count=self.unseen_block_count,
            running_count=load.running_count,
            waiting_count=load.waiting_count,
            unseen_count=len(self.unseen),
            max_running_count=load.max_running_count,
            max_waiting_count=self.max_waiting_count,
            draining=not self.usable,
        )

    def place(self, tracked: Tracked, handle: int) -> None:
        load = self.load
        if load is None:
            raise InvariantViolation(f"{tracked.request.request_id} placed on {self.key}, which is not connected")
        self.placed[handle] = tracked
        need = blocks_for(tracked.token_count + 1, load.block_tokens)
        self.unseen[handle] = need
        self.unseen_block_count += need

    def take_off(self, handle: int) -> None:
        tracked = self.placed.pop(handle)
        self.unseen_block_count -= self.unseen.pop(handle, 0)
        if tracked.request.sampling.logprobs is not None:
            self.departed[handle] = None
            if len(self.departed) > _MAX_DEPARTED:
                del self.departed[next(iter(self.departed))]

    def report(self, load: LoadReport, seen_handle: int) -> None:
        self.load = load
        for handle in list(self.unseen):
            if handle > seen_handle:
                break
            self.unseen_block_count -= self.unseen.pop(handle)

    def check(self) -> None:
        if self.unseen_block_count != sum(self.unseen.values()) or not set(self.unseen) <= set(self.placed):
            raise InvariantViolation(f"{self.key}: books on unseen requests are wrong")
        if list(self.unseen) != sorted(self.unseen):
            raise InvariantViolation(f"{self.key}: unseen handles are out of order")
        if self.placed and not self.connected:
            raise InvariantViolation(f"{self.key}: is not connected and holds {sorted(self.placed)}")
        for handle, tracked in self.placed.items():
            if tracked.worker != self.key or tracked.handle != handle:
                raise InvariantViolation(f"{self.key}: {tracked.request.request_id} thinks it is elsewhere")


def _key_of(worker: Worker) -> WorkerKey:
    return worker.key


class Fleet:
    """All group leaders of the current layout."""

    def __init__(self) -> None:
        self.layout: Layout | None = None
        self.model: ModelInfo | None = None  # of whoever connected last; equal on all
        self._workers: dict[WorkerKey, Worker] = {}

    def __iter__(self) -> Iterator[Worker]:
        """In order of id."""
        return iter(sorted(self._workers.values(), key=_key_of))

    def get(self, key: WorkerKey) -> Worker | None:
        return self._workers.get(key)

    @property
    def usable(self) -> list[Worker]:
        return [worker for worker in self if worker.usable]

    @property
    def placed_count(self) -> int:
        return sum(len(worker.placed) for worker in list(self._workers.values()))

    def adopt(self, layout: Layout) -> tuple[list[Worker], list[Worker]]:
        """Takes over a layout; gives the leaders that are new and those that are gone, in order of id."""
        self.layout = layout
        wanted = {WorkerKey(group.leader.worker_id, group.leader.incarnation): group for group in layout.groups}
        gone = [
            worker for worker in self if worker.key not in wanted or worker.address != wanted[worker.key].leader.address
        ]
        for worker in gone:
            del self._workers[worker.key]
        new: list[Worker] = []
        for key in sorted(wanted):
            group = wanted[key]
            worker = self._workers.get(key)
            if worker is None:
                worker = self._workers[key] = Worker(
                    key=key, address=group.leader.address, group_id=group.group_id, draining_in_layout=False
                )
                new.append(worker)
            worker.group_id = group.group_id
            worker.draining_in_layout = group.leader.draining
        return new, gone

    def check(self) -> None:
        for worker in self:
            worker.check()
