"""The device memory of all ranks as one: they have the same extents, and whatever happens to one happens to all.

On a CPU the memory of a rank is a file that the first rank has mapped as well, in a mirror that follows all mappings.
So KV and layers of all ranks travel over the first one's links, from where they are to where they belong, without a
copy in between: both sides name the same pieces, rank by rank.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from ballast.common.load import MemoryReport
from services.worker.memory.device import DeviceMemory
from services.worker.ranks.channel import Remap
from services.worker.ranks.crew import Crew

_Moves = Sequence[tuple[int, int]]


class Mirror(DeviceMemory):
    """Another rank's memory, mapped here: what is copied inside of it, that rank copies."""

    def shrink_retired(self, block_count: int, moves: _Moves = ()) -> int:
        return super().shrink_retired(block_count)

    def move(self, moves: _Moves) -> None:
        """Nothing to do here."""

    def move_leaving(self, moves: _Moves) -> None:
        """Nothing to do here."""


class RankedMemory(DeviceMemory):
    """Each change is over when it is on all ranks, and has come to the same on each."""

    def __init__(self, own: DeviceMemory, mirrors: Sequence[Mirror], crew: Crew, rank_count: int) -> None:
        """Memory and mirrors belong to it from here on. No layer has been dropped yet."""
        super().__init__(own.pool, own.parameters, own.kv)
        self._home_extents = own._home_extents
        self._mirrors = mirrors
        self._crew = crew
        self._rank_count = rank_count
        own.parameters.mirrors = tuple(mirror.parameters for mirror in mirrors)
        own.kv.mirrors = tuple(mirror.kv for mirror in mirrors)

    def drop_layers(self, layers: Sequence[int]) -> int:
        return self._counted("drop_layers", tuple(layers))

    def shrink_retired(self, block_count: int, moves: _Moves = ()) -> int:
        return self._counted("shrink_retired", block_count, tuple(moves))

    def release_retired(self) -> int:
        return self._counted("release_retired")

    def make_room_for_layers(self, layers: Sequence[int], *, block_count: int) -> int:
        return self._counted("make_room_for_layers", tuple(layers), block_count=block_count)

    def move(self, moves: _Moves) -> None:
        self._on_all("move", tuple(moves))

    def open_window(self) -> int:
        return self._counted("open_window")

    def move_leaving(self, moves: _Moves) -> None:
        self._on_all("move_leaving", tuple(moves))

    def shrink_leaving(self, block_count: int) -> int:
        return self._counted("shrink_leaving", block_count)

    def close_leaving(self) -> int:
        return self._counted("close_leaving")

    def parameter_bytes_of(self, layers: Sequence[int]) -> int:
        return super().parameter_bytes_of(layers) * self._rank_count

    def report(self) -> MemoryReport:
        own, count = super().report(), self._rank_count
        return replace(
            own,
            budget_bytes=own.budget_bytes * count,
            parameter_bytes=own.parameter_bytes * count,
            kv_bytes=own.kv_bytes * count,
            free_bytes=own.free_bytes * count,
        )

    def check(self) -> None:
        super().check()
        for mirror in self._mirrors:
            mirror.check()

    def close(self) -> None:
        self._crew.close()
        for mirror in self._mirrors:
            mirror.close()
        super().close()

    def _counted(self, name: str, *arguments: object, **named: object) -> int:
        return cast(int, self._on_all(name, *arguments, **named))

    def _on_all(self, name: str, *arguments: object, **named: object) -> object:
        self._crew.tell(Remap(name, arguments, named))
        for mirror in self._mirrors:
            getattr(mirror, name)(*arguments, **named)
        result = getattr(super(), name)(*arguments, **named)
        self._crew.require(result)
        return result
