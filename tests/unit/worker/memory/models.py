"""A small device memory for tests."""

import random
from collections.abc import Callable

import torch

from services.worker.memory.backend import MemoryBackend
from services.worker.memory.device import DeviceMemory
from services.worker.memory.kv_cache import KvShape
from services.worker.memory.parameters import PartSpec, TensorSpec

LAYERS = 4
EXTENT_BYTES = 16 << 10
LAYER_SPEC: PartSpec = {
    "norm": TensorSpec((9,), torch.float32),
    "up": TensorSpec((96, 64), torch.float32),
    "down": TensorSpec((64, 96), torch.float32),
}
EXTENTS_PER_LAYER = 4  # a layer's parameters have 49,280 bytes
OTHERS: dict[str, PartSpec] = {
    "embedding": {"weight": TensorSpec((50, 64), torch.bfloat16)},
    "head": {"norm": TensorSpec((64,), torch.float64), "weight": TensorSpec((50, 64), torch.float16)},
}
OTHER_EXTENTS = 2
KV_SHAPE = KvShape(layer_count=LAYERS, block_tokens=4, kv_heads=2, head_dim=24, dtype=torch.float32)  # 1,536 bytes
KV_EXTENTS_PER_LAYER = 3
REMAINDER_BYTES = 1000
BUDGET_BYTES = (
    LAYERS * (EXTENTS_PER_LAYER + KV_EXTENTS_PER_LAYER) + OTHER_EXTENTS + 1
) * EXTENT_BYTES + REMAINDER_BYTES


def open_small(backend: MemoryBackend, budget_bytes: int = BUDGET_BYTES, kv_shape: KvShape = KV_SHAPE) -> DeviceMemory:
    """Opens a memory with four layers of four extents each, two other parts, and three KV extents per layer. One extent
    and some bytes are free.
    """
    return DeviceMemory.open(
        backend,
        budget_bytes=budget_bytes,
        layers=[LAYER_SPEC] * LAYERS,
        others=OTHERS,
        kv_shape=kv_shape,
        extent_bytes=EXTENT_BYTES,
    )


def fill_layer(memory: DeviceMemory, layer: int) -> None:
    """Writes parameters that depend on the layer alone."""
    generator = torch.Generator().manual_seed(layer)
    for tensor in memory.parameters.layer(layer).values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator).to(tensor.dtype))


def possible(memory: DeviceMemory, rng: random.Random) -> Callable[[], object]:
    """A random change that is valid in the memory's present state."""
    held, kv_held = memory.parameters.held_layers, memory.kv.held_layers
    missing = [layer for layer in range(LAYERS) if layer not in held]
    choices: list[Callable[[], object]] = []
    if memory.kv.retired_layers:
        choices += [memory.release_retired, lambda: memory.shrink_retired(rng.randrange(3))]
    if memory.leaving is not None:
        leaving = memory.leaving
        choices += [memory.close_leaving, lambda: memory.shrink_leaving(rng.randint(0, leaving.block_count))]
    both = [layer for layer in held if layer in kv_held]
    if memory.leaving is None and len(both) > 1:
        dropped = rng.sample(both, rng.randint(1, len(both) - 1))
        choices += [lambda: memory.drop_layers(dropped)]
    if memory.leaving is None and missing and not memory.kv.retired_layers:
        least = memory.leaving_block_count
        choices += [lambda: memory.make_room_for_layers(missing, block_count=least)] * 2
    if memory.leaving is None and not missing and memory.pool.free_count >= LAYERS:
        choices += [memory.open_window]
    return rng.choice(choices) if choices else memory.release_retired


def books(memory: DeviceMemory) -> object:
    """All bookkeeping that a change of the memory may alter."""
    pool = memory.pool
    return memory._books(), [(each.name, list(each.runs)) for each in pool._ranges], list(pool._free)
