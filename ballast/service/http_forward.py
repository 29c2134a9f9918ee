"""Forwards a request unchanged to another server and streams the response back."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Final

from starlette.types import Receive, Scope, Send

from ballast.service.http_client import BrokenCall, HttpClient

# Hop-by-hop headers, which are not forwarded (RFC 9110, 7.6.1); this server has already handled `expect`.
_HOP: Final = frozenset(
    {"connection", "expect", "host", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"}
)

IDLE_S: Final = 120.0  # longer than servers wait for clients


class ClientGone(Exception):
    """The client closed the connection before its response was complete."""


async def forward(
    client: HttpClient, scope: Scope, receive: Receive, send: Send, added: Mapping[str, str] | None = None
) -> int:
    """Forward the request, stream back the response and return its status. `added`: additional request headers.

    Raises:
        Unavailable: nothing was sent.
        BrokenCall: the connection was lost during the call, before or after the response began, or neither side has
            sent anything for `IDLE_S`.
        ClientGone: the client disconnected before it had sent its whole body.
    """
    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
    headers = [(name, value) for name, value in headers if name.lower() not in _HOP] + list((added or {}).items())
    query = scope.get("query_string", b"")
    path = scope.get("raw_path", scope["path"].encode()).partition(b"?")[0].decode("latin-1")
    target = f"{path}?{query.decode('latin-1')}" if query else path
    has_body = any(name.lower() in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])
    try:
        async with asyncio.timeout(IDLE_S) as idle:
            body = _body(receive, idle) if has_body else b""
            async with client.call(scope["method"], target, headers, body) as response:
                kept = [
                    (name.encode(), value.encode("latin-1")) for name, value in response.headers if name not in _HOP
                ]
                await send({"type": "http.response.start", "status": response.status, "headers": kept})
                async for piece in response.pieces():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                    _postpone(idle)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return response.status
    except TimeoutError as error:
        raise BrokenCall(f"neither side has sent anything for {IDLE_S:g} s") from error


def _postpone(idle: asyncio.Timeout) -> None:
    idle.reschedule(asyncio.get_running_loop().time() + IDLE_S)


async def _body(receive: Receive, idle: asyncio.Timeout) -> AsyncGenerator[bytes, None]:
    while True:
        message = await receive()
        _postpone(idle)
        if message["type"] == "http.disconnect":
            raise ClientGone
        if message.get("body"):
            yield message["body"]
        if not message.get("more_body", False):
            return
