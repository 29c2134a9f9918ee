"""One device's memory as the engine sees it: parameters and KV cache in one budget."""

import contextlib
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from ballast.common.errors import ConfigError
from ballast.common.load import MemoryReport
from ballast.common.restoring import divided_extents
from services.worker.memory.backend import MemoryBackend
from services.worker.memory.extent_size import choose_extent_bytes
from services.worker.memory.kv_cache import KvCache, KvShape
from services.worker.memory.parameters import ParameterStore, PartLayout, PartSpec, lay_out, layer_name
from services.worker.memory.pool import PhysicalPool


class DeviceMemory:
    """Pool, parameters and KV cache of one device. Used by one thread; only `report` may be called from others."""

    def __init__(self, pool: PhysicalPool, parameters: ParameterStore, kv: KvCache) -> None:
        self.pool = pool
        self.parameters = parameters
        self.kv = kv
        self._home_extents = 0  # of each layer's KV while all layers are held

    @classmethod
    def open(
        cls,
        backend: MemoryBackend,
        *,
        budget_bytes: int,
        layers: Sequence[PartSpec],
        others: Mapping[str, PartSpec],
        kv_shape: KvShape,
        extent_bytes: int | None = None,
    ) -> Self:
        """Map all parameters, split what is left evenly over the layers' KV; what cannot be split stays free.

        Without `extent_bytes` a size is chosen that suits the model. The backend belongs to the result from here on.

        Raises:
            ConfigError: the budget does not hold the parameters and one KV block per layer, or cannot be had.
        """
        with contextlib.ExitStack() as undo:
            undo.callback(backend.close)
            layouts = [lay_out(layer_name(i), specs) for i, specs in enumerate(layers)]
            end_layouts = [lay_out(name, specs) for name, specs in others.items()]
            if extent_bytes is None:
                extent_bytes = choose_extent_bytes(
                    backend.granularity_bytes,
                    budget_bytes,
                    [layout.size_bytes for layout in layouts],
                    sum(layout.size_bytes for layout in end_layouts),
                )
            _require_room(budget_bytes, extent_bytes, [*layouts, *end_layouts], kv_shape)
            pool = PhysicalPool(backend, budget_bytes, extent_bytes)
            undo.callback(pool.close)
            memory = cls(pool, ParameterStore(pool, layers, others), KvCache(pool, kv_shape))
            memory.kv.grow(pool.free_count // kv_shape.layer_count, clear=False)
            memory._home_extents = memory.kv.extents_per_layer
            undo.pop_all()
            return memory

    # ------------------------------------------------------------ dropping and restoring layers
    # Parameters and KV have one dtype and finite values, so extents that change hands need not be cleared.

    def drop_layers(self, layers: Sequence[int]) -> int:
        """Give up layers that another member executes: their parameters make room for the KV of those that are kept.

        The KV of the layers given up stays readable until `shrink_retired` or `release_retired`. Returns the new
        number of blocks.
        """
        self.parameters.drop(layers)
        self.kv.retire([layer for layer in layers if layer in self.kv.held_layers])
        return self._grow_kv()

    def shrink_retired(self, block_count: int, moves: Sequence[tuple[int, int]] = ()) -> int:
        """Layers given up need only so many blocks any more, once those in `moves` (from, to) lie in front;
        nothing reads them at this moment. Returns the number of blocks of the layers that are kept.
        """
        self.kv.move_retired(moves)
        self.pool.backend.synchronise()
        self.kv.shrink_retired(block_count)
        return self._grow_kv()

    def release_retired(self) -> int:
        """Nobody needs the KV of layers given up any more, or copied ahead: it follows the parameters. Returns the
        number of blocks.
        """
        for layer in (*self.kv.retired_layers, *self.kv.arriving_layers):
            self.kv.drop(layer)
        return self._grow_kv()

    def _grow_kv(self) -> int:
        extents_per_layer = self.pool.free_count // max(1, len(self.kv.held_layers))
        return self.kv.grow(extents_per_layer, clear=False)

    def blocks_after_drop(self, layers: Sequence[int]) -> int:
        """Blocks that there will be once these layers and their KV have been given up."""
        kept = [layer for layer in self.kv.held_layers if layer not in layers]
        freed = sum(self.parameters.extents_of(layer) for layer in layers)
        freed += len([layer for layer in layers if layer in self.kv.held_layers]) * self.kv.extents_per_layer
        more = (self.pool.free_count + freed) // max(1, len(kept))
        return (self.kv.extents_per_layer + more) * self.pool.extent_bytes // self.kv.shape.block_bytes

    @property
    def home_block_count(self) -> int:
        """Blocks that there are when all layers are held."""
        return self.blocks_in(self._home_extents)

    @property
    def beside_block_count(self) -> int:
        """Blocks that there are when all parameters are here, and KV of those layers only that have it now."""
        return self.blocks_in(self._beside_extents)

    @property
    def _beside_extents(self) -> int:
        held_count = len(self.kv.held_layers)
        missing = [i for i in range(self.kv.shape.layer_count) if i not in self.parameters.held_layers]
        left = self.pool.free_count - sum(self.parameters.extents_of(layer) for layer in missing)
        return min(self.kv.extents_per_layer, self.kv.extents_per_layer + left // max(1, held_count))

    def make_room_for_layers(self, layers: Sequence[int], *, used_blocks_end: int) -> int:
        """Shrink the KV as far as the parameters of missing layers want it, and map their ranges, to be filled.

        All blocks from `beside_block_count` on have been moved down before. Returns the number of blocks.
        """
        self._shrink_kv(self._beside_extents, used_blocks_end)
        for layer in layers:
            self.parameters.restore(layer)
        return self.kv.block_count

    def divided_extents(self, member_count: int) -> tuple[int, int]:
        """Extents of a layer with KV, and of one without, while a group of so many is dissolved and KV is copied."""
        return divided_extents(self._home_extents, self.kv.shape.layer_count, len(self.kv.held_layers), member_count)

    def blocks_in(self, extents: int) -> int:
        return extents * self.pool.extent_bytes // self.kv.shape.block_bytes

    def make_room_for_kv(self, extents_per_layer: int, *, used_blocks_end: int) -> int:
        """Shrink the KV of the layers that have any, so that those that are back can have some.

        All blocks behind have been moved down before. Returns the number of blocks.
        """
        self._shrink_kv(extents_per_layer, used_blocks_end)
        return self.kv.block_count

    def level_kv(self) -> int:
        """All layers are executed here, and have as much KV. No block from `home_block_count` on is in use. Returns the
        number of blocks.
        """
        self.pool.backend.synchronise()
        self.kv.adopt()
        return self.kv.level(self._home_extents)

    def _shrink_kv(self, extents_per_layer: int, used_blocks_end: int) -> None:
        self.pool.backend.synchronise()
        surplus = self.kv.extents_per_layer - extents_per_layer
        if surplus > 0:
            self.kv.shrink(surplus, used_blocks_end=used_blocks_end)

    def report(self) -> MemoryReport:
        return self.pool.report()

    def check(self) -> None:
        """Raise InvariantViolation unless every byte of the budget is accounted for once (I3)."""
        self.pool.check()

    def close(self) -> None:
        """Return everything to the system. No tensor of this memory may be touched afterwards. Idempotent."""
        self.pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _require_room(budget_bytes: int, extent_bytes: int, parts: Sequence[PartLayout], kv_shape: KvShape) -> None:
    def rounded(size_bytes: int) -> int:
        return -(-size_bytes // extent_bytes) * extent_bytes

    parameter_bytes = sum(rounded(part.size_bytes) for part in parts)
    kv_bytes = kv_shape.layer_count * rounded(kv_shape.block_bytes)
    if budget_bytes // extent_bytes * extent_bytes < parameter_bytes + kv_bytes:
        raise ConfigError(
            "device_memory_bytes",
            f"{budget_bytes} bytes are too few: the model needs at least {parameter_bytes} bytes for parameters and"
            f" {kv_bytes} for one KV block of {kv_shape.block_tokens} tokens per layer"
            f" (in extents of {extent_bytes} bytes)",
        )
