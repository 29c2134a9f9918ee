"""Memory of ranks on other hosts, as seen by rank 0: it has an image of each rank's tensors, whose bytes are fetched
before they are sent, and stored after they have arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from services.worker.memory.backend import Algorithm

Runs = Sequence[tuple[int, int]]  # blocks [first, last)


class RemoteKv(Protocol):
    """KV of a rank on another host. Engine thread only."""

    def fetch_kv(self, layers: range, runs: Runs) -> None: ...

    def store_kv(self, layers: range, runs: Runs) -> None: ...


class RemoteParameters(Protocol):
    """Parameters of a rank on another host. Safe for use from several threads, each with a layer of its own."""

    def fetch_layer(self, layer: int) -> None: ...

    def store_layer(self, layer: int) -> None: ...

    def layer_checksum(self, layer: int, by: Algorithm) -> bytes: ...

    def read_layer(self, layer: int) -> None:
        """Have the rank read the layer from its own host's source."""
        ...
