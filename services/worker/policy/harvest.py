"""What a batch may do for offline work (ConServe): it fills what online work leaves of a step, within a bound.

The idle capacity of an instance lies inside its steps: they take as long as reading the parameters does, and could
compute more tokens meanwhile. Prompts are cut small. So they last for many steps, each of which has room for a part,
and a step without online work is short: what comes meanwhile does not wait long.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ballast.common.cost import Chunk, CostModel
from ballast.common.sampling import PriorityClass
from ballast.common.targets import NO_TARGETS, Targets

MIN_CHUNK_TOKENS = 16  # of an offline prompt in a batch
_BATCHES_AHEAD = 2  # of prompts that have been begun; more would fill the cache with sequences that have no token yet
_MOST_OF_THE_BEST = 0.95  # of the best tokens/s of any batch; less is not efficient
_LEAST_EFFICIENT_TOKENS = 32
_WORTH_CUTTING = 0.25  # of a TTFT target; and as large a share of that is a slice


class OfflineView(NamedTuple):
    """A running offline sequence that is in no batch."""

    prefix_tokens: int  # have their KV
    left_tokens: int  # 1: it decodes
    step_id: int  # of its last batch


@dataclass(frozen=True, slots=True)
class Harvest:
    """By what a worker bounds offline work. `cost`: of all layers as known now; without it there is none beside online
    work.
    """

    cost: Callable[[], CostModel | None] = lambda: None
    slowdown: float = 0.25  # where there is no target, a step with online work takes so much longer at most
    targets: Mapping[PriorityClass, Targets] = field(default_factory=dict[PriorityClass, Targets])
    layer_count: int = 0  # of the model; 0: batches of offline work are never cut

    def targets_of(self, priority: PriorityClass) -> Targets:
        return self.targets.get(priority, NO_TARGETS)

    @property
    def ttft_target_s(self) -> float:
        """The strictest of all classes."""
        return min([each.ttft_s for each in self.targets.values()], default=math.inf)


class PriceList:
    """A batch that is being filled, and what it takes."""

    def __init__(self, cost: CostModel, chunks: Iterable[Chunk] = ()) -> None:
        self.cost = cost
        self.token_count = 0
        self._count = 0
        self._own_s = 0.0
        for chunk in chunks:
            self.add(*chunk)

    @classmethod
    def free(cls) -> "PriceList":
        """Nothing costs anything."""
        return cls(CostModel(0.0, 0.0, 0.0, 0.0))

    @property
    def seconds(self) -> float:
        return self._sum(0.0, 0, 0)

    def add(self, prefix_tokens: int, token_count: int) -> None:
        self._own_s += self.cost.own_s(prefix_tokens, token_count)
        self.token_count += token_count
        self._count += 1

    def with_chunk_s(self, prefix_tokens: int, token_count: int) -> float:
        """What it would take with one chunk more."""
        return self._sum(self.cost.own_s(prefix_tokens, token_count), token_count, 1)

    def _sum(self, own_s: float, token_count: int, count: int) -> float:
        count += self._count
        if not count:
            return 0.0
        together_s = self.cost.together_s(self.token_count + token_count)
        return self._own_s + own_s - (count - 1) * self.cost.shared_s + together_s

    def tokens_within(self, prefix_tokens: int, limit_s: float, most: int) -> int:
        """The longest chunk, of at most so many tokens, with which it takes no longer than that; 0: none."""
        if most < 1 or self.with_chunk_s(prefix_tokens, 1) > limit_s:
            return 0
        if self.with_chunk_s(prefix_tokens, most) <= limit_s:
            return most
        low, high = 1, most  # a chunk of `low` is within, one of `high` is not
        while high - low > 1:
            middle = (low + high) // 2
            if self.with_chunk_s(prefix_tokens, middle) <= limit_s:
                low = middle
            else:
                high = middle
        return low


def efficient_tokens(cost: CostModel | None, most: int) -> int:
    """The fewest prompt tokens of a batch that has most of the best tokens/s of any with at most so many."""
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
    """An online sequence that runs."""

    tpot_target_s: float
    first_token_in_s: float = math.inf  # is due; of one that has none yet
    left_tokens: int = 1  # not computed yet


def allowance_s(
    harvest: Harvest, base_s: float, stage_count: int, batch_count: int, online: Sequence[OnlineView], most: int
) -> float:
    """What a batch with online work may take, which takes `base_s` without offline work.

    Args:
        harvest: The bound.
        base_s: On the stage whose costs are known, or on all of them.
        stage_count: Stages of the group.
        batch_count: Batches that circulate in it.
        online: All that run: the strictest of them decides. One without a target is slowed down by a share, and not at
            all while its prompt is computed, which fills a batch by itself.
        most: Tokens of a batch.
    """
    if any(view.left_tokens > 1 and math.isinf(view.first_token_in_s) for view in online):
        return base_s
    limit_s = math.inf
    targets = {view.tpot_target_s for view in online}
    if not targets or math.inf in targets:
        limit_s = base_s * (1.0 + harvest.slowdown)
    if (strictest_s := min(targets, default=math.inf)) < math.inf:
        limit_s = min(limit_s, strictest_s * stage_count / max(1, batch_count))
    for view in online:
        if view.first_token_in_s < math.inf:  # it has so many batches to go, of which none may be late
            limit_s = min(limit_s, view.first_token_in_s / -(-view.left_tokens // most))
    return max(base_s, limit_s)


def safepoint_layers(harvest: Harvest, batch_s: float) -> int:
    """Behind how many layers each a batch of offline work alone looks whether online work waits; 0: nowhere. Only one
    that takes more than a quarter of what a first token may is worth it: short ones are over soon by themselves.

    Args:
        harvest: The bound.
        batch_s: What the batch takes on all layers.
    """
    target_s = harvest.ttft_target_s
    if not harvest.layer_count or batch_s <= _WORTH_CUTTING * target_s:
        return 0
    return max(1, int(harvest.layer_count * _WORTH_CUTTING**2 * target_s / batch_s))


def fill(
    prices: PriceList, offline: Sequence[OfflineView], limit_s: float, most: int, prompt_tokens: int
) -> list[tuple[int, int]]:
    """(index, tokens) of what goes into a batch: decodes first, the one that has waited longest for a token before the
    others, then prompts in order.

    Args:
        prices: The batch, with all that is in it already.
        offline: In order of service.
        limit_s: What it may take.
        most: Tokens that are still allowed in it.
        prompt_tokens: Of these so many of prompts at most.
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
    """Prompt tokens of more offline sequences to begin. `left_tokens`: of each that runs, tokens not computed yet; 1 of
    one that decodes.
    """
    return max(0, _BATCHES_AHEAD * efficient_tokens - sum([left for left in left_tokens if left > 1]))


NO_LIMIT_S = math.inf
