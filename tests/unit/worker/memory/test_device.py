import dataclasses
import gc
import os
from pathlib import Path

import pytest
import torch

from ballast.common.errors import ConfigError, InvariantViolation
from services.worker.memory.cuda import CudaBackend
from services.worker.memory.device import DeviceMemory
from services.worker.memory.extent_size import choose_extent_bytes
from services.worker.memory.host import HostBackend
from services.worker.memory.kv_cache import KvShape
from tests.unit.worker.memory.models import (
    BUDGET_BYTES,
    EXTENT_BYTES,
    EXTENTS_PER_LAYER,
    KV_EXTENTS_PER_LAYER,
    KV_SHAPE,
    LAYERS,
    OTHER_EXTENTS,
    REMAINDER_BYTES,
    fill_layer,
    open_small,
)
from tests.unit.worker.memory.simulated_driver import SimulatedDriver


def test_parameters_kv_and_free_memory_add_up_to_the_budget() -> None:
    with open_small(HostBackend()) as memory:
        report = memory.report()
        report.check()
        memory.check()
    assert report.budget_bytes == BUDGET_BYTES
    assert report.parameter_bytes == (LAYERS * EXTENTS_PER_LAYER + OTHER_EXTENTS) * EXTENT_BYTES
    assert report.kv_bytes == LAYERS * KV_EXTENTS_PER_LAYER * EXTENT_BYTES
    assert report.free_bytes == EXTENT_BYTES + REMAINDER_BYTES


def test_the_smallest_budget_that_holds_the_model_is_named_and_suffices() -> None:
    parameter_bytes = (LAYERS * EXTENTS_PER_LAYER + OTHER_EXTENTS) * EXTENT_BYTES
    smallest = parameter_bytes + LAYERS * EXTENT_BYTES
    with pytest.raises(ConfigError) as caught:
        open_small(HostBackend(), budget_bytes=smallest - 1)
    assert caught.value.path == "device_memory_bytes"
    assert f"parameters take {parameter_bytes >> 10}.0 KiB" in caught.value.why
    assert f"one KV block of 4 tokens in each layer {LAYERS * EXTENT_BYTES >> 10}.0 KiB" in caught.value.why
    assert f"{smallest} bytes are the minimum" in caught.value.why
    with open_small(HostBackend(), budget_bytes=smallest) as memory:
        assert memory.kv.block_count >= 1
        assert memory.pool.free_count == 0
        memory.check()


def test_neither_use_nor_failure_leaks_memory() -> None:
    def fds() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def mapped_bytes() -> int:
        statm = Path("/proc/self/statm").read_text(encoding="ascii").split()
        return int(statm[0]) * 4096

    def shared_lines() -> int:
        return Path("/proc/self/maps").read_text(encoding="utf-8").count("ballast-device-memory")

    def use() -> None:
        with open_small(HostBackend()) as memory:
            memory.parameters.drop([1, 2])
            memory.kv.window.grow(2)
            memory.kv.layer(0)[: memory.kv.block_count].fill_(1)
            memory.close()
        with pytest.raises(ConfigError):
            open_small(HostBackend(), budget_bytes=1 << 18)
        with pytest.raises(ConfigError):
            open_small(HostBackend(), budget_bytes=1 << 60)

    use()
    gc.collect()
    before = (fds(), shared_lines())
    address_space_before = mapped_bytes()
    for _ in range(20):
        use()
    gc.collect()
    assert (fds(), shared_lines()) == before == (before[0], 0)
    assert mapped_bytes() - address_space_before < 4 * BUDGET_BYTES  # one leaked memory would map more than that


def test_drops_and_restores_on_the_gpu_backend() -> None:
    driver = SimulatedDriver()
    with open_small(CudaBackend(driver)) as memory:
        fill_layer(memory, 1)
        checksum, blocks = memory.parameters.layer_checksum(1), memory.kv.block_count
        memory.kv.layer(3)[:blocks].fill_(4.0)
        memory.parameters.drop([0, 2])
        grown = memory.kv.window.grow(2)
        memory.check()
        assert memory.kv.layer(3)[:blocks].unique().tolist() == [4.0]
        assert not memory.kv.layer(3)[blocks:grown].any()
        memory.kv.window.shrink(2, used_blocks_end=blocks)
        memory.parameters.restore(2)
        memory.parameters.restore(0)
        memory.check()
        assert memory.parameters.layer_checksum(1) == checksum
    driver.require_empty()


