"""Live migrations of single sequences, to and from this worker. Engine thread only.

`core.departures` and `core.arrivals` decide. KV goes from the blocks of one worker straight into those of the other,
which are taken before: they are nobody else's whatever becomes of the sequence. Only workers that lead alone take part,
and none of whose layout changes: `give_up` ends what can be ended, and `idle` says when nothing is left that reads or
writes the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ballast.common.errors import BallastError
from ballast.common.ids import Epoch, WorkerId
from ballast.service.logs import get_logger
from services.worker.core.arrivals import Arrivals
from services.worker.core.batch import SequenceId
from services.worker.core.departures import Departures
from services.worker.core.events import (
    Adopted,
    HandedOver,
    HandOver,
    OrphanWithdrawn,
    PrefillLimited,
    RoomExpected,
)
from services.worker.core.migration_messages import (
    Adopt,
    DropOrphan,
    Expect,
    HandAway,
    Handed,
    Off,
    Offer,
    Release,
    Report,
    Say,
    SendSpan,
    SourceCommand,
    StopExpecting,
    Taken,
    TargetCommand,
    Want,
    Withdrawn,
)
from services.worker.links.traffic import TrafficClass
from services.worker.links.transfer import Outcome, Transfer
from services.worker.pipeline.events import HandedWithKv, MigrationOrdered, MigrationTold, SpanLanded, SpanSent
from services.worker.pipeline.exchange import BEHIND_EXCHANGE, kv_pieces
from services.worker.pipeline.ground import Ground
from services.worker.pipeline.wire import Topic, migration_to_bytes, span_to_bytes
from services.worker.policy.departure import choose_departure

if TYPE_CHECKING:
    import torch

    from services.worker.links.connection import Link

_SPAN_BYTES = 64 << 20  # sent at once while the sequence is decoding, unless a block of all the layers is more


@dataclass(slots=True)
class _Order:
    epoch: Epoch
    blocks_left: int
    until_s: float
    cause_id: str


class Migrations:
    def __init__(
        self,
        ground: Ground,
        layout_changes: Callable[[], bool],
    ) -> None:
        self._role = ground.role
        self._links = ground.links
        self._totals = ground.published.migrations
        self._published = ground.published
        self._core = core = ground.core
        self._ground = ground
        self._kv = kv = ground.memory.kv
        self._hub = ground.hub
        self._synchronise = ground.memory.pool.backend.synchronise  # waits for the device
        self._tell = ground.answers.tell
        self._layout_changes = layout_changes
        self._now = ground.now
        self._post = ground.post
        block_bytes = kv.shape.layer_count * kv.block_bytes
        self._departures = Departures(kv.shape.block_tokens, max(1, _SPAN_BYTES // block_bytes))
        self._arrivals = Arrivals(kv.shape.block_tokens, lambda blocks, new: core.why_no_room(blocks, new=new))
        self._orders: dict[WorkerId, _Order] = {}
        self._link: dict[WorkerId, Link] = {}  # over which something is open, or was last
        self._transfers: list[Transfer] = []  # that read the cache
        self._last_id = core.first_sequence_id
        self._told_room = (0, 0)
        self._told_limit_blocks: int | None = None

    # ------------------------------------------------------------ what happens

    def handle(self, event: MigrationOrdered | MigrationTold | HandedWithKv | SpanLanded | SpanSent) -> None:
        now_s = self._now()
        match event:
            case MigrationOrdered():
                self._ordered(event)
            case MigrationTold():
                self._told(event)
            case HandedWithKv():
                self._handed_with_kv(event)
            case SpanLanded(migration_id=migration_id, span=span):
                self._carry_out(self._arrivals.landed(now_s, migration_id, span))
            case SpanSent(migration_id=migration_id):
                self._carry_out(self._departures.sent(now_s, migration_id, _why_not_sent(event)))

    def poll(self) -> None:
        """Between two steps."""
        now_s = self._now()
        self._carry_out(self._arrivals.tick(now_s))
        if self._orders:
            self._begin(now_s)
        if len(self._departures):
            self._carry_out(self._departures.look(now_s, self._core.running_kv_tokens))

    def withdrawn(self, sequence_id: SequenceId) -> None:
        """Its client has gone, and it has been the target's since a moment ago."""
        self._carry_out(self._departures.withdraw(sequence_id))

    def peer_lost(self, epoch: Epoch, peer: WorkerId, why: str) -> None:
        if peer in self._link and self._link[peer].epoch == epoch:
            self._carry_out(self._departures.peer_lost(self._now(), peer, why))
            self._carry_out(self._arrivals.peer_lost(peer))

    def give_up(self, why: str) -> None:
        """The layout is about to change."""
        self._orders.clear()
        self._carry_out(self._departures.give_up_all(self._now(), why))
        self._carry_out(self._arrivals.give_up_all(why))
        for transfer in self._transfers:
            transfer.cancel()

    @property
    def idle(self) -> bool:
        """Nothing of the cache is read or written for a migration, and no block is kept for one."""
        return not len(self._arrivals) and all(transfer.done.done() for transfer in self._transfers)

    @property
    def at_rest(self) -> bool:
        return not (self._orders or len(self._departures) or len(self._arrivals))

    def check(self) -> None:
        self._departures.check()
        self._arrivals.check()

    # ------------------------------------------------------------ orders

    def _why_not(self) -> str:
        """Why this worker takes part in none; empty: it may."""
        if self._role.stages or not self._role.leads:
            return "it is a member of a group of several stages"
        return "its layout is being changed" if self._layout_changes() else ""

    def _ordered(self, order: MigrationOrdered) -> None:
        why = self._why_not()
        leaves = order.source == self._role.me
        peer = order.target if leaves else order.source
        if order.epoch < self._published.newest_epoch:
            why = f"epoch {order.epoch} is an old one"
        elif (len(self._departures) or len(self._arrivals)) and self._is_older(peer, order.epoch):
            why = f"some are on their way over the link of epoch {self._link[peer].epoch}"
        if why:
            get_logger().debug("no migration", peer=peer, why=why, cause_id=order.cause_id)
            return
        self._links.meet(peer, order.peer_address, order.epoch)
        if leaves:
            self._orders[peer] = _Order(order.epoch, order.block_budget, order.until_s, order.cause_id)

    def _is_older(self, peer: WorkerId, epoch: Epoch) -> bool:
        return peer in self._link and self._link[peer].epoch < epoch

    def _begin(self, now_s: float) -> None:
        for to, order in list(self._orders.items()):
            if now_s > order.until_s or self._why_not():
                del self._orders[to]
            elif (link := self._links.to(to, order.epoch)) is not None:
                self._link[to] = link
                self._begin_some(to, order, now_s)

    def _begin_some(self, to: WorkerId, order: _Order, now_s: float) -> None:
        while self._departures.may_begin:
            chosen = choose_departure(self._ground.lane.decoding(), order.blocks_left, self._departures.leaving)
            if chosen is None:
                return
            order.blocks_left -= chosen.block_count
            self._last_id += 1
            self._carry_out(self._departures.begin(now_s, self._last_id, chosen.sequence_id, to, chosen.token_count))

    # ------------------------------------------------------------ what the other side says

    def _told(self, event: MigrationTold) -> None:
        peer, message, now_s = event.peer, event.message, event.at_s
        match message:
            case Offer():
                self._link[peer] = event.link
                self._carry_out(self._arrivals.offered(now_s, peer, message, self._why_not()))
            case Handed() | Withdrawn():
                self._carry_out(self._arrivals.heard(now_s, peer, message))
            case Want() | Taken():
                self._carry_out(self._departures.heard(now_s, peer, message))
            case Off():
                self._carry_out(self._arrivals.heard(now_s, peer, message))
                self._carry_out(self._departures.heard(now_s, peer, message))

    # ------------------------------------------------------------ commands

    def _carry_out(self, commands: Sequence[SourceCommand | TargetCommand]) -> None:
        for command in commands:
            match command:
                case Say(to=to, message=message):
                    self._say(to, message_bytes=migration_to_bytes(message))
                case SendSpan():
                    self._send_span(command)
                case HandAway():
                    self._hand_away(command)
                case Report():
                    self._report(command)
                case Expect():
                    self._expect(command)
                case StopExpecting(migration_id=migration_id):
                    if self._hub.spans.forget(migration_id):
                        self._carry_out(self._arrivals.quiet(migration_id))
                case Release(sequence_id=sequence_id):
                    self._ground.book.release(sequence_id)
                case Adopt():
                    self._adopt(command)
                case DropOrphan(sequence_id=sequence_id):
                    self._tell(OrphanWithdrawn(self._now(), sequence_id))
        self._tell_room()

    def _tell_room(self) -> None:
        room = (self._arrivals.block_count, self._arrivals.running_count)
        if room != self._told_room:
            self._told_room = room
            self._tell(RoomExpected(self._now(), *room))
        now_s = self._now()
        limit_blocks = self._arrivals.prompt_limit_blocks(now_s)
        if limit_blocks != self._told_limit_blocks:
            self._told_limit_blocks = limit_blocks
            limit = None if limit_blocks is None else limit_blocks * self._kv.shape.block_tokens
            self._tell(PrefillLimited(now_s, limit))

    def _say(self, to: WorkerId, message_bytes: bytes) -> None:
        """A link that takes no message ends, and then this side hears `peer_lost`."""
        self._links.send_over(self._link[to], TrafficClass.CONTROL, Topic.MIGRATION, message_bytes)

    # ------------------------------------------------------------ as the source

    def _send_span(self, command: SendSpan) -> None:
        table = self._ground.book.table(command.sequence_id)
        span, layers = command.span, self._kv.shape.layer_count
        self._synchronise()
        pieces = kv_pieces(self._kv, table, span.first_block, span.last_block, 0, layers)
        transfer = self._transfer(command, pieces, BEHIND_EXCHANGE)
        if isinstance(transfer, str):
            self._carry_out(self._departures.give_up(self._now(), command.migration_id, transfer))
        else:
            self._transfers = [t for t in self._transfers if not t.done.done()] + [transfer]

    def _transfer(self, command: SendSpan | HandAway, pieces: Sequence[torch.Tensor], rank: int) -> Transfer | str:
        """Or why it cannot be sent."""
        link = self._link[command.to]
        meta = span_to_bytes(command.migration_id, command.span)
        try:
            transfer = link.transfer(TrafficClass.KV, pieces, topic=Topic.MIGRATION_KV, meta=meta, rank=rank)
        except BallastError as error:
            return str(error)
        migration_id = command.migration_id
        transfer.done.add_done_callback(lambda report: self._post(SpanSent(migration_id, report)))
        return transfer

    def _hand_away(self, command: HandAway) -> None:
        table, span, now_s = self._ground.book.table(command.sequence_id), command.span, self._now()
        link = self._link[command.to]
        if link.retired or not link.is_up:  # nothing is lost while the sequence is here
            self._carry_out(self._departures.give_up(now_s, command.migration_id, "its link has ended"))
            return
        layers = self._kv.shape.layer_count
        pieces = kv_pieces(self._kv, table, span.first_block, span.last_block, 0, layers)
        self._synchronise()
        in_message = sum(piece.nbytes for piece in pieces) < link.packed_below_bytes
        if not in_message:  # a copy, so that the blocks are free at once
            transfer = self._transfer(command, [piece.clone() for piece in pieces], 0)
            if isinstance(transfer, str):
                self._carry_out(self._departures.give_up(now_s, command.migration_id, transfer))
                return
        told = self._tell(HandOver(now_s, {command.sequence_id: command.to}, frees=True))
        for handed_over in (c for c in told if isinstance(c, HandedOver)):
            for _, (snapshot,) in handed_over.snapshots:
                handed = migration_to_bytes(Handed(command.migration_id, snapshot))
                if in_message:
                    self._say_with_kv(command, pieces, handed)
                else:
                    self._say(command.to, handed)

    def _say_with_kv(self, command: HandAway, pieces: Sequence[torch.Tensor], handed: bytes) -> None:
        """A transfer would wait for several threads on either side before it comes; a message is sent at once, and one
        thread takes it in. No activation waits behind it, as both workers lead alone. Its blocks are free, but no batch
        has got them yet. See `_say` for a link that does not take it: then the sequence is computed anew at its target.
        """
        link = self._link[command.to]
        meta, packed = span_to_bytes(command.migration_id, command.span), link.pack(pieces, handed)
        self._links.send_over(link, TrafficClass.CONTROL, Topic.MIGRATION_END, meta, packed, len(handed))

    def _report(self, report: Report) -> None:
        self._totals.count(report)
        log = get_logger().bind(sequence_id=report.sequence_id, to=report.to, rounds=report.rounds)
        if not report.moved:
            log.info("not migrated", why=report.why, took_s=round(report.took_s, 4))
            return
        log.info(
            "migrated",
            downtime_s=round(report.downtime_s, 4),
            took_s=round(report.took_s, 4),
            copied_blocks=report.copied_blocks,
            last_blocks=report.last_blocks,
            with_kv=report.with_kv,
            why=report.why,
        )

    # ------------------------------------------------------------ as the target

    def _expect(self, command: Expect) -> None:
        block_tokens, layers, kv = self._kv.shape.block_tokens, self._kv.shape.layer_count, self._kv
        table = self._ground.book.hold(command.sequence_id, command.last_block * block_tokens)

        def pieces(first_block: int, last_block: int) -> list[torch.Tensor]:
            return kv_pieces(kv, table, first_block, last_block, 0, layers)

        self._hub.spans.put(command.migration_id, command.source, command.first_block, command.last_block, pieces)

    def _handed_with_kv(self, event: HandedWithKv) -> None:
        """Without pieces nobody waits for the KV, and the sequence is taken without."""
        self._carry_out(self._arrivals.heard(event.at_s, event.peer, event.message))
        if event.pieces is not None:
            event.link.unpack(event.kv, event.pieces)
            self._carry_out(self._arrivals.landed(event.at_s, event.message.migration_id, event.span))

    def _adopt(self, command: Adopt) -> None:
        snapshot, now_s = command.snapshot, self._now()
        if self._role.stages or not self._role.leads:
            return  # it has become a member of a group since it gave up: the dispatcher has the request replayed
        self._tell_room()
        self._ground.book.trim(snapshot.sequence_id, command.kv_tokens)
        lost = frozenset[SequenceId]() if command.kv_tokens else frozenset({snapshot.sequence_id})
        self._tell(Adopted(now_s, (snapshot,), lost_ids=lost))


def _why_not_sent(event: SpanSent) -> str:
    error = event.report.exception()
    if error is not None:
        return str(error)
    report = event.report.result()
    return "" if report.outcome is Outcome.DELIVERED else f"{report.outcome.value}: {report.why}"
