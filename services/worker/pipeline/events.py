"""Events of a worker as a member of a group. Posted from any thread, handled by the engine thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ballast.common.ids import Epoch, WorkerId
from ballast.common.sampling import Grammar
from services.worker.core.batch import PREEMPTED, Batch, SequenceId, StepResult
from services.worker.core.migration_messages import Message as MigrationMessage
from services.worker.core.mover import Send
from services.worker.core.plan import Plan
from services.worker.core.room import RoomSizes
from services.worker.core.snapshot import SequenceSnapshot
from services.worker.core.spans import Piece
from services.worker.core.transition_messages import Event as TransitionEvent
from services.worker.core.transition_messages import RosterReceived
from services.worker.core.turns import MemberEvent
from services.worker.links.transfer import TransferOutcome, TransferReport
from services.worker.memory.backend import Algorithm

if TYPE_CHECKING:
    import torch

    from services.worker.links.connection import Link


@dataclass(frozen=True, slots=True)
class PlanReceived(MemberEvent):
    """Prepare, from the planner."""

    plan: Plan
    data_addresses: dict[WorkerId, str]  # addresses of the members' data planes
    sources: dict[int, tuple[WorkerId, ...]]  # missing layer -> peers that hold it, in the order of requests

    @property
    def lives(self) -> dict[WorkerId, int]:
        """Incarnation of each member."""
        return {m.worker_id: m.incarnation for group in self.plan.target.groups for m in group.members}


@dataclass(frozen=True, slots=True)
class Told(MemberEvent):
    """An event for the transition's state machine."""

    epoch: Epoch
    event: TransitionEvent


@dataclass(frozen=True, slots=True)
class BatchArrived(MemberEvent):
    epoch: Epoch
    batch: Batch
    hidden_TD: torch.Tensor | None
    arrived_s: float = 0.0  # when it arrived
    receive_s: float = 0.0  # time that receiving it took

    @property
    def preempts(self) -> bool:
        """True if the batch interrupts an offline step, because of online work or a preemption on another stage."""
        return self.batch.failure == PREEMPTED or bool(self.batch.slices and not self.batch.safepoint_layers)


@dataclass(frozen=True, slots=True)
class ResultArrived(MemberEvent):
    epoch: Epoch
    result: StepResult | tuple[int, str]


@dataclass(frozen=True, slots=True)
class GrammarAnnounced(MemberEvent):
    """A request with this grammar is about to be accepted by the leader of the group, possibly this worker."""

    grammar: Grammar


@dataclass(frozen=True, slots=True)
class HandoverArrived(MemberEvent):
    epoch: Epoch
    source: WorkerId
    snapshots: tuple[SequenceSnapshot, ...]
    block_count: int
    final_block_count: int  # blocks of the source once all KV of dropped layers has been sent
    more: bool = False  # another handover of this source follows
    lacking: tuple[SequenceId, ...] = ()  # sequences that a stand-in for a lost stage cannot continue


@dataclass(frozen=True, slots=True)
class ActivationsAsked(MemberEvent):
    """A stand-in requests the activations of a sequence's tokens `[first, first + count)`."""

    epoch: Epoch
    peer: WorkerId
    sequence_id: SequenceId
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class ActivationsArrived(MemberEvent):
    epoch: Epoch
    sequence_id: SequenceId
    first: int
    token_ids: tuple[int, ...]
    hidden_TD: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class RosterArrived(MemberEvent):
    """A roster has arrived. A later wave's roster is forwarded by the stages between the leader and this one."""

    epoch: Epoch
    event: RosterReceived
    recomputed: tuple[SequenceId, ...]


@dataclass(frozen=True, slots=True)
class KvAsked(MemberEvent):
    """A peer has reserved blocks for the KV of these sequences."""

    epoch: Epoch
    peer: WorkerId
    sequence_ids: tuple[SequenceId, ...]


@dataclass(frozen=True, slots=True)
class CapacityTold(MemberEvent):
    epoch: Epoch
    source: WorkerId
    block_count: int
    sizes: RoomSizes
    withdrawn: Epoch  # last restore that the source knows to be withdrawn


@dataclass(frozen=True, slots=True)
class Woken(MemberEvent):
    """A condition that the member waits for between two steps may have changed."""


@dataclass(frozen=True, slots=True)
class LinkMade(MemberEvent):
    epoch: Epoch
    peer: WorkerId
    link: Future[Link]


@dataclass(frozen=True, slots=True)
class KvLeft(MemberEvent):
    """An outgoing KV transfer has ended."""

    send: Send
    report: Future[TransferReport]

    @property
    def why_not(self) -> str:
        """Return why the receiver does not have the KV; empty if it does."""
        if (error := self.report.exception()) is not None:
            return str(error)
        report = self.report.result()
        return "" if report.outcome is TransferOutcome.DELIVERED else f"{report.outcome.value}: {report.why}"


@dataclass(frozen=True, slots=True)
class KvLanded(MemberEvent):
    """A piece of KV has arrived, or will not arrive (not `delivered`)."""

    giver: WorkerId
    piece: Piece
    delivered: bool
    unpack: Callable[[], None] | None = None  # not None: copies it from the receive buffer to its blocks


@dataclass(frozen=True, slots=True)
class LayerAsked(MemberEvent):
    epoch: Epoch
    layer: int
    link: Link  # this event may precede the link's `LinkMade` on this side
    layout: bytes  # byte layout of the layer in the requester's memory, which must equal this worker's


@dataclass(frozen=True, slots=True)
class LayerArrived(MemberEvent):
    epoch: Epoch
    layer: int
    peer: WorkerId | None  # None: read from the host's memory or the checkpoint
    checksum: bytes
    failure: str = ""
    by: Algorithm | None = None  # algorithm of the checksum
    verified: bool = False  # True: from a copy in host memory, verified while it was copied


@dataclass(frozen=True, slots=True)
class LayerChecked(MemberEvent):
    epoch: Epoch
    layer: int
    right: bool


@dataclass(frozen=True, slots=True)
class RoomGranted(MemberEvent):
    """From the leader of a group that will dissolve: no block beyond the first `block_count` is or will be held."""

    epoch: Epoch  # epoch of the restore
    block_count: int


@dataclass(frozen=True, slots=True)
class PartnersNamed(MemberEvent):
    """From the planner: workers with which this one may soon share a group, and the addresses for links to them."""

    partners: Mapping[WorkerId, str]


@dataclass(frozen=True, slots=True)
class ParkOrdered(MemberEvent):
    """From the planner: release the device memory unless the worker is in use, or (not `park`) serve again."""

    park: bool


@dataclass(frozen=True, slots=True)
class MigrationOrdered(MemberEvent):
    """From the planner: the group led by `source` migrates requests to the group led by `target`. This worker is in one
    of them.
    """

    epoch: Epoch
    source: WorkerId
    target: WorkerId
    peers: Mapping[WorkerId, str]  # members of the other group, with the addresses of their data planes
    block_budget: int
    until_s: float
    cause_id: str
    longest_first: bool = False


@dataclass(frozen=True, slots=True)
class MigrationTold(MemberEvent):
    peer: WorkerId
    message: MigrationMessage
    link: Link  # answers are sent back over it
    at_s: float  # when it arrived, because the engine may have been in a step


@dataclass(frozen=True, slots=True)
class RoomWithdrawn(MemberEvent):
    """From the leader: a restore is withdrawn. Followers that have made room undo this and report their capacity."""

    epoch: Epoch
