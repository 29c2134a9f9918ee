"""Background tasks of a service: an unexpected error ends neither the service nor, permanently, the task.

Only InvariantViolation and ConfigError end the service. Errors from sockets, libraries, event loops and other processes
are counted and logged once for each place where they are raised, and the task is restarted.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, Self, TypeVar, cast

from ballast.common.errors import ConfigError, InvariantViolation
from ballast.rpc.errors import is_cancelled
from ballast.service.logs import frames, get_logger, raised_at
from ballast.service.metrics import TASK_FAILURES

_FIRST_BACK_OFF_S: Final = 0.1
_LONGEST_BACK_OFF_S: Final = 5.0
_MAX_CAUSES: Final = 256  # limit on distinct causes in the log; further failures are only counted

T = TypeVar("T")
Loop = Callable[[], Coroutine[Any, Any, None]]

_logged: set[tuple[str, str, tuple[str, int]]] = set()


async def run_supervised(run: Loop, name: str) -> None:
    """Call `run` until it returns or is cancelled. After a failure it is called again, after a pause of 0.1 to 5 s.

    Raises:
        InvariantViolation, ConfigError: `run` raised one, alone or in a group.
    """
    clock, back_off_s = asyncio.get_running_loop(), _FIRST_BACK_OFF_S
    while True:
        began_s = clock.time()
        try:
            return await run()
        except Exception as error:  # noqa: BLE001 - the one place that decides which errors end a service
            note_failure(name, error)
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            note_failure(name, error)  # a gRPC call was cancelled, not this task
        if clock.time() - began_s > _LONGEST_BACK_OFF_S:
            back_off_s = _FIRST_BACK_OFF_S
        await asyncio.sleep(back_off_s)
        back_off_s = min(2 * back_off_s, _LONGEST_BACK_OFF_S)


async def unless_it_fails(work: Coroutine[Any, Any, T], otherwise: T) -> T:
    """Await `work` and return its result; after an unexpected error, count and log it and return `otherwise`."""
    try:
        return await work
    except Exception as error:  # noqa: BLE001 - as above
        note_failure(work.__qualname__, error)
    return otherwise


async def _once(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except Exception as error:  # noqa: BLE001 - as above
        note_failure(work.__qualname__, error)


def _may_end_it(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        inner = cast("tuple[BaseException, ...]", error.exceptions)  # pyright: ignore[reportUnknownMemberType]
        return any(_may_end_it(each) for each in inner)
    return isinstance(error, (InvariantViolation, ConfigError))


def note_failure(task: str, error: BaseException) -> None:
    """Count and log a failure after which the caller continues.

    Raises:
        InvariantViolation, ConfigError: the error is one, or a group that contains one, and ends the service.
    """
    if _may_end_it(error):
        raise error
    cause = type(error).__name__
    TASK_FAILURES.labels(task, cause).inc()
    key = (task, cause, raised_at(error))
    if key not in _logged and len(_logged) < _MAX_CAUSES:
        _logged.add(key)
        get_logger().error("task failed, the service goes on", task=task, cause=cause, at=frames(error))


class Work(asyncio.TaskGroup):
    """A task group that ignores new tasks once it is ending.

    Streams and requests end after the task that owns this group, and their events may still try to start work.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_open = False

    async def __aenter__(self) -> Self:
        self._is_open = True
        return await super().__aenter__()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Start a task that ends by itself; count and log its failure. Does nothing once the group is ending."""
        guarded = _once(work)
        try:
            task = self.create_task(guarded, name=name)
            task.add_done_callback(lambda _: work.close())  # for a task that is cancelled before its start
        except RuntimeError:
            guarded.close()
            work.close()  # like above, avoids a 'never awaited' warning
            if not self._is_open:
                raise

    def keep(self, run: Loop, name: str) -> asyncio.Task[None]:
        """Start a task that runs until cancelled (`run_supervised`)."""
        return self.create_task(run_supervised(run, name), name=name)
