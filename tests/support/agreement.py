"""Checks that leaders of simulated groups assume the number of KV blocks that their stages really have."""

# pyright: reportPrivateUsage=false

from collections.abc import Sequence

from ballast.common.errors import InvariantViolation
from ballast.common.ids import Epoch, WorkerId
from sim.instance import SimInstance
from sim.world import World

_WITHIN_S = 1.5


class Agreement:
    """A leader must never assume more blocks than its smallest stage has, and must soon assume exactly that many if
    nothing changes.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._since_s: dict[tuple[WorkerId, Epoch], float] = {}  # since when a leader has assumed too few

    def look(self) -> None:
        now_s, found = self._world.clock.now_s, dict[tuple[WorkerId, Epoch], float]()
        for name, instance in self._world.instances.items():
            stages, capacities = self._stages(instance), instance.member._context.room
            has = {each.worker_id: each.member._context.book.block_count for each in stages}
            least, counted = min(has.values(), default=0), capacities.smallest
            if stages and len(capacities.counts) == len(stages) and counted > least:
                raise InvariantViolation(f"{name} counts on {counted} blocks, but stages have {has}")
            if has != {stage: capacities.counts.get(stage) for stage in has} and self._rest(stages):
                key = (name, instance.member.role.epoch)
                found[key] = self._since_s.get(key, now_s)
                if now_s - found[key] > _WITHIN_S:
                    raise InvariantViolation(f"{name} counts on {capacities.counts} instead of {has}")
        self._since_s = found

    def _stages(self, leader: SimInstance) -> list[SimInstance]:
        """The stages of the group that `leader` leads, as far as they have adopted their roles; empty if it leads
        none.
        """
        role = leader.member.role
        found = [self._world.instances[stage.worker_id] for stage in role.stages if role.leads]
        return [each for each in found if each.member.role.stages == role.stages]

    def _rest(self, stages: Sequence[SimInstance]) -> bool:
        """Whether all stages are alive, connected, and without a transition."""
        resting = [not (each.crashed or each.paused or each.member._driver.under_way) for each in stages]
        return self._world.lines.whole and all(resting) and len(resting) == len(stages[0].member.role.stages)
