"""Events (past tense) and commands of the planner's core."""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from ballast.common.ids import Epoch, Incarnation, WorkerId
from ballast.common.layout import Layout, Member, Place
from ballast.common.load import LoadReport
from ballast.common.model import ModelInfo
from ballast.common.protocol import PROTOCOL
from ballast.common.traffic import Pace, Traffic
from services.planner.core.prediction_log import Predicted
from services.planner.core.record import TransitionRecord
from services.planner.core.transition import Journal, MemberSaid
from services.planner.policy.replicate import Partial
from services.planner.policy.reserve import Learnt

_QUIET = Traffic()


@dataclass(frozen=True, slots=True)
class ClusterLoad:
    """Load reports, traffic, and speeds of instances: the input of plans."""

    workers: Mapping[WorkerId, LoadReport]
    traffic: Traffic = _QUIET
    pace: Pace | None = None  # speed of a typical instance among those with the most layers; None: unknown
    slowness: Mapping[WorkerId, float] = field(default_factory=dict[WorkerId, float])  # factors on `pace` other than 1
    fresh_traffic: Traffic | None = None  # traffic without silent dispatchers; None: no dispatcher is silent

    def without(self, kept_out: Container[WorkerId]) -> "ClusterLoad":
        """Return a copy without the reports of these instances, so that plans ignore their groups."""
        return replace(self, workers={w: load for w, load in self.workers.items() if w not in kept_out})


Sources = tuple[tuple[int, WorkerId | None], ...]  # (layer, holder) in order of preference; None: host copy or disk


@dataclass(frozen=True, slots=True)
class StoredLayout:
    """The planner's data in the state server."""

    layout: Layout
    model: ModelInfo | None  # model of its instances; None before the first instance
    partial: Partial = ()  # instances outside the layout that hold only some layers
    journal: Journal | None = None  # journal of the newest transition
    learnt: Learnt = field(default_factory=Learnt)


class WriteOutcome(Enum):
    WRITTEN = auto()
    CONFLICT = auto()  # another epoch is stored than expected
    FENCED = auto()  # another planner has the lease
    UNAVAILABLE = auto()  # not answered, so the outcome is unknown


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class LeadershipChanged:
    at_s: float
    cause_id: str
    token: int | None  # fencing token; None: standby


@dataclass(frozen=True, slots=True)
class LayoutLoaded:
    at_s: float
    cause_id: str
    stored: StoredLayout | None


@dataclass(frozen=True, slots=True)
class LoadFailed:
    at_s: float
    cause_id: str


@dataclass(frozen=True, slots=True)
class WriteSettled:
    at_s: float
    cause_id: str
    write: "Write"
    outcome: WriteOutcome


@dataclass(frozen=True, slots=True)
class SnapshotBegan:
    """A new connection to the monitor is open. The monitor reports all instances on it, followed by SnapshotEnded."""

    at_s: float
    cause_id: str


@dataclass(frozen=True, slots=True)
class SnapshotEnded:
    at_s: float
    cause_id: str


@dataclass(frozen=True, slots=True)
class InstanceUp:
    at_s: float
    cause_id: str
    worker_id: WorkerId
    incarnation: Incarnation
    address: str
    model: ModelInfo
    draining: bool
    data_address: str = ""  # host:port of its data plane
    place: Place | None = None  # reported place in the layout; None: serves alone, with all layers
    protocol: int = PROTOCOL  # number of the protocol between workers
    parked: bool = False  # True: it reports that it is parked


@dataclass(frozen=True, slots=True)
class InstanceLost:
    at_s: float
    cause_id: str
    worker_id: WorkerId
    incarnation: Incarnation
    why: str
    silent: bool = False  # True: no reports, and no other evidence that it has ended


@dataclass(frozen=True, slots=True)
class InstanceDraining:
    at_s: float
    cause_id: str
    worker_id: WorkerId
    incarnation: Incarnation


class Probed(Enum):
    ALIVE = auto()  # the same incarnation answers
    GONE = auto()  # no process or another process listens at its address
    SILENT = auto()


@dataclass(frozen=True, slots=True)
class InstanceProbed:
    """Answer to ProbeInstance."""

    at_s: float
    cause_id: str
    worker_id: WorkerId
    incarnation: Incarnation
    found: Probed


