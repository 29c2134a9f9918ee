"""Requests that wait on a full worker while another one has room: which to ask back.

Once placed, a request stays where it is, and what was right then may be wrong a moment later: a drop gives one group
several times the memory, and what waits on another worker waits for the answers before it. So one of those that wait
there is asked back with each report of the worker. It is the worker that gives it back: until its word comes, the
request is the worker's, and what the worker says meanwhile counts as ever.
"""

from itertools import islice

from services.dispatcher.core.fleet import Worker
from services.dispatcher.core.tracked import Tracked

_MOST_PATIENCE = 8.0  # times that of the first recall


def candidate(worker: Worker, at_s: float, after_s: float) -> Tracked | None:
    """The newest request that may have been waiting there for longer than `after_s`; else the one that has waited the
    longest since it was preempted, whose tokens are computed anew elsewhere: a second or two, where it may wait for a
    minute.

    Each recall doubles the patience, up to a bound: what seemed to have room twice and had none is not sent to and fro
    with every report, and does not wait for good either.

    One with stop strings stays: what the worker has held back of its text is told with the ending.
    """
    if worker.load is None or not worker.usable:
        return None
    return _newest(worker, at_s, after_s) or _preempted(worker, at_s, after_s)


def _newest(worker: Worker, at_s: float, after_s: float) -> Tracked | None:
    """Workers let requests in by order of arrival, so of those without a token the newest ones wait, as many as are
    not known to have been preempted.
    """
    assert worker.load is not None
    new_count = max(0, worker.load.waiting_count - len(worker.preempted)) + len(worker.unseen)
    online = ((handle, tracked) for handle, tracked in reversed(worker.placed.items()) if not tracked.offline)
    for handle, tracked in islice(online, new_count):
        if handle in worker.unseen or handle in worker.preempted or tracked.first_token_at_s is not None:
            continue
        if _may_go(tracked) and _has_waited(tracked, at_s - tracked.placed_at_s, after_s):
            return tracked
    return None


def _preempted(worker: Worker, at_s: float, after_s: float) -> Tracked | None:
    for handle, since_s in worker.preempted.items():
        tracked = worker.placed[handle]
        if _may_go(tracked) and _has_waited(tracked, at_s - since_s, after_s):
            return tracked
    return None


def _may_go(tracked: Tracked) -> bool:
    return not tracked.recalled and not tracked.request.sampling.stop


def _has_waited(tracked: Tracked, waited_s: float, after_s: float) -> bool:
    return waited_s >= after_s * min(2.0**tracked.recall_count, _MOST_PATIENCE)
