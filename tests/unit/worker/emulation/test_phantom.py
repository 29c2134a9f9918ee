"""Marks that represent memory contents."""

import sys

from services.worker.emulation.phantom import NOTHING, Area, PhantomBackend, dtype, phantom
from services.worker.memory.backend import ExtentRun

CELL = 4096
SECOND = 1 << 40


def test_a_cell_far_back_takes_no_memory_for_the_cells_before_it() -> None:
    area = Area()
    area.divide(CELL, SECOND)
    area.set_cell(3, 33)
    area.set_cell(SECOND + 2, 22)
    area.write((SECOND + 4) * CELL, [44, 55])
    assert [area.cell(at) for at in (3, SECOND + 2, SECOND + 5, SECOND - 1, SECOND + 6)] == [
        33,
        22,
        55,
        NOTHING,
        NOTHING,
    ]
    assert area.read((SECOND + 1) * CELL, 6 * CELL) == [NOTHING, 22, NOTHING, 44, 55, NOTHING]
    assert area.read(0, 5 * CELL) == [NOTHING, NOTHING, NOTHING, 33, NOTHING]
    assert sys.getsizeof(area._low) + sys.getsizeof(area._high) < 4096


def test_only_unmapped_contents_are_lost() -> None:
    backend = PhantomBackend(CELL)
    backend.create(4 * CELL, 8)
    address = backend.reserve(64 * CELL)
    tensor = phantom(backend.tensor(address, (64, CELL // 4), dtype("float32")))
    tensor.area.divide(CELL, 32)
    tensor.write(list(range(1, 13)))
    tensor[32:40].write(list(range(33, 41)))
    backend.unmap(address + 8 * CELL, [ExtentRun(0, 1)])
    assert tensor[:12].read() == [*range(1, 9), *[NOTHING] * 4]
    assert tensor[32:40].read() == list(range(33, 41))
    backend.unmap(address + 36 * CELL, [ExtentRun(2, 1)])
    backend.unmap(address, [ExtentRun(1, 1)])
    assert tensor[:8].read() == [*[NOTHING] * 4, 5, 6, 7, 8]
    assert tensor[32:40].read() == [33, 34, 35, 36, *[NOTHING] * 4]
    backend.release(address, 64 * CELL)
    assert not any(tensor[:12].read() + tensor[32:40].read())
