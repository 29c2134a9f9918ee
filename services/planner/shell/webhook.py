"""Posts the wanted number of instances to a URL whenever it changes, for an external scaler."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from urllib.parse import urlsplit, urlunsplit

from ballast.common.errors import BallastError
from ballast.common.wanted import SIGNATURE, Wanted, sign
from ballast.service.http_client import HttpClient
from ballast.service.logs import get_logger

EVERY_S = 15.0  # minimum interval of posts, after a successful one
_BACK_OFF_S, _LONGEST_BACK_OFF_S = 1.0, 60.0
_TIMEOUT_S = 5.0

# URL, body, signature; raises OSError, ValueError or BallastError
Post = Callable[[str, bytes, str], Coroutine[None, None, None]]


async def post(url: str, body: bytes, signature: str) -> None:
    """Send a message. Redirects are errors. The body of the response is not read, because it may be endless.

    Raises:
        OSError: the receiver refuses the message, or does not answer in time.
        BallastError: the URL is invalid, or there is no connection.
    """
    parts = urlsplit(url)
    headers = {"Content-Type": "application/json", SIGNATURE: signature}
    path = urlunsplit(("", "", parts.path or "/", parts.query, ""))
    client = HttpClient(f"{parts.scheme}://{parts.netloc}")
    try:
        async with asyncio.timeout(_TIMEOUT_S), client.call("POST", path, headers, body) as response:
            if not 200 <= response.status < 300:
                raise OSError(f"HTTP Error {response.status}")
    finally:
        client.close()


class Webhook:
    """Posts the newest offered number. Numbers in between are dropped."""

    def __init__(self, url: str, secret: bytes, *, every_s: float = EVERY_S, send: Post = post) -> None:
        self._url = url
        self._secret = secret
        self._every_s = every_s
        self._send = send
        self._offered: Wanted | None = None
        self._told: Wanted | None = None
        self._news = asyncio.Event()

    def offer(self, wanted: Wanted | None) -> None:
        """Set the number to post; None: it is unknown, or another planner leads and posts."""
        self._offered = wanted
        if wanted is None:
            self._told = None
        elif wanted.differs(self._told):
            self._news.set()

    async def run(self) -> None:
        """Run until cancelled."""
        back_off_s = _BACK_OFF_S
        while True:
            await self._news.wait()
            self._news.clear()
            wanted = self._offered
            if wanted is None or not wanted.differs(self._told):
                continue
            try:
                body = wanted.body()
                await self._send(self._url, body, sign(self._secret, body, time.time()))
            except (OSError, ValueError, BallastError) as error:
                self._told = None  # the receiver may have processed the message nevertheless
                if back_off_s == _BACK_OFF_S:
                    get_logger().warning("webhook not called", url=self._url, wanted=wanted.wanted, why=str(error))
                self._news.set()
                await asyncio.sleep(back_off_s)
                back_off_s = min(2 * back_off_s, _LONGEST_BACK_OFF_S)
            else:
                self._told = wanted if self._offered is not None else None
                back_off_s = _BACK_OFF_S
                get_logger().info("webhook told", url=self._url, wanted=wanted.wanted, why=wanted.reason)
                await asyncio.sleep(self._every_s)
