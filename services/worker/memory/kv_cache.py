"""The KV cache: two windows of blocks per layer, each of which grows and shrinks at its tail.

Shapes: B blocks, T tokens of a block, K KV heads, H head dim. A layer's tensor is `kv_B2TKH`: `[:, 0]` are keys, `[:,
1]` values. The tensor covers both windows, each as large as the largest possible cache. Blocks from a window's
`block_count` on are not mapped. One window is the current one. The other is empty, unless the worker is a stage of two
groups; then it holds the draining group's KV.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ballast.common.errors import ConfigError, InvariantViolation
from services.worker.memory.backend import KV_DTYPES, dtype_name
from services.worker.memory.pool import PhysicalPool, Purpose, VirtualRange
from services.worker.memory.remote import RemoteKv, Runs

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """Dimensions of the model's KV. With tensor parallelism, `kv_heads` is the number on one rank."""

    layer_count: int
    block_tokens: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        for name in ("layer_count", "block_tokens", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"kv_cache.{name}", f"must be at least 1, got {getattr(self, name)}")
        if dtype_name(self.dtype) not in KV_DTYPES:
            raise ConfigError("kv_cache.dtype", f"{self.dtype} is not supported")

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in one layer, keys and values."""
        return 2 * self.block_tokens * self.kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class KvGeometry:
    """A snapshot of the cache's sizes, replaced after each change."""

    block_tokens: int
    block_bytes: int  # bytes per block in one layer
    block_count: int
    kv_bytes_per_token: int  # over all layers whose KV is here


