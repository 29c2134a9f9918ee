"""How many requests may run so that a token takes no longer than an operator wants (`--tpot-target-s`).

KunServe sets "a maximum batch limit for each instance" (arXiv 2412.18169v1, section 4.3); here it follows from what the
cost model says of the requests that run. A token takes its sequence one step; in a pipeline a trip through all stages,
each of which has a microbatch meanwhile (bubbles are not foreseen: up to a fifth more). Between its tokens prompts are
computed: while others wait, whoever ends makes room for one, so they are as many and as long as those of the requests
that ended last. With both, the target is what a token takes on average; one gap is as long as the largest batch.

A newcomer counts as the mean of those that run. A limit that falls, as contexts grow or the model is fitted anew,
throws nobody out.
"""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ballast.common.cost import CostModel
from ballast.common.errors import ConfigError
from services.worker.policy.splitting import added_s

_ENDED_COUNT = 64  # requests that are looked back on
_LEAST_COUNT = 8  # with fewer nothing is concluded: the first that end are those with short answers


class Decoders(NamedTuple):
    """What runs in a group, and how."""

    sequence_count: int
    context_tokens: int  # of all of them
    stage_count: int = 1  # and as many microbatches that circulate


class Turnover(NamedTuple):
    """The mean request that ends, in whose place another comes. Without a prompt: nothing is known of it."""

    prompt_tokens: int = 0
    answer_tokens: float = 1.0


def token_s(cost: CostModel, decoders: Decoders, turnover: Turnover, count: int) -> float:
    """Seconds from one token of a sequence to its next if so many ran that are like those.

    Args:
        cost: Of all layers.
        decoders: At least one.
        turnover: What ends, and comes in its place.
        count: At least 1.
    """
    stages = decoders.stage_count
    each = max(1.0, count / stages)
    batch_s = cost.decodes_s(each, each * decoders.context_tokens / decoders.sequence_count)
    if turnover.prompt_tokens:
        batch_s += added_s(cost, 0, turnover.prompt_tokens) * count / turnover.answer_tokens / stages
    return batch_s  # of all layers: on each of the stages a share of it, and as many batches come in between


class TokenTarget:
    """What a worker goes by where sequences have no target. `cost` gives the model of all layers as it is known now;
    None: any number may run.
    """

    def __init__(self, target_s: float, cost: Callable[[], CostModel | None]) -> None:
        """
        Raises:
            ConfigError: no token takes so little.
        """
        if not target_s > 0.0:
            raise ConfigError("tpot_target_s", f"must be positive, got {target_s}")
        self._target_s = target_s
        self._cost = cost
        self._ended: deque[tuple[int, int]] = deque(maxlen=_ENDED_COUNT)  # tokens of prompt and answer

    @property
    def limits(self) -> bool:
        """Whether sequences without a target of their own have one."""
        return math.isfinite(self._target_s)

    def ended(self, prompt_tokens: int, answer_tokens: int) -> None:
        """A request that ran has ended, with at least one token."""
        self._ended.append((prompt_tokens, answer_tokens))

    @property
    def turnover(self) -> Turnover:
        count = len(self._ended)
        if count < _LEAST_COUNT:
            return Turnover()
        return Turnover(sum([p for p, _ in self._ended]) // count, sum([a for _, a in self._ended]) / count)

    def place_count(self, decoders: Decoders, most: int, target_s: float | None = None) -> int:
        """How many may run, of `most` that could: no fewer than do, and one always. `target_s`: of those that run."""
        target_s = self._target_s if target_s is None else target_s
        if math.isinf(target_s):
            return most
        cost = self._cost() if decoders.sequence_count else None
        if cost is None:
            return most
        turnover, more = self.turnover, range(decoders.sequence_count + 1, most + 1)
        return decoders.sequence_count + bisect_right(
            more, target_s, key=lambda n: token_s(cost, decoders, turnover, n)
        )
