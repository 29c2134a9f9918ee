"""The state that dispatchers share through the state server. Without it they serve with the last known layout.

Keys, all under `ballast:`
  layout                    read here, written by the planner (services.planner.store)
  reach                     read here, written by the planner: the longest context that the cluster could hold
  layout:changed            channel; a hint to read the layout now
  dispatchers:<id>          hash {address, incarnation}: a running dispatcher's registration; expires unless renewed
  dispatchers:lately:<id>/<incarnation>
                            expires 45 s after the registration; until then claims of that incarnation which have a
                            secret can be taken over only with that secret
  dispatchers:taken:<id>/<incarnation>
                            channel; "<serial> <request id>": another dispatcher has taken over this claim
  backlogs                  hash dispatcher id -> "<serial> <waiting requests and recent traffic>"
                            (ballast.common.traffic); the monitor ignores an entry whose serial has stopped changing
                            (services.monitor.store)
  request:<request id>      "<attempt> <hash of the secret, or -> <dispatcher id>/<incarnation>/<serial>", expires: the
                            claim of the dispatcher that serves a request whose id the client chose; a client with the
                            secret may resume it elsewhere. At most 350 bytes, one for each such request. After a
                            cancel: "cancelled <hash of the secret>", and no dispatcher resumes it
"""

import asyncio
import base64
import binascii
import contextlib
import re
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from google.protobuf.message import DecodeError

from ballast.common.errors import AlreadyExists, BallastError, Cancelled, Unavailable
from ballast.common.ids import RequestId
from ballast.common.layout import Layout
from ballast.common.reach import Reach, read_reach
from ballast.common.traffic import Traffic, write_traffic
from ballast.rpc.codec import LAYOUT
from ballast.service.logs import get_logger
from ballast.service.state import KEY_PREFIX, StateServer
from ballastpb.cluster.v1 import cluster_pb2
from services.dispatcher.shell.links import Identity
from services.dispatcher.shell.ports import Claim

T = TypeVar("T")

_LAYOUT = f"{KEY_PREFIX}layout"
_LAYOUT_CHANGED = f"{KEY_PREFIX}layout:changed"
_REACH = f"{KEY_PREFIX}reach"
_DISPATCHERS = f"{KEY_PREFIX}dispatchers:"
_LATELY = f"{_DISPATCHERS}lately:"
_TAKEN = f"{_DISPATCHERS}taken:"
_BACKLOGS = f"{KEY_PREFIX}backlogs"
_REQUEST = f"{KEY_PREFIX}request:"
_REGISTRATION_TTL_S = 10
_REGISTRATION_INTERVAL_S = 3.0
_RESUMABLE_S = 45  # time by which `dispatchers:lately:` keys outlive a registration
BACKLOG_INTERVAL_S = 0.05  # short, because no other process can see a burst that waits here
_CLAIM_TIMEOUT_S = 0.5  # maximum delay of a first token by an unresponsive state server
_CLAIM_PAUSE_S = 0.01  # pause between two round trips with claims; shorter than a time to first token
_BATCH = 256
_SERIAL = re.compile("[0-9]{1,19}")
_MAX_RELEASES = 1 << 16  # maximum queued releases; further claims expire

