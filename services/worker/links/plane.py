"""All links of one worker, for any transport."""

import socket
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from threading import Condition
from typing import Protocol

from ballast.common.errors import DeadlineExceeded, InvalidRequest, StaleEpoch, Unavailable
from services.worker.links.connection import Connection, Link
from services.worker.links.handshake import Hello, Terms
from services.worker.links.pace import StagePace
from services.worker.links.ports import ChannelBroken, ConnectionFacts
from services.worker.links.rendezvous import Meeting, Rendezvous, call

_WARMING_THREADS = 16  # enough that threads waiting for absent peers do not block others
_CLOSE_TIMEOUT_S = 4.0


class Opener(Protocol):
    """Makes connections from the sockets of a rendezvous."""

    @property
    def lanes(self) -> tuple[str, ...]:
        """Names of the lanes, each of which needs a socket."""
        ...

    @property
    def terms(self) -> Terms: ...

    def open(self, peer: Hello, sockets: Sequence[socket.socket], *, is_host: bool, name: str) -> Connection:
        """Open a connection. Blocks until both sides have opened it. Takes ownership of the sockets.

        Raises:
            ChannelBroken: the peer did not open it in time.
        """
        ...

    def close(self, timeout_s: float) -> bool:
        """Refuse to open further connections. Returns False if a part has not ended in time."""
        ...


