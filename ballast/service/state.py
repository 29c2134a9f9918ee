"""The state server (Redis or Valkey): connecting, waiting for it, leases with fencing tokens.

Redis may restart or vanish. Whoever calls gets `Unavailable` and goes on with what it knows; the connection comes
back by itself. Key names, TTLs and scripts of a service live in its `store.py`; only what two services need is here.
"""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar, cast

import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from ballast.common.errors import ConfigError, Unavailable
from ballast.common.ids import Incarnation
from ballast.service.logs import get_logger

KEY_PREFIX = "ballast:"
_OPERATION_TIMEOUT_S = 2.0
_WAIT_STEP_S = 0.5

T = TypeVar("T")

# KEYS: lease, token counter. ARGV: holder, TTL in ms. Gives the fencing token, or 0 if somebody else holds it.
_ACQUIRE = """
local holder = redis.call('HGET', KEYS[1], 'holder')
if holder and holder ~= ARGV[1] then return 0 end
local token = redis.call('HGET', KEYS[1], 'token')
if not holder then
  token = redis.call('INCR', KEYS[2])
  redis.call('HSET', KEYS[1], 'holder', ARGV[1], 'token', token)
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return tonumber(token)
"""

_RELEASE = """
if redis.call('HGET', KEYS[1], 'holder') == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""


class StateServer:
    """One connection pool. Every operation ends within two seconds, with a result or `Unavailable`."""

    def __init__(self, url: str) -> None:
        try:
            self._redis = aioredis.from_url(
                url,
                decode_responses=True,
                socket_timeout=_OPERATION_TIMEOUT_S,
                socket_connect_timeout=_OPERATION_TIMEOUT_S,
                health_check_interval=15,
                retry=Retry(NoBackoff(), 1),
                max_connections=32,
            )
        except ValueError as error:
            raise ConfigError("redis_url", f"{error} (got {url!r})") from error
        self.url = url
        self.reachable = False  # whether the last operation got an answer
        self._acquire = self._redis.register_script(_ACQUIRE)
        self._release = self._redis.register_script(_RELEASE)

    @property
    def redis(self) -> aioredis.Redis:
        """For stores. Await its commands through `run`."""
        return self._redis

    async def run(self, operation: Awaitable[T]) -> T:
        """Awaits one Redis command.

        Raises:
            Unavailable: no answer in time.
        """
        try:
            async with asyncio.timeout(2 * _OPERATION_TIMEOUT_S):
                result = await operation
        except (RedisError, OSError, TimeoutError) as error:
            self.reachable = False
            raise Unavailable("state server", f"{self.url}: {error or type(error).__name__}") from error
        self.reachable = True
        return result

    async def wait_ready(self) -> None:
        """Returns once the server answers; says every few seconds that it is being waited for."""
        log, waited_s = get_logger(), 0.0
        while True:
            try:
                await self.run(self._redis.ping())  # pyright: ignore[reportUnknownMemberType]
            except Unavailable as error:
                if waited_s % 5.0 == 0.0:
                    log.warning("waiting for the state server", url=self.url, waited_s=waited_s, why=error.why)
                await asyncio.sleep(_WAIT_STEP_S)
                waited_s += _WAIT_STEP_S
            else:
                if waited_s:
                    log.info("state server is there", url=self.url, waited_s=waited_s)
                return

    async def next_incarnation(self, kind: str, name: str) -> Incarnation:
        """A number that grows with every start of the process called `name`."""
        return Incarnation(await self.run(self._redis.hincrby(f"{KEY_PREFIX}incarnations:{kind}", name, 1)))

    async def acquire_lease(self, name: str, holder: str, ttl_s: float) -> int | None:
        """Takes or renews a lease: its fencing token (grows with every change of holder), or None if it is held."""
        keys = [f"{KEY_PREFIX}lease:{name}", f"{KEY_PREFIX}lease:{name}:token"]
        # Any: a script's result has no type.
        token = await self.run(cast(Awaitable[Any], self._acquire(keys=keys, args=[holder, int(ttl_s * 1000)])))
        return int(token) or None

    async def release_lease(self, name: str, holder: str) -> None:
        await self.run(cast(Awaitable[Any], self._release(keys=[f"{KEY_PREFIX}lease:{name}"], args=[holder])))

    async def close(self) -> None:
        await self._redis.aclose()