def test_dropped_layers_are_released_block_by_block() -> None:
    with open_small(HostBackend()) as memory:
        before = memory.kv.block_count
        for block in range(before):
            memory.kv.layer(3)[block].fill_(float(block))
        dropped = memory.drop_layers([3])
        assert memory.shrink_retired(before) == dropped
        per_extent = EXTENT_BYTES // KV_SHAPE.block_bytes
        needed = per_extent + 1  # ends in the second of three extents
        moves = [(before - 1 - i, i) for i in range(3)]
        grown = memory.shrink_retired(needed, moves)
        memory.check()
        assert grown >= dropped
        assert memory.kv.layer(3)[:4, 0, 0, 0, 0].tolist() == [before - 1, before - 2, before - 3, 3.0]
        assert memory.pool.extent_count - memory.pool.free_count == (
            (LAYERS - 1) * (EXTENTS_PER_LAYER + memory.kv.extents_per_layer) + OTHER_EXTENTS + 2
        )
        after = memory.shrink_retired(0)
        assert memory.release_retired() == after > dropped
        memory.check()


def restored(memory: DeviceMemory) -> None:
    """A stage that held the first two layers now has all parameters again, and retains as much KV as a draining group
    may.
    """
    memory.drop_layers([2, 3])
    memory.release_retired()
    memory.make_room_for_layers([2, 3], block_count=memory.leaving_block_count)


def test_the_kv_of_two_groups_coexists_until_the_old_group_has_ended() -> None:
    with open_small(HostBackend()) as memory:
        kv, home = memory.kv, memory.home_block_count
        restored(memory)
        old = kv.window
        for layer in (0, 1):
            for block in range(kv.block_count):
                kv.layer(layer)[block].fill_(float(block))
        opened = memory.open_window()
        assert memory.leaving is old
        assert (kv.held_layers, old.held_layers) == ((0, 1, 2, 3), (0, 1))
        second = kv.window.first_block
        assert second == kv.windows[1].first_block
        kv.layer(3)[second + opened - 1].fill_(-1.0)
        memory.move_leaving([(9, 1), (8, 0)])
        kept = memory.shrink_leaving(3)
        memory.check()
        assert home > kept > opened
        assert [kv.layer(1)[block].unique().tolist() for block in range(3)] == [[8.0], [9.0], [2.0]]
        assert kv.layer(3)[second + opened - 1].unique().tolist() == [-1.0]
        assert memory.close_leaving() == kv.block_count == home
        assert memory.leaving is None
        assert old.extent_count == 0
        memory.check()


def test_the_next_restore_uses_the_first_window_again() -> None:
    with open_small(HostBackend()) as memory:
        for at in (1, 0, 1):
            restored(memory)
            memory.open_window()
            assert memory.kv.window is memory.kv.windows[at]
            assert memory.close_leaving() == memory.home_block_count
            memory.check()


def test_a_member_may_release_all_of_its_kv() -> None:
    with open_small(HostBackend()) as memory:
        memory.drop_layers([0])
        memory.release_retired()
        assert memory.make_room_for_layers([0], block_count=0) == 0
        assert memory.open_window() == memory.home_block_count
        assert memory.shrink_leaving(0) == memory.close_leaving() == memory.home_block_count
        memory.check()


def test_retained_kv_leaves_room_for_every_layer_in_the_other_window() -> None:
    shape = dataclasses.replace(KV_SHAPE, head_dim=32)  # eight blocks per extent
    with open_small(HostBackend(), BUDGET_BYTES + 13 * LAYERS * EXTENT_BYTES, kv_shape=shape) as memory:
        assert memory.kv.extents_per_layer == 16
        memory.drop_layers([1, 2, 3])
        memory.release_retired()
        assert memory.kv.extents_per_layer == 16 * LAYERS + 3 * EXTENTS_PER_LAYER + 1
        assert memory.leaving_block_count == memory.blocks_in(16 * LAYERS - 2 * LAYERS)
        memory.make_room_for_layers([1, 2, 3], block_count=memory.leaving_block_count)
        assert memory.open_window() == memory.blocks_in(2)


