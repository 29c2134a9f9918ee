"""Requests that wait on a full worker while another one has room: whom to ask back.

Once placed, a request stays where it is, and what was right then may be wrong a moment later: a drop gives one group
several times the memory, and whoever waits on another worker waits for the answers before it. So the newest of those
that wait there is asked back, one for each report of the worker. It is the worker that gives it back: until its word
comes, the request is the worker's, and what the worker says meanwhile counts as ever.
"""

from itertools import islice

from services.dispatcher.core.backlog import Tracked
from services.dispatcher.core.fleet import Worker

_MOST_PATIENCE = 8.0  # times that of the first recall


def candidate(worker: Worker, at_s: float, after_s: float) -> Tracked | None:
    """The newest request that may have been waiting there for longer than `after_s`. Workers let requests in by order
    of arrival, so of those without a token the newest ones wait.

    Each recall doubles the patience, up to a bound: what seemed to have room twice and had none is not sent to and fro
    with every report, and does not wait for good either.

    One with stop strings stays: what the worker has held back of its text is told with the ending.
    """
    if worker.load is None or not worker.usable:
        return None
    newest_first = islice(reversed(worker.placed.items()), worker.load.waiting_count + len(worker.unseen))
    for handle, tracked in newest_first:
        if handle in worker.unseen or tracked.first_token_at_s is not None or tracked.request.sampling.stop:
            continue
        patience = min(2.0**tracked.recall_count, _MOST_PATIENCE)
        if not tracked.recalled and at_s >= tracked.placed_at_s + after_s * patience:
            return tracked
    return None
