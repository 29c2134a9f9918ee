"""What goes into the planner's core (events, past tense) and what comes out (commands)."""

from dataclasses import dataclass
from enum import Enum, auto

from ballast.common.ids import Epoch, Incarnation, WorkerId
from ballast.common.layout import Layout
from ballast.common.model import ModelInfo


@dataclass(frozen=True, slots=True)
class StoredLayout:
    """What lies in the state server."""

    layout: Layout
    model: ModelInfo | None  # that its instances serve; None before any instance was there


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
    epoch: Epoch
    token: int
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


@dataclass(frozen=True, slots=True)
class InstanceLost:
    at_s: float
    cause_id: str
    worker_id: WorkerId
    incarnation: Incarnation
    why: str


@dataclass(frozen=True, slots=True)
class InstanceDraining:
    at_s: float
    cause_id: str
    worker_id: WorkerId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class DrainRequested:
    at_s: float
    cause_id: str
    request_id: str  # a repeated one is answered like the first time
    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class TimerFired:
    at_s: float
    cause_id: str


MonitorEvent = SnapshotBegan | SnapshotEnded | InstanceUp | InstanceLost | InstanceDraining
Event = LeadershipChanged | LayoutLoaded | LoadFailed | WriteSettled | MonitorEvent | DrainRequested | TimerFired


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
    | AnswerDrain
    | RefuseDrain
    | RejectInstance
    | IgnoreStale
    | SetTimer
)