class KvWindow:
    """Blocks of some layers, with ids from `first_block` on. An id denotes the same slot in every layer, so the
    smallest layer limits the number of blocks. Block counts are relative to the window, ids are not.
    """

    def __init__(
        self,
        pool: PhysicalPool,
        shape: KvShape,
        ranges: Sequence[VirtualRange],
        tensors: Sequence[torch.Tensor],
        first_block: int,
    ) -> None:
        self._pool = pool
        self._shape = shape
        self._ranges = ranges
        self._tensors = tensors
        self.first_block = first_block
        self._held_layers: tuple[int, ...] = ()
        self._retired: list[int] = []

    @property
    def held_layers(self) -> tuple[int, ...]:
        """Layers executed here. Only they determine the number of blocks."""
        return self._held_layers

    @property
    def retired_layers(self) -> tuple[int, ...]:
        """Layers executed elsewhere whose KV is still mapped here because it is being sent."""
        return tuple(self._retired)

    @property
    def extents_per_layer(self) -> int:
        """Extents mapped in each held layer."""
        return min((self._ranges[layer].extent_count for layer in self._held_layers), default=0)

    @property
    def extent_count(self) -> int:
        """Extents mapped in all layers, held or retired."""
        return sum(each.extent_count for each in self._ranges)

    @property
    def block_count(self) -> int:
        """Number of usable blocks: those mapped in every held layer."""
        return self.blocks_of(self._held_layers)

    def blocks_of(self, layers: Iterable[int]) -> int:
        """Number of blocks mapped in every one of `layers`."""
        return self._blocks_in(min((self._ranges[layer].mapped_bytes for layer in layers), default=0))

    def extents_for_blocks(self, block_count: int) -> int:
        """Extents per layer for `block_count` blocks."""
        return self._pool.extents_for(block_count * self._shape.block_bytes)

    @property
    def layers(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Held and retired layers."""
        return self._held_layers, self.retired_layers

    def reset(self, held: tuple[int, ...], retired: tuple[int, ...]) -> None:
        """Undo a change by restoring the previous value of `layers`."""
        self._held_layers, self._retired = held, list(retired)

    def hold_all(self) -> None:
        """Make an empty window hold every layer."""
        if self._held_layers or self._retired:
            raise InvariantViolation(f"a window is not empty; held are {self._held_layers}, retired {self._retired}")
        self._held_layers = tuple(range(len(self._ranges)))

    def grow(self, extents_per_layer: int, *, clear: bool = True) -> int:
        """Map `extents_per_layer` more extents in every held layer. Returns the new `block_count`.

        Reused extents contain old bytes. A NaN among them would spread through masked attention (0 x NaN), so they are
        cleared unless the caller knows that they contain none.
        """
        wanted = extents_per_layer * len(self._held_layers)
        if wanted > self._pool.free_count:
            raise InvariantViolation(f"the KV cache needs {wanted} extents, but {self._pool.free_count} are free")
        for owner in self._held_ranges():
            before = owner.mapped_bytes
            owner.grow(extents_per_layer)
            if clear:
                owner.bytes[before : owner.mapped_bytes].zero_()
        if clear and wanted:
            self._pool.backend.synchronise()  # KV is received on another stream, and must not be cleared afterwards
        return self.block_count

    def shrink(self, extents_per_layer: int, *, used_blocks_end: int) -> int:
        """Unmap and free `extents_per_layer` extents at the tail of every held layer. Returns the new `block_count`.

        No block from `used_blocks_end` on may be in use, so the caller must have copied them down.
        """
        left = (self.extents_per_layer - extents_per_layer) * self._pool.extent_bytes
        if left < 0 or self._blocks_in(left) < used_blocks_end:
            raise InvariantViolation(
                f"{extents_per_layer} extents less per layer leave {self._blocks_in(max(0, left))} blocks,"
                f" those below {used_blocks_end} are in use"
            )
        for owner in self._held_ranges():
            owner.shrink(extents_per_layer)
        return self.block_count

    def keep(self, block_count: int) -> int:
        """Shrink held layers to the extents needed for `block_count` blocks. Returns the new `block_count`."""
        surplus = max(0, self.extents_per_layer - self.extents_for_blocks(block_count))
        return self.shrink(surplus, used_blocks_end=min(block_count, self.block_count))

    def retire(self, layers: Sequence[int]) -> None:
        """Mark layers that are now executed elsewhere. They stay mapped until `drop`, but do not grow and do not limit
        the number of blocks.
        """
        for layer in layers:
            self._let_go(layer)
            self._retired.append(layer)

    def shrink_retired(self, block_count: int) -> int:
        """Shrink retired layers to `block_count` blocks. Returns the number of extents freed."""
        kept, freed = self.extents_for_blocks(block_count), 0
        for layer in self._retired:
            surplus = max(0, self._ranges[layer].extent_count - kept)
            self._ranges[layer].shrink(surplus)
            freed += surplus
        return freed

    def drop(self, layer: int) -> int:
        """Free the KV of a layer that is not executed here. Returns the number of extents freed."""
        if layer not in self._retired:
            self.retire([layer])
        freed = self._ranges[layer].extent_count
        self._ranges[layer].shrink(freed)
        self._retired.remove(layer)
        return freed

    def drop_all(self) -> None:
        """Free the KV of all layers."""
        for layer in (*self._held_layers, *self._retired):
            self.drop(layer)

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (from, to) in every held layer."""
        self._copy(moves, self._held_layers)

    def move_retired(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (from, to) in every retired layer; no target is a source."""
        self._copy(moves, self._retired)

    def check(self) -> None:
        """Raise InvariantViolation if held layers differ in size, or other layers have extents."""
        if len({owner.extent_count for owner in self._held_ranges()}) > 1:
            raise InvariantViolation(f"layers {self._held_layers} have KV of different sizes")
        for layer, owner in enumerate(self._ranges):
            if owner.extent_count and layer not in self._held_layers and layer not in self._retired:
                raise InvariantViolation(f"layer {layer} is neither held nor retired, but has {owner.extent_count}")

    def _let_go(self, layer: int) -> None:
        if layer not in self._held_layers:
            raise InvariantViolation(f"the KV of layer {layer} is not held; held are {self._held_layers}")
        self._held_layers = tuple(i for i in self._held_layers if i != layer)

    def _copy(self, moves: Sequence[tuple[int, int]], layers: Sequence[int]) -> None:
        origin, target = [move[0] for move in moves], [move[1] for move in moves]
        for layer in layers if moves else ():
            self._pool.backend.copy_rows(self._tensors[layer], target, self._tensors[layer], origin)

    def _held_ranges(self) -> Sequence[VirtualRange]:
        return [self._ranges[layer] for layer in self._held_layers]

    def _blocks_in(self, mapped_bytes: int) -> int:
        return mapped_bytes // self._shape.block_bytes


class KvCache:
    """The blocks of all layers, in two windows."""

    def __init__(self, pool: PhysicalPool, shape: KvShape) -> None:
        self._pool = pool
        self.shape = shape
        self.mirrors: tuple[KvCache, ...] = ()  # caches of the other ranks, with the same blocks of their heads
        self.remote: RemoteKv | None = None  # the rank on another host whose memory this cache mirrors
        if pool.extent_count * pool.extent_bytes < shape.block_bytes:
            raise ConfigError(
                "device_memory_bytes",
                f"{pool.budget_bytes} bytes do not hold one KV block of {shape.block_bytes} bytes",
            )
        whole_bytes = math.lcm(pool.extent_bytes, shape.block_bytes)  # common multiple of both sizes
        window_bytes = -(-pool.extent_count * pool.extent_bytes // whole_bytes) * whole_bytes
        window_extents, window_blocks = window_bytes // pool.extent_bytes, window_bytes // shape.block_bytes
        self._ranges = [
            pool.reserve_windows(f"KV of layer {i}", Purpose.KV, window_extents) for i in range(shape.layer_count)
        ]
        full_shape = (2 * window_blocks, 2, shape.block_tokens, shape.kv_heads, shape.head_dim)
        self._tensors = tuple(pool.backend.tensor(first.address, full_shape, shape.dtype) for first, _ in self._ranges)
        self.windows = tuple(
            KvWindow(pool, shape, [each[i] for each in self._ranges], self._tensors, i * window_blocks)
            for i in range(2)
        )
        self.window = self.windows[0]
        self.window.hold_all()

    @property
    def other_window(self) -> KvWindow:
        """The window that is not the current one."""
        first, second = self.windows
        return second if self.window is first else first

    @property
    def held_layers(self) -> tuple[int, ...]:
        """Held layers of the current window."""
        return self.window.held_layers

    @property
    def retired_layers(self) -> tuple[int, ...]:
        """Retired layers of the current window."""
        return self.window.retired_layers

    @property
    def extents_per_layer(self) -> int:
        """Extents per held layer of the current window."""
        return self.window.extents_per_layer

    @property
    def block_count(self) -> int:
        """Number of blocks of the current window."""
        return self.window.block_count

    @property
    def geometry(self) -> KvGeometry:
        token_bytes = self.shape.block_bytes // self.shape.block_tokens
        return KvGeometry(
            block_tokens=self.shape.block_tokens,
            block_bytes=self.shape.block_bytes,
            block_count=self.block_count,
            kv_bytes_per_token=token_bytes * len(self.held_layers),
        )

    def extents_for_blocks(self, block_count: int) -> int:
        """Extents per layer for `block_count` blocks."""
        return self.window.extents_for_blocks(block_count)

    def layer(self, layer: int) -> torch.Tensor:
        """Return `kv_B2TKH` of a layer, always the same object with the same base pointer.

        It is contiguous. Only a window's first `block_count` blocks may be accessed, which is not checked.
        """
        return self._tensors[layer]

    def of_ranks(self, layer: int) -> list[torch.Tensor]:
        """Return `layer` of all ranks of the instance, this one first."""
        return [cache._tensors[layer] for cache in (self, *self.mirrors)]

    @property
    def is_remote(self) -> bool:
        """True if a rank is on another host; see `fetch` and `store`."""
        return any(cache.remote is not None for cache in self.mirrors)

    def fetch(self, layers: range, runs: Runs) -> None:
        """Fetch these blocks from ranks on other hosts, before the blocks of all ranks are read here."""
        for cache in self.mirrors:
            if cache.remote is not None:
                cache.remote.fetch_kv(layers, runs)

    def store(self, layers: range, runs: Runs) -> None:
        """Send these blocks to ranks on other hosts, after the blocks of all ranks have been written here."""
        for cache in self.mirrors:
            if cache.remote is not None:
                cache.remote.store_kv(layers, runs)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in one layer, on all ranks."""
        return self.shape.block_bytes * (1 + len(self.mirrors))

    def guard(self, blocks_end: int, layers: Iterable[int]) -> None:
        """Raise InvariantViolation unless all blocks below `blocks_end`, from the start of their window on, exist in
        these layers. Called before a step with the highest block id of its tables plus one, because a kernel that
        accessed a missing block would crash with SIGSEGV.
        """
        window = self._window_of(blocks_end - 1)
        block_count = window.blocks_of(layers)
        if blocks_end - window.first_block > block_count:
            raise InvariantViolation(
                f"block {blocks_end - 1} is used, but there are {block_count} from block {window.first_block} on"
            )

    def scratch(self, block_count: int) -> torch.Tensor:
        """Allocate temporary device memory for `block_count` blocks of one layer; `put` copies its contents into the
        cache.
        """
        return self._pool.backend.scratch(block_count * self.shape.block_bytes)

    def put(self, layer: int, blocks: Sequence[int], came: torch.Tensor) -> None:
        """Copy bytes into blocks of a layer, in order."""
        layer_B2TKH = self._tensors[layer]
        came_n2TKH = came.view(self.shape.dtype).view(len(blocks), *layer_B2TKH.shape[1:])
        self._pool.backend.copy_rows(layer_B2TKH, blocks, came_n2TKH)

    def _window_of(self, block: int) -> KvWindow:
        return self.windows[block >= self.windows[1].first_block]
