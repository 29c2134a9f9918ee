from collections.abc import Iterator

import pytest
import torch

from ballast.common.errors import ConfigError, InvariantViolation
from services.worker.memory.backend import ExtentRun
from services.worker.memory.cuda import CudaBackend, CudaError
from services.worker.memory.host import HostBackend
from services.worker.memory.pool import PhysicalPool, Purpose
from tests.unit.worker.memory.simulated_driver import SimulatedDriver

EXTENT_BYTES = 16 << 10
COUNT = 16


@pytest.fixture
def pool() -> Iterator[PhysicalPool]:
    made = PhysicalPool(HostBackend(), COUNT * EXTENT_BYTES + 5, EXTENT_BYTES)
    yield made
    made.close()


def test_lowest_extents_are_allocated_first(pool: PhysicalPool) -> None:
    assert pool.take(Purpose.KV, 3) == [ExtentRun(0, 3)]
    assert pool.take(Purpose.PARAMETERS, 2) == [ExtentRun(3, 2)]


def test_a_request_goes_to_the_lowest_hole_that_holds_it_whole(pool: PhysicalPool) -> None:
    pool.take(Purpose.KV, COUNT)
    pool.give_back(Purpose.KV, [ExtentRun(9, 3), ExtentRun(1, 2), ExtentRun(5, 3)])
    assert pool.take(Purpose.KV, 3) == [ExtentRun(5, 3)]


def test_a_request_larger_than_any_hole_is_served_from_as_few_as_possible(pool: PhysicalPool) -> None:
    pool.take(Purpose.KV, COUNT)
    pool.give_back(Purpose.KV, [ExtentRun(0, 1), ExtentRun(2, 1), ExtentRun(4, 3), ExtentRun(9, 4)])
    assert pool.take(Purpose.KV, 6) == [ExtentRun(4, 2), ExtentRun(9, 4)]


def test_adjacent_holes_are_merged(pool: PhysicalPool) -> None:
    pool.take(Purpose.KV, COUNT)
    pool.give_back(Purpose.KV, [ExtentRun(0, 4), ExtentRun(8, 4), ExtentRun(4, 4)])
    assert pool.take(Purpose.KV, 12) == [ExtentRun(0, 12)]


def test_requesting_more_than_is_free_is_a_bug_of_the_caller(pool: PhysicalPool) -> None:
    with pytest.raises(InvariantViolation, match="17 extents requested for KV, but 16 are free"):
        pool.take(Purpose.KV, COUNT + 1)


def test_extents_are_returned_once_and_by_their_owner(pool: PhysicalPool) -> None:
    runs = pool.take(Purpose.KV, 4)
    with pytest.raises(InvariantViolation, match="does not own"):
        pool.give_back(Purpose.PARAMETERS, runs)
    pool.give_back(Purpose.KV, runs)
    with pytest.raises(InvariantViolation, match="does not own"):
        pool.give_back(Purpose.KV, runs)
    pool.check()


def test_bytes_beyond_the_last_extent_count_as_free(pool: PhysicalPool) -> None:
    pool.reserve("kv", Purpose.KV, COUNT).grow(COUNT)
    report = pool.report()
    report.check()
    assert (report.budget_bytes, report.kv_bytes, report.free_bytes) == (
        COUNT * EXTENT_BYTES + 5,
        COUNT * EXTENT_BYTES,
        5,
    )


@pytest.mark.parametrize("extent_bytes", [0, -4096, 1000])
def test_an_extent_is_a_multiple_of_the_granularity(extent_bytes: int) -> None:
    with pytest.raises(ConfigError, match="extent_bytes"):
        PhysicalPool(HostBackend(), 1 << 20, extent_bytes)


def test_a_budget_below_one_extent_is_refused() -> None:
    with pytest.raises(ConfigError, match="device_memory_bytes"):
        PhysicalPool(HostBackend(), EXTENT_BYTES - 1, EXTENT_BYTES)


def test_a_range_grows_and_shrinks_at_its_tail(pool: PhysicalPool) -> None:
    one, other = pool.reserve("one", Purpose.KV, 8), pool.reserve("other", Purpose.KV, 8)
    one.grow(2)
    other.grow(2)
    one.grow(3)
    one.bytes[: one.mapped_bytes].fill_(3)
    other.bytes[: other.mapped_bytes].fill_(4)
    assert list(one.runs) == [ExtentRun(0, 2), ExtentRun(4, 3)]
    assert one.unmap_tail(4) == [ExtentRun(1, 1), ExtentRun(4, 3)]
    other.map_tail([ExtentRun(4, 3)])
    pool.give_back(Purpose.KV, [ExtentRun(1, 1)])
    pool.check()
    assert (one.mapped_bytes, other.mapped_bytes) == (EXTENT_BYTES, 5 * EXTENT_BYTES)
    assert other.bytes[: other.mapped_bytes].view(5, -1)[:, 7].tolist() == [4, 4, 3, 3, 3]


