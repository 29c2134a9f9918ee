"""What an executor gives a member to live in, and what all parts of a member share.

There are executors for threads and links (a worker) and for virtual time (the simulator, fault campaigns). What a
member decides does not know which of them it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, TypeVarTuple

from ballast.common.ids import WorkerId
from ballast.common.sampling import Grammar
from services.worker.core.batch import Batch, StepResult
from services.worker.core.blocks import BlockBook
from services.worker.core.events import BlockCopy, Command, Event, PrefillLimited, Removed
from services.worker.core.group_scheduler import GroupScheduler
from services.worker.core.room import GroupRoom
from services.worker.core.turns import MemberEvent, StepOutcome
from services.worker.core.worker import WorkerCore
from services.worker.links.traffic import TrafficClass
from services.worker.memory.device import DeviceMemory
from services.worker.pipeline.background import never
from services.worker.pipeline.events import CapacityTold
from services.worker.pipeline.wire import Topic, capacity_to_bytes

if TYPE_CHECKING:
    import torch

    from services.worker.links.member_side import Plane
    from services.worker.pipeline.hub import Hub
    from services.worker.pipeline.links import Links
    from services.worker.pipeline.progress import Published
    from services.worker.pipeline.role import Role
    from services.worker.pipeline.stage_clock import StageWatch


_Given = TypeVarTuple("_Given")
_Result = TypeVar("_Result")
# Of prompts in a batch beside decodes. Layers that come take bandwidth, and time of the processor, from every batch:
# a long piece of a prompt on top of it would be the longest gap that a request has. In a pipeline a token waits for
# the pieces in all microbatches that are in flight.
_PROMPT_BLOCKS = 0.5
Now = Callable[[], float]  # seconds, of a clock that does not jump


class StageEngine(Protocol):
    """The part of the engine that runs batches."""

    def run_stage(
        self,
        batch: Batch,
        block_tables: Sequence[Sequence[int]],
        hidden_TD: torch.Tensor | None,
        *,
        first_layer: int,
        last_layer: int,
        preempted: Callable[[], bool] = never,
    ) -> StepResult | torch.Tensor:
        """`preempted` is asked at the batch's safepoints.

        Raises:
            Preempted: it said so.
        """
        ...

    def forget_all(self) -> None: ...


class BlockCopier(Protocol):
    """Copies KV between device and host while a step runs. All calls come from the engine thread."""

    def start(self, copies: Sequence[BlockCopy], layers: Sequence[int]) -> None: ...

    def finish(self) -> float:
        """Waits for the copies. Returns how long they took."""
        ...

    def close(self) -> None: ...


class Background(Protocol):
    """Where checksums are taken and layers are read, beside the engine."""

    def submit(self, job: Callable[[*_Given], _Result], /, *given: *_Given) -> Future[_Result]: ...

    def fill(self, layer: int) -> Future[None]:
        """Its parameters come from host memory, if they were kept, else from the checkpoint. The layer is not executed
        meanwhile.
        """
        ...

    def keep(self, layer: int) -> Future[None]:
        """Its parameters are kept in host memory, from now on for good: they never change."""
        ...

    def rest(self, stopped: Callable[[], bool], hurried: Callable[[], bool] = never) -> Callable[[], None] | None:
        """To be called between two pieces of a job that nobody waits for. See `unhurried`."""
        ...

    def shutdown(self) -> None:
        """What has begun ends; nothing else begins."""
        ...


@dataclass(frozen=True, slots=True)
class Environment:
    """What an executor gives a member."""

    plane: Plane
    hub: Hub  # the receiver of its links
    engine: StageEngine
    background: Background
    now: Now
    post: Callable[[MemberEvent], None]  # to be handled by the engine thread
    links: Callable[[Plane, Role, Now, Callable[[MemberEvent], None]], Links]
    copier: BlockCopier | None = None  # needed if the core's limits let it swap
    compile_grammar: Callable[[Grammar], Future[Any]] | None = None  # None: none is followed
    watch: Callable[[], StageWatch] | None = None  # makes one; None: what the engine has run is over
    preempts: Callable[[], bool] = never  # whether online work has come since the engine thread last took in events


@dataclass(slots=True)
class MemberContext:
    """What all parts of a member share."""

    me: WorkerId
    core: WorkerCore  # only read: `answers` tell it something
    book: BlockBook  # of the group in force; another one from the commit of a restore on
    memory: DeviceMemory
    role: Role
    links: Links
    hub: Hub
    published: Published
    answers: Answers
    now: Now
    post: Callable[[MemberEvent], None]
    room: GroupRoom
    leaving: bool = False  # of the group that dissolves, if this worker has led it; not of the one in force

    @property
    def group_scheduler(self) -> GroupScheduler:
        """Only read."""
        leaving = self.core.leaving if self.leaving else None
        return self.core.group_scheduler if leaving is None else leaving

    def grow_book(self, block_count: int) -> None:
        self.book.grow(block_count - self.book.block_count)

    def begin_room(self, *, before_block_count: int = 0) -> None:
        """The role is a new one."""
        stages = [stage.worker_id for stage in self.role.stages]
        self.room.begin(stages, self.book.block_count, before_block_count=before_block_count)

    def tell_room(self, *, ends: bool = False) -> None:
        """The core hears how many blocks its group has. `ends`: the group is about to end, and its stages are told of
        all that they are to forget.
        """
        self.answers.tell(self.room.capacity(self.now(), ends=ends))

    def room_told(self, event: CapacityTold) -> None:
        """Leader: what a stage has."""
        role = self.role
        current = event.epoch == role.epoch and role.leads
        if current and self.room.told(event.source, event.block_count, event.sizes, event.withdrawn):
            self.tell_room()
        else:
            self.published.stale_total += 1

    def report_room(self) -> None:
        """The leader hears what this member has."""
        role, room, block_count = self.role, self.room, self.book.block_count
        if role.leads:
            self.room_told(CapacityTold(role.epoch, role.me, block_count, room.own(), room.withdrawn))
        else:
            body = capacity_to_bytes(room.withdrawn, block_count, room.own())
            self.links.send(role.leader, TrafficClass.CONTROL, Topic.CAPACITY, body)

    def limit_prompts(self, *, beside: bool = False) -> None:
        """In a restore until `lift_limit`. `beside`: of this worker's own requests, while the group that dissolves
        computes on the same devices.
        """
        token_count = max(1, int(_PROMPT_BLOCKS * self.memory.kv.shape.block_tokens))
        self.answers.tell(PrefillLimited(self.now(), token_count, always=beside))

    def lift_limit(self) -> None:
        self.answers.tell(PrefillLimited(self.now(), None))


Answer = Command | StepOutcome


class Answers:
    """The shell hears of every answer: it tells dispatchers, and forgets texts."""

    def __init__(self, core: WorkerCore, run: Callable[[Removed], StepOutcome | None]) -> None:
        """`run` tells this member's stages of sequences that have ended."""
        self._core = core
        self._run = run
        self._answers: list[Answer] = []

    def tell(self, event: Event) -> list[Command]:
        commands = self._core.handle(event)
        for command in commands:
            if isinstance(command, Removed):
                outcome = self._run(command)
                assert outcome is None or not command.batch.slices
            self._answers.append(command)
        return commands

    def add(self, outcome: StepOutcome) -> None:
        self._answers.append(outcome)

    def take(self) -> list[Answer]:
        answers, self._answers = self._answers, []
        return answers
