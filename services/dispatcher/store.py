"""What dispatchers share through the state server. Serving goes on without it, with the last known layout.

Keys, all under `ballast:`
  layout                    read here, written by the planner (services.planner.store)
  layout:changed            channel; a hint to read the layout now
  dispatchers:<id>          hash {address, incarnation}, expires unless renewed: who is there
  backlogs                  hash dispatcher id -> "<serial> <requests> <tokens>"; the monitor counts it as demand for as
                            long as the serial goes on changing (services.monitor.store)
  request:<request id>      "<dispatcher id>/<incarnation>/<serial>", expires: who serves a request whose id the client
                            chose, and for which of its requests that was claimed
"""

import asyncio
import base64
import binascii
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, cast

from google.protobuf.message import DecodeError

from ballast.common.errors import AlreadyExists, BallastError, Unavailable
from ballast.common.ids import RequestId
from ballast.common.layout import Layout
from ballast.rpc.codec import LAYOUT
from ballast.service.logs import get_logger
from ballast.service.state import KEY_PREFIX, StateServer
from ballastpb.cluster.v1 import cluster_pb2
from services.dispatcher.shell.links import Identity

_LAYOUT = f"{KEY_PREFIX}layout"
_LAYOUT_CHANGED = f"{KEY_PREFIX}layout:changed"
_DISPATCHERS = f"{KEY_PREFIX}dispatchers:"
_BACKLOGS = f"{KEY_PREFIX}backlogs"
_REQUEST = f"{KEY_PREFIX}request:"
_REGISTRATION_TTL_S = 10
_REGISTRATION_INTERVAL_S = 3.0
_BACKLOG_INTERVAL_S = 0.2
_CLAIM_TIMEOUT_S = 0.5  # a first token waits no longer for a state server that does not answer
_RELEASE_BATCH = 256
_MAX_RELEASES = 1 << 16  # beyond that the claims expire by themselves

# KEYS: claim, registration prefix. ARGV: owner, TTL in s, serial. Gives 1 if the claim is ours now: it was free, an
# earlier one of our own (the request has ended), or whoever holds it is not there any more in the life that took it.
_CLAIM = """
local holder = string.match(redis.call('GET', KEYS[1]) or '', '^(.*)/%d+$')
if holder and holder ~= ARGV[1] then
  local id, life = string.match(holder, '^(.*)/(%d+)$')
  if id and redis.call('HGET', KEYS[2] .. id, 'incarnation') == life then return 0 end
end
redis.call('SET', KEYS[1], ARGV[1] .. '/' .. ARGV[3], 'EX', ARGV[2])
return 1
"""

# KEYS: claims. ARGV: what each of them must hold to be deleted.
_RELEASE = """
for i, key in ipairs(KEYS) do
  if redis.call('GET', key) == ARGV[i] then redis.call('DEL', key) end
end
"""


