"""Chooses the request to recall from a full worker's queue while another worker has room.

A placement may turn out wrong: after a drop a group has several times the memory, while requests wait on another
worker. Therefore one of a worker's waiting requests may be recalled with each of its reports. Until the worker has
returned the request, it remains assigned to that worker, whose messages about it are handled as usual.
"""

from itertools import islice

from services.dispatcher.core.fleet import Worker
from services.dispatcher.core.tracked import Tracked

_MOST_PATIENCE = 8.0  # factor on the patience of the first recall


def candidate(worker: Worker, at_s: float, after_s: float) -> Tracked | None:
    """Return the request to recall: the newest that has waited on the worker for `after_s`. If there is none, it is the
    request preempted longest ago, because recomputing it elsewhere takes a second or two, while it might wait here for
    a minute.

    Each recall doubles the patience, up to a limit, so that a request neither moves with every report nor waits
    forever.

    Requests with stop strings are excluded: text held back by the worker is only sent with the ending.
    """
    if worker.load is None or not worker.usable:
        return None
    return _newest(worker, at_s, after_s) or _preempted(worker, at_s, after_s)


def _newest(worker: Worker, at_s: float, after_s: float) -> Tracked | None:
    """Return the newest request without a token that has waited long enough. Workers admit in order of arrival, so only
    the newest requests wait; their number is that of all waiting requests minus those known to be preempted.
    """
    assert worker.load is not None
    new_count = max(0, worker.load.waiting_count - len(worker.preempted)) + len(worker.unseen)
    online = ((handle, tracked) for handle, tracked in reversed(worker.placed.items()) if not tracked.offline)
    for handle, tracked in islice(online, new_count):
        if handle in worker.unseen or handle in worker.preempted or tracked.first_token_at_s is not None:
            continue
        if may_go(tracked) and _has_waited(tracked, at_s - tracked.placed_at_s, after_s):
            return tracked
    return None


def _preempted(worker: Worker, at_s: float, after_s: float) -> Tracked | None:
    for handle, since_s in worker.preempted.items():
        tracked = worker.placed[handle]
        if may_go(tracked) and _has_waited(tracked, at_s - since_s, after_s):
            return tracked
    return None


def may_go(tracked: Tracked) -> bool:
    """True if the request may be recalled."""
    return not tracked.recalled and not tracked.request.sampling.stop


def _has_waited(tracked: Tracked, waited_s: float, after_s: float) -> bool:
    return waited_s >= after_s * min(2.0**tracked.recall_count, _MOST_PATIENCE)
