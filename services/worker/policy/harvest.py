"""Offline work in batches, after ConServe: within a bound, it fills the part of a step that online work leaves unused.

The idle capacity of an instance is inside its steps: a step takes at least the time of reading the parameters, in which
it could compute more tokens. Offline prompts are split into small chunks. They fill many steps, and a step without
online work is short, so arriving online requests do not wait long.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ballast.common.cost import Chunk, CostModel
from ballast.common.sampling import PriorityClass
from ballast.common.targets import NO_TARGETS, Targets

MIN_CHUNK_TOKENS = 16  # minimum tokens of an offline prompt in a batch
_BATCHES_AHEAD = 2  # batches' worth of prompts; more would fill the cache with sequences that have no token yet
_MOST_OF_THE_BEST = 0.95  # a batch counts as efficient from this fraction of the best tokens/s on
_LEAST_EFFICIENT_TOKENS = 32
_WORTH_CUTTING = 0.25  # only batches above this fraction of a TTFT target have safepoints, 1/16 of the target apart


class OfflineView(NamedTuple):
    """A running offline sequence that is in no batch."""

    prefix_tokens: int  # tokens with KV
    left_tokens: int  # 1: it decodes
    step_id: int  # step of the last batch that it was in


@dataclass(frozen=True, slots=True)
class Harvest:
    """A worker's bounds on offline work. `cost`: returns the current cost model of all layers; while that is None, no
    offline work is added to online work.
    """

    cost: Callable[[], CostModel | None] = lambda: None
    slowdown: float = 0.25  # without a target, the maximum relative increase of a step with online work
    targets: Mapping[PriorityClass, Targets] = field(default_factory=dict[PriorityClass, Targets])
    layer_count: int = 0  # layers of the model; 0: batches of offline work have no safepoints

    def targets_of(self, priority: PriorityClass) -> Targets:
        return self.targets.get(priority, NO_TARGETS)

    @property
    def ttft_target_s(self) -> float:
        """The strictest TTFT target of all classes (seconds)."""
        return min([each.ttft_s for each in self.targets.values()], default=math.inf)


class PriceList:
    """The batch being filled, and its predicted duration."""

    def __init__(self, cost: CostModel, chunks: Iterable[Chunk] = ()) -> None:
        self.cost = cost
        self.token_count = 0
        self._count = 0
        self._own_s = 0.0
        for chunk in chunks:
            self.add(*chunk)

    @classmethod
    def free(cls) -> "PriceList":
        """Return a price list with a cost of 0 for any chunk."""
        return cls(CostModel(0.0, 0.0, 0.0, 0.0))

    @property
    def seconds(self) -> float:
        return self._sum(0.0, 0, 0)

    def add(self, prefix_tokens: int, token_count: int) -> None:
        self._own_s += self.cost.own_s(prefix_tokens, token_count)
        self.token_count += token_count
        self._count += 1

    def with_chunk_s(self, prefix_tokens: int, token_count: int) -> float:
        """Return the predicted duration with one more chunk."""
        return self._sum(self.cost.own_s(prefix_tokens, token_count), token_count, 1)

    def _sum(self, own_s: float, token_count: int, count: int) -> float:
        count += self._count
        if not count:
            return 0.0
        together_s = self.cost.together_s(self.token_count + token_count)
        return self._own_s + own_s - (count - 1) * self.cost.shared_s + together_s

    def tokens_within(self, prefix_tokens: int, limit_s: float, most: int) -> int:
        """Return the length of the longest chunk, at most `most` tokens, that keeps the duration within the limit; 0:
        no chunk does.
        """
        if most < 1 or self.with_chunk_s(prefix_tokens, 1) > limit_s:
            return 0
        if self.with_chunk_s(prefix_tokens, most) <= limit_s:
            return most
        low, high = 1, most  # invariant: a chunk of `low` fits, one of `high` does not
        while high - low > 1:
            middle = (low + high) // 2
            if self.with_chunk_s(prefix_tokens, middle) <= limit_s:
                low = middle
            else:
                high = middle
        return low


def efficient_tokens(cost: CostModel | None, most: int) -> int:
    """Return the smallest number of prompt tokens with which a batch reaches `_MOST_OF_THE_BEST` of the best tokens/s
    among batches of at most `most` tokens.
    """
    if cost is None:
        return most
    counts, count = [most], _LEAST_EFFICIENT_TOKENS
    while count < most:
        counts.append(count)
        count *= 2
    rates = {count: count / max(cost.chunk_cost_s(Chunk(0, count)), 1e-12) for count in counts}
    best = max(rates.values())
    return min(count for count, rate in rates.items() if rate >= _MOST_OF_THE_BEST * best)


class OnlineView(NamedTuple):
    """A running online sequence."""

    tpot_target_s: float
    first_token_in_s: float = math.inf  # time until its first token is due; infinity once it has one
    left_tokens: int = 1  # tokens that are in no batch yet


def allowance_s(
    harvest: Harvest,
    base_s: float,
    stage_count: int,
    batch_count: int,
    online: Sequence[OnlineView],
    place_count: int,
    most: int,
) -> float:
    """Return the maximum duration (seconds) of a batch that takes `base_s` without offline work.

    Args:
        harvest: The bounds.
        base_s: Duration without offline work, on the stage whose costs are known, or on all stages.
        stage_count: Stages of the group.
        batch_count: Batches in flight.
        online: All running online sequences; the strictest target counts. A sequence without a target may be slowed
            down by a fraction, but not while its prompt is computed.
        place_count: Number of online sequences that may run, which is limited by their targets. Answers may take longer
            only while this number suffices.
        most: Maximum tokens of a batch.
    """
    if any(view.left_tokens > 1 and math.isinf(view.first_token_in_s) for view in online):
        return base_s
    limit_s = math.inf
    targets = {view.tpot_target_s for view in online}
    if not targets or math.inf in targets:
        limit_s = base_s * (1.0 + harvest.slowdown)
    if (strictest_s := min(targets, default=math.inf)) < math.inf:
        limit_s = min(limit_s, strictest_s * stage_count / max(1, batch_count), base_s * place_count / len(online))
    for view in online:
        if view.first_token_in_s < math.inf:  # the time until it is due, divided by the number of batches
            limit_s = min(limit_s, view.first_token_in_s / -(-view.left_tokens // most))
    return max(base_s, limit_s)


def safepoint_layers(harvest: Harvest, batch_s: float) -> int:
    """Return the layers between two safepoints of a batch of offline work; 0: no safepoints. Only batches longer than a
    quarter of the TTFT target have safepoints, because shorter ones end soon.

    Args:
        harvest: The bounds.
        batch_s: Duration of the batch on all layers.
    """
    target_s = harvest.ttft_target_s
    if not harvest.layer_count or batch_s <= _WORTH_CUTTING * target_s:
        return 0
    return max(1, int(harvest.layer_count * _WORTH_CUTTING**2 * target_s / batch_s))


def fill(
    prices: PriceList, offline: Sequence[OfflineView], limit_s: float, most: int, prompt_tokens: int
) -> list[tuple[int, int]]:
    """Return (index, tokens) of the sequences to add to a batch: decodes first, ordered by the time since their last
    token, then prompts in order.

    Args:
        prices: The batch so far.
        offline: In order of service.
        limit_s: Maximum duration.
        most: Tokens that may be added.
        prompt_tokens: Of these, maximum prompt tokens.
    """
    share: list[tuple[int, int]] = []
    for _, index in sorted((view.step_id, index) for index, view in enumerate(offline) if view.left_tokens == 1):
        prefix = offline[index].prefix_tokens
        if len(share) < most and prices.with_chunk_s(prefix, 1) <= limit_s:
            prices.add(prefix, 1)
            share.append((index, 1))
    room = min(prompt_tokens, most - len(share))
    least = min(MIN_CHUNK_TOKENS, room)
    for index, view in enumerate(offline):
        if view.left_tokens == 1 or room <= 0:
            continue
        count = prices.tokens_within(view.prefix_tokens, limit_s, min(view.left_tokens, room))
        if count >= min(least, view.left_tokens):
            prices.add(view.prefix_tokens, count)
            share.append((index, count))
            room -= count
    return share


def wanted_tokens(efficient_tokens: int, left_tokens: Iterable[int]) -> int:
    """Return the number of prompt tokens of further offline sequences to admit. `left_tokens`: uncomputed tokens of
    each running sequence; 1 if it decodes.
    """
    return max(0, _BATCHES_AHEAD * efficient_tokens - sum([left for left in left_tokens if left > 1]))


NO_LIMIT_S = math.inf
