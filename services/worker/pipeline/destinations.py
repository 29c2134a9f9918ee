"""Where arriving bytes go: filled by the engine thread, read by link threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

from ballast.common.ids import Epoch, WorkerId
from services.worker.core.migration_messages import MigrationId, Span

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


@dataclass(frozen=True, slots=True)
class _Expected:
    source: WorkerId
    first_block: int
    last_block: int
    pieces: Callable[[int, int], list[torch.Tensor]]


class ExpectedSpans:
    """Spans of migrations: one may be shorter than there is room for, so its memory is looked up when it comes. Safe
    for use from any thread.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._expected: dict[MigrationId, _Expected] = {}

    def put(
        self,
        migration_id: MigrationId,
        source: WorkerId,
        first_block: int,
        last_block: int,
        pieces: Callable[[int, int], list[torch.Tensor]],
    ) -> None:
        """`pieces` is called on a link's thread with the blocks that come, `[first, last)` of the sequence."""
        with self._lock:
            self._expected[migration_id] = _Expected(source, first_block, last_block, pieces)

    def take(self, source: WorkerId, migration_id: MigrationId, span: Span) -> list[torch.Tensor] | None:
        """None: nobody waits for it."""
        with self._lock:
            expected = self._expected.get(migration_id)
            if expected is None or expected.source != source:
                return None
            if not expected.first_block == span.first_block <= span.last_block <= expected.last_block:
                return None
            del self._expected[migration_id]
        return expected.pieces(span.first_block, span.last_block)

    def forget(self, migration_id: MigrationId) -> bool:
        """False: it has been taken, and may be being written."""
        with self._lock:
            return self._expected.pop(migration_id, None) is not None
