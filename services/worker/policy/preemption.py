"""Who gives way when the KV cache is full."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VictimView:
    """A running sequence that could be preempted."""

    rank: int  # of its priority class; a higher one matters less
    arrival: tuple[float, int]  # instant of its submission, then its id
    reserved_block_count: int
    computed_tokens: int  # what recomputing would cost


def choose_victim(candidates: Sequence[VictimView]) -> int:
    """Index of the one to preempt: of the lowest class the latest arrival.

    So the oldest sequence of the highest class is never a victim while another one runs: it finishes, and after it
    the next. That excludes a livelock whatever the sizes are.
    """
    return max(range(len(candidates)), key=lambda i: (candidates[i].rank, candidates[i].arrival))
