"""Constructs a worker's parts as a member of groups."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from ballast.common.ids import WorkerId
from services.worker.core.batch import Batch, LaunchedStep
from services.worker.core.blocks import BlockBook
from services.worker.core.limits import WorkerLimits
from services.worker.core.turns import MemberEvent
from services.worker.core.worker import WorkerCore
from services.worker.pipeline.background import Threads
from services.worker.pipeline.context import ActivationStore, BlockCopier, MemberEnvironment, StageEngine
from services.worker.pipeline.grammars import CompileGrammar
from services.worker.pipeline.hub import Hub
from services.worker.pipeline.links import Links
from services.worker.pipeline.member import GroupMember
from services.worker.pipeline.stage_clock import watch_for
from services.worker.policy.harvest import Harvest
from services.worker.policy.microbatching import Microbatching, by_token_count
from services.worker.policy.token_target import TokenTarget
from services.worker.shell import WorkerShell

if TYPE_CHECKING:
    import torch

    from ballast.common.model import ModelInfo
    from services.worker.engine.runner import ModelRunner
    from services.worker.links.config import TransportConfig
    from services.worker.links.plane import DataPlane
    from services.worker.memory.device import DeviceMemory
    from services.worker.policy.online_cost import OnlineCost


class Launching(Protocol):
    """An engine that launches batches."""

    def launch(self, batch: Batch, block_tables: Sequence[Sequence[int]]) -> LaunchedStep: ...


class BuiltInstance(Protocol):
    """A loaded model with its memory, which can execute any range of its layers."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def memory(self) -> DeviceMemory: ...

    @property
    def runner(self) -> ModelRunner: ...

    @property
    def block_count(self) -> int: ...

    def holds_layer(self, layer: int) -> bool:
        """Return whether a copy of the layer is in host memory. Thread-safe."""
        ...

    def read_layer(self, layer: int) -> bool:
        """Reload a layer's parameters from the copy in host memory (True) or, without one, from the checkpoint (False).
        Thread-safe. The layer must not be executed while it is read.
        """
        ...

    def keep_layer(self, layer: int) -> None:
        """Copy a layer's parameters to host memory, from which they can be loaded later. Thread-safe."""
        ...


def stage_core(
    limits: WorkerLimits,
    engine: BuiltInstance,
    ordinal: int,
    microbatching: Microbatching = by_token_count,
    target: TokenTarget | None = None,
    harvest: Harvest | None = None,
) -> tuple[WorkerCore, BlockBook]:
    """Create the core of a worker that may be a stage, and its block tables. `ordinal`: prefix of its sequence ids,
    unique in the cluster.
    """
    book = BlockBook(engine.block_count, limits.block_tokens)
    core = WorkerCore(
        limits,
        engine.block_count,
        book=book,
        first_sequence_id=ordinal << 32,
        microbatching=microbatching,
        target=target,
        harvest=harvest,
    )
    return core, book


@dataclass(frozen=True, slots=True)
class BuiltMembership:
    member: GroupMember
    plane: DataPlane


def join(
    shell: WorkerShell,
    *,
    me: WorkerId,
    core: WorkerCore,
    book: BlockBook,
    engine: BuiltInstance,
    config: TransportConfig,
    advertise_host: str | None,
    costs: OnlineCost | None = None,
    copier: BlockCopier | None = None,
    runner: StageEngine | None = None,
    open_plane: Callable[[Hub, bytes | None], DataPlane] | None = None,
    transport: str = "auto",
    secret: bytes | None = None,
    compile_grammar: CompileGrammar | None = None,
    activations: ActivationStore | None = None,
) -> BuiltMembership:
    """Make the worker a member of groups, and open its data plane, which the shell closes when its engine thread ends.
    `costs`: records durations of stages. `copier`: required if the core's limits allow swapping. `compile_grammar`:
    compiles for the engine, with a cache; None: constraints are not applied. `runner`: replaces the engine's own.
    `open_plane`: opens another data plane. `secret`: see `links.plane.DataPlane`.
    """

    def post(event: MemberEvent) -> None:
        shell.post_member(event)

    device: torch.device | None = None  # an emulated device is not a torch device
    if open_plane is None:
        device = engine.memory.pool.backend.device
        hub = Hub(post, device=device)
        plane = _real_plane(me, hub, config, advertise_host, transport, secret, device)
        from services.worker.links.cuda_copies import copies_for  # imports torch

        threads = Threads(engine.holds_layer, engine.read_layer, engine.keep_layer, copies_for(device).copying)
    else:
        threads = Threads(engine.holds_layer, engine.read_layer, engine.keep_layer)
        hub = Hub(post)
        plane = open_plane(hub, secret)
    own = engine.runner
    if costs is not None:
        from services.worker.pipeline.timed_runner import TimedRunner  # imports NumPy

        watch = watch_for(engine.memory.pool.backend.device, time.perf_counter)
        own = TimedRunner(own, costs, layer_count=engine.info.layer_count, watch=watch)
    member = GroupMember(
        me,
        core,
        book,
        engine.memory,
        MemberEnvironment(
            plane=plane,
            hub=hub,
            engine=runner or own,
            background=threads,
            now=time.monotonic,
            post=post,
            links=Links,
            copier=copier,
            compile_grammar=compile_grammar,
            launch=cast("Launching", runner or own).launch if core.group_scheduler.goes_ahead else None,
            activations=activations,
            preempts=shell.preempts,
            watch=None if device is None else functools.partial(watch_for, device, time.monotonic),
        ),
    )
    shell.join_group(member)
    return BuiltMembership(member, plane)


def _real_plane(
    me: WorkerId,
    hub: Hub,
    config: TransportConfig,
    advertise_host: str | None,
    transport: str,
    secret: bytes | None,
    device: torch.device,
) -> DataPlane:
    from services.worker.links.open import open_plane

    return open_plane(me, hub, config, advertise_host, transport, secret, device)
