"""Takes a snapshot of the cluster, merged from all dispatchers named on the command line."""

import dataclasses
from collections import Counter
from collections.abc import Sequence

from ballast.client import Client, ClusterStatus
from ballast.common.errors import BallastError, DeadlineExceeded, Unavailable
from tools.cli.followers import with_followers


@dataclasses.dataclass(frozen=True, slots=True)
class DispatcherFacts:
    """What a dispatcher reports about itself. If it cannot be reached, only `address` and `error` are set."""

    address: str
    dispatcher_id: str = ""
    version: str = ""
    uptime_s: float = 0.0
    draining: bool = False
    state_server_reachable: bool = False
    error: str = ""

    @staticmethod
    def of(status: ClusterStatus) -> "DispatcherFacts":
        return DispatcherFacts(
            status.address,
            status.dispatcher_id,
            status.version,
            status.uptime_s,
            status.draining,
            status.state_server_reachable,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Look:
    """A snapshot of the cluster. `status`: the newest layout that a dispatcher knows, with request counts summed over
    all dispatchers.
    """

    status: ClusterStatus
    dispatchers: tuple[DispatcherFacts, ...]


def query_dispatchers(client: Client) -> Look:
    """Take a snapshot: ask all dispatchers, and all followers, for their status.

    Raises:
        Unavailable: no dispatcher can be reached.
        DeadlineExceeded: none answers in time.
    """
    told: list[ClusterStatus] = []
    dispatchers: list[DispatcherFacts] = []
    failure: BallastError = Unavailable(", ".join(client.addresses))
    for address in client.addresses:
        try:
            told.append(client.status(address))
        except (Unavailable, DeadlineExceeded) as error:
            failure = error
            dispatchers.append(DispatcherFacts(address, error=str(error).removeprefix(f"{address}: ")))
        else:
            dispatchers.append(DispatcherFacts.of(told[-1]))
    if not told:
        raise failure
    return Look(with_followers(added_up(told)), tuple(dispatchers))


def added_up(told: Sequence[ClusterStatus]) -> ClusterStatus:
    """Merge the statuses of dispatchers: backlogs, offline queues, their limits, and counts of running and ended
    requests are summed; all else is from the one with the newest layout.
    """
    newest = max(told, key=lambda status: status.layout.epoch if status.layout is not None else -1)
    endings = Counter[str]()
    waiting = Counter[str]()
    for status in told:
        endings.update(status.requests_total)
        waiting.update(status.waiting_by_caller)
    return dataclasses.replace(
        newest,
        backlog_request_count=sum(status.backlog_request_count for status in told),
        backlog_token_count=sum(status.backlog_token_count for status in told),
        offline_queued_count=sum(status.offline_queued_count for status in told),
        running_request_count=sum(status.running_request_count for status in told),
        max_queued_request_count=sum(status.max_queued_request_count for status in told),
        max_queued_token_count=sum(status.max_queued_token_count for status in told),
        requests_total=dict(endings),
        waiting_by_caller=dict(waiting),
    )
