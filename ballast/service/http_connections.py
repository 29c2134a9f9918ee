"""HTTP connections with bounds: on how many there are, on the time and the length of a request's head, and on how long
a client reads nothing."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ballast.rpc.server import room_for_connections

_HEAD_S = 10.0
_MAX_HEAD_BYTES = 64 << 10


class BoundedProtocol(HttpToolsProtocol):
    """Who connects has some seconds to ask for something, and so has each further request once it has begun."""

    # Any: uvicorn hands in its configuration and state.
    def __init__(self, *args: Any, client_stall_timeout_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._client_stall_timeout_s = client_stall_timeout_s
        self._stall_timer: asyncio.TimerHandle | None = None
        self._most = room_for_connections()
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._is_in_head = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._most:
            transport.abort()
            return
        self._await_head()

    def data_received(self, data: bytes) -> None:
        if self._head_timer is not None:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES + (64 << 10):  # of which the last piece may be a body
                self._give_up()
                return
        super().data_received(data)
        if self._is_in_head and self._head_timer is None:  # most heads come in one piece, and need no timer
            self._await_head()

    def on_message_begin(self) -> None:
        self._is_in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._head_came()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        self._reads_again()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(self._client_stall_timeout_s, self._give_up)

    def resume_writing(self) -> None:
        self._reads_again()
        super().resume_writing()

    def _await_head(self) -> None:
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(_HEAD_S, self._give_up)

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _reads_again(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _give_up(self) -> None:
        self._head_came()
        self.transport.abort()