@dataclass(frozen=True, slots=True)
class WorkerDrainRequested:
    at_s: float
    cause_id: str
    request_id: str  # idempotency key: a retry with the same id gets the same answer
    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class StandingRequested:
    """An operator parks or wakes an instance. Answered by AnswerChange or RefuseChange."""

    at_s: float
    cause_id: str
    request_id: str  # a repetition gets the same answer
    worker_id: WorkerId
    away: bool


@dataclass(frozen=True, slots=True)
class ParkRefused:
    """An instance cannot be parked, so it has to serve again."""

    at_s: float
    cause_id: str
    worker_id: WorkerId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class OverloadRaised:
    at_s: float
    cause_id: str
    required_bytes: int


@dataclass(frozen=True, slots=True)
class ReliefRaised:
    at_s: float
    cause_id: str


@dataclass(frozen=True, slots=True)
class LongRequestRaised:
    """A request waits for a group that can hold it, or is about to outgrow its instance. Repeated each second."""

    at_s: float
    cause_id: str
    need_tokens: int
    prompt_tokens: int  # part of `need_tokens` that is still to be computed
    leader_id: WorkerId  # leader of its current group; empty: none yet


@dataclass(frozen=True, slots=True)
class DropRequested:
    """An operator requests a drop."""

    at_s: float
    cause_id: str
    request_id: str  # a repetition gets the same answer
    required_bytes: int | None = None  # None: the current shortfall
    worker_ids: tuple[WorkerId, ...] = ()  # not empty: form one group of these, in this order
    hold_s: float = 0.0  # seconds after the drop without automatic restores


@dataclass(frozen=True, slots=True)
class RestoreRequested:
    """An operator requests a restore of all pipelines, regardless of the load."""

    at_s: float
    cause_id: str
    request_id: str


@dataclass(frozen=True, slots=True)
class LoadsRead:
    """Answer to ReadLoads."""

    at_s: float
    cause_id: str
    load: ClusterLoad
    failure: str = ""  # why there is no report


@dataclass(frozen=True, slots=True)
class MemberAnswered:
    at_s: float
    cause_id: str
    epoch: Epoch
    said: MemberSaid


@dataclass(frozen=True, slots=True)
class TimerFired:
    at_s: float
    cause_id: str


MonitorEvent = (
    SnapshotBegan
    | SnapshotEnded
    | InstanceUp
    | InstanceLost
    | InstanceDraining
    | OverloadRaised
    | ReliefRaised
    | LongRequestRaised
)
ChangeRequest = DropRequested | RestoreRequested
Event = (
    LeadershipChanged
    | LayoutLoaded
    | LoadFailed
    | WriteSettled
    | MonitorEvent
    | InstanceProbed
    | WorkerDrainRequested
    | StandingRequested
    | ParkRefused
    | ChangeRequest
    | LoadsRead
    | MemberAnswered
    | TimerFired
)


# ---------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class LoadLayout:
    """Read the stored layout. Answered by LayoutLoaded or LoadFailed."""


@dataclass(frozen=True, slots=True)
class WriteLayout:
    """Store a layout. Answered by WriteSettled. The write is refused unless `expected_epoch` is stored and `token` is
    that of the lease.
    """

    layout: Layout
    model: ModelInfo | None
    expected_epoch: Epoch | None  # None: nothing is stored
    token: int
    cause_id: str
    partial: Partial = ()


@dataclass(frozen=True, slots=True)
class WriteJournal:
    """Store a journal. Answered by WriteSettled; a repeated write of the same content is again WRITTEN.

    PREPARING and COMMITTING are refused unless `expected_epoch` is stored. With COMMITTING, the target becomes the
    layout in the same write.
    """

    journal: Journal
    expected_epoch: Epoch | None
    model: ModelInfo | None
    partial: Partial  # `StoredLayout.partial` after a commit
    token: int
    cause_id: str


Write = WriteLayout | WriteJournal


class WorkerCall(Enum):
    """A call to a member of a transition. Answered by MemberAnswered, or not at all."""

    PREPARE = auto()
    COMMIT = auto()
    ABORT = auto()
    POLL = auto()


