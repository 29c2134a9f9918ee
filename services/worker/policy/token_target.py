"""Limits the number of running requests to meet an operator's target for the time per output token (`--tpot-target-s`).

KunServe sets "a maximum batch limit for each instance" (arXiv 2412.18169v1, section 4.3); here it follows from the cost
model and the running requests. A token takes one step, or in a pipeline one round through all stages, each of which has
a microbatch (bubbles, up to a fifth more, are not predicted). Prompts are computed in between: while requests wait,
each one that ends is replaced, so new prompts are assumed to be like those of the requests that ended last. The target
is the mean time per token; a single gap may be as long as the largest batch.

A new request counts as the mean of the running ones. If the limit falls because contexts grow or the model is refitted,
no request is preempted.
"""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ballast.common.cost import CostModel
from ballast.common.errors import ConfigError
from services.worker.policy.splitting import added_s

_ENDED_COUNT = 64  # number of ended requests that are remembered
_LEAST_COUNT = 8  # fewer ended requests are not representative, because those with short answers end first


class Decoders(NamedTuple):
    """The decoding sequences of a group."""

    sequence_count: int
    context_tokens: int  # context tokens of all sequences together
    stage_count: int = 1  # also the number of microbatches in flight


class Turnover(NamedTuple):
    """The mean request that ends and is replaced by a similar one. `prompt_tokens` 0: unknown."""

    prompt_tokens: int = 0
    answer_tokens: float = 1.0


def token_s(cost: CostModel, decoders: Decoders, turnover: Turnover, count: int) -> float:
    """Return the seconds between two tokens of a sequence if `count` sequences like `decoders` run.

    Args:
        cost: Of all layers.
        decoders: At least one.
        turnover: The requests that end and are replaced.
        count: At least 1.
    """
    stages = decoders.stage_count
    each = max(1.0, count / stages)
    batch_s = cost.decodes_s(each, each * decoders.context_tokens / decoders.sequence_count)
    if turnover.prompt_tokens:
        batch_s += added_s(cost, 0, turnover.prompt_tokens) * count / turnover.answer_tokens / stages
    return batch_s  # each stage takes a fraction of this time, but the batches of the other stages run in between


class TokenTarget:
    """Decides how many sequences may run within the worker's default target for the time per output token. `cost`
    returns the current model of all layers; None: no limit.
    """

    def __init__(self, target_s: float, cost: Callable[[], CostModel | None]) -> None:
        """Raises ConfigError unless `target_s` is positive."""
        if not target_s > 0.0:
            raise ConfigError("tpot_target_s", f"must be positive, got {target_s}")
        self._target_s = target_s
        self._cost = cost
        self._ended: deque[tuple[int, int]] = deque(maxlen=_ENDED_COUNT)  # prompt and answer tokens

    @property
    def limits(self) -> bool:
        """True if sequences without their own target have one."""
        return math.isfinite(self._target_s)

    def ended(self, prompt_tokens: int, answer_tokens: int) -> None:
        """Record a running request that has ended with at least one token."""
        self._ended.append((prompt_tokens, answer_tokens))

    @property
    def turnover(self) -> Turnover:
        count = len(self._ended)
        if count < _LEAST_COUNT:
            return Turnover()
        return Turnover(sum([p for p, _ in self._ended]) // count, sum([a for _, a in self._ended]) / count)

    def place_count(self, decoders: Decoders, most: int, target_s: float | None = None) -> int:
        """Return the number of sequences that may run: at most `most`, at least the number already running, and at
        least one. `target_s`: their strictest target.
        """
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
