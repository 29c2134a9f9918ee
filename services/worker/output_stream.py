"""Queue of output for one dispatcher, between the engine loop and the dispatcher's socket."""

import asyncio
from collections import deque
from dataclasses import dataclass

from ballast.common.errors import BallastError, Overloaded
from ballast.common.load import LoadReport
from services.worker.core.events import Emit, Ending

STREAM_OUTPUTS = 4096  # unread messages after which a dispatcher's stream is closed


@dataclass(frozen=True, slots=True)
class Output:
    """One turn's output for one stream."""

    emit: Emit | None
    load: LoadReport
    seen_handle: int


class OutputStream:
    """Queue of outputs for one dispatcher. Used on the event loop only."""

    def __init__(self, stream_id: int) -> None:
        self.stream_id = stream_id
        self.sent_at_s = 0.0
        self.seen_handle = 0
        self.told: LoadReport | None = None  # load report of the last output
        self._told_handle = 0
        self.broken = asyncio.Event()  # set when closed with an error; the current write is then abandoned
        self._outputs: deque[Output] = deque()
        self._wake = asyncio.Event()
        self._closed: BallastError | _StreamEnd | None = None

    @property
    def backlog_count(self) -> int:
        return len(self._outputs)

    @property
    def counts_more(self) -> bool:
        """True if the engine has received requests that the last report to this dispatcher does not count."""
        return self.seen_handle > self._told_handle

    def put(self, emit: Emit | None, load: LoadReport, now_s: float) -> None:
        """Queue an output, which is ignored once the stream is closed. Closes the stream when the bound is reached."""
        if self._closed is not None:
            return
        if len(self._outputs) >= STREAM_OUTPUTS:
            self.close(Overloaded(f"{STREAM_OUTPUTS} outputs are waiting to be read", 1.0))
            return
        if emit is not None:
            self.seen_handle = max(self.seen_handle, emit.seen_handle)
        self._outputs.append(Output(emit, load, self.seen_handle))
        self.told, self._told_handle = load, self.seen_handle
        self.sent_at_s = now_s
        self._wake.set()

    def put_ending(self, ending: Ending, load: LoadReport) -> None:
        """Queue the ending of a request that never reached the core."""
        emit = Emit(self.stream_id, (), (), (), (), (), (ending,), self.seen_handle)
        self.put(emit, load, self.sent_at_s)

    def close(self, why: BallastError | None = None) -> None:
        """Close after the queued outputs, or at once with an error."""
        if self._closed is not None:
            return
        self._closed = why or _StreamEnd()
        if why is not None:
            self._outputs.clear()
            self.broken.set()
        self._wake.set()

    async def next(self) -> Output | None:
        """Wait for the next output; None at the end. Raises the error with which the stream was closed."""
        while not self._outputs:
            if self._closed is not None:
                if isinstance(self._closed, _StreamEnd):
                    return None
                raise self._closed
            self._wake.clear()
            await self._wake.wait()
        return self._outputs.popleft()


class _StreamEnd:
    """Marks a stream's regular end."""