# Claims request ids. KEYS: prefixes of registrations, of `dispatchers:lately:` keys and of channels, then the claims.
# ARGV: owner, then for each claim: TTL in s, serial, attempt, hash of the secret or '-', request id. Returns a number
# for each: 0 if another dispatcher serves the request, or a later attempt was claimed; 3 if the client has cancelled
# the request. Otherwise the claim is set: 1 if it was free, held by the same owner (repeated call, ended request or
# earlier attempt), or by a dispatcher whose incarnation has ended; 2 if another dispatcher held it for an earlier
# attempt of the same client, which is notified. A key of a wrong type counts as missing.
_CLAIM = """
local owner = ARGV[1]
local function claim(key, ttl, serial, attempt, secret, request_id)
  local held = redis.pcall('GET', key)
  if type(held) ~= 'string' then held = '' end
  if secret ~= '-' and held == 'cancelled ' .. secret then return 3 end
  local ours = attempt .. ' ' .. secret .. ' ' .. owner .. '/' .. serial
  if held == ours then return 1 end
  local before, theirs, holder, number = string.match(held, '^(%d+) (%S+) (.*)/(%d+)$')
  local given = 1
  if holder then
    local same = theirs ~= '-' and theirs == secret
    if same and tonumber(attempt) <= tonumber(before) then return 0 end
    if holder ~= owner then
      local id, life = string.match(holder, '^(.*)/(%d+)$')
      if same then
        redis.call('PUBLISH', KEYS[3] .. holder, number .. ' ' .. request_id)
        given = 2
      elseif id and redis.pcall('HGET', KEYS[1] .. id, 'incarnation') == life then
        return 0
      elseif theirs ~= '-' and redis.call('EXISTS', KEYS[2] .. holder) == 1 then
        return 0
      end
    end
  end
  redis.call('SET', key, ours, 'EX', ttl)
  return given
end
local given = {}
for i = 1, #KEYS - 3 do
  given[i] = claim(KEYS[i + 3], unpack(ARGV, 5 * i - 3, 5 * i + 1))
end
return given
"""

_TAKEN_OVER, _CANCELLED = 2, 3

# Cancels a request. KEYS: claim. ARGV: its content if this dispatcher owns it, hash of the secret, TTL in s. Also marks
# a free claim, in case a call to `_CLAIM` is still under way.
_CANCEL = """
local held = redis.pcall('GET', KEYS[1])
if type(held) ~= 'string' or held == ARGV[1] then redis.call('SET', KEYS[1], 'cancelled ' .. ARGV[2], 'EX', ARGV[3]) end
"""

