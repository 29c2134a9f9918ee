"""Room for a restore: first for parameters, then for copies of the KV (pure).

Parameters alone want back no more than a drop has given: beside them fits the KV that all members had room for before
it, as long as each keeps that of its own layers only. Copies, which make every member a whole worker again, want more:
each stage then holds its own layers' KV of all sequences, and all layers' KV of those that it is going to lead. Its own
layers get many blocks, the others as many as those sequences need and some to spare: for a pair that has room for what
six tenths of its un-dropped memory hold. So parameters come while demand is still falling, and the leader asks for the
second room when what the group wants fits into it. That lasts as long as copying takes, for which nothing is kept free:
the last to come waits for the rest of it.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from ballast.common.errors import InvariantViolation
from ballast.common.ids import WorkerId
from services.worker.core.batch import SequenceId
from services.worker.core.blocks import BlockBook


class Room(Enum):
    """What a member waits to be granted by its leader."""

    NONE = "none"
    LAYERS = "layers"
    KV = "kv"


class Memory(Protocol):
    """A stage's, of tensors or of numbers."""

    @property
    def beside_block_count(self) -> int: ...

    @property
    def home_block_count(self) -> int: ...

    def divided_extents(self, member_count: int) -> tuple[int, int]: ...

    def blocks_in(self, extents: int) -> int: ...


@dataclass(frozen=True, slots=True)
class RoomSizes:
    """Blocks of a stage in a restore."""

    beside: int  # all parameters are here, and KV of the layers that it executes
    wide: int  # in those layers, while KV is copied
    narrow: int  # in the other layers then
    home: int  # in all layers afterwards

    @staticmethod
    def of(memory: Memory, member_count: int) -> "RoomSizes":
        wide, narrow = memory.divided_extents(member_count)
        return RoomSizes(
            memory.beside_block_count, memory.blocks_in(wide), memory.blocks_in(narrow), memory.home_block_count
        )


class GroupSizes:
    """Those of all stages of a group, as far as this one, its leader, has been told."""

    def __init__(self, me: WorkerId, memory: Memory) -> None:
        self._me = me
        self._memory = memory
        self._told: dict[WorkerId, RoomSizes] = {}

    def clear(self) -> None:
        """A new group."""
        self._told.clear()

    def told(self, stage: WorkerId, sizes: RoomSizes) -> None:
        self._told[stage] = sizes

    def of(self, stages: Sequence[WorkerId]) -> Mapping[WorkerId, RoomSizes] | None:
        """None: some have not been told yet. No stages: this one is alone."""
        known = {**self._told, self._me: RoomSizes.of(self._memory, max(1, len(stages)))}
        wanted = stages or (self._me,)
        return {stage: known[stage] for stage in wanted} if known.keys() >= set(wanted) else None


def lent_count(book: BlockBook, home_block_count: int, mine: Container[SequenceId]) -> int:
    """Blocks that a worker which leads alone now cannot have yet: those of sequences that others lead, and after a
    restore what the layers that have come back still lack.
    """
    foreign = [book.table(i) for i in book.sequence_ids if i not in mine]
    if book.split is None:
        return sum(len(table) for table in foreign)
    return home_block_count - book.split + sum(block_id < book.split for table in foreign for block_id in table)


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

    @property
    def room_blocks(self) -> int:
        """That the group may hold while KV is copied."""
        return self._wide

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
