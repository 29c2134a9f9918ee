"""The size of the extents that a device's memory is dealt out in."""

from collections.abc import Sequence

_EXTENTS_PER_LAYER = 16  # how finely a dropped layer can be dealt out, and a layer's KV at home can be cut
_MAX_DROP_EXTENT_COUNT = 2000  # in half of the layers: mapping one takes a GPU's driver some 60 us
_MAX_EXTENT_COUNT = 16384  # far below vm.max_map_count even if no two neighbours lie side by side
_MIN_EXTENT_BYTES = 16 << 10
_LARGE_EXTENT_BYTES = 2 << 20  # from here on a multiple of it: the host moves whole page tables then


def choose_extent_bytes(
    granularity_bytes: int, budget_bytes: int, layer_bytes: Sequence[int], other_bytes: int = 0
) -> int:
    """A sixteenth of the largest layer's parameters, or of a layer's KV while all layers are held, if that is less; or
    down to half of it, if that leaves more KV, since what is rounded up is lost to it. Not so small that a drop or
    mapping the whole budget takes long.
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
