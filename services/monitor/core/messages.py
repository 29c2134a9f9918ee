"""Events and commands of the monitor's core, and events for watchers."""

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
    kv_bytes: int  # size of the KV over all layers: block slots, not device memory


@dataclass(frozen=True, slots=True)
class BacklogWord:
    """Waiting requests and recent traffic of one dispatcher."""

    dispatcher_id: DispatcherId
    serial: str  # changes with each entry
    traffic: Traffic


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Announced:
    at_s: float
    cause_id: str
    stream_id: StreamId
    instance: Instance
    place: Place | None = None  # None: serves alone, with all layers


@dataclass(frozen=True, slots=True)
class LoadReported:
    at_s: float
    cause_id: str
    stream_id: StreamId
    load: LoadReport
    place: Place | None = None
    pace: Pace | None = None  # None: unknown


@dataclass(frozen=True, slots=True)
class StreamEnded:
    at_s: float
    cause_id: str
    stream_id: StreamId
    announced_exit: bool  # True: the worker has closed the stream because it exits


@dataclass(frozen=True, slots=True)
class ConnectionRefused:
    """No process listens at the instance's address."""

    at_s: float
    cause_id: str
    worker_id: WorkerId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class RegistryLoaded:
    """State of a previous monitor: the newest incarnation of each worker, and its capacity."""

    at_s: float
    cause_id: str
    incarnations: tuple[tuple[WorkerId, Incarnation], ...]
    wholes: tuple[tuple[WorkerId, Incarnation, WholeMemory], ...] = ()


@dataclass(frozen=True, slots=True)
class SurroundingsRead:
    """Entries of the planner and dispatchers in the state server."""

    at_s: float
    cause_id: str
    layout: Layout | None  # None: there is none
    backlogs: tuple[BacklogWord, ...]


@dataclass(frozen=True, slots=True)
class LeadershipChanged:
    at_s: float
    cause_id: str
    token: int | None  # fencing token; None: standby


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


# ---------------------------------------------------------------- events for watchers


@dataclass(frozen=True, slots=True)
class InstanceUp:
    instance: Instance
    draining: bool
    place: Place | None = None  # last reported place; None: serves alone, with all layers
    parked: bool = False  # True: it reports that it is parked


@dataclass(frozen=True, slots=True)
class InstanceLost:
    worker_id: WorkerId
    incarnation: Incarnation
    why: str
    silent: bool = False  # True: no reports, and no other evidence that it has ended


@dataclass(frozen=True, slots=True)
class InstanceDraining:
    worker_id: WorkerId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class SnapshotEnd:
    """End of the snapshot. Instances that it did not contain are not alive."""


@dataclass(frozen=True, slots=True)
class Raised:
    """A signal about memory, with the demand of each group. It is sent once, to current watchers."""

    signal: Signal
    groups: tuple[GroupDemand, ...]


Change = InstanceUp | InstanceLost | InstanceDraining | SnapshotEnd | Raised


# ---------------------------------------------------------------- commands


class CloseReason(Enum):
    STANDBY = auto()  # not the active monitor
    STALE = auto()  # a newer incarnation of the worker is known
    SUPERSEDED = auto()  # a newer stream of the same worker
    SILENT = auto()  # declared lost, so that a live worker announces itself again
    FULL = auto()  # maximum number of instances


@dataclass(frozen=True, slots=True)
class Publish:
    change: Change
    cause_id: str


@dataclass(frozen=True, slots=True)
class CloseStream:
    stream_id: StreamId
    why: CloseReason
    have: int = 0  # STALE: the stream's incarnation
    want: int = 0  # STALE: the newest incarnation


@dataclass(frozen=True, slots=True)
class ProbeAddress:
    """Check whether a process listens at the address of an instance whose stream was lost."""

    instance: Instance
    cause_id: str


@dataclass(frozen=True, slots=True)
class WriteRegistry:
    """Write the core's rows to the state server; `forget`: rows to delete."""

    forget: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True)
class LoadRegistry:
    """Read the rows of a previous active monitor."""


@dataclass(frozen=True, slots=True)
class DismissWatchers:
    """End all watches, because this monitor is no longer active and watchers must find the active one."""


@dataclass(frozen=True, slots=True)
class ForgetBacklogs:
    """Delete the entries of dispatchers that have been silent for a long time."""

    dispatcher_ids: tuple[DispatcherId, ...]


Command = Publish | CloseStream | ProbeAddress | WriteRegistry | LoadRegistry | DismissWatchers | ForgetBacklogs
