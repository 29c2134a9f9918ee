"""Callers that wait for the core's answer, by request id."""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from ballast.common.errors import (
    AlreadyExists,
    BallastError,
    DeadlineExceeded,
    NotActive,
    NotFound,
    NotPossible,
    Overloaded,
    Unavailable,
)
from services.planner.core.messages import ChangeRefusal, DrainRefusal

T = TypeVar("T")


class Answers(Generic[T]):
    """Waiting callers by request id. Several may wait for one id, because a repeated request is the same request."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[asyncio.Future[T]]] = {}

    async def wait(self, request_id: str, ask: Callable[[], None], timeout_s: float, late: str) -> T:
        """Send a request and wait for its answer.

        Args:
            ask: Sends the request to the core, which may answer before this returns.
            late: Message of the timeout.

        Raises:
            DeadlineExceeded: with `late`.
            BallastError: the core's refusal.
        """
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(request_id, [])
        waiting.append(answer)
        try:
            ask()
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError as error:
            raise DeadlineExceeded(late) from error
        finally:
            waiting.remove(answer)
            if not waiting and self._waiting.get(request_id) is waiting:
                del self._waiting[request_id]

    def settle(self, request_id: str, answer: T) -> None:
        for future in self._waiting.pop(request_id, []):
            if not future.done():
                future.set_result(answer)

    def refuse(self, request_id: str, error: BallastError) -> None:
        for future in self._waiting.pop(request_id, []):
            if not future.done():
                future.set_exception(error)


def change_error(planner_id: str, refusal: ChangeRefusal, why: str) -> BallastError:
    match refusal:
        case ChangeRefusal.STANDBY:
            return NotActive(planner_id)
        case ChangeRefusal.BUSY | ChangeRefusal.NOT_POSSIBLE:
            return NotPossible(why)
        case ChangeRefusal.NO_LOADS:
            return Unavailable("monitor", why)
        case ChangeRefusal.ID_REUSED:
            return AlreadyExists(why)


def drain_error(planner_id: str, refusal: DrainRefusal, request_id: str) -> BallastError:
    match refusal:
        case DrainRefusal.STANDBY:
            return NotActive(planner_id)
        case DrainRefusal.NO_SUCH_WORKER:
            return NotFound("no such worker; `ballast status` lists the workers")
        case DrainRefusal.NOT_READY:
            return Unavailable(planner_id, "has just become active and does not know all workers yet")
        case DrainRefusal.ID_REUSED:
            return AlreadyExists(f"request id {request_id!r} was already used for another worker")
        case DrainRefusal.FULL:
            return Overloaded("too many drains are under way", 1.0)
