from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from ballast.common.errors import ConfigError, InvariantViolation
from services.worker.memory.device import DeviceMemory
from services.worker.memory.host import HostBackend
from services.worker.memory.kv_cache import KvGeometry, KvShape
from tests.unit.worker.memory.models import (
    EXTENT_BYTES,
    EXTENTS_PER_LAYER,
    KV_EXTENTS_PER_LAYER,
    KV_SHAPE,
    LAYERS,
    fill_layer,
    open_small,
)

BLOCKS = KV_EXTENTS_PER_LAYER * EXTENT_BYTES // KV_SHAPE.block_bytes


@pytest.fixture
def memory() -> Iterator[DeviceMemory]:
    with open_small(HostBackend()) as made:
        yield made


def test_the_geometry_matches_the_mapped_memory(memory: DeviceMemory) -> None:
    expected = KvGeometry(
        block_tokens=4, block_bytes=2 * 4 * 2 * 24 * 4, block_count=32, kv_bytes_per_token=LAYERS * 2 * 2 * 24 * 4
    )
    assert memory.kv.geometry == expected
    assert memory.kv.block_count == BLOCKS == 32


def test_blocks_are_cleared_before_they_may_be_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU they are cleared on the engine's stream, and KV is received on others."""
    seen: list[int] = []  # extents of the KV at each wait for the device
    with open_small(HostBackend(), kv_shape=replace(KV_SHAPE, dtype=torch.bfloat16)) as memory:
        windows = memory.kv.windows
        monkeypatch.setattr(
            memory.pool.backend, "synchronise", lambda: seen.append(sum(window.extent_count for window in windows))
        )

        def require_waits(*changes: Callable[[], int]) -> None:
            for change in changes:
                change()
                assert seen[-1] == sum(window.extent_count for window in windows)

        require_waits(lambda: memory.drop_layers([1]), memory.release_retired)
        memory.make_room_for_layers([1], block_count=10)
        require_waits(memory.open_window, lambda: memory.shrink_leaving(1), memory.close_leaving)


def test_a_layer_is_one_contiguous_tensor_with_room_for_the_whole_budget_twice(memory: DeviceMemory) -> None:
    kv = memory.kv.layer(1)
    assert tuple(kv.shape[1:]) == (2, 4, 2, 24)
    assert kv.is_contiguous()
    second = memory.kv.windows[1].first_block
    assert second >= memory.pool.extent_count * EXTENT_BYTES // KV_SHAPE.block_bytes
    assert second * KV_SHAPE.block_bytes % EXTENT_BYTES == 0
    assert kv.shape[0] == 2 * second
    assert memory.kv.layer(1) is kv


def test_layers_and_blocks_do_not_share_memory(memory: DeviceMemory) -> None:
    for layer in range(LAYERS):
        for block in range(BLOCKS):
            memory.kv.layer(layer)[block].fill_(layer * 100 + block)
    for layer in range(LAYERS):
        found = memory.kv.layer(layer)[:BLOCKS].flatten(1)
        assert found.amin(1).tolist() == found.amax(1).tolist() == [layer * 100 + b for b in range(BLOCKS)]


def test_the_guard_stops_at_the_last_block(memory: DeviceMemory) -> None:
    memory.kv.guard(BLOCKS, range(4))
    with pytest.raises(InvariantViolation, match=f"block {BLOCKS} is used, but there are {BLOCKS}"):
        memory.kv.guard(BLOCKS + 1, range(4))


def test_growth_gives_clean_blocks_and_keeps_the_old_ones(memory: DeviceMemory) -> None:
    for layer in range(LAYERS):
        memory.kv.layer(layer)[:BLOCKS].fill_(3.0)
        fill_layer(memory, layer)
    for tensor in memory.parameters.layer(0).values():
        tensor.fill_(float("nan"))
    memory.parameters.drop([0, 1])
    grown = memory.kv.window.grow(2)
    assert grown == memory.kv.block_count == (KV_EXTENTS_PER_LAYER + 2) * EXTENT_BYTES // KV_SHAPE.block_bytes
    for layer in range(LAYERS):
        assert memory.kv.layer(layer)[:BLOCKS].unique().tolist() == [3.0]
        assert not memory.kv.layer(layer)[BLOCKS:grown].any()
    memory.check()


