"""Threads beside the engine's, for checksums and the disk: what nobody waits for rests after every piece.

A thread of lower priority would not do. The interpreter's lock passes to whoever has asked for it, and the engine waits
until that thread has been given a processor: on a busy machine tens of milliseconds. For the same reason pieces are
large: what counts is how often it wakes up.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar, TypeVarTuple

_THREADS = 2
_Given = TypeVarTuple("_Given")
_Result = TypeVar("_Result")
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


class Threads:
    """See `context.Background`."""

    def __init__(
        self,
        read_layer: Callable[[int], None],
        keep_layer: Callable[[int], None],
        beside: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`beside`: inside of it a device copies beside what it computes; it is through with that at the end."""
        self._read_layer = read_layer
        self._keep_layer = keep_layer
        self._beside = beside
        self._workers = ThreadPoolExecutor(_THREADS, thread_name_prefix="layers")

    def submit(self, job: Callable[[*_Given], _Result], /, *given: *_Given) -> Future[_Result]:
        return self._workers.submit(self._do, job, *given)

    def fill(self, layer: int) -> Future[None]:
        return self.submit(self._read_layer, layer)

    def keep(self, layer: int) -> Future[None]:
        return self.submit(self._keep_layer, layer)

    def rest(self, stopped: Callable[[], bool], hurried: Callable[[], bool] = never) -> Callable[[], None]:
        return unhurried(stopped, hurried)

    def shutdown(self) -> None:
        self._workers.shutdown(wait=True, cancel_futures=True)

    def _do(self, job: Callable[[*_Given], _Result], /, *given: *_Given) -> _Result:
        with self._beside():
            return job(*given)
