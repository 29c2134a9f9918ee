"""Receives a planner's webhook, and starts and ends workers of a local cluster as it requests."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable

from ballast.client import AsyncClient
from ballast.common.addresses import join_address
from ballast.common.errors import BallastError, InvalidRequest, Unauthenticated
from ballast.common.wanted import SIGNATURE, Wanted, verify
from tools.local.cluster import LocalCluster, ServiceProcess

_MOST_BYTES = 1 << 20
_HEAD_WITHIN_S = 5.0
_POLL_S = 0.2
_DRAINS_WITHIN_S = 300.0


@contextlib.asynccontextmanager
async def hearing(
    secret: bytes, take: Callable[[Wanted], None], host: str = "127.0.0.1", port: int = 0
) -> AsyncGenerator[str]:
    """Context manager that serves the webhook and yields its URL. Calls `take` with each message; messages that are not
    signed with `secret` are refused.

    Raises:
        OSError: the port is taken.
    """

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_HEAD_WITHIN_S):
                told = await _answer(reader, secret, take)
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            told = "400 Bad Request"
        with contextlib.suppress(OSError):
            writer.write(f"HTTP/1.1 {told}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
            await writer.drain()
            writer.close()

    server = await asyncio.start_server(serve, host, port)
    async with server:
        yield f"http://{join_address(host, server.sockets[0].getsockname()[1])}/"


async def _answer(reader: asyncio.StreamReader, secret: bytes, take: Callable[[Wanted], None]) -> str:
    """Read a request, call `take` with its message, and return the HTTP status."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
    if not head[0].startswith("POST "):
        return "405 Method Not Allowed"
    length = int(headers.get("content-length", "0"))
    if not 0 <= length <= _MOST_BYTES:
        return "413 Content Too Large"
    body = await reader.readexactly(length)
    try:
        verify(secret, body, headers.get(SIGNATURE.lower(), ""), time.time())
        take(Wanted.read(body))
    except Unauthenticated:
        return "401 Unauthorized"
    except InvalidRequest:
        return "400 Bad Request"
    return "204 No Content"


class Scaler:
    """Starts and ends workers so that as many run as the planner wants, from `least` to `most`."""

    def __init__(self, least: int, most: int, say: Callable[[str], None]) -> None:
        self._least = least
        self._most = most
        self._say = say
        self._wanted: Wanted | None = None
        self._news = asyncio.Event()
        self._ends = False  # True: a worker is being drained and ended

    def take(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._news.set()

    async def run(self, cluster: LocalCluster) -> None:
        """Start and end workers until cancelled, one at a time, because the wanted number may change meanwhile. A
        start does not wait for a worker that ends.
        """
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._news.wait()
                self._news.clear()
                while self._wanted is not None:
                    running = [one for one in cluster.processes["worker"] if not one.may_end]
                    missing = min(self._most, max(self._least, self._wanted.wanted)) - len(running)
                    if missing > 0:
                        await self._start(cluster)
                    elif missing < 0 and not self._ends:
                        leaver = _first_to_end(running, self._wanted)
                        leaver.may_end = self._ends = True
                        tasks.create_task(self._end(cluster, leaver))
                    else:
                        break

    async def _start(self, cluster: LocalCluster) -> None:
        """Start a worker. One that does not come up counts as running, because the cluster's keeper restarts it."""
        try:
            started = await cluster.start_worker()
        except BallastError as error:
            self._say(f"one more worker is wanted and did not come up: {error}")
        else:
            self._say(f"{started.id} serves, as one more is wanted")

    async def _end(self, cluster: LocalCluster, process: ServiceProcess) -> None:
        """Drain a worker, for at most five minutes, and end it."""
        try:
            async with AsyncClient(cluster.address, **cluster.credentials) as client, asyncio.timeout(_DRAINS_WITHIN_S):
                await client.drain_worker(process.id)
                while await _has_work(client, process.id):  # noqa: ASYNC110 - the state of another process
                    await asyncio.sleep(_POLL_S)
        except (BallastError, TimeoutError) as error:
            self._say(f"{process.id} ends before it is drained; its requests continue on other workers: {error}")
        await cluster.end_worker(process)
        self._say(f"{process.id} has ended, as one less is enough")
        self._ends = False
        self._news.set()


async def _has_work(client: AsyncClient, worker_id: str) -> bool:
    loads = [worker.load for worker in (await client.status()).workers if worker.worker_id == worker_id]
    return any(load is not None and load.running_count + load.waiting_count > 0 for load in loads)


def _first_to_end(running: list[ServiceProcess], wanted: Wanted) -> ServiceProcess:
    """The worker to end first: a parked one, because it holds no request; otherwise the worker that was started
    last.
    """
    return max(running, key=lambda one: (one.id in wanted.parked, len(one.id), one.id))
