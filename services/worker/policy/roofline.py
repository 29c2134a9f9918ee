"""Predicts the duration of a batch on a stage, for hardware that is known only by its data sheet.

A layer's parameters are read once per batch while its tokens are computed. If both take about equally long they overlap
only partly, so the two times are added in quadrature. Attention is compute-bound for prompt chunks and bound by reading
KV for decodes.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Part(Protocol):
    """One sequence's part of a batch."""

    @property
    def first_position(self) -> int: ...

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def samples(self) -> bool: ...


class BatchCost(NamedTuple):
    """Cost of a batch, for any stage."""

    layer_s: float  # time per layer
    head_s: float  # time of the head, only on the last stage
    stage_s: float  # time per stage, regardless of its layers

    def on(self, layer_count: int, *, is_last: bool) -> float:
        return self.stage_s + self.layer_s * layer_count + (self.head_s if is_last else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineCosts:
    """Times in seconds, per layer except for the head's and the stage's times."""

    token_s: float  # computing a token
    pair_s: float  # time per pair of tokens that attend to each other
    context_s: float  # time per token whose KV is read
    dense_s: float  # reading once the parameters that every token needs
    experts_s: float = 0.0  # reading all experts once
    idle_share: float = 1.0  # fraction of the experts that one token does not use
    head_s: float
    head_token_s: float
    stage_s: float
    sequence_s: float
    fixed_s: float = 0.0  # time per batch: kernel launches and latencies of all-reduces
    row_s: float = 0.0  # time per token: norms, activations, residuals, and its bytes in all-reduces

    def work(self, parts: Iterable[Part]) -> BatchCost:
        tokens = context = sampled = sequences = 0
        attention_s = 0.0
        for part in parts:
            count = len(part.token_ids)
            sequences += 1
            tokens += count
            sampled += part.samples
            if count == 1:
                context += part.first_position + 1
            else:
                attention_s += self._chunk_s(part.first_position, count)
        return self._sum(tokens, sampled, sequences, attention_s + context * self.context_s)

    def decodes(self, count: int, context: int) -> BatchCost:
        """Return the cost of a batch of `count` decodes with `context` tokens of context in total."""
        return self._sum(count, count, count, 0.0 + context * self.context_s)

    def dense_work_s(self, tokens: float) -> float:
        """Return the seconds of one layer without attention, for a batch of `tokens` tokens."""
        weights_s = self.dense_s
        if self.experts_s:
            weights_s += self.experts_s * (1.0 - self.idle_share**tokens)
        computed_s = tokens * self.token_s
        return math.sqrt(weights_s * weights_s + computed_s * computed_s) + self.fixed_s + tokens * self.row_s

    def _sum(self, tokens: int, sampled: int, sequences: int, attention_s: float) -> BatchCost:
        layer_s = self.dense_work_s(tokens) + attention_s
        head_s = max(self.head_s, sampled * self.head_token_s) if sampled else 0.0
        return BatchCost(layer_s, head_s, self.stage_s + sequences * self.sequence_s)

    def _chunk_s(self, prefix: int, count: int) -> float:
        pairs = prefix * count + (count * count + count) / 2
        return max(pairs * self.pair_s, (prefix + count) * self.context_s)
