"""Load balancing by live migration between groups, as in Llumnix (Sun et al., OSDI '24); most groups are one instance.

The virtual usage of a group is the blocks of its running requests plus those that its waiting requests need. If memory
for a request is free elsewhere but fragmented, the request makes its group look full, so running requests are moved
away until it fits. Freeness is the free tokens per running request, which is the number of steps that all of them can
still make. A group with a draining or leaving member has none.

Periodically, the groups below one bound are paired with those above another, the least free with the freest. The number
of moved blocks makes both equally free; the source chooses the sequences.

Requests are spread evenly over instances, but answers differ in length. If long answers fill an instance, especially
one with little memory, it computes no new prompts and preempts, while others have spare memory. A nearly full instance
therefore gives its longest requests to one that is at most three fifths as full, until both are equally full.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ballast.common.ids import WorkerId
from ballast.common.layout import Group, Layout, Member, Standing
from ballast.common.load import LoadReport

_MORE_TARGETS = 3  # maximum further targets per round of a group that gives away all its requests
_FREEST = 32  # number of the freest targets from which nearly full groups choose
_EMPTIER = 0.6  # maximum fill of the target, as a fraction of the source's


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationRules:
    balances: bool  # False: only draining and leaving groups give requests and, if `relieves`, nearly full ones
    relieves: bool = False
    below_tokens: float = 32.0  # groups with less freeness are sources
    above_tokens: float = 96.0  # groups with more freeness are targets


@dataclass(frozen=True, slots=True)
class Move:
    source: Group
    target: Group
    block_budget: int  # maximum KV blocks of the moved sequences
    longest_first: bool = False


@dataclass(slots=True)
class _MigrationCandidate:
    group: Group
    load: LoadReport  # report of its leader
    drains: bool

    @property
    def free_blocks(self) -> int:
        """Number of blocks neither used nor needed by waiting requests; negative if waiting requests need more than are
        free.
        """
        load = self.load
        return load.block_count - load.used_block_count - load.waiting_block_count

    @property
    def room_blocks(self) -> int:
        """Number of blocks for a new request, without those that admission reserves for growth."""
        return self.free_blocks - (self.load.kept_block_count if self.load.running_count else 0)

    @property
    def fill(self) -> float:
        return 1.0 - self.free_blocks / self.load.block_count if self.load.block_count else 0.0

    @property
    def freeness(self) -> float:
        """Free tokens for each running request."""
        if self.drains:
            return -math.inf
        return self.free_blocks * self.load.block_tokens / max(1, self.load.running_count)


def is_round_due(layout: Layout, rules: MigrationRules, *, looks: bool) -> bool:
    """True if a round may have migrations, because there are several groups and one of them may have to migrate
    requests away. `looks`: this round also looks for nearly full groups.
    """
    drains = any(_must_empty(member) for group in layout.groups for member in group.members)
    return len(layout.groups) > 1 and (rules.balances or drains or (rules.relieves and looks))


def migrations(layout: Layout, loads: Mapping[WorkerId, LoadReport], rules: MigrationRules) -> list[Move]:
    """Return moves between pairs of groups. Each group is in at most one pair, except those that give away all their
    requests and those that take from nearly full ones.
    """
    candidates = [
        _MigrationCandidate(
            group, loads[group.leader.worker_id], any(not m.takes_new or _drains(m, loads) for m in group.members)
        )
        for group in layout.groups
        if all(m.data_address for m in group.members) and group.leader.worker_id in loads
    ]
    candidates.sort(key=lambda c: (c.freeness, c.group.leader.worker_id))
    sources = [c for c in candidates if c.load.running_count and _gives(c, rules)]
    targets = [c for c in reversed(candidates) if _takes(c, rules)]
    moves = _paired(sources, targets)
    return moves if rules.balances or not rules.relieves else [*moves, *_relieved(candidates, targets, rules)]


def _relieved(
    candidates: Sequence[_MigrationCandidate], targets: Sequence[_MigrationCandidate], rules: MigrationRules
) -> list[Move]:
    """Return moves from each nearly full group to a much emptier one, taking the freest targets in turn."""
    moves: list[Move] = []
    full = [c for c in candidates if c.load.running_count > 1 and not c.drains and c.freeness < rules.above_tokens]
    for number, source in enumerate(full):
        emptier = [target for target in targets[:_FREEST] if target.fill < _EMPTIER * source.fill]
        if not emptier:
            continue
        target = emptier[number % len(emptier)]
        own, its = source.load.block_count, target.load.block_count
        even = int((source.fill - target.fill) * own * its / (own + its))
        if (budget := min(even, target.room_blocks)) > 0:
            moves.append(Move(source.group, target.group, budget, longest_first=True))
    return moves


def _must_empty(member: Member) -> bool:
    return member.draining or member.standing is Standing.LEAVING


def _drains(member: Member, loads: Mapping[WorkerId, LoadReport]) -> bool:
    load = loads.get(member.worker_id)
    return load is not None and load.draining


def _gives(candidate: _MigrationCandidate, rules: MigrationRules) -> bool:
    # Moving a single running request gains nothing, unless others wait for its memory.
    alone = candidate.load.running_count == 1 and not candidate.load.waiting_count
    return candidate.drains or (rules.balances and candidate.freeness < rules.below_tokens and not alone)


def _takes(candidate: _MigrationCandidate, rules: MigrationRules) -> bool:
    load = candidate.load
    has_room = load.running_count < load.max_running_count and candidate.room_blocks > 0
    return has_room and candidate.freeness > rules.above_tokens


def _paired(sources: Sequence[_MigrationCandidate], targets: Sequence[_MigrationCandidate]) -> list[Move]:
    """Return moves from each source to one target. Groups that give away all their requests get further free
    targets.
    """
    free = [target for target in targets if target not in sources]
    pairs = list(zip(sources, free, strict=False))
    emptied = [source for source in sources if source.drains]
    left = free[len(pairs) : len(pairs) + _MORE_TARGETS * len(emptied)]
    pairs += [(emptied[i % len(emptied)], target) for i, target in enumerate(left)]
    moves: list[Move] = []
    for source, target in pairs:
        budget = target.room_blocks if source.drains else (target.free_blocks - source.free_blocks) // 2
        if (budget := min(budget, target.room_blocks)) > 0:
            moves.append(Move(source.group, target.group, budget))
    return moves
