"""A cluster's availability promise under any faults: it continues to serve with its healthy workers."""

# pyright: reportPrivateUsage=false

from dataclasses import dataclass, field

from ballast.common.errors import InvariantViolation
from ballast.common.ids import Incarnation, WorkerId
from ballast.common.layout import Layout
from services.dispatcher.policy.freeness import WorkerKey
from sim.dispatcher import DispatcherNode
from sim.instance import SimInstance
from sim.world import World

_WELL_S = 5.0  # longer than a lease and a probe, so that earlier faults have taken effect
_CONNECTED_S = 5.0  # a dispatcher must have a stream to every leader that has been healthy for this long
_SERVED_S = 25.0  # if most workers have been healthy for this long, one must serve, after restoring layers if needed


@dataclass(slots=True)
class _Seen:
    """Connections and service that one dispatcher is missing, each with the time at which it went missing."""

    unserved_since_s: float | None = None
    apart_since_s: dict[WorkerKey, float] = field(default_factory=dict[WorkerKey, float])


class Availability:
    """Checks every stored layout, and whether dispatchers can serve with it.

    A worker is healthy while it runs, does not drain, and can exchange messages with all dispatchers and with the
    planner. If most workers cannot reach the planner, the planner counts as cut off, and only the dispatchers matter.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._seen = [_Seen() for _ in world.dispatchers]
        self._since_s: dict[WorkerId, tuple[Incarnation, float]] = {}
        self._well: dict[WorkerId, float] = {}  # seconds healthy, as of the last check
        self._layout: Layout | None = None  # the newest stored one
        world.state.watch(self._written)

    def look(self) -> None:
        now_s, world = self._world.clock.now_s, self._world
        reached = {name: self._hears(name, world.planner.name) for name in world.instances}
        planner_is_cut = 2 * sum(reached.values()) < len(reached)
        well: dict[WorkerId, float] = {}  # seconds healthy
        for name, instance in world.instances.items():
            if self._is_well(instance) and (reached[name] or planner_is_cut):
                life, since_s = self._since_s.get(name, (instance.incarnation, now_s))
                since_s = since_s if life == instance.incarnation else now_s
                self._since_s[name] = instance.incarnation, since_s
                well[name] = now_s - since_s
            else:
                self._since_s.pop(name, None)
        self._well = well
        is_majority = 2 * len(well) > len(world.instances)
        for node, seen in zip(world.dispatchers, self._seen, strict=True):
            self._all_are_connected(node, seen, well, now_s)
            self._somebody_serves(node, seen, well, now_s, is_majority=is_majority)

    def _hears(self, one: str, other: str) -> bool:
        lines = self._world.lines
        return not (lines.is_cut(one, other) or lines.is_cut(other, one))

    def _is_well(self, instance: SimInstance) -> bool:
        if instance.crashed or instance.paused or instance.load().draining:
            return False
        return all(self._hears(instance.worker_id, node.name) for node in self._world.dispatchers)

    def _written(self, layout: Layout) -> None:
        """A healthy worker that serves alone must stay in the layout, since its removal cuts its streams.

        After a transition that the planner could not end, its members are outside the layout until they hold all layers
        again. The layout's reason does not name these members, so they are not checked.
        """
        before, self._layout = self._layout, layout
        if before is None or layout.epoch <= before.epoch:
            return  # the state server was rolled back
        there = {(m.worker_id, m.incarnation) for group in layout.groups for m in group.members}
        for leader in (group.leader for group in before.groups if len(group.members) == 1):
            instance = self._world.instances[leader.worker_id]
            goes_on = instance.incarnation == leader.incarnation and self._is_well(instance)
            gone = (leader.worker_id, leader.incarnation) not in there
            has_reason = f"{leader.worker_id} (" in layout.reason
            if gone and goes_on and has_reason and self._well.get(leader.worker_id, 0.0) > _WELL_S:
                raise InvariantViolation(f"{leader.worker_id} is well and not in epoch {layout.epoch}: {layout.reason}")

    def _all_are_connected(self, node: DispatcherNode, seen: _Seen, well: dict[WorkerId, float], now_s: float) -> None:
        apart = seen.apart_since_s
        seen.apart_since_s = {
            worker.key: apart.get(worker.key, now_s)
            for worker in node.core.fleet
            if worker.leads and not worker.connected and well.get(worker.key.worker_id, 0.0) > _WELL_S
        }
        for key, since_s in seen.apart_since_s.items():
            is_same = self._world.instances[key.worker_id].incarnation == key.incarnation
            if is_same and now_s - since_s > _CONNECTED_S:
                raise InvariantViolation(f"{node.name} has had no stream to {key} for {now_s - since_s:.1f} s")

    def _somebody_serves(
        self, node: DispatcherNode, seen: _Seen, well: dict[WorkerId, float], now_s: float, *, is_majority: bool
    ) -> None:
        groups = node.core.fleet.layout.groups if node.core.fleet.layout is not None else ()
        serves = any(all(m.worker_id in well for m in group.members) and group.leader.takes_new for group in groups)
        if serves or not is_majority:
            seen.unserved_since_s = None
            return
        seen.unserved_since_s = now_s if seen.unserved_since_s is None else seen.unserved_since_s
        if now_s - seen.unserved_since_s > _SERVED_S:
            shape = [[m.worker_id for m in group.members] for group in groups]
            raise InvariantViolation(f"{node.name}: {sorted(well)} are healthy, but the layout is {shape}")
