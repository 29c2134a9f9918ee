"""KV that goes to host memory and comes back."""

import pytest
import torch

from ballast.common.errors import InvariantViolation
from services.worker.core.events import BlockCopy
from services.worker.memory.device import DeviceMemory
from services.worker.memory.host import HostBackend
from services.worker.memory.host_blocks import HostBlocks
from services.worker.memory.kv_cache import KvShape
from services.worker.memory.parameters import PartSpec


def memory() -> DeviceMemory:
    shape = KvShape(layer_count=3, block_tokens=4, kv_heads=2, head_dim=8, dtype=torch.float32)
    parts: list[PartSpec] = [{}, {}, {}]
    return DeviceMemory.open(HostBackend(), budget_bytes=1 << 20, layers=parts, others={}, kv_shape=shape)


@pytest.mark.parametrize("gathered", [False, True], ids=["one by one", "as on a GPU"])
def test_blocks_come_back_as_they_left_in_every_layer_that_is_held(gathered: bool) -> None:
    with memory() as device, memory() as other_rank:
        device.kv.mirrors = (other_rank.kv,)
        kv, host = device.kv, HostBlocks(device.kv, 5)
        if gathered:
            host._copy_all = host._copy_gathered
        layers = [each for layer in range(3) for each in kv.of_ranks(layer)]
        for each in layers:
            each[:8] = torch.randn(8, 2, 4, 2, 8)
        before = [each[:8].clone() for each in layers]
        host.start([BlockCopy(True, (6, 1), (0, 4))], kv.held_layers)
        assert host.finish() > 0
        for each in layers:
            each[:8] = -1.0
        host.start([BlockCopy(False, (2, 7), (0, 4)), BlockCopy(True, (5,), (2,))], kv.held_layers)
        host.finish()
        for each, was in zip(layers, before, strict=True):
            assert torch.equal(each[2], was[6])
            assert torch.equal(each[7], was[1])
            assert (each[[0, 1, 3, 4, 5, 6]] == -1.0).all()
        host.close()
        host.close()


def test_only_layers_of_the_stage_are_copied() -> None:
    with memory() as device:
        kv, host = device.kv, HostBlocks(device.kv, 1)
        kv.window.drop(0)
        before = []
        for layer in (1, 2):
            kv.layer(layer)[0] = torch.randn(2, 4, 2, 8)
            before.append(kv.layer(layer)[0].clone())
        host.start([BlockCopy(True, (0,), (0,))], kv.held_layers)
        host.finish()
        for layer in (1, 2):
            kv.layer(layer)[:2] = -1.0
        host.start([BlockCopy(False, (1,), (0,))], kv.held_layers)
        host.finish()
        for layer in (1, 2):
            assert torch.equal(kv.layer(layer)[1], before[layer - 1])
        host.close()


def test_blocks_of_either_window_that_is_in_force() -> None:
    with memory() as device:
        kv, host = device.kv, HostBlocks(device.kv, 2)
        device.make_room_for_layers([], block_count=1)
        kept = [torch.randn(2, 4, 2, 8) for _ in range(3)]
        for layer in range(3):
            kv.layer(layer)[0] = kept[layer]
        host.start([BlockCopy(True, (0,), (1,))], kv.held_layers)
        host.finish()
        device.open_window()
        device.close_leaving()
        block = kv.window.first_block + 3
        host.start([BlockCopy(False, (block,), (1,))], kv.held_layers)
        host.finish()
        for layer in range(3):
            assert torch.equal(kv.layer(layer)[block], kept[layer])
        host.close()


def test_what_would_be_a_crash_is_an_error() -> None:
    with memory() as device:
        host = HostBlocks(device.kv, 1)
        with pytest.raises(InvariantViolation, match="is used, there are"):
            host.start([BlockCopy(True, (device.kv.block_count,), (0,))], device.kv.held_layers)
        with pytest.raises(InvariantViolation, match="no copies"):
            host.finish()
        host.start([BlockCopy(True, (0,), (0,))], device.kv.held_layers)
        with pytest.raises(InvariantViolation, match="before those of the last step"):
            host.start([BlockCopy(True, (0,), (0,))], device.kv.held_layers)
        host.finish()
        host.close()
