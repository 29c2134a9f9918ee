"""A device's memory as numbers: what `services.worker.memory.device.DeviceMemory` does with extents, without extents.

Parameters, KV of the layers that are executed, and KV of layers given up that is still being sent share one budget
(I3). All layers have the same size.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ballast.common.errors import ConfigError, InvariantViolation
from ballast.common.load import MemoryReport
from ballast.common.restoring import divided_extents
from ballast.common.units import human_bytes

_EXTENTS_PER_LAYER = 16
_MAX_EXTENT_COUNT = 16384
_GRANULARITY_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes that do not change. In extents unless they say otherwise."""

    extent_bytes: int
    budget: int
    layer_count: int
    layer_parameters: int
    other_parameters: int
    block_bytes: int  # of one KV block in one layer
    rest_bytes: int = 0  # of the budget, less than an extent

    @staticmethod
    def choose(
        *, budget_bytes: int, layer_count: int, layer_parameter_bytes: int, other_parameter_bytes: int, block_bytes: int
    ) -> "Geometry":
        """A sixteenth of a layer, in whole pages of the device; not so many that mapping them takes long.

        Raises:
            ConfigError: parameters and a block for each layer do not fit.
        """
        wanted = max(-(-layer_parameter_bytes // _EXTENTS_PER_LAYER), -(-budget_bytes // _MAX_EXTENT_COUNT))
        extent_bytes = -(-wanted // _GRANULARITY_BYTES) * _GRANULARITY_BYTES
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
        """Of a whole copy."""
        return self.layer_parameters * self.layer_count + self.other_parameters

    @property
    def home_kv(self) -> int:
        """Of each layer's KV while all layers are held."""
        return (self.budget - self.parameters) // self.layer_count

    def blocks_in(self, extents: int) -> int:
        return extents * self.extent_bytes // self.block_bytes


class VirtualMemory:
    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        everything = range(geometry.layer_count)
        self.held = set(everything)  # layers whose parameters are here
        self.kv_held = set(everything)  # layers whose KV is kept here
        self.retired: dict[int, int] = {}  # layer given up -> extents of its KV, which is still being sent
        self.arriving: dict[int, int] = {}  # layer that is back -> extents of its KV, which is being copied
        self._kv = geometry.home_kv  # of every layer kept
        self._report: MemoryReport | None = None  # None: something has changed since the last one

    @property
    def block_count(self) -> int:
        return self.geometry.blocks_in(self._kv)

    @property
    def home_block_count(self) -> int:
        return self.geometry.blocks_in(self.geometry.home_kv)

    @property
    def layer_bytes(self) -> int:
        return self.geometry.layer_parameters * self.geometry.extent_bytes

    def blocks_after_drop(self, layers: Iterable[int]) -> int:
        """Once these layers and their KV have been given up."""
        gone = set(layers)
        kept = len(self.kv_held - gone)
        freed = len(gone & self.held) * self.geometry.layer_parameters + len(gone & self.kv_held) * self._kv
        return self.geometry.blocks_in(self._kv + (self._free + freed) // max(1, kept))

    def drop_layers(self, layers: Iterable[int]) -> int:
        """Their parameters make room for the KV of the others; their KV stays readable. Returns the blocks."""
        gone = set(layers)
        self._report = None
        self.held -= gone
        self.retired |= dict.fromkeys(sorted(gone & self.kv_held), self._kv)
        self.kv_held -= gone
        return self._grow()

    def shrink_retired(self, block_count: int) -> int:
        """Of layers given up only the first `block_count` blocks are needed any more. Returns the blocks."""
        self._report = None
        extents = -(-block_count * self.geometry.block_bytes // self.geometry.extent_bytes)
        self.retired = {layer: min(held, extents) for layer, held in self.retired.items()}
        return self._grow()

    def release_retired(self) -> int:
        self._report = None
        self.retired.clear()
        self.arriving.clear()
        return self._grow()

    @property
    def beside_block_count(self) -> int:
        """When all parameters are here, and KV of those layers only that have it now."""
        return self.geometry.blocks_in(self._beside)

    @property
    def _beside(self) -> int:
        missing = self.geometry.layer_count - len(self.held)
        left = self._free - missing * self.geometry.layer_parameters
        return min(self._kv, self._kv + left // max(1, len(self.kv_held)))

    def make_room_for_layers(self, layers: Iterable[int]) -> int:
        """The KV shrinks as far as the parameters of missing layers want it; their ranges are mapped. Returns the
        blocks.
        """
        self._report = None
        self._kv = self._beside
        self.held |= set(layers)
        return self.block_count

    def divided_extents(self, member_count: int) -> tuple[int, int]:
        """Of each layer with KV, and of each without, while a group of so many is dissolved and KV is copied."""
        return divided_extents(self.geometry.home_kv, self.geometry.layer_count, len(self.kv_held), member_count)

    def blocks_in(self, extents: int) -> int:
        return self.geometry.blocks_in(extents)

    def make_room_for_kv(self, extents_per_layer: int) -> int:
        """The KV of layers that have any shrinks. Returns the blocks."""
        self._report = None
        self._kv = min(self._kv, extents_per_layer)
        return self.block_count

    def expect_kv(self, extents_per_layer: int) -> None:
        """Of all layers that have none."""
        self._report = None
        missing = sorted(set(range(self.geometry.layer_count)) - self.kv_held)
        self.arriving = dict.fromkeys(missing, extents_per_layer)

    def level_kv(self) -> int:
        """All layers are executed here, and have as much KV. Returns the blocks."""
        self._report = None
        self.arriving.clear()
        self.kv_held = set(range(self.geometry.layer_count))
        self._kv = self.geometry.home_kv
        return self.block_count

    def _grow(self) -> int:
        self._kv += self._free // max(1, len(self.kv_held))
        return self.block_count

    @property
    def _parameters(self) -> int:
        return len(self.held) * self.geometry.layer_parameters + self.geometry.other_parameters

    @property
    def _all_kv(self) -> int:
        return len(self.kv_held) * self._kv + sum(self.retired.values()) + sum(self.arriving.values())

    @property
    def _free(self) -> int:
        return self.geometry.budget - self._parameters - self._all_kv

    def report(self) -> MemoryReport:
        """The same object until something changes: every step asks."""
        if self._report is None:
            self._report = self._make_report()
        return self._report

    def _make_report(self) -> MemoryReport:
        size, rest_bytes = self.geometry.extent_bytes, self.geometry.rest_bytes
        return MemoryReport(
            budget_bytes=self.geometry.budget * size + rest_bytes,
            parameter_bytes=self._parameters * size,
            kv_bytes=self._all_kv * size,
            free_bytes=self._free * size + rest_bytes,
        )

    def check(self) -> None:
        """Raise InvariantViolation if more is mapped than there is, or a layer is executed that is not here (I3)."""
        if self._free < 0:
            raise InvariantViolation(f"{-self._free} extents are mapped twice")
        if not self.kv_held <= self.held:
            raise InvariantViolation(f"KV of layers whose parameters are not here: {sorted(self.kv_held - self.held)}")
