"""CORS: requests from pages of other origins."""

import asyncio
from collections.abc import Mapping

import pytest
from starlette.types import Message, Receive, Scope, Send

from services.gateway.app import allowing


async def app(_: Scope, __: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-request-id", b"r")]})
    await send({"type": "http.response.body", "body": b"ok"})


def asked(origins: str, method: str, headers: Mapping[str, str]) -> tuple[int, dict[str, str]]:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b""}

    async def send(message: Message) -> None:
        sent.append(message)

    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope: Scope = {"type": "http", "method": method, "path": "/v1/chat/completions", "headers": pairs}
    asyncio.run(allowing(app, origins)(scope, receive, send))  # type: ignore[arg-type]
    return sent[0]["status"], {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]}


PREFLIGHT = {
    "origin": "https://a.example",
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


@pytest.mark.parametrize("origins", ["*", "https://b.example, https://a.example"])
def test_a_page_of_an_allowed_origin(origins: str) -> None:
    status, headers = asked(origins, "OPTIONS", PREFLIGHT)
    assert status == 200
    assert headers["access-control-allow-origin"] in ("*", "https://a.example")
    assert "POST" in headers["access-control-allow-methods"]
    assert headers["access-control-allow-headers"] == "authorization,content-type"
    status, headers = asked(origins, "POST", {"origin": "https://a.example"})
    assert headers["access-control-allow-origin"] in ("*", "https://a.example")
    assert "x-request-id" in headers["access-control-expose-headers"]


def test_other_origins_get_no_permission() -> None:
    assert asked("https://b.example", "OPTIONS", PREFLIGHT)[0] == 400
    assert "access-control-allow-origin" not in asked("https://b.example", "POST", PREFLIGHT)[1]
    assert allowing(app, " , ") is app  # type: ignore[comparison-overlap]
