"""Events and commands of `core.transition`."""

from dataclasses import dataclass

from ballast.common.ids import Epoch, WorkerId
from services.worker.core.draining import Draining
from services.worker.core.plan import Plan, SequenceId, Victim
from services.worker.core.spans import Hop

# ---------------------------------------------------------------- events: from the planner


@dataclass(frozen=True, slots=True)
class PrepareRequested:
    """Prepare a plan. `room_blocks`: room that a follower's leader has already granted for this restore; None: none."""

    at_s: float
    plan: Plan
    room_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class CommitRequested:
    at_s: float
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class AbortRequested:
    at_s: float
    epoch: Epoch
    why: str


# ---------------------------------------------------------------- events: from this worker


@dataclass(frozen=True, slots=True)
class LinksUp:
    at_s: float
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class MemoryReady:
    """Drop: the plan fits the memory. Restore: the missing layers are loaded and verified."""

    at_s: float
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class PreparationFailed:
    at_s: float
    epoch: Epoch
    why: str


@dataclass(frozen=True, slots=True)
class GroupLimited:
    """Until it dissolves, the group that this worker leads is limited to the blocks that its smallest stage keeps."""

    at_s: float
    epoch: Epoch
    block_count: int


@dataclass(frozen=True, slots=True)
class LimitHeld:
    """No request of the group holds or will reserve a block beyond the limit."""

    at_s: float
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class LayersGivenUp:
    """The preparation of a restore has been undone."""

    at_s: float
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class BoundaryReached:
    """All batches of the old layout that this worker leads have completed."""

    at_s: float
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class GroupEnded:
    """No batch of the draining group is in flight, and this worker has handed over its remaining sequences."""

    at_s: float
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class TakenUp:
    """Memory and role have been changed to the new layout. `own_victims`: sequences that this worker led before and
    continues to lead. `draining`: the old group, in a restore.
    """

    at_s: float
    epoch: Epoch
    own_victims: tuple[Victim, ...] = ()
    draining: Draining | None = None


@dataclass(frozen=True, slots=True)
class Led:
    """Answer to Lead and LeadWave: the KV of these victims is exchanged now. Unless this is the `last` wave, other
    victims wait for room. Sequences that are in no wave are recomputed.
    """

    at_s: float
    epoch: Epoch
    victims: tuple[Victim, ...]
    wave: int = 0
    last: bool = True


@dataclass(frozen=True, slots=True)
class KvSent:
    """The receiver has all KV of this transfer."""

    at_s: float
    epoch: Epoch
    sequence_id: SequenceId
    to: WorkerId


@dataclass(frozen=True, slots=True)
class KvReceived:
    at_s: float
    epoch: Epoch
    sequence_id: SequenceId
    source: WorkerId


@dataclass(frozen=True, slots=True)
class PeerLost:
    at_s: float
    peer: WorkerId
    why: str


# ---------------------------------------------------------------- events: from other members, over links


@dataclass(frozen=True, slots=True)
class RoomGranted:
    """From the leader of a group that will dissolve: the group uses only the first `block_count` blocks."""

    at_s: float
    epoch: Epoch
    block_count: int


@dataclass(frozen=True, slots=True)
class EpochEnded:
    """From the old leader: every batch of the old group has been sent. `kept`: if a stage was lost, the leader's
    sequences with their tokens of completed batches. All other KV is dropped, because it belongs to lost batches.
    """

    at_s: float
    epoch: Epoch
    source: WorkerId
    kept: tuple[Victim, ...] = ()


@dataclass(frozen=True, slots=True)
class HandoverReceived:
    """A member is ready for its new role; an old leader's handover includes its sequences."""

    at_s: float
    epoch: Epoch
    source: WorkerId
    victims: tuple[Victim, ...]


@dataclass(frozen=True, slots=True)
class RosterReceived:
    """From a new leader: sequences of its group whose KV must be sent to the group now. Each wave has one roster."""

    at_s: float
    epoch: Epoch
    source: WorkerId
    victims: tuple[Victim, ...]
    wave: int = 0
    last: bool = True


@dataclass(frozen=True, slots=True)
class WaveDone:
    """From a stage to its leader, with its capacity: the stage has sent and received all KV of this wave."""

    at_s: float
    epoch: Epoch
    source: WorkerId
    wave: int


@dataclass(frozen=True, slots=True)
class KvCompleteReceived:
    """A stage of the group that this worker leads has all KV of a sequence."""

    at_s: float
    epoch: Epoch
    sequence_id: SequenceId
    source: WorkerId


Event = (
    PrepareRequested
    | CommitRequested
    | AbortRequested
    | LinksUp
    | MemoryReady
    | PreparationFailed
    | GroupLimited
    | LimitHeld
    | LayersGivenUp
    | RoomGranted
    | BoundaryReached
    | GroupEnded
    | TakenUp
    | Led
    | KvSent
    | KvReceived
    | PeerLost
    | EpochEnded
    | HandoverReceived
    | RosterReceived
    | WaveDone
    | KvCompleteReceived
)

