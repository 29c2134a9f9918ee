"""Which request to recall from a full worker's queue while another worker has room.

A placement may become wrong: a drop gives a group several times the memory, while requests wait on another worker. So
with each report of a worker one of its waiting requests may be recalled. The worker has to return it: until then it is
the worker's, and its messages count as usual.
"""

from itertools import islice

from services.dispatcher.core.fleet import Worker
from services.dispatcher.core.tracked import Tracked

_MOST_PATIENCE = 8.0  # times that of the first recall


def candidate(worker: Worker, at_s: float, after_s: float) -> Tracked | None:
    """The newest request that has been waiting there for longer than `after_s`; otherwise the one waiting longest since
    its preemption, which is recomputed elsewhere: a second or two, where it might wait for a minute.

    Each recall doubles the patience, up to a bound: a request must not bounce with every report, nor wait forever.

    Requests with stop strings are excluded: the text held back by the worker is sent with the ending only.
    """
    if worker.load is None or not worker.usable:
        return None
    return _newest(worker, at_s, after_s) or _preempted(worker, at_s, after_s)


def _newest(worker: Worker, at_s: float, after_s: float) -> Tracked | None:
    """Workers admit by arrival, so the newest requests without a token are waiting, as many as are not known to be
    preempted.
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
