"""Threads for checksums and disk reads. Jobs without urgency pause after each piece.

A lower thread priority would not help: the GIL is passed to the thread that requested it, and the engine would wait
until that thread is scheduled, which takes tens of milliseconds on a busy machine. For the same reason pieces are
large, so that there are few wake-ups.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar, TypeVarTuple

_THREADS = 2
_Given = TypeVarTuple("_Given")
_Result = TypeVar("_Result")
_SHARE = 0.1  # share of one processor; two jobs on each of two workers take a fifth of two shared cores
_LONGEST_REST_S = 0.05


def never() -> bool:
    return False


class Stopped(Exception):
    """The job was cancelled."""


def unhurried(stopped: Callable[[], bool], hurried: Callable[[], bool] = never) -> Callable[[], None]:
    """Create a function that a job calls on its thread between two pieces. It pauses, and raises Stopped if the job was
    cancelled. Each job needs its own. `hurried()`: True if requests wait for the job, which then does not pause.
    """
    worked_s: float | None = None  # CPU time of the job's thread, known from the first call on

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
    """A pool of threads, the worker's `context.Background`."""

    def __init__(
        self,
        holds_layer: Callable[[int], bool],
        read_layer: Callable[[int], bool],
        keep_layer: Callable[[int], None],
        beside: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`beside`: context manager that runs copies on a side stream and synchronises on exit."""
        self._holds_layer = holds_layer
        self._read_layer = read_layer
        self._keep_layer = keep_layer
        self._beside = beside
        self._workers = ThreadPoolExecutor(_THREADS, thread_name_prefix="layers")

    def submit(self, job: Callable[[*_Given], _Result], /, *given: *_Given) -> Future[_Result]:
        return self._workers.submit(self._do, job, *given)

    def holds(self, layer: int) -> bool:
        return self._holds_layer(layer)

    def fill(self, layer: int) -> Future[bool]:
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
