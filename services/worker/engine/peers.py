"""The other ranks of a tensor-parallel instance, as the model sees them."""

from dataclasses import dataclass
from typing import Protocol

import torch


class Peers(Protocol):
    """Collectives: all ranks make the same calls in the same order. They raise if a rank is lost or silent; the error
    ends the process.
    """

    @property
    def rank(self) -> int: ...

    @property
    def count(self) -> int:
        """Number of ranks, this one included."""
        ...

    def sum(self, tensor: torch.Tensor) -> None:
        """All-reduce (sum), in place."""
        ...

    def least(self, number: int) -> int:
        """All-reduce (minimum) of one number."""
        ...


@dataclass(frozen=True, slots=True)
class Apart:
    """`Peers` of a rank whose process group does not exist yet: enough to choose and describe a model, but not to
    compute it.
    """

    rank: int
    count: int

    def sum(self, tensor: torch.Tensor) -> None:
        """No-op."""

    def least(self, number: int) -> int:
        return number