# ---------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class ConnectLinks:
    """Connect to the peers. Answered with LinksUp or PreparationFailed."""

    epoch: Epoch
    peers: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True)
class PrepareMemory:
    """Check or prepare memory. Answered with PreparationFailed, or in a drop with MemoryReady."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class GrantRoom:
    """Notify the followers, in order with batches, that their room is granted."""

    epoch: Epoch
    block_count: int


@dataclass(frozen=True, slots=True)
class LoadLayers:
    """Shrink the KV cache and load the missing layers. Answered with MemoryReady or PreparationFailed."""

    epoch: Epoch
    block_count: int


@dataclass(frozen=True, slots=True)
class ShrinkGroup:
    """Shrink this stage's share of the group, because the leader has already committed and its group needs less."""

    epoch: Epoch
    block_count: int


@dataclass(frozen=True, slots=True)
class WithdrawRoom:
    """A restore has failed before its commit, so its leader must lift the group's limit."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class ReportRoom:
    """Report this member's capacity to the leader, after a restore has been undone."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Quiesce:
    """A leader stops scheduling, in a drop. Answered with BoundaryReached when batches in flight have completed, or at
    once if a stage is lost, because they then never complete.
    """

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class SendEpochEnded:
    epoch: Epoch
    to: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True)
class TakeUp:
    """Move memory and change role; an old leader hands over its sequences. Answered with TakenUp."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Empty:
    """Hand over the draining group's sequences without KV, because a stage is lost. Answered with GroupEnded."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class CloseSeat:
    """Stop computing for the draining group, which has ended. Its KV blocks are still read until ReleaseLost."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class SendHandover:
    """Send the handover, with the sequences that move to this leader's group."""

    epoch: Epoch
    to: WorkerId


@dataclass(frozen=True, slots=True)
class Lead:
    """All members are ready: adopt the sequences, admit those that have room, form batches. Answered with Led."""

    epoch: Epoch
    victims: tuple[Victim, ...]


@dataclass(frozen=True, slots=True)
class LeadWave:
    """All members have ended the previous wave: admit waiting sequences that have room now. Answered with Led."""

    epoch: Epoch
    wave: int


@dataclass(frozen=True, slots=True)
class SendRoster:
    """Send a roster. The one of wave 0 is sent at once, later ones in order with batches, because their sequences
    reserve blocks that earlier batches have freed.
    """

    epoch: Epoch
    victims: tuple[Victim, ...]
    to: tuple[WorkerId, ...]
    wave: int = 0
    last: bool = True


@dataclass(frozen=True, slots=True)
class SendKv:
    """Send the KV of the sequence's computed tokens in the layers of this hop. Answered with KvSent."""

    epoch: Epoch
    victim: Victim
    hop: Hop


@dataclass(frozen=True, slots=True)
class ExpectKv:
    """Reserve blocks for a sequence of the new group. The KV of each of these hops is reported with KvReceived."""

    epoch: Epoch
    victim: Victim
    hops: tuple[Hop, ...]


@dataclass(frozen=True, slots=True)
class RefillKv:
    """Compute the KV of this stage's layers from the activations that `giver` has logged. Answered with KvReceived."""

    epoch: Epoch
    victim: Victim
    giver: WorkerId


@dataclass(frozen=True, slots=True)
class SendKvComplete:
    epoch: Epoch
    sequence_id: SequenceId
    to: WorkerId


@dataclass(frozen=True, slots=True)
class Resume:
    """Resume the sequence, because every stage has its KV."""

    epoch: Epoch
    sequence_id: SequenceId


@dataclass(frozen=True, slots=True)
class ReleaseSent:
    """Reuse the memory of KV in dropped layers that has been sent in the waves so far, and report the capacity to the
    leader.
    """

    plan: Plan


@dataclass(frozen=True, slots=True)
class SendWaveDone:
    """Report to the leader that this worker has completed a wave, after the report of ReleaseSent."""

    epoch: Epoch
    wave: int
    to: WorkerId


@dataclass(frozen=True, slots=True)
class ReleaseLost:
    """Release the memory of dropped layers, whose KV has all been sent."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Broken:
    """Leave the current group, which cannot continue because a member is lost."""

    peer: WorkerId
    why: str


Command = (
    ConnectLinks
    | PrepareMemory
    | GrantRoom
    | LoadLayers
    | ShrinkGroup
    | WithdrawRoom
    | ReportRoom
    | Quiesce
    | SendEpochEnded
    | TakeUp
    | Empty
    | CloseSeat
    | SendHandover
    | Lead
    | LeadWave
    | SendRoster
    | SendKv
    | ExpectKv
    | RefillKv
    | SendKvComplete
    | Resume
    | ReleaseSent
    | SendWaveDone
    | ReleaseLost
    | Broken
)
