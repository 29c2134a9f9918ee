"""Any history of drops, restores, growth and shrinking leaves the books right and every byte where it belongs."""

from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.worker.memory.backend import MemoryBackend
from services.worker.memory.cuda import CudaBackend
from services.worker.memory.device import DeviceMemory
from services.worker.memory.host import HostBackend
from tests.unit.worker.memory.models import EXTENT_BYTES, KV_SHAPE, LAYERS, OTHERS, fill_layer, open_small
from tests.unit.worker.memory.simulated_driver import SimulatedDriver


class MemoryMachine(RuleBasedStateMachine):
    """Writes a different value into every block it uses, and knows which blocks and layers must be intact."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: DeviceMemory = open_small(self.make_backend())
        self.checksums: dict[int, bytes] = {}  # layer -> checksum of its right contents
        for layer in range(LAYERS):
            fill_layer(self.memory, layer)
            self.checksums[layer] = self.memory.parameters.layer_checksum(layer)
        for name in OTHERS:
            for tensor in self.memory.parameters.part(name).values():
                tensor.fill_(0.25)
        self.part_checksums = {name: self.memory.parameters.part_checksum(name) for name in OTHERS}
        self.addresses = [self.memory.kv.layer(i).data_ptr() for i in range(LAYERS)]
        self.used_blocks: dict[int, float] = {}  # block -> value it is filled with in every layer held
        self.next_value = 1.0

    def make_backend(self) -> MemoryBackend:
        return HostBackend()

    @rule(layers=st.sets(st.integers(0, LAYERS - 1), min_size=1))
    def drop_parameters(self, layers: set[int]) -> None:
        held = [layer for layer in layers if layer in self.memory.parameters.held_layers]
        freed = self.memory.pool.free_count
        freed += self.memory.parameters.drop(held)
        assert self.memory.pool.free_count == freed

    @rule(layer=st.integers(0, LAYERS - 1))
    def restore_parameters(self, layer: int) -> None:
        parameters = self.memory.parameters
        if layer in parameters.held_layers or parameters.extents_of(layer) > self.memory.pool.free_count:
            return
        parameters.restore(layer)
        fill_layer(self.memory, layer)

    @rule(extents=st.integers(0, 3))
    def grow_kv(self, extents: int) -> None:
        if extents * len(self.memory.kv.held_layers) <= self.memory.pool.free_count:
            assert self.memory.kv.grow(extents) == self.memory.kv.block_count

    @rule(extents=st.integers(0, 3))
    def shrink_kv(self, extents: int) -> None:
        kv = self.memory.kv
        used_end = max(self.used_blocks, default=-1) + 1
        smallest_bytes = min((r for r in self.mapped_bytes()), default=0)
        if (smallest_bytes - extents * EXTENT_BYTES) // KV_SHAPE.block_bytes >= used_end and smallest_bytes >= (
            extents * EXTENT_BYTES
        ):
            kv.shrink(extents, used_blocks_end=used_end)

    @precondition(lambda self: len(self.memory.kv.held_layers) > 1)
    @rule(layer=st.integers(0, LAYERS - 1))
    def drop_kv(self, layer: int) -> None:
        if layer in self.memory.kv.held_layers:
            self.memory.kv.drop(layer)

    @rule(layer=st.integers(0, LAYERS - 1))
    def restore_kv(self, layer: int) -> None:
        kv = self.memory.kv
        if layer in kv.held_layers or kv.extents_for_blocks(kv.block_count) > self.memory.pool.free_count:
            return
        blocks = kv.block_count
        kv.expect(layer, kv.extents_for_blocks(blocks))
        assert layer not in kv.held_layers
        assert kv.adopt() == blocks
        for block, value in self.used_blocks.items():
            kv.layer(layer)[block].fill_(value)

    @precondition(lambda self: self.memory.kv.block_count > 0)
    @rule(data=st.data())
    def write_block(self, data: Any) -> None:  # hypothesis names the type of `data()` in private only
        block = data.draw(st.integers(0, self.memory.kv.block_count - 1))
        self.memory.kv.guard(block + 1, self.memory.kv.held_layers)
        self.used_blocks[block] = self.next_value
        for layer in self.memory.kv.held_layers:
            self.memory.kv.layer(layer)[block].fill_(self.next_value)
        self.next_value += 1.0

    @precondition(lambda self: self.used_blocks)
    @rule(data=st.data())
    def free_block(self, data: Any) -> None:
        del self.used_blocks[data.draw(st.sampled_from(sorted(self.used_blocks)))]

    @invariant()
    def the_books_balance(self) -> None:
        self.memory.check()

    @invariant()
    def every_block_holds_what_was_written(self) -> None:
        blocks = torch.tensor(sorted(self.used_blocks), dtype=torch.int64)
        expected = [self.used_blocks[int(block)] for block in blocks]
        for layer in self.memory.kv.held_layers:
            found = self.memory.kv.layer(layer).index_select(0, blocks).flatten(1)
            assert found.amin(1).tolist() == found.amax(1).tolist() == expected if expected else True

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

    def mapped_bytes(self) -> list[int]:
        return [self.memory.kv._ranges[layer].mapped_bytes for layer in self.memory.kv.held_layers]

    def teardown(self) -> None:
        self.memory.close()


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
