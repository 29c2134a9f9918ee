"""Chooses the running sequence to migrate to another worker next."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

# Maximum blocks of a sequence that relieves a nearly full instance, as a multiple of those that would make both equally
# full: a single long sequence may have more, and moving it still leaves the fuller one with less than before.
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
    """The shortest sequence of the lowest class, whose migration is the fastest, as in Llumnix (OSDI '24); with
    `longest` the longest one, which frees most memory. Sequences above the budget (`longest`: `_OVERSHOOT` times the
    budget), or already migrating, are left out.
    """
    sign, most = (-1, _OVERSHOOT * block_budget) if longest else (1, block_budget)
    fitting = [c for c in candidates if c.block_count <= most and c.sequence_id not in leaving]
    return min(fitting, key=lambda c: (-c.rank, sign * c.token_count, c.sequence_id), default=None)
