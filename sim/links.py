"""Links between members in virtual time, in place of the sockets and threads of `services.worker.links`.

Messages of one direction arrive in order; a transfer is announced, takes the network's time, and then the contents of
its pieces are copied. Epochs are joined and left by the real code.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ballast.common.errors import DeadlineExceeded, InvariantViolation, Overloaded, StaleEpoch, Unavailable
from ballast.common.ids import Epoch, WorkerId
from services.worker.core.batch import Batch, StepResult
from services.worker.core.turns import MemberEvent
from services.worker.emulation.phantom import read_all, write_all
from services.worker.links.config import TransportConfig
from services.worker.links.connection import Connection, Link
from services.worker.links.frame_kinds import FrameKind
from services.worker.links.handshake import Hello, Terms
from services.worker.links.pace import StagePace
from services.worker.links.ports import LinkEnding, LinkState, Message
from services.worker.links.traffic import TrafficClass
from services.worker.links.transfer import Opening, Refusal, Transfer, TransferOutcome, TransferReport
from services.worker.pipeline.events import BatchArrived, ResultArrived
from services.worker.pipeline.hub import Hub
from services.worker.pipeline.links import Links
from sim.clock import Clock
from sim.flight import BATCH_BYTES, Flight
from sim.lines import Lines
from sim.network import Bulk, Network, Sending

if TYPE_CHECKING:
    import torch

_WORD_BYTES = 64
SILENCE_S = TransportConfig().silence_timeout_s
_CONTROL_BYTES = 1024  # size of a message without its metadata
_BULK = {TrafficClass.KV: Bulk.KV, TrafficClass.CHECKPOINT: Bulk.PARAMETERS, TrafficClass.PARAMETERS: Bulk.PARAMETERS}
_TERMS = Terms(1, "simulation", 1 << 60, 1 << 60, 1 << 60, 1 << 60)


class Wires:
    """State shared by all planes of a simulation."""

    def __init__(self, clock: Clock, network: Network, lines: Lines, *, latency_s: float, connect_s: float) -> None:
        self.clock = clock
        self.lines = lines
        self.network = network
        self.latency_s = latency_s
        self.connect_s = connect_s
        self.planes: dict[str, SimPlane] = {}
        self.max_transfers = TransportConfig().max_transfers  # limit on unfinished transfers in each direction


@dataclass(slots=True)
class _WantedKv:
    epoch: int
    link: Link | None
    done: Future[Link]


class SimPlane:
    """All links of a worker, in place of `services.worker.links.plane.DataPlane`."""

    def __init__(self, me: WorkerId, wires: Wires, hub: Hub, afterwards: Callable[[Callable[[], None]], None]) -> None:
        """`afterwards` calls a function at the end of the engine's current activity, or at once if it is idle."""
        self.me = me
        self.wires = wires
        self.hub = hub
        self.pace = StagePace()
        self.afterwards = afterwards
        self._connections: dict[str, SimConnection] = {}
        self._wanted: dict[str, list[_WantedKv]] = {}  # by peer
        self._oldest_epoch = 0
        self._down = False
        self._stopped: list[Callable[[], None]] | None = None  # events to be handled when the process continues
        wires.planes[me] = self

    # ------------------------------------------------------------ the process is stopped

    def stop(self) -> None:
        """Stop handling events. Peers end their connections after a period of silence."""
        stopped = self._stopped = []
        self.wires.clock.after(SILENCE_S, f"{self.me} is silent".encode(), lambda: self._silent(stopped))

    def _silent(self, stopped: list[Callable[[], None]]) -> None:
        if self._stopped is stopped:
            for _, connection in sorted(self._connections.items()):
                connection.fall_silent()

    def go_on(self) -> None:
        stopped, self._stopped = self._stopped or [], None
        for act in stopped:
            act()

    def take_in(self, act: Callable[[], None]) -> None:
        """Execute `act` in this process; if the process is stopped, once it continues."""
        if self._stopped is None:
            act()
        else:
            self._stopped.append(act)

    # ------------------------------------------------------------ the line to another process

    def drop_silent(self, peer_id: str) -> None:
        """End the connection because the peer was silent for too long."""
        connection = self._connections.get(peer_id)
        if connection is not None and connection.is_up:
            self.take_in(lambda: connection.give_up("nothing has come for long"))

    def reset(self, peer_id: str) -> None:
        """End the connection on both sides."""
        connection = self._connections.get(peer_id)
        if connection is not None and connection.is_up:
            connection.reset()

    def try_again(self, peer_id: str) -> None:
        """Retry after the line was restored."""
        if self._wanted.get(peer_id):
            self._meet(peer_id)

    # ------------------------------------------------------------ interface of DataPlane

    def link(self, peer_id: str, epoch: int) -> Link | None:
        connection = self._connections.get(peer_id)
        return None if connection is None else connection.shared(epoch)

    def warm(
        self, peer_id: str, address: str, epoch: int, timeout_s: float | None = None, incarnation: int = 0
    ) -> Future[Link]:
        done: Future[Link] = Future()
        if epoch < self._oldest_epoch:
            done.set_exception(StaleEpoch("link", epoch, self._oldest_epoch))
            return done
        wanted = _WantedKv(epoch, None, done)
        self._wanted.setdefault(peer_id, []).append(wanted)
        self.wires.clock.after(timeout_s or 10.0, f"{self.me} waits".encode(), lambda: self._overdue(peer_id, wanted))
        connection = self._connections.get(peer_id)
        if connection is not None and connection.is_up:
            self._join(connection)
        elif self.me in (w := self.wires.planes[peer_id])._wanted and not w._down:
            self.wires.clock.after(self.wires.connect_s, f"{self.me} meets".encode(), lambda: self._meet(peer_id))
        return done

    def retire(self, before_epoch: int, peers: Collection[str] | None = None) -> None:
        if peers is None:
            self._oldest_epoch = max(self._oldest_epoch, before_epoch)
        for peer, connection in sorted(self._connections.items()):
            for link in connection.links() if peers is None or peer in peers else ():
                if link.epoch < before_epoch:
                    link.retire()

    def close(self, timeout_s: float | None = None) -> None:
        for _, connection in sorted(self._connections.items()):
            connection.close()

    # ------------------------------------------------------------ connecting

    def _meet(self, peer_id: str) -> None:
        other = self.wires.planes[peer_id]
        there = self._connections.get(peer_id)
        if self._down or other._down or (there is not None and there.is_up):
            return
        if not self._wanted.get(peer_id) or not other._wanted.get(self.me):
            return  # one side has timed out
        lines = self.wires.lines
        if lines.is_cut(self.me, peer_id) or lines.is_cut(peer_id, self.me):
            return
        mine, theirs = SimConnection(self, other), SimConnection(other, self)
        mine.other, theirs.other = theirs, mine
        self._connections[peer_id], other._connections[self.me] = mine, theirs
        self._join(mine)
        other._join(theirs)

    def _join(self, connection: SimConnection) -> None:
        for wanted in self._wanted.get(connection.peer_id, ()):
            if wanted.link is None:
                wanted.link = connection.begin_join(wanted.epoch)
        self.settle(connection)

    def settle(self, connection: SimConnection) -> None:
        """Resolve the futures of links whose epochs both ends have joined. Call this when the peer has joined epochs,
        or the connection has ended.
        """
        left: list[_WantedKv] = []
        met: list[_WantedKv] = []
        for wanted in self._wanted.pop(connection.peer_id, ()):
            (met if wanted.link is not None and wanted.link.met else left).append(wanted)
        if left:
            self._wanted[connection.peer_id] = left
        for wanted in met:
            assert wanted.link is not None
            wanted.done.set_result(wanted.link)

    def _overdue(self, peer_id: str, wanted: _WantedKv) -> None:
        waiting = self._wanted.get(peer_id, [])
        if wanted not in waiting:
            return
        waiting.remove(wanted)
        if not waiting:
            del self._wanted[peer_id]
        if wanted.link is not None:
            wanted.link.retire()
        wanted.done.set_exception(DeadlineExceeded(f"link for epoch {wanted.epoch}: {peer_id} did not come"))

    # ------------------------------------------------------------ the end of the process

    def crash(self) -> None:
        """End the process: the peers' connections break."""
        self._down = True
        for _, connection in sorted(self._connections.items()):
            connection.vanish()


