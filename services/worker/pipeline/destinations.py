"""Where arriving bytes go: filled by the engine thread, read by link threads."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING

from ballast.common.ids import Epoch, WorkerId
from services.worker.core.spans import Key

if TYPE_CHECKING:
    import torch

Pieces = list["torch.Tensor"]
_PARAMETERS = -1  # in the place of a layer, in a key


def layer_key(epoch: Epoch, layer: int, source: WorkerId) -> Key:
    """Of parameters: no KV has it."""
    return epoch, layer, source, _PARAMETERS


def whole(pieces: Pieces) -> Callable[[int, int], Pieces]:
    """For what comes as it is expected, or not at all."""
    return lambda _first, _last: pieces


class Destinations:
    """Safe for use from any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._expected: dict[Key, tuple[int, int, Callable[[int, int], Pieces]]] = {}

    def put(self, key: Key, pieces: Callable[[int, int], Pieces], first_block: int = 0, last_block: int = 0) -> None:
        """What comes may be shorter than there is room for: `pieces` is called on a link's thread with the blocks that
        do, `[first, last)` of the sequence.
        """
        with self._lock:
            self._expected[key] = first_block, last_block, pieces

    def take(self, key: Key, first_block: int = 0, last_block: int = 0) -> Pieces | None:
        """None: nobody waits for it."""
        with self._lock:
            first, last, pieces = self._expected.get(key, (-1, -1, _nothing))
            if not first == first_block <= last_block <= last:
                return None
            del self._expected[key]
        return pieces(first_block, last_block)

    def of_kv(self) -> list[Key]:
        with self._lock:
            return [key for key in self._expected if key[-1] != _PARAMETERS]

    def forget(self, key: Key) -> bool:
        """False: it has been taken, and may be being written."""
        with self._lock:
            return self._expected.pop(key, None) is not None


def _nothing(_first: int, _last: int) -> Pieces:
    return []