class DispatcherStore:
    """One for each process. Its loops run until cancelled and outlive every loss of the state server."""

    def __init__(self, state: StateServer, identity: Identity) -> None:
        self._state = state
        self._identity = identity
        self._owner = f"{identity.dispatcher_id}/{identity.incarnation}"
        self._claim = state.redis.register_script(_CLAIM)
        self._release = state.redis.register_script(_RELEASE)
        self._released: deque[tuple[RequestId, int]] = deque(maxlen=_MAX_RELEASES)
        self._releasing = asyncio.Event()
        self._hint = asyncio.Event()  # the layout may have changed

    @property
    def reachable(self) -> bool:
        return self._state.reachable

    # --------------------------------------------------------------------------------------------- layout

    async def watch_layout(self, poll_s: float, on_layout: Callable[[Layout], None]) -> None:
        """Calls back with every layout that differs from the one before."""
        known: str | None = None
        while True:
            self._hint.clear()
            try:
                body = await self._read_layout()
            except Unavailable:
                body = None
            if body is not None and body != known:
                known = body
                layout = _decode(body)
                if layout is not None:
                    get_logger().info("layout", epoch=layout.epoch, groups=len(layout.groups), reason=layout.reason)
                    on_layout(layout)
            try:
                async with asyncio.timeout(poll_s):
                    await self._hint.wait()
            except TimeoutError:
                pass

    async def listen(self) -> None:
        """Turns the planner's announcements into hints; without them the layout is polled."""
        while True:
            pubsub = self._state.redis.pubsub()  # pyright: ignore[reportUnknownMemberType]
            try:
                await self._state.run(cast(Awaitable[object], pubsub.subscribe(_LAYOUT_CHANGED)))  # pyright: ignore[reportUnknownMemberType]
                while True:
                    if await self._state.run(cast(Awaitable[object], pubsub.get_message(timeout=1.0))) is not None:
                        self._hint.set()
            except Unavailable:
                await asyncio.sleep(1.0)
            finally:
                await pubsub.aclose()  # pyright: ignore[reportUnknownMemberType]

    async def _read_layout(self) -> str | None:
        return await self._state.run(cast(Awaitable[str | None], self._state.redis.get(_LAYOUT)))

    # --------------------------------------------------------------------------------------------- registration

    async def register(self, address: str) -> None:
        """Says for ever that this dispatcher is there."""
        while True:
            try:
                await self._say_here(address)
            except Unavailable as error:
                get_logger().warning("not registered", why=error.why)
            await asyncio.sleep(_REGISTRATION_INTERVAL_S)

    async def _say_here(self, address: str) -> None:
        key = f"{_DISPATCHERS}{self._identity.dispatcher_id}"
        pipe = self._state.redis.pipeline(transaction=True)
        pipe.hset(key, mapping={"address": address, "incarnation": self._identity.incarnation})
        pipe.expire(key, _REGISTRATION_TTL_S)
        await self._state.run(cast(Awaitable[Any], pipe.execute()))  # Any: a list of replies

    async def unregister(self) -> None:
        try:
            await self._state.run(self._state.redis.delete(f"{_DISPATCHERS}{self._identity.dispatcher_id}"))
        except Unavailable:
            get_logger().warning("registration is left to expire")

    async def share_backlog(self, backlog: Callable[[], tuple[int, int]]) -> None:
        """Says for ever how many requests wait here and how many tokens they have; nothing when there are none."""
        told, serial = False, 0
        while True:
            request_count, token_count = backlog()
            serial += 1
            word = f"{self._identity.incarnation}.{serial} {request_count} {token_count}"
            try:
                if request_count:
                    await self._state.run(self._state.redis.hset(_BACKLOGS, self._identity.dispatcher_id, word))
                    told = True
                elif told:
                    await self._state.run(self._state.redis.hdel(_BACKLOGS, self._identity.dispatcher_id))
                    told = False
            except Unavailable:
                pass  # the monitor stops counting it by itself
            await asyncio.sleep(_BACKLOG_INTERVAL_S)

    # --------------------------------------------------------------------------------------------- request ids

    async def claim(self, request_id: RequestId, serial: int, ttl_s: float) -> None:
        """Makes sure that no other dispatcher serves this id. Without a state server nobody can know: served anyway.

        Raises:
            AlreadyExists: another dispatcher does.
        """
        if not self._state.reachable:
            return
        keys, args = [f"{_REQUEST}{request_id}", _DISPATCHERS], [self._owner, int(ttl_s) + 1, serial]
        try:
            async with asyncio.timeout(_CLAIM_TIMEOUT_S):
                # Any: a script's result has no type.
                ours = await self._state.run(cast(Awaitable[Any], self._claim(keys=keys, args=args)))
        except (Unavailable, TimeoutError):
            return
        if not ours:
            raise AlreadyExists(f"request {request_id} is being served by another dispatcher")

    def release(self, request_id: RequestId, serial: int) -> None:
        """Gives up the claim of that serial; a younger one on the same id stays."""
        self._released.append((request_id, serial))
        self._releasing.set()

    async def run_releases(self) -> None:
        while True:
            await self._releasing.wait()
            self._releasing.clear()
            while self._released:
                batch = [self._released.popleft() for _ in range(min(_RELEASE_BATCH, len(self._released)))]
                keys = [f"{_REQUEST}{request_id}" for request_id, _ in batch]
                held = [f"{self._owner}/{serial}" for _, serial in batch]
                try:
                    await self._state.run(cast(Awaitable[Any], self._release(keys=keys, args=held)))
                except Unavailable:
                    get_logger().warning("claims are left to expire", count=len(batch))


def _decode(body: str) -> Layout | None:
    """None for what is no layout of ours; the one before stays in force."""
    try:
        layout = LAYOUT.record(cluster_pb2.Layout.FromString(base64.b64decode(body, validate=True)))
        layout.check()
    except (binascii.Error, ValueError, DecodeError, BallastError) as error:
        get_logger().error("layout in the state server cannot be used", why=str(error))
        return None
    return layout