@dataclass(slots=True)
class _OutgoingFrame:
    opening: Opening
    epoch: int
    pieces: Sequence[torch.Tensor]
    done: Future[TransferReport]
    began_s: float
    sending: Sending | None = None


class SimConnection(Connection):
    """One end of a connection."""

    other: SimConnection

    def __init__(self, plane: SimPlane, peer: SimPlane) -> None:
        super().__init__(Hello(peer.me, 0, plane.me, "all", _TERMS), plane.hub)
        self._plane = plane
        self._me = plane.me
        self._wires = plane.wires
        self._numbers = itertools.count(1)
        self._outgoing: dict[int, _OutgoingFrame] = {}
        self._incoming: dict[int, tuple[Link, Opening, Sequence[torch.Tensor]]] = {}
        self._label = f"link {plane.me}>{peer.me}".encode()

    def shared(self, epoch: int) -> Link | None:
        """The link of an epoch joined by both ends."""
        link = self._links.get(epoch)
        return link if link is not None and link.met and self.is_up else None

    @property
    def packed_below_bytes(self) -> int:
        return 0

    # ------------------------------------------------------------ messages

    def _say(self, size_bytes: int, hear: Callable[[SimConnection], None]) -> None:
        """Send a message: `hear` is called with the other end, unless the connection has ended by then."""

        def arrive() -> None:
            self._bring(take)

        def take() -> None:
            if self.other.is_up:
                hear(self.other)

        def leave() -> None:
            if self.is_up:
                self._wires.network.send(self._me, self.peer_id, size_bytes, self._label, arrive)

        self._plane.afterwards(leave)

    def _bring(self, act: Callable[[], None]) -> None:
        """Deliver a message at the other end now."""
        lines, plane = self._wires.lines, self.other._plane
        if not (lines.troubled and lines.holds(self._me, self.peer_id, lambda: plane.take_in(act))):
            plane.take_in(act)

    def tell(self, kind: FrameKind, epoch: int) -> None:
        def hear(end: SimConnection) -> None:
            (end.peer_joined if kind is FrameKind.JOIN else end.peer_left)(epoch)
            end._plane.settle(end)

        self._say(_WORD_BYTES, hear)

    def send(
        self,
        epoch: int,
        traffic: TrafficClass,
        topic: int,
        meta: bytes,
        tensor: torch.Tensor | None,
        stream: int,
        timeout_s: float,
    ) -> Future[None]:
        self._refuse_ended()
        what = cast("object", tensor)
        if isinstance(what, _LongFrameMeta):
            meta, tensor = what.data, None
        message = Message(traffic, topic, stream, meta, tensor)

        def hear(end: SimConnection) -> None:
            if (link := end.link_of(epoch)) is not None:
                end._receiver.on_message(link, message)

        self._say(_CONTROL_BYTES + len(meta), hear)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def carry(self, epoch: int, size_bytes: int, event: MemberEvent) -> None:
        """Deliver a message without serialising it."""

        def hear(end: SimConnection) -> None:
            if epoch in end._links:
                end._plane.hub.post(event)

        self._say(size_bytes, hear)

    def as_tensor(self, data: bytes) -> torch.Tensor:
        return cast("torch.Tensor", _LongFrameMeta(data))

    def pack(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        raise InvariantViolation("nothing goes along with a message over a simulated link")

    def unpack(self, packed: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
        raise InvariantViolation("nothing comes along with a message over a simulated link")

    # ------------------------------------------------------------ transfers: out

    def transfer(
        self,
        epoch: int,
        traffic: TrafficClass,
        pieces: Sequence[torch.Tensor],
        topic: int,
        meta: bytes,
        stream: int,
        rank: int,
    ) -> Transfer:
        self._refuse_ended()
        if len(self._outgoing) >= self._wires.max_transfers:
            raise Overloaded(f"{len(self._outgoing)} transfers to {self.peer_id} are unfinished", 0.0)
        number, size_bytes = next(self._numbers), sum(piece.nbytes for piece in pieces)
        opening = Opening(number, traffic, topic, stream, size_bytes, meta)
        done: Future[TransferReport] = Future()
        self._outgoing[number] = _OutgoingFrame(opening, epoch, pieces, done, self._wires.clock.now_s)
        self._plane.afterwards(lambda: self._begin(number, rank))
        return Transfer(number, size_bytes, self, done)

    def _begin(self, number: int, rank: int) -> None:
        outgoing = self._outgoing.get(number)
        if outgoing is None:
            return
        wires, opening = self._wires, outgoing.opening
        wires.clock.after(
            wires.latency_s,
            self._label,
            lambda: self._bring(lambda: self.other._opened(outgoing.epoch, opening)),
        )
        outgoing.sending = wires.network.transfer(
            self._me, self.peer_id, opening.total_bytes, _BULK[opening.traffic], lambda: self._sent(number), rank
        )

    def _sent(self, number: int) -> None:
        """Handle the arrival of a transfer's last byte."""
        if number in self._outgoing:
            self._bring(lambda: self._taken(number))

    def _taken(self, number: int) -> None:
        """Copy a transfer's contents to the receiver, and report the outcome to the sender after the latency."""
        if (outgoing := self._outgoing.get(number)) is not None and self.other.is_up:
            outcome, why = self.other._arrived(number, outgoing.pieces)
            self._after_latency(lambda: self.other._bring(lambda: self._settle(number, outcome, why)))

    def _settle(self, number: int, outcome: TransferOutcome, why: str = "") -> None:
        if (outgoing := self._outgoing.pop(number, None)) is not None:
            sent = outgoing.opening.total_bytes if outcome is TransferOutcome.DELIVERED else 0
            took_s = self._wires.clock.now_s - outgoing.began_s
            outgoing.done.set_result(TransferReport(outcome, sent, took_s, why))

    def cancel(self, number: int) -> bool:
        outgoing = self._outgoing.get(number)
        if outgoing is None:
            return False
        if outgoing.sending is not None:
            self._wires.network.cancel(outgoing.sending)
        self._settle(number, TransferOutcome.CANCELLED)
        self._say(_WORD_BYTES, lambda end: end._end_incoming(number, TransferOutcome.CANCELLED))
        return True

    def reprioritise(self, number: int, traffic: TrafficClass, rank: int) -> bool:
        return False

    def end_transfers(self, epoch: int, why: str) -> None:
        for number in [n for n, outgoing in self._outgoing.items() if outgoing.epoch == epoch]:
            self._fail(number, why)
            self._say(_WORD_BYTES, lambda end, n=number: end._end_incoming(n, TransferOutcome.CANCELLED))

    def _fail(self, number: int, why: str) -> None:
        outgoing = self._outgoing.pop(number)
        if outgoing.sending is not None:
            self._wires.network.cancel(outgoing.sending)
        outgoing.done.set_exception(Unavailable(self.peer_id, why))

    # ------------------------------------------------------------ transfers: in

    def _opened(self, epoch: int, opening: Opening) -> None:
        if not self.is_up:
            return
        link = self.link_of(epoch)
        pieces = Refusal("its epoch is over") if link is None else self._receiver.on_opening(link, opening)
        if link is not None and not isinstance(pieces, Refusal):
            if (size_bytes := sum(piece.nbytes for piece in pieces)) != opening.total_bytes:
                raise InvariantViolation(f"{size_bytes} bytes are expected, {opening.total_bytes} come")
            self._incoming[opening.transfer] = (link, opening, pieces)

    def _arrived(self, number: int, source: Sequence[torch.Tensor]) -> tuple[TransferOutcome, str]:
        if number not in self._incoming:
            return TransferOutcome.REFUSED, "nobody waits for this"
        write_all(self._incoming[number][2], read_all(source))
        self._end_incoming(number, TransferOutcome.DELIVERED)
        return TransferOutcome.DELIVERED, ""

    def _end_incoming(self, number: int, outcome: TransferOutcome) -> None:
        if (incoming := self._incoming.pop(number, None)) is not None:
            self._receiver.on_transfer_end(incoming[0], incoming[1], outcome)

    # ------------------------------------------------------------ the end

    def give_up(self, why: str) -> None:
        self._end_both(LinkState.BROKEN, why)

    def begin_close(self) -> None:
        self._end_both(LinkState.CLOSED, "closed")

    def close(self, timeout_s: float | None = None) -> None:
        self.begin_close()

    def vanish(self) -> None:
        """End the connection because this end's process has ended."""
        self._state = LinkState.BROKEN
        self._end_other(LinkState.BROKEN, "the connection ended")

    def reset(self) -> None:
        why = "the connection was reset"
        for end in (self, self.other):
            end._plane.take_in(lambda end=end: end._finish(LinkState.BROKEN, why))

    def fall_silent(self) -> None:
        """End the connection at the peer at once, and here when the process continues."""
        why = "nothing has come for long"
        self.other._finish(LinkState.BROKEN, why)
        self._plane.take_in(lambda: self._finish(LinkState.BROKEN, why))

    def wait_ended(self, timeout_s: float) -> bool:
        return not self.is_up

    def check(self) -> None:
        """No-op: transfers wait in the network's single queue."""

    def _refuse_ended(self) -> None:
        if not self.is_up:
            raise Unavailable(self.peer_id, "the link has ended")

    def _after_latency(self, act: Callable[[], None]) -> None:
        self._wires.clock.after(self._wires.latency_s, self._label, act)

    def _end_both(self, how: LinkState, why: str) -> None:
        self._end_other(how, why)
        self._finish(how, why)

    def _end_other(self, how: LinkState, why: str) -> None:
        self._after_latency(lambda: self._bring(lambda: self.other._finish(how, why)))

    def _finish(self, how: LinkState, why: str) -> None:
        if not self.is_up:
            return
        self._state = how
        links = self._take_links()
        for number in list(self._outgoing):
            self._fail(number, why)
        for link in links:
            self._receiver.on_link_end(link, LinkEnding(how, why))
        for number in list(self._incoming):
            self._end_incoming(number, TransferOutcome.BROKEN)


class _LongFrameMeta:
    """Stand-in for the byte tensor of a long message."""

    def __init__(self, data: bytes) -> None:
        self.data = data


class SimLinks(Links):
    """Links of a group. Batches and results, the most frequent messages, are not serialised."""

    def pass_batch(self, batch: Batch, hidden_TD: torch.Tensor | None) -> None:
        flight = cast("Flight | None", hidden_TD)
        link, epoch = self.to(self._role.next_stage), self._role.epoch
        if link is not None:
            size_bytes = BATCH_BYTES if flight is None else flight.size_bytes
            cast(SimConnection, link.connection).carry(epoch, size_bytes, BatchArrived(epoch, batch, hidden_TD))

    def send_result(self, result: StepResult | tuple[int, str]) -> None:
        link, epoch = self.to(self._role.leader), self._role.epoch
        if link is not None:
            count = len(result.token_ids) if isinstance(result, StepResult) else 1
            told = ResultArrived(Epoch(epoch), result)
            cast(SimConnection, link.connection).carry(epoch, BATCH_BYTES * count, told)
