"""The faults of `ballast chaos`, with the functions that end them.

No fault changes clocks, because services use monotonic ones, and the state server's clock only determines when keys
expire.
"""

import asyncio
import contextlib
import random
import resource
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import redis.asyncio
from redis.exceptions import RedisError

from tools.local.cluster import LocalCluster, Service, ServiceProcess
from tools.local.proxy import Proxy, Way
from tools.local.wedge import StoppedThread

BACK_WITHIN_S = 30.0
_PAUSES_S = (1.0, 2.0, 4.0, 6.0, 9.0, 14.0)
_OUTAGES_S = (1.0, 3.0, 8.0)
_DELAYS_S = (0.05, 0.2, 0.5)
_WEDGES_S = (2.0, 6.0, 14.0)
_STATE = "the state server"

Heal = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class ClusterFault:
    """A fault. `begin` starts it, and returns (description, duration in s, function that ends it), or None if it is not
    possible now.
    """

    name: str
    begin: Callable[[], "Awaitable[tuple[str, float, Heal] | None]"]


@dataclass(frozen=True, slots=True)
class Proxies:
    """Proxies in front of the state server (None: no proxy) and of workers, by worker id."""

    state: Proxy | None = None
    workers: Mapping[str, Proxy] = field(default_factory=dict[str, Proxy])


