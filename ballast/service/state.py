"""The state server (Redis or Valkey): connecting, waiting for it, leases with fencing tokens.

While the server does not answer, callers get `Unavailable` and continue with what they know; the connection is restored
automatically. Key names, TTLs and scripts of one service are in its `store.py`, those shared by several in this module.
"""

import asyncio
import contextlib
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar, cast

import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ResponseError

from ballast.common.errors import ConfigError, Unavailable
from ballast.common.ids import Incarnation
from ballast.service.logs import get_logger
from ballast.service.redact import redact
from ballast.service.security import ServiceSettings, read_file

KEY_PREFIX = "ballast:"
_OPERATION_TIMEOUT_S = 2.0
_MAX_CONNECTIONS = 32
_WAIT_STEP_S = 0.5

T = TypeVar("T")

# grow(last): the next value of a counter that must never decrease: at least the server's clock in ms, because a server
# that restarted empty would otherwise issue numbers again (I5).
_GROW = """
local function grow(last)
  local now, number = redis.call('TIME'), tonumber(last) or 0
  if not (number >= 0 and number < 2 ^ 52) then number = 0 end
  return math.max(number + 1, now[1] * 1000 + math.floor(now[2] / 1000))
end
"""

# heal(key, kind): delete a key of the wrong type, which would otherwise prevent elections until an operator deletes it.
HEAL = """
local function heal(key, kind)
  local found = redis.call('TYPE', key).ok
  if found ~= kind and found ~= 'none' then redis.call('DEL', key) end
end
"""

# Take or renew a lease. KEYS: lease, token counter, address, candidates. ARGV: holder, TTL in ms, address, lower bound
# of the token. Returns the fencing token, or 0 if another process holds the lease. A lease without TTL is deleted.
_ACQUIRE = (
    _GROW
    + HEAL
    + """
heal(KEYS[1], 'hash')
heal(KEYS[2], 'string')
heal(KEYS[4], 'zset')
local now = redis.call('TIME')
redis.call('ZREMRANGEBYSCORE', KEYS[4], '-inf', now[1])
redis.call('ZADD', KEYS[4], now[1] + 60, ARGV[3])
redis.call('EXPIRE', KEYS[4], 60)
if redis.call('PTTL', KEYS[1]) == -1 then redis.call('DEL', KEYS[1]) end
local holder = redis.call('HGET', KEYS[1], 'holder')
if holder and holder ~= ARGV[1] then return 0 end
local token = redis.call('HGET', KEYS[1], 'token')
if not holder or (tonumber(token) or 0) <= tonumber(ARGV[4]) then
  token = string.format('%.0f', math.max(grow(redis.call('GET', KEYS[2])), tonumber(ARGV[4]) + 1))
  redis.call('SET', KEYS[2], token)
  redis.call('HSET', KEYS[1], 'holder', ARGV[1], 'token', token)
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('SET', KEYS[3], ARGV[3], 'PX', ARGV[2])
return tonumber(token)
"""
)

# Delete a lease if ARGV's holder has it. KEYS: lease, address. ARGV: holder.
_RELEASE = """
if redis.call('HGET', KEYS[1], 'holder') == ARGV[1] then return redis.call('DEL', KEYS[1], KEYS[2]) end
return 0
"""

# The next incarnation of a process. KEYS: incarnations of a kind. ARGV: name.
_INCARNATION = (
    _GROW
    + HEAL
    + """
heal(KEYS[1], 'hash')
local next = string.format('%.0f', grow(redis.call('HGET', KEYS[1], ARGV[1])))
redis.call('HSET', KEYS[1], ARGV[1], next)
return tonumber(next)
"""
)


def is_garbage(reply: object) -> bool:
    """Whether a pipelined command failed because its key has the wrong type."""
    return isinstance(reply, ResponseError) and str(reply).startswith("WRONGTYPE")


def unless_garbage(reply: Any, otherwise: Any) -> Any:
    """The reply of a pipelined command; `otherwise` if its key has the wrong type. Any: replies have any type.

    Raises:
        Unavailable: the server refused the command for another reason.
    """
    if is_garbage(reply):
        return otherwise
    if isinstance(reply, Exception):
        raise Unavailable("state server", redact(str(reply)))
    return reply


def lease_key(name: str) -> str:
    """Key of a lease, a hash {holder, token}. Scripts that write for a leader compare its token."""
    return f"{KEY_PREFIX}lease:{name}"


def address_key(name: str) -> str:
    """Key of the address (host:port) of a lease's holder; it expires with the lease."""
    return f"{KEY_PREFIX}{name}:address"


def candidates_key(name: str) -> str:
    """Key of a sorted set with the addresses (host:port) of a lease's candidates, until a minute after their end."""
    return f"{KEY_PREFIX}{name}:candidates"


def _cancel_count() -> int:
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


def _unless_cancelled(cancelled_before: int) -> None:
    """Raise CancelledError if this task was cancelled during an operation. redis-py sends within asyncio.wait_for,
    which before Python 3.12 swallows a cancellation that arrives just as sending completes.
    """
    if _cancel_count() > cancelled_before:
        raise asyncio.CancelledError


