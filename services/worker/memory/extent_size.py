"""Chooses the extent size of a device's memory."""

from collections.abc import Sequence

_EXTENTS_PER_LAYER = 16  # extents of a layer's parameters, and of a layer's KV if all layers are held
_MAX_DROP_EXTENT_COUNT = 2000  # in half of the layers; a GPU's driver takes about 60 us per mapped extent
_MAX_EXTENT_COUNT = 16384  # far below vm.max_map_count even if no extents are adjacent
_MIN_EXTENT_BYTES = 16 << 10
# Larger extents are multiples of this size, so that mremap moves whole page tables instead of single entries.
_LARGE_EXTENT_BYTES = 2 << 20


def choose_extent_bytes(
    granularity_bytes: int, budget_bytes: int, layer_bytes: Sequence[int], other_bytes: int = 0
) -> int:
    """Return the extent size: a sixteenth of the largest layer's parameters, or of a layer's KV if all layers are held
    and that is less. A size down to half of that is chosen if rounding then wastes less memory. Extents are large
    enough for fast drops and for mapping the whole budget fast.
    """
    kv_bytes = max(0, budget_bytes - sum(layer_bytes) - other_bytes) // max(1, len(layer_bytes))
    fine_bytes = -(-min(max(layer_bytes, default=0), kv_bytes) // _EXTENTS_PER_LAYER)
    least_bytes = max(
        -(-sum(layer_bytes) // (2 * _MAX_DROP_EXTENT_COUNT)), -(-budget_bytes // _MAX_EXTENT_COUNT), _MIN_EXTENT_BYTES
    )
    wanted_bytes = max(fine_bytes, least_bytes)
    step_bytes = (
        granularity_bytes if wanted_bytes < _LARGE_EXTENT_BYTES else max(granularity_bytes, _LARGE_EXTENT_BYTES)
    )
    most, least = -(-wanted_bytes // step_bytes), -(-max(fine_bytes // 2, least_bytes) // step_bytes)

    def home_kv_bytes(extent_bytes: int) -> int:
        taken = sum(-(-size_bytes // extent_bytes) for size_bytes in (*layer_bytes, other_bytes))
        return (budget_bytes // extent_bytes - taken) // max(1, len(layer_bytes)) * extent_bytes

    return max((steps * step_bytes for steps in range(most, least - 1, -1)), key=home_kv_bytes)
