"""Lifecycle of a replica of the jobs service: the leader opens the folder and runs batches; a standby waits."""

import asyncio
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ballast.common.errors import BallastError
from ballast.service.http_client import HttpClient
from ballast.service.leadership import Floor, LeaderAddress
from ballast.service.logs import get_logger
from services.jobs.app import Desk
from services.jobs.gateways import Gateways
from services.jobs.runner import Rules, Runner
from services.jobs.store import Fenced, Store

_AGAIN_S: Final = 1.0

Dial = Callable[[str], HttpClient]


class WallClock:
    """Wall-clock time that never goes back. It starts with the time at construction (or `stored_s`, the time of the
    last stored change, if that is later) and is advanced by the monotonic clock.
    """

    def __init__(self, stored_s: float) -> None:
        self._offset_s = max(time.time(), stored_s) - time.monotonic()

    def now_s(self) -> float:
        return time.monotonic() + self._offset_s


class JobsShell:
    def __init__(self, desk: Desk, folder: Path, gateways: Gateways, rules: Rules, floor: Floor) -> None:
        self._desk = desk
        self._folder = folder
        self._gateways = gateways
        self._rules = rules
        self._floor = floor
        self._token: int | None = None
        self._changed = asyncio.Event()

    def change_leadership(self, token: int | None) -> None:
        """Adopt the lease's fencing token; None makes this replica a standby. Work for an earlier token is stopped."""
        self._token = token
        self._desk.runner = None
        self._changed.set()

    async def run(self) -> None:
        while True:
            self._changed.clear()
            token = self._token
            if token is None:
                await self._changed.wait()
                continue
            active = asyncio.create_task(self._lead(token), name="active")
            changed = asyncio.create_task(self._changed.wait(), name="leadership")
            try:
                await asyncio.wait({active, changed}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._desk.runner = None
                for task in (active, changed):
                    task.cancel()
                await asyncio.wait({active, changed})
            if not active.cancelled() and (error := active.exception()) is not None:
                if not isinstance(error, (BallastError, OSError, sqlite3.Error)):
                    raise error
                get_logger().error("jobs cannot be run", folder=str(self._folder), why=str(error))
                await asyncio.sleep(_AGAIN_S)

    async def _lead(self, token: int) -> None:
        try:
            store = await asyncio.to_thread(Store, self._folder, token)
        except Fenced:
            # The state server has lost its data and issued a lower token. `floor` makes the next one higher.
            self._floor.fenced(await asyncio.to_thread(Store.last_epoch, self._folder))
            raise
        try:
            runner = Runner(store, self._gateways, self._rules, WallClock(store.last_s).now_s)
            self._desk.runner = runner
            await runner.run()
        finally:
            self._desk.runner = None
            store.close()


class Leader:
    """Returns an HTTP client of the leading replica when called. `own`: the address of this replica."""

    def __init__(self, address: LeaderAddress, own: str, dial: Dial) -> None:
        self._address = address
        self._own = own
        self._dial = dial
        self._client: tuple[str, HttpClient] | None = None

    def __call__(self) -> HttpClient | None:
        """Return the client; None if there is no leader, or if the leader is this replica, which has not been notified
        yet.
        """
        current = self._address.current
        if current is None or current == self._own:
            return None
        if self._client is None or self._client[0] != current:
            if self._client is not None:
                self._client[1].close()
            self._client = current, self._dial(current)
        return self._client[1]
