"""The contract of every `MemoryBackend`. Subclasses provide the `backend` fixture and inherit the tests."""

from collections.abc import Iterator

import pytest
import torch

from ballast.common.errors import ConfigError, InvariantViolation
from services.worker.memory.backend import SUPPORTED_DTYPES, ExtentRun, MemoryBackend

COUNT = 8  # extents of a backend under test
ROOM = 6  # extents of a reserved range


class Range:
    """A reserved range that cleans up after itself."""

    def __init__(self, backend: MemoryBackend, extent_bytes: int) -> None:
        self._backend = backend
        self.extent_bytes = extent_bytes
        self.size_bytes = ROOM * extent_bytes
        self.address = backend.reserve(self.size_bytes)
        self.extents = backend.tensor(self.address, (ROOM, extent_bytes), torch.uint8)  # [extent, byte]
        self._mapped = [-1] * ROOM  # slot -> extent

    def map(self, slot: int, run: ExtentRun) -> None:
        self._backend.map(self.address + slot * self.extent_bytes, [run])
        self._mapped[slot : slot + run.count] = range(run.first, run.end)

    def unmap(self, slot: int, count: int) -> None:
        runs = [ExtentRun(extent, 1) for extent in self._mapped[slot : slot + count]]
        self._backend.unmap(self.address + slot * self.extent_bytes, runs)

    def value(self, slot: int) -> int:
        """The byte that fills the whole slot; AssertionError if its bytes differ."""
        low, high = self.extents[slot].min().item(), self.extents[slot].max().item()
        assert low == high
        return int(low)

    def close(self) -> None:
        self._backend.release(self.address, self.size_bytes)