def test_a_block_across_the_seam_of_two_extents_is_whole(memory: DeviceMemory) -> None:
    """16,384 is not a multiple of 1,536, so a block straddles each boundary. It is usable only if both extents are
    mapped.
    """
    per_extent = EXTENT_BYTES // KV_SHAPE.block_bytes
    kv = memory.kv.layer(0)
    kv[:BLOCKS].fill_(1.0)
    left = memory.kv.window.shrink(2, used_blocks_end=per_extent)
    assert left == per_extent
    grown = memory.kv.window.grow(1)
    assert grown == 2 * EXTENT_BYTES // KV_SHAPE.block_bytes
    kv[per_extent].fill_(2.0)
    assert kv[per_extent].unique().tolist() == [2.0]
    assert kv[:per_extent].unique().tolist() == [1.0]


def test_shrinking_below_a_block_in_use_is_refused(memory: DeviceMemory) -> None:
    with pytest.raises(InvariantViolation, match="1 extents less per layer leave 21 blocks, those below 22 are in use"):
        memory.kv.window.shrink(1, used_blocks_end=22)
    assert memory.kv.block_count == BLOCKS
    with pytest.raises(InvariantViolation, match="leave 0 blocks"):
        memory.kv.window.shrink(KV_EXTENTS_PER_LAYER + 1, used_blocks_end=0)
    memory.check()
    assert memory.kv.window.shrink(1, used_blocks_end=21) == 21


def test_growth_beyond_the_free_extents_is_refused_and_changes_nothing(memory: DeviceMemory) -> None:
    assert memory.pool.free_count == 1
    with pytest.raises(InvariantViolation, match="needs 4 extents, but 1 are free"):
        memory.kv.window.grow(1)
    assert memory.kv.block_count == BLOCKS
    memory.check()


def test_dropping_the_kv_of_dropped_layers_lets_the_others_grow(memory: DeviceMemory) -> None:
    memory.parameters.drop([2, 3])
    assert memory.kv.window.drop(2) == memory.kv.window.drop(3) == KV_EXTENTS_PER_LAYER
    memory.check()
    assert memory.kv.held_layers == (0, 1)
    assert memory.kv.geometry.kv_bytes_per_token == 2 * 2 * 2 * 24 * 4
    extents = (2 * EXTENTS_PER_LAYER + 2 * KV_EXTENTS_PER_LAYER) // 2
    assert memory.kv.window.grow(extents) == (KV_EXTENTS_PER_LAYER + extents) * EXTENT_BYTES // KV_SHAPE.block_bytes
    memory.check()


def test_the_kv_of_a_layer_is_dropped_once(memory: DeviceMemory) -> None:
    memory.kv.window.drop(1)
    with pytest.raises(InvariantViolation, match="not held"):
        memory.kv.window.drop(1)
    memory.kv.guard(BLOCKS, (0, 2, 3))
    with pytest.raises(InvariantViolation, match="block 0 is used, but there are 0"):
        memory.kv.guard(1, range(4))
    memory.check()


def test_the_guard_determines_the_window_from_the_block(memory: DeviceMemory) -> None:
    memory.kv.window.shrink(2, used_blocks_end=0)
    left = memory.kv.block_count
    extents = memory.pool.free_count // LAYERS
    memory.open_window()
    second = memory.kv.windows[1].first_block
    assert memory.kv.block_count == extents * EXTENT_BYTES // KV_SHAPE.block_bytes > left
    memory.kv.guard(left, range(4))
    memory.kv.guard(second + memory.kv.block_count, range(4))
    with pytest.raises(InvariantViolation, match=f"block {left} is used, but there are {left} from block 0 on"):
        memory.kv.guard(left + 1, range(4))
    with pytest.raises(InvariantViolation, match=f"there are {memory.kv.block_count} from block {second} on"):
        memory.kv.guard(second + memory.kv.block_count + 1, range(4))


@pytest.mark.parametrize("field", ["layer_count", "block_tokens", "kv_heads", "head_dim"])
def test_a_shape_without_extent_is_refused(field: str) -> None:
    sizes = {"layer_count": 1, "block_tokens": 1, "kv_heads": 1, "head_dim": 1, field: 0}
    with pytest.raises(ConfigError, match=f"kv_cache.{field}: must be at least 1"):
        KvShape(**sizes, dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    shape = KvShape(layer_count=2, block_tokens=16, kv_heads=2, head_dim=8, dtype=dtype)
    with DeviceMemory.open(HostBackend(), budget_bytes=1 << 20, layers=[], others={}, kv_shape=shape) as memory:
        assert memory.kv.layer(0).dtype == dtype
        assert memory.kv.block_count == (1 << 19) // (2 * 16 * 2 * 8 * dtype.itemsize)
        memory.kv.layer(1)[memory.kv.block_count - 1].fill_(2)


def test_a_non_float_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache\.dtype"):
        KvShape(layer_count=1, block_tokens=1, kv_heads=1, head_dim=1, dtype=torch.int8)
