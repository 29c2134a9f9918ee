"""Access log and history: a log line for each request, and the histories of the last ones.

A line takes 0.1 ms, and a thousand requests may end at once when their client disconnects, so only a few lines are
written in each iteration of the event loop.

Log and histories contain no prompts or answers, only counts, times, names of workers, and this system's errors.
"""

import asyncio
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from ballast.common.errors import BallastError, InvalidRequest
from ballast.common.ids import RequestId
from ballast.common.sampling import PriorityClass
from ballast.service.logs import get_logger
from services.dispatcher.core.dispatcher import ENDING_OF, DispatcherCore
from services.dispatcher.core.events import Facts, Fail, Finish, Request
from services.dispatcher.core.story import What
from services.dispatcher.core.tracked import Tracked

WINDOW_S = 10.0
_RECENT_COUNT = 4096
_MAX_ID_CHARS = 128
_LINES_OF_A_TURN = 16
_PAST_COUNT = 8192  # requests available to `ballast record`, which polls every second
_MAX_UNWRITTEN = 8192  # maximum queued lines; further lines are written synchronously at the end of their request


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Statistics of one request, running or ended. `was_accepted`: False if the request was refused or invalid."""

    request_id: RequestId
    state: str
    error: str
    at_s: float  # time of its end, or of its arrival while it runs
    was_accepted: bool
    facts: Facts


class Past(NamedTuple):
    """Facts about an ended request, for `ballast record`."""

    arrived_at_s: float
    prompt_token_count: int
    completion_token_count: int
    priority: PriorityClass


@dataclass(frozen=True, slots=True)
class Times:
    """Latencies of the last `WINDOW_S` seconds; quantiles are 0 without data."""

    first_token_count: int
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    longest_wait_s: float


class Chronicle:
    """Access log and history. `keep_count`: number of ended requests to store. `log_each`: log a line for each
    request.
    """

    def __init__(self, core: DispatcherCore, *, keep_count: int, log_each: bool) -> None:
        self._core = core
        self._keep_count = keep_count
        self._log_each = log_each
        self.tell: Callable[[Account], None] | None = None  # called at the end of accepted requests
        self._ended: OrderedDict[RequestId, Account] = OrderedDict()
        self._tpots: deque[tuple[float, float]] = deque(maxlen=_RECENT_COUNT)  # (end of a request, its TPOT)
        self._past: deque[Past] = deque(maxlen=_PAST_COUNT)
        self.past_count = 0  # number of requests that ended with at least one token, stored or not
        self._unwritten: deque[Account] = deque()
        self._to_write = asyncio.Event()

    def opened(self, request_id: RequestId, at_s: float) -> None:
        """Record in the history why an accepted request has to wait."""
        tracked = self._core.requests.get(request_id)
        if tracked is not None and tracked.worker is None and not tracked.moving:
            tracked.note(at_s, What.WAITING, detail=_why_waiting(self._core, tracked))

    def ended(self, ending: Finish | Fail, at_s: float) -> None:
        if (tpot_s := ending.facts.tpot_s) is not None and not ending.facts.priority.offline:
            self._tpots.append((at_s, tpot_s))
        facts = ending.facts
        if facts.completion_token_count:
            self.past_count += 1
            counts = (facts.prompt_token_count, facts.completion_token_count)
            self._past.append(Past(facts.arrived_at_s, *counts, facts.priority))
        failed = isinstance(ending, Fail)
        account = Account(
            request_id=ending.request_id,
            state=ENDING_OF.get(type(ending.error), "error") if failed else ending.finish_reason.value,
            error=str(ending.error) if failed else "",
            at_s=at_s,
            was_accepted=True,
            facts=facts,
        )
        self._keep(account)
        if self.tell is not None:
            self.tell(account)

    def record_refused(self, request_id: RequestId, error: BallastError, request: Request | None, at_s: float) -> None:
        """Record a request that was not accepted: refused for lack of capacity, or invalid (`request` is None)."""
        nothing = Facts(
            prompt_token_count=len(request.prompt_token_ids) if request is not None else 0,
            completion_token_count=0,
            replay_count=0,
            queue_s=0.0,
            ttft_s=None,
            e2e_s=0.0,
            caller=request.caller if request is not None else "",
            priority=request.priority if request is not None else PriorityClass.DEFAULT,
            max_token_count=request.sampling.max_tokens if request is not None else 0,
        )
        account = Account(
            request_id=RequestId(request_id[:_MAX_ID_CHARS]),
            state="invalid" if request is None else "refused",
            error=_showable(error),
            at_s=at_s,
            was_accepted=False,
            facts=nothing,
        )
        self._keep(account)

    def _keep(self, account: Account) -> None:
        if self._keep_count and account.request_id not in self._core.requests:
            self._ended[account.request_id] = account
            self._ended.move_to_end(account.request_id)
            if len(self._ended) > self._keep_count:
                self._ended.popitem(last=False)
        if self._log_each:
            self._unwritten.append(account)
            self._to_write.set()
            if len(self._unwritten) > _MAX_UNWRITTEN:
                _log(self._unwritten.popleft())

    def past_after(self, number: int) -> list[Past]:
        """Return the requests that ended after the first `number` ones and are still stored."""
        count = min(len(self._past), max(0, self.past_count - number))
        return list(islice(self._past, len(self._past) - count, None))

    async def write_lines(self) -> None:
        """Write queued lines, until cancelled."""
        while True:
            await self._to_write.wait()
            self._write(_LINES_OF_A_TURN)
            if self._unwritten:
                await asyncio.sleep(0)
            else:
                self._to_write.clear()

    def write_the_rest(self) -> None:
        """Write all queued lines before the process exits."""
        self._write(len(self._unwritten))

    def _write(self, most: int) -> None:
        for _ in range(min(most, len(self._unwritten))):
            _log(self._unwritten.popleft())

    def find(self, request_id: RequestId, at_s: float) -> Account | None:
        tracked = self._core.requests.get(request_id)
        if tracked is None:
            return self._ended.get(request_id)
        state = "moving" if tracked.moving else "queued" if tracked.worker is None else "running"
        return Account(
            request_id=request_id,
            state=state,
            error="",
            at_s=tracked.arrived_at_s,
            was_accepted=True,
            facts=tracked.facts(at_s),
        )

    def times(self, at_s: float) -> Times:
        since_s = at_s - WINDOW_S
        ttfts = sorted(self._core.relay.recent.ttfts_s(since_s))
        tpots = [tpot_s for ended_at_s, tpot_s in self._tpots if ended_at_s >= since_s]
        longest_wait_s = 0.0
        for tracked in self._core.requests.values():
            if tracked.offline:
                continue
            if tracked.first_token_at_s is None:
                longest_wait_s = max(longest_wait_s, at_s - tracked.arrived_at_s)
            elif (count := len(tracked.output_token_ids)) > 1 and not tracked.request.output_token_ids:
                tpots.append((at_s - tracked.first_token_at_s) / count)
        tpots.sort()
        return Times(
            len(ttfts),
            quantile(ttfts, 0.5),
            quantile(ttfts, 0.99),
            quantile(tpots, 0.5),
            quantile(tpots, 0.99),
            longest_wait_s,
        )


def quantile(ascending: Sequence[float], fraction: float) -> float:
    """Return the smallest value that at least this fraction of the values does not exceed; 0 if there are no values."""
    return ascending[max(0, math.ceil(fraction * len(ascending)) - 1)] if ascending else 0.0


def _why_waiting(core: DispatcherCore, tracked: Tracked) -> str:
    loads = [worker.load for worker in core.fleet.usable if worker.load is not None]
    if not loads:
        return "there is no worker"
    emptiest = min(load.kv_usage_fraction for load in loads)
    if tracked.long:
        return f"behind {core.long.count_before(tracked)} others too long for one instance, until a group is formed"
    line = core.feed if tracked.offline else core.backlog
    ahead_count = line.count_before(tracked)
    workers = "the only worker has" if len(loads) == 1 else f"the emptiest of {len(loads)} leading workers has"
    return f"behind {ahead_count} others; {workers} {emptiest:.0%} of its KV in use"


def _log(account: Account) -> None:
    facts = account.facts
    fields: dict[str, object] = {
        "request_id": account.request_id,
        "ending": account.state,
        "caller": facts.caller,
        "priority": facts.priority.value,
        "prompt_tokens": facts.prompt_token_count,
    }
    if account.was_accepted:
        fields |= {
            "output_tokens": facts.completion_token_count,
            "queue_s": round(facts.queue_s, 4),
            "ttft_s": _rounded(facts.ttft_s),
            "tpot_s": _rounded(facts.tpot_s),
            "e2e_s": round(facts.e2e_s, 4),
            "moves": facts.move_count,
            "replays": facts.replay_count,
            "worker_id": facts.worker_id,
        }
    if account.error:
        fields["error"] = account.error
    get_logger().info("request", **fields)


def _rounded(value_s: float | None) -> float | None:
    return None if value_s is None else round(value_s, 4)


def _showable(error: BallastError) -> str:
    """Return the text of an error, without a reason that may quote the client, such as that of a chat template or
    grammar.
    """
    if isinstance(error, InvalidRequest) and error.field.startswith(("conversation", "sampling.grammar")):
        return f"{error.field}: refused for the reason sent to the client"
    return str(error)
