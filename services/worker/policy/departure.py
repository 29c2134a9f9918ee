"""Chooses the running sequence to migrate to another worker next."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass


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
    `longest` the longest one, which frees most memory. Sequences above the budget, or already migrating, are left out.
    """
    sign = -1 if longest else 1
    fitting = [c for c in candidates if c.block_count <= block_budget and c.sequence_id not in leaving]
    return min(fitting, key=lambda c: (-c.rank, sign * c.token_count, c.sequence_id), default=None)
