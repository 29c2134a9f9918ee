"""State of one instance in the core."""

from collections import deque
from dataclasses import dataclass

from ballast.common.layout import Place
from ballast.common.load import LoadReport
from ballast.common.traffic import Pace
from services.monitor.core.messages import Instance, InstanceUp, StreamId, WholeMemory
from services.monitor.policy.demand import GroupLoad, capacity_bytes


@dataclass(frozen=True, slots=True)
class LoadSample:
    at_s: float
    load: LoadReport


@dataclass(slots=True)
class WorkerEntry:
    """A live instance. Other modules may read it; only the core writes."""

    instance: Instance
    heard_at_s: float
    stream_id: StreamId | None
    history: deque[LoadSample]
    load: LoadReport | None = None
    draining: bool = False
    stuck: bool = False  # True: its engine's step does not end, and watchers were notified that it is lost
    place: Place | None = None  # last reported place
    whole: WholeMemory | None = None
    pace: Pace | None = None
    as_group: GroupLoad | None = None  # load of the instance as its own group; None: to be recomputed

    @property
    def up(self) -> InstanceUp:
        """The event that announces this instance to watchers."""
        return InstanceUp(self.instance, self.draining, self.place, self.load is not None and self.load.parked)

    def take(self, at_s: float, load: LoadReport, place: Place | None, pace: Pace | None) -> None:
        self.heard_at_s, self.load, self.place, self.pace, self.as_group = at_s, load, place, pace, None
        self.history.append(LoadSample(at_s, load))
        kv_bytes = capacity_bytes(load, self.instance.model.kv_bytes_per_token)
        self.learn(WholeMemory(load.memory.parameter_bytes, kv_bytes))

    def learn(self, seen: WholeMemory) -> None:
        """Record these memory sizes as those with all layers, if the parameters are the largest seen so far."""
        if self.whole is None or seen.parameter_bytes >= self.whole.parameter_bytes:
            self.whole, self.as_group = seen, None
