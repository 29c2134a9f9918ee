"""Load balancing: Llumnix-style freeness, from the workers' reports and this dispatcher's newer placements.

The virtual usage of a worker is the blocks of its running requests, the blocks that its waiting requests (including the
head of the queue) and the requests placed since its last report need, and the blocks that its admission reserves while
requests run. A request is sent to the freest worker on which it runs at once, or else to one of the few places in a
worker's queue. Otherwise it stays in the backlog, from which it can still be sent to any worker.

After a drop there are workers of different shapes. A merged group has several times the memory and would be the freest
until it has all the load, although its tokens take longer. Therefore, among the freest of each shape, freeness counts
only up to a request's expected growth; beyond that, the worker with the fewest requests per instance is chosen. If no
worker has room for all the growth, the request is sent to one on which it runs at once.

Batches are slow while a worker computes a prompt that does not fit on a single instance, so other requests avoid that
worker if another one runs them at once.

Workers with a part of the prompt cached are compared with the freest one. The request is sent to the worker on which
the fewest tokens, including those of earlier prompts, must be computed before its first token.

A caller with few requests is not blocked by one with many: if all workers are full, its request goes to a worker that
will preempt for it (`claims`).

A request is *large* if it needs more than `large_fraction` of a worker's blocks. In a worker's queue it would block all
requests behind it, so others overtake a large request that cannot run at once, until the caller sets `may_queue_large`.
From then on its need counts as virtual usage of one worker, which accepts no other requests until it fits, so that it
cannot starve.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ballast.common.ids import Incarnation, WorkerId


class WorkerKey(NamedTuple):
    """One incarnation of one worker."""

    worker_id: WorkerId
    incarnation: Incarnation


class WorkerShape(NamedTuple):
    block_count: int
    block_tokens: int
    has_long_prompt: bool


_CLAIM_RATIO = 2
Hits = Mapping[WorkerKey, int]  # cached tokens of a prompt, by worker
NO_HITS: Hits = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """A worker's state for routing."""

    worker: WorkerKey
    block_tokens: int
    block_count: int
    used_block_count: int
    waiting_block_count: int
    unseen_block_count: int  # blocks needed by requests placed since the last report
    running_count: int
    waiting_count: int
    unseen_count: int
    max_running_count: int
    max_waiting_count: int
    draining: bool
    instance_count: int = 1  # instances of its group
    kept_block_count: int = 0  # blocks not available to a new request while another one runs
    prompt_token_count: int = 0  # uncomputed prompt tokens on the worker
    max_prompt_token_count: int = 0  # a new request waits while `prompt_token_count` is at least this; 0: no limit
    uncomputed_token_count: int = 0  # like `prompt_token_count`, but with long prompts counted in full
    has_long_prompt: bool = False  # True: computes a prompt that does not fit on a single instance, so batches are slow

    @property
    def shape(self) -> "WorkerShape":
        """Workers of the same shape differ only in free blocks and freeness."""
        return WorkerShape(self.block_count, self.block_tokens, self.has_long_prompt)

    @property
    def free_block_count(self) -> int:
        """Number of blocks available to a new request: total minus virtual usage; negative if more requests wait than
        fit.
        """
        taken_block_count = self.used_block_count + self.waiting_block_count + self.unseen_block_count
        kept_block_count = self.kept_block_count if self.running_count or self.waiting_count or self.unseen_count else 0
        return self.block_count - taken_block_count - kept_block_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """A request's need for memory."""

    tokens: int  # prompt tokens, tokens of earlier attempts, and the next token
    growth_tokens: int  # expected further tokens

    @property
    def now(self) -> "Need":
        """This need without growth."""
        return Need(tokens=self.tokens, growth_tokens=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRules:
    worker_queue_count: int = 2  # maximum requests that may wait on a full worker
    large_fraction: float = 0.25  # a request that needs more than this fraction of a worker's blocks is large
    growth_tokens: int = 64  # assumed length of an answer until one has been learned


def freeness(view: WorkerView) -> float:
    """Return the free blocks per request that shares them; minus infinity for a draining worker.

    Requests placed since the report count as running, because otherwise a burst between two reports would be sent to
    one worker.
    """
    if view.draining:
        return -math.inf
    return view.free_block_count / max(1, view.running_count + view.unseen_count)


def blocks_for(tokens: int, block_tokens: int) -> int:
    return -(-tokens // block_tokens)


def has_place(view: WorkerView, rules: RoutingRules) -> bool:
    """True if the worker could accept a request of minimum size."""
    return has_room(view, 1) or may_queue(view, rules)


class PlaceRank(NamedTuple):
    """Sort key among the freest workers of each shape and those with a cached prefix. The smallest is chosen."""

    has_long_prompt: bool  # workers that compute such a prompt are avoided if possible
    token_count: int  # tokens to compute before the first answer token; 0 for all workers if none has the prefix cached
    minus_growth: float  # minus freeness, capped at the growth in blocks
    requests_per_instance: float
    minus_freeness: float
    worker: WorkerKey


def place_of(view: WorkerView, need: Need, hits: Hits = NO_HITS) -> PlaceRank:
    free = freeness(view)
    load = (view.running_count + view.waiting_count + view.unseen_count) / view.instance_count
    token_count = view.uncomputed_token_count + max(1, need.tokens - hits.get(view.worker, 0)) if hits else 0
    growth = -min(free, blocks_for(need.growth_tokens, view.block_tokens))
    return PlaceRank(view.has_long_prompt, token_count, growth, load, -free, view.worker)


def runs_at_once(view: WorkerView, block_count: int) -> bool:
    """True if a request of `block_count` blocks would run on the worker without waiting."""
    return has_room(view, block_count) and not (0 < view.max_prompt_token_count <= view.prompt_token_count)


def has_room(view: WorkerView, block_count: int) -> bool:
    """True if a request of `block_count` blocks would wait on the worker at most for earlier prompts, not for
    memory.
    """
    coming = view.waiting_count + view.unseen_count
    return (
        not view.draining
        and view.running_count + coming < view.max_running_count
        and coming < max(1, view.max_waiting_count)
        and block_count <= view.free_block_count
    )


def claims(view: WorkerView, block_count: int, own_count: int, busiest_count: int) -> bool:
    """True if a request of `block_count` blocks may wait on the worker until a heavier caller's request is preempted.
    Its caller would then still hold at most half of the blocks of the caller with the most requests. This assumes
    requests of mean size; the worker decides by their real sizes.

    `own_count`, `busiest_count`: requests of these two callers on the worker.
    """
    blocks_each = view.used_block_count / max(1, view.running_count)
    return busiest_count * blocks_each >= _CLAIM_RATIO * (own_count * blocks_each + block_count)


def may_queue(view: WorkerView, rules: RoutingRules) -> bool:
    """True if the worker's own queue has a free place."""
    bound = max(1, min(rules.worker_queue_count, view.max_waiting_count))
    return not view.draining and view.waiting_count + view.unseen_count < bound
