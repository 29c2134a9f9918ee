"""What a cluster promises at every instant, whatever is broken: it goes on with the workers that are well."""

# pyright: reportPrivateUsage=false

from dataclasses import dataclass, field

from ballast.common.errors import InvariantViolation
from ballast.common.ids import Incarnation, WorkerId
from ballast.common.layout import Layout
from services.dispatcher.policy.freeness import WorkerKey
from sim.dispatcher import DispatcherNode
from sim.instance import SimInstance
from sim.world import World

_WELL_S = 5.0  # longer than a lease and a probe: what was wrong before has had its consequences
_CONNECTED_S = 5.0  # a dispatcher has a stream to a leader that is well for so long
_SERVED_S = 25.0  # most workers are well for so long, and one of them serves: layers may have had to come back


@dataclass(slots=True)
class _Seen:
    """By one dispatcher."""

    unserved_since_s: float | None = None
    apart_since_s: dict[WorkerKey, float] = field(default_factory=dict[WorkerKey, float])


class Availability:
    """Looks at what is written, and at what dispatchers have of it.

    A worker is well while it runs, hears and is heard by all dispatchers, and by the planner - unless most workers do
    not hear that one: then it is the planner which is cut off.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._seen = [_Seen() for _ in world.dispatchers]
        self._since_s: dict[WorkerId, tuple[Incarnation, float]] = {}
        self._well: dict[WorkerId, float] = {}  # at the last look, for so long
        self._layout: Layout | None = None  # the newest that was written
        world.state.watch(self._written)

    def look(self) -> None:
        now_s, world = self._world.clock.now_s, self._world
        reached = {name: self._hears(name, world.planner.name) for name in world.instances}
        planner_is_cut = 2 * sum(reached.values()) < len(reached)
        well: dict[WorkerId, float] = {}  # for so long
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
        if instance.crashed or instance.paused:
            return False
        return all(self._hears(instance.worker_id, node.name) for node in self._world.dispatchers)

    def _written(self, layout: Layout) -> None:
        """A worker that serves alone and is well stays in the layout: its streams are not cut.

        Members of a transition that the planner could not end stand outside until they are whole again; they leave
        without a reason of their own.
        """
        before, self._layout = self._layout, layout
        if before is None or layout.epoch <= before.epoch:
            return  # the state server has gone back
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
            raise InvariantViolation(f"{node.name}: {sorted(well)} are well, and the layout is {shape}")
