"""The plan of a transition, each worker's part, and the KV that has to move.

The KV of (sequence, layer) moves if and only if the layer's holder changes.
"""

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from ballast.common.errors import InvariantViolation
from ballast.common.ids import Epoch, WorkerId
from ballast.common.layout import Group, Layout, group_of, lost_members, members_of, participants, peers_of, worker_ids
from ballast.common.transition import TransitionKind
from services.worker.core.batch import BlockNumber, SequenceId
from services.worker.core.blocks import Table
from services.worker.core.spans import Hop, hops

_FIRST_SHARED = -(1 << 62)  # below the negatives of all block numbers


@dataclass(frozen=True, slots=True)
class Plan:
    kind: TransitionKind
    base: Layout
    target: Layout
    lost: frozenset[WorkerId] = field(init=False, compare=False)  # workers of the base that the target lacks

    def __post_init__(self) -> None:
        object.__setattr__(self, "lost", frozenset(worker_ids(self.base) - worker_ids(self.target)))

    @property
    def epoch(self) -> Epoch:
        return self.target.epoch

    def target_of(self, worker_id: WorkerId) -> Group:
        """The worker's group in the plan's target. Raises InvariantViolation if it is in none."""
        group = group_of(self.target, worker_id)
        if group is None:
            raise InvariantViolation(f"{worker_id} has no part in epoch {self.epoch}")
        return group


@dataclass(frozen=True, slots=True)
class Victim:
    """A sequence that existed when the layout changed."""

    sequence_id: SequenceId
    computed_tokens: int  # tokens with KV
    old_leader: WorkerId
    shared_blocks: Table = ()  # the old leader's blocks of its first tokens that other sequences share
    donor: SequenceId = 0  # in a roster: a sequence with the same first `donated_count` blocks on every stage
    donated_count: int = 0


@dataclass(frozen=True, slots=True)
class PlanPart:
    """One worker's part in a plan."""

    old: Group | None
    new: Group
    peers: tuple[WorkerId, ...]  # workers to which it needs links
    handovers_to: tuple[WorkerId, ...]  # new leaders that wait for its handover, except itself
    handovers_from: tuple[WorkerId, ...]  # for a new leader: members whose handover it waits for
    rosters_from: tuple[WorkerId, ...]  # new leaders of sequences whose KV it sends or receives, including itself
    roster_to: tuple[WorkerId, ...]  # for a new leader: members that get its roster, except itself
    dissolves: bool  # True in a restore: members serve alone at once, while the old group drains
    lost: frozenset[WorkerId] = frozenset()  # lost members of its old group, replaced by a stand-in


def part_of(plan: Plan, me: WorkerId) -> PlanPart | None:
    """The worker's part in the plan; None if nothing changes for it, or it is not in the target layout."""
    old, new = group_of(plan.base, me), group_of(plan.target, me)
    if new is None or old == new:
        return None
    everyone = {g.group_id: participants(plan.base, plan.target, g) for g in plan.target.groups}
    concerned = [g for g in plan.target.groups if me in everyone[g.group_id]]
    leads, others = new.leader.worker_id == me, tuple(sorted(everyone[new.group_id] - {me}))
    return PlanPart(
        old=old,
        new=new,
        peers=tuple(sorted(peers_of(plan.base, plan.target, me))),
        handovers_to=tuple(g.leader.worker_id for g in concerned if g.leader.worker_id != me),
        handovers_from=others if leads else (),
        rosters_from=tuple(g.leader.worker_id for g in concerned),
        roster_to=others if leads else (),
        dissolves=plan.kind is TransitionKind.RESTORE and old is not None and len(new.members) == 1,
        lost=frozenset(members_of(old)) & lost_members(plan.base, plan.target, new),
    )


def shared_numbers(victims: Iterable[Victim], epoch: Epoch) -> dict[SequenceId, tuple[BlockNumber, ...]]:
    """Numbers for the leading blocks that several victims share. They are negative, and no other epoch uses them."""
    known: dict[tuple[WorkerId | BlockNumber, int], BlockNumber] = {}  # (old number or old leader, block) -> new number
    chains: dict[SequenceId, list[BlockNumber]] = {}
    for victim in victims:
        chain, before = chains.setdefault(victim.sequence_id, []), victim.old_leader
        for block_id in victim.shared_blocks:
            before = known.setdefault((before, block_id), _FIRST_SHARED - (epoch << 32) - len(known))
            chain.append(before)
    counts = Counter(itertools.chain.from_iterable(chains.values()))
    return {
        sequence_id: tuple(itertools.takewhile(lambda number: counts[number] > 1, chain))
        for sequence_id, chain in chains.items()
    }


def transfers(plan: Plan, victim: Victim, new_leader: WorkerId) -> list[Hop]:
    """The hops over which the victim's KV has to move."""
    old, new = group_of(plan.base, victim.old_leader), group_of(plan.target, new_leader)
    if old is None or new is None or victim.computed_tokens == 0:
        return []
    return [hop for hop in hops(old.members, new.members) if hop.giver not in (hop.taker, *plan.lost)]


def refills(plan: Plan, victim: Victim, new_leader: WorkerId) -> list[Hop]:
    """The hops for the KV of lost layers. A stand-in computes it from the activation log of the preceding stage, the
    giver.
    """
    old, new = group_of(plan.base, victim.old_leader), group_of(plan.target, new_leader)
    if not plan.lost or old is None or new is None or victim.computed_tokens == 0:
        return []
    before = dict(zip(members_of(old)[1:], members_of(old), strict=False))
    found = [hop for hop in hops(old.members, new.members) if hop.giver in plan.lost and hop.giver in before]
    return [hop._replace(giver=before[hop.giver]) for hop in found]
