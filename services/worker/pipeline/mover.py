"""Executes the commands of `core.mover`: KV is sent from the blocks of one stage directly into the blocks of another.

Used by the engine thread only. Link threads (`hub`) write incoming KV and report it here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ballast.common.errors import BallastError, Overloaded
from ballast.common.ids import WorkerId
from ballast.service.logs import get_logger
from ballastpb.worker.v1 import stage_pb2 as pb
from services.worker.core.blocks import blocks_for
from services.worker.core.migration_messages import ForStages, Give, Keep, Landed, Off, Ready, Stop, Take
from services.worker.core.mover import BlockRange, CopyOver, KvPlace, KvRequest, Mode, Mover, Send
from services.worker.core.spans import Key, StageLayers, hops, key_of
from services.worker.core.transition_messages import ExpectKv, KvReceived, KvSent, SendKv
from services.worker.links.traffic import TrafficClass
from services.worker.links.transfer import Transfer
from services.worker.memory.kv_cache import KvCache
from services.worker.pipeline.context import MemberContext
from services.worker.pipeline.events import KvAsked, KvLanded, KvLeft
from services.worker.pipeline.hub import Pieces
from services.worker.pipeline.wire import Topic, pieces_to_bytes

if TYPE_CHECKING:
    from services.worker.links.connection import Link


def kv_pieces(kv: KvCache, blocks: Sequence[int], first_layer: int, last_layer: int) -> Pieces:
    """Return the memory of these blocks in `[first_layer, last_layer)`, by layer and run of ids: [n, 2, T, K, H] per
    rank. Runs may differ between the two sides.
    """
    runs, pieces = block_runs(blocks), Pieces()
    for layer in range(first_layer, last_layer):
        pieces += [rank_B2TKH[first:last] for rank_B2TKH in kv.of_ranks(layer) for first, last in runs]
    return pieces


def kv_bytes(kv: KvCache, computed_tokens: int, layer_count: int) -> int:
    """Return the bytes of the whole blocks that hold KV of `computed_tokens` tokens, in `layer_count` layers."""
    return blocks_for(computed_tokens, kv.shape.block_tokens) * kv.block_bytes * layer_count


def block_runs(blocks: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and runs[-1][1] == block:
            runs[-1] = (runs[-1][0], block + 1)
        else:
            runs.append((block, block + 1))
    return runs


class KvMover:
    def __init__(self, context: MemberContext) -> None:
        self._context = context
        self._kv = context.memory.kv
        self._links = context.links
        self._places = context.hub.places
        self.core = Mover(self._kv.shape.block_tokens, self._kv.block_bytes, self._places.forget)
        self._transfers: list[Transfer] = []  # transfers that read the cache
        self._opened: dict[
            Key, tuple[range, Sequence[int]]
        ] = {}  # KV being received for ranks on other hosts -> its layers and blocks

    @property
    def idle(self) -> bool:
        """True if no KV is being sent, and no block is held for a migration."""
        return not self.core.holds and all(transfer.done.done() for transfer in self._transfers)

    @property
    def stage(self) -> StageLayers:
        layers = self._context.role.layers
        return StageLayers(self._context.me, layers.start, layers.stop)

    def landed(self, event: KvLanded) -> Sequence[KvReceived | Landed]:
        """Handle KV that has arrived or will not arrive. Returns events for the transition or messages for the
        leader.
        """
        opened = self._opened.pop(key_of(event.piece, event.giver), None)
        news = self.core.landed(self._context.now(), event.giver, event.piece, delivered=event.delivered)
        if news is None:
            self._context.published.stale_total += 1
            return ()
        if event.delivered and event.unpack is not None:
            event.unpack()
        if event.delivered and opened is not None:
            self._kv.store(opened[0], block_runs(opened[1]))
        return news

    def give_up(self, *, coming: bool) -> Sequence[Landed]:
        """Cancel outgoing KV and, with `coming`, incoming KV, because the layout is about to change."""
        news = self.core.give_up() if coming else ()
        self._cancel()
        return news

    def abandon(self) -> None:
        """Drop all transfers, because the group is lost."""
        self.core.abandon()
        self._cancel()

    def _cancel(self) -> None:
        for transfer in self._transfers:
            transfer.cancel()

    def check(self) -> None:
        self.core.check(self._places.of_kv())

    # ------------------------------------------------------------ orders of a leader in a migration

    def order(self, message: ForStages, why_not: str) -> Sequence[Ready | Landed | Off]:
        """Execute an order. `why_not`: why this worker cannot take part in migrations now; empty if it can. Returns the
        messages for the leader; `Off` if a span cannot be sent.
        """
        match message:
            case Give():
                why = self._give(message, why_not)
                return [Off(message.migration_id, why)] if why else ()
            case Take():
                return [self._take(message, why_not)]
            case Stop():
                return self.core.stop(message)
            case Keep():
                self.core.keep(message, self._context.book)
                return ()

    def _give(self, give: Give, why_not: str) -> str:
        sends = self.core.give(give, self.stage, self._context.book)
        if sends is None:
            return "it has ended or was preempted"
        if why_not and not give.span.last:
            return why_not
        self._context.memory.pool.backend.synchronise()  # wait for the device
        return next((why for send in sends if (why := self._begin(send))), "")

    def _take(self, take: Take, why_not: str) -> Ready | Landed:
        coming_here = hops(take.givers, (self.stage,))
        linked = all(self._links.to(hop.giver, take.epoch) is not None for hop in coming_here)
        places = self.core.take(take, coming_here, self._context.book) if linked and not why_not else None
        if places is None:
            why = why_not or ("no room" if linked else "no link")
            get_logger().debug("no migration", why=why, sequence_id=take.sequence_id)
            return Landed(take.migration_id, None)
        self._expect_incoming(places)
        return Ready(take.migration_id)

    def _expect_incoming(self, commands: Iterable[KvPlace | CopyOver]) -> int:
        """Register destinations of incoming KV. Returns their bytes."""
        size_bytes = 0
        for command in commands:
            if isinstance(command, CopyOver):
                self._context.memory.move_leaving(command.moves)
                continue
            first_layer, last_layer = command.hop.first_layer, command.hop.last_layer

            def pieces(first: int, last: int, c: KvPlace = command) -> Pieces:
                blocks = c.table[first:last]
                if self._kv.is_remote:
                    self._opened[c.key] = range(c.hop.first_layer, c.hop.last_layer), blocks
                return kv_pieces(self._kv, blocks, c.hop.first_layer, c.hop.last_layer)

            self._places.put(command.key, pieces, command.first_block, command.last_block)
            size_bytes += (command.last_block - command.first_block) * self._kv.block_bytes * (last_layer - first_layer)
        return size_bytes

    # ------------------------------------------------------------ commands of a transition

    def expect(self, command: ExpectKv) -> None:
        self._context.published.counted.kv_bytes_received += self._expect_incoming(
            self.core.expect(command, self._context.book)
        )

    def send(self, command: SendKv) -> None:
        self._context.published.counted.kv_bytes_to_send += self.core.order(command)

    def asked(self, event: KvAsked) -> None:
        self.core.asked(event.peer, event.sequence_ids)
        self.flush()

    def flush(self) -> None:
        for command in self.core.flush():
            if isinstance(command, KvRequest):
                body = pb.KvWantedAll(sequence_ids=command.sequence_ids).SerializeToString()
                self._links.send(command.giver, TrafficClass.CONTROL, Topic.KV_WANTED, body)
            else:
                self._begin(command)
        for to in self.core.waiting_to:
            self._send_again(to)

    def left(self, event: KvLeft) -> Sequence[KvSent]:
        """Handle the end of a transfer of an exchange. If it has failed, the link ends."""
        send, why = event.send, event.why_not
        if why:
            if (link := self._links.to(send.to)) is not None:
                _give_up(link, send, why)
            return ()
        self._context.published.counted.kv_bytes_sent += event.report.result().sent_bytes
        self._send_again(send.to)
        return self.core.sent(self._context.now(), send)

    def _send_again(self, to: WorkerId) -> None:
        """Retry the transfers for which the link had no room."""
        for send in self.core.again(to):
            self._begin(send)

    # ------------------------------------------------------------ sending

    def _begin(self, send: Send) -> str:
        """Start a transfer. Returns why it cannot start; empty if it has started."""
        link, exchanged = self._links.to(send.to, send.epoch), send.mode is Mode.EXCHANGE
        if link is None or link.retired or not link.is_up:
            return f"there is no link to {send.to}"
        tensors = [tensor for block_range in send.block_ranges for tensor in self._tensors(block_range)]
        meta = pieces_to_bytes(block_range.piece for block_range in send.block_ranges)
        if send.mode is Mode.LAST and sum(tensor.nbytes for tensor in tensors) < link.packed_below_bytes:
            # A transfer needs several thread switches on either side, while a message is sent at once and received by
            # one thread. Activations do not wait for it, because they use the links of the group.
            packed = link.pack(tensors) if tensors else None
            self._links.send_over(link, TrafficClass.CONTROL, Topic.KV, meta, packed)
            return ""
        if send.mode is Mode.LAST:
            tensors = [tensor.clone() for tensor in tensors]
        stream = send.block_ranges[0].piece.sequence_id
        try:
            transfer = link.transfer(TrafficClass.KV, tensors, topic=Topic.KV, meta=meta, stream=stream, rank=send.rank)
        except Overloaded as error:  # the transfer was refused
            self.core.refused(send)
            return str(error)
        except BallastError as error:
            if exchanged:
                _give_up(link, send, str(error))
            return str(error)
        if send.mode is not Mode.LAST:
            self._transfers = [t for t in self._transfers if not t.done.done()] + [transfer]
        transfer.done.add_done_callback(lambda report: self._context.post(KvLeft(send, report)))
        return ""

    def _tensors(self, block_range: BlockRange) -> Pieces:
        piece = block_range.piece
        self._kv.fetch(range(piece.first_layer, piece.last_layer), block_runs(block_range.blocks))
        return kv_pieces(self._kv, block_range.blocks, piece.first_layer, piece.last_layer)


def _give_up(link: Link, send: Send, why: str) -> None:
    """End the link, which is reported to both members, because KV that was not sent is lost."""
    sequence_ids = [block_range.piece.sequence_id for block_range in send.block_ranges]
    get_logger().error("KV is not sent", sequence_ids=sequence_ids, to=link.peer_id, why=why)
    link.give_up(f"KV could not be sent: {why}")
