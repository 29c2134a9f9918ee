"""Rebuilds a layout that the state server has lost from the places that instances report (pure).

A reported place counts if its epoch is newer than the known layout's. An instance enters a group only after the layout
was stored, so a newer epoch shows that a stored layout was lost.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ballast.common.ids import Epoch, GroupId, Incarnation, WorkerId
from ballast.common.layout import Group, Layout, Place
from services.planner.policy.replicate import Partial


@dataclass(frozen=True, slots=True)
class WorkerClaim:
    incarnation: Incarnation  # incarnation of the reporting instance
    place: Place


@dataclass(frozen=True, slots=True)
class Rebuilt:
    layout: Layout  # layout with the newest reported epoch
    partial: Partial  # incarnations outside all groups that hold only some layers


def newer(layout: Layout, claims: Mapping[WorkerId, WorkerClaim]) -> dict[WorkerId, WorkerClaim]:
    return {worker_id: claim for worker_id, claim in claims.items() if claim.place.epoch > layout.epoch}


def rebuild(layout: Layout, claims: Mapping[WorkerId, WorkerClaim], layer_count: int) -> Rebuilt | None:
    """Return a layout of the reported groups whose members agree, and of the groups of `layout` about which there is no
    newer report.

    None: no report is newer than the layout.
    """
    telling = newer(layout, claims)
    if not telling:
        return None
    epoch = max(claim.place.epoch for claim in telling.values())
    kept = [group for group in layout.groups if not any(m.worker_id in telling for m in group.members)]
    taken = {group.group_id for group in kept}
    agreed: dict[GroupId, Group] = {}
    for worker_id, claim in sorted(telling.items()):
        group = claim.place.group
        if (
            group.leader.worker_id == worker_id
            and group.group_id not in taken
            and _is_agreed(claim, telling, layer_count)
        ):
            agreed[group.group_id] = group
            taken.add(group.group_id)
    placed = {member.worker_id for group in agreed.values() for member in group.members}
    groups = tuple(sorted((*kept, *agreed.values()), key=lambda group: group.group_id))
    partial = tuple(
        (worker_id, claim.incarnation)
        for worker_id, claim in sorted(telling.items())
        if worker_id not in placed and _layers(worker_id, claim) != range(layer_count)
    )
    rebuilt = Layout(Epoch(epoch), layer_count, groups, "rebuilt from the instances' reports")
    rebuilt.check()
    return Rebuilt(rebuilt, partial)


def _is_agreed(claim: WorkerClaim, telling: Mapping[WorkerId, WorkerClaim], layer_count: int) -> bool:
    """True if all members are alive, report the same group, and together hold all layers in distinct stages."""
    group, next_layer = claim.place.group, 0
    if len({member.worker_id for member in group.members}) != len(group.members):
        return False
    for member in group.members:
        other = telling.get(member.worker_id)
        if other is None or (other.incarnation, other.place) != (member.incarnation, claim.place):
            return False
        if member.first_layer != next_layer or member.last_layer <= next_layer:
            return False
        next_layer = member.last_layer
    return next_layer == layer_count


def _layers(worker_id: WorkerId, claim: WorkerClaim) -> range:
    for member in claim.place.group.members:
        if (member.worker_id, member.incarnation) == (worker_id, claim.incarnation):
            return range(member.first_layer, member.last_layer)
    return range(0)  # it reports a group that does not contain itself
