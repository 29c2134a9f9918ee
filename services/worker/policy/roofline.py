"""How long a stage takes for a batch on a machine of which a data sheet is known, and no measurement.

The parameters of a layer are read once for each batch while its tokens are computed; around the point where both take
equally long neither hides the other wholly, so they are added as the legs of a right-angled triangle are. Attention is
bound by computing for chunks of a prompt and by reading KV for decodes.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Part(Protocol):
    """One sequence's share of a batch."""

    @property
    def first_position(self) -> int: ...

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def samples(self) -> bool: ...


class Work(NamedTuple):
    """What a batch costs, whichever stage runs it."""

    layer_s: float  # in each layer
    head_s: float  # in the last stage
    stage_s: float  # in every stage

    def on(self, layer_count: int, *, is_last: bool) -> float:
        return self.stage_s + self.layer_s * layer_count + (self.head_s if is_last else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineCosts:
    """Seconds. All but those of the head and of a stage are of one layer."""

    token_s: float  # computed
    pair_s: float  # of tokens that attend to each other
    context_s: float  # of a token whose KV is read
    dense_s: float  # what every token needs of the parameters, read once
    experts_s: float = 0.0  # all experts, read once
    idle_share: float = 1.0  # of the experts, by one token
    head_s: float
    head_token_s: float
    stage_s: float
    sequence_s: float
    fixed_s: float = 0.0  # whatever the batch: launches of the layer's kernels, and latencies of its all-reduces
    row_s: float = 0.0  # of a token, added: norms, activations, residuals, and its bytes in the all-reduces

    def work(self, parts: Iterable[Part]) -> Work:
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

    def decodes(self, count: int, context: int) -> Work:
        """The same, of so many sequences that get one token each and read so many altogether."""
        return self._sum(count, count, count, 0.0 + context * self.context_s)

    def dense_work_s(self, tokens: float) -> float:
        """One layer without attention, for a batch of so many tokens."""
        weights_s = self.dense_s
        if self.experts_s:
            weights_s += self.experts_s * (1.0 - self.idle_share**tokens)
        computed_s = tokens * self.token_s
        return math.sqrt(weights_s * weights_s + computed_s * computed_s) + self.fixed_s + tokens * self.row_s

    def _sum(self, tokens: int, sampled: int, sequences: int, attention_s: float) -> Work:
        layer_s = self.dense_work_s(tokens) + attention_s
        head_s = max(self.head_s, sampled * self.head_token_s) if sampled else 0.0
        return Work(layer_s, head_s, self.stage_s + sequences * self.sequence_s)

    def _chunk_s(self, prefix: int, count: int) -> float:
        pairs = prefix * count + (count * count + count) / 2
        return max(pairs * self.pair_s, (prefix + count) * self.context_s)