class Breaker:
    """Breaks parts of one cluster. `admin_url`: URL of the state server for a user with all rights; None: the cluster's
    own URL.
    """

    def __init__(
        self,
        cluster: LocalCluster,
        rng: random.Random,
        say: Callable[[str], None],
        proxies: Proxies,
        admin_url: str | None = None,
    ) -> None:
        self._cluster = cluster
        self._rng = rng
        self._say = say
        self._proxies = proxies
        self._admin_url = admin_url
        self.dispatchers_broken_s: list[float] = []  # times when a dispatcher was killed, stopped or continued
        self.state_broken_s: list[float] = []  # times when a fault of the state server began or ended
        self._wedged: list[StoppedThread] = []

    def faults(self) -> list[ClusterFault]:
        services: tuple[Service, ...] = ("worker", "dispatcher", "monitor", "planner")
        found = [ClusterFault(f"kill a {s}", lambda s=s: self._kill(s)) for s in services]
        found += [ClusterFault(f"stop a {s}", lambda s=s: self._stop(s)) for s in services]
        found += [ClusterFault("disk full for a service", self._fill_disk), ClusterFault("wedged engine", self._wedge)]
        if self._cluster.state_server is not None:
            found += [
                ClusterFault("kill the state server", self._kill_state_server),
                ClusterFault("stop the state server", self._stop_state_server),
                ClusterFault("slow state server", self._slow_state_server),
                ClusterFault("read-only state server", self._read_only_state_server),
                ClusterFault("state server back in time", self._state_server_back_in_time),
            ]
        if self._proxies.workers:
            found += [
                ClusterFault("nothing reaches a worker", lambda: self._hold(self._one_way("to_server"), "sent to")),
                ClusterFault("nothing comes from a worker", lambda: self._hold(self._one_way("to_client"), "sent by")),
                ClusterFault("connections to a worker cut", lambda: self._cut(*self._one_front())),
                ClusterFault("long way to a worker", lambda: self._delay(*self._one_front())),
            ]
        if self._proxies.state is not None:
            proxy = self._proxies.state
            found += [
                ClusterFault("nothing reaches the state server", lambda: self._swallow(proxy.to_server)),
                ClusterFault("no answer of the state server", lambda: self._swallow(proxy.to_client)),
                ClusterFault("connections to the state server cut", lambda: self._cut(_STATE, proxy)),
                ClusterFault("long way to the state server", lambda: self._delay(_STATE, proxy)),
            ]
        return found

    def let_go(self) -> None:
        """Continue stopped threads. Call it before ending processes, since a process with a stopped thread does not
        end.
        """
        while self._wedged:
            self._wedged.pop().go_on()

    async def _swallow(self, way: Way) -> tuple[str, float, Heal]:
        """Drop all data in one direction between the state server and all services, without closing connections."""
        way.swallows = True
        self._note_state()

        async def pass_on() -> None:
            way.swallows = False
            self._note_state()

        state = self._proxies.state
        what = "what is sent to" if state is not None and way is state.to_server else "every answer of"
        return f"{what} {_STATE} is lost", self._rng.choice(_OUTAGES_S), pass_on

    def _one_front(self) -> tuple[str, Proxy]:
        return self._rng.choice(sorted(self._proxies.workers.items(), key=lambda item: item[0]))

    def _one_way(self, name: str) -> tuple[str, Way]:
        worker_id, proxy = self._one_front()
        return worker_id, getattr(proxy, name)

    async def _hold(self, whose: tuple[str, Way], what: str) -> tuple[str, float, Heal]:
        """Delay all data in one direction of a worker's connections. The fault may end before or after timeouts
        expire.
        """
        worker_id, way = whose
        way.holds = True

        async def pass_on() -> None:
            way.holds = False

        return f"what is {what} {worker_id} does not arrive", self._rng.choice(_OUTAGES_S), pass_on

    async def _wedge(self) -> tuple[str, float, Heal] | None:
        """Stop a worker's engine thread, within a step or between two; its other threads continue."""
        process = self._one("worker")
        stopped = None if process is None else StoppedThread.named(process.pid, "engine")
        if process is None or stopped is None:
            return None
        process.paused = True
        self._wedged.append(stopped)

        async def go_on() -> None:
            process.paused = False
            self._wedged.remove(stopped)
            stopped.go_on()

        return f"the engine of {process.id} hangs", self._rng.choice(_WEDGES_S), go_on

    async def _cut(self, whose: str, proxy: Proxy) -> tuple[str, float, Heal]:
        return f"{proxy.reset()} connections to {whose} are cut", 0.0, _nothing

    async def _delay(self, whose: str, proxy: Proxy) -> tuple[str, float, Heal]:
        delay_s = self._rng.choice(_DELAYS_S)
        proxy.to_server.delay_s = proxy.to_client.delay_s = delay_s

        async def be_quick() -> None:
            proxy.to_server.delay_s = proxy.to_client.delay_s = 0.0

        return f"{whose} is {delay_s:g} s away, each way", self._rng.choice(_OUTAGES_S), be_quick

    async def _fill_disk(self) -> tuple[str, float, Heal] | None:
        """Prevent the files of one process, its log included, from growing."""
        everyone = [p for found in self._cluster.processes.values() for p in found if p.child.returncode is None]
        if not everyone:
            return None
        process = self._rng.choice(everyone)
        _, most = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1, most))

        async def make_room() -> None:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (most, most))

        return f"no file of {process.id} can grow", self._rng.choice(_OUTAGES_S), make_room

    def _one(self, service: Service) -> ServiceProcess | None:
        """A random running process of a service; None if none runs, or if the cluster needs the only one."""
        alive = [p for p in self._cluster.processes[service] if p.child.returncode is None and not p.paused]
        spare = service in ("monitor", "planner")  # the other services continue without any of these
        return self._rng.choice(alive) if len(alive) > (0 if spare else 1) else None

    async def _kill(self, service: Service) -> tuple[str, float, Heal] | None:
        process = self._one(service)
        if process is None:
            return None
        self._note(process)
        process.child.send_signal(signal.SIGKILL)

        def is_back() -> bool:
            return any(p.address for p in self._cluster.find(process.child.name) if p is not process)

        async def comes_back() -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BACK_WITHIN_S):
                    while not is_back():  # noqa: ASYNC110 - the keeper sets no asyncio.Event
                        await asyncio.sleep(0.05)

        return f"{process.id} is killed", 0.0, comes_back

    async def _stop(self, service: Service) -> tuple[str, float, Heal] | None:
        process = self._one(service)
        if process is None:
            return None
        self._note(process)
        process.paused = True
        process.child.send_signal(signal.SIGSTOP)

        async def go_on() -> None:
            process.paused = False
            process.child.send_signal(signal.SIGCONT)
            self._note(process)

        return f"{process.id} is stopped", self._rng.choice(_PAUSES_S), go_on

    def _note(self, process: ServiceProcess) -> None:
        if process.service == "dispatcher":
            self.dispatchers_broken_s.append(time.monotonic())

    def _note_state(self) -> None:
        self.state_broken_s.append(time.monotonic())

    async def _kill_state_server(self) -> tuple[str, float, Heal] | None:
        server = self._cluster.state_server
        if server is None or not server.is_running:
            return None
        self._note_state()
        server.send_signal(signal.SIGKILL)
        return "the state server is killed, and forgets everything", 0.0, _nothing

    async def _stop_state_server(self) -> tuple[str, float, Heal] | None:
        server = self._cluster.state_server
        if server is None or not server.is_running:
            return None
        self._note_state()
        pid = server.pid
        server.send_signal(signal.SIGSTOP)

        async def go_on() -> None:
            if server.is_running and server.pid == pid:
                server.send_signal(signal.SIGCONT)

        return "the state server is stopped", self._rng.choice(_OUTAGES_S), go_on

    async def _slow_state_server(self) -> tuple[str, float, Heal] | None:
        self._note_state()

        async def delay(store: redis.asyncio.Redis) -> None:
            for _ in range(10):
                await store.execute_command("CLIENT", "PAUSE", "400", "ALL")  # pyright: ignore[reportUnknownMemberType]
                await asyncio.sleep(0.5)

        async def heal() -> None:
            await self._with_store(delay)

        return "the state server answers late", 0.0, heal

    async def _read_only_state_server(self) -> tuple[str, float, Heal]:
        self._note_state()

        async def refuse(store: redis.asyncio.Redis) -> None:
            await store.execute_command("CONFIG", "SET", "min-replicas-to-write", "1")  # pyright: ignore[reportUnknownMemberType]

        async def accept(store: redis.asyncio.Redis) -> None:
            await store.execute_command("CONFIG", "SET", "min-replicas-to-write", "0")  # pyright: ignore[reportUnknownMemberType]

        await self._with_store(refuse)
        return "the state server refuses to write", self._rng.choice(_OUTAGES_S), lambda: self._with_store(accept)

    async def _state_server_back_in_time(self) -> tuple[str, float, Heal]:
        """Reset all keys to their values of some seconds ago, as after a fail-over to a replica that lags."""
        self._note_state()
        saved: dict[bytes | str, tuple[bytes, int]] = {}

        async def save(store: redis.asyncio.Redis) -> None:
            for key in await store.keys():  # pyright: ignore[reportUnknownMemberType]
                value, left_ms = await store.dump(key), await store.pttl(key)
                if value is not None:
                    saved[key] = value, max(0, left_ms)

        async def go_back(store: redis.asyncio.Redis) -> None:
            await store.execute_command("FLUSHALL")  # pyright: ignore[reportUnknownMemberType]
            for key, (value, left_ms) in saved.items():
                await store.restore(key, left_ms, value, replace=True)

        await self._with_store(save)
        return "the state server will be set back", self._rng.choice(_OUTAGES_S), lambda: self._with_store(go_back)

    async def _with_store(self, act: Callable[[redis.asyncio.Redis], Awaitable[None]]) -> None:
        store = redis.asyncio.from_url(self._admin_url or self._cluster.redis_url, socket_timeout=5.0)  # pyright: ignore[reportUnknownMemberType]
        try:
            await act(store)
        except (RedisError, OSError) as error:
            self._say(f"    the state server could not be told: {error}")
        finally:
            await store.aclose()


async def _nothing() -> None:
    """End of a fault that needs none: the keeper restarts killed processes."""