@dataclass(frozen=True, slots=True)
class CallMember:
    call: WorkerCall
    member: Member
    journal: Journal
    cause_id: str
    sources: Sources = ()
    why: str = ""


@dataclass(frozen=True, slots=True)
class ProbeInstance:
    """Probe an instance that does not report to the monitor. Answered by InstanceProbed."""

    worker_id: WorkerId
    incarnation: Incarnation
    address: str
    cause_id: str
    found: Probed | None = None  # result of the last probe


@dataclass(frozen=True, slots=True)
class ReadLoads:
    """Read load reports from the monitor."""

    cause_id: str


@dataclass(frozen=True, slots=True)
class AnswerChange:
    request_id: str
    epoch: Epoch
    lines: tuple[str, ...]


class ChangeRefusal(Enum):
    STANDBY = auto()
    BUSY = auto()  # a transition or another change is in progress
    NOT_POSSIBLE = auto()
    NO_LOADS = auto()  # the monitor did not answer
    ID_REUSED = auto()


@dataclass(frozen=True, slots=True)
class RefuseChange:
    request_id: str
    refusal: ChangeRefusal
    why: str


@dataclass(frozen=True, slots=True)
class TransitionMoved:
    """A transition has reached another stage. Once it has ended, the record is complete."""

    record: TransitionRecord
    cause_id: str


@dataclass(frozen=True, slots=True)
class NothingDone:
    """A change requested by the planner itself was rejected, or frees less than is needed."""

    what: str
    why: str
    shortfall_bytes: int
    cause_id: str


@dataclass(frozen=True, slots=True)
class Sized:
    """Instances were chosen to be parked, or to serve again."""

    worker_ids: tuple[WorkerId, ...]
    lines: tuple[str, ...]  # lines of the comparison
    cause_id: str


@dataclass(frozen=True, slots=True)
class PredictionSettled:
    """The outcome of a predicted decision is known."""

    predicted: Predicted


@dataclass(frozen=True, slots=True)
class Publish:
    """Send the layout to its watchers."""

    layout: Layout
    cause_id: str


@dataclass(frozen=True, slots=True)
class FollowMonitor:
    """Connect to the monitor and receive a snapshot."""


@dataclass(frozen=True, slots=True)
class LeaveMonitor:
    """Disconnect from the monitor."""


@dataclass(frozen=True, slots=True)
class AskWorkerToDrain:
    worker_id: WorkerId
    incarnation: Incarnation
    address: str
    cause_id: str


@dataclass(frozen=True, slots=True)
class OrderStanding:
    """Order an instance to park or to wake. Repeated until it reports that it has done so."""

    member: Member
    park: bool
    cause_id: str


@dataclass(frozen=True, slots=True)
class AnswerDrain:
    request_id: str
    epoch: Epoch  # first epoch in which the instance gets no new requests


class DrainRefusal(Enum):
    STANDBY = auto()
    NO_SUCH_WORKER = auto()
    NOT_READY = auto()  # only recently active, so instances are not known yet
    ID_REUSED = auto()  # the request id was used for another worker
    FULL = auto()  # too many drains are in progress


@dataclass(frozen=True, slots=True)
class RefuseDrain:
    request_id: str
    why: DrainRefusal


@dataclass(frozen=True, slots=True)
class RejectInstance:
    """The instance serves a different model from the cluster's and is kept out of the layout."""

    worker_id: WorkerId
    incarnation: Incarnation
    why: str
    cause_id: str


@dataclass(frozen=True, slots=True)
class IgnoreStale:
    """An event of an old incarnation was ignored."""

    worker_id: WorkerId
    have: Incarnation
    want: Incarnation
    cause_id: str


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Send TimerFired at this time. Replaces the previous timer."""

    at_s: float


Command = (
    LoadLayout
    | WriteLayout
    | Publish
    | FollowMonitor
    | LeaveMonitor
    | AskWorkerToDrain
    | OrderStanding
    | AnswerDrain
    | RefuseDrain
    | RejectInstance
    | IgnoreStale
    | SetTimer
    | WriteJournal
    | CallMember
    | ProbeInstance
    | ReadLoads
    | AnswerChange
    | RefuseChange
    | TransitionMoved
    | NothingDone
    | Sized
    | PredictionSettled
)
