"""What goes into the planner's core (events, past tense) and what comes out (commands)."""

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

_QUIET = Traffic()


@dataclass(frozen=True, slots=True)
class ClusterLoad:
    """How loaded everybody is, what clients want, and how fast instances are: what plans are made from."""

    workers: Mapping[WorkerId, LoadReport]
    traffic: Traffic = _QUIET
    pace: Pace | None = None  # of a middling instance with as many layers as any; None: nobody knows
    slowness: Mapping[WorkerId, float] = field(default_factory=dict[WorkerId, float])  # of those that are unlike it
    fresh_traffic: Traffic | None = None  # of the dispatchers that are not silent; None: none is, `traffic` is fresh

    def without(self, kept_out: Container[WorkerId]) -> "ClusterLoad":
        """As if these had not reported: their groups take no part in plans."""
        return replace(self, workers={w: load for w, load in self.workers.items() if w not in kept_out})


Sources = tuple[tuple[int, WorkerId | None], ...]  # (layer, holder) in the order to be tried; None: host copy or disk


@dataclass(frozen=True, slots=True)
class StoredLayout:
    """What lies in the state server."""

    layout: Layout
    model: ModelInfo | None  # that its instances serve; None before any instance was there
    partial: Partial = ()  # instances outside the layout that hold only some layers
    journal: Journal | None = None  # of the newest transition


class WriteOutcome(Enum):
    WRITTEN = auto()
    CONFLICT = auto()  # another epoch is stored than was expected
    FENCED = auto()  # the lease is not ours (any more)
    UNAVAILABLE = auto()  # no answer: written or not, nobody knows


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class LeadershipChanged:
    at_s: float
    cause_id: str
    token: int | None  # fencing token; None: standing by


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
    """A new connection to the monitor: it names everybody who is there, then says SnapshotEnd."""

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
    data_address: str = ""  # host:port where links to it are made
    place: Place | None = None  # in the layout, as it says itself; None: alone, with all layers
    protocol: int = PROTOCOL  # that it speaks with other workers
    parked: bool = False  # as it says itself


@dataclass(frozen=True, slots=True)
class InstanceLost:
    at_s: float
    cause_id: str
    worker_id: WorkerId
    incarnation: Incarnation
    why: str
    silent: bool = False  # the monitor has heard nothing, and has no other evidence of its end


@dataclass(frozen=True, slots=True)
class InstanceDraining:
    at_s: float
    cause_id: str
    worker_id: WorkerId
    incarnation: Incarnation


class Probed(Enum):
    ALIVE = auto()  # that life of the worker answers
    GONE = auto()  # nobody listens at its address, or another process does
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
class DrainRequested:
    at_s: float
    cause_id: str
    request_id: str  # a repeated one is answered like the first time
    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class StandingRequested:
    """An operator parks an instance or wakes it. Answered by AnswerChange or RefuseChange."""

    at_s: float
    cause_id: str
    request_id: str  # a repeated one is answered like the first time
    worker_id: WorkerId
    away: bool


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
    """A request waits for a group that holds it, or is about to outgrow its instance; said again each second."""

    at_s: float
    cause_id: str
    need_tokens: int
    prompt_tokens: int  # so many of them are to be computed
    leader_id: WorkerId  # where it runs; empty: nowhere yet


@dataclass(frozen=True, slots=True)
class DropRequested:
    """An operator asks for a drop."""

    at_s: float
    cause_id: str
    request_id: str  # a repeated one is answered like the first time
    required_bytes: int | None = None  # None: what demand lacks now
    worker_ids: tuple[WorkerId, ...] = ()  # not empty: one group of exactly these, in this order
    hold_s: float = 0.0  # for so long nothing comes back unless an operator says so


@dataclass(frozen=True, slots=True)
class RestoreRequested:
    """An operator asks for all pipelines to be restored, whatever the load."""

    at_s: float
    cause_id: str
    request_id: str


@dataclass(frozen=True, slots=True)
class LoadsRead:
    """Answer to ReadLoads."""

    at_s: float
    cause_id: str
    load: ClusterLoad
    failure: str = ""  # why there is none


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
    | DrainRequested
    | StandingRequested
    | ChangeRequest
    | LoadsRead
    | MemberAnswered
    | TimerFired
)


# ---------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class LoadLayout:
    """Answered by LayoutLoaded or LoadFailed."""


@dataclass(frozen=True, slots=True)
class WriteLayout:
    """Answered by WriteSettled. Refused unless `expected_epoch` is stored and the lease carries `token`."""

    layout: Layout
    model: ModelInfo | None
    expected_epoch: Epoch | None  # None: nothing is stored
    token: int
    cause_id: str
    partial: Partial = ()


