"""The numbers are those of the workers' device memory, whatever is dropped and comes back."""

import random

import pytest

from ballast.common.errors import ConfigError
from services.worker.memory.device import DeviceMemory
from services.worker.memory.host import HostBackend
from sim.memory import Geometry, VirtualMemory
from tests.unit.worker.memory.models import KV_SHAPE, LAYERS, open_small


def twin(memory: DeviceMemory) -> VirtualMemory:
    """The same sizes without extents."""
    sizes = {memory.parameters.extents_of(layer) for layer in range(LAYERS)}
    assert len(sizes) == 1, "all layers are equal"
    layer = sizes.pop()
    others = memory.report().parameter_bytes // memory.pool.extent_bytes - layer * LAYERS
    size = memory.pool.extent_bytes
    rest_bytes = memory.report().budget_bytes % size
    geometry = Geometry(size, memory.pool.extent_count, LAYERS, layer, others, KV_SHAPE.block_bytes, rest_bytes)
    return VirtualMemory(geometry)


def agree(real: DeviceMemory, virtual: VirtualMemory) -> None:
    virtual.check()
    assert virtual.block_count == real.kv.block_count
    assert virtual.report() == real.report()
    assert virtual.held == set(real.parameters.held_layers)
    assert virtual.kv_held == set(real.kv.held_layers)


@pytest.mark.parametrize("seed", range(10))
def test_a_drop_and_a_restore_leave_as_many_blocks_as_in_a_worker(seed: int) -> None:
    rng = random.Random(seed)
    with open_small(HostBackend()) as real:
        virtual = twin(real)
        agree(real, virtual)
        for _ in range(3):
            held = sorted(virtual.held)
            lost = (
                held[: rng.randint(1, len(held) - 1)] if rng.random() < 0.5 else held[rng.randint(1, len(held) - 1) :]
            )
            assert virtual.blocks_after_drop(lost) == real.blocks_after_drop(lost)
            assert virtual.drop_layers(lost) == real.drop_layers(lost)
            agree(real, virtual)
            for needed in sorted(rng.sample(range(real.home_block_count + 1), 2), reverse=True):
                assert virtual.shrink_retired(needed) == real.shrink_retired(needed)
                agree(real, virtual)
            assert virtual.release_retired() == real.release_retired()
            agree(real, virtual)
            assert virtual.home_block_count == real.home_block_count
            missing = [layer for layer in range(LAYERS) if layer not in virtual.held]
            beside = virtual.beside_block_count
            assert real.home_block_count <= beside == real.beside_block_count <= real.kv.block_count
            assert virtual.make_room_for_layers(missing) == beside
            assert real.make_room_for_layers(missing, used_blocks_end=beside) == beside
            agree(real, virtual)
            wide, narrow = virtual.divided_extents(2)
            assert (wide, narrow) == real.divided_extents(2)
            assert real.blocks_in(wide) <= beside
            assert virtual.make_room_for_kv(wide) == real.make_room_for_kv(wide, used_blocks_end=real.blocks_in(wide))
            virtual.expect_kv(narrow)
            for layer in virtual.arriving:
                real.kv.expect(layer, narrow)
            agree(real, virtual)
            assert virtual.level_kv() == real.level_kv()
            agree(real, virtual)
            assert virtual.block_count == real.home_block_count


def test_a_model_that_does_not_fit_is_told_with_its_size() -> None:
    with pytest.raises(ConfigError, match=r"22\.4 GiB for the model, whose parameters take 24\.2 GiB"):
        Geometry.choose(
            budget_bytes=24 * 10**9,
            layer_count=40,
            layer_parameter_bytes=625_000_000,
            other_parameter_bytes=10**9,
            block_bytes=1 << 20,
        )
