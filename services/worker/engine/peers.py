"""The other ranks of a tensor-parallel instance, as the model sees them."""

from dataclasses import dataclass
from typing import Protocol

import torch


class Peers(Protocol):
    """All ranks call the same in the same order. A rank that is gone or silent is an error that ends the process."""

    @property
    def rank(self) -> int: ...

    @property
    def count(self) -> int:
        """Of ranks, this one included."""
        ...

    def sum(self, tensor: torch.Tensor) -> None:
        """Puts the sum of all ranks' tensors in place of each."""
        ...

    def least(self, number: int) -> int:
        """The smallest of what the ranks give."""
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
