"""Which instance gives running requests to which, as Llumnix balances (Sun et al., OSDI '24).

Virtual usage of an instance is what its running requests hold and what waits in its line will need, the head of line
included: a request for which memory is free elsewhere, only not in one piece, makes its instance look full, and what
runs there is moved away until it fits. Freeness is the room that is left for each running request: the steps that all
of them can still make. An instance that drains has none, however empty it is.

From time to time the instances below one bound are paired with those above another, the least free with the freest.
How much goes from one to the other evens the two out; the source chooses what.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ballast.common.ids import WorkerId
from ballast.common.layout import Layout, Member
from ballast.common.load import LoadReport


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationRules:
    balances: bool  # else only instances that drain give anything away
    below_tokens: float = 32.0  # who has less freeness gives
    above_tokens: float = 96.0  # who has more takes


@dataclass(frozen=True, slots=True)
class Move:
    source: Member
    target: Member
    block_budget: int


@dataclass(slots=True)
class _Instance:
    member: Member
    load: LoadReport

    @property
    def free_blocks(self) -> int:
        """Less than none when more waits than there is room for."""
        load = self.load
        return load.block_count - load.used_block_count - load.waiting_block_count

    @property
    def room_blocks(self) -> int:
        """What a newcomer gets: what admission keeps for the growth of those that run is not for him."""
        return self.free_blocks - (self.load.kept_block_count if self.load.running_count else 0)

    @property
    def freeness(self) -> float:
        """Free tokens for each running request."""
        if self.drains:
            return -math.inf
        return self.free_blocks * self.load.block_tokens / max(1, self.load.running_count)

    @property
    def drains(self) -> bool:
        return self.member.draining or self.load.draining


def is_round_due(layout: Layout, rules: MigrationRules) -> bool:
    """Whether it is worth asking for loads: some instances serve alone, and one of them may have to give."""
    alone = [group.leader for group in layout.groups if len(group.members) == 1]
    return len(alone) > 1 and (rules.balances or any(member.draining for member in alone))


def migrations(layout: Layout, loads: Mapping[WorkerId, LoadReport], rules: MigrationRules) -> list[Move]:
    """Pairs of instances that serve alone, at most one for each of them."""
    instances = [
        _Instance(group.leader, loads[group.leader.worker_id])
        for group in layout.groups
        if len(group.members) == 1 and group.leader.data_address and group.leader.worker_id in loads
    ]
    instances.sort(key=lambda i: (i.freeness, i.member.worker_id))
    sources = [i for i in instances if i.load.running_count and _gives(i, rules)]
    targets = [i for i in reversed(instances) if _takes(i, rules)]
    return _paired(sources, targets)


def _gives(instance: _Instance, rules: MigrationRules) -> bool:
    # Of a single running request nothing is gained by moving it, unless others wait for its memory.
    alone = instance.load.running_count == 1 and not instance.load.waiting_count
    return instance.drains or (rules.balances and instance.freeness < rules.below_tokens and not alone)


def _takes(instance: _Instance, rules: MigrationRules) -> bool:
    load = instance.load
    has_room = load.running_count < load.max_running_count and instance.room_blocks > 0
    return has_room and instance.freeness > rules.above_tokens


def _paired(sources: Sequence[_Instance], targets: Sequence[_Instance]) -> list[Move]:
    moves: list[Move] = []
    for source, target in zip(sources, (t for t in targets if t not in sources), strict=False):
        budget = target.room_blocks if source.drains else (target.free_blocks - source.free_blocks) // 2
        if (budget := min(budget, target.room_blocks)) > 0:
            moves.append(Move(source.member, target.member, budget))
    return moves
