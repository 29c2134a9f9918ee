"""In any history of drops, restores and windows, the accounting stays consistent and no byte is lost or overwritten."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ballast.common.errors import InvariantViolation
from services.worker.memory.backend import MemoryBackend
from services.worker.memory.cuda import CudaBackend
from services.worker.memory.device import DeviceMemory
from services.worker.memory.host import HostBackend
from services.worker.memory.kv_cache import KvWindow
from tests.unit.worker.memory.models import LAYERS, OTHERS, fill_layer, open_small
from tests.unit.worker.memory.simulated_driver import SimulatedDriver

Values = dict[int, float]  # block -> value it is filled with


class MemoryMachine(RuleBasedStateMachine):
    """Writes a distinct value into every block that it uses, and tracks which blocks and layers must be intact."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: DeviceMemory = open_small(self.make_backend())
        self.checksums: dict[int, bytes] = {}  # layer -> checksum of its intact contents
        for layer in range(LAYERS):
            fill_layer(self.memory, layer)
            self.checksums[layer] = self.memory.parameters.layer_checksum(layer)
        for name in OTHERS:
            for tensor in self.memory.parameters.part(name).values():
                tensor.fill_(0.25)
        self.part_checksums = {name: self.memory.parameters.part_checksum(name) for name in OTHERS}
        self.addresses = [self.memory.kv.layer(i).data_ptr() for i in range(LAYERS)]
        self.used: Values = {}  # in every layer of the current window
        self.used_leaving: Values = {}
        self.used_retired: dict[int, Values] = {}  # dropped layer -> its values at the time of the drop
        self.next_value = 1.0

    def make_backend(self) -> MemoryBackend:
        return HostBackend()

    @property
    def missing(self) -> list[int]:
        return [layer for layer in range(LAYERS) if layer not in self.memory.parameters.held_layers]

    # ------------------------------------------------------------ drops

    @precondition(lambda self: self.memory.leaving is None and not self.missing)
    @rule(layers=st.sets(st.integers(0, LAYERS - 1), min_size=1, max_size=LAYERS - 1))
    def drop_layers(self, layers: set[int]) -> None:
        memory, kv = self.memory, self.memory.kv
        given_up = [layer for layer in sorted(layers) if layer in kv.held_layers]
        if len(given_up) == len(kv.held_layers):
            return
        before, expected = kv.block_count, memory.blocks_after_drop(given_up)
        retired_before = kv.retired_layers
        for layer in given_up:
            self.used_retired[layer] = dict(self.used)
        blocks = memory.drop_layers(given_up)
        assert before <= blocks == kv.block_count <= expected
        if not retired_before and not self.used_retired:
            assert memory.release_retired() == expected

    @precondition(lambda self: self.memory.kv.retired_layers)
    @rule(data=st.data())
    def shrink_retired(self, data: Any) -> None:  # hypothesis keeps the type of `data()` private
        """Shrinks the retired layers to blocks below `target`, with the same moves in each layer."""
        ends = {block for values in self.used_retired.values() for block in values}
        target = data.draw(st.integers(0, max(ends, default=-1) + 1))
        moves = self.compaction(ends, target, self.memory.kv.window)
        before = self.memory.kv.block_count
        assert self.memory.shrink_retired(target, moves) >= before
        self.used_retired = {layer: moved(values, moves, target) for layer, values in self.used_retired.items()}

    @rule()
    def release_retired(self) -> None:
        before = self.memory.kv.block_count
        assert self.memory.release_retired() >= before
        assert not self.memory.kv.retired_layers
        self.used_retired.clear()

    # ------------------------------------------------------------ restores

    @precondition(lambda self: self.memory.leaving is None and not self.memory.kv.retired_layers)
    @rule(data=st.data())
    def make_room(self, data: Any) -> None:
        """Even with `leaving_block_count` blocks retained, there must be room for all parameters and another window."""
        memory = self.memory
        most = memory.leaving_block_count
        assert min(1, memory.kv.block_count) <= most <= memory.kv.block_count
        target = most if data.draw(st.booleans()) else data.draw(st.integers(0, most))
        moves = self.compaction(self.used, target, memory.kv.window)
        memory.move(moves)
        self.used = moved(self.used, moves, memory.kv.window.first_block + target)
        missing = self.missing
        layers = missing if data.draw(st.booleans()) else missing[: data.draw(st.integers(0, len(missing)))]
        assert target <= memory.make_room_for_layers(layers, block_count=target) <= most
        for layer in layers:
            fill_layer(memory, layer)
        if not self.missing:
            assert memory.pool.free_count >= LAYERS

    @rule()
    def open_window(self) -> None:
        memory = self.memory
        free_count, window = memory.pool.free_count, memory.kv.window
        if memory.leaving is not None or self.missing or free_count < LAYERS:
            with pytest.raises(InvariantViolation, match="a window"):
                memory.open_window()
            assert memory.kv.window is window
            return
        blocks, held = window.block_count, window.held_layers
        assert memory.open_window() == memory.kv.block_count == memory.blocks_in(free_count // LAYERS)
        assert memory.leaving is window
        assert (window.block_count, window.held_layers) == (blocks, held)
        assert memory.kv.held_layers == tuple(range(LAYERS))
        self.used, self.used_leaving = {}, self.used

    @precondition(lambda self: self.memory.leaving is not None)
    @rule(data=st.data())
    def shrink_leaving(self, data: Any) -> None:
        leaving = self.leaving
        target = data.draw(st.integers(0, leaving.block_count))
        moves = self.compaction(self.used_leaving, target, leaving)
        self.memory.move_leaving(moves)
        self.used_leaving = moved(self.used_leaving, moves, leaving.first_block + target)
        before = self.memory.kv.block_count
        assert self.memory.shrink_leaving(target) >= before
        assert leaving.block_count >= target
        assert leaving.extents_per_layer == leaving.extents_for_blocks(target) or leaving.block_count == target

    @precondition(lambda self: self.memory.leaving is not None)
    @rule()
    def close_leaving(self) -> None:
        leaving = self.leaving
        assert self.memory.close_leaving() == self.memory.home_block_count
        assert (leaving.held_layers, leaving.extent_count) == ((), 0)
        self.used_leaving.clear()
        self.used_retired.clear()

    # ------------------------------------------------------------ use

    @rule(data=st.data(), leaving=st.booleans())
    def write_block(self, data: Any, leaving: bool) -> None:
        window = self.memory.leaving if leaving else self.memory.kv.window
        if window is None or not window.block_count:
            return
        block = window.first_block + data.draw(st.integers(0, window.block_count - 1))
        self.memory.kv.guard(block + 1, window.held_layers)
        with pytest.raises(InvariantViolation, match="is used, there are"):
            self.memory.kv.guard(window.first_block + window.block_count + 1, window.held_layers)
        (self.used_leaving if leaving else self.used)[block] = self.next_value
        for layer in window.held_layers:
            self.memory.kv.layer(layer)[block].fill_(self.next_value)
        self.next_value += 1.0

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def free_block(self, data: Any) -> None:
        del self.used[data.draw(st.sampled_from(sorted(self.used)))]

    # ------------------------------------------------------------ invariants

    @invariant()
    def the_books_balance(self) -> None:
        self.memory.check()

    @invariant()
    def every_block_holds_what_was_written(self) -> None:
        kv = self.memory.kv
        self.require(kv.held_layers, self.used)
        if self.memory.leaving is not None:
            self.require(self.memory.leaving.held_layers, self.used_leaving)
        for layer, values in self.used_retired.items():
            self.require([layer], values)

    @invariant()
    def every_parameter_is_right(self) -> None:
        parameters = self.memory.parameters
        assert {i: parameters.layer_checksum(i) for i in parameters.held_layers} == {
            i: self.checksums[i] for i in parameters.held_layers
        }
        assert {name: parameters.part_checksum(name) for name in OTHERS} == self.part_checksums

    @invariant()
    def nothing_has_moved(self) -> None:
        assert [self.memory.kv.layer(i).data_ptr() for i in range(LAYERS)] == self.addresses

    def require(self, layers: Iterable[int], values: Values) -> None:
        blocks = torch.tensor(sorted(values), dtype=torch.int64)
        expected = [values[int(block)] for block in blocks]
        for layer in layers if expected else ():
            found = self.memory.kv.layer(layer).index_select(0, blocks).flatten(1)
            assert found.amin(1).tolist() == found.amax(1).tolist() == expected

    def compaction(self, used: Collection[int], target: int, window: KvWindow) -> list[tuple[int, int]]:
        """Moves that bring the window's blocks below `target`. A block is not moved if no place is free."""
        room = range(window.first_block, window.first_block + target)
        free = [block for block in room if block not in used]
        return list(zip([block for block in sorted(used) if block not in room], free, strict=False))

    @property
    def leaving(self) -> KvWindow:
        assert self.memory.leaving is not None
        return self.memory.leaving

    def teardown(self) -> None:
        self.memory.close()


def moved(values: Values, moves: Sequence[tuple[int, int]], end: int) -> Values:
    """The values below `end` after the moves."""
    where = dict(moves)
    return {where.get(block, block): value for block, value in values.items() if where.get(block, block) < end}


class SimulatedGpuMachine(MemoryMachine):
    def make_backend(self) -> MemoryBackend:
        self.driver = SimulatedDriver()
        return CudaBackend(self.driver)

    def teardown(self) -> None:
        super().teardown()
        self.driver.require_empty()


_settings = settings(max_examples=80, stateful_step_count=30, deadline=None, derandomize=True)
TestHostMemory = MemoryMachine.TestCase
TestHostMemory.settings = _settings
TestSimulatedGpuMemory = SimulatedGpuMachine.TestCase
TestSimulatedGpuMemory.settings = _settings
