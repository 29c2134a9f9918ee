"""A worker's role: its current layout, the stages of its group, and the layers that it executes."""

from collections.abc import Iterable
from dataclasses import replace

from ballast.common.errors import InvariantViolation
from ballast.common.ids import Epoch, GroupId, WorkerId
from ballast.common.layout import Group, Place, Standing
from ballast.common.layout import Member as LayoutMember


class MemberRole:
    """A member's role, shared by all its parts. Transitions and recoveries change it, on the engine thread."""

    def __init__(self, me: WorkerId, layer_count: int) -> None:
        self.me = me
        self.layer_count = layer_count
        self.epoch = Epoch(0)
        self.stages: tuple[LayoutMember, ...] = ()  # stages of its group; empty: serves alone
        self.layers = range(layer_count)  # layers that it executes
        self.place: Place | None = None  # epoch and group, for other threads; None: no transition yet

    @property
    def leads(self) -> bool:
        return not self.stages or self.leader == self.me

    @property
    def leader(self) -> WorkerId:
        return self.stages[0].worker_id if self.stages else self.me

    @property
    def is_last(self) -> bool:
        """True for the last stage."""
        return not self.stages or self.stages[-1].worker_id == self.me

    @property
    def next_stage(self) -> WorkerId:
        index = next(i for i, stage in enumerate(self.stages) if stage.worker_id == self.me)
        return self.stages[index + 1].worker_id

    def has_stage(self, worker_id: WorkerId) -> bool:
        return any(stage.worker_id == worker_id for stage in self.stages)

    def take_up(self, epoch: Epoch, group: Group) -> None:
        self.epoch = epoch
        self.stages = group.members if len(group.members) > 1 else ()
        self.layers = own_layers(self.me, group.members)
        stages = tuple(
            replace(member, address="", data_address="", draining=False, standing=Standing.SERVING)
            for member in group.members
        )
        self.place = Place(epoch, Group(group.group_id, stages))

    def leave_group(self) -> None:
        """Leave a group that has ended. `layers` does not change, because this worker still holds the same layers."""
        self.stages = ()
        self._place_alone()

    def become_full_replica(self) -> None:
        self.layers = range(self.layer_count)
        self._place_alone()

    def _place_alone(self) -> None:
        if self.place is None:
            return
        mine = next(member for member in self.place.group.members if member.worker_id == self.me)
        alone = replace(mine, first_layer=self.layers.start, last_layer=self.layers.stop)
        self.place = Place(self.place.epoch, Group(GroupId(self.me), (alone,)))

    def why_not_as_in(self, base: Group) -> str:
        """Return why a plan that assumes `base` as this worker's current group cannot be executed; empty if that is its
        group.
        """
        whole = ((self.me, self.layers.start, self.layers.stop),)
        is_ = _spans(self.stages) or whole
        taken_for = _spans(base.members)
        return "" if is_ == taken_for else f"{self.me} is a member of {is_}, but the plan assumes {taken_for}"


def own_layers(me: WorkerId, members: Iterable[LayoutMember]) -> range:
    for member in members:
        if member.worker_id == me:
            return range(member.first_layer, member.last_layer)
    raise InvariantViolation(f"{me} is no member of its group")


def _spans(members: Iterable[LayoutMember]) -> tuple[tuple[WorkerId, int, int], ...]:
    return tuple((m.worker_id, m.first_layer, m.last_layer) for m in members)
