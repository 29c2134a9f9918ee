"""The simulated sizes of a device's memory."""

import pytest

from ballast.common.errors import ConfigError
from sim.memory import Geometry, SimMemory


def test_a_memory_matches_its_geometry_and_takes_time_to_change() -> None:
    geometry = Geometry.choose(
        budget_bytes=40 * 10**9,
        layer_count=4,
        layer_parameter_bytes=5 * 10**9,
        other_parameter_bytes=10**9,
        block_bytes=1 << 20,
    )
    spent: list[float] = []
    memory = SimMemory.of(geometry, 16, remap_s=0.25, takes_s=spent.append)
    assert memory.home_block_count == memory.kv.block_count == geometry.blocks_in(geometry.home_kv)
    assert memory.report().parameter_bytes == geometry.parameters * geometry.extent_bytes
    before = memory.kv.block_count
    assert memory.drop_layers([0, 1]) > before
    assert memory.release_retired() > 2 * before
    assert spent == [0.25, 0.25]
    memory.make_room_for_layers([0, 1], block_count=memory.leaving_block_count)
    assert memory.open_window() < memory.shrink_leaving(1) < memory.close_leaving() == before
    assert spent == [0.25] * 6
    memory.check()


def test_a_model_that_does_not_fit_is_reported_with_its_size() -> None:
    with pytest.raises(ConfigError, match=r"22\.4 GiB for the model, whose parameters take 24\.2 GiB"):
        Geometry.choose(
            budget_bytes=24 * 10**9,
            layer_count=40,
            layer_parameter_bytes=625_000_000,
            other_parameter_bytes=10**9,
            block_bytes=1 << 20,
        )