@dataclass(frozen=True, slots=True)
class WriteJournal:
    """Answered by WriteSettled. Written once more with the same content, it is WRITTEN again.

    PREPARING and COMMITTING are refused unless `expected_epoch` is stored; with COMMITTING the target becomes the
    layout in the same write.
    """

    journal: Journal
    expected_epoch: Epoch | None
    model: ModelInfo | None
    partial: Partial  # once committed
    token: int
    cause_id: str


Write = WriteLayout | WriteJournal


class Call(Enum):
    """What the planner asks of a member of a transition. Every answer is a MemberAnswered, or none."""

    PREPARE = auto()
    COMMIT = auto()
    ABORT = auto()
    POLL = auto()


@dataclass(frozen=True, slots=True)
class CallMember:
    call: Call
    member: Member
    journal: Journal
    cause_id: str
    sources: Sources = ()
    why: str = ""


@dataclass(frozen=True, slots=True)
class ProbeInstance:
    """Ask an instance, of which the monitor hears nothing, whether it is there. Answered by InstanceProbed."""

    worker_id: WorkerId
    incarnation: Incarnation
    address: str
    cause_id: str
    found: Probed | None = None  # by the last probe


@dataclass(frozen=True, slots=True)
class ReadLoads:
    """Ask the monitor how loaded everybody is."""

    cause_id: str


@dataclass(frozen=True, slots=True)
class AnswerChange:
    request_id: str
    epoch: Epoch
    lines: tuple[str, ...]


class ChangeRefusal(Enum):
    STANDBY = auto()
    BUSY = auto()  # a transition or another change is under way
    NOT_POSSIBLE = auto()
    NO_LOADS = auto()  # the monitor does not answer
    ID_REUSED = auto()


@dataclass(frozen=True, slots=True)
class RefuseChange:
    request_id: str
    refusal: ChangeRefusal
    why: str


@dataclass(frozen=True, slots=True)
class TransitionMoved:
    """A transition has reached another stage. Once it is over, the summary is complete."""

    record: TransitionRecord
    cause_id: str


@dataclass(frozen=True, slots=True)
class NothingDone:
    """What the monitor asked for is not, or not wholly, done."""

    what: str
    why: str
    shortfall_bytes: int
    cause_id: str


@dataclass(frozen=True, slots=True)
class Sized:
    """Some instances are to leave, or to serve again."""

    worker_ids: tuple[WorkerId, ...]
    lines: tuple[str, ...]  # what was compared
    cause_id: str


@dataclass(frozen=True, slots=True)
class PredictionSettled:
    """It has turned out what came of a decision."""

    predicted: Predicted


@dataclass(frozen=True, slots=True)
class Publish:
    """Tell those who watch the layout."""

    layout: Layout
    cause_id: str


@dataclass(frozen=True, slots=True)
class FollowMonitor:
    """Begin to listen to the monitor, with a snapshot."""


@dataclass(frozen=True, slots=True)
class LeaveMonitor:
    """Stop listening."""


@dataclass(frozen=True, slots=True)
class AskWorkerToDrain:
    worker_id: WorkerId
    incarnation: Incarnation
    address: str
    cause_id: str


@dataclass(frozen=True, slots=True)
class OrderStanding:
    """Tell an instance to park, or to wake; repeated until it says that it has."""

    member: Member
    park: bool
    cause_id: str


@dataclass(frozen=True, slots=True)
class AnswerDrain:
    request_id: str
    epoch: Epoch  # from this one on the instance gets nothing new


class DrainRefusal(Enum):
    STANDBY = auto()
    NO_SUCH_WORKER = auto()
    NOT_READY = auto()  # active only just now: who is there is not known yet
    ID_REUSED = auto()  # the request id was given for another worker
    FULL = auto()  # too many drains are under way


@dataclass(frozen=True, slots=True)
class RefuseDrain:
    request_id: str
    why: DrainRefusal


@dataclass(frozen=True, slots=True)
class RejectInstance:
    """It serves another model than the cluster and stays outside the layout."""

    worker_id: WorkerId
    incarnation: Incarnation
    why: str
    cause_id: str


@dataclass(frozen=True, slots=True)
class IgnoreStale:
    """News of an old life of a worker."""

    worker_id: WorkerId
    have: Incarnation
    want: Incarnation
    cause_id: str


@dataclass(frozen=True, slots=True)
class SetTimer:
    """TimerFired at that time; replaces the timer set before."""

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
