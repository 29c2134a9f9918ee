"""What leaders of simulated groups may count on, seen from outside."""

# pyright: reportPrivateUsage=false

from collections.abc import Sequence

from ballast.common.errors import InvariantViolation
from ballast.common.ids import Epoch, WorkerId
from sim.instance import SimInstance
from sim.world import World

_WITHIN_S = 1.5


class Agreement:
    """A leader counts on no more blocks than each stage has, and soon on all of them where nothing changes."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._since_s: dict[tuple[WorkerId, Epoch], float] = {}  # a leader counts on less than there is

    def look(self) -> None:
        now_s, found = self._world.clock.now_s, dict[tuple[WorkerId, Epoch], float]()
        for name, instance in self._world.instances.items():
            stages, capacities = self._stages(instance), instance.member._context.room
            has = {each.worker_id: each.member._context.book.block_count for each in stages}
            least, counted = min(has.values(), default=0), capacities.smallest
            if stages and len(capacities.counts) == len(stages) and counted > least:
                raise InvariantViolation(f"{name} counts on {counted} blocks, of {has}")
            if has != {stage: capacities.counts.get(stage) for stage in has} and self._rest(stages):
                key = (name, instance.member.role.epoch)
                found[key] = self._since_s.get(key, now_s)
                if now_s - found[key] > _WITHIN_S:
                    raise InvariantViolation(f"{name} counts on {capacities.counts} and not on {has}")
        self._since_s = found

    def _stages(self, leader: SimInstance) -> list[SimInstance]:
        """Of the group that it leads, as far as they are in it."""
        role = leader.member.role
        found = [self._world.instances[stage.worker_id] for stage in role.stages if role.leads]
        return [each for each in found if each.member.role.stages == role.stages]

    def _rest(self, stages: Sequence[SimInstance]) -> bool:
        """All live and hear each other, and change nothing."""
        resting = [not (each.crashed or each.paused or each.member._driver.under_way) for each in stages]
        return self._world.lines.whole and all(resting) and len(resting) == len(stages[0].member.role.stages)
