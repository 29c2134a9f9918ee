"""Tasks of a service: an error in one ends neither the service nor, permanently, the task.

Only a broken invariant of this process or an invalid setting is raised. Errors from sockets, libraries, event loops and
other processes are counted, logged once for each place they come from, and the task is restarted.
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
_MAX_CAUSES: Final = 256  # distinct causes in the log; further failures are only counted

T = TypeVar("T")
Loop = Callable[[], Coroutine[Any, Any, None]]

_logged: set[tuple[str, str, tuple[str, int]]] = set()


async def run_supervised(run: Loop, name: str) -> None:
    """Run it until it returns or is cancelled; after each failure it is restarted after a pause that grows up to 5 s.

    Raises:
        InvariantViolation, ConfigError: raised by it, alone or in a group.
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
            note_failure(name, error)  # of a call: gRPC cancels the task that awaits it
        if clock.time() - began_s > _LONGEST_BACK_OFF_S:
            back_off_s = _FIRST_BACK_OFF_S
        await asyncio.sleep(back_off_s)
        back_off_s = min(2 * back_off_s, _LONGEST_BACK_OFF_S)


async def unless_it_fails(work: Coroutine[Any, Any, T], otherwise: T) -> T:
    """The result, or `otherwise` after an unexpected error, for callers that need an answer in any case."""
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
        InvariantViolation, ConfigError: the error is one, or a group that contains one: it ends the service.
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
    """A task group that starts no task once it has begun to end.

    Streams and requests end after the loop that owns this group, and their events may still start work.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_open = False

    async def __aenter__(self) -> Self:
        self._is_open = True
        return await super().__aenter__()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Start a task that ends by itself; its failure is logged and otherwise ignored."""
        guarded = _once(work)
        try:
            task = self.create_task(guarded, name=name)
            task.add_done_callback(lambda _: work.close())  # if cancelled before its start, see below
        except RuntimeError:
            guarded.close()
            work.close()  # avoids a 'never awaited' warning
            if not self._is_open:
                raise

    def keep(self, run: Loop, name: str) -> asyncio.Task[None]:
        """Start a task that runs until cancelled (`run_supervised`)."""
        return self.create_task(run_supervised(run, name), name=name)
