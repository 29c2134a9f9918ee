"""The environment that an executor provides to a group member, and the context that the member's parts share.

An executor uses threads and links (a worker) or virtual time (the simulator, fault campaigns). A member's decisions do
not depend on its executor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, TypeVarTuple

from ballast.common.ids import WorkerId
from ballast.common.sampling import Grammar
from services.worker.core.batch import Batch, LaunchedStep, StepResult
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
    from services.worker.pipeline.role import MemberRole
    from services.worker.pipeline.stage_clock import StageWatch


_Given = TypeVarTuple("_Given")
_Result = TypeVar("_Result")
# Maximum prompt tokens of a batch with decodes, in blocks. Loading layers takes bandwidth and processor time from every
# batch; together with a long chunk, it would cause the longest gap between two tokens. In a pipeline a token waits for
# the chunks of all microbatches in flight. KV that has arrived is only used after the current batch.
_PROMPT_BLOCKS = 0.5
Now = Callable[[], float]  # monotonic seconds


class StageEngine(Protocol):
    """The part of the engine that executes batches."""

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
        """Execute layers `[first_layer, last_layer)` of a batch. `hidden_TD`: output of the layers before; None: the
        first stage, or no slices. Returns activations, or the result if the last layer is included. `preempted` is
        called at the batch's safepoints.

        Raises:
            Preempted: `preempted` returned True.
        """
        ...

    def forget_all(self) -> None: ...


Launch = Callable[[Batch, Sequence[Sequence[int]]], LaunchedStep]  # a batch on the whole model, with its block tables


class BlockCopier(Protocol):
    """Copies KV between device and host during a step. Called from the engine thread only."""

    def start(self, copies: Sequence[BlockCopy], layers: Sequence[int]) -> None: ...

    def finish(self) -> float:
        """Wait for the copies. Returns their duration (s)."""
        ...

    def close(self) -> None: ...


class ActivationStore(Protocol):
    """Rows of activations in host memory, by slot."""

    def slot_count(self, hidden_TD: torch.Tensor) -> int:
        """Number of slots for activations of this width."""
        ...

    def write(self, hidden_TD: torch.Tensor, rows: Sequence[int], slots: Sequence[int]) -> None: ...

    def read(self, slots: Sequence[int]) -> torch.Tensor: ...


class Background(Protocol):
    """Background jobs that run alongside the engine: checksums and loading of layers."""

    def submit(self, job: Callable[[*_Given], _Result], /, *given: *_Given) -> Future[_Result]: ...

    def holds(self, layer: int) -> bool:
        """Return whether a copy of the layer's parameters is in this host's memory."""
        ...

    def fill(self, layer: int) -> Future[bool]:
        """Load a layer's parameters from the copy in this host's memory (True: they are known to be correct), or else
        from the checkpoint (False). The layer must not be executed while it is read.
        """
        ...

    def keep(self, layer: int) -> Future[None]:
        """Copy a layer's parameters to host memory. The copy is permanent, because parameters never change."""
        ...

    def rest(self, stopped: Callable[[], bool], hurried: Callable[[], bool] = never) -> Callable[[], None] | None:
        """Return a function that a job without urgency calls between two pieces (see `unhurried`); None: no pauses."""
        ...

    def shutdown(self) -> None:
        """Finish the running jobs and start no others."""
        ...


@dataclass(frozen=True, slots=True)
class MemberEnvironment:
    """What an executor provides to a member."""

    plane: Plane
    hub: Hub  # receives from the member's links
    engine: StageEngine
    background: Background
    now: Now
    post: Callable[[MemberEvent], None]  # queue an event for the engine thread
    links: Callable[[Plane, MemberRole, Now, Callable[[MemberEvent], None]], Links]
    copier: BlockCopier | None = None  # required if the core's limits allow swapping
    compile_grammar: Callable[[Grammar], Future[Any]] | None = None  # None: constraints are not applied
    watch: Callable[[], StageWatch] | None = None  # creates a `StageWatch`; None: execution is synchronous
    launch: Launch | None = None  # launches batches; None: the engine only executes synchronously
    activations: ActivationStore | None = None  # memory of the activation log; None: there is no log
    preempts: Callable[[], bool] = never  # True if online work has arrived since the engine thread last took events


