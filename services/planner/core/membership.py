"""The instances known to the planner, with incarnation and model (pure).

Rule 1: an instance is added on an event of the monitor or, before the monitor's snapshot, because the layout contains
it. Rule 2: an instance is removed on an event of the monitor, which has evidence that it has ended, or on the planner's
own evidence (`evictions`). A lost connection to the monitor proves nothing about instances.
"""

from collections import OrderedDict
from dataclasses import dataclass, field, replace

from ballast.common.errors import InvariantViolation
from ballast.common.ids import Incarnation, WorkerId
from ballast.common.layout import Group, Layout, Member, Place, Standing
from ballast.common.model import ModelInfo
from services.planner.core.claims import WorkerClaim
from services.planner.core.messages import InstanceUp
from services.planner.policy.replicate import Placeable


@dataclass(slots=True)
class Known:
    placeable: Placeable
    model: ModelInfo | None  # None: from a layout without models
    confirmed: bool  # True if the monitor has confirmed it over the current connection
    place: Place | None = None  # last reported place; None: serves alone, with all layers
    protocol: int | None = None  # number of the protocol between workers; None: from a layout
    fresh: bool = True  # True: it has reported since the layout assigned its group
    away: bool | None = None  # True: it should be parked; None: undecided
    parked: bool = False  # True if it reports that it is parked

    def stand(self) -> None:
        """Update the standing from the intended and the reported state."""
        if self.away:
            standing = Standing.PARKED if self.parked else Standing.LEAVING
        else:
            standing = Standing.WAKING if self.parked else Standing.SERVING
        if standing is not self.placeable.standing:
            self.placeable = replace(self.placeable, standing=standing)


