"""Cost of a batch on a stage: equations 1 to 3 of KunServe (EuroSys '26, section 4.3) and three more terms.

A chunk reads the KV of its prefix once, however few tokens it has: `prefix_s`. Without this term, decodes with long
contexts would be estimated at half their time on a CPU. The time of a matrix product is not linear in its rows:
`many_s` is what a product with several vectors costs beyond one with a single vector, and `beyond_s` the extra time of
each token above `knee_tokens`, from which on the product is bound by compute, not by reading parameters. With all three
terms at 0 this is the paper's model.

Costs on which decisions depend are summed with `math.fsum`, because the result of `sum` over floats depends on the
Python version.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

KNEE_TOKENS = 64  # default of `CostModel.knee_tokens`


class Chunk(NamedTuple):
    """Tokens of one sequence computed by a batch. A decode is a chunk of one token."""

    prefix_tokens: int  # tokens whose KV is already computed
    token_count: int


@dataclass(frozen=True, slots=True)
class CostModel:
    """Coefficients, in seconds, of a stage's batch cost. All are at least 0, and `shared_s` is at most `chunk_s`."""

    attention_s: float  # per pair of a token and one that it attends to
    token_s: float  # per token
    chunk_s: float  # per sequence in the batch
    shared_s: float  # saved for every sequence but the first
    prefix_s: float = 0.0  # per prefix token of a chunk, whose KV is read
    many_s: float = 0.0  # if the batch has more than one token
    beyond_s: float = 0.0  # per token of the batch above `knee_tokens`
    knee_tokens: int = KNEE_TOKENS

    def chunk_cost_s(self, chunk: Chunk) -> float:
        """Cost of a batch that consists of this chunk alone (equations 1 and 2)."""
        return self.own_s(*chunk) + self.together_s(chunk.token_count)

    def batch_cost_s(self, chunks: Iterable[Chunk]) -> float:
        """Cost of a batch of chunks of different sequences (equation 3); 0 for an empty batch."""
        costs, token_count = list[float](), 0
        for chunk in chunks:
            costs.append(self.own_s(*chunk))
            token_count += chunk.token_count
        return math.fsum(costs) - max(0, len(costs) - 1) * self.shared_s + self.together_s(token_count)

    def decodes_s(self, count: float, context_tokens: float) -> float:
        """Cost of a batch of `count` decodes whose prefixes have `context_tokens` tokens in total (equation 3). Both
        numbers may be fractional, because they may be means.
        """
        own_s = self.attention_s * (context_tokens + count) + self.prefix_s * context_tokens
        own_s += (self.token_s + self.chunk_s) * count - max(0.0, count - 1.0) * self.shared_s
        many_s = self.many_s if count > 1.0 else 0.0
        return own_s + many_s + self.beyond_s * max(0.0, count - self.knee_tokens)

    def own_s(self, prefix: int, count: int) -> float:
        """The part of the cost that depends on one chunk alone, not on the rest of the batch."""
        pairs = prefix * count + (count * count + count) / 2
        return self.attention_s * pairs + self.token_s * count + self.prefix_s * prefix + self.chunk_s

    def together_s(self, token_count: int) -> float:
        """The part of the cost that depends on the token count of the whole batch."""
        return (self.many_s if token_count > 1 else 0.0) + self.beyond_s * max(0, token_count - self.knee_tokens)

    def joining_s(self, prefix_tokens: int) -> float:
        """Cost of adding a chunk to a non-empty batch, without the costs of its tokens."""
        return self.chunk_s - self.shared_s + self.prefix_s * prefix_tokens

    def scaled(self, factor: float) -> "CostModel":
        """The costs of a stage that has `factor` times the layers of this one."""
        return CostModel(
            self.attention_s * factor,
            self.token_s * factor,
            self.chunk_s * factor,
            self.shared_s * factor,
            self.prefix_s * factor,
            self.many_s * factor,
            self.beyond_s * factor,
            self.knee_tokens,
        )

    def plus(self, other: "CostModel") -> "CostModel":
        """The costs of a stage that executes this model's layers and those of `other` for the same batch."""
        return CostModel(
            self.attention_s + other.attention_s,
            self.token_s + other.token_s,
            self.chunk_s + other.chunk_s,
            self.shared_s + other.shared_s,
            self.prefix_s + other.prefix_s,
            self.many_s + other.many_s,
            self.beyond_s + other.beyond_s,
            self.knee_tokens if self.beyond_s else other.knee_tokens,
        )
