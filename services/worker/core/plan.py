"""What a plan is, what it means for one worker, and whose KV it makes travel.

Who must send which KV to whom follows from one rule: the KV of (sequence, layer) travels if and only if the layer's
holder changes.
"""

from dataclasses import dataclass

from ballast.common.errors import InvariantViolation
from ballast.common.ids import Epoch, WorkerId
from ballast.common.layout import Group, Layout, group_of, participants, peers_of
from ballast.common.transition import TransitionKind
from services.worker.core.batch import SequenceId
from services.worker.core.spans import Hop, hops


@dataclass(frozen=True, slots=True)
class Plan:
    kind: TransitionKind
    base: Layout
    target: Layout

    @property
    def epoch(self) -> Epoch:
        return self.target.epoch

    def target_of(self, worker_id: WorkerId) -> Group:
        """Its group afterwards. Raises InvariantViolation if it is in none."""
        group = group_of(self.target, worker_id)
        if group is None:
            raise InvariantViolation(f"{worker_id} has no part in epoch {self.epoch}")
        return group


@dataclass(frozen=True, slots=True)
class Victim:
    """A sequence that existed when the layout changed."""

    sequence_id: SequenceId
    computed_tokens: int  # so many have their KV
    old_leader: WorkerId


@dataclass(frozen=True, slots=True)
class Part:
    """What a plan means for one worker."""

    old: Group | None
    new: Group
    peers: tuple[WorkerId, ...]  # it has a link to each
    handovers_to: tuple[WorkerId, ...]  # new leaders that wait for its word, itself excepted
    handovers_from: tuple[WorkerId, ...]  # if it is a new leader: whose word it waits for
    rosters_from: tuple[WorkerId, ...]  # new leaders whose victims' KV it holds or gets, itself included
    roster_to: tuple[WorkerId, ...]  # if it is a new leader: everybody concerned, itself excepted
    dissolves: bool  # members become whole workers at once, and the old group comes to its end beside them


def part_of(plan: Plan, me: WorkerId) -> Part | None:
    """None if nothing changes for this worker, or it is not in the coming layout."""
    old, new = group_of(plan.base, me), group_of(plan.target, me)
    if new is None or old == new:
        return None
    concerned = [g for g in plan.target.groups if me in participants(plan.base, g)]
    leads = new.leader.worker_id == me
    return Part(
        old=old,
        new=new,
        peers=tuple(sorted(peers_of(plan.base, plan.target, me))),
        handovers_to=tuple(g.leader.worker_id for g in concerned if g.leader.worker_id != me),
        handovers_from=tuple(sorted(participants(plan.base, new) - {me})) if leads else (),
        rosters_from=tuple(g.leader.worker_id for g in concerned),
        roster_to=tuple(sorted(participants(plan.base, new) - {me})) if leads else (),
        dissolves=plan.kind is TransitionKind.RESTORE and old is not None and len(new.members) == 1,
    )


def transfers(plan: Plan, victim: Victim, new_leader: WorkerId) -> list[Hop]:
    """What of the victim's KV has to move."""
    old, new = group_of(plan.base, victim.old_leader), group_of(plan.target, new_leader)
    if old is None or new is None or victim.computed_tokens == 0:
        return []
    return [hop for hop in hops(old.members, new.members) if hop.giver != hop.taker]
