"""KV blocks that are copied to host memory and back."""

import pytest
import torch

from ballast.common.errors import InvariantViolation
from services.worker.core.events import BlockCopy
from services.worker.memory import host_blocks
from services.worker.memory.device import DeviceMemory
from services.worker.memory.host import HostBackend
from services.worker.memory.host_blocks import HostBlocks
from services.worker.memory.kv_cache import KvShape
from services.worker.memory.parameters import PartSpec
from tests.support.host_gatherer import HostGatherer


def memory() -> DeviceMemory:
    shape = KvShape(layer_count=3, block_tokens=4, kv_heads=2, head_dim=8, dtype=torch.float32)
    parts: list[PartSpec] = [{}, {}, {}]
    return DeviceMemory.open(HostBackend(), budget_bytes=1 << 20, layers=parts, others={}, kv_shape=shape)


@pytest.mark.parametrize("gathered", [False, True], ids=["one by one", "as on a GPU"])
def test_blocks_return_unchanged_in_every_held_layer(gathered: bool) -> None:
    with memory() as device, memory() as other_rank:
        device.kv.mirrors = (other_rank.kv,)
        kernel = HostGatherer() if gathered else None
        kv, host = device.kv, HostBlocks(device.kv, 5, kernel)
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
        assert kernel is None or [launch[:2] for launch in kernel.launches] == [
            ("gather", 2 * 3 * 2),
            ("scatter", 2 * 3 * 2),
            ("gather", 3 * 2),
        ]
        host.close()
        host.close()


@pytest.mark.parametrize("layers", [(0, 1, 2), (1, 2), (0, 2)])
@pytest.mark.parametrize("slot_blocks", [1, 2, 9])
def test_on_a_gpu_all_layers_are_copied_slot_by_slot_to_any_blocks(
    layers: tuple[int, ...], slot_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with memory() as device:
        kv, kernel = device.kv, HostGatherer()
        monkeypatch.setattr(host_blocks, "SLOT_BYTES", slot_blocks * len(layers) * kv.block_bytes)
        host = HostBlocks(kv, 8, kernel)
        for layer in range(3):
            kv.layer(layer)[:12] = torch.randn(12, 2, 4, 2, 8)
        before = [kv.layer(layer)[:12].clone() for layer in range(3)]
        host.start([BlockCopy(True, (9, 3, 4, 0, 11), (2, 3, 4, 7, 0))], layers)
        host.finish()
        for layer in range(3):
            kv.layer(layer)[:12] = -1.0
        host.start([BlockCopy(False, (5, 6, 1), (4, 2, 0))], layers)
        host.finish()
        for layer in range(3):
            wanted = torch.full_like(before[layer], -1.0)
            if layer in layers:
                wanted[[5, 6, 1]] = before[layer][[4, 9, 11]]
            assert torch.equal(kv.layer(layer)[:12], wanted)
        assert len(kernel.launches) == -(-5 // slot_blocks) + -(-3 // slot_blocks)
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


def test_blocks_of_either_window() -> None:
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


def test_invalid_copies_raise_instead_of_crashing() -> None:
    with memory() as device:
        host = HostBlocks(device.kv, 1)
        with pytest.raises(InvariantViolation, match="is used, but there are"):
            host.start([BlockCopy(True, (device.kv.block_count,), (0,))], device.kv.held_layers)
        with pytest.raises(InvariantViolation, match="no copies"):
            host.finish()
        host.start([BlockCopy(True, (0,), (0,))], device.kv.held_layers)
        with pytest.raises(InvariantViolation, match="the last step's were not finished"):
            host.start([BlockCopy(True, (0,), (0,))], device.kv.held_layers)
        host.finish()
        host.close()