class StateServer:
    """A pool of connections to the state server. Each operation ends within four seconds, with a result or with
    `Unavailable`.
    """

    def __init__(
        self, url: str, *, user: str | None = None, password: str | None = None, ca_file: Path | None = None
    ) -> None:
        """Create the pool, which connects when needed. The URL's user and password take precedence over the arguments.

        Args:
            user: The server's ACL user.
            ca_file: CA of the server, for rediss://.

        Raises:
            ConfigError: the URL is invalid.
        """
        access: dict[str, Any] = {"username": user, "password": password}  # Any: passed on to redis-py
        if ca_file is not None:
            access["ssl_ca_certs"] = str(ca_file)
        try:
            # With a blocking pool, operations beyond the number of connections wait instead of failing. Any: redis-py
            # types the arguments only in part.
            pool = cast(Any, aioredis.BlockingConnectionPool).from_url(
                url,
                max_connections=_MAX_CONNECTIONS,
                timeout=_OPERATION_TIMEOUT_S,
                decode_responses=True,
                socket_timeout=_OPERATION_TIMEOUT_S,
                socket_connect_timeout=_OPERATION_TIMEOUT_S,
                health_check_interval=15,
                retry=Retry(NoBackoff(), 1),
                # uvloop raises RuntimeError for a write to a connection that was just reset.
                retry_on_error=[RuntimeError],
                **{name: value for name, value in access.items() if value is not None},
            )
        except ValueError as error:
            # The library's message is not used, because it may quote a part of the password.
            why = f"must be redis://, rediss:// or unix:// with a host or path (got {redact(url)!r})"
            raise ConfigError("redis_url", why) from error
        self._redis = aioredis.Redis.from_pool(pool)
        self.url = redact(url)  # without its password
        self.reachable = False  # whether the last operation was answered
        self._acquire = self._redis.register_script(_ACQUIRE)
        self._release = self._redis.register_script(_RELEASE)
        self._incarnation = self._redis.register_script(_INCARNATION)

    @property
    def redis(self) -> aioredis.Redis:
        """The Redis client, for stores. Its commands are awaited through `run`."""
        return self._redis

    async def run(self, operation: Awaitable[T]) -> T:
        """Await one Redis command.

        Raises:
            Unavailable: the command failed, or was not answered in time.
        """
        cancelled_before = _cancel_count()
        try:
            async with asyncio.timeout(2 * _OPERATION_TIMEOUT_S):
                result = await operation
        except Exception as error:  # the library passes on errors of its sockets, parser and decoder
            self.reachable = False
            _unless_cancelled(cancelled_before)
            why = redact(f"{self.url}: {error or type(error).__name__}")
            raise Unavailable("state server", why) from error
        self.reachable = True
        _unless_cancelled(cancelled_before)
        return result

    async def take_incarnation(self, kind: str, name: str) -> Incarnation:
        """Call `next_incarnation` until the server answers; log every five seconds that it does not."""
        log, waited_s = get_logger(), 0.0
        while True:
            try:
                incarnation = await self.next_incarnation(kind, name)
            except Unavailable as error:
                if waited_s % 5.0 == 0.0:
                    log.warning("waiting for the state server", url=self.url, waited_s=waited_s, why=error.why)
                await asyncio.sleep(_WAIT_STEP_S)
                waited_s += _WAIT_STEP_S
            else:
                if waited_s:
                    log.info("state server is there", url=self.url, waited_s=waited_s)
                return incarnation

    async def next_incarnation(self, kind: str, name: str) -> Incarnation:
        """A number that grows with every start of the process called `name`, even over restarts of the state server."""
        key = f"{KEY_PREFIX}incarnations:{kind}"
        # Any: results of scripts have no type.
        return Incarnation(int(await self.run(cast(Awaitable[Any], self._incarnation(keys=[key], args=[name])))))

    async def acquire_lease(self, name: str, holder: str, ttl_s: float, address: str, above: int = 0) -> int | None:
        """Take or renew a lease and publish the holder's address.

        Returns:
            The fencing token, which grows with every change of holder and is greater than `above`; None if another
            process holds the lease.
        """
        keys = [lease_key(name), f"{lease_key(name)}:token", address_key(name), candidates_key(name)]
        args = [holder, int(ttl_s * 1000), address, above]
        token = await self.run(cast(Awaitable[Any], self._acquire(keys=keys, args=args)))
        return int(token) or None

    async def release_lease(self, name: str, holder: str) -> None:
        keys = [lease_key(name), address_key(name)]
        await self.run(cast(Awaitable[Any], self._release(keys=keys, args=[holder])))

    async def leader_address(self, name: str) -> str | None:
        """Address (host:port) of a lease's holder; None if there is no holder."""
        return await self.run(cast(Awaitable[str | None], self._redis.get(address_key(name))))

    async def close(self) -> None:
        with contextlib.suppress(Unavailable):
            await self.run(self._redis.aclose())


def state_server(settings: ServiceSettings) -> StateServer:
    """The client for the state server that the settings name.

    Raises:
        ConfigError: a setting or file cannot be used.
    """
    if settings.redis_ca_file is not None and not settings.redis_url.startswith("rediss:"):
        raise ConfigError(f"{settings.service}.redis_ca_file", "is for TLS, so redis_url must begin with rediss://")
    file = settings.redis_password_file
    return StateServer(
        settings.redis_url,
        user=settings.redis_user,
        password=None if file is None else read_file(file).decode(errors="replace"),
        ca_file=settings.redis_ca_file,
    )
