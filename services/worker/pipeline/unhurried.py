"""Work that nobody waits for, in the background of an engine: it rests after every piece.

A thread of lower priority would not do. The interpreter's lock passes to whoever has asked for it, and the engine waits
until that thread has been given a processor: on a busy machine tens of milliseconds. For the same reason pieces are
large: what counts is how often it wakes up.
"""

import time
from collections.abc import Callable

_SHARE = 0.1  # of one processor's time: two jobs on each of two workers that share two cores take a fifth of them
_LONGEST_REST_S = 0.05


def never() -> bool:
    return False


class Stopped(Exception):
    """The work is not wanted any more."""


def unhurried(stopped: Callable[[], bool], hurried: Callable[[], bool] = never) -> Callable[[], None]:
    """To be called between two pieces, on the thread that does them; one for each job. It raises Stopped if so.
    `hurried`: somebody waits for it now after all.
    """
    worked_s: float | None = None  # of the thread that does the work, which may not be this one

    def rest() -> None:
        nonlocal worked_s
        if stopped():
            raise Stopped
        took_s = 0.0 if worked_s is None else time.thread_time() - worked_s
        if not hurried():
            time.sleep(min(took_s * (1 / _SHARE - 1), _LONGEST_REST_S))
        worked_s = time.thread_time()

    return rest