class DataPlane:
    """Runs this worker's rendezvous, opens connections when a link needs them, and ends links of old epochs.

    Thread-safe. `connect` and `close` block, so they must not be called on the asyncio loop.
    """

    def __init__(
        self,
        worker_id: str,
        opener: Opener,
        *,
        host: str,
        pace: StagePace,
        secret: bytes | None = None,
        timeout_s: float = 10.0,
        port: int = 0,
    ) -> None:
        """`host`, `port`: address for peers; port 0: any free one. `secret`: only peers that prove that they have it
        are accepted; None: all peers are. `timeout_s`: default wait for a peer.
        """
        self.worker_id = worker_id
        self.incarnation = 0  # incarnation of this process, once known
        self.pace = pace  # updated by the engine thread
        self._opener = opener
        self._secret = secret
        self._timeout_s = timeout_s
        self._rendezvous = Rendezvous(host, worker_id, secret, port)
        self.store_address = self._rendezvous.address
        self._changed = Condition()  # notified when a connection has been opened or has failed
        self._connections: dict[str, Connection] = {}  # by peer; includes ended ones until they are replaced
        self._making: set[str] = set()
        self._connecting: dict[tuple[str, int], Future[Link]] = {}
        self._oldest_epoch = 0
        self._closing = False
        self._warmers = ThreadPoolExecutor(_WARMING_THREADS, thread_name_prefix=f"links-warm-{worker_id}")

    @property
    def refused(self) -> Mapping[str, int]:
        """Number of refused callers by reason."""
        return dict(self._rendezvous.refused)

    def link(self, peer_id: str, epoch: int) -> Link | None:
        """The link to a peer for an epoch; None unless it is up."""
        with self._changed:
            connection = self._connections.get(peer_id)
        links = () if connection is None else connection.links()
        return next((link for link in links if link.epoch == epoch and link.is_up), None)

    def connect(
        self, peer_id: str, address: str, epoch: int, timeout_s: float | None = None, incarnation: int = 0
    ) -> Link:
        """Return the link to a peer for an epoch. Blocks for up to `timeout_s` until the peer has called `connect` as
        well; establishing a connection takes some milliseconds. `incarnation`: the peer's, if known.

        Raises:
            DeadlineExceeded: the peer did not call it in time.
            Unavailable: the peer is unreachable, lost or too late, or this plane is closing.
            StaleEpoch: the epoch is retired.
            PeerViolation: the peer is another worker than expected, or refuses this one.
        """
        if peer_id == self.worker_id:
            raise InvalidRequest("peer_id", f"{peer_id} is this worker")
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + timeout_s
        key = (peer_id, epoch)
        mine: Future[Link] = Future()
        with self._changed:
            self._refuse_retired(epoch)
            others = self._connecting.get(key)
            if others is None:
                self._connecting[key] = mine
        if others is not None:
            try:
                return others.result(timeout_s)
            except FutureTimeout:
                raise DeadlineExceeded(f"link to {peer_id}: not up after {timeout_s} s") from None
            finally:
                del others  # like `mine` below
        try:
            link = self._join(peer_id, address, incarnation, epoch, deadline_s)
        except BaseException as error:
            with self._changed:
                del self._connecting[key]
            mine.set_exception(error)
            del mine  # the error references this frame, which would keep the link's objects until a garbage collection
            raise
        with self._changed:
            del self._connecting[key]
            is_wanted = not self._closing and epoch >= self._oldest_epoch
        mine.set_result(link)
        if not is_wanted:
            link.retire()
            raise Unavailable(peer_id, f"link for epoch {epoch} was abandoned while it was being opened")
        return link

    def warm(
        self, peer_id: str, address: str, epoch: int, timeout_s: float | None = None, incarnation: int = 0
    ) -> Future[Link]:
        """Call `connect` in the background."""
        return self._warmers.submit(self.connect, peer_id, address, epoch, timeout_s, incarnation)

    def retire(self, before_epoch: int, peers: Collection[str] | None = None) -> None:
        """Make links of older epochs (to these peers, or all) refuse further messages, and notify the peers."""
        with self._changed:
            if peers is None:
                self._oldest_epoch = max(self._oldest_epoch, before_epoch)
            connections = [c for peer, c in sorted(self._connections.items()) if peers is None or peer in peers]
        for connection in connections:
            for link in connection.links():
                if link.epoch < before_epoch:
                    link.retire()

    def facts(self) -> list[ConnectionFacts]:
        """Return the facts of every connection, including ended ones until they are replaced."""
        with self._changed:
            connections = sorted(self._connections.items())
        return [connection.facts() for _, connection in connections]

    def close(self, timeout_s: float | None = None) -> None:
        """Close all connections; raises DeadlineExceeded if some have not ended in time."""
        deadline_s = time.monotonic() + (_CLOSE_TIMEOUT_S if timeout_s is None else timeout_s)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._rendezvous.close()
        with self._changed:
            connections = list(self._connections.values())
        for connection in connections:
            connection.begin_close()
        self._warmers.shutdown(wait=True, cancel_futures=True)
        with self._changed:
            connections = list(self._connections.values())
            self._connections.clear()
        for connection in connections:
            connection.close(max(deadline_s - time.monotonic(), 0.01))
        left = [connection.peer_id for connection in connections if not connection.wait_ended(0.5)]
        if not self._opener.close(max(deadline_s - time.monotonic(), 1.0)) or left:
            raise DeadlineExceeded(f"links of {self.worker_id} to {left} have not ended")

    # ------------------------------------------------------------ connecting

    def _join(self, peer_id: str, address: str, incarnation: int, epoch: int, deadline_s: float) -> Link:
        """Join over the existing connection or a new one. Retried once if the connection ends while joining."""
        while True:
            connection = self._connection(peer_id, address, incarnation, epoch, deadline_s)
            link = connection.join(epoch, deadline_s, lambda: self._rendezvous.has_called(peer_id))
            if link is not None:
                return link
            if time.monotonic() >= deadline_s:
                raise DeadlineExceeded(f"link for epoch {epoch}: {peer_id} did not connect")

    def _connection(self, peer_id: str, address: str, incarnation: int, epoch: int, deadline_s: float) -> Connection:
        while (connection := self._one_that_is_up(peer_id, epoch, deadline_s)) is not None:
            if not incarnation or connection.incarnation in (0, incarnation):
                return connection
            connection.give_up(f"{peer_id} has incarnation {connection.incarnation}, but {incarnation} is expected")
        try:
            connection = self._make(peer_id, address, epoch, deadline_s)
            with self._changed:
                self._connections[peer_id] = connection
                closing = self._closing
        finally:
            with self._changed:
                self._making.discard(peer_id)
                self._changed.notify_all()
        if closing:
            connection.begin_close()
        return connection

    def _one_that_is_up(self, peer_id: str, epoch: int, deadline_s: float) -> Connection | None:
        """Return an existing connection that is up. None: the caller has to open one."""
        with self._changed:
            while True:
                self._refuse_retired(epoch)
                connection = self._connections.get(peer_id)
                if connection is not None and connection.is_up:
                    return connection
                if peer_id not in self._making:
                    self._making.add(peer_id)
                    return None
                if (left_s := deadline_s - time.monotonic()) <= 0:
                    raise DeadlineExceeded(f"link for epoch {epoch}: {peer_id} did not connect")
                self._changed.wait(left_s)

    def _make(self, peer_id: str, address: str, epoch: int, deadline_s: float) -> Connection:
        is_host = self.worker_id < peer_id
        meetings = list[Meeting]()
        low, high = sorted((self.worker_id, peer_id))
        try:
            for lane in self._opener.lanes:
                mine = Hello(self.worker_id, self.incarnation, peer_id, lane, self._opener.terms)
                if is_host:
                    meetings.append(self._rendezvous.meet(mine, deadline_s))
                else:
                    meetings.append(call(mine, address, deadline_s, self._secret))
            sockets = [meeting.connection for meeting in meetings]
            return self._opener.open(meetings[0].peer, sockets, is_host=is_host, name=f"link/{low}-{high}")
        except BaseException as error:
            for meeting in meetings:
                meeting.connection.close()
            if isinstance(error, ChannelBroken):
                raise Unavailable(peer_id, f"link for epoch {epoch}: {error}") from error
            if isinstance(error, DeadlineExceeded):
                raise DeadlineExceeded(f"link for epoch {epoch}: {error}") from None
            raise

    def _refuse_retired(self, epoch: int) -> None:
        if epoch < self._oldest_epoch:
            raise StaleEpoch("link", epoch, self._oldest_epoch)
        if self._closing:
            raise Unavailable(self.worker_id, "its data plane is closing")
