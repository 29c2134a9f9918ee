"""Output buffers of clients. Chunks are coalesced for slow readers, so memory is bounded by the tokens of a request."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from ballast.common.ids import RequestId
from services.dispatcher.core.events import Fail, Finish, Refuse

ClientEnding = Finish | Fail | Refuse

_MAX_WAVE_S = 0.02
# Serialising the logprobs of a position with 20 alternatives takes 0.2 ms and blocks the loop, so slow readers get them
# in parts.
_MAX_LOGPROBS = 64


class Delivery(NamedTuple):
    """Output since the last delivery."""

    token_ids: Sequence[int]
    text: str
    logprobs: Sequence[object]
    ending: ClientEnding | None


class ClientStream:
    """Output buffer between the core and the call of one client. It is filled synchronously and read by one task."""

    def __init__(self, request_id: RequestId, pacer: "Pacer") -> None:
        self.request_id = request_id
        self.ending: ClientEnding | None = None
        self.waiting_since_s: float | None = None  # time of the oldest unread output
        self.given_up = ""  # reason for ending the call because the client does not read
        self._task = asyncio.current_task()  # task of the call that reads the output
        self._loop = asyncio.get_running_loop()
        self._pacer = pacer
        self._has_begun = False
        self._wants_all = False  # True: wake the reader only at the end
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
        if self.waiting_since_s is None and not self._wants_all:
            self.waiting_since_s = at_s
            if not self._has_begun:
                self.wake()  # do not delay the first token
            elif self._waiter is not None:
                self._pacer.add(self)

    def end(self, ending: ClientEnding, at_s: float) -> None:
        self.ending = ending
        if self.waiting_since_s is None:
            self.waiting_since_s = at_s
        self.wake()

    def wake(self) -> bool:
        """Wake the reader. Returns True if it was waiting."""
        if self._waiter is None or self._waiter.done():
            return False
        self._waiter.set_result(None)
        return True

    def give_up(self, why: str) -> None:
        """End the call because its client does not read."""
        self.given_up = why
        if self._task is not None:
            self._task.cancel()

    async def take(self) -> Delivery:
        """Wait for output and return it, or its first part. Must not be called after the ending."""
        self._pacer.rest(self)
        if self._has_begun and self.waiting_since_s is not None and self.ending is None:
            self._pacer.add(self)
            await self._wait()
        while self.waiting_since_s is None:
            await self._wait()
        if len(self._logprobs) > _MAX_LOGPROBS:
            return self._first_part()
        return self._everything()

    def _first_part(self) -> Delivery:
        self._has_begun, self.waiting_since_s = True, self._loop.time()
        part = slice(0, _MAX_LOGPROBS)
        delivery = Delivery(self._token_ids[part], "".join(self._texts), self._logprobs[part], None)
        del self._token_ids[part], self._logprobs[part]
        self._texts = []
        return delivery

    def _everything(self) -> Delivery:
        self.waiting_since_s = None
        self._has_begun = True
        delivery = Delivery(self._token_ids, "".join(self._texts), self._logprobs, self.ending)
        self._token_ids, self._texts, self._logprobs = [], [], []
        return delivery

    async def take_all(self) -> Delivery:
        """Wait until the request has ended, and return all output that was not taken."""
        self._wants_all = True
        if self.ending is None:
            self.waiting_since_s = None
        while self.ending is None:
            await self._wait()
        return self._everything()

    def close(self) -> None:
        """Leave the pacer's wave, because the reading call has ended."""
        self._pacer.rest(self)

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class Pacer:
    """Wakes readers in waves. The next wave starts when the responses of the last one have been sent.

    A response costs the same for one token as for ten. With little load a wave ends at once. Under load (many streams,
    fast workers, a shared CPU) tokens are coalesced instead of queued. A client that does not read delays the others
    once, by at most `_MAX_WAVE_S`.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._next: list[ClientStream] = []  # streams with output, waiting for the next wave
        self._sending: set[ClientStream] = set()  # streams of the current wave that have not sent their output yet
        self._begins: asyncio.Handle | None = None
        self._ends: asyncio.TimerHandle | None = None

    def add(self, stream: ClientStream) -> None:
        self._next.append(stream)
        self._schedule_begin()

    def rest(self, stream: ClientStream) -> None:
        """Remove a stream from the current wave, which ends with its last stream."""
        if stream in self._sending:
            self._sending.remove(stream)
            if not self._sending:
                self._end()

    def _schedule_begin(self) -> None:
        if self._begins is None and not self._sending:
            self._begins = self._loop.call_soon(self._begin)

    def _begin(self) -> None:
        self._begins = None
        streams, self._next = self._next, []
        self._sending.update([stream for stream in streams if stream.wake()])
        if self._sending:
            self._ends = self._loop.call_later(_MAX_WAVE_S, self._end)

    def _end(self) -> None:
        self._sending.clear()
        if self._ends is not None:
            self._ends.cancel()
            self._ends = None
        if self._next:
            self._schedule_begin()
