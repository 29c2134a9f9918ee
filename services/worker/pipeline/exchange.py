"""KV on its way between members: which pieces of memory a victim's KV is, and who waits for what.

The receiver asks (KvWanted) once its blocks are ready, so a transfer never finds its destination missing. Both sides
name the pieces layer by layer and block by block in the order of the sequence; ids of neighbours are merged, and runs
need not match on the two sides.

`Destinations` is shared with link threads; everything else here belongs to the engine thread.
"""

from collections.abc import Sequence
from threading import Lock

import torch

from ballast.common.ids import Epoch, WorkerId
from services.worker.core.batch import SequenceId
from services.worker.core.blocks import blocks_for
from services.worker.memory.kv_cache import KvCache


def kv_pieces(
    kv: KvCache, table: Sequence[int], computed_tokens: int, first_layer: int, last_layer: int
) -> list[torch.Tensor]:
    """The memory of a sequence's KV in `[first_layer, last_layer)`: whole blocks, [n, 2, T, K, H] per run of ids."""
    runs = _runs(table[: blocks_for(computed_tokens, kv.shape.block_tokens)])
    return [kv.layer(layer)[first:last] for layer in range(first_layer, last_layer) for first, last in runs]


def kv_bytes(kv: KvCache, computed_tokens: int, layer_count: int) -> int:
    return blocks_for(computed_tokens, kv.shape.block_tokens) * kv.shape.block_bytes * layer_count


def _runs(blocks: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and runs[-1][1] == block:
            runs[-1] = (runs[-1][0], block + 1)
        else:
            runs.append((block, block + 1))
    return runs


Key = tuple[Epoch, SequenceId, WorkerId, int]  # epoch, sequence, source, first layer


class Destinations:
    """Where arriving KV goes. Filled by the engine thread, read by link threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._pieces: dict[Key, list[torch.Tensor]] = {}

    def put(self, key: Key, pieces: list[torch.Tensor]) -> None:
        with self._lock:
            self._pieces[key] = pieces

    def take(self, key: Key) -> list[torch.Tensor] | None:
        with self._lock:
            return self._pieces.pop(key, None)

    def clear(self) -> None:
        with self._lock:
            self._pieces.clear()
