"""KV on its way between members: which pieces of memory a victim's KV is, and who waits for what.

The receiver asks (KvWantedAll) once its blocks are ready, so a transfer never finds its destination missing. Both sides
name the pieces layer by layer and block by block in the order of the sequence; ids of neighbours are merged, and runs
need not match on the two sides.

What is known at one moment is said at once (`flush`): one question to each source, and small pieces in one transfer.

Layers given up have tables of their own from then on (`core.retired`): what of them has not been sent moves together
when a wave is through.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ballast.common.errors import BallastError, InvariantViolation, Overloaded
from ballast.common.ids import WorkerId
from ballast.service.logs import get_logger
from ballastpb.worker.v1 import stage_pb2 as pb
from services.worker.core.batch import SequenceId
from services.worker.core.blocks import blocks_for
from services.worker.core.plan import Victim, transfers
from services.worker.core.retired import RetiredTables
from services.worker.core.spans import Piece, Span
from services.worker.core.transition import Transition
from services.worker.core.transition_messages import ExpectKv, SendKv
from services.worker.links.traffic import TrafficClass
from services.worker.links.transfer import Outcome, Transfer
from services.worker.memory.kv_cache import KvCache
from services.worker.pipeline.destinations import whole
from services.worker.pipeline.events import KvAsked, PieceSent
from services.worker.pipeline.ground import Ground
from services.worker.pipeline.status import Progress
from services.worker.pipeline.wire import Topic, pieces_to_bytes

BEHIND_EXCHANGE = 1 << 40  # rank inside the class KV, behind every sequence that somebody waits for

if TYPE_CHECKING:
    import torch

    from services.worker.links.connection import Link

_TOGETHER_BYTES = 1 << 20  # of a transfer that has pieces of several sequences: a longer one holds up what is complete
_TOGETHER = 32  # pieces in such a transfer; they are named in its head


def kv_pieces(
    kv: KvCache,
    table: Sequence[int],
    first_block: int,
    last_block: int,
    first_layer: int,
    last_layer: int,
) -> list[torch.Tensor]:
    """The memory of some blocks of a sequence in `[first_layer, last_layer)`: [n, 2, T, K, H] per rank of
    the instance and run of ids."""
    if first_block == last_block:
        return []  # the sequence may be gone since it was asked for
    if len(table) < last_block:
        raise InvariantViolation(f"the KV in {last_block} blocks of a sequence is to travel, and it has {len(table)}")
    runs = _runs(table[first_block:last_block])
    pieces: list[torch.Tensor] = []
    for layer in range(first_layer, last_layer):
        pieces += [rank_B2TKH[first:last] for rank_B2TKH in kv.of_ranks(layer) for first, last in runs]
    return pieces


def kv_bytes(kv: KvCache, computed_tokens: int, layer_count: int) -> int:
    """Bytes of whole blocks."""
    return blocks_for(computed_tokens, kv.shape.block_tokens) * kv.block_bytes * layer_count


def _runs(blocks: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and runs[-1][1] == block:
            runs[-1] = (runs[-1][0], block + 1)
        else:
            runs.append((block, block + 1))
    return runs


@dataclass(frozen=True, slots=True)
class _Piece:
    """KV of a sequence in some layers, on its way out."""

    sequence_id: SequenceId
    token_count: int
    name: Piece
    tensors: Sequence[torch.Tensor]
    size_bytes: int


class KvExchange:
    """The KV that comes and goes in one transition. Engine thread only."""

    def __init__(
        self,
        transition: Transition,
        progress: Progress,
        ground: Ground,
    ) -> None:
        self._transition = transition
        self._progress = progress
        self._kv = ground.memory.kv
        self._ground = ground
        self._book = ground.book  # of the layout before; the other one of a restore is in force when KV is expected
        self._memory = ground.memory
        self._hub = ground.hub
        self._links = ground.links
        self._post = ground.post
        self._to_send: dict[tuple[SequenceId, WorkerId], list[SendKv]] = {}
        self._asked: set[tuple[SequenceId, WorkerId]] = set()
        self._to_ask: dict[WorkerId, list[SequenceId]] = {}  # with the next `flush`
        self._to_begin: list[tuple[SequenceId, WorkerId]] = []  # likewise; they are to be sent and have been asked for
        self._unsent: dict[tuple[SequenceId, WorkerId], int] = {}  # pieces under way
        self._transfers: list[Transfer] = []
        self._waiting: dict[WorkerId, deque[Sequence[_Piece]]] = {}  # for room among the transfers of the link
        self._pieces_due: dict[tuple[SequenceId, WorkerId], int] = {}  # receiver: transfers still to come
        self._retired: RetiredTables | None = None  # of layers that this member has given up
        self._leaving: dict[SequenceId, None] = {}  # whose KV is being sent or has been, since `take_moves`

    def expect(self, command: ExpectKv) -> None:
        """Blocks first, then the question for the KV: a transfer never finds its destination missing."""
        transition, victim = self._transition, command.victim
        book = self._ground.book
        table = book.hold(victim.sequence_id, victim.computed_tokens)
        if book is not self._book:  # this stage's own layers have it in the other window
            count = blocks_for(victim.computed_tokens, self._kv.shape.block_tokens)
            before = self._book.table(victim.sequence_id)[:count]
            self._memory.move_leaving(tuple(zip(before, table, strict=True)))
        leader = transition.part.new.leader.worker_id
        for source, to, first, last in transfers(transition.plan, victim, leader):
            if to != transition.me:
                continue
            pieces = self._pieces(victim, table, first, last)
            end_block = blocks_for(victim.computed_tokens, self._kv.shape.block_tokens)
            key = (command.epoch, victim.sequence_id, source, first)
            self._hub.kv.put(key, whole(pieces), 0, end_block)
            due = (victim.sequence_id, source)
            self._pieces_due[due] = self._pieces_due.get(due, 0) + 1
            self._progress.kv_bytes_received += kv_bytes(self._kv, victim.computed_tokens, last - first)
        for source in command.sources:
            self._to_ask.setdefault(source, []).append(victim.sequence_id)

    def flush(self) -> None:
        """Asks for what has been expected, and sends what has been asked for, since the last time."""
        to_ask, self._to_ask = self._to_ask, {}
        for source, sequence_ids in to_ask.items():
            self._ask(source, sequence_ids)
        to_begin, self._to_begin = self._to_begin, []
        for to in dict.fromkeys(to for _, to in to_begin):
            self._begin_sending(to, [key for key in to_begin if key[1] == to])
        for to in tuple(self._waiting):
            self._send_waiting(to)

    def _ask(self, source: WorkerId, sequence_ids: Sequence[SequenceId]) -> None:
        """Blocks are ready for the KV of these sequences."""
        body = pb.KvWantedAll(sequence_ids=sequence_ids)
        self._links.send(source, TrafficClass.CONTROL, Topic.KV_WANTED, body.SerializeToString())

    def _pieces(self, victim: Victim, table: Sequence[int], first: int, last: int) -> list[torch.Tensor]:
        end_block = blocks_for(victim.computed_tokens, self._kv.shape.block_tokens)
        return kv_pieces(self._kv, table, 0, end_block, first, last)

    def is_last_piece(self, sequence_id: SequenceId, source: WorkerId) -> bool:
        key = (sequence_id, source)
        self._pieces_due[key] = self._pieces_due.get(key, 1) - 1
        return self._pieces_due[key] == 0

    # ------------------------------------------------------------ layers given up

    def retire(self) -> int:
        """The book is still that of the old layout. Returns how many blocks of the layers given up are needed."""
        self._retired = RetiredTables(self._book)
        return self._retired.used_end

    def forget(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Nobody wants their KV."""
        if self._retired is not None:
            self._retired.forget(sequence_ids)

    def take_moves(self) -> tuple[int, tuple[tuple[int, int], ...]]:
        """Nothing is being sent: how many blocks of the layers given up are needed from now on, and which have to be
        copied (from, to) so that these are the first ones.
        """
        leaving, self._leaving = self._leaving, {}
        if self._retired is None:
            return 0, ()
        self._retired.forget(leaving)
        moves = self._retired.compact()
        return self._retired.used_end, moves

    def check(self) -> None:
        if self._retired is not None:
            self._retired.check()

    # ------------------------------------------------------------ sending

    def send(self, command: SendKv) -> None:
        self._leaving[command.victim.sequence_id] = None
        key = (command.victim.sequence_id, command.to)
        self._to_send.setdefault(key, []).append(command)
        layers = command.last_layer - command.first_layer
        self._progress.kv_bytes_to_send += kv_bytes(self._kv, command.victim.computed_tokens, layers)
        if key in self._asked:
            self._to_begin.append(key)

    def asked(self, event: KvAsked) -> None:
        """A peer has its blocks ready."""
        for sequence_id in event.sequence_ids:
            key = (sequence_id, event.peer)
            self._asked.add(key)
            if key in self._to_send:
                self._to_begin.append(key)

    def _begin_sending(self, to: WorkerId, keys: Iterable[tuple[SequenceId, WorkerId]]) -> None:
        link, together, size_bytes = self._links.to(to), list[_Piece](), 0
        if link is None:
            return
        for key in sorted(dict.fromkeys(keys), key=self._tokens):  # the short ones first: most of them go on soonest
            commands = self._to_send.pop(key, [])
            self._unsent[key] = len(commands)
            for command in commands:
                piece = self._piece(command)
                if together and (size_bytes + piece.size_bytes > _TOGETHER_BYTES or len(together) == _TOGETHER):
                    self._transfer(link, to, together)
                    together, size_bytes = [], 0
                together.append(piece)
                size_bytes += piece.size_bytes
        if together:
            self._transfer(link, to, together)

    def _tokens(self, key: tuple[SequenceId, WorkerId]) -> int:
        return max((command.victim.computed_tokens for command in self._to_send.get(key, ())), default=0)

    def _piece(self, command: SendKv) -> _Piece:
        victim, first, last = command.victim, command.first_layer, command.last_layer
        tensors = self._pieces(victim, self._table(command), first, last)
        end_block = blocks_for(victim.computed_tokens, self._kv.shape.block_tokens)
        span = Span(0, end_block, victim.computed_tokens, last=True)
        name = Piece(command.epoch, victim.sequence_id, first, last, span)
        size_bytes = sum(tensor.nbytes for tensor in tensors)
        return _Piece(victim.sequence_id, victim.computed_tokens, name, tensors, size_bytes)

    def _transfer(self, link: Link, to: WorkerId, pieces: Sequence[_Piece]) -> None:
        epoch, ids = self._transition.epoch, tuple(piece.sequence_id for piece in pieces)
        meta = pieces_to_bytes(piece.name for piece in pieces)
        tensors = [tensor for piece in pieces for tensor in piece.tensors]
        try:
            transfer = link.transfer(
                TrafficClass.KV, tensors, topic=Topic.KV, meta=meta, stream=ids[0], rank=pieces[0].token_count
            )
        except Overloaded:  # nothing of it was sent: again when one of those before it has ended
            self._waiting.setdefault(to, deque()).append(pieces)
            return
        except BallastError as error:
            self._give_up(link, ids, str(error))
            return
        self._transfers = [t for t in self._transfers if not t.done.done()] + [transfer]
        transfer.done.add_done_callback(lambda f: self._post(PieceSent(epoch, ids, to, f)))

    def _send_waiting(self, to: WorkerId) -> None:
        """What the link had no room for, as far as it has some now."""
        waiting, link = self._waiting.pop(to, None), self._links.to(to)
        while waiting and link is not None and to not in self._waiting:
            self._transfer(link, to, waiting.popleft())
        if waiting and to in self._waiting:
            self._waiting[to].extend(waiting)

    @staticmethod
    def _give_up(link: Link, sequence_ids: Sequence[SequenceId], why: str) -> None:
        """KV that is not sent is missing for good: the link ends, which both members are told as an event."""
        get_logger().error("KV is not sent", sequence_ids=sequence_ids, to=link.peer_id, why=why)
        link.give_up(f"KV could not be sent: {why}")

    def _table(self, command: SendKv) -> Sequence[int]:
        given_up = self._retired is not None and command.first_layer not in self._kv.held_layers
        tables = self._retired if given_up and self._retired is not None else self._book
        return tables.table(command.victim.sequence_id)

    @property
    def idle(self) -> bool:
        """Nothing is being sent from here."""
        return all(transfer.done.done() for transfer in self._transfers)

    def sent(self, event: PieceSent) -> list[SequenceId]:
        """Counts a transfer that has ended. Returns the sequences of which all has been sent to that member."""
        error = event.report.exception()
        report = None if error is not None else event.report.result()
        if report is None or report.outcome is not Outcome.DELIVERED:
            why = str(error) if report is None else f"{report.outcome.value}: {report.why}"
            link = self._links.to(event.to)
            if link is not None:
                self._give_up(link, event.sequence_ids, why)
            return []
        self._progress.kv_bytes_sent += report.sent_bytes
        self._send_waiting(event.to)
        return [sequence_id for sequence_id in event.sequence_ids if self._is_sent((sequence_id, event.to))]

    def _is_sent(self, key: tuple[SequenceId, WorkerId]) -> bool:
        """One more piece of it has been."""
        self._unsent[key] -= 1
        if self._unsent[key]:
            return False
        del self._unsent[key]
        return True