def test_a_range_does_not_grow_beyond_its_reservation(pool: PhysicalPool) -> None:
    one = pool.reserve("one", Purpose.KV, 4)
    one.grow(3)
    with pytest.raises(InvariantViolation, match="exceed"):
        one.grow(2)
    pool.check()
    assert pool.free_count == COUNT - 3


def test_a_range_does_not_shrink_below_zero(pool: PhysicalPool) -> None:
    one = pool.reserve("one", Purpose.KV, 4)
    one.grow(1)
    with pytest.raises(InvariantViolation, match="2 extents to unmap of 1"):
        one.shrink(2)
    pool.check()


def test_check_finds_an_extent_mapped_twice(pool: PhysicalPool) -> None:
    one, other = pool.reserve("one", Purpose.KV, 4), pool.reserve("other", Purpose.KV, 4)
    one.grow(2)
    other.map_tail([ExtentRun(1, 1)])
    with pytest.raises(InvariantViolation, match=r"extent 1 is mapped twice\n  booked as KV\n  mapped in one, other"):
        pool.check()


def test_check_finds_a_leak(pool: PhysicalPool) -> None:
    pool.take(Purpose.KV, 1)
    with pytest.raises(InvariantViolation, match=r"extent 0 is leaked"):
        pool.check()


def test_check_finds_an_extent_that_is_mapped_but_not_owned(pool: PhysicalPool) -> None:
    pool.reserve("one", Purpose.KV, 4).map_tail([ExtentRun(3, 1)])
    with pytest.raises(InvariantViolation, match=r"extent 3 is mapped by a range that does not own it"):
        pool.check()


def test_check_finds_an_extent_mapped_for_another_purpose(pool: PhysicalPool) -> None:
    pool.reserve("one", Purpose.KV, 4).map_tail(pool.take(Purpose.PARAMETERS, 1))
    with pytest.raises(InvariantViolation, match=r"extent 0 is mapped by a range that does not own it"):
        pool.check()


def test_check_finds_a_list_of_free_extents_with_one_that_is_owned(pool: PhysicalPool) -> None:
    pool.reserve("one", Purpose.KV, 4).grow(3)
    pool._free[:] = [ExtentRun(2, COUNT - 2)]
    with pytest.raises(InvariantViolation, match="the list of free extents is wrong"):
        pool.check()


def test_growth_that_fails_halfway_leaves_everything_as_it_was() -> None:
    driver = SimulatedDriver()
    pool = PhysicalPool(CudaBackend(driver), COUNT * EXTENT_BYTES, EXTENT_BYTES)
    one, other = pool.reserve("one", Purpose.KV, COUNT), pool.reserve("other", Purpose.KV, COUNT)
    one.grow(COUNT)
    runs = one.unmap_tail(COUNT)
    pool.give_back(Purpose.KV, runs)
    for _ in range(5):
        one.grow(1)
        other.grow(1)
    one.shrink(5)  # five holes of one extent each, and one of six
    mapped = dict(driver.mappings)
    driver.maps_until_failure = 7
    with pytest.raises(CudaError):
        other.grow(8)
    assert driver.mappings == mapped
    pool.check()
    driver.maps_until_failure = None
    other.grow(8)
    pool.check()
    pool.close()
    driver.require_empty()


def test_windows_are_consecutive_and_reserved_and_released_together() -> None:
    driver = SimulatedDriver()
    pool = PhysicalPool(CudaBackend(driver), COUNT * EXTENT_BYTES, EXTENT_BYTES)
    one, other = pool.reserve_windows("kv", Purpose.KV, COUNT)
    assert other.address == one.address + COUNT * EXTENT_BYTES
    assert driver.reservations == {one.address: 2 * COUNT * EXTENT_BYTES}
    one.grow(COUNT // 2)
    other.grow(COUNT // 2)
    both = pool.backend.tensor(one.address, (2, COUNT * EXTENT_BYTES), torch.uint8)
    one.bytes[: one.mapped_bytes].fill_(1)
    other.bytes[: other.mapped_bytes].fill_(2)
    assert both[0, : one.mapped_bytes].unique().tolist() == [1]
    one.shrink(COUNT // 2)
    assert both[1, : other.mapped_bytes].unique().tolist() == [2]
    other.grow(COUNT // 2)
    assert both[1, other.mapped_bytes - 1] == 1, "an extent moves with its contents"
    with pytest.raises(InvariantViolation, match="exceed"):
        other.map_tail([ExtentRun(0, 1)])
    pool.check()
    pool.close()
    driver.require_empty()
