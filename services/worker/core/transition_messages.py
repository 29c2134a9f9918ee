"""What a transition is told and what it asks for: the events and commands of `core.transition`."""

from dataclasses import dataclass

from ballast.common.ids import Epoch, WorkerId
from services.worker.core.draining import Draining
from services.worker.core.plan import Plan, SequenceId, Victim
from services.worker.core.spans import Hop

# ---------------------------------------------------------------- events: from the planner


@dataclass(frozen=True, slots=True)
class PrepareRequested:
    """`room_blocks`: a follower's leader has granted room for this restore already; None: not yet."""

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
    """Drop: the plan fits. Restore: the missing layers are here and verified."""

    at_s: float
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class PreparationFailed:
    at_s: float
    epoch: Epoch
    why: str


@dataclass(frozen=True, slots=True)
class GroupLimited:
    """The group that this worker leads is to dissolve: it may have only what its smallest stage keeps meanwhile."""

    at_s: float
    epoch: Epoch
    block_count: int


@dataclass(frozen=True, slots=True)
class LimitHeld:
    """No request of the group holds a block beyond the limit, or will take one."""

    at_s: float
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class LayersGivenUp:
    """The preparation of a restore has been undone."""

    at_s: float
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class BoundaryReached:
    """No batch of the old layout that this worker leads is under way any more."""

    at_s: float
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class GroupEnded:
    """No batch of the group that dissolves is in flight, and this worker has handed over what was left in it."""

    at_s: float
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class TakenUp:
    """Memory and role are those of the new layout. `own_victims`: what this worker has led and goes on leading.
    `draining`: the group that goes on beside that, in a restore.
    """

    at_s: float
    epoch: Epoch
    own_victims: tuple[Victim, ...] = ()
    draining: Draining | None = None


@dataclass(frozen=True, slots=True)
class Led:
    """Answer to Lead and LeadWave: the KV of these victims is exchanged now. Unless this is the `last` wave others wait
    for room; who is in none of them is computed anew.
    """

    at_s: float
    epoch: Epoch
    victims: tuple[Victim, ...]
    wave: int = 0
    last: bool = True


@dataclass(frozen=True, slots=True)
class KvSent:
    """The receiver has all of it."""

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
    """From the leader of a group that is to dissolve: it holds no block beyond these, and will take none."""

    at_s: float
    epoch: Epoch
    block_count: int


@dataclass(frozen=True, slots=True)
class EpochEnded:
    """From the leader that was: every batch of the old group has come by."""

    at_s: float
    epoch: Epoch
    source: WorkerId


@dataclass(frozen=True, slots=True)
class HandoverReceived:
    """A member is ready for its new role; an old leader's sequences have come with it."""

    at_s: float
    epoch: Epoch
    source: WorkerId
    victims: tuple[Victim, ...]


@dataclass(frozen=True, slots=True)
class RosterReceived:
    """From a new leader: victims of its group, whose KV is to be gathered there now. Each wave has one."""

    at_s: float
    epoch: Epoch
    source: WorkerId
    victims: tuple[Victim, ...]
    wave: int = 0
    last: bool = True


@dataclass(frozen=True, slots=True)
class WaveDone:
    """From a stage to its leader, which knows what room it has: the KV of this wave has come and gone there."""

    at_s: float
    epoch: Epoch
    source: WorkerId
    wave: int


@dataclass(frozen=True, slots=True)
class KvCompleteReceived:
    """A stage of the group that this worker leads has all KV of a victim."""

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
    """Answered with LinksUp or PreparationFailed."""

    epoch: Epoch
    peers: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True)
class PrepareMemory:
    """Answered with PreparationFailed if this worker cannot take part; in a drop else with MemoryReady."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class GrantRoom:
    """To the stages that follow, behind all batches."""

    epoch: Epoch
    block_count: int


@dataclass(frozen=True, slots=True)
class LoadLayers:
    """The KV keeps so many blocks, and missing layers come into the rest. Answered with MemoryReady or
    PreparationFailed.
    """

    epoch: Epoch
    block_count: int


@dataclass(frozen=True, slots=True)
class ShrinkGroup:
    """The leader has committed already, and its group needs less."""

    epoch: Epoch
    block_count: int


@dataclass(frozen=True, slots=True)
class WithdrawRoom:
    """A restore has failed before its commit: the group is limited no more. For its leader."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class ReportRoom:
    """To the leader: what this member has, now that a restore has been undone."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Quiesce:
    """Form no batch any more; answered with BoundaryReached. For a worker that leads, in a drop."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class SendEpochEnded:
    epoch: Epoch
    to: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True)
class TakeUp:
    """Move memory, change role; an old leader hands its sequences over. Answered with TakenUp."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Empty:
    """A stage of the group that dissolves is gone: what is in it goes elsewhere now, by its tokens. Answered with
    GroupEnded. For the worker that has led it.
    """

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class CloseSeat:
    """The group that dissolves has come to its end here. Its blocks are read until ReleaseLost."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class SendHandover:
    """With the sequences that go to this leader's group, if this worker has led any."""

    epoch: Epoch
    to: WorkerId


@dataclass(frozen=True, slots=True)
class Lead:
    """All members are ready: adopt the victims, see which have room, form batches. Answered with Led."""

    epoch: Epoch
    victims: tuple[Victim, ...]


@dataclass(frozen=True, slots=True)
class LeadWave:
    """All members are through with the wave before: see which of those that wait have room now. Answered with Led."""

    epoch: Epoch
    wave: int


@dataclass(frozen=True, slots=True)
class SendRoster:
    """The roster of wave 0 goes at once. That of a later one goes in order with the batches, which go from stage to
    stage: its victims take blocks that batches before it have freed.
    """

    epoch: Epoch
    victims: tuple[Victim, ...]
    to: tuple[WorkerId, ...]
    wave: int = 0
    last: bool = True


@dataclass(frozen=True, slots=True)
class SendKv:
    """The KV of the victim's computed tokens in the layers of that hop. Answered with KvSent."""

    epoch: Epoch
    victim: Victim
    hop: Hop


@dataclass(frozen=True, slots=True)
class ExpectKv:
    """Have blocks ready for a victim of the new group. What comes by each of these hops is reported with KvReceived."""

    epoch: Epoch
    victim: Victim
    hops: tuple[Hop, ...]


@dataclass(frozen=True, slots=True)
class SendKvComplete:
    epoch: Epoch
    sequence_id: SequenceId
    to: WorkerId


@dataclass(frozen=True, slots=True)
class Resume:
    """Every stage has the victim's KV."""

    epoch: Epoch
    sequence_id: SequenceId


@dataclass(frozen=True, slots=True)
class ReleaseSent:
    """Nobody needs the KV of the layers this worker has given up any more, as far as it is of victims of the waves so
    far: room for the next ones. The leader is told what there is.
    """

    plan: Plan


@dataclass(frozen=True, slots=True)
class SendWaveDone:
    """This worker is through with a wave; sent behind what ReleaseSent has told the leader."""

    epoch: Epoch
    wave: int
    to: WorkerId


@dataclass(frozen=True, slots=True)
class ReleaseLost:
    """Nobody needs the KV of the layers this worker has given up: its extents follow the parameters."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Broken:
    """A member of the group in force is gone: what the group was doing cannot go on."""

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
    | SendKvComplete
    | Resume
    | ReleaseSent
    | SendWaveDone
    | ReleaseLost
    | Broken
)
