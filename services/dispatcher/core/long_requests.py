"""Online requests that do not fit on a single instance, and wait in order for a group that can hold them.

The planner publishes the longest context that a group could hold (`Reach`), and forms such a group when requests wait
for it. These requests have a separate queue, so that they do not count as ordinary demand and placement does not search
in vain for a worker.
"""

import math
from collections.abc import Iterator

from ballast.common.errors import BallastError, InvalidRequest, Overloaded
from ballast.common.reach import Reach
from ballast.common.traffic import LongDemand
from services.dispatcher.core.arrival_order import ArrivalOrder
from services.dispatcher.core.fleet import Worker
from services.dispatcher.core.growth import Growth
from services.dispatcher.core.tracked import Tracked
from services.dispatcher.policy.freeness import blocks_for

_SHARE = 0.5  # several long requests share a group if together they need at most this fraction of its blocks
_SHRUNK_S = 5.0  # how long requests wait for lost capacity to return
_RETRY_S = 1.0  # retry delay when the cluster has become too small


class LongRequests(ArrivalOrder):
    def __init__(self, wait_s: float) -> None:
        """`wait_s`: maximum wait while no group holds the request."""
        super().__init__()
        self.reach: Reach | None = None  # None: unknown; no request counts as long
        self._wait_s = wait_s

    def takes(self, tracked: Tracked) -> bool:
        """True if an online request does not fit on a single instance, or was found not to fit earlier."""
        too_long = self.reach is not None and tracked.token_count + 1 > self.reach.alone_tokens
        return not tracked.offline and (tracked.long or too_long)

    def refusal(self, token_count: int) -> InvalidRequest | None:
        """Return the refusal of a prompt of this many tokens; None if a group could hold it."""
        if self.reach is None or token_count < self.reach.group_tokens:
            return None
        size = self.reach.group_size
        where = f"a group of {size} of the instances here holds" if size > 1 else "the instances here hold"
        most = self.reach.group_tokens
        why = f"has {token_count} tokens; {where} {most} with the answer (max_model_len {most})"
        return InvalidRequest("prompt", why)

    def overdue(self, at_s: float) -> Iterator[tuple[Tracked, BallastError]]:
        """Yield requests that have waited too long, with the reasons."""
        for tracked in self._entries:
            since_s, tokens = tracked.groupless_since_s, tracked.token_count
            if since_s is None or at_s < since_s + self._patience_s(tokens):
                continue
            if self.reach is not None and self.refusal(tokens) is not None:
                why = f"{tokens} tokens need a larger group than can be formed: it holds {self.reach.group_tokens}"
                yield tracked, Overloaded(why, _RETRY_S)
            else:
                why = f"no group for {tokens} tokens was formed within {self._wait_s:g} s"
                yield tracked, Overloaded(why, self._wait_s)

    def next_timer_s(self) -> float:
        waiting = [(t.groupless_since_s, t.token_count) for t in self._entries]
        return min([at_s + self._patience_s(n) for at_s, n in waiting if at_s is not None], default=math.inf)

    def _patience_s(self, token_count: int) -> float:
        return self._wait_s if self.refusal(token_count) is None else min(_SHRUNK_S, self._wait_s)

    def demand(self, growth: Growth, at_s: float) -> LongDemand:
        """Return the number of waiting requests, how long the first has waited, and the tokens that the largest
        needs.
        """
        if not self._entries:
            return LongDemand()
        largest = max(self._entries, key=lambda tracked: tracked.token_count)
        left_tokens = largest.request.sampling.max_tokens - len(largest.output_token_ids)
        grown = largest.token_count + 1 + min(left_tokens, growth.tokens(largest.request.priority))
        need = min(grown, self.reach.group_tokens) if self.reach is not None else grown
        return LongDemand(
            count=len(self._entries),
            need_tokens=max(need, largest.token_count + 1),
            prompt_tokens=largest.token_count,
            wait_s=at_s - self._entries[0].queued_at_s,
        )


def has_room(worker: Worker, tracked: Tracked) -> bool:
    """True if the group can hold this long request in addition to the requests that it has."""
    load = worker.load
    others = [worker.placed[handle].token_count for handle in worker.long_handles]
    if load is None or not others:
        return load is not None
    wanted = sum(blocks_for(tokens + 1, load.block_tokens) for tokens in (*others, tracked.token_count))
    return wanted <= _SHARE * load.block_count


def holds(worker: Worker, tracked: Tracked) -> bool:
    load = worker.load
    return load is not None and blocks_for(tracked.token_count + 1, load.block_tokens) <= load.block_count
