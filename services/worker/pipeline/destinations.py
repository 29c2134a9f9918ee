"""Where arriving bytes go: filled by the engine thread, read by link threads."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING

from ballast.common.ids import Epoch, WorkerId

if TYPE_CHECKING:
    import torch

Key = tuple[Epoch, int, WorkerId, int]  # epoch, sequence and first layer; or layer and 0; source in between


class Destinations:
    """Safe for use from any thread."""

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
