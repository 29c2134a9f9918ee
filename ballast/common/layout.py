"""The cluster layout: which instances serve together, and which layers each of them holds."""

from dataclasses import dataclass
from enum import StrEnum

from ballast.common.errors import InvariantViolation
from ballast.common.ids import Epoch, GroupId, Incarnation, WorkerId

MAX_REASON_CHARS = 1024


class Standing(StrEnum):
    """Whether a live instance takes part in serving."""

    SERVING = "serving"
    LEAVING = "leaving"  # takes no new request and moves its own elsewhere, to be parked; can be undone at no cost
    PARKED = "parked"  # holds no request and takes none; its device memory is, or is about to be, released
    WAKING = "waking"  # loads its layers, to serve again


@dataclass(frozen=True, slots=True)
class Member:
    """One instance's stage in its group: it executes the layers `[first_layer, last_layer)`."""

    worker_id: WorkerId
    incarnation: Incarnation
    address: str  # host:port of its WorkerService
    first_layer: int
    last_layer: int
    draining: bool = False  # finishes its requests, takes no new ones
    data_address: str = ""  # host:port at which other workers open links to it
    standing: Standing = Standing.SERVING  # always SERVING in a group of several members

    @property
    def takes_new(self) -> bool:
        """True if requests may be sent to this instance."""
        return self.standing is Standing.SERVING and not self.draining


@dataclass(frozen=True, slots=True)
class Group:
    """Instances that serve together."""

    group_id: GroupId
    members: tuple[Member, ...]  # stage order; the first is the leader and schedules for the group

    @property
    def leader(self) -> Member:
        return self.members[0]


@dataclass(frozen=True, slots=True)
class Place:
    """An instance's own report of its place: it has been in this group since `epoch`. The members are without
    addresses.

    If the instance is alone because it has lost its group, the reported group may not hold every layer.
    """

    epoch: Epoch
    group: Group


@dataclass(frozen=True, slots=True)
class Layout:
    """All groups in one epoch."""

    epoch: Epoch
    layer_count: int
    groups: tuple[Group, ...]
    reason: str  # why this layout replaced the previous one: start, join, lost, drain, overload, restore, operator ...

    def __post_init__(self) -> None:
        """Shorten a reason that names many instances, because readers refuse a layout with a longer one."""
        if len(self.reason) > MAX_REASON_CHARS:
            object.__setattr__(self, "reason", f"{self.reason[: MAX_REASON_CHARS - 4]} ...")

    def check(self) -> None:
        """Raise InvariantViolation unless each group holds every layer once, in order (I1), each instance is in at most
        one group, and all members of groups with several are SERVING.
        """
        seen: set[WorkerId] = set()
        for group in self.groups:
            if not group.members:
                raise InvariantViolation(f"epoch {self.epoch}: group {group.group_id} has no members")
            next_layer = 0
            for member in group.members:
                if member.worker_id in seen:
                    raise InvariantViolation(f"epoch {self.epoch}: {member.worker_id} stands in two places")
                seen.add(member.worker_id)
                if member.standing is not Standing.SERVING and len(group.members) > 1:
                    raise InvariantViolation(f"epoch {self.epoch}: {member.worker_id} is {member.standing} in a group")
                if member.first_layer != next_layer or member.last_layer <= member.first_layer:
                    raise InvariantViolation(
                        f"epoch {self.epoch}: {member.worker_id} executes [{member.first_layer}, {member.last_layer}),"
                        f" expected to begin at layer {next_layer}"
                    )
                next_layer = member.last_layer
            if next_layer != self.layer_count:
                raise InvariantViolation(
                    f"epoch {self.epoch}: group {group.group_id} ends at layer {next_layer} of {self.layer_count}"
                )


def worker_ids(layout: Layout) -> set[WorkerId]:
    return {member.worker_id for group in layout.groups for member in group.members}


def group_of(layout: Layout, worker_id: WorkerId) -> Group | None:
    return next((g for g in layout.groups if any(m.worker_id == worker_id for m in g.members)), None)


def members_of(group: Group | None) -> tuple[WorkerId, ...]:
    return () if group is None else tuple(m.worker_id for m in group.members)


def participants(base: Layout, target: Layout, group: Group) -> set[WorkerId]:
    """The workers that take part in forming `group` of `target`: its members, and the surviving members of all groups
    of `base` from which these come.
    """
    chosen = set(members_of(group))
    for worker_id in members_of(group):
        chosen.update(members_of(group_of(base, worker_id)))
    return chosen - lost_members(base, target, group)


def lost_members(base: Layout, target: Layout, group: Group) -> set[WorkerId]:
    """The workers that shared a group in `base` with a member of `group`, and that are not in `target`."""
    old = {w for worker_id in members_of(group) for w in members_of(group_of(base, worker_id))}
    return {worker_id for worker_id in old - set(members_of(group)) if group_of(target, worker_id) is None}


def peers_of(base: Layout, target: Layout, worker_id: WorkerId) -> set[WorkerId]:
    """The other workers that exchange sequences or KV with this one when `target` replaces `base`."""
    concerned = [p for g in target.groups if worker_id in (p := participants(base, target, g))]
    return {peer for p in concerned for peer in p} - {worker_id}
