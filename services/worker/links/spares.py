"""Links that are up before anybody needs them, so that a plan does not wait until two workers have met.

A spare belongs to no epoch. Whoever needs a link takes the spare and says for which epoch (`Link.adopt`); once both
sides have said the same it is that epoch's link, for good. The worker with the lower id decides whether they have. The
one with the higher id calls, the other one answers whoever calls its lobby for `NO_EPOCH`. A spare that nobody has
named for a time is closed.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Condition, Thread

from ballast.common.errors import BallastError
from ballast.service.logs import get_logger
from services.worker.links.config import TransportConfig
from services.worker.links.link import NO_EPOCH, Link, LinkState

_SWEEP_S = 2.0  # between two looks for spares that have ended or that nobody names any more

# (peer, its address or None if it has called here, seconds) -> link for NO_EPOCH
Make = Callable[[str, str | None, float], Link]


@dataclass(slots=True)
class _Spare:
    link: Link
    named_at_s: float


class Spares:
    """At most one for each peer. Safe for use from any thread; makes links on a thread of its own."""

    def __init__(self, me: str, make: Make, config: TransportConfig) -> None:
        self._me = me
        self._make = make
        self._config = config
        self._changed = Condition()
        self._wanted: dict[str, str | None] = {}  # peer -> its address; None: it has called here
        self._making: str | None = None
        self._spares: dict[str, _Spare] = {}
        self._closed = False
        self._thread = Thread(target=self._run, name=f"links-spares-{me}", daemon=True)
        self._thread.start()

    def name(self, addresses: dict[str, str]) -> None:
        """These peers are likely to be needed: a spare to each is kept, or made if it is this side's turn to call."""
        now_s = time.monotonic()
        with self._changed:
            for peer_id, address in addresses.items():
                spare = self._spares.get(peer_id)
                if spare is not None and spare.link.state is LinkState.UP:
                    spare.named_at_s = now_s
                elif peer_id < self._me:
                    self._want(peer_id, address)

    def called(self, peer_id: str) -> None:
        """A peer is in the lobby and wants a spare."""
        with self._changed:
            if peer_id > self._me:
                self._want(peer_id, None)

    def take(self, peer_id: str, timeout_s: float) -> Link | None:
        """The spare to that peer, which stays here until it is removed. Waits for one that is being made."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or not (peer_id in self._wanted or self._making == peer_id), timeout=timeout_s
            )
            spare = self._spares.get(peer_id)
        return None if spare is None or spare.link.state is not LinkState.UP else spare.link

    def is_asked(self, peer_id: str, epoch: int) -> bool:
        """The peer waits on the spare to it for this side to take it for that epoch, and this side may."""
        with self._changed:
            spare = self._spares.get(peer_id)
        if spare is None or epoch == NO_EPOCH:
            return False
        return spare.link.is_up and spare.link.asked_epoch <= epoch == spare.link.peer_asked_epoch

    def remove(self, link: Link) -> None:
        """It belongs to an epoch now, or is of no use. Nothing if another one has taken its place."""
        with self._changed:
            spare = self._spares.get(link.peer_id)
            if spare is not None and spare.link is link:
                del self._spares[link.peer_id]

    def links(self) -> list[Link]:
        with self._changed:
            return [spare.link for _, spare in sorted(self._spares.items())]

    def close(self, timeout_s: float) -> list[Link]:
        """Nothing more is made. Returns what there is, for the caller to close."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        with self._changed:
            left = [spare.link for spare in self._spares.values()]
            self._spares.clear()
        return left

    # ------------------------------------------------------------ its own thread

    def _want(self, peer_id: str, address: str | None) -> None:
        known = peer_id in self._spares or peer_id in self._wanted or self._making == peer_id
        if self._closed or (not known and len(self._spares) + len(self._wanted) >= self._config.max_spares):
            return
        if self._making != peer_id:
            self._wanted[peer_id] = address
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or bool(self._wanted), timeout=_SWEEP_S)
                if self._closed:
                    return
                peer_id = self._making = next(iter(self._wanted), None)
                address = self._wanted.pop(peer_id) if peer_id is not None else None
            if peer_id is not None:
                self._make_one(peer_id, address)
            self._sweep()

    def _make_one(self, peer_id: str, address: str | None) -> None:
        link, replaced = None, None
        try:
            link = self._make(peer_id, address, self._config.spare_connect_timeout_s)
        except (BallastError, OSError) as error:
            get_logger().debug("no spare link", peer=peer_id, why=str(error))
        with self._changed:
            if link is not None:
                replaced = self._spares.pop(peer_id, None)
                self._spares[peer_id] = _Spare(link, time.monotonic())
            self._making = None
            self._changed.notify_all()
        if replaced is not None and replaced.link.give_back():  # else whoever adopts it has it
            replaced.link.close()

    def _sweep(self) -> None:
        now_s = time.monotonic()
        with self._changed:
            gone = [
                spare
                for spare in self._spares.values()
                if spare.link.state is not LinkState.UP or (self._is_idle(spare, now_s) and spare.link.give_back())
            ]
            for spare in gone:
                del self._spares[spare.link.peer_id]
        for spare in gone:
            spare.link.retire()
            spare.link.close()

    def _is_idle(self, spare: _Spare, now_s: float) -> bool:
        return now_s - spare.named_at_s > self._config.spare_idle_s