@dataclass(slots=True)
class Membership:
    max_remembered: int = 10_000  # number of workers whose newest incarnation is remembered
    model: ModelInfo | None = None  # the cluster's model
    complete: bool = False  # True: the monitor's snapshot over the current connection is complete
    known: dict[WorkerId, Known] = field(default_factory=dict[WorkerId, Known])
    # Incarnations that ended before the snapshot was complete. A layout that still contains them must not add them
    # again.
    _gone: dict[WorkerId, Incarnation] = field(default_factory=dict[WorkerId, Incarnation])
    _newest: OrderedDict[WorkerId, Incarnation] = field(default_factory=OrderedDict[WorkerId, Incarnation])

    def clear(self) -> None:
        """Forget the instances, but not their incarnations."""
        self.known.clear()
        self._gone.clear()
        self.model = None
        self.complete = False

    def newest(self, worker_id: WorkerId) -> Incarnation:
        return self._newest.get(worker_id, Incarnation(0))

    def presume(self, layout: Layout, model: ModelInfo | None) -> None:
        """Assume that the members of a layout are alive, unless the snapshot is complete."""
        if layout.groups:
            self.model = model
        for member in (member for group in layout.groups for member in group.members):
            if member.draining:
                self.drain(member.worker_id, member.incarnation)
            away = member.standing in (Standing.LEAVING, Standing.PARKED)
            known = self.known.get(member.worker_id)
            if known is not None and known.away is None and known.placeable.incarnation == member.incarnation:
                known.away = away
                known.stand()
            if self._may_exist(member):
                placeable = Placeable(
                    member.worker_id, member.incarnation, member.address, member.draining, member.data_address
                )
                parked = member.standing in (Standing.PARKED, Standing.WAKING)
                self._put(Known(placeable, model, confirmed=False, away=away, parked=parked))

    def _may_exist(self, member: Member) -> bool:
        if self.complete or self._gone.get(member.worker_id) == member.incarnation:
            return False
        known = self.known.get(member.worker_id)
        return member.incarnation >= self.newest(member.worker_id) and (
            known is None or known.placeable.incarnation < member.incarnation
        )

    def begin_snapshot(self) -> None:
        self.complete = False
        for known in self.known.values():
            known.confirmed = False

    def end_snapshot(self) -> list[WorkerId]:
        """End the snapshot. Returns the instances that it has not confirmed."""
        self.complete = True
        self._gone.clear()
        return sorted(w for w, known in self.known.items() if not known.confirmed)

    def has(self, worker_id: WorkerId, incarnation: Incarnation) -> bool:
        known = self.known.get(worker_id)
        return known is not None and known.placeable.incarnation == incarnation

    def up(self, event: InstanceUp) -> bool:
        """Add an instance. Returns False for an old incarnation, which is ignored."""
        if event.incarnation < self.newest(event.worker_id):
            return False
        before = self.known.get(event.worker_id)
        draining, away = event.draining, None
        if before is not None and before.placeable.incarnation == event.incarnation:
            draining, away = draining or before.placeable.draining, before.away
        placeable = Placeable(event.worker_id, event.incarnation, event.address, draining, event.data_address)
        known = Known(placeable, event.model, confirmed=True, place=event.place, protocol=event.protocol)
        known.away, known.parked = away, event.parked
        self._put(known)
        return True

    def drop(self, worker_id: WorkerId, incarnation: Incarnation) -> bool:
        """Remove the incarnation. Returns False if it is not the known one."""
        known = self.known.get(worker_id)
        if known is None or known.placeable.incarnation != incarnation:
            return False
        del self.known[worker_id]
        if not self.complete:
            self._gone[worker_id] = incarnation
        return True

    def drain(self, worker_id: WorkerId, incarnation: Incarnation) -> bool:
        """Mark the incarnation as draining. Returns False if it is unknown or already draining. Irreversible."""
        known = self.known.get(worker_id)
        if known is None or known.placeable.incarnation != incarnation or known.placeable.draining:
            return False
        old = known.placeable
        known.placeable = replace(old, draining=True)
        return True

    def regrouped(self, before: Layout, after: Layout) -> None:
        """Mark the places reported by members of new groups as outdated. `before`, `after`: the old and the new
        layout.
        """
        kept = set(before.groups)
        for member in (m for group in after.groups if group not in kept for m in group.members):
            known = self.known.get(member.worker_id)
            if known is not None:
                known.fresh = False

    def disagrees(self, worker_id: WorkerId, group: Group | None, layer_count: int) -> bool:
        """True if the instance reports a place other than `group`, its group in the layout (None: no group), or if it
        is not in any group and lacks layers.
        """
        known = self.known.get(worker_id)
        if known is None or not self._serves(known):
            return False
        whole = _is_whole(known.place, worker_id, layer_count)
        if group is None:
            return not whole
        if not known.fresh or not _is_there(known, group, worker_id):
            return False
        if len(group.members) == 1:
            return not whole
        return known.place is None or _stages(known.place.group) != _stages(group)

    def claims(self) -> dict[WorkerId, WorkerClaim]:
        """Return the places reported by instances of the cluster's model."""
        self._choose_model()
        return {
            worker_id: WorkerClaim(known.placeable.incarnation, known.place)
            for worker_id, known in self.known.items()
            if known.place is not None and self._serves(known)
        }

    def placeable(self) -> list[Placeable]:
        """Return the instances of the cluster's model."""
        self._choose_model()
        return [known.placeable for known in self.known.values() if self._serves(known)]

    def protocols(self) -> dict[WorkerId, int]:
        """Return the protocols of the instances of the cluster's model that have reported one."""
        known = self.known.items()
        return {w: one.protocol for w, one in known if one.protocol is not None and self._serves(one)}

    def serves_another_model(self, worker_id: WorkerId) -> bool:
        self._choose_model()
        return not self._serves(self.known[worker_id])

    def of_another_model(self) -> dict[WorkerId, str]:
        """Return the instances kept out of the layout, with the differences of their models from the cluster's."""
        self._choose_model()
        return {
            worker_id: f"it serves another model: {difference(known.model, self.model)}"
            for worker_id, known in self.known.items()
            if known.model is not None and not self._serves(known)
        }

    def _serves(self, known: Known) -> bool:
        """True if the instance serves the cluster's model."""
        return known.model is self.model or (known.model is not None and known.model.is_same(self.model))

    def _choose_model(self) -> None:
        """Choose the cluster's model: the current one while an instance serves it, otherwise that of the first
        remaining worker.

        A model without revision, from a layout or from a worker of an older version, is replaced by the same model
        reported with a revision.
        """
        if not self.known:
            return
        serving = [known.model for known in self.known.values() if self._serves(known)]
        if not serving:
            self.model = self.known[min(self.known)].model
        elif self.model is not None and not self.model.revision:
            self.model = next((model for model in serving if model is not None and model.revision), self.model)

    def _put(self, known: Known) -> None:
        worker_id, incarnation = known.placeable.worker_id, known.placeable.incarnation
        known.stand()
        self.known[worker_id] = known
        self._newest[worker_id] = incarnation
        self._newest.move_to_end(worker_id)
        while len(self._newest) > self.max_remembered:
            self._newest.popitem(last=False)

    def check(self) -> None:
        for worker_id, known in self.known.items():
            if known.placeable.incarnation < self.newest(worker_id):
                raise InvariantViolation(
                    f"{worker_id} is incarnation {known.placeable.incarnation}, but {self.newest(worker_id)} was seen"
                )


def _is_whole(place: Place | None, worker_id: WorkerId, layer_count: int) -> bool:
    if place is None:
        return True
    stages = _stages(place.group)
    return len(stages) == 1 and stages[0][0] == worker_id and stages[0][2:] == (0, layer_count)


def _is_there(known: Known, group: Group, worker_id: WorkerId) -> bool:
    """True if the known incarnation is a member of the group."""
    return any((m.worker_id, m.incarnation) == (worker_id, known.placeable.incarnation) for m in group.members)


def _stages(group: Group) -> tuple[tuple[WorkerId, Incarnation, int, int], ...]:
    return tuple((m.worker_id, m.incarnation, m.first_layer, m.last_layer) for m in group.members)


def difference(own: ModelInfo, cluster: ModelInfo | None) -> str:
    """Return text that describes how a model differs from the cluster's."""
    if cluster is None:
        return "the model of the cluster is not known"
    found = [(name, *(getattr(model, name) or "none" for model in (own, cluster))) for name in own.differences(cluster)]
    return "; ".join(f"{name} is {here}, the cluster has {there}" for name, here, there in found)
