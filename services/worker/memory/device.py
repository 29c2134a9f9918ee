"""One device's memory: parameters and KV cache in one budget."""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Concatenate, ParamSpec, Self, TypeVar

from ballast.common.errors import ConfigError, InvariantViolation
from ballast.common.load import MemoryReport
from ballast.common.units import human_bytes
from services.worker.memory.backend import MemoryBackend
from services.worker.memory.extent_size import choose_extent_bytes
from services.worker.memory.kv_cache import KvCache, KvShape, KvWindow
from services.worker.memory.parameters import ParameterStore, PartLayout, PartSpec, lay_out, layer_name
from services.worker.memory.pool import PhysicalPool, Purpose

_Layers = tuple[int, ...]
# State that `undo` restores: the draining window, the current window, the held layers of parameters, and each window's
# layers.
_Books = tuple[KvWindow | None, KvWindow, _Layers, tuple[tuple[_Layers, _Layers], ...]]

_LEAST_SHARE = 8  # the other window gets at least 1/8 of the KV that a layer has when all layers are held


M = TypeVar("M", bound="DeviceMemory")
P = ParamSpec("P")
R = TypeVar("R")


def all_or_nothing(change: Callable[Concatenate[M, P], R]) -> Callable[Concatenate[M, P], R]:
    """Decorator that reverts a change if it fails halfway, for example because the driver refuses a call."""

    @functools.wraps(change)
    def whole(memory: M, *args: P.args, **named: P.kwargs) -> R:
        memory.begin()
        try:
            return change(memory, *args, **named)
        except BaseException:
            memory.undo()
            raise

    return whole


