"""The role that an instance plays: the counterpart of `services.worker.pipeline.role`."""

from ballast.common.errors import InvariantViolation
from ballast.common.ids import Epoch, WorkerId
from ballast.common.layout import Group
from ballast.common.layout import Member as LayoutMember


class Role:
    """One object for all parts of a member; a transition changes it."""

    def __init__(self, me: WorkerId, layer_count: int) -> None:
        self.me = me
        self.epoch = Epoch(0)  # of the layout that it plays its role in
        self.stages: tuple[LayoutMember, ...] = ()  # of its group; empty: alone
        self.layers = range(layer_count)  # that it executes

    @property
    def leads(self) -> bool:
        return not self.stages or self.stages[0].worker_id == self.me

    @property
    def leader(self) -> WorkerId:
        return self.stages[0].worker_id if self.stages else self.me

    @property
    def is_last(self) -> bool:
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
        self.layers = own_layers(self.me, group)


def own_layers(me: WorkerId, group: Group) -> range:
    for member in group.members:
        if member.worker_id == me:
            return range(member.first_layer, member.last_layer)
    raise InvariantViolation(f"{me} is no member of {group.group_id}")