class BackendContract:
    @pytest.fixture
    def backend(self) -> Iterator[MemoryBackend]:
        raise NotImplementedError

    @pytest.fixture
    def extent_bytes(self, backend: MemoryBackend) -> int:
        return backend.granularity_bytes

    @pytest.fixture
    def created(self, backend: MemoryBackend, extent_bytes: int) -> MemoryBackend:
        backend.create(extent_bytes, COUNT)
        return backend

    @pytest.fixture
    def one(self, created: MemoryBackend, extent_bytes: int) -> Iterator[Range]:
        made = Range(created, extent_bytes)
        yield made
        made.close()

    @pytest.fixture
    def other(self, created: MemoryBackend, extent_bytes: int) -> Iterator[Range]:
        made = Range(created, extent_bytes)
        yield made
        made.close()

    def test_fresh_extents_read_as_zeros(self, one: Range) -> None:
        one.map(0, ExtentRun(0, ROOM))
        assert [one.value(slot) for slot in range(ROOM)] == [0] * ROOM
        one.unmap(0, ROOM)

    def test_bytes_move_with_the_extent_to_another_range(self, one: Range, other: Range) -> None:
        one.map(0, ExtentRun(2, 3))
        for slot in range(3):
            one.extents[slot].fill_(10 + slot)
        one.unmap(0, 3)
        other.map(1, ExtentRun(3, 2))
        assert (other.value(1), other.value(2)) == (11, 12)
        one.map(0, ExtentRun(2, 1))
        assert one.value(0) == 10
        other.unmap(1, 2)
        one.unmap(0, 1)

    def test_released_extents_return_as_zeros_and_the_others_keep_their_bytes(
        self, created: MemoryBackend, one: Range
    ) -> None:
        one.map(0, ExtentRun(0, 4))
        one.extents[:4].fill_(6)
        one.unmap(1, 3)
        for _ in range(2):
            created.give_up([ExtentRun(1, 2), ExtentRun(4, COUNT - 4)])
            assert one.value(0) == 6
            created.take_back([ExtentRun(1, 2), ExtentRun(4, COUNT - 4)])
            one.map(1, ExtentRun(1, 4))
            assert [one.value(slot) for slot in range(5)] == [6, 0, 0, 6, 0]
            one.extents[1:3].fill_(9)
            one.extents[4].fill_(9)
            one.unmap(1, 4)
        one.unmap(0, 1)

    def test_a_view_made_before_the_mapping_shows_the_mapped_memory(self, one: Range) -> None:
        view, address = one.extents[4:6], one.extents.data_ptr()
        one.map(0, ExtentRun(0, 6))
        view.fill_(7)
        assert one.value(5) == 7
        assert one.value(3) == 0
        assert one.extents.data_ptr() == address == one.address
        one.unmap(0, 6)

    def test_extents_are_mapped_in_any_order(self, one: Range, other: Range) -> None:
        one.map(0, ExtentRun(0, 4))
        for slot in range(4):
            one.extents[slot].fill_(slot + 1)
        one.unmap(0, 4)
        for slot in range(4):
            other.map(slot, ExtentRun(3 - slot, 1))
        assert [other.value(slot) for slot in range(4)] == [4, 3, 2, 1]
        other.unmap(0, 4)

    def test_the_tail_of_a_run_is_unmapped_and_the_head_stays(self, one: Range) -> None:
        one.map(0, ExtentRun(0, 4))
        one.extents[:4].fill_(5)
        one.unmap(2, 2)
        assert (one.value(0), one.value(1)) == (5, 5)
        one.map(2, ExtentRun(6, 1))
        assert one.value(2) == 0
        one.unmap(0, 3)

    def test_two_ranges_do_not_affect_each_other(self, one: Range, other: Range) -> None:
        one.map(0, ExtentRun(0, 2))
        other.map(0, ExtentRun(2, 2))
        one.extents[:2].fill_(1)
        other.extents[:2].fill_(2)
        assert (one.value(1), other.value(0)) == (1, 2)
        one.unmap(0, 2)
        other.unmap(0, 2)

    @pytest.mark.parametrize("dtype", [*(getattr(torch, name) for name in SUPPORTED_DTYPES), torch.uint8])
    def test_tensors_of_every_dtype(self, created: MemoryBackend, one: Range, dtype: torch.dtype) -> None:
        one.map(0, ExtentRun(0, 2))
        rows = one.extent_bytes // dtype.itemsize // 8
        tensor = created.tensor(one.address, (rows, 2, 4), dtype)
        assert (tensor.dtype, tuple(tensor.shape), tensor.device) == (dtype, (rows, 2, 4), created.device)
        assert tensor.is_contiguous()
        tensor.copy_(torch.arange(8, dtype=dtype).view(2, 4).expand(rows, 2, 4))
        assert tensor[rows - 1, 1].tolist() == [4, 5, 6, 7]
        one.unmap(0, 2)

    def test_index_select_of_mapped_rows_and_slices_of_a_half_mapped_tensor(self, one: Range) -> None:
        one.map(0, ExtentRun(0, 3))
        one.extents[2].fill_(9)
        chosen = one.extents.index_select(0, torch.tensor([2, 0], device=one.extents.device))
        assert chosen[:, 0].tolist() == [9, 0]
        assert one.extents[3:, :4].shape == (3, 4)
        one.unmap(0, 3)

    def test_more_than_the_device_has_is_refused(self, backend: MemoryBackend, extent_bytes: int) -> None:
        with pytest.raises(ConfigError, match=r"device_memory_bytes: \d+ bytes requested"):
            backend.create(extent_bytes, 1 << 40)

    def test_a_second_backend_sees_the_same_extents(self, created: MemoryBackend, one: Range) -> None:
        beside = created.beside(created.export(0, COUNT))
        beside.create(one.extent_bytes, COUNT)
        there = Range(beside, one.extent_bytes)
        one.map(0, ExtentRun(2, 3))
        one.extents[1].fill_(7)
        there.map(4, ExtentRun(3, 1))
        assert there.value(4) == 7
        there.extents[4].fill_(9)
        assert one.value(1) == 9
        there.unmap(4, 1)
        there.close()
        beside.close()
        assert one.value(1) == 9
        one.unmap(0, 3)

    def test_a_second_backend_sees_extents_again_after_they_were_released_and_recreated(
        self, created: MemoryBackend, one: Range
    ) -> None:
        beside = created.beside(created.export(0, COUNT))
        beside.create(one.extent_bytes, COUNT)
        there, away = Range(beside, one.extent_bytes), [ExtentRun(1, 2), ExtentRun(4, 1)]
        one.map(0, ExtentRun(0, 1))
        one.extents[0].fill_(5)
        for _ in range(2):
            beside.give_up(away)
            created.give_up(away)
            created.take_back(away)
            beside.take_back(away, created.export(0, COUNT))
            one.map(1, ExtentRun(1, 4))
            there.map(0, ExtentRun(0, 5))
            assert [there.value(slot) for slot in (0, 1, 2, 4)] == [5, 0, 0, 0]
            one.extents[2].fill_(7)
            assert there.value(2) == 7
            there.unmap(0, 5)
            one.unmap(1, 4)
        one.unmap(0, 1)
        there.close()
        beside.close()

    def test_extents_are_created_once(self, created: MemoryBackend, extent_bytes: int) -> None:
        with pytest.raises(InvariantViolation):
            created.create(extent_bytes, COUNT)

    def test_a_mapping_after_the_end_of_the_backend_is_refused(self, created: MemoryBackend, one: Range) -> None:
        created.close()
        created.close()
        with pytest.raises(InvariantViolation):
            one.map(0, ExtentRun(0, 1))
