"""Three rules for packing large requests onto few instances, given only the requests on each instance.

A new request is placed on the fullest instance that keeps its reserve. The emptiest instance is released if its
requests fit on the others. An instance that has nearly used up its reserve moves its smallest request away. Amounts are
bytes or tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

RESERVE = 0.08  # fraction of an instance reserved for the growth of running requests
_USED_UP = 0.25  # a request is moved away when less than this fraction of the reserve remains


@dataclass(frozen=True, slots=True)
class HeldRequest:
    """The requests of one instance."""

    number: int
    amounts: tuple[int, ...]  # amounts of its requests
    leaving: bool = False  # True: takes no new requests, and is being emptied

    @property
    def used(self) -> int:
        return sum(self.amounts)


@dataclass(frozen=True, slots=True)
class LeanMove:
    amount: int  # amount of the request; if several have this amount, any of them
    source: int
    target: int


def place(amount: int, instances: Sequence[HeldRequest], capacity: int, reserve: float = RESERVE) -> int | None:
    """Return the instance for a new request, a leaving one only if no other has room. None: an instance must be started
    or woken.
    """
    kept = int(reserve * capacity)
    staying = [one for one in instances if not one.leaving]
    with_room = [one for one in staying if one.used + amount + kept <= capacity or not one.amounts]
    if not with_room:
        with_room = [one for one in instances if one.leaving and one.used + amount + kept <= capacity]
    return max(with_room, key=lambda one: (one.used, -one.number)).number if with_room else None


def leaves(instances: Sequence[HeldRequest], capacity: int, reserve: float = RESERVE) -> list[LeanMove] | None:
    """Return the moves that empty the emptiest instance; None: it is the only one, or the others have too little
    room.
    """
    staying = [one for one in instances if not one.leaving and one.amounts]
    if len(staying) < 2:
        return None
    emptiest = min(staying, key=lambda one: (one.used, -one.number))
    return _spread(emptiest, sorted(emptiest.amounts, reverse=True), staying, capacity, reserve)


def relieve(instances: Sequence[HeldRequest], capacity: int, reserve: float = RESERVE) -> list[LeanMove]:
    """Return moves of the smallest requests out of nearly full instances, as far as others have room."""
    moves: list[LeanMove] = []
    least = int(_USED_UP * reserve * capacity)
    held = {one.number: one for one in instances}
    for one in instances:
        if capacity - one.used < least and len(one.amounts) > 1:
            found = _spread(one, [min(one.amounts)], [*held.values()], capacity, reserve)
            if found:
                moves += found
                taken = held[found[0].target]
                held[taken.number] = HeldRequest(taken.number, (*taken.amounts, found[0].amount), taken.leaving)
    return moves


def _spread(
    source: HeldRequest, amounts: Sequence[int], instances: Sequence[HeldRequest], capacity: int, reserve: float
) -> list[LeanMove] | None:
    """Return moves of each amount to the fullest instance that keeps its reserve; None: an amount does not fit."""
    rooms = {
        one.number: capacity - one.used - int(reserve * capacity)
        for one in instances
        if one.number != source.number and not one.leaving
    }
    moves: list[LeanMove] = []
    for amount in amounts:
        fitting = [number for number, room in rooms.items() if room >= amount]
        if not fitting:
            return None
        target = min(fitting, key=lambda number: (rooms[number], number))
        rooms[target] -= amount
        moves.append(LeanMove(amount, source.number, target))
    return moves


def check(before: Sequence[HeldRequest], moves: Sequence[LeanMove], capacity: int) -> list[str]:
    """Describe errors of moves: an overfilled instance, one that both sends and receives, or a leaving one that
    receives.
    """
    used = {one.number: one.used for one in before}
    for move in moves:
        used[move.source] -= move.amount
        used[move.target] += move.amount
    sources, targets = {move.source for move in moves}, {move.target for move in moves}
    wrong = [f"{number} holds {amount} of {capacity}" for number, amount in used.items() if amount > capacity]
    wrong += [f"{number} gives and takes" for number in sources & targets]
    return wrong + [f"{one.number} is leaving and takes" for one in before if one.leaving and one.number in targets]
