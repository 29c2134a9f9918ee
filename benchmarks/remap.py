"""What it costs to drop half of the layers and give their memory to the KV cache, beside copying the same bytes.

python -m benchmarks.remap [--device cpu|cuda:0] [--gib 0.25 1] [--extents-per-layer 4 16 64] [--json OUT]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from services.worker.memory.backend import MemoryBackend
from services.worker.memory.cuda import open_cuda
from services.worker.memory.device import DeviceMemory
from services.worker.memory.host import HostBackend
from services.worker.memory.kv_cache import KvShape
from services.worker.memory.parameters import TensorSpec

LAYERS = 8
KV_SHAPE = KvShape(layer_count=LAYERS, block_tokens=16, kv_heads=8, head_dim=64, dtype=torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Result:
    """Medians over the rounds. `moved_bytes` went from four layers' parameters to the KV of all eight."""

    device: str
    moved_bytes: int
    extent_bytes: int
    extents: int
    blocks_before: int
    blocks_after: int
    drop_s: float
    grow_s: float
    clear_s: float
    restore_s: float
    copy_s: float

    @property
    def move_s(self) -> float:
        return self.drop_s + self.grow_s


def open_backend(device: str) -> MemoryBackend:
    return HostBackend() if device == "cpu" else open_cuda(torch.device(device).index or 0)


def open_memory(device: str, parameter_bytes: int, extents_per_layer: int) -> DeviceMemory:
    backend = open_backend(device)
    unit_bytes = backend.granularity_bytes * extents_per_layer
    layer_bytes = max(1, parameter_bytes // LAYERS // unit_bytes) * unit_bytes
    return DeviceMemory.open(
        backend,
        budget_bytes=layer_bytes * LAYERS * 3 // 2,
        layers=[{"weight": TensorSpec((layer_bytes // 2,), torch.bfloat16)}] * LAYERS,
        others={},
        kv_shape=KV_SHAPE,
        extent_bytes=layer_bytes // extents_per_layer,
    )


def timed_s(backend: MemoryBackend, act: Callable[[], object]) -> float:
    backend.synchronise()
    begin_s = time.perf_counter()
    act()
    backend.synchronise()
    return time.perf_counter() - begin_s


def measure(device: str, parameter_bytes: int, extents_per_layer: int, rounds: int) -> Result:
    with open_memory(device, parameter_bytes, extents_per_layer) as memory:
        backend, kv, parameters = memory.pool.backend, memory.kv, memory.parameters
        dropped = list(range(LAYERS // 2))
        per_layer = parameters.extents_of(0) * len(dropped) // LAYERS
        moved_bytes = per_layer * LAYERS * memory.pool.extent_bytes
        source = torch.ones(moved_bytes, dtype=torch.uint8, device=backend.device)
        target = torch.zeros_like(source)
        blocks_before = kv.block_count
        parameters.drop(dropped)
        blocks_after = kv.window.grow(per_layer)
        added = [kv.layer(i)[blocks_before:blocks_after] for i in range(LAYERS)]
        kv.window.shrink(per_layer, used_blocks_end=blocks_before)
        times: list[tuple[float, ...]] = []
        for _ in range(rounds):
            restore_s = timed_s(backend, lambda: [parameters.restore(layer) for layer in dropped])
            for layer in dropped:
                parameters.layer(layer)["weight"].fill_(1)
            drop_s = timed_s(backend, lambda: parameters.drop(dropped))
            grow_s = timed_s(backend, lambda: kv.window.grow(per_layer, clear=False))
            clear_s = timed_s(backend, lambda: [view.zero_() for view in added])
            copy_s = timed_s(backend, lambda: target.copy_(source))
            kv.window.shrink(per_layer, used_blocks_end=blocks_before)
            times.append((drop_s, grow_s, clear_s, restore_s, copy_s))
        memory.check()
        medians = [statistics.median(column) for column in zip(*times, strict=True)]
        extents = per_layer * LAYERS
        return Result(device, moved_bytes, memory.pool.extent_bytes, extents, blocks_before, blocks_after, *medians)


def render(results: list[Result]) -> Table:
    table = Table(title="Dropping 4 of 8 layers: parameters become KV blocks")
    for heading in (
        "moved MiB",
        "extent KiB",
        "extents",
        "KV blocks",
        "drop ms",
        "grow ms",
        "ms per GB",
        "us per extent",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("clear ms", "restore ms", "copy ms", "move : copy"):
        table.add_column(heading, justify="right", no_wrap=True)
    for r in results:
        table.add_row(
            f"{r.moved_bytes / 2**20:.0f}",
            f"{r.extent_bytes / 2**10:.0f}",
            str(r.extents),
            f"{r.blocks_before} -> {r.blocks_after}",
            f"{r.drop_s * 1e3:.3f}",
            f"{r.grow_s * 1e3:.3f}",
            f"{r.move_s * 1e3 / (r.moved_bytes / 1e9):.2f}",
            f"{r.move_s * 1e6 / r.extents:.1f}",
            f"{r.clear_s * 1e3:.2f}",
            f"{r.restore_s * 1e3:.3f}",
            f"{r.copy_s * 1e3:.2f}",
            f"{r.move_s / r.copy_s:.3f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu, or cuda:N")
    parser.add_argument("--gib", type=float, nargs="+", default=[0.25, 1.0], help="sizes of all parameters together")
    parser.add_argument("--extents-per-layer", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = [
        measure(options.device, int(gib * 2**30), extents, options.rounds)
        for gib in options.gib
        for extents in options.extents_per_layer
    ]
    Console(width=180).print(render(results))
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