@dataclass(slots=True)
class MemberContext:
    """The context shared by all parts of a member."""

    me: WorkerId
    core: WorkerCore  # read-only here; only `answers` passes events to it
    book: BlockBook  # block tables of the current group; replaced at the commit of a restore
    memory: DeviceMemory
    role: MemberRole
    links: Links
    hub: Hub
    published: Published
    answers: MemberAnswers
    now: Now
    post: Callable[[MemberEvent], None]
    room: GroupRoom
    leaving: bool = False  # True: context of the draining group, not of the current group

    @property
    def group_scheduler(self) -> GroupScheduler:
        """The scheduler of this context's group. Read-only here."""
        leaving = self.core.leaving if self.leaving else None
        return self.core.group_scheduler if leaving is None else leaving

    def grow_book(self, block_count: int) -> None:
        self.book.grow(block_count - self.book.block_count)

    def begin_room(self, *, before_block_count: int = 0) -> None:
        """Start the room accounting of a new role."""
        stages = [stage.worker_id for stage in self.role.stages]
        self.room.begin(stages, self.book.block_count, before_block_count=before_block_count)

    def report_capacity(self, *, ends: bool = False) -> None:
        """Report the group's blocks to the core. `ends`: the group is about to end, so all pending releases are sent to
        its stages.
        """
        self.answers.tell(self.room.capacity(self.now(), ends=ends))

    def on_capacity(self, event: CapacityTold) -> None:
        """Leader: record a stage's capacity."""
        role = self.role
        current = event.epoch == role.epoch and role.leads
        if current and self.room.told(event.source, event.block_count, event.sizes, event.withdrawn):
            self.report_capacity()
        else:
            self.published.stale_total += 1

    def report_room(self) -> None:
        """Report this member's capacity to the leader."""
        role, room, block_count = self.role, self.room, self.book.block_count
        if role.leads:
            self.on_capacity(CapacityTold(role.epoch, role.me, block_count, room.own(), room.withdrawn))
        else:
            body = capacity_to_bytes(room.withdrawn, block_count, room.own())
            self.links.send(role.leader, TrafficClass.CONTROL, Topic.CAPACITY, body)

    def limit_prompts(self, *, beside: bool = False, batch_count: int | None = None) -> None:
        """Limit prompt chunks during a transition, for `batch_count` batches, or until `lift_limit` or a change of
        role. `beside`: also limit batches without decodes, because the draining group computes on the same devices or
        other sequences wait for their KV.
        """
        token_count = max(1, int(_PROMPT_BLOCKS * self.memory.kv.shape.block_tokens))
        self.answers.tell(PrefillLimited(self.now(), token_count, always=beside, batch_count=batch_count))

    def lift_limit(self) -> None:
        self.answers.tell(PrefillLimited(self.now(), None))


Answer = Command | StepOutcome


class MemberAnswers:
    """Collects the core's commands and the outcomes of steps, for the shell."""

    def __init__(self, core: WorkerCore, run: Callable[[Removed], object]) -> None:
        """`run` executes removals on this member's stages."""
        self._core = core
        self._run = run
        self._answers: list[Answer] = []

    def tell(self, event: Event) -> list[Command]:
        commands = self._core.handle(event)
        for command in commands:
            if isinstance(command, Removed):
                self._run(command)
            self._answers.append(command)
        return commands

    def add(self, outcome: StepOutcome) -> None:
        self._answers.append(outcome)

    def take(self) -> list[Answer]:
        answers, self._answers = self._answers, []
        return answers