# Deletes claims. KEYS: claims. ARGV: the content that each claim must have to be deleted.
_RELEASE = """
for i, key in ipairs(KEYS) do
  if redis.pcall('GET', key) == ARGV[i] then redis.call('DEL', key) end
end
"""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A claim to be sent. `given`: number that the script returned; None if there was no answer."""

    claim: Claim
    ttl_s: float
    given: asyncio.Future[int | None]


class DispatcherStore:
    """This dispatcher's keys in the state server. Its loops run until cancelled and survive a loss of the state
    server.
    """

    def __init__(self, state: StateServer, identity: Identity) -> None:
        self._state = state
        self._identity = identity
        self._owner = f"{identity.dispatcher_id}/{identity.incarnation}"
        self._claim = state.redis.register_script(_CLAIM)
        self._release = state.redis.register_script(_RELEASE)
        self._cancel = state.redis.register_script(_CANCEL)
        self._asked: deque[_Asked] = deque()
        self._asking = asyncio.Event()
        self._released: deque[Claim] = deque(maxlen=_MAX_RELEASES)
        self._releasing = asyncio.Event()
        self._hint = asyncio.Event()  # set when the layout may have changed

    @property
    def reachable(self) -> bool:
        return self._state.reachable

    # --------------------------------------------------------------------------------------------- layout

    async def watch_layout(
        self, poll_s: float, on_layout: Callable[[Layout], None], on_reach: Callable[[Reach], None]
    ) -> None:
        """Call `on_layout` and `on_reach` with each changed layout and reach. Missing or invalid ones are ignored:
        the planner stores them again.
        """
        known: str | None = None
        known_reach: str | None = None
        while True:
            self._hint.clear()
            try:
                body, reach = await self._read_layout()
            except Unavailable:
                body, reach = None, known_reach
            if body is not None and body != known:
                known = body
                layout = _decode(body)
                if layout is not None:
                    get_logger().info("layout", epoch=layout.epoch, groups=len(layout.groups), reason=layout.reason)
                    on_layout(layout)
            if reach is not None and reach != known_reach:
                known_reach, decoded = reach, _decode_reach(reach)
                if decoded is not None:
                    on_reach(decoded)
            try:
                async with asyncio.timeout(poll_s):
                    await self._hint.wait()
            except TimeoutError:
                pass

    async def listen(self, on_taken: Callable[[RequestId, int], None]) -> None:
        """Make `watch_layout` read at once when the planner announces a layout. Call `on_taken` with the id and the
        claim's serial of each request that a client has resumed elsewhere.
        """
        taken = f"{_TAKEN}{self._owner}"
        while True:
            pubsub = self._state.redis.pubsub()  # pyright: ignore[reportUnknownMemberType]
            try:
                await self._state.run(cast(Awaitable[object], pubsub.subscribe(_LAYOUT_CHANGED, taken)))  # pyright: ignore[reportUnknownMemberType]
                while True:
                    # Any: a mapping of strings, or None.
                    message = await self._state.run(cast(Awaitable[Any], pubsub.get_message(timeout=1.0)))
                    if message is None:
                        continue
                    serial, _, request_id = str(message["data"]).partition(" ")
                    if message["channel"] != taken:
                        self._hint.set()
                    elif request_id and _SERIAL.fullmatch(serial):  # ignores the subscription's acknowledgement
                        on_taken(RequestId(request_id), int(serial))
            except Unavailable:
                await asyncio.sleep(1.0)
            finally:
                with contextlib.suppress(Unavailable):
                    await self._state.run(cast(Awaitable[None], pubsub.aclose()))  # pyright: ignore[reportUnknownMemberType]

    async def _read_layout(self) -> tuple[str | None, str | None]:
        """Read the stored layout and reach without decoding them; None if missing."""
        layout, reach = await self._state.run(
            cast(Awaitable[list[str | None]], self._state.redis.mget(_LAYOUT, _REACH))  # pyright: ignore[reportUnknownMemberType]
        )
        return layout, reach

    # --------------------------------------------------------------------------------------------- registration

    async def register(self, address: str) -> None:
        """Renew this dispatcher's registration until cancelled."""
        while True:
            try:
                await self._announce_address(address)
            except Unavailable as error:
                get_logger().warning("not registered", why=error.why)
            await asyncio.sleep(_REGISTRATION_INTERVAL_S)

    async def _announce_address(self, address: str) -> None:
        key = f"{_DISPATCHERS}{self._identity.dispatcher_id}"
        pipe = self._state.redis.pipeline(transaction=True)
        pipe.hset(key, mapping={"address": address, "incarnation": self._identity.incarnation})
        pipe.expire(key, _REGISTRATION_TTL_S)
        pipe.set(f"{_LATELY}{self._owner}", 1, ex=_REGISTRATION_TTL_S + _RESUMABLE_S)
        await self._state.run(cast(Awaitable[Any], pipe.execute()))  # Any: a list of replies

    async def unregister(self) -> None:
        try:
            await self._state.run(self._state.redis.delete(f"{_DISPATCHERS}{self._identity.dispatcher_id}"))
        except Unavailable:
            get_logger().warning("registration is left to expire")

    async def share_traffic(self, traffic: Callable[[], Traffic | None]) -> None:
        """Publish waiting requests and recent traffic until cancelled. The entry is deleted while there are none.
        `traffic`: returns None if nothing has changed, so that the last entry stays.
        """
        told, serial = False, 0
        while True:
            now = traffic()
            if now is None:
                await asyncio.sleep(BACKLOG_INTERVAL_S)
                continue
            serial += 1
            word = f"{self._identity.incarnation}.{serial} {write_traffic(now)}"
            try:
                if not now.is_idle:
                    await self._state.run(self._state.redis.hset(_BACKLOGS, self._identity.dispatcher_id, word))
                    told = True
                elif told:
                    await self._state.run(self._state.redis.hdel(_BACKLOGS, self._identity.dispatcher_id))
                    told = False
            except Unavailable:
                pass  # the monitor's timeout removes it
            await asyncio.sleep(BACKLOG_INTERVAL_S)

    # --------------------------------------------------------------------------------------------- request ids

    async def claim(self, claim: Claim, ttl_s: float) -> bool:
        """Claim an id, so that no other dispatcher serves it. While the state server is unreachable, the request is
        served without this check.

        Returns:
            True if another dispatcher was serving an earlier attempt of the same request.

        Raises:
            AlreadyExists: another dispatcher serves the id, and this is not a later attempt of the same client.
            Cancelled: this client's request was cancelled by its id.
        """
        if not self._state.reachable:
            return False
        asked = _Asked(claim, ttl_s, asyncio.get_running_loop().create_future())
        self._asked.append(asked)
        self._asking.set()
        given = await self._soon(asked.given)
        if given is None:
            return False
        if given == _CANCELLED:
            raise Cancelled(f"request {claim.request_id} was cancelled by its id")
        if not given:
            raise AlreadyExists(f"request {claim.request_id} is being served by another dispatcher")
        return given == _TAKEN_OVER

    async def run_claims(self) -> None:
        """Send claims to the state server until cancelled. The first is sent at once, and later ones are batched every
        `_CLAIM_PAUSE_S`, because in a burst a round trip for each claim would cost as much as all other work for its
        request.
        """
        while True:
            await self._asking.wait()
            self._asking.clear()
            while self._asked:
                batch = [self._asked.popleft() for _ in range(min(_BATCH, len(self._asked)))]
                if batch := [asked for asked in batch if not asked.given.done()]:
                    await self._send(batch)
                    await asyncio.sleep(_CLAIM_PAUSE_S)

    async def _send(self, batch: Sequence["_Asked"]) -> None:
        keys = [_DISPATCHERS, _LATELY, _TAKEN, *(f"{_REQUEST}{asked.claim.request_id}" for asked in batch)]
        args: list[str | int] = [self._owner]
        for asked in batch:
            claim = asked.claim
            args += [int(asked.ttl_s) + 1, claim.serial, claim.attempt, claim.secret_hash or "-", claim.request_id]
        try:
            given: Sequence[int | None] = await self._state.run(
                cast(Awaitable[list[int]], self._claim(keys=keys, args=args))
            )
        except Unavailable:
            given = [None] * len(batch)
        for asked, one in zip(batch, given, strict=True):
            if not asked.given.done():
                asked.given.set_result(one)

    async def cancel(self, claim: Claim) -> None:
        """Make every dispatcher refuse to resume the request. Does nothing while the state server is unreachable."""
        if claim.secret_hash and self._state.reachable:
            args = [self._held(claim), claim.secret_hash, _REGISTRATION_TTL_S + _RESUMABLE_S]
            script = cast(Awaitable[Any], self._cancel(keys=[f"{_REQUEST}{claim.request_id}"], args=args))
            await self._soon(self._state.run(script))

    async def _soon(self, answer: Awaitable[T]) -> T | None:
        """Await the state server's answer; None if it does not arrive in time."""
        try:
            async with asyncio.timeout(_CLAIM_TIMEOUT_S):
                return await answer
        except (Unavailable, TimeoutError):
            return None

    def _held(self, claim: Claim) -> str:
        return f"{claim.attempt} {claim.secret_hash or '-'} {self._owner}/{claim.serial}"

    def release(self, claim: Claim) -> None:
        """Release the claim. A newer claim on the same id is not released."""
        self._released.append(claim)
        self._releasing.set()

    async def run_releases(self) -> None:
        while True:
            await self._releasing.wait()
            self._releasing.clear()
            while self._released:
                batch = [self._released.popleft() for _ in range(min(_BATCH, len(self._released)))]
                keys = [f"{_REQUEST}{claim.request_id}" for claim in batch]
                held = [self._held(claim) for claim in batch]
                try:
                    await self._state.run(cast(Awaitable[Any], self._release(keys=keys, args=held)))
                except Unavailable:
                    get_logger().warning("claims are left to expire", count=len(batch))


def _decode_reach(body: str) -> Reach | None:
    """Decode the stored reach; None if it is invalid, in which case the previous one remains current."""
    try:
        return read_reach(body)
    except ValueError as error:
        get_logger().warning("reach in the state server cannot be used", why=str(error))
        return None


def _decode(body: str) -> Layout | None:
    """Decode the stored layout; None if it is invalid, in which case the previous layout remains current."""
    try:
        layout = LAYOUT.record(cluster_pb2.Layout.FromString(base64.b64decode(body, validate=True)))
        layout.check()
    except (binascii.Error, ValueError, DecodeError, BallastError) as error:
        get_logger().error("layout in the state server cannot be used", why=str(error))
        return None
    return layout
