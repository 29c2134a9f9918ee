"""The KV cache: per layer one range of blocks, which grows and shrinks at its tail.

Shapes: B blocks, T tokens of a block, K KV heads, H head dim. A layer's tensor is `kv_B2TKH`: `[:, 0]` are keys,
`[:, 1]` values. It covers the largest cache the device could ever hold; blocks from `block_count` on are not there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ballast.common.errors import ConfigError, InvariantViolation
from services.worker.memory.backend import SUPPORTED_DTYPES, dtype_name
from services.worker.memory.pool import PhysicalPool, Purpose, VirtualRange

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """What the model asks of the cache. With tensor parallelism `kv_heads` are those of one rank."""

    layer_count: int
    block_tokens: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        for name in ("layer_count", "block_tokens", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"kv_cache.{name}", f"must be at least 1, got {getattr(self, name)}")
        if dtype_name(self.dtype) not in SUPPORTED_DTYPES:
            raise ConfigError("kv_cache.dtype", f"{self.dtype} is not supported")

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in one layer, keys and values."""
        return 2 * self.block_tokens * self.kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class KvGeometry:
    """The cache as it is now; a new one after each change."""

    block_tokens: int
    block_bytes: int  # of one block in one layer
    block_count: int
    kv_bytes_per_token: int  # over all layers that this instance holds KV for


