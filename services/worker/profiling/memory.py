"""Cost of moving memory: remapping between parameters and KV, copying between host and device."""

import statistics
import time
from collections.abc import Callable

import torch

from services.worker.cost_profile import CopyCosts
from services.worker.engine.load import Engine

_ROUNDS = 5
_COPY_BYTES = 64 << 20
_GB = 1e9


def remap_s_per_gb(engine: Engine) -> float | None:
    """Measure the seconds per GB of remapping parameters to the KV cache; None if the model has one layer.

    Half of the layers are dropped and restored without contents, so the engine cannot execute afterwards.
    """
    memory = engine.memory
    layer_count = engine.info.layer_count
    if layer_count < 2:
        return None
    dropped = list(range(layer_count // 2))
    moved_extents = sum(memory.parameters.extents_of(layer) for layer in dropped)
    per_layer = moved_extents // layer_count
    if per_layer == 0:
        return None
    kept_end = memory.kv.block_count
    times_s: list[float] = []

    def drop() -> None:
        memory.parameters.drop(dropped)
        memory.kv.window.grow(per_layer, clear=False)

    for _ in range(_ROUNDS):
        times_s.append(_timed_s(engine, drop))
        memory.kv.window.shrink(per_layer, used_blocks_end=kept_end)
        for layer in dropped:
            for tensor in memory.parameters.restore(layer).values():
                tensor.zero_()  # touch the pages, as loading does
    return statistics.median(times_s) / (moved_extents * memory.pool.extent_bytes / _GB)


def copies(engine: Engine) -> CopyCosts:
    """Measure the copy rates between pinned host memory and the device, or on a CPU from memory to memory. The best of
    several rounds counts.
    """
    device = engine.memory.kv.layer(0).device
    on_host = torch.ones(_COPY_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    on_device = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device)
    to_s = min(_timed_s(engine, lambda: on_device.copy_(on_host, non_blocking=True)) for _ in range(_ROUNDS))
    from_s = min(_timed_s(engine, lambda: on_host.copy_(on_device, non_blocking=True)) for _ in range(_ROUNDS))
    return CopyCosts(to_device_bytes_per_s=_COPY_BYTES / to_s, from_device_bytes_per_s=_COPY_BYTES / from_s)


def _timed_s(engine: Engine, act: Callable[[], object]) -> float:
    synchronise = engine.memory.pool.backend.synchronise
    synchronise()
    began_s = time.perf_counter()
    act()
    synchronise()
    return time.perf_counter() - began_s
