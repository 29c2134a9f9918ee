"""Which running sequence goes to another worker next."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Decoding:
    """A sequence that could go on elsewhere."""

    sequence_id: int
    rank: int  # of its class; the larger, the less urgent
    token_count: int
    block_count: int  # that it holds


def choose_departure(
    candidates: Sequence[Decoding], block_budget: int, leaving: Collection[int] = ()
) -> Decoding | None:
    """The lowest class first, of it the shortest, as Llumnix does (OSDI '24): it is gone soonest. None that holds more
    than the budget, or is on its way already.
    """
    fitting = [c for c in candidates if c.block_count <= block_budget and c.sequence_id not in leaving]
    return min(fitting, key=lambda c: (-c.rank, c.token_count, c.sequence_id), default=None)
