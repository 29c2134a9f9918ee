"""What a batch costs a stage: equations 1 to 3 of KunServe (EuroSys '26, section 4.3), and one term more.

The term: a chunk reads the KV of its prefix once, however few tokens it has, so `prefix_s` counts the prefix itself.
Without it decodes with long contexts come out at half of what they take on a CPU; with `prefix_s` 0 the equations are
the paper's.

Costs that decide are added with `math.fsum`: what `sum` gives for floats depends on the version of Python.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Chunk(NamedTuple):
    """Tokens of one sequence that a batch computes. A decode is a chunk of one token."""

    prefix_tokens: int  # have their KV already
    token_count: int


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of one stage. All coefficients are at least 0, and `shared_s` is at most `chunk_s`."""

    attention_s: float  # per pair of a token and one that it attends to
    token_s: float  # per token
    chunk_s: float  # per sequence in the batch
    shared_s: float  # saved for every sequence but the first
    prefix_s: float = 0.0  # per token of a chunk's prefix, whose KV is read

    def chunk_cost_s(self, chunk: Chunk) -> float:
        """A chunk alone (equations 1 and 2)."""
        prefix, count = chunk
        pairs = prefix * count + (count * count + count) / 2
        return self.attention_s * pairs + self.token_s * count + self.prefix_s * prefix + self.chunk_s

    def batch_cost_s(self, chunks: Iterable[Chunk]) -> float:
        """Chunks of different sequences together (equation 3); 0 for none."""
        costs = [self.chunk_cost_s(chunk) for chunk in chunks]
        return math.fsum(costs) - max(0, len(costs) - 1) * self.shared_s

    def joining_s(self, prefix_tokens: int) -> float:
        """What a chunk adds to a batch that has others, before its first token is counted."""
        return self.chunk_s - self.shared_s + self.prefix_s * prefix_tokens

    def scaled(self, factor: float) -> "CostModel":
        """Of a stage that has `factor` times the layers of this one."""
        return CostModel(
            self.attention_s * factor,
            self.token_s * factor,
            self.chunk_s * factor,
            self.shared_s * factor,
            self.prefix_s * factor,
        )

    def plus(self, other: "CostModel") -> "CostModel":
        """Of a stage that does both with the same batch."""
        return CostModel(
            self.attention_s + other.attention_s,
            self.token_s + other.token_s,
            self.chunk_s + other.chunk_s,
            self.shared_s + other.shared_s,
            self.prefix_s + other.prefix_s,
        )
