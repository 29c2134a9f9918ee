"""All links of one worker."""

import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from functools import partial
from threading import Lock

from ballast.common.errors import DeadlineExceeded, InvalidRequest, StaleEpoch, Unavailable
from services.worker.links.channel import ChannelBroken, PairChannel, Transport
from services.worker.links.channels.gloo import GlooTransport
from services.worker.links.config import TransportConfig
from services.worker.links.frame import VERSION
from services.worker.links.handshake import Hello, Terms
from services.worker.links.link import NO_EPOCH, Channels, Link, LinkFacts, LinkState, Receiver
from services.worker.links.lobby import Lobby, Meeting, WaitsElsewhere, call, resolve_host
from services.worker.links.pace import StagePace
from services.worker.links.reaper import Reaper
from services.worker.links.spares import Spares

_WARMING_THREADS = 16  # those that wait for somebody who never comes must not keep the others waiting
_LANES = ("act", "bulk")


class DataPlane:
    """Hosts the lobby in which peers find this worker, makes links on demand, closes those of old epochs.

    Safe for use from any thread. `connect` and `close` block; keep them off the asyncio loop.
    """

    def __init__(
        self,
        worker_id: str,
        receiver: Receiver,
        config: TransportConfig,
        advertise_host: str | None = None,
        transport: Transport | None = None,
        secret: bytes | None = None,
    ) -> None:
        """`secret` is the cluster's: links are made only with those who prove that they have it. None: with anybody."""
        host = resolve_host(advertise_host)
        self.worker_id = worker_id
        self.incarnation = 0  # of this life, once it is known
        self._secret = secret
        self._receiver = receiver
        self._config = config
        self._transport: Transport = GlooTransport(host) if transport is None else transport
        self.pace = StagePace()  # for the engine thread to tell what the stage does
        self._spares = Spares(worker_id, self._make_spare, config)
        self._lobby = Lobby(host, worker_id, secret, self._called)
        self.store_address = self._lobby.address
        self._lock = Lock()
        self._links: dict[tuple[str, int], Link] = {}
        self._connecting: dict[tuple[str, int], Future[Link]] = {}
        self._oldest_epoch = 0
        self._closing = False
        self._reaper = Reaper(f"links-reaper-{worker_id}")
        self._warmers = ThreadPoolExecutor(_WARMING_THREADS, thread_name_prefix=f"links-warm-{worker_id}")

    def link(self, peer_id: str, epoch: int) -> Link | None:
        """The link if it is up."""
        with self._lock:
            link = self._links.get((peer_id, epoch))
        return link if link is not None and link.state is LinkState.UP else None

    def connect(self, peer_id: str, peer_store_address: str, epoch: int, timeout_s: float | None = None) -> Link:
        """The link to a peer for an epoch: a spare one, or it is made. Takes until the peer has called this too, which
        may be for `timeout_s`, and then some milliseconds; twice `open_timeout_s` where it dies in these.

        Raises:
            DeadlineExceeded: the peer did not come.
            Unavailable: it cannot be reached, is gone or too late after all, or this plane is closing.
            StaleEpoch: the epoch is retired.
        """
        if peer_id == self.worker_id:
            raise InvalidRequest("peer_id", f"{peer_id} is this worker")
        timeout_s = self._config.connect_timeout_s if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + timeout_s
        key = (peer_id, epoch)
        with self._lock:
            self._refuse_retired(epoch)
            link = self._links.get(key)
            if link is not None and link.state is LinkState.UP:
                return link
            others = self._connecting.get(key)
            mine: Future[Link] = Future()
            if others is None:
                self._connecting[key] = mine
        if others is not None:
            try:
                return others.result(timeout_s)
            except FutureTimeout:
                raise DeadlineExceeded(f"link to {peer_id}: not up after {timeout_s} s") from None
            finally:
                del others  # as below
        try:
            link = self._adopt_or_make(peer_id, peer_store_address, epoch, deadline_s)
        except BaseException as error:
            with self._lock:
                del self._connecting[key]
            mine.set_exception(error)
            del mine  # the error knows this frame, and all that was made for the link would wait for the collector
            raise
        with self._lock:
            del self._connecting[key]
            is_wanted = not self._closing and epoch >= self._oldest_epoch
            if is_wanted:
                self._links[key] = link
        mine.set_result(link)
        if not is_wanted:
            link.close()
            raise Unavailable(peer_id, f"link for epoch {epoch} was given up while it was made")
        return link

    def name_partners(self, addresses: Mapping[str, str]) -> None:
        """Peers, with the addresses of their lobbies, to whom links are likely to be needed: spares are kept ready."""
        self._spares.name({peer_id: address for peer_id, address in addresses.items() if peer_id != self.worker_id})

    def warm(self, peer_id: str, peer_store_address: str, epoch: int, timeout_s: float | None = None) -> Future[Link]:
        """`connect` in the background, so that the link is there when it is needed."""
        return self._warmers.submit(self.connect, peer_id, peer_store_address, epoch, timeout_s)

    def retire(self, before_epoch: int, peers: Collection[str] | None = None) -> None:
        """Links of older epochs (to these peers, or all) refuse what they still bring and close in the background."""
        with self._lock:
            if peers is None:
                self._oldest_epoch = max(self._oldest_epoch, before_epoch)
            retired = [
                link
                for (peer_id, epoch), link in sorted(self._links.items())
                if epoch < before_epoch and (peers is None or peer_id in peers)
            ]
            for link in retired:
                del self._links[link.peer_id, link.epoch]
        for link in retired:
            link.retire()
            link.begin_close()
        for link in retired:
            self._reaper.submit(partial(_end, link))

    def facts(self) -> list[LinkFacts]:
        """Of spares, then of every link that is not retired, ended ones included until they are replaced."""
        with self._lock:
            links = sorted(self._links.items())
        return [link.facts() for link in [*self._spares.links(), *(link for _, link in links)]]

    @property
    def refused(self) -> Mapping[str, int]:
        """Callers that were not let in, by reason."""
        return dict(self._lobby.refused)

    def close(self, timeout_s: float | None = None) -> None:
        """End everything; nothing of it is left when this returns, or DeadlineExceeded says what is."""
        deadline_s = time.monotonic() + (2 * self._config.close_timeout_s if timeout_s is None else timeout_s)
        with self._lock:
            self._closing = True
        self._lobby.close()
        self._warmers.shutdown(wait=True, cancel_futures=True)
        spares = self._spares.close(max(deadline_s - time.monotonic(), 0.01))
        with self._lock:
            links = [*self._links.values(), *spares]
            self._links.clear()
        for link in links:
            link.begin_close()
        for link in links:
            link.close(max(deadline_s - time.monotonic(), 0.01))
        threads_left = [link.peer_id for link in links if not link.wait_ended(0.5)]
        reaped = self._reaper.close(max(deadline_s - time.monotonic(), 1.0))
        self._transport.close()
        if threads_left or not reaped:
            raise DeadlineExceeded(f"links of {self.worker_id} to {threads_left} have not ended")

    def _adopt_or_make(self, peer_id: str, address: str, epoch: int, deadline_s: float) -> Link:
        """A spare may come up between the two sides' looks for one. Then the peer waits on it for this side, which
        decides, and this side in its lobby: so it looks again while it is there.
        """
        while (link := self._adopt_spare(peer_id, epoch, deadline_s)) is None:
            with suppress(WaitsElsewhere):
                return self._make(self._meet(peer_id, address, epoch, deadline_s), epoch)
        return link

    def _adopt_spare(self, peer_id: str, epoch: int, deadline_s: float) -> Link | None:
        """None: there is none, or the peer does not take it too: then one is made from nothing on both sides."""
        patience_s = min(self._config.adopt_timeout_s, 0.6 * (deadline_s - time.monotonic()))
        link = self._spares.take(peer_id, patience_s)
        if link is None:
            return None
        decides = self.worker_id < peer_id
        if not decides:  # who decides says so, or closes it: giving up before that would be the other one's surprise
            patience_s = max(deadline_s - time.monotonic(), patience_s)
        if link.adopt(epoch, patience_s, decides=decides):
            self._spares.remove(link)
            return link
        if link.asked_epoch <= epoch:  # nobody here wants it for a later one
            self._spares.remove(link)
            link.retire()
            link.begin_close()
            self._reaper.submit(partial(_end, link))
        return None

    def _called(self, peer_id: str, epoch: int) -> None:
        if epoch == NO_EPOCH:
            self._spares.called(peer_id)

    def _make_spare(self, peer_id: str, address: str | None, timeout_s: float) -> Link:
        return self._make(self._meet(peer_id, address or "", NO_EPOCH, time.monotonic() + timeout_s), NO_EPOCH)

    def _meet(self, peer_id: str, peer_store_address: str, epoch: int, deadline_s: float) -> Meeting:
        mine = Hello(self.worker_id, epoch, self._terms(), self.incarnation, peer_id)
        if self.worker_id < peer_id:
            return self._lobby.meet(mine, peer_id, deadline_s, partial(self._spares.is_asked, peer_id, epoch))
        return call(mine, peer_id, peer_store_address, deadline_s, self._secret)

    def _make(self, meeting: Meeting, epoch: int) -> Link:
        """Both have come, so this takes milliseconds, or something is wrong with one of them.

        Whoever has the other's addresses connects at once, and waits for longer than the other one may take to get
        its own: gloo forgets a connection that it has given up, but not that one was to come, and the process ends
        with a segmentation fault if it comes after all.
        """
        peer_id = meeting.peer.worker_id
        low, high = sorted((self.worker_id, peer_id))
        name = f"link/{epoch}/{low}-{high}"
        rank = 0 if self.worker_id == low else 1
        within_s = self._config.open_timeout_s
        opened: list[PairChannel] = []
        try:
            with meeting.store.expiring(time.monotonic() + within_s):
                opened.extend(
                    self._transport.open(meeting.store, f"{name}/{lane}", rank, 2 * within_s) for lane in _LANES
                )
            channels = Channels(opened[0], opened[1], meeting.store)
            config, receiver, dispose = self._config, self._receiver, self._reaper.submit
            return Link(peer_id, epoch, channels, meeting.peer.terms, config, receiver, dispose, self.pace)
        except BaseException as error:
            for channel in opened:
                channel.abort()
                channel.destroy()
            meeting.store.close()
            if isinstance(error, ChannelBroken):
                raise Unavailable(peer_id, f"link for epoch {epoch}: {error}") from error
            raise

    def _refuse_retired(self, epoch: int) -> None:
        if epoch < self._oldest_epoch:
            raise StaleEpoch("link", epoch, self._oldest_epoch)
        if self._closing:
            raise Unavailable(self.worker_id, "its data plane is closing")

    def _terms(self) -> Terms:
        return Terms(
            version=VERSION,
            urgent_frame_bytes=self._config.frame_bytes(urgent=True),
            bulk_frame_bytes=self._config.frame_bytes(urgent=False),
            max_message_bytes=self._config.max_message_bytes,
            max_transfer_bytes=self._config.max_transfer_bytes,
        )


def _end(link: Link) -> None:
    """Until no thread of it is left."""
    link.close()
    link.wait_ended(0.5)
