"""What goes into the monitor's core (events) and what comes out (commands, and changes that watchers are told)."""

from dataclasses import dataclass
from enum import Enum, auto

from ballast.common.ids import DispatcherId, Incarnation, WorkerId
from ballast.common.instance import Instance
from ballast.common.layout import Layout, Place
from ballast.common.load import LoadReport
from ballast.common.traffic import Pace, Traffic
from services.monitor.policy.demand import GroupDemand
from services.monitor.policy.pressure import Signal

StreamId = int  # one Report stream; numbered by the shell, never reused


@dataclass(frozen=True, slots=True)
class WholeMemory:
    """Memory of an instance that holds all layers."""

    parameter_bytes: int
    kv_bytes: int  # of KV over all layers: block slots, not device memory


@dataclass(frozen=True, slots=True)
class BacklogWord:
    """What one dispatcher says about what waits there, and what has come lately."""

    dispatcher_id: DispatcherId
    serial: str  # differs from word to word
    traffic: Traffic


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Announced:
    at_s: float
    cause_id: str
    stream_id: StreamId
    instance: Instance
    place: Place | None = None  # None: alone, with all layers


@dataclass(frozen=True, slots=True)
class LoadReported:
    at_s: float
    cause_id: str
    stream_id: StreamId
    load: LoadReport
    place: Place | None = None
    pace: Pace | None = None  # None: it does not know


@dataclass(frozen=True, slots=True)
class StreamEnded:
    at_s: float
    cause_id: str
    stream_id: StreamId
    said_goodbye: bool  # the worker closed it on purpose: it leaves


@dataclass(frozen=True, slots=True)
class ConnectionRefused:
    """Nobody listens at the instance's address any more."""

    at_s: float
    cause_id: str
    worker_id: WorkerId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class RegistryLoaded:
    """What an earlier monitor wrote down: the newest life it knew of each worker, and what that one can hold."""

    at_s: float
    cause_id: str
    incarnations: tuple[tuple[WorkerId, Incarnation], ...]
    wholes: tuple[tuple[WorkerId, Incarnation, WholeMemory], ...] = ()


@dataclass(frozen=True, slots=True)
class SurroundingsRead:
    """What planner and dispatchers have written into the state server."""

    at_s: float
    cause_id: str
    layout: Layout | None  # None: there is none
    backlogs: tuple[BacklogWord, ...]


@dataclass(frozen=True, slots=True)
class LeadershipChanged:
    at_s: float
    cause_id: str
    token: int | None  # fencing token; None: standing by


@dataclass(frozen=True, slots=True)
class Ticked:
    at_s: float
    cause_id: str


Event = (
    Announced
    | LoadReported
    | StreamEnded
    | ConnectionRefused
    | RegistryLoaded
    | SurroundingsRead
    | LeadershipChanged
    | Ticked
)


# ---------------------------------------------------------------- what watchers are told


@dataclass(frozen=True, slots=True)
class InstanceUp:
    instance: Instance
    draining: bool
    place: Place | None = None  # as it said last; None: alone, with all layers
    parked: bool = False  # as it says itself


@dataclass(frozen=True, slots=True)
class InstanceLost:
    worker_id: WorkerId
    incarnation: Incarnation
    why: str
    silent: bool = False  # nothing was heard of it for long; there is no other evidence of its end


@dataclass(frozen=True, slots=True)
class InstanceDraining:
    worker_id: WorkerId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class SnapshotEnd:
    """Whoever has not been named by now is not there."""


@dataclass(frozen=True, slots=True)
class Raised:
    """Memory is or will be short, or is plentiful again. Said once: a watcher that comes later is not told."""

    signal: Signal
    groups: tuple[GroupDemand, ...]


Change = InstanceUp | InstanceLost | InstanceDraining | SnapshotEnd | Raised


# ---------------------------------------------------------------- commands


class CloseReason(Enum):
    STANDBY = auto()  # this monitor is not the active one
    STALE = auto()  # a newer life of the worker is known
    SUPERSEDED = auto()  # the same worker opened a newer stream
    SILENT = auto()  # declared lost; if it lives after all, it announces itself again
    FULL = auto()  # as many instances as the monitor takes


@dataclass(frozen=True, slots=True)
class Publish:
    change: Change
    cause_id: str


@dataclass(frozen=True, slots=True)
class CloseStream:
    stream_id: StreamId
    why: CloseReason
    have: int = 0  # STALE: the incarnation that the stream announced
    want: int = 0  # STALE: the newest one


@dataclass(frozen=True, slots=True)
class ProbeAddress:
    """Find out whether anybody listens at the address of an instance whose stream broke."""

    instance: Instance
    cause_id: str


@dataclass(frozen=True, slots=True)
class WriteRegistry:
    """Bring the rows in the state server up to date with the core; `forget` names those to delete."""

    forget: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True)
class LoadRegistry:
    """Read the rows that an earlier active monitor left."""


@dataclass(frozen=True, slots=True)
class DismissWatchers:
    """This monitor is no longer the active one: watchers must look for the one that is."""


@dataclass(frozen=True, slots=True)
class ForgetBacklogs:
    """These dispatchers have said nothing for long: delete what they said last."""

    dispatcher_ids: tuple[DispatcherId, ...]


Command = Publish | CloseStream | ProbeAddress | WriteRegistry | LoadRegistry | DismissWatchers | ForgetBacklogs
