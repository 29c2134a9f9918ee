"""This worker's stage in live migrations: it gives the KV of its layers, and takes it. Engine thread only.

Its leader decides (`core.departures`, `core.arrivals`), and says so in order with batches; a worker alone is its own
leader. KV goes from the blocks of one stage straight into those of another, which are taken before: they are nobody
else's whatever becomes of the sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ballast.common.errors import BallastError
from ballast.common.ids import Epoch, WorkerId
from ballast.service.logs import get_logger
from services.worker.core.batch import SequenceId
from services.worker.core.migration_messages import ForStages, Give, Keep, Landed, MigrationId, Ready, Stop, Take
from services.worker.core.spans import Piece, Span, Stage, hops
from services.worker.links.traffic import TrafficClass
from services.worker.links.transfer import Transfer
from services.worker.pipeline.destinations import Key, key_of
from services.worker.pipeline.events import SpanLanded, SpanSent
from services.worker.pipeline.exchange import BEHIND_EXCHANGE, kv_pieces
from services.worker.pipeline.ground import Ground
from services.worker.pipeline.wire import Topic, pieces_to_bytes

if TYPE_CHECKING:
    import torch

    from services.worker.links.connection import Link


@dataclass(slots=True)
class _Coming:
    """What a `Take` waits for."""

    epoch: Epoch
    keys: set[Key]  # what has neither landed nor been forgotten
    span: Span | None = None
    failed: bool = False


class StageKv:
    def __init__(self, ground: Ground, why_not: Callable[[], str], answer: Callable[[Ready | Landed], None]) -> None:
        """`why_not`: why this worker takes no KV now; empty: it may. `answer`: to the leader."""
        self._ground = ground
        self._kv = ground.memory.kv
        self._hub = ground.hub
        self._links = ground.links
        self._post = ground.post
        self._synchronise = ground.memory.pool.backend.synchronise  # waits for the device
        self._why_not = why_not
        self._answer = answer
        self._coming: dict[MigrationId, _Coming] = {}
        self._held: set[SequenceId] = set()  # that hold blocks here and are not this group's yet
        self._transfers: list[Transfer] = []  # that read the cache

    @property
    def idle(self) -> bool:
        """Nothing of the cache is read or written, and no block is kept."""
        return not self._held and all(transfer.done.done() for transfer in self._transfers)

    @property
    def stage(self) -> Stage:
        layers = self._ground.role.layers
        return Stage(self._ground.me, layers.start, layers.stop)

    def order(self, message: ForStages) -> str:
        """What the leader says. Returns why a span cannot be given."""
        match message:
            case Give():
                return self._give(message)
            case Take():
                self._take(message)
            case Stop(migration_id=migration_id):
                if (coming := self._coming.get(migration_id)) is not None:
                    self._fail(migration_id, coming)
            case Keep(sequence_id=sequence_id, token_count=token_count):
                if sequence_id in self._held:
                    self._held.discard(sequence_id)
                    self._ground.book.trim(sequence_id, token_count)
        return ""

    def peer_lost(self, epoch: Epoch, peer: WorkerId) -> None:
        """What is being written is still told of."""
        for migration_id, coming in list(self._coming.items()):
            if coming.epoch == epoch and any(giver == peer for _, _, giver, _ in coming.keys):
                self._fail(migration_id, coming)

    def give_up(self, *, coming: bool) -> None:
        """The layout is about to change. With `coming`, what comes is not let in any more, and the leader is told; it
        says when the blocks are free.
        """
        for migration_id, each in list(self._coming.items()) if coming else ():
            self._fail(migration_id, each)
        for transfer in self._transfers:
            transfer.cancel()

    def abandon(self) -> None:
        """The group is lost, and all blocks are somebody else's."""
        for coming in self._coming.values():
            for key in coming.keys:
                self._hub.kv.forget(key)
        self._coming.clear()
        self._held.clear()
        for transfer in self._transfers:
            transfer.cancel()

    # ------------------------------------------------------------ giving

    def _give(self, give: Give) -> str:
        span, table = give.span, self._ground.book.table(give.sequence_id)
        if len(table) < span.last_block:
            return "it has ended, or has given way"
        if not span.last and (why := self._why_not()):
            return why
        self._synchronise()
        for _, taker, first, last in hops((self.stage,), give.takers):
            link = self._links.to(taker, give.epoch)
            if link is None or link.retired or not link.is_up:
                return f"there is no link to {taker}"
            pieces = kv_pieces(self._kv, table, span.first_block, span.last_block, first, last)
            name = Piece(give.migration_id, give.sequence_id, first, last, span)
            if span.last and sum(piece.nbytes for piece in pieces) < link.packed_below_bytes:
                self._say_with_kv(link, name, pieces)
            elif why := self._transfer(link, name, pieces):
                return why
        return ""

    def _say_with_kv(self, link: Link, name: Piece, pieces: list[torch.Tensor]) -> None:
        """A transfer would wait for several threads on either side before it comes; a message is sent at once, and one
        thread takes it in. No activation waits behind it: those go over links of the group. A link that does not take
        it ends.
        """
        meta, packed = pieces_to_bytes((name,)), link.pack(pieces) if pieces else None
        self._links.send_over(link, TrafficClass.CONTROL, Topic.MIGRATION_KV, meta, packed)

    def _transfer(self, link: Link, name: Piece, pieces: list[torch.Tensor]) -> str:
        """Returns why it cannot be sent. The last span is copied: its blocks are free at once."""
        rank = 0 if name.span.last else BEHIND_EXCHANGE
        sent = [piece.clone() for piece in pieces] if name.span.last else pieces
        meta, migration_id = pieces_to_bytes((name,)), name.move
        try:
            transfer = link.transfer(TrafficClass.KV, sent, topic=Topic.MIGRATION_KV, meta=meta, rank=rank)
        except BallastError as error:
            return str(error)
        if not name.span.last:
            self._transfers = [t for t in self._transfers if not t.done.done()] + [transfer]
        transfer.done.add_done_callback(lambda report: self._post(SpanSent(migration_id, report)))
        return ""

    # ------------------------------------------------------------ taking

    def _take(self, take: Take) -> None:
        migration_id, sequence_id, book, kv = take.migration_id, take.sequence_id, self._ground.book, self._kv
        mine = hops(take.givers, (self.stage,))
        room = take.last_block - len(book.table(sequence_id)) <= book.free_count
        linked = all(self._links.to(giver, take.epoch) is not None for giver, *_ in mine)
        if (why := self._why_not()) or not (room and linked):
            get_logger().debug("no migration", why=why or ("no link" if room else "no room"), sequence_id=sequence_id)
            self._answer(Landed(migration_id, None))
            return
        self._held.add(sequence_id)
        table = book.hold(sequence_id, take.last_block * kv.shape.block_tokens)
        coming = self._coming[migration_id] = _Coming(take.epoch, set())
        for giver, _, first, last in mine:

            def pieces(first_block: int, last_block: int, first: int = first, last: int = last) -> list[torch.Tensor]:
                return kv_pieces(kv, table, first_block, last_block, first, last)

            key = (migration_id, sequence_id, giver, first)
            coming.keys.add(key)
            self._hub.kv.put(key, pieces, take.first_block, take.last_block)
        self._answer(Ready(migration_id))

    def landed(self, event: SpanLanded) -> None:
        piece, coming = event.piece, self._coming.get(event.piece.move)
        key = key_of(piece, event.giver)
        if coming is None or key not in coming.keys:  # of a group that was lost meanwhile
            return
        coming.keys.discard(key)
        if event.delivered and event.unpack is not None:
            event.unpack()
        if event.delivered and coming.span in (None, piece.span):
            coming.span = piece.span
            self._end(piece.move, coming)
        else:
            self._fail(piece.move, coming)

    def _fail(self, migration_id: MigrationId, coming: _Coming) -> None:
        """Of what is being written the hub will tell."""
        coming.failed = True
        coming.keys = {key for key in coming.keys if not self._hub.kv.forget(key)}
        self._end(migration_id, coming)

    def _end(self, migration_id: MigrationId, coming: _Coming) -> None:
        if not coming.keys:
            del self._coming[migration_id]
            self._answer(Landed(migration_id, None if coming.failed else coming.span))
