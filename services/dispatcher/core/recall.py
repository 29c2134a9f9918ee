"""Requests that wait on a full worker while another one has room: whom to ask back.

Once placed, a request stays where it is, and what was right then may be wrong a moment later: a drop gives one group
several times the memory, and whoever waits on another worker waits for the answers before it. So the newest of those
that wait there is asked back, one for each report of the worker. It is the worker that gives it back: until its word
comes, the request is the worker's, and what the worker says meanwhile counts as ever.
"""

from itertools import islice

from services.dispatcher.core.backlog import Tracked
from services.dispatcher.core.fleet import Worker

_MOST_RECALLS = 3  # of one request


def candidate(worker: Worker, placed_until_s: float) -> Tracked | None:
    """The newest request that may be waiting there, of those placed until then. Workers let requests in by order of
    arrival, so of those without a token the newest ones wait.

    One with stop strings stays: what the worker has held back of its text is told with the ending.
    """
    if worker.load is None or not worker.usable:
        return None
    newest_first = islice(reversed(worker.placed.items()), worker.load.waiting_count + len(worker.unseen))
    for handle, tracked in newest_first:
        if handle in worker.unseen or tracked.first_token_at_s is not None or tracked.request.sampling.stop:
            continue
        if tracked.recalled or tracked.recall_count >= _MOST_RECALLS:
            continue
        if tracked.placed_at_s <= placed_until_s:
            return tracked
    return None
