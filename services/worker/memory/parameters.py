"""Model parameters in extents: one range per layer, and one per other part (embedding, head ...).

A layer can be dropped (its extents return to the pool, for the KV cache) and restored (extents are mapped again, a
loader fills them, and checksums verify them). Its tensors are created once and stay valid.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ballast.common.errors import ConfigError, InvariantViolation
from services.worker.memory.backend import SUPPORTED_DTYPES, Algorithm, dtype_name
from services.worker.memory.pool import PhysicalPool, Purpose, VirtualRange
from services.worker.memory.remote import RemoteParameters

if TYPE_CHECKING:
    import torch

ALIGNMENT_BYTES = 64  # a cache line, and the widest vector load
CHECKSUM_BYTES = 16
_LAYOUT_BYTES = 8
_PIECE_BYTES = 4 << 20  # bytes read at once for a checksum, which takes a few milliseconds


class TensorSpec(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype


PartSpec = Mapping[str, TensorSpec]  # name of the tensor within its part -> its shape and dtype


@dataclass(frozen=True, slots=True)
class TensorPlacement:
    """Position of one tensor in its part's range."""

    name: str
    spec: TensorSpec
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class PartLayout:
    placements: tuple[TensorPlacement, ...]
    size_bytes: int  # including padding between tensors


