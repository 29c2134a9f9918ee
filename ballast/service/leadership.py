"""Leader election by a lease in the state server, renewed while its holder is alive.

While the state server is unreachable there are no elections, and the leader continues; its writes carry its fencing
token and are refused once another process has taken over (I5).
"""

import asyncio
import contextlib
from collections.abc import Callable

from ballast.common.addresses import checked_address
from ballast.common.errors import InvalidRequest, Unavailable
from ballast.service.logs import get_logger
from ballast.service.state import StateServer

_CONFIRMED_SKIPS = 4  # maximum lookups skipped in a row; the next one detects a second leader


class Floor:
    """Lower bound of lease tokens. A state server that restarts empty and with an earlier clock would otherwise issue
    lower tokens than before, and all services would refuse a leader with such a token.
    """

    def __init__(self) -> None:
        self.token = 0

    def fenced(self, seen: int) -> None:
        """Record a token seen elsewhere. If this process holds the lease, the lease is renewed with a higher token."""
        self.token = max(self.token, seen)


class Leadership:
    """Competes for the lease `name` while `run` runs, and reports the first outcome and every change of the token to
    `on_change`.

    `holder` must be unique to this lifetime of the process, because otherwise a restarted process would get the lease,
    and the fencing token, of its dead predecessor.
    """

    def __init__(
        self,
        state: StateServer,
        *,
        name: str,
        holder: str,
        address: str,
        ttl_s: float,
        on_change: Callable[[int | None], None],
        floor: Floor | None = None,
    ) -> None:
        self._state = state
        self._name = name
        self._holder = holder
        self._address = address
        self._ttl_s = ttl_s
        self._on_change = on_change
        self._floor = floor or Floor()
        self._renewable = True
        self.token: int | None = None  # None: standby
        self.decided = asyncio.Event()  # set once the state server has first answered whether this is the leader

    async def run(self) -> None:
        while True:
            await self._renew()
            await asyncio.sleep(self._ttl_s / 3)

    async def _renew(self) -> None:
        log = get_logger()
        try:
            token = await self._state.acquire_lease(
                self._name, self._holder, self._ttl_s, self._address, above=self._floor.token
            )
        except Unavailable as error:
            if self._renewable:
                log.warning("lease cannot be renewed", lease=self._name, leading=self.token is not None, why=error.why)
            self._renewable = False
            return
        self._renewable = True
        if token != self.token or not self.decided.is_set():
            log.info("leadership changed", lease=self._name, leading=token is not None, token=token)
            self.token = token
            self._on_change(token)
        self.decided.set()

    async def resign(self) -> None:
        """Release the lease, so that a standby need not wait for its expiry. To be called after `run` has ended."""
        if self.token is None:
            return
        self.token = None
        try:
            await self._state.release_lease(self._name, self._holder)
        except Unavailable as error:
            get_logger().warning("lease not released, it runs out", lease=self._name, why=error.why)


class LeaderAddress:
    """The address of a lease's holder, updated while `follow` runs.

    The last address remains valid while the state server is unreachable or there is no holder. A fixed address is never
    looked up.
    """

    def __init__(self, state: StateServer, name: str, fixed: str | None, interval_s: float = 0.5) -> None:
        self._state = state
        self._name = name
        self._is_fixed = fixed is not None
        self._interval_s = interval_s
        self._answers = False
        self.current = fixed  # host:port; None before the first holder is found

    def confirm(self) -> None:
        """Record that the current address has just responded as the leader, so that lookups can be less frequent."""
        self._answers = True

    async def follow(self) -> None:
        unasked = 0
        while not self._is_fixed:
            if self._answers and unasked < _CONFIRMED_SKIPS:
                unasked += 1
            else:
                unasked = 0
                with contextlib.suppress(Unavailable, InvalidRequest):  # ignore a corrupted entry
                    address = await self._state.leader_address(self._name)
                    self.current = checked_address(address) if address else self.current
            self._answers = False
            await asyncio.sleep(self._interval_s)