class KvCache:
    """The blocks of all layers. A block id means the same slot in every layer, so the smallest layer counts."""

    def __init__(self, pool: PhysicalPool, shape: KvShape) -> None:
        self._pool = pool
        self.shape = shape
        block_room = pool.extent_count * pool.extent_bytes // shape.block_bytes
        if block_room < 1:
            raise ConfigError(
                "device_memory_bytes",
                f"{pool.budget_bytes} bytes do not hold one KV block of {shape.block_bytes} bytes",
            )
        self._ranges = [
            pool.reserve(f"KV of layer {i}", Purpose.KV, pool.extent_count) for i in range(shape.layer_count)
        ]
        tail = (2, shape.block_tokens, shape.kv_heads, shape.head_dim)
        self._tensors = tuple(
            r.bytes[: block_room * shape.block_bytes].view(shape.dtype).view(block_room, *tail) for r in self._ranges
        )
        self._held = [True] * shape.layer_count
        self._held_layers = tuple(range(shape.layer_count))
        self._retired: list[int] = []
        self._arriving: list[int] = []

    @property
    def retired_layers(self) -> tuple[int, ...]:
        """Layers that are executed elsewhere, whose KV is still mapped here because victims' KV is being sent."""
        return tuple(self._retired)

    @property
    def arriving_layers(self) -> tuple[int, ...]:
        """Layers that are going to be executed here: the first blocks are mapped, for KV that is copied ahead."""
        return tuple(self._arriving)

    @property
    def extents_per_layer(self) -> int:
        """Extents mapped in every layer held."""
        return min((r.extent_count for r in self._held_ranges()), default=0)

    @property
    def held_layers(self) -> tuple[int, ...]:
        """Layers whose KV is kept here. They alone decide how many blocks there are."""
        return self._held_layers

    @property
    def usable_layers(self) -> tuple[int, ...]:
        """Held and arriving ones: after the commit of a restore sequences run on both, until the exchange is over. Not
        those retired, which are mapped too.
        """
        return tuple(sorted({*self.held_layers, *self._arriving}))

    @property
    def block_count(self) -> int:
        """Blocks that may be used: those mapped in every layer held."""
        return self._blocks_in(min((r.mapped_bytes for r in self._held_ranges()), default=0))

    @property
    def geometry(self) -> KvGeometry:
        token_bytes = self.shape.block_bytes // self.shape.block_tokens
        return KvGeometry(
            block_tokens=self.shape.block_tokens,
            block_bytes=self.shape.block_bytes,
            block_count=self.block_count,
            kv_bytes_per_token=token_bytes * len(self.held_layers),
        )

    def layer(self, layer: int) -> torch.Tensor:
        """`kv_B2TKH` of a layer, made once: same object, same base pointer, whatever is mapped.

        Contiguous. Touch only blocks below `block_count`; nothing checks that on the way to the memory.
        """
        return self._tensors[layer]

    def guard(self, blocks_end: int, layers: Iterable[int]) -> None:
        """Raise InvariantViolation unless all blocks below `blocks_end` exist in these layers: to be called before a
        step, with the highest block id of its tables plus one, since the alternative is SIGSEGV inside a kernel."""
        block_count = self._blocks_in(min((self._ranges[layer].mapped_bytes for layer in layers), default=0))
        if blocks_end > block_count:
            raise InvariantViolation(f"block {blocks_end - 1} is used, there are {block_count}")

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy blocks `from -> to` in every layer held."""
        self._copy(moves, self.held_layers)

    def _copy(self, moves: Sequence[tuple[int, int]], layers: Sequence[int]) -> None:
        origin, target = [move[0] for move in moves], [move[1] for move in moves]
        for layer in layers if moves else ():
            self._pool.backend.copy_rows(self._tensors[layer], target, self._tensors[layer], origin)

    def scratch(self, block_count: int) -> torch.Tensor:
        """Bytes beside the cache for blocks of one layer each, for `put`."""
        return self._pool.backend.scratch(block_count * self.shape.block_bytes)

    def put(self, layer: int, blocks: Sequence[int], came: torch.Tensor) -> None:
        """Copy bytes into blocks of a layer, in order."""
        layer_B2TKH = self._tensors[layer]
        came_n2TKH = came.view(self.shape.dtype).view(len(blocks), *layer_B2TKH.shape[1:])
        self._pool.backend.copy_rows(layer_B2TKH, blocks, came_n2TKH)

    def extents_for_blocks(self, block_count: int) -> int:
        """Extents per layer that hold so many blocks."""
        return self._pool.extents_for(block_count * self.shape.block_bytes)

    def grow(self, extents_per_layer: int, *, clear: bool = True) -> int:
        """Map that many more extents in every layer held. Returns the new `block_count`.

        Extents that held something else before carry its bytes, and a NaN among them would spread through masked
        attention (0 x NaN), so they are cleared unless the caller knows better.
        """
        self._require_free(extents_per_layer * len(self.held_layers))
        for owner in self._held_ranges():
            self._extend(owner, extents_per_layer, clear=clear)
        return self.block_count

    def shrink(self, extents_per_layer: int, *, used_blocks_end: int) -> int:
        """Unmap that many extents at the tail of every layer held and free them. Returns the new `block_count`.

        No block from `used_blocks_end` on is in use: the caller has moved those down before.
        """
        held = self._held_ranges()
        left = min((r.mapped_bytes for r in held), default=0) - extents_per_layer * self._pool.extent_bytes
        if left < 0 or self._blocks_in(left) < used_blocks_end:
            raise InvariantViolation(
                f"{extents_per_layer} extents less per layer leave {self._blocks_in(max(0, left))} blocks,"
                f" those below {used_blocks_end} are in use"
            )
        for owner in held:
            owner.shrink(extents_per_layer)
        return self.block_count

    def retire(self, layers: Sequence[int]) -> None:
        """These layers are executed elsewhere now. They stay mapped until `drop`, and neither grow nor count."""
        for layer in layers:
            if not self._held[layer]:
                raise InvariantViolation(f"the KV of layer {layer} is not held; held are {self.held_layers}")
            self._set_held(layer, held=False)
            self._retired.append(layer)

    def move_retired(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (from, to) of every retired layer; no target is a source."""
        self._copy(moves, self._retired)

    def shrink_retired(self, block_count: int) -> int:
        """Retired layers keep only their first `block_count` blocks. Returns how many extents became free."""
        kept, freed = self.extents_for_blocks(block_count), 0
        for layer in self._retired:
            surplus = max(0, self._ranges[layer].extent_count - kept)
            self._ranges[layer].shrink(surplus)
            freed += surplus
        return freed

    def expect(self, layer: int, extents: int) -> None:
        """Map the first extents of a layer that is going to be executed here. It counts with `adopt`."""
        if self._held[layer] or layer in self._retired or layer in self._arriving:
            raise InvariantViolation(f"the KV of layer {layer} is mapped already")
        self._require_free(extents)
        self._extend(self._ranges[layer], extents, clear=False)
        self._arriving.append(layer)

    def adopt(self) -> int:
        """Layers whose KV was arriving are held from now on. Returns the new `block_count`, of the smallest layer."""
        for layer in self._arriving:
            self._set_held(layer, held=True)
        self._arriving.clear()
        return self.block_count

    def level(self, extents_per_layer: int) -> int:
        """So many extents in every layer held; no block behind them is in use. Returns the new `block_count`."""
        for owner in self._held_ranges():
            owner.shrink(max(0, owner.extent_count - extents_per_layer))
        for owner in self._held_ranges():
            self._require_free(extents_per_layer - owner.extent_count)
            self._extend(owner, extents_per_layer - owner.extent_count, clear=False)
        return self.block_count

    def drop(self, layer: int) -> int:
        """Free the KV of a layer that is not executed here. Returns how many extents became free."""
        if layer in self._retired:
            self._retired.remove(layer)
        elif layer in self._arriving:
            self._arriving.remove(layer)
        elif not self._held[layer]:
            raise InvariantViolation(f"the KV of layer {layer} is not held; held are {self.held_layers}")
        freed = self._ranges[layer].extent_count
        self._ranges[layer].shrink(freed)
        self._set_held(layer, held=False)
        return freed

    def _extend(self, owner: VirtualRange, extents: int, *, clear: bool) -> None:
        before = owner.mapped_bytes
        owner.grow(extents)
        if clear:
            owner.bytes[before : owner.mapped_bytes].zero_()

    def _require_free(self, wanted: int) -> None:
        if wanted > self._pool.free_count:
            raise InvariantViolation(f"the KV cache wants {wanted} extents, {self._pool.free_count} are free")

    def _set_held(self, layer: int, *, held: bool) -> None:
        self._held[layer] = held
        self._held_layers = tuple(i for i, there in enumerate(self._held) if there)

    def _held_ranges(self) -> Sequence[VirtualRange]:
        return [self._ranges[layer] for layer in self.held_layers]

    def _blocks_in(self, mapped_bytes: int) -> int:
        return mapped_bytes // self.shape.block_bytes
