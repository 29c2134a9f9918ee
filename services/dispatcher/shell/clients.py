"""What a client is owed. A slow reader gets more in one response, not more responses: memory stays bounded by the
tokens of its request."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from ballast.common.ids import RequestId
from services.dispatcher.core.events import Fail, Finish, Refuse

ClientEnding = Finish | Fail | Refuse


class Delivery(NamedTuple):
    """Everything since the last one."""

    token_ids: Sequence[int]
    text: str
    logprobs: Sequence[object]
    ending: ClientEnding | None


class ClientStream:
    """Between the core and one call of a client. Fed synchronously, read by one task."""

    __slots__ = (
        "_logprobs",
        "_loop",
        "_texts",
        "_token_ids",
        "_waiter",
        "ending",
        "request_id",
        "task",
        "waiting_since_s",
    )

    def __init__(self, request_id: RequestId) -> None:
        self.request_id = request_id
        self.ending: ClientEnding | None = None
        self.waiting_since_s: float | None = None  # something lies here unread since then
        self.task = asyncio.current_task()  # the call that reads
        self._loop = asyncio.get_running_loop()
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[object] = []
        self._waiter: asyncio.Future[None] | None = None

    def push(self, token_ids: Sequence[int], text: str, logprobs: Sequence[object], at_s: float) -> None:
        self._token_ids += token_ids
        if text:
            self._texts.append(text)
        if logprobs:
            self._logprobs += logprobs
        self._wake(at_s)

    def end(self, ending: ClientEnding, at_s: float) -> None:
        self.ending = ending
        self._wake(at_s)

    async def take(self) -> Delivery:
        """What is there, as soon as there is anything. After the ending it must not be called again."""
        while not self._token_ids and not self._texts and self.ending is None:
            await self._wait()
        self.waiting_since_s = None
        delivery = Delivery(self._token_ids, "".join(self._texts), self._logprobs, self.ending)
        self._token_ids, self._texts, self._logprobs = [], [], []
        return delivery

    async def take_all(self) -> Delivery:
        """Everything, once the request has ended."""
        while self.ending is None:
            await self._wait()
        return await self.take()

    def _wake(self, at_s: float) -> None:
        if self.waiting_since_s is None:
            self.waiting_since_s = at_s
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
