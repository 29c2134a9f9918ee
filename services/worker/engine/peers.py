"""The other ranks of a tensor-parallel instance, as the model sees them."""

from dataclasses import dataclass
from typing import Protocol

import torch


class Peers(Protocol):
    """Collectives: all ranks call the same in the same order. A lost or silent rank raises, and ends the process."""

    @property
    def rank(self) -> int: ...

    @property
    def count(self) -> int:
        """Of ranks, this one included."""
        ...

    def sum(self, tensor: torch.Tensor) -> None:
        """All-reduce (sum), in place."""
        ...

    def least(self, number: int) -> int:
        """All-reduce (minimum)."""
        ...


@dataclass(frozen=True, slots=True)
class Apart:
    """`Peers` of which there is one so far: what it would have is known by them, and nothing is computed."""

    rank: int
    count: int

    def sum(self, tensor: torch.Tensor) -> None:
        """Nothing to add."""

    def least(self, number: int) -> int:
        return number
