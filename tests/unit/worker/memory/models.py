"""Small device memories for tests."""

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
EXTENTS_PER_LAYER = 4  # of a layer's parameters: 49,280 bytes
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
    """Four layers of four extents, two more parts, three KV extents per layer, one extent and a rest free."""
    return DeviceMemory.open(
        backend,
        budget_bytes=budget_bytes,
        layers=[LAYER_SPEC] * LAYERS,
        others=OTHERS,
        kv_shape=kv_shape,
        extent_bytes=EXTENT_BYTES,
    )


def fill_layer(memory: DeviceMemory, layer: int) -> None:
    """Parameters that depend on the layer alone."""
    generator = torch.Generator().manual_seed(layer)
    for tensor in memory.parameters.layer(layer).values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator).to(tensor.dtype))
