"""Live migrations of single sequences, to and from this worker's group. Used by the engine thread only.

`core.departures` and `core.arrivals` decide, on the leaders of both groups; each stage sends and receives its own
layers (`mover`). No migration runs while a layout changes: `give_up` cancels all that can still be cancelled, and
`idle` is True when no migration reads or writes the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ballast.common.ids import Epoch, WorkerId
from ballast.service.logs import get_logger
from services.worker.core import events as w
from services.worker.core import migration_messages as m
from services.worker.core.arrivals import KvArrivals
from services.worker.core.batch import SequenceId
from services.worker.core.departures import Departures
from services.worker.core.spans import StageLayers, stages_of
from services.worker.links.traffic import TrafficClass
from services.worker.pipeline.context import MemberContext
from services.worker.pipeline.events import KvLeft, MigrationOrdered, MigrationTold
from services.worker.pipeline.mover import KvMover
from services.worker.pipeline.wire import Topic, migration_to_bytes
from services.worker.policy.departure import choose_departure

if TYPE_CHECKING:
    from services.worker.links.connection import Link

_SPAN_BYTES = 64 << 20  # maximum span sent while the sequence decodes, but at least one block of all layers


@dataclass(slots=True)
class _MigrationOrder:
    epoch: Epoch
    blocks_left: int
    until_s: float
    cause_id: str
    longest_first: bool


class Migrations:
    def __init__(
        self,
        context: MemberContext,
        mover: KvMover,
        layout_changes: Callable[[], bool],
    ) -> None:
        self._role = context.role
        self._links = context.links
        self._totals = context.published.migrations
        self._published = context.published
        self._core = context.core
        self._context = context
        shape = context.memory.kv.shape
        self._block_tokens = shape.block_tokens
        self._tell = context.answers.tell
        self._layout_changes = layout_changes
        self._now = context.now
        block_bytes = shape.layer_count * context.memory.kv.block_bytes
        self._departures = Departures(shape.block_tokens, max(1, _SPAN_BYTES // block_bytes))
        self._arrivals = KvArrivals(shape.block_tokens, self._why_no_room)
        self._mover = mover
        self._orders: dict[WorkerId, _MigrationOrder] = {}
        self._epoch = Epoch(0)  # epoch of the links between groups
        self._link: dict[WorkerId, Link] = {}  # links to leaders of other groups with open or recent migrations
        self._last_id = self._core.first_sequence_id
        self._told_room = (0, 0)
        self._told_limit_blocks: int | None = None

    # ------------------------------------------------------------ events

    def handle(self, event: MigrationOrdered | MigrationTold | KvLeft) -> None:
        match event:
            case MigrationOrdered():
                self._ordered(event)
            case MigrationTold():
                self._told(event)
            case KvLeft(send=send):
                self._sent(send.block_ranges[0].piece.move, event.why_not)

    def poll(self) -> None:
        """Advance migrations; called between two steps."""
        now_s = self._now()
        self._carry_out(self._arrivals.tick(now_s))
        if self._orders:
            self._begin(now_s)
        if len(self._departures):
            self._carry_out(self._departures.look(now_s, self._core.running_kv_tokens, self._core.in_flight))

    def peer_lost(self, epoch: Epoch, peer: WorkerId, why: str) -> None:
        if peer in self._link and self._link[peer].epoch == epoch:
            self._carry_out(self._departures.peer_lost(self._now(), peer, why))
            self._carry_out(self._arrivals.peer_lost(peer))
        self.answer(self._mover.core.peer_lost(epoch, peer))

    def give_up(self, why: str) -> None:
        """Cancel migrations, because the layout is about to change. Sequences already handed over to this leader are
        still received.
        """
        self._orders.clear()
        self._carry_out(self._departures.give_up_all(self._now(), why))
        self._carry_out(self._arrivals.give_up_all(why))
        self.answer(self._mover.give_up(coming=not self._role.leads))

    def abandon(self, why: str) -> None:
        """Drop all migrations, because the group and its sequences are lost. Sequences already handed over belong to
        their new leaders.
        """
        self._orders.clear()
        self._carry_out(self._departures.give_up_all(self._now(), why))
        self._carry_out(self._arrivals.abandon(why))

    @property
    def idle(self) -> bool:
        """True if no migration reads or writes the cache, or holds a block."""
        return not len(self._arrivals) and self._mover.idle

    @property
    def at_rest(self) -> bool:
        return not (self._orders or len(self._departures) or len(self._arrivals))

    def check(self) -> None:
        self._departures.check()
        self._arrivals.check()

    def _why_no_room(self, block_count: int, new: bool) -> str:
        """Return why blocks cannot be reserved; empty if they can. Evicts retained prefixes first, and notifies the
        stages of that before blocks are reserved.
        """
        self._tell(w.RoomWanted(self._now(), block_count))
        return self._core.why_no_room(block_count, new=new)

    # ------------------------------------------------------------ orders

    @property
    def _stages(self) -> tuple[StageLayers, ...]:
        """Stages of this worker's group."""
        return stages_of(self._role.stages) or (self._mover.stage,)

    def _why_not(self) -> str:
        """Return why this worker cannot take part in migrations now; empty if it can."""
        return "its layout is being changed" if self._layout_changes() else ""

    def _ordered(self, order: MigrationOrdered) -> None:
        why = self._why_not()
        if order.epoch < self._published.newest_epoch:
            why = f"epoch {order.epoch} is outdated"
        elif order.epoch != self._epoch and not (self.at_rest and self._mover.idle):
            why = f"migrations of epoch {self._epoch} are under way"
        elif self._role.leader not in (order.source, order.target):
            why = f"the leader is {self._role.leader}"
        if why:
            get_logger().debug("no migration", why=why, cause_id=order.cause_id)
            return
        self._epoch = order.epoch
        for peer, address in order.peers.items():
            self._links.meet(peer, address, order.epoch)
        if order.source == self._role.me:
            self._orders[order.target] = _MigrationOrder(
                order.epoch, order.block_budget, order.until_s, order.cause_id, order.longest_first
            )

    def _begin(self, now_s: float) -> None:
        for to, order in list(self._orders.items()):
            if now_s > order.until_s or self._why_not() or not self._role.leads:
                del self._orders[to]
            elif (link := self._links.to(to, order.epoch)) is not None:
                self._link[to] = link
                self._begin_some(to, order, now_s)

    def _begin_some(self, to: WorkerId, order: _MigrationOrder, now_s: float) -> None:
        while self._departures.may_begin:
            decoding = self._context.group_scheduler.decoding()
            chosen = choose_departure(
                decoding, order.blocks_left, self._departures.leaving, longest=order.longest_first
            )
            if chosen is None:
                return
            order.blocks_left -= chosen.block_count
            self._last_id += 1
            self._carry_out(self._departures.begin(now_s, self._last_id, to, order.epoch, chosen, self._stages))

    # ------------------------------------------------------------ messages

    def _told(self, event: MigrationTold) -> None:
        peer, message, link, now_s = event.peer, event.message, event.link, event.at_s
        match message:
            case m.Give() | m.Take() | m.Stop() | m.Keep() | m.Ready() | m.Landed():
                if link.epoch == self._role.epoch and self._role.has_stage(peer):
                    self._on_group_message(peer, message, now_s)
                else:
                    self._published.stale_total += 1
            case m.Off() if self._role.has_stage(peer):
                self._sent(message.migration_id, message.why)
            case m.Offer():
                self._link[peer] = link
                why = self._why_not() or ("" if self._role.leads else f"the leader is {self._role.leader}")
                if self._context.book.table(message.sequence_id):  # its blocks from an earlier stay are still held
                    why = why or "its earlier KV is still held"
                epoch = Epoch(link.epoch)
                self._carry_out(self._arrivals.offered(now_s, peer, epoch, message, self._stages, why))
            case m.Handed():
                self._carry_out(self._arrivals.heard(now_s, peer, message))
            case m.Want() | m.Taken():
                self._carry_out(self._departures.heard(now_s, peer, message))
            case m.Off():
                self._carry_out(self._arrivals.heard(now_s, peer, message))
                self._carry_out(self._departures.heard(now_s, peer, message))

    def _on_group_message(self, peer: WorkerId, message: m.ForStages | m.Ready | m.Landed, now_s: float) -> None:
        match message:
            case m.Ready(migration_id=migration_id):
                self._carry_out(self._arrivals.ready(now_s, migration_id, peer))
            case m.Landed(migration_id=migration_id, span=span):
                self._carry_out(self._arrivals.landed(now_s, migration_id, peer, span))
            case _:
                self._order(message)

    # ------------------------------------------------------------ within the group

    def _order(self, message: m.ForStages) -> str:
        """Send an order to the following stages, in order with batches, and execute it here. Returns why a span cannot
        be sent.
        """
        self._links.pass_down(Topic.MIGRATION, migration_to_bytes(message))
        why, said = "", self._mover.order(message, self._why_not())
        for each in said:
            why = each.why if isinstance(each, m.Off) else why
        self.answer([each for each in said if not isinstance(each, m.Off)])
        if why and not self._role.leads:
            self._sent(message.migration_id, why)
        return why

    def answer(self, messages: Iterable[m.Ready | m.Landed]) -> None:
        """Send messages to this group's leader, or handle them if that is this worker."""
        for message in messages:
            if self._role.leads:
                self._on_group_message(self._role.me, message, self._now())
            else:
                self._send_to_leader(message)

    def _send_to_leader(self, message: m.Ready | m.Landed | m.Off) -> None:
        self._links.send(self._role.leader, TrafficClass.CONTROL, Topic.MIGRATION, migration_to_bytes(message))

    def _sent(self, migration_id: m.MigrationId, why_not: str) -> None:
        """Record that a stage has sent a span, or (`why_not`) has failed to send it."""
        if self._role.leads:
            self._carry_out(self._departures.sent(self._now(), migration_id, why_not))
        elif why_not:
            self._send_to_leader(m.Off(migration_id, why_not))

    # ------------------------------------------------------------ commands

    def _carry_out(self, commands: Sequence[m.SourceCommand | m.TargetCommand]) -> None:
        for command in commands:
            match command:
                case m.Say(to=to, message=message):
                    self._say(to, message_bytes=migration_to_bytes(message))
                case m.Give(migration_id=migration_id):
                    if why := self._order(command):
                        self._carry_out(self._departures.give_up(self._now(), migration_id, why))
                case m.Take() | m.Stop() | m.Keep():
                    self._order(command)
                case m.HandOverNow():
                    self._hand_over_now(command)
                case m.Report():
                    self._report(command)
                case m.Adopt():
                    self._adopt(command)
        self._report_capacity()

    def _report_capacity(self) -> None:
        room = (self._arrivals.block_count, self._arrivals.running_count)
        if room != self._told_room:
            self._told_room = room
            self._tell(w.RoomExpected(self._now(), *room))
        now_s = self._now()
        limit_blocks = self._arrivals.prompt_limit_blocks(now_s)
        if limit_blocks != self._told_limit_blocks:
            self._told_limit_blocks = limit_blocks
            limit = None if limit_blocks is None else limit_blocks * self._block_tokens
            self._tell(w.PrefillLimited(now_s, limit))

    def _say(self, to: WorkerId, message_bytes: bytes) -> None:
        """Send a message to another group's leader. If the link refuses it, the link ends, which `peer_lost`
        reports.
        """
        self._links.send_over(self._link[to], TrafficClass.CONTROL, Topic.MIGRATION, message_bytes)

    def _hand_over_now(self, command: m.HandOverNow) -> None:
        give, now_s = command.give, self._now()
        link = self._link[command.to]
        why = "its link has ended" if link.retired or not link.is_up else self._order(give)
        if why:  # the sequence is still here
            self._carry_out(self._departures.give_up(now_s, give.migration_id, why))
            return
        told = self._tell(w.HandOver(now_s, {give.sequence_id: command.to}, frees=True))
        for handed_over in (c for c in told if isinstance(c, w.HandedOver)):
            for _, (snapshot,) in handed_over.snapshots:
                self._say(command.to, migration_to_bytes(m.Handed(give.migration_id, snapshot)))

    def _report(self, report: m.Report) -> None:
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

    def _adopt(self, command: m.Adopt) -> None:
        snapshot, now_s = command.snapshot, self._now()
        if not self._context.group_scheduler.leads:
            return  # the source has cancelled, or its group is lost and the dispatcher replays the request
        self._report_capacity()
        lost = frozenset[SequenceId]() if command.kv_tokens else frozenset({snapshot.sequence_id})
        self._tell(w.Adopted(now_s, (snapshot,), lost_ids=lost, in_order=True))
