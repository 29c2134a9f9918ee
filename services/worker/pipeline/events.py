"""What happens to a worker as a member of a group. Posted from any thread, handled by the engine thread."""

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
from services.worker.links.transfer import Outcome, TransferReport
from services.worker.memory.backend import Algorithm

if TYPE_CHECKING:
    import torch

    from services.worker.links.connection import Link


@dataclass(frozen=True, slots=True)
class PlanReceived(MemberEvent):
    """From the planner: Prepare."""

    plan: Plan
    data_addresses: dict[WorkerId, str]  # where each member's links meet
    sources: dict[int, tuple[WorkerId, ...]]  # missing layer -> peers that hold it, in the order to be asked

    @property
    def lives(self) -> dict[WorkerId, int]:
        """The incarnation of each member."""
        return {m.worker_id: m.incarnation for group in self.plan.target.groups for m in group.members}


@dataclass(frozen=True, slots=True)
class Told(MemberEvent):
    """Something that the state machine of the transition wants to know."""

    epoch: Epoch
    event: TransitionEvent


@dataclass(frozen=True, slots=True)
class BatchArrived(MemberEvent):
    epoch: Epoch
    batch: Batch
    hidden_TD: torch.Tensor | None
    arrived_s: float = 0.0  # when
    receive_s: float = 0.0  # from the first of its bytes that this side saw until then

    @property
    def preempts(self) -> bool:
        """It computes online work, or another stage has made way for that."""
        return self.batch.failure == PREEMPTED or bool(self.batch.slices and not self.batch.safepoint_layers)


@dataclass(frozen=True, slots=True)
class ResultArrived(MemberEvent):
    epoch: Epoch
    result: StepResult | tuple[int, str]


@dataclass(frozen=True, slots=True)
class GrammarComes(MemberEvent):
    """A request with it will be taken in, by this leader or by that of this last stage."""

    grammar: Grammar


@dataclass(frozen=True, slots=True)
class HandoverArrived(MemberEvent):
    epoch: Epoch
    source: WorkerId
    snapshots: tuple[SequenceSnapshot, ...]
    block_count: int
    final_block_count: int  # when all KV of layers given up has been sent
    more: bool = False  # another one follows


@dataclass(frozen=True, slots=True)
class RosterArrived(MemberEvent):
    """That of a later wave comes from the leader by way of the stages in between."""

    epoch: Epoch
    event: RosterReceived
    recomputed: tuple[SequenceId, ...]


@dataclass(frozen=True, slots=True)
class KvAsked(MemberEvent):
    """A peer has blocks ready for the KV of victims."""

    epoch: Epoch
    peer: WorkerId
    sequence_ids: tuple[SequenceId, ...]


@dataclass(frozen=True, slots=True)
class CapacityTold(MemberEvent):
    epoch: Epoch
    source: WorkerId
    block_count: int
    sizes: RoomSizes
    withdrawn: Epoch  # the last restore that the source knows its leader to have given up


@dataclass(frozen=True, slots=True)
class Woken(MemberEvent):
    """Something that the member waits for between two steps may have happened."""


@dataclass(frozen=True, slots=True)
class LinkMade(MemberEvent):
    epoch: Epoch
    peer: WorkerId
    link: Future[Link]


@dataclass(frozen=True, slots=True)
class KvLeft(MemberEvent):
    """A transfer of KV from here has ended."""

    send: Send
    report: Future[TransferReport]

    @property
    def why_not(self) -> str:
        """Empty: the receiver has it."""
        if (error := self.report.exception()) is not None:
            return str(error)
        report = self.report.result()
        return "" if report.outcome is Outcome.DELIVERED else f"{report.outcome.value}: {report.why}"


@dataclass(frozen=True, slots=True)
class KvLanded(MemberEvent):
    """KV has come here; or it will not come any more."""

    giver: WorkerId
    piece: Piece
    delivered: bool
    unpack: Callable[[], None] | None = None  # it is here, and not in its place


@dataclass(frozen=True, slots=True)
class LayerAsked(MemberEvent):
    epoch: Epoch
    layer: int
    link: Link  # it may have come before this side's word that the link is up
    layout: bytes  # of the asker's memory, which is to be filled byte by byte


@dataclass(frozen=True, slots=True)
class LayerArrived(MemberEvent):
    epoch: Epoch
    layer: int
    peer: WorkerId | None  # None: read from the checkpoint
    checksum: bytes
    failure: str = ""
    by: Algorithm | None = None  # how the checksum has been computed


@dataclass(frozen=True, slots=True)
class LayerChecked(MemberEvent):
    epoch: Epoch
    layer: int
    right: bool


@dataclass(frozen=True, slots=True)
class RoomGranted(MemberEvent):
    """From the leader of a group that dissolves, or is about to: no block beyond is held, and none will be taken."""

    epoch: Epoch  # of the restore
    block_count: int


@dataclass(frozen=True, slots=True)
class PartnersNamed(MemberEvent):
    """From the planner: workers that this one may soon share a group with, and where links to them are made."""

    partners: Mapping[WorkerId, str]


@dataclass(frozen=True, slots=True)
class ParkOrdered(MemberEvent):
    """From the planner: give the device memory back if nobody needs this worker; or (not `park`) serve again."""

    park: bool


@dataclass(frozen=True, slots=True)
class MigrationOrdered(MemberEvent):
    """From the planner: the group that `source` leads gives requests to the one of `target`, and this worker is in one
    of them.
    """

    epoch: Epoch
    source: WorkerId
    target: WorkerId
    peers: Mapping[WorkerId, str]  # the members of the other group, and where their links meet
    block_budget: int
    until_s: float
    cause_id: str


@dataclass(frozen=True, slots=True)
class MigrationTold(MemberEvent):
    peer: WorkerId
    message: MigrationMessage
    link: Link  # answers go the same way
    at_s: float  # when it came: the engine may have been in a step


@dataclass(frozen=True, slots=True)
class RoomWithdrawn(MemberEvent):
    """From the leader: this restore is given up. Whoever has made room for it undoes that and says what it has."""

    epoch: Epoch
