"""Preemption (eviction) policy: which running sequence loses its KV blocks when the cache is full."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_OUTWEIGHS = 2  # a caller that holds more than this multiple of another's blocks may lose some to it


@dataclass(frozen=True, slots=True)
class VictimView:
    """A running sequence that could be preempted."""

    rank: int  # rank of its priority class; higher is less important
    arrival: tuple[float, int]  # (time of submission, id)
    reserved_block_count: int
    computed_tokens: int  # lost by a preemption
    caller: int = 0


def outweighs(held_block_count: int, other_block_count: int) -> bool:
    """True if a caller with `held_block_count` blocks yields to one that has, or will have, `other_block_count` blocks.

    Even afterwards the first caller has at least twice as many blocks as the other, so the reverse is impossible and
    callers cannot preempt each other alternately.
    """
    return held_block_count >= _OUTWEIGHS * other_block_count


def held_by_caller(candidates: Sequence[VictimView]) -> Counter[int]:
    held: Counter[int] = Counter()
    for candidate in candidates:
        held[candidate.caller] += candidate.reserved_block_count
    return held


def choose_victim(candidates: Sequence[VictimView]) -> int:
    """Return the index of the victim: the latest arrival of the lowest class or, if a caller outweighs that sequence's
    caller, the latest arrival of the heaviest caller.

    The oldest sequence of the highest class is never a victim while another one runs, so it finishes, and then the next
    one. This excludes livelock for all sizes.
    """
    newest = _newest(candidates)
    held = held_by_caller(candidates)
    if len(held) < 2:
        return newest
    heaviest = _heaviest(held)
    if not outweighs(held[heaviest], held[candidates[newest].caller]):
        return newest
    return next(iter(_newest_of(heaviest, candidates, candidates[newest].rank)), newest)


def _newest(candidates: Sequence[VictimView]) -> int:
    """Return the latest arrival of the lowest class, or the one before it if the latest has more computed tokens than
    all others of its class together; never the oldest.
    """
    order = sorted(range(len(candidates)), key=lambda i: (candidates[i].rank, candidates[i].arrival))
    latest, rank = order[-1], candidates[order[-1]].rank
    alike = [i for i in order[1:] if candidates[i].rank == rank]
    lost_tokens = sum(candidates[i].computed_tokens for i in order if candidates[i].rank == rank and i != latest)
    is_long = candidates[latest].computed_tokens > lost_tokens
    return alike[-2] if is_long and len(alike) > 1 else latest


def claimed(candidates: Sequence[VictimView], caller: int, rank: int, need_block_count: int) -> list[int]:
    """Return the indices of the sequences to preempt for a waiting one, in order. They have no higher class and belong
    to the caller that holds most, as long as it would still outweigh the waiting sequence's caller, whose need counts
    as held.
    """
    held = held_by_caller(candidates)
    if not held or (heaviest := _heaviest(held)) == caller:
        return []
    left, found = held[heaviest], list[int]()
    for index in _newest_of(heaviest, candidates, rank):
        left -= candidates[index].reserved_block_count
        if not outweighs(left, held[caller] + need_block_count):
            break
        found.append(index)
    return found


def _heaviest(held: Counter[int]) -> int:
    return max(held, key=lambda caller: (held[caller], caller))


def _newest_of(caller: int, candidates: Sequence[VictimView], rank: int) -> list[int]:
    """Return a caller's sequences of no higher class than `rank`, latest first, without the first one in the order of
    service.
    """

    def order(index: int) -> tuple[int, tuple[float, int]]:
        return candidates[index].rank, candidates[index].arrival

    first = min(range(len(candidates)), key=order)
    found = [i for i, one in enumerate(candidates) if one.caller == caller and one.rank >= rank and i != first]
    return sorted(found, key=order, reverse=True)
