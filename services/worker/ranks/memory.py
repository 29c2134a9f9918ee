"""Device memory of all ranks as one: equal extents, changed together or not at all.

Rank 0 also maps the memory of every other rank, in a mirror that follows all mappings. KV and layers of all ranks are
therefore sent over rank 0's links directly to their destination; both sides list the same pieces, rank by rank.

On GPUs, rank 0's copies access memory of other processes, whose streams are not ordered with its own. A step is ordered
by its all-reduces: once rank 0 has the last result, the others have written their KV. A change begins when rank 0's
device has finished its work, and ends when the other devices have finished theirs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from ballast.common.errors import ConfigError
from ballast.common.load import MemoryReport
from services.worker.memory.device import DeviceMemory
from services.worker.ranks.channel import REFUSALS, Done, MemoryRefused, RankLost, Remap, RemapRefused
from services.worker.ranks.crew import Crew

_Moves = Sequence[tuple[int, int]]


class Mirror(DeviceMemory):
    """Another rank's memory, mapped here. Copies within it are executed by that rank."""

    def shrink_retired(self, block_count: int, moves: _Moves = ()) -> int:
        return super().shrink_retired(block_count)

    def move(self, moves: _Moves) -> None:
        """Does nothing, because the other rank executes it."""

    def move_leaving(self, moves: _Moves) -> None:
        """Does nothing, because the other rank executes it."""


class RankedMemory(DeviceMemory):
    """Memory of all ranks. Each change is executed on all ranks with the same result, or undone on all if one refuses
    it.
    """

    def __init__(self, own: DeviceMemory, mirrors: Sequence[Mirror], crew: Crew, rank_count: int) -> None:
        """Takes ownership of `own` and `mirrors`, in which no layer may have been dropped yet."""
        super().__init__(own.pool, own.parameters, own.kv)
        self._home_extents = own._home_extents
        self._mirrors = mirrors
        self._crew = crew
        self._rank_count = rank_count
        own.parameters.mirrors = tuple(mirror.parameters for mirror in mirrors)
        own.kv.mirrors = tuple(mirror.kv for mirror in mirrors)
        self.can_park = bool(mirrors) and not own.kv.is_remote

    def drop_layers(self, layers: Sequence[int]) -> int:
        return self._counted("drop_layers", tuple(layers))

    def shrink_retired(self, block_count: int, moves: _Moves = ()) -> int:
        return self._counted("shrink_retired", block_count, tuple(moves))

    def release_retired(self) -> int:
        return self._counted("release_retired")

    def make_room_for_layers(self, layers: Sequence[int], *, block_count: int) -> int:
        return self._counted("make_room_for_layers", tuple(layers), block_count=block_count)

    def empty(self) -> None:
        self._on_all("empty")

    def give_up(self) -> None:
        self._on_all("give_up")

    def unpark(self) -> None:
        """Allocate the memory of all ranks again, for `make_room_for_layers`.

        Raises:
            ConfigError: a device lacks the memory; no rank keeps any.
        """
        self._crew.tell(Remap("unpark", (), {}))
        lacking = list[str]()
        try:
            super().unpark()
        except REFUSALS as error:
            lacking.append(str(error))
        lacking += self._refused(self._crew.answers())
        if lacking:
            self.give_up()
            raise ConfigError("device_memory_bytes", "; ".join(lacking))
        for rank, mirror in enumerate(self._mirrors, start=1):
            mirror.pool.take_back(self._crew.files(rank))

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
            extent_bytes=own.extent_bytes * count,
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
        for memory in (*self._mirrors, self):
            memory.begin()
        self.pool.backend.synchronise()
        self._crew.tell(Remap(name, arguments, named))
        result, failed = None, None
        try:
            for mirror in self._mirrors:
                getattr(mirror, name)(*arguments, **named)
            result = getattr(super(), name)(*arguments, **named)
        except REFUSALS as error:  # the other ranks have executed the change, and must undo it
            failed = error
        answers = self._crew.answers()
        refused = self._refused(answers)
        if failed is None and not refused:
            self._require(answers, result)
            return result
        self._crew.tell(Remap("undo", (), {}))
        for memory in (*self._mirrors, self):
            memory.undo()
        self._require(self._crew.answers(), None)
        raise failed or RemapRefused("; ".join(refused))

    @staticmethod
    def _refused(answers: Mapping[str, object]) -> list[str]:
        return [f"{who}: {answer.why}" for who, answer in answers.items() if isinstance(answer, MemoryRefused)]

    def _require(self, answers: Mapping[str, object], result: object) -> None:
        for who, answer in answers.items():
            if answer != Done(result):
                raise RankLost(f"{who} is out of step: it answers {answer}, not {Done(result)}")
