"""Chooses the next running sequence to migrate to another worker."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

# Maximum blocks of a sequence that relieves a nearly full instance, relative to the number that would make both
# instances equally full. A single long sequence may have more, and moving it still makes the fuller instance less full
# than before.
_OVERSHOOT = 1.5


@dataclass(frozen=True, slots=True)
class Decoding:
    """A sequence that could be migrated."""

    sequence_id: int
    rank: int  # rank of its class; larger is less urgent
    token_count: int
    block_count: int  # blocks that it holds


def choose_departure(
    candidates: Sequence[Decoding], block_budget: int, leaving: Collection[int] = (), *, longest: bool = False
) -> Decoding | None:
    """Return the shortest sequence of the lowest class, whose migration is the fastest, like Llumnix (OSDI '24), or
    with `longest` the longest one, which frees most memory. Sequences above the budget (with `longest` above
    `_OVERSHOOT` times the budget) and those already migrating are left out.
    """
    sign, most = (-1, _OVERSHOOT * block_budget) if longest else (1, block_budget)
    fitting = [c for c in candidates if c.block_count <= most and c.sequence_id not in leaving]
    return min(fitting, key=lambda c: (-c.rank, sign * c.token_count, c.sequence_id), default=None)
