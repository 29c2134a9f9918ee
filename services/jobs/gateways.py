"""Sends lines to gateways, skipping those that cannot be reached."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ballast.common.errors import Unavailable
from ballast.service.http_client import BrokenCall, HttpClient

_MAX_ANSWER_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class GatewayAnswer:
    """A gateway's response. `retry_after_s`: the delay before a retry that it requests, if any."""

    status: int
    request_id: str
    retry_after_s: float | None
    body: object


class Gateways:
    def __init__(self, clients: Sequence[HttpClient], headers: Mapping[str, str]) -> None:
        self._clients = clients
        self._headers = {"content-type": "application/json", **headers}
        self._next = 0

    async def ask(self, url: str, body: bytes) -> GatewayAnswer:
        """Send one request to the next reachable gateway, in turn.

        Raises:
            Unavailable: no gateway can be reached.
            BrokenCall: the connection was lost during the call.
        """
        for _ in self._clients[1:]:
            try:
                return await self._ask(self._turn(), url, body)
            except Unavailable:
                continue
        return await self._ask(self._turn(), url, body)

    def _turn(self) -> HttpClient:
        self._next = (self._next + 1) % len(self._clients)
        return self._clients[self._next]

    async def _ask(self, client: HttpClient, url: str, body: bytes) -> GatewayAnswer:
        async with client.call("POST", url, self._headers, body) as response:
            raw = await response.read(_MAX_ANSWER_BYTES)
            try:
                said: object = json.loads(raw)
            except ValueError as error:
                if 200 <= response.status < 300:
                    raise BrokenCall(f"the answer of {client.url} is not valid JSON") from error
                said = {"error": {"message": raw[:1000].decode(errors="replace"), "type": "server_error"}}
            retry_after_s = _seconds(response.header("retry-after"))
            return GatewayAnswer(response.status, response.header("x-request-id") or "", retry_after_s, said)

    def close(self) -> None:
        for client in self._clients:
            client.close()


def _seconds(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None
