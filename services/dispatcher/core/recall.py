"""Requests that wait on a full worker while another one has room: which to ask back.

Once placed, a request stays where it is, and what was right then may be wrong a moment later: a drop gives one group
several times the memory, and what waits on another worker waits for the answers before it. So one of those that wait
there is asked back with each report of the worker. It is the worker that gives it back: until its word comes, the
request is the worker's, and what the worker says meanwhile counts as ever.
"""

from itertools import islice

from services.dispatcher.core.backlog import Tracked
from services.dispatcher.core.fleet import Worker

_MOST_PATIENCE = 8.0  # times that of the first recall
_SILENT_S = 1.0  # what gives no token for so long, where requests wait, is one of them: it was preempted


def candidate(worker: Worker, at_s: float, after_s: float) -> Tracked | None:
    """The newest request that may have been waiting there for longer than `after_s`; else the one that was preempted
    first, whose tokens are computed anew elsewhere: a second or two, where it may wait for a minute.

    Each recall doubles the patience, up to a bound: what seemed to have room twice and had none is not sent to and fro
    with every report, and does not wait for good either.

    One with stop strings stays: what the worker has held back of its text is told with the ending.
    """
    if worker.load is None or not worker.usable:
        return None
    return _newest(worker, at_s, after_s) or _silent(worker, at_s, max(after_s, _SILENT_S))


def _newest(worker: Worker, at_s: float, after_s: float) -> Tracked | None:
    """Workers let requests in by order of arrival, so of those without a token the newest ones wait."""
    assert worker.load is not None
    newest_first = islice(reversed(worker.placed.items()), worker.load.waiting_count + len(worker.unseen))
    for handle, tracked in newest_first:
        if handle in worker.unseen or tracked.first_token_at_s is not None:
            continue
        if _may_go(tracked) and at_s >= tracked.placed_at_s + after_s * _patience(tracked):
            return tracked
    return None


def _silent(worker: Worker, at_s: float, after_s: float) -> Tracked | None:
    """The longest without a token, of those that had one. What has none since it came here may be computing its own
    tokens anew, and is given the most patience.
    """
    found, found_s = None, at_s
    for handle, tracked in worker.placed.items():
        if handle in worker.unseen or tracked.first_token_at_s is None or not _may_go(tracked):
            continue
        since_s = max(tracked.last_token_at_s, tracked.placed_at_s)
        patience = _MOST_PATIENCE if tracked.awaits_token else _patience(tracked)
        if since_s < found_s and at_s >= since_s + after_s * patience:
            found, found_s = tracked, since_s
    return found


def _may_go(tracked: Tracked) -> bool:
    return not tracked.recalled and not tracked.request.sampling.stop


def _patience(tracked: Tracked) -> float:
    return min(2.0**tracked.recall_count, _MOST_PATIENCE)
