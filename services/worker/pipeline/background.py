"""Threads beside the engine's, for checksums and the disk."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar, TypeVarTuple

from services.worker.pipeline.unhurried import never, unhurried

_THREADS = 2
_Given = TypeVarTuple("_Given")
_Result = TypeVar("_Result")


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