class DeviceMemory:
    """Pool, parameters and KV cache of one device. Used by one thread; only `report` may be called from others."""

    def __init__(self, pool: PhysicalPool, parameters: ParameterStore, kv: KvCache) -> None:
        self.pool = pool
        self.parameters = parameters
        self.kv = kv
        self.leaving: KvWindow | None = None  # the other window, while it holds a draining group's KV
        self._before = self._books()
        self._clears = parameters.dtypes != {kv.shape.dtype}
        self._home_extents = 0  # extents per layer's KV when all layers are held in a single window

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
        """Map all parameters and divide the remaining memory evenly among the layers' KV. Extents that cannot be
        divided stay free.

        If `extent_bytes` is None, a size that suits the model is chosen. Takes ownership of the backend.

        Raises:
            ConfigError: the budget is too small for the parameters and one KV block per layer, or cannot be allocated.
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
            memory._grow_kv()
            memory._home_extents = memory.kv.extents_per_layer
            undo.pop_all()
            return memory

    def begin(self) -> None:
        """Start recording a change for `undo`."""
        self.pool.begin()
        self._before = self._books()

    def undo(self) -> None:
        """Revert the last change. Idempotent. Copied blocks stay copied, because their targets were unused."""
        self.pool.undo()
        self.leaving, self.kv.window, held_layers, layers = self._before
        self.parameters.reset(held_layers)
        for window, of_window in zip(self.kv.windows, layers, strict=True):
            window.reset(*of_window)

    def _books(self) -> _Books:
        layers = tuple(window.layers for window in self.kv.windows)
        return self.leaving, self.kv.window, self.parameters.held_layers, layers

    # ------------------------------------------------------------ dropping and restoring layers Extents that change
    # their purpose need not be cleared if parameters and KV have the same dtype and finite values.

    @all_or_nothing
    def drop_layers(self, layers: Sequence[int]) -> int:
        """Drop layers that another member executes and give their memory to the KV of the remaining layers.

        The KV of dropped layers stays readable until `shrink_retired` or `release_retired`. Returns the new number of
        blocks.
        """
        self.parameters.drop(layers)
        self.kv.window.retire([layer for layer in layers if layer in self.kv.held_layers])
        return self._grow_kv()

    @all_or_nothing
    def shrink_retired(self, block_count: int, moves: Sequence[tuple[int, int]] = ()) -> int:
        """Keep only `block_count` blocks of the dropped layers' KV, after copying those in `moves` (from, to) down;
        they must not be read during the copy. Returns the number of blocks of the remaining layers.
        """
        self.kv.window.move_retired(moves)
        self.pool.backend.synchronise()
        self.kv.window.shrink_retired(block_count)
        return self._grow_kv()

    @all_or_nothing
    def release_retired(self) -> int:
        """Give the KV memory of dropped layers to the remaining layers. Returns the number of blocks."""
        for layer in self.kv.retired_layers:
            self.kv.window.drop(layer)
        return self._grow_kv()

    def _grow_kv(self) -> int:
        extents_per_layer = self.pool.free_count // max(1, len(self.kv.held_layers))
        return self.kv.window.grow(extents_per_layer, clear=self._clears)

    def blocks_after_drop(self, layers: Sequence[int]) -> int:
        """Number of blocks after dropping these layers and their KV."""
        kept = [layer for layer in self.kv.held_layers if layer not in layers]
        freed = sum(self.parameters.extents_of(layer) for layer in layers)
        freed += len([layer for layer in layers if layer in self.kv.held_layers]) * self.kv.extents_per_layer
        more = (self.pool.free_count + freed) // max(1, len(kept))
        return self.blocks_in(self.kv.extents_per_layer + more)

    def blocks_in(self, extents: int) -> int:
        return extents * self.pool.extent_bytes // self.kv.shape.block_bytes

    @property
    def home_block_count(self) -> int:
        """Blocks of a single window with all layers held; equal for both windows."""
        return self.blocks_in(self._home_extents)

    @property
    def leaving_block_count(self) -> int:
        """Maximum blocks of the current window if all parameters are loaded and every layer gets a minimum in the other
        window. 0: the memory is too small for both.
        """
        layer_count, held_count = self.kv.shape.layer_count, max(1, len(self.kv.held_layers))
        own, one_block = self.kv.extents_per_layer, self.kv.extents_for_blocks(1)
        least = layer_count * max(one_block, self._home_extents // _LEAST_SHARE)
        missing = [i for i in range(layer_count) if i not in self.parameters.held_layers]
        wanted = least + sum(self.parameters.extents_of(layer) for layer in missing)
        at_home = (self._home_extents * layer_count - least) // held_count
        left = own + (self.pool.free_count - wanted) // held_count
        extents = min(own, at_home, left)
        return self.blocks_in(extents) if extents >= one_block else 0

    @all_or_nothing
    def make_room_for_layers(self, layers: Sequence[int], *, block_count: int) -> int:
        """Shrink the KV to `block_count` blocks and map the parameters of these layers, so that they can be loaded.

        Used higher blocks must have been copied down. Returns the number of blocks.
        """
        self.pool.backend.synchronise()
        self.kv.window.keep(block_count)
        for layer in layers:
            self.parameters.restore(layer)
        return self.kv.block_count

    # ------------------------------------------------------------ parking

    can_park = True  # False if not all bytes of all ranks can be copied to this host's memory

    @property
    def is_parked(self) -> bool:
        """True if the memory of layers and KV has been returned to the device."""
        return self.pool.has_given_up

    def park(self) -> None:
        """Release layers and KV, and return their memory to the device. There must be no requests, and all layers must
        be stored elsewhere. Parameters outside layers stay.
        """
        self.empty()
        self.give_up()

    @all_or_nothing
    def empty(self) -> None:
        """The first half of `park`: unmap layers and KV."""
        self.pool.backend.synchronise()
        self.parameters.drop(self.parameters.held_layers)
        self.kv.window.keep(0)

    def give_up(self) -> None:
        """The second half of `park`, which cannot be undone: return all free memory. Idempotent."""
        self.pool.give_up_free()

    def unpark(self) -> None:
        """Allocate the device's memory again, for `make_room_for_layers`.

        Raises:
            ConfigError: the device lacks the memory; nothing has changed.
        """
        self.pool.take_back()

    @all_or_nothing
    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (from, to) in every layer of the current window."""
        self.kv.window.move(moves)

    # ------------------------------------------------------------ two groups at a time

    @all_or_nothing
    def open_window(self) -> int:
        """Make the current window the draining one. The other window, with all layers, becomes the current one and uses
        the free extents. Returns its number of blocks.
        """
        least = self.kv.extents_for_blocks(1) * self.kv.shape.layer_count
        if self.leaving is not None:
            raise InvariantViolation("a window is opened, but another one has not been closed yet")
        if len(self.parameters.held_layers) < self.parameters.layer_count:
            raise InvariantViolation(f"a window is opened, but only layers {self.parameters.held_layers} are held")
        if self.pool.free_count < least:
            raise InvariantViolation(f"a window of at least {least} extents is opened, {self.pool.free_count} are free")
        self.pool.backend.synchronise()
        opened = self.kv.other_window
        opened.hold_all()
        opened.grow(self.pool.free_count // self.kv.shape.layer_count, clear=self._clears)
        self.leaving, self.kv.window = self.kv.window, opened
        return opened.block_count

    @all_or_nothing
    def move_leaving(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (from, to) in every layer of the draining window."""
        self._require_leaving().move(moves)

    @all_or_nothing
    def shrink_leaving(self, block_count: int) -> int:
        """Shrink the draining window to `block_count` blocks and give the memory to the current window. Higher blocks
        must be unused. Returns the current window's number of blocks.
        """
        leaving = self._require_leaving()
        self.pool.backend.synchronise()
        leaving.keep(block_count)
        return self._grow_kv()

    @all_or_nothing
    def close_leaving(self) -> int:
        """Give all memory of the draining window to the current one. Returns its number of blocks."""
        leaving = self._require_leaving()
        self.pool.backend.synchronise()
        leaving.drop_all()
        self.leaving = None
        return self._grow_kv()

    def _require_leaving(self) -> KvWindow:
        if self.leaving is None:
            raise InvariantViolation("there is no draining window")
        return self.leaving

    def parameter_bytes_of(self, layers: Sequence[int]) -> int:
        """Bytes that dropping these layers frees."""
        return sum(self.parameters.extents_of(layer) for layer in layers) * self.pool.extent_bytes

    def report(self) -> MemoryReport:
        return self.pool.report()

    def check(self) -> None:
        """Raise InvariantViolation unless every byte of the budget is accounted for once (I3)."""
        self.pool.check()
        parameters = self.parameters.extent_count
        by_window = [window.extent_count for window in self.kv.windows]
        free_count = self.pool.extent_count - parameters - sum(by_window)
        if (self.pool.taken_count(Purpose.PARAMETERS), self.pool.free_count) != (parameters, free_count):
            raise InvariantViolation(
                f"{self.pool.extent_count} extents, {parameters} of parameters, {by_window} of KV,"
                f" {self.pool.free_count} free"
            )
        for window in self.kv.windows:
            window.check()
        other = self.kv.other_window
        if self.leaving not in (None, other) or (self.leaving is None and (other.held_layers or other.retired_layers)):
            raise InvariantViolation("a window holds layers, but is neither current nor draining")

    def close(self) -> None:
        """Return all memory to the system. Its tensors must not be used afterwards. Idempotent."""
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
    least_bytes = parameter_bytes + kv_bytes
    if budget_bytes // extent_bytes * extent_bytes < least_bytes:
        raise ConfigError(
            "device_memory_bytes",
            f"{human_bytes(budget_bytes)} are too little. The model's parameters take {human_bytes(parameter_bytes)},"
            f" and one KV block of {kv_shape.block_tokens} tokens in each layer {human_bytes(kv_bytes)};"
            f" {least_bytes} bytes are the minimum, and requests need more for their KV",
        )
