"""Tensors without memory. Each cell has a mark of four bytes instead of contents.

A cell is a KV block of a layer, or a whole parameter. Marks are copied like contents and lost on unmapping, so a read
of a wrong block, or of one that was never copied, is detected.
"""

from __future__ import annotations

import math
import sys
import time
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ballast.common.errors import InvariantViolation
from services.worker.memory.backend import Algorithm, ExtentRun

if TYPE_CHECKING:
    import torch


NOTHING = 0  # mark of an unwritten cell
_MARK = "I"
_SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "uint8": 1}


@dataclass(frozen=True, slots=True)
class Dtype:
    """A stand-in for a torch.dtype."""

    name: str
    itemsize: int

    def __str__(self) -> str:
        return self.name


def dtype(name: str) -> torch.dtype:
    return cast("torch.dtype", Dtype(name, _SIZES[name]))


_BYTE = Dtype("uint8", 1)


class Area:
    """A reserved range. With `cell_bytes` it has two arrays of cells of this size; the second array begins at cell
    `second`, far after the end of the first. Without `cell_bytes` each tensor has its own cell.
    """

    def __init__(self, cell_bytes: int = 0) -> None:
        self.cell_bytes = cell_bytes
        self._second = sys.maxsize
        self._low = array(_MARK)
        self._high = array(_MARK)
        self._starts: dict[int, int] = {}

    def divide(self, cell_bytes: int, second: int) -> None:
        """Set the cell size, before the first write."""
        self.cell_bytes, self._second = cell_bytes, second

    def read(self, offset: int, size: int) -> list[int]:
        if not self.cell_bytes:
            return [self._starts.get(offset, NOTHING)]
        first, last = offset // self.cell_bytes, (offset + size) // self.cell_bytes
        cells, at = self._place(first)
        there = cells[at : at + last - first].tolist()
        return there + [NOTHING] * (last - first - len(there))

    def write(self, offset: int, marks: Sequence[int]) -> None:
        if not self.cell_bytes:
            [self._starts[offset]] = marks
            return
        cells, at = self._place(offset // self.cell_bytes)
        _reach(cells, at + len(marks))
        cells[at : at + len(marks)] = array(_MARK, marks)

    def cell(self, index: int) -> int:
        cells = self._low
        if index >= self._second:
            index -= self._second
            cells = self._high
        return cells[index] if index < len(cells) else NOTHING

    def set_cell(self, index: int, mark: int) -> None:
        cells = self._low
        if index >= self._second:
            index -= self._second
            cells = self._high
        try:
            cells[index] = mark
        except IndexError:
            _reach(cells, index + 1)
            cells[index] = mark

    def forget(self, offset: int, size: int) -> None:
        if self.cell_bytes:
            cells, at = self._place(offset // self.cell_bytes)
            end = min(len(cells), at - offset // self.cell_bytes - (-(offset + size) // self.cell_bytes))
            if end == len(cells):
                del cells[at:]
            else:
                cells[at:end] = array(_MARK, bytes(4 * (end - at)))
        else:
            self._starts = {at: mark for at, mark in self._starts.items() if not offset <= at < offset + size}

    def forget_all(self) -> None:
        del self._low[:], self._high[:]
        self._starts.clear()

    def _place(self, index: int) -> tuple[array[int], int]:
        return (self._low, index) if index < self._second else (self._high, index - self._second)


def _reach(cells: array[int], count: int) -> None:
    if count > len(cells):
        cells.extend(array(_MARK, bytes(4 * (count - len(cells)))))


class Phantom:
    """The part of torch.Tensor's interface that is needed for remapped memory: sizes, slices, views."""

    __slots__ = ("area", "dtype", "offset", "shape")

    def __init__(self, area: Area, offset: int, shape: tuple[int, ...], kind: Dtype) -> None:
        self.area = area
        self.offset = offset
        self.shape = shape
        self.dtype = kind

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, rows: slice) -> Phantom:
        first, last, _ = rows.indices(self.shape[0])
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        return Phantom(self.area, self.offset + first * row_bytes, (max(0, last - first), *self.shape[1:]), self.dtype)

    def view(self, *how: int | tuple[int, ...] | Dtype) -> Phantom:
        match how:
            case (Dtype() as kind,):
                return Phantom(self.area, self.offset, (self.nbytes // kind.itemsize,), kind)
            case (tuple() as shape,):
                return Phantom(self.area, self.offset, shape, self.dtype)
            case _:
                return Phantom(self.area, self.offset, cast("tuple[int, ...]", how), self.dtype)

    def zero_(self) -> None:
        """Does nothing, because fresh memory has no marks."""

    def clone(self) -> Phantom:
        copy = Phantom(Area(self.area.cell_bytes), 0, self.shape, self.dtype)
        copy.write(self.read())
        return copy

    def read(self) -> list[int]:
        return self.area.read(self.offset, self.nbytes)

    def write(self, marks: Sequence[int]) -> None:
        self.area.write(self.offset, marks)


def phantom(tensor: torch.Tensor) -> Phantom:
    """Cast for type checkers, because the tensors of an emulated worker are phantoms."""
    return cast("Phantom", tensor)


def read_all(tensors: Sequence[torch.Tensor]) -> bytes:
    """Return the marks of several tensors, concatenated."""
    marks = array(_MARK)
    for tensor in tensors:
        marks.extend(phantom(tensor).read())
    return marks.tobytes()


def write_all(tensors: Sequence[torch.Tensor], contents: bytes) -> None:
    """Write marks returned by `read_all` into tensors. Raises ValueError if the number of cells differs."""
    marks, at = array(_MARK, contents), 0
    for each in map(phantom, tensors):
        count = len(each.read())
        each.write(marks[at : at + count].tolist())
        at += count
    if at != len(marks):
        raise ValueError(f"{len(marks)} marks for {at} cells")


class PhantomBackend:
    """A `MemoryBackend` without memory; addresses and mappings are accounted as usual."""

    granularity_bytes = 4096

    def __init__(self, block_bytes: int, remap_s_per_byte: float = 0.0) -> None:
        self._block_bytes = block_bytes
        self._remap_s_per_byte = remap_s_per_byte
        self._extent_bytes = 0
        self.takes_time = False  # True: mapping takes time; False at the start
        self._bases: list[int] = []
        self._areas: list[Area] = []
        self._next = 1 << 30
        self._created = False

    @property
    def device(self) -> torch.device:
        raise InvariantViolation("an emulated device has no torch.device")

    def create(self, extent_bytes: int, count: int) -> None:
        if self._created:
            raise InvariantViolation("the extents of this backend have already been created")
        self._created, self._extent_bytes = True, extent_bytes

    def give_up(self, runs: Sequence[ExtentRun]) -> None:
        """Does nothing, because there is no memory."""

    def take_back(self, runs: Sequence[ExtentRun], files: Iterable[int] | None = None) -> None:
        """Does nothing, because there is no memory."""

    def export(self, first: int, count: int) -> list[int]:
        raise InvariantViolation("an emulated instance has one rank")

    def beside(self, files: Iterable[int]) -> PhantomBackend:
        raise InvariantViolation("an emulated instance has one rank")

    def reserve(self, size_bytes: int) -> int:
        address = self._next
        self._next += -(-size_bytes // self.granularity_bytes) * self.granularity_bytes
        self._bases.append(address)
        self._areas.append(Area())
        return address

    def release(self, address: int, size_bytes: int) -> None:
        area, _ = self._at(address)
        area.forget_all()

    def map(self, address: int, runs: Sequence[ExtentRun]) -> None:
        """Map extents. This takes time but has no effect, because fresh memory has no marks."""
        if self.takes_time:
            time.sleep(sum(run.count for run in runs) * self._extent_bytes * self._remap_s_per_byte)

    def unmap(self, address: int, runs: Sequence[ExtentRun]) -> None:
        area, offset = self._at(address)
        area.forget(offset, sum(run.count for run in runs) * self._extent_bytes)

    def tensor(self, address: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        area, offset = self._at(address)
        return cast("torch.Tensor", Phantom(area, offset, tuple(shape), cast("Dtype", dtype)))

    def raw(self, address: int, size_bytes: int) -> torch.Tensor:
        return self.tensor(address, (size_bytes,), cast("torch.dtype", _BYTE))

    def scratch(self, size_bytes: int) -> torch.Tensor:
        return cast("torch.Tensor", Phantom(Area(self._block_bytes), 0, (size_bytes,), _BYTE))

    def copy_rows(
        self, target: torch.Tensor, to: Sequence[int], source: torch.Tensor, rows: Sequence[int] | None = None
    ) -> None:
        origin, goal = phantom(source), phantom(target)
        marks = origin.read() if rows is None else [origin.area.cell(row) for row in rows]
        for row, mark in zip(to, marks, strict=True):
            goal.area.set_cell(row, mark)

    checksums_by = Algorithm.SHA256

    def contents(self, tensor: torch.Tensor) -> Iterator[memoryview]:
        yield memoryview(read_all([tensor]))

    def synchronise(self) -> None:
        """Does nothing, because no operation is asynchronous."""

    def close(self) -> None:
        """Does nothing."""

    def _at(self, address: int) -> tuple[Area, int]:
        index = bisect_right(self._bases, address) - 1
        return self._areas[index], address - self._bases[index]
