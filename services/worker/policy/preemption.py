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
    """Index of the one to preempt: of the lowest class the latest arrival; the one before it, if more is lost with the
    latest than with all others of its class.

    So the oldest sequence of the highest class is never a victim while another one runs: it finishes, and after it
    the next. That excludes a livelock whatever the sizes are.
    """
    order = sorted(range(len(candidates)), key=lambda i: (candidates[i].rank, candidates[i].arrival))
    latest, rank = order[-1], candidates[order[-1]].rank
    alike = [i for i in order[1:] if candidates[i].rank == rank]  # not the oldest
    lost_tokens = sum(candidates[i].computed_tokens for i in order if candidates[i].rank == rank and i != latest)
    is_long = candidates[latest].computed_tokens > lost_tokens
    return alike[-2] if is_long and len(alike) > 1 else latest
