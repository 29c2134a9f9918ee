"""What room a group has while its members become whole workers again (pure).

Parameters want back what the drop has given. Beside them the group goes on with the blocks that are left, but for a
least room in which each member begins to serve alone: see `DeviceMemory.leaving_block_count`. The leader limits the
group to that of the smallest stage, and says so behind its batches once nothing beyond is held.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ballast.common.ids import WorkerId


class Memory(Protocol):
    """A stage's, of tensors or of numbers."""

    @property
    def leaving_block_count(self) -> int: ...

    @property
    def home_block_count(self) -> int: ...


@dataclass(frozen=True, slots=True)
class RoomSizes:
    """Blocks of a stage, now in host memory and in a restore."""

    leaving: int  # that its group may have when all parameters are here
    home: int  # in all layers afterwards
    host: int = 0  # in host memory, for KV that is swapped

    @staticmethod
    def of(memory: Memory, host: int = 0) -> "RoomSizes":
        return RoomSizes(memory.leaving_block_count, memory.home_block_count, host)


class GroupSizes:
    """Those of all stages of a group, as far as this one, its leader, has been told."""

    def __init__(self, me: WorkerId, memory: Memory, host: int = 0) -> None:
        self._me = me
        self._memory = memory
        self._host = host
        self._told: dict[WorkerId, RoomSizes] = {}

    def clear(self) -> None:
        """A new group."""
        self._told.clear()

    def told(self, stage: WorkerId, sizes: RoomSizes) -> None:
        self._told[stage] = sizes

    def of(self, stages: Sequence[WorkerId]) -> Mapping[WorkerId, RoomSizes] | None:
        """None: some have not been told yet. No stages: this one is alone."""
        known = {**self._told, self._me: RoomSizes.of(self._memory, self._host)}
        wanted = stages or (self._me,)
        return {stage: known[stage] for stage in wanted} if known.keys() >= set(wanted) else None