def lay_out(part: str, specs: PartSpec) -> PartLayout:
    """Place a part's tensors consecutively, in the given order."""
    placements: list[TensorPlacement] = []
    end_bytes = 0
    for name, spec in specs.items():
        if dtype_name(spec.dtype) not in SUPPORTED_DTYPES:
            supported = ", ".join(SUPPORTED_DTYPES)
            raise ConfigError(f"{part}.{name}", f"dtype {spec.dtype} is not supported; use one of {supported}")
        if any(extent <= 0 for extent in spec.shape):
            raise ConfigError(f"{part}.{name}", f"shape {tuple(spec.shape)} has a dimension that is not positive")
        offset_bytes = -(-end_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        size_bytes = math.prod(spec.shape) * spec.dtype.itemsize
        placements.append(TensorPlacement(name, spec, offset_bytes, size_bytes))
        end_bytes = offset_bytes + size_bytes
    return PartLayout(tuple(placements), end_bytes)


class ParameterStore:
    """Named tensors of each part. Initially all are mapped and zero; a loader fills them in place."""

    def __init__(self, pool: PhysicalPool, layers: Sequence[PartSpec], others: Mapping[str, PartSpec]) -> None:
        self._pool = pool
        self._layers = [_ParameterPart(pool, layer_name(i), specs) for i, specs in enumerate(layers)]
        self._others = {name: _ParameterPart(pool, name, specs) for name, specs in others.items()}
        self._held = [True] * len(layers)
        self._held_layers = tuple(range(len(layers)))
        self.mirrors: tuple[ParameterStore, ...] = ()  # stores of the other ranks, which hold the same layers
        self.remote: RemoteParameters | None = None  # the rank on another host whose memory this store mirrors
        self.loaded_checksums: dict[int, bytes] = {}  # layer -> its checksum when loaded, which never changes
        for part in [*self._layers, *self._others.values()]:
            part.range.grow(part.extent_count)

    @property
    def layer_count(self) -> int:
        return len(self._layers)

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Dtypes of the layers, whose extents KV may take."""
        return {spec.dtype for part in self._layers for spec in part.specs.values()}

    @property
    def held_layers(self) -> tuple[int, ...]:
        return self._held_layers

    @property
    def extent_count(self) -> int:
        """Extents mapped for all parts."""
        return sum(part.range.extent_count for part in (*self._layers, *self._others.values()))

    def size_bytes_of(self, layer: int) -> int:
        """Bytes of the layer's tensors, without rounding to extents."""
        return self._layers[layer].size_bytes

    @property
    def other_bytes(self) -> int:
        """Bytes of all parts other than layers."""
        return sum(part.size_bytes for part in self._others.values())

    def extents_of(self, layer: int) -> int:
        """Number of extents that dropping this layer frees, and that restoring it needs."""
        return self._layers[layer].extent_count

    @property
    def of_ranks(self) -> tuple[ParameterStore, ...]:
        """Stores of all ranks of the instance, this one first."""
        return (self, *self.mirrors)

    def pieces(self, layer: int) -> list[torch.Tensor]:
        """All memory of a held layer, on all ranks."""
        return [tensor for store in self.of_ranks for tensor in store.layer(layer).values()]

    def layer(self, layer: int) -> Mapping[str, torch.Tensor]:
        """The tensors of a held layer: the same objects before a drop and after a restore."""
        self._require_held(layer, held=True)
        return self._layers[layer].tensors

    def part(self, name: str) -> Mapping[str, torch.Tensor]:
        """The tensors of a part other than a layer."""
        return self._others[name].tensors

    @property
    def other_names(self) -> tuple[str, ...]:
        """Names of the parts other than layers."""
        return tuple(self._others)

    def other_layout(self, name: str) -> bytes:
        """Return the `layout` of a part other than a layer."""
        return self._others[name].layout_digest

    def layout(self, layer: int) -> bytes:
        """Return a hash (8 bytes) of names, shapes and dtypes. A layer's bytes may be copied between two stores only if
        their hashes are equal.
        """
        return b"".join(store._layers[layer].layout_digest for store in self.of_ranks)

    @property
    def checksums_by(self) -> Algorithm:
        return self._pool.backend.checksums_by

    def layer_checksum(
        self, layer: int, between: Callable[[], None] | None = None, by: Algorithm | None = None
    ) -> bytes:
        """Return the checksum (16 bytes) of names, shapes, dtypes and contents, which is equal only for equal
        parameters. `by`: the algorithm, by default `checksums_by`.

        `between` is called after every piece of about 4 MiB that the host reads, and after each tensor.
        """
        self._require_held(layer, held=True)
        chosen = by or self.checksums_by
        return combined([store._checksum(layer, chosen, between) for store in self.of_ranks])

    def _checksum(self, layer: int, by: Algorithm, between: Callable[[], None] | None) -> bytes:
        if self.remote is not None:
            return self.remote.layer_checksum(layer, by)
        return self._layers[layer].checksum(by, between)

    def stored_checksum(self, layer: int, between: Callable[[], None] | None, by: Algorithm | None) -> bytes:
        """Send ranks on other hosts their parts of a layer that has been written here, and return its
        `layer_checksum`.
        """
        for store in self.of_ranks:
            if store.remote is not None:
                store.remote.store_layer(layer)
        return self.layer_checksum(layer, between, by)

    def fetch(self, layer: int) -> None:
        """Fetch a layer from ranks on other hosts, before the parts of all ranks are read here."""
        for store in self.of_ranks:
            if store.remote is not None:
                store.remote.fetch_layer(layer)

    def fill(self, layer: int, fill_one: Callable[[int, ParameterStore], None]) -> None:
        """Call `fill_one(rank, store)` for each rank of this host; ranks on other hosts read the layer themselves.
        Rank 0 is this store.
        """
        for rank, store in enumerate(self.of_ranks):
            if store.remote is not None:
                store.remote.read_layer(layer)
            else:
                fill_one(rank, store)

    def part_checksum(self, name: str) -> bytes:
        """Return the `layer_checksum` of a part other than a layer."""
        return self._others[name].checksum(self.checksums_by)

    def drop(self, layers: Iterable[int]) -> int:
        """Unmap these layers and return their extents to the pool. Returns the number of extents freed.

        Accessing their tensors afterwards crashes the process.
        """
        chosen = sorted(set(layers))
        for layer in chosen:
            self._require_held(layer, held=True)
        for layer in chosen:
            self._layers[layer].range.shrink(self._layers[layer].extent_count)
            self._set_held(layer, held=False)
        return sum(self.extents_of(layer) for layer in chosen)

    def restore(self, layer: int) -> Mapping[str, torch.Tensor]:
        """Map extents from the pool for a dropped layer and return its tensors, whose contents are arbitrary.

        Load them and verify `layer_checksum` before the layer is executed.
        """
        self._require_held(layer, held=False)
        self._layers[layer].range.grow(self._layers[layer].extent_count)
        self._set_held(layer, held=True)
        return self._layers[layer].tensors

    def reset(self, held_layers: Sequence[int]) -> None:
        """Undo a change by restoring the previous set of held layers."""
        for layer in range(self.layer_count):
            self._set_held(layer, held=layer in held_layers)

    def _set_held(self, layer: int, *, held: bool) -> None:
        self._held[layer] = held
        self._held_layers = tuple(i for i, there in enumerate(self._held) if there)

    def _require_held(self, layer: int, *, held: bool) -> None:
        if self._held[layer] != held:
            raise InvariantViolation(f"layer {layer} is {'dropped' if held else 'held'}; held are {self.held_layers}")


def combined(checksums: Sequence[bytes]) -> bytes:
    """Return a layer's checksum, combined from the checksums of all ranks' shards."""
    if len(checksums) == 1:
        return checksums[0]
    return hashlib.sha256(b"".join(checksums)).digest()[:CHECKSUM_BYTES]


def layer_name(layer: int) -> str:
    return f"layers.{layer}"


class _ParameterPart:
    """One address range and its tensors."""

    def __init__(self, pool: PhysicalPool, name: str, specs: PartSpec) -> None:
        layout = lay_out(name, specs)
        self.size_bytes = layout.size_bytes
        self.extent_count = pool.extents_for(layout.size_bytes)
        self.range: VirtualRange = pool.reserve(f"parameters of {name}", Purpose.PARAMETERS, self.extent_count)
        self._layout, self.specs = layout, specs
        described = "".join(f"{p.name} {p.spec.dtype} {tuple(p.spec.shape)}\n" for p in layout.placements)
        self.layout_digest = hashlib.sha256(described.encode()).digest()[:_LAYOUT_BYTES]
        self.tensors = {
            placed.name: self._bytes_of(placed).view(placed.spec.dtype).view(placed.spec.shape)
            for placed in layout.placements
        }

    def _bytes_of(self, placed: TensorPlacement) -> torch.Tensor:
        return self.range.bytes[placed.offset_bytes : placed.offset_bytes + placed.size_bytes]

    def checksum(self, by: Algorithm, between: Callable[[], None] | None = None) -> bytes:
        digest = hashlib.sha256()  # takes half the time of other algorithms, since processors have instructions for it
        for placed in self._layout.placements:
            digest.update(f"{placed.name} {placed.spec.dtype} {tuple(placed.spec.shape)}\n".encode())
            if by is Algorithm.MIX128:
                from services.worker.memory.mixing import mixed  # imports torch

                digest.update(mixed(self._bytes_of(placed)))
                if between is not None:
                    between()
                continue
            for part in self.range.contents(placed.offset_bytes, placed.size_bytes):
                for start in range(0, len(part), _PIECE_BYTES):
                    digest.update(part[start : start + _PIECE_BYTES])
                    if between is not None:
                        between()
        return digest.digest()[:CHECKSUM_BYTES]
