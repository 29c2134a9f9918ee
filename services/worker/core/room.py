"""Room for a restore: first for parameters, then for copies of the KV (pure).

Parameters alone want back no more than a drop has given: beside them fits the KV that all members had room for before
it, as long as each keeps that of its own layers only. Copies, which make every member a whole worker again, want more:
each stage then holds its own layers' KV of all sequences, and all layers' KV of those that it is going to lead. Its own
layers get many blocks, the others as many as those sequences need and some to spare: for a pair that has room for what
six tenths of its un-dropped memory hold. So parameters come while demand is still falling, and the leader asks for the
second room when what the group wants fits into it. That lasts as long as copying takes, for which nothing is kept free:
the last to come waits for the rest of it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from ballast.common.errors import InvariantViolation
from ballast.common.ids import WorkerId


class Room(Enum):
    """What a member waits to be granted by its leader."""

    NONE = "none"
    LAYERS = "layers"
    KV = "kv"


@dataclass(frozen=True, slots=True)
class RoomSizes:
    """Blocks of a stage in a restore."""

    beside: int  # all parameters are here, and KV of the layers that it executes
    wide: int  # in those layers, while KV is copied
    narrow: int  # in the other layers then
    home: int  # in all layers afterwards


class RoomKeeper:
    """A leader's, for one restore. `sought` is to be granted once nobody holds, or will take, a block beyond the limit
    that `seek` has given.
    """

    def __init__(self, sizes: Mapping[WorkerId, RoomSizes], *, patient: bool) -> None:
        """`sizes` of all stages. Without patience the second room is made at once, and who finds none in it waits or is
        preempted.
        """
        self._beside = min(size.beside for size in sizes.values())
        self._wide = min(size.wide for size in sizes.values())
        self._narrow = min(size.narrow for size in sizes.values())
        self._patient = patient
        self._incomplete = set(sizes)  # stages that lack parameters
        self._granted = Room.NONE
        self.sought = Room.NONE

    @property
    def waits_for_demand(self) -> bool:
        """All parameters are here, and what the group wants does not fit yet."""
        return not self._incomplete and self._granted is Room.LAYERS and self.sought is Room.NONE

    def layers_are_back(self, stages: Iterable[WorkerId]) -> None:
        self._incomplete.difference_update(stages)

    def seek(self, wanted_blocks: int, longest_blocks: int) -> int | None:
        """`wanted_blocks` by all that runs and waits, `longest_blocks` by one of those. How many blocks the group may
        count on from now on; None: as before.
        """
        if self._granted is Room.NONE and self.sought is Room.NONE:
            self.sought = Room.LAYERS
            return self._beside
        fits = wanted_blocks <= self._wide and longest_blocks <= self._narrow
        if self.waits_for_demand and (fits or not self._patient):
            self.sought = Room.KV
            return self._wide
        return None

    def grant(self) -> Room:
        if self.sought is Room.NONE:
            raise InvariantViolation("room is granted that nobody seeks")
        self._granted, self.sought = self.sought, Room.NONE
        return self._granted
