"""All emulated links of one worker: met as real ones are, by worker ids and epoch, over one listening socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Collection, Coroutine, Mapping
from concurrent.futures import Future
from threading import Event
from typing import Any

from ballast.common.errors import DeadlineExceeded, StaleEpoch, Unavailable
from services.worker.emulation.card import Card
from services.worker.emulation.link import Connection, EmulatedLink, Receiver
from services.worker.emulation.wire import Frame, Kind
from services.worker.links.pace import StagePace

_MAX_PARKED = 256  # callers nobody waits for yet; the oldest goes for another one
_MAX_STRANGERS = 64  # connections that have not said who they are; the oldest goes for another one
_HELLO_TIMEOUT_S = 5.0
_Key = tuple[str, int]  # peer and epoch


class EmulatedPlane:
    """See `transport.plane.DataPlane`. Made on the event loop, which carries everything; methods are for any thread."""

    def __init__(self, worker_id: str, receiver: Receiver, *, host: str, bytes_per_s: float) -> None:
        self.worker_id = worker_id
        self.incarnation = 0
        self.pace = StagePace()  # of its stage; messages are carried in any case as they would be
        self._receiver = receiver
        self._loop = asyncio.get_running_loop()
        self._card = Card(self._loop, bytes_per_s)
        listener = socket.create_server((host, 0))
        self.store_address = f"{host}:{listener.getsockname()[1]}"
        self._links: dict[_Key, EmulatedLink] = {}
        self._waiting: dict[_Key, asyncio.Future[Connection]] = {}
        self._parked: dict[_Key, Connection] = {}
        self._strangers: dict[Connection, asyncio.TimerHandle] = {}  # the oldest first
        self._oldest_epoch = 0
        self._closing = False
        self._tasks: set[asyncio.Task[Any]] = set()  # Any: of whatever they return
        self._server: asyncio.Server | None = None
        self._keep(self._listen(listener))

    def link(self, peer_id: str, epoch: int) -> EmulatedLink | None:
        link = self._links.get((peer_id, epoch))
        return link if link is not None and link.is_up else None

    def warm(self, peer_id: str, peer_store_address: str, epoch: int, timeout_s: float) -> Future[EmulatedLink]:
        return asyncio.run_coroutine_threadsafe(
            self._connect(peer_id, peer_store_address, epoch, timeout_s), self._loop
        )

    def name_partners(self, addresses: Mapping[str, str]) -> None:
        """Nothing is kept ready: to connect takes no longer here than to take over what is ready."""

    def retire(self, before_epoch: int, peers: Collection[str] | None = None) -> None:
        """Also known before the event loop comes to it: nothing more is sent over links of older epochs."""
        if peers is None:
            self._oldest_epoch = max(self._oldest_epoch, before_epoch)
        self._loop.call_soon_threadsafe(self._retire, before_epoch, peers)

    def close(self) -> None:
        """Waits for the event loop, unless it is called there."""
        done = Event()
        try:
            is_here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            is_here = False
        if is_here:
            self._close(done)
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._close, done)
            done.wait(2.0)

    # ------------------------------------------------------------ event loop

    def _keep(self, work: Coroutine[Any, Any, Any]) -> None:  # Any: as above
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _listen(self, listener: socket.socket) -> None:
        self._server = await self._loop.create_server(lambda: Connection(self._greet), sock=listener)

    def _greet(self, connection: Connection) -> None:
        """Somebody with a higher id calls."""
        if len(self._strangers) >= _MAX_STRANGERS:
            next(iter(self._strangers)).close()  # it is forgotten as it is lost
        self._strangers[connection] = self._loop.call_later(_HELLO_TIMEOUT_S, connection.close)

        def hello(frame: Frame) -> None:
            connection.detach()
            forget("")
            if frame.kind is not Kind.HELLO or self._closing:
                connection.close()
                return
            key = (frame.meta.decode(), frame.stream)
            waiting = self._waiting.pop(key, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(connection)
                return
            if (before := self._parked.pop(key, None)) is not None:
                before.close()
            elif len(self._parked) >= _MAX_PARKED:
                self._parked.pop(next(iter(self._parked))).close()
            self._parked[key] = connection

        def forget(_: str) -> None:
            if (timer := self._strangers.pop(connection, None)) is not None:
                timer.cancel()

        connection.attach(hello, forget)

    async def _connect(self, peer_id: str, address: str, epoch: int, timeout_s: float) -> EmulatedLink:
        if (link := self.link(peer_id, epoch)) is not None:
            return link
        self._refuse(epoch)
        try:
            async with asyncio.timeout(timeout_s):
                if self.worker_id < peer_id:
                    connection = await self._meet((peer_id, epoch))
                else:
                    connection = await self._call(peer_id, address, epoch)
        except TimeoutError:
            raise DeadlineExceeded(f"link for epoch {epoch}: {peer_id} did not come") from None
        except OSError as error:
            raise Unavailable(peer_id, f"data plane at {address}: {error}") from error
        try:
            self._refuse(epoch)
        except (StaleEpoch, Unavailable):
            connection.close()
            raise
        link = EmulatedLink(
            peer_id,
            epoch,
            loop=self._loop,
            connection=connection,
            card=self._card,
            receiver=self._receiver,
            ended=self._ended,
        )
        self._links[peer_id, epoch] = link
        if self.worker_id < peer_id:
            connection.write(self._hello(epoch))
        link.begin()
        return link

    async def _meet(self, key: _Key) -> Connection:
        if (parked := self._parked.pop(key, None)) is not None:
            return parked
        waiting = self._waiting[key] = self._loop.create_future()
        try:
            return await waiting
        finally:
            self._waiting.pop(key, None)

    async def _call(self, peer_id: str, address: str, epoch: int) -> Connection:
        host, _, port = address.rpartition(":")
        answered: asyncio.Future[None] = self._loop.create_future()

        def answer(_: Frame) -> None:
            connection.detach()
            answered.set_result(None)

        def lost(why: str) -> None:
            if not answered.done():
                answered.set_exception(Unavailable(peer_id, f"data plane at {address}: {why}"))

        _, connection = await self._loop.create_connection(Connection, host, int(port))
        connection.attach(answer, lost)
        connection.write(self._hello(epoch))
        try:
            await answered
        except BaseException:
            connection.close()
            raise
        return connection

    def _hello(self, epoch: int) -> Frame:
        return Frame(Kind.HELLO, stream=epoch, meta=self.worker_id.encode())

    def _refuse(self, epoch: int) -> None:
        if epoch < self._oldest_epoch:
            raise StaleEpoch("link", epoch, self._oldest_epoch)
        if self._closing:
            raise Unavailable(self.worker_id, "its data plane is closing")

    def _ended(self, link: EmulatedLink) -> None:
        if self._links.get((link.peer_id, link.epoch)) is link:
            del self._links[link.peer_id, link.epoch]

    def _retire(self, before_epoch: int, peers: Collection[str] | None) -> None:
        for (peer_id, epoch), link in sorted(self._links.items()):
            if epoch < before_epoch and (peers is None or peer_id in peers):
                link.retire()

    def _close(self, done: Event) -> None:
        self._closing = True
        self._card.close()
        if self._server is not None:
            self._server.close()
        for link in list(self._links.values()):
            link.begin_close()
        for connection in [*self._parked.values(), *self._strangers]:
            connection.close()
        for waiting in self._waiting.values():
            waiting.cancel()
        done.set()
