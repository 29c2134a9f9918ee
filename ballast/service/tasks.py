"""Tasks of a service: what goes wrong in one ends neither the service nor, for long, the task.

Only a broken invariant of this process, or a wrong setting, goes through. What sockets, libraries, event loops and
other processes raise is counted, logged once for each place it comes from, and the loop begins again.
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
_MAX_CAUSES: Final = 256  # told apart in the log; beyond that failures are only counted

T = TypeVar("T")
Loop = Callable[[], Coroutine[Any, Any, None]]

_logged: set[tuple[str, str, tuple[str, int]]] = set()


async def keep_up(run: Loop, name: str) -> None:
    """Runs it until it returns or this is cancelled, however often it fails; after a pause that grows up to 5 s.

    Raises:
        InvariantViolation, ConfigError: as it does, alone or in a group.
    """
    clock, back_off_s = asyncio.get_running_loop(), _FIRST_BACK_OFF_S
    while True:
        began_s = clock.time()
        try:
            return await run()
        except Exception as error:  # noqa: BLE001 - the one place that decides what may end a service
            note_failure(name, error)
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            note_failure(name, error)  # of a call, which gRPC tells by cancelling whoever waits for it
        if clock.time() - began_s > _LONGEST_BACK_OFF_S:
            back_off_s = _FIRST_BACK_OFF_S
        await asyncio.sleep(back_off_s)
        back_off_s = min(2 * back_off_s, _LONGEST_BACK_OFF_S)


async def unless_it_fails(work: Coroutine[Any, Any, T], otherwise: T) -> T:
    """Its result; `otherwise` if it fails by something unforeseen, for who waits for an answer of any kind."""
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
    """Counts and logs the failure of something that goes on, or is done without.

    Raises:
        InvariantViolation, ConfigError: it is one, or a group with one: the service ends by it.
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
    """A task group that begins nothing any more once it has begun to end, and leaves nothing behind then.

    Streams and requests end behind the loop that owns this group, and what they tell the core may ask for more work.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_open = False

    async def __aenter__(self) -> Self:
        self._is_open = True
        return await super().__aenter__()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Something that comes to an end; if it fails, that is all."""
        guarded = _once(work)
        try:
            task = self.create_task(guarded, name=name)
            task.add_done_callback(lambda _: work.close())  # cancelled before it has begun: as below
        except RuntimeError:
            guarded.close()
            work.close()  # else its never having been awaited is complained about at some other time
            if not self._is_open:
                raise

    def keep(self, run: Loop, name: str) -> asyncio.Task[None]:
        """Something that goes on (`keep_up`)."""
        return self.create_task(keep_up(run, name), name=name)
