"""Limits of a dispatcher, and the reasons for refusing a request."""

from dataclasses import dataclass

from ballast.common.errors import Overloaded
from services.dispatcher.core.backlog import Backlog, DrainRate
from services.dispatcher.core.long_requests import LongRequests
from services.dispatcher.core.tracked import Tracked

_TAKEN_OVER_FACTOR = 2  # factor on the limits for a request taken over from another dispatcher
MOST_SHARED = 2  # factor on the limits for a request whose caller is within its fair share


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    max_queued_request_count: int = 1024
    max_queued_token_count: int = 1_000_000
    max_offline_queued_count: int = 256  # maximum number of waiting offline requests
    replay_limit: int = 3
    no_worker_timeout_s: float = 30.0  # maximum wait while there is no worker
    long_wait_s: float = 60.0  # maximum wait of a request that no group can hold
    move_wait_s: float = 5.0  # maximum wait of a handed-over request for the stream to its new worker


def long_too_full(newcomer: Tracked, long: LongRequests, backlog: Backlog, limits: Limits) -> Overloaded | None:
    """Return the refusal of a long request, or None. The backlog's limits apply to both queues together."""
    factor = _TAKEN_OVER_FACTOR if newcomer.request.taken_over else 1
    if len(backlog) + len(long) > limits.max_queued_request_count * factor:
        why = f"{len(backlog) + len(long) - 1} requests are waiting, which is the limit (--max-num-queued-reqs)"
    elif backlog.token_count + long.token_count > limits.max_queued_token_count * factor:
        why = (
            f"{backlog.token_count + long.token_count} tokens would be waiting, more than"
            f" {limits.max_queued_token_count * factor} (--max-num-queued-tokens)"
        )
    else:
        return None
    return Overloaded(why, limits.long_wait_s)


def too_full(
    newcomer: Tracked, backlog: Backlog, limits: Limits, drain_rate: DrainRate, at_s: float
) -> Overloaded | None:
    """Return the refusal of a request that exceeds the backlog's limits, or None. If there are several callers, each
    may fill its fair share regardless of the others, so the backlog may reach twice the limit.
    """
    factor = _TAKEN_OVER_FACTOR if newcomer.request.taken_over else 1
    request_count, token_count = len(backlog), backlog.token_count
    caller, callers = newcomer.request.caller, len(backlog.callers)
    own_count, own_tokens = backlog.callers[caller], backlog.tokens_of(caller)
    most_count, most_tokens = limits.max_queued_request_count, limits.max_queued_token_count
    if callers > 1 and own_count * callers <= most_count and own_tokens * callers <= most_tokens:
        factor = MOST_SHARED
    if callers > 1 and request_count > most_count * factor and own_count * callers > most_count:
        why = (
            f"{own_count - 1} requests of this caller are waiting, more than its share while {callers} callers wait"
            f" for {most_count} places (--max-num-queued-reqs)"
        )
    elif request_count > most_count * factor:
        why = f"{request_count - 1} requests are waiting, which is the limit (--max-num-queued-reqs)"
    elif token_count > most_tokens * factor:
        why = (
            f"{token_count - newcomer.token_count} tokens are waiting, with this request's {newcomer.token_count} more"
            f" than {most_tokens * factor} (--max-num-queued-tokens)"
        )
    else:
        return None
    return Overloaded(why, drain_rate.until_half_s(request_count, at_s))
