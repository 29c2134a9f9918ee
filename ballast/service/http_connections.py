"""HTTP connections with limits on their number, on the time and length of a request's head, and on how long a client
may read nothing. Clients that offer HTTP/2 (JDK, `curl --http2`) get HTTP/1.1, HTTP/1.0 clients unchunked responses.
"""

import asyncio
import re
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from ballast.rpc.server import room_for_connections

_HEAD_S = 10.0
_MAX_HEAD_BYTES = 64 << 10


_UPGRADE_TO_HTTP2 = re.compile(rb"\r\nupgrade:[ \t]*h2c[^\r\n]*", re.IGNORECASE)


class _UnchunkedCycle(RequestResponseCycle):
    """A response to an HTTP/1.0 request: the end of the connection marks the end of its body."""

    # Any: ASGI messages.
    async def send(self, message: Any) -> None:
        if self.disconnected:
            return
        if self.flow.write_paused:
            await self.flow.drain()
        if message["type"] == "http.response.start":
            self.response_started = True
            self.waiting_for_100_continue = False
            head = [STATUS_LINE[message["status"]]]
            for name, value in (*self.default_headers, *message["headers"], (b"connection", b"close")):
                head += name, b": ", value, b"\r\n"
            self.transport.write(b"".join([*head, b"\r\n"]))
            return
        if self.scope["method"] != "HEAD":
            self.transport.write(message.get("body", b""))
        if not message.get("more_body", False):
            self.response_complete = True
            self.message_event.set()
            self.transport.close()
            self.on_response()


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits: a connection is closed if there are too many, if a request's head is too long or
    not complete in time, or if the client reads nothing for `client_stall_timeout_s`.
    """

    # Any: uvicorn's configuration and state.
    def __init__(self, *args: Any, client_stall_timeout_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._client_stall_timeout_s = client_stall_timeout_s
        self._stall_timer: asyncio.TimerHandle | None = None
        self._most = room_for_connections()
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._is_in_head = False
        self._is_in_message = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._most:
            transport.abort()
            return
        self._await_head()

    def data_received(self, data: bytes) -> None:
        if self._head_timer is not None:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES + (64 << 10):  # the last piece may include part of the body
                self._give_up()
                return
        if not self._is_in_message:  # remove the upgrade header: the parser would take the body for HTTP/2
            end = data.find(b"\r\n\r\n")
            if found := _UPGRADE_TO_HTTP2.search(data, 0, end if end >= 0 else len(data)):
                data = data[: found.start()] + data[found.end() :]
        super().data_received(data)
        if self._is_in_head and self._head_timer is None:  # only a head that arrives in several pieces needs a timer
            self._await_head()

    def on_message_begin(self) -> None:
        self._is_in_head = self._is_in_message = True
        super().on_message_begin()

    def on_message_complete(self) -> None:
        self._is_in_message = False
        super().on_message_complete()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._head_came()
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":  # the class can change, because the cycle's task has not started yet
            self.cycle.__class__ = _UnchunkedCycle

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
