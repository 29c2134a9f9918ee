"""A device's memory in virtual time: the worker's real code over extents that hold no bytes. Remapping takes time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, cast

from ballast.common.errors import ConfigError
from ballast.common.units import human_bytes
from services.worker.emulation.phantom import PhantomBackend, dtype, phantom
from services.worker.emulation.runner import WEIGHTS, layer_mark
from services.worker.memory.backend import MemoryBackend
from services.worker.memory.device import DeviceMemory
from services.worker.memory.extent_size import choose_extent_bytes
from services.worker.memory.kv_cache import KvShape
from services.worker.memory.parameters import TensorSpec

_GRANULARITY_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class Geometry:
    """Constant sizes, in extents unless stated otherwise."""

    extent_bytes: int
    budget: int
    layer_count: int
    layer_parameters: int
    other_parameters: int
    block_bytes: int  # bytes of one KV block in one layer
    rest_bytes: int = 0  # remainder of the budget smaller than an extent

    @staticmethod
    def choose(
        *, budget_bytes: int, layer_count: int, layer_parameter_bytes: int, other_parameter_bytes: int, block_bytes: int
    ) -> Geometry:
        """The geometry chosen by a worker on a device with large pages.

        Raises:
            ConfigError: parameters and one block for each layer do not fit.
        """
        extent_bytes = choose_extent_bytes(
            _GRANULARITY_BYTES, budget_bytes, [layer_parameter_bytes] * layer_count, other_parameter_bytes
        )
        found = Geometry(
            extent_bytes,
            budget_bytes // extent_bytes,
            layer_count,
            -(-layer_parameter_bytes // extent_bytes),
            -(-other_parameter_bytes // extent_bytes),
            block_bytes,
            budget_bytes % extent_bytes,
        )
        if found.home_kv * extent_bytes < block_bytes:
            needed_bytes = layer_parameter_bytes * layer_count + other_parameter_bytes
            raise ConfigError(
                "cluster",
                f"an instance has {human_bytes(budget_bytes)} for the model, whose parameters take"
                f" {human_bytes(needed_bytes)}: no room for a KV cache; use larger GPUs",
            )
        return found

    @property
    def parameters(self) -> int:
        """Extents of one replica of the parameters."""
        return self.layer_parameters * self.layer_count + self.other_parameters

    @property
    def home_kv(self) -> int:
        """Extents of each layer's KV while all layers are held."""
        return (self.budget - self.parameters) // self.layer_count

    def blocks_in(self, extents: int) -> int:
        return extents * self.extent_bytes // self.block_bytes


if TYPE_CHECKING:
    import torch

_ELEMENT, _KV_ELEMENT = "float16", "float8_e4m3fn"  # the latter takes one byte, so that blocks may have any size


class SimBackend(PhantomBackend):
    """Phantom memory that counts the bytes that are read."""

    read_bytes = 0

    def contents(self, tensor: torch.Tensor) -> Iterator[memoryview]:
        self.read_bytes += tensor.nbytes
        yield from super().contents(tensor)


class SimMemory(DeviceMemory):
    """A worker's memory. `takes_s` is called with the duration of each change."""

    backend: SimBackend
    takes_s: Callable[[float], None]
    remap_s: float

    @property
    def read_bytes(self) -> int:
        return self.backend.read_bytes

    @classmethod
    def of(cls, geometry: Geometry, block_tokens: int, *, remap_s: float, takes_s: Callable[[float], None]) -> Self:
        element, kv_element = dtype(_ELEMENT), dtype(_KV_ELEMENT)

        def part(extents: int) -> dict[str, TensorSpec]:
            return {WEIGHTS: TensorSpec((extents * geometry.extent_bytes // element.itemsize,), element)}

        backend = SimBackend(geometry.block_bytes)
        memory = cls.open(
            cast(MemoryBackend, backend),
            budget_bytes=geometry.budget * geometry.extent_bytes + geometry.rest_bytes,
            layers=[part(geometry.layer_parameters)] * geometry.layer_count,
            others={"ends": part(geometry.other_parameters)},
            kv_shape=KvShape(
                layer_count=geometry.layer_count,
                block_tokens=block_tokens,
                kv_heads=1,
                head_dim=geometry.block_bytes // (2 * block_tokens * kv_element.itemsize),
                dtype=kv_element,
            ),
            extent_bytes=geometry.extent_bytes,
        )
        memory.backend, memory.remap_s, memory.takes_s = backend, remap_s, takes_s
        for layer in range(geometry.layer_count):
            phantom(memory.parameters.layer(layer)[WEIGHTS]).write([layer_mark(layer)])
            phantom(memory.kv.layer(layer)).area.divide(geometry.block_bytes, memory.kv.windows[1].first_block)
        return memory

    def drop_layers(self, layers: Sequence[int]) -> int:
        self.takes_s(self.remap_s)
        return super().drop_layers(layers)

    def park(self) -> None:
        self.takes_s(self.remap_s)
        super().park()

    def make_room_for_layers(self, layers: Sequence[int], *, block_count: int) -> int:
        self.takes_s(self.remap_s)
        return super().make_room_for_layers(layers, block_count=block_count)

    def release_retired(self) -> int:
        self.takes_s(self.remap_s)
        return super().release_retired()

    def open_window(self) -> int:
        self.takes_s(self.remap_s)
        return super().open_window()

    def shrink_leaving(self, block_count: int) -> int:
        self.takes_s(self.remap_s)
        return super().shrink_leaving(block_count)

    def close_leaving(self) -> int:
        self.takes_s(self.remap_s)
        return super().close_leaving()
