"""Memory of ranks on other hosts, as rank 0 sees it. Rank 0 has a mirror of each rank's tensors: bytes are fetched from
the rank before they are sent, and stored to it after they have arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from services.worker.memory.backend import Algorithm

Runs = Sequence[tuple[int, int]]  # blocks [first, last)


class RemoteKv(Protocol):
    """KV of a rank on another host. Used by the engine thread only."""

    def fetch_kv(self, layers: range, runs: Runs) -> None: ...

    def store_kv(self, layers: range, runs: Runs) -> None: ...


class RemoteParameters(Protocol):
    """Parameters of a rank on another host. Several threads may use it concurrently for different layers."""

    def fetch_layer(self, layer: int) -> None: ...

    def store_layer(self, layer: int) -> None: ...

    def layer_checksum(self, layer: int, by: Algorithm) -> bytes: ...

    def read_layer(self, layer: int) -> None:
        """Make the rank read the layer from its own host's source."""
        ...
