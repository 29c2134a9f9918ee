"""Stand-ins: an instance that serves alone takes the place of a lost follower (pure).

The other stages of the pipeline keep their KV and wait for a stand-in (`services.worker.core.transition.LostStage`).
Each loss is examined only once: if there is no stand-in, or its transition fails, the group ends.
"""

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass

from ballast.common.ids import Epoch, Incarnation, WorkerId
from ballast.common.layout import Group, Layout, Member
from ballast.common.model import ModelInfo
from ballast.common.transition import TransitionKind
from services.planner.core.change_requests import Approved
from services.planner.core.messages import ClusterLoad, LoadsRead
from services.planner.core.survey import NoSurvey, replaced, shape_of
from services.planner.policy.replicate import Partial, Placeable

_WAITS_S = 1.0  # maximum time for which a loss waits for loads, and for the end of a transition


@dataclass(frozen=True, slots=True)
class LostFollower:
    group: Group
    member: Member


def lost_followers(groups: Iterable[Group], instances: Iterable[Placeable], partial: Partial) -> Iterator[LostFollower]:
    """Yield the lost follower of each pipeline whose other members are all alive and not draining."""
    there = {instance.worker_id: instance for instance in instances}
    left = {worker_id for worker_id, _ in partial}

    def is_there(member: Member) -> bool:
        found = there.get(member.worker_id)
        same = found is not None and found.incarnation == member.incarnation and not found.draining
        return same and member.worker_id not in left

    for group in groups:
        lost = [] if len(group.members) == 1 else [m for m in group.members if not is_there(m)]
        if len(lost) == 1 and lost[0].worker_id not in there and lost[0] is not group.leader:
            yield LostFollower(group, lost[0])


def plan_stand_in(
    lost: LostFollower,
    load: ClusterLoad,
    base: Layout,
    model: ModelInfo | None,
    epoch: Epoch,
    without: Container[WorkerId],
) -> Approved | None:
    """Plan a transition in which an instance takes the place of a lost follower: the least used instance that serves
    alone and can hold the group's KV as this stage. None: there is no such instance. `without`: workers that may not
    enter a group.
    """
    try:
        shape = shape_of(model, load.workers)
    except NoSurvey:
        return None
    gone, loads, leader = lost.member, load.workers, lost.group.leader.worker_id
    if leader not in loads:
        return None

    def block_count(member: Member) -> int:
        memory = loads[member.worker_id].memory
        own = shape.at(memory.extent_bytes)
        return own.block_count(memory.budget_bytes, gone.first_layer, gone.last_layer)

    alone = [g.leader for g in base.groups if len(g.members) == 1 and g.leader.takes_new]
    able = [m for m in alone if m.worker_id in loads and m.worker_id not in without]
    able = [m for m in able if block_count(m) >= max(1, loads[leader].used_block_count)]
    if not able:
        return None
    chosen = min(able, key=lambda m: (loads[m.worker_id].used_block_count, m.worker_id))
    why = f"loss: {chosen.worker_id} stands in for {gone.worker_id}"
    target = replaced(base, lost.group, gone, chosen, epoch, why)
    return Approved(TransitionKind.DROP, target, shape, (why,))


class StandIns:
    """Handles lost followers one at a time. Loads are read for each of them."""

    def __init__(self) -> None:
        self._seen: set[tuple[WorkerId, Incarnation]] = set()  # handled losses that are still in the layout
        self._lost: LostFollower | None = None
        self._until_s = 0.0  # deadline for loads and a running transition before the current loss is handled
        self._load: ClusterLoad | None = None
        self._asked = False  # True: loads were requested for the current loss

    def due_at_s(self, lost: Iterable[LostFollower], at_s: float, *, busy: bool) -> float | None:
        """Choose the next loss and return the time at which to `take` it; None: there is no loss. `busy`: a transition
        is under way.
        """
        found = {(one.member.worker_id, one.member.incarnation): one for one in lost}
        self._seen &= found.keys()
        new = [one for key, one in found.items() if key not in self._seen]
        if not new:
            self._lost = None
            return None
        if self._lost not in new:
            self._lost, self._load, self._asked, self._until_s = new[0], None, False, at_s + _WAITS_S
        return at_s if self._load is not None and not busy else self._until_s

    def asks(self) -> bool:
        """True if loads must be read for a loss now. Returned only once for each loss."""
        asks, self._asked = not self._asked, True
        return asks

    def loads_read(self, event: LoadsRead) -> bool:
        """Store the loads for the current loss. Returns True if a loss was waiting for them."""
        waited = self._asked and self._lost is not None
        if waited and self._load is None:
            self._load = event.load if not event.failure else None
            self._until_s = event.at_s if event.failure else self._until_s
        return waited

    def take(self) -> tuple[LostFollower, ClusterLoad] | None:
        """Mark the current loss as handled. Returns it with the loads; None if no loads were read."""
        lost, load, self._lost = self._lost, self._load, None
        if lost is not None:
            self._seen.add((lost.member.worker_id, lost.member.incarnation))
        return None if lost is None or load is None else (lost, load)