def test_a_window_is_opened_only_if_its_memory_is_available() -> None:
    with open_small(HostBackend()) as memory:
        with pytest.raises(InvariantViolation, match="at least 4 extents is opened, 1 are free"):
            memory.open_window()
        for act in (memory.close_leaving, lambda: memory.shrink_leaving(0), lambda: memory.move_leaving([])):
            with pytest.raises(InvariantViolation, match="no draining window"):
                act()
        memory.drop_layers([3])
        with pytest.raises(InvariantViolation, match=r"only layers \(0, 1, 2\) are held"):
            memory.open_window()
        memory.release_retired()
        memory.make_room_for_layers([3], block_count=0)
        memory.open_window()
        with pytest.raises(InvariantViolation, match="has not been closed"):
            memory.open_window()
        memory.check()


def test_check_finds_an_unused_window() -> None:
    with open_small(HostBackend()) as memory:
        memory.make_room_for_layers([], block_count=0)
        memory.open_window()
        memory.leaving = None
        with pytest.raises(InvariantViolation, match="neither current nor draining"):
            memory.check()


def test_a_gpu_with_too_little_memory_is_left_clean() -> None:
    driver = SimulatedDriver(available_bytes=BUDGET_BYTES // 2)
    with pytest.raises(ConfigError, match="device_memory_bytes"):
        open_small(CudaBackend(driver))
    driver.require_empty()


@pytest.mark.parametrize(
    ("granularity_bytes", "budget_bytes", "layer_bytes", "layer_count", "expected"),
    [
        (4096, 8 << 20, 50_000, 4, 16 << 10),  # a toy model
        (4096, 256 << 20, 12 << 20, 4, 512 << 10),  # about a sixteenth of a layer, which leaves most room for KV
        (4096, 64 << 20, 12 << 20, 4, 256 << 10),  # about a sixteenth of a layer's KV, as there is little of it
        (4096, 64 << 30, 1 << 20, 4, 4 << 20),  # a large budget is not split into tiny extents
        (2 << 20, 80 << 30, 436 << 20, 32, 20 << 20),  # a multiple of the GPU's page size
        (2 << 20, 37 << 30, 551 << 20, 48, 8 << 20),  # 14B on 40 GB: a sixteenth of the parameters would be 34 MiB
        (2 << 20, 1 << 30, 100, 1, 2 << 20),
    ],
)
def test_the_extent_suits_the_model(
    granularity_bytes: int, budget_bytes: int, layer_bytes: int, layer_count: int, expected: int
) -> None:
    assert choose_extent_bytes(granularity_bytes, budget_bytes, [layer_bytes] * layer_count) == expected


def test_a_configured_extent_size_must_be_mappable() -> None:
    shape = KvShape(layer_count=1, block_tokens=1, kv_heads=1, head_dim=1, dtype=torch.float32)
    with pytest.raises(ConfigError, match="extent_bytes: must be a positive multiple of 4096"):
        DeviceMemory.open(HostBackend(), budget_bytes=1 << 20, layers=[], others={}, kv_shape=shape, extent_bytes=5000)


def test_a_parked_device_holds_no_layers_and_is_whole_once_woken() -> None:
    backend = HostBackend()
    with open_small(backend) as memory:
        for layer in range(LAYERS):
            fill_layer(memory, layer)
        before = memory.report()
        resident = _file_bytes(backend)
        for _ in range(3):
            memory.park()
            memory.check()
            assert memory.report().parameter_bytes == OTHER_EXTENTS * EXTENT_BYTES
            assert memory.report().kv_bytes == 0
            assert _file_bytes(backend) <= OTHER_EXTENTS * EXTENT_BYTES < resident
            with pytest.raises(InvariantViolation, match="free memory was returned"):
                memory.make_room_for_layers([0], block_count=0)
            memory.unpark()
            memory.make_room_for_layers(range(LAYERS), block_count=0)
            memory.open_window()
            memory.close_leaving()
            memory.check()
            assert memory.report() == before


def test_a_device_whose_memory_another_process_took_stays_parked(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_small(HostBackend()) as memory:
        memory.park()
        with monkeypatch.context() as patched:
            patched.setattr("services.worker.memory.host._available_bytes", lambda: EXTENT_BYTES)
            with pytest.raises(ConfigError, match="requested, but this machine has"):
                memory.unpark()
        memory.check()
        memory.unpark()
        memory.make_room_for_layers(range(LAYERS), block_count=0)
        memory.check()


def _file_bytes(backend: HostBackend) -> int:
    """Bytes that the backend's file really occupies."""
    fd = backend._fd  # pyright: ignore[reportPrivateUsage]
    assert fd is not None
    return os.fstat(fd).st_blocks * 512
