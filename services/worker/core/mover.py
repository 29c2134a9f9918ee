"""Bookkeeping of this stage's outgoing and incoming KV transfers, and of the messages that report them (pure).

Other modules decide which KV moves when: for the exchange of a transition `core.transition` and `core.waves`, for a
live migration `core.departures` and `core.arrivals`. The mover keeps track of pieces, one for each hop (`core.spans`);
`pipeline.mover` executes its commands.

Rule 1: KV is sent only into reserved blocks. Blocks are reserved before KV is requested: in an exchange by the stage
itself, in a migration by its leader. Rule 2: requested KV either arrives or is cancelled, and a cancellation waits for
a write under way. Rule 3: requests made between two calls of `flush` are batched: one message to each sender, and small
pieces in one transfer.

Dropped layers have their own block tables until all their KV has been sent. No sequence is added to these tables, and
they are compacted after each wave. In the layers that this member keeps, sequences continue to run and new ones arrive.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from ballast.common.errors import InvariantViolation
from ballast.common.ids import Epoch, WorkerId
from services.worker.core.batch import SequenceId
from services.worker.core.blocks import BlockBook, Table, blocks_for
from services.worker.core.migration_messages import Give, Keep, Landed, Stop, Take
from services.worker.core.spans import Hop, Key, KvRange, Piece, StageLayers, hops, key_of
from services.worker.core.transition_messages import ExpectKv, KvReceived, KvSent, SendKv

_TOGETHER_BYTES = 1 << 20  # maximum size of a transfer of several sequences, which all wait for its end
_TOGETHER = 32  # maximum pieces in such a transfer, whose header lists them
_BEHIND_EXCHANGE = 1 << 40  # send rank of KV of background migrations, after every sequence of an exchange

_Move = tuple[int, SequenceId]  # `Piece.move` and the sequence
_Going = tuple[SequenceId, WorkerId]  # a sequence and the receiver of its KV


class Mode(Enum):
    EXCHANGE = "exchange"  # the sequence is suspended, so a failed send is final and ends the link
    AHEAD = "ahead"  # the sequence continues to run, and stays here if the send fails
    LAST = "last"  # its blocks are freed at once, so a copy is sent


@dataclass(frozen=True, slots=True)
class BlockRange:
    piece: Piece
    blocks: Table  # blocks that hold the KV


@dataclass(frozen=True, slots=True)
class Send:
    """Pieces for one transfer. Answered with `refused`, or in an exchange with `sent`."""

    to: WorkerId
    epoch: Epoch  # epoch of the link
    mode: Mode
    block_ranges: tuple[BlockRange, ...]

    @property
    def rank(self) -> int:
        """Order of sending. In an exchange, short sequences are sent first, so that most sequences resume early."""
        if self.mode is Mode.EXCHANGE:
            return self.block_ranges[0].piece.span.token_count
        return 0 if self.mode is Mode.LAST else _BEHIND_EXCHANGE


@dataclass(frozen=True, slots=True)
class KvRequest:
    """Request KV of these sequences, for which blocks are reserved here."""

    giver: WorkerId
    sequence_ids: tuple[SequenceId, ...]


@dataclass(frozen=True, slots=True)
class KvPlace:
    """Blocks `[first_block, last_block)` of the table, which receive the KV of this hop."""

    key: Key
    hop: Hop
    first_block: int
    last_block: int
    table: Table


@dataclass(frozen=True, slots=True)
class CopyOver:
    """Copy blocks (from, to): from this worker's blocks in the previous group to its blocks in the current one."""

    moves: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class _Coming:
    """Incoming KV of one sequence in one move."""

    epoch: Epoch  # epoch of the links
    exchanged: bool  # True: in an exchange; False: in a migration
    keys: set[Key] = field(default_factory=set[Key])  # pieces neither received nor cancelled
    span: KvRange | None = None
    failed: bool = False


@dataclass(slots=True)
class _Exchange:
    """Outgoing KV of one transition."""

    book: BlockBook  # block tables of the previous layout; in a restore, KV is received into another book
    retired: BlockBook | None = None  # block tables of the layers that this member has dropped
    ordered: dict[_Going, BlockRange] = field(default_factory=dict[_Going, BlockRange])
    asked: set[_Going] = field(default_factory=set[_Going])
    to_begin: dict[WorkerId, list[BlockRange]] = field(
        default_factory=dict[WorkerId, list[BlockRange]]
    )  # sent by the next `flush`
    to_ask: dict[WorkerId, list[SequenceId]] = field(default_factory=dict[WorkerId, list[SequenceId]])  # to request
    waiting: dict[WorkerId, deque[Send]] = field(default_factory=dict[WorkerId, deque[Send]])  # while the link is full
    given: dict[SequenceId, None] = field(default_factory=dict[SequenceId, None])  # sequences sent in this wave


class Mover:
    def __init__(self, block_tokens: int, block_bytes: int, withdraw: Callable[[Key], bool]) -> None:
        """`block_bytes`: bytes of a block in one layer. `withdraw(key)` forbids a write and returns False if it may be
        under way.
        """
        self._block_tokens = block_tokens
        self._block_bytes = block_bytes
        self._withdraw = withdraw
        self._coming: dict[_Move, _Coming] = {}
        self._held: set[SequenceId] = set()  # migrating sequences with blocks here that do not belong to this group yet
        self._is = _Exchange(BlockBook(0, block_tokens))

    @property
    def holds(self) -> bool:
        """True if blocks are reserved here for a migration."""
        return bool(self._held)

    # ------------------------------------------------------------ incoming

    def expect(self, command: ExpectKv, book: BlockBook) -> list[KvPlace | CopyOver]:
        """Reserve blocks in `book`, the current block tables, for a sequence of an exchange, and expect its KV
        there.
        """
        victim = command.victim
        sequence_id, token_count, first_block = victim.sequence_id, victim.computed_tokens, victim.donated_count
        if first_block:
            book.share(sequence_id, victim.donor, first_block)
        table, end_block = book.hold(sequence_id, token_count), blocks_for(token_count, self._block_tokens)
        commands: list[KvPlace | CopyOver] = []
        if book is not self._is.book:  # KV of layers that stay here is in blocks of the previous group
            before = self._is.book.table(sequence_id)[first_block:end_block]
            commands.append(CopyOver(tuple(zip(before, table[first_block:], strict=True))))
        if command.hops:
            move, coming = (command.epoch, sequence_id), _Coming(command.epoch, exchanged=True)
            commands += self._expect_incoming(move, coming, command.hops, (first_block, end_block), table)
        for giver in sorted(hop.giver for hop in command.hops):
            self._is.to_ask.setdefault(giver, []).append(sequence_id)
        return commands

    def take(self, take: Take, coming_here: Sequence[Hop], book: BlockBook) -> list[KvPlace] | None:
        """Reserve blocks for a migration and expect its KV there. Returns None if too few are free."""
        sequence_id = take.sequence_id
        if take.last_block - len(book.table(sequence_id)) > book.free_count:
            return None
        self._held.add(sequence_id)
        table = book.hold(sequence_id, take.last_block * self._block_tokens)
        move, coming = (take.migration_id, sequence_id), _Coming(take.epoch, exchanged=False)
        return self._expect_incoming(move, coming, coming_here, (take.first_block, take.last_block), table)

    def _expect_incoming(
        self, move: _Move, coming: _Coming, mine: Iterable[Hop], blocks: tuple[int, int], table: Table
    ) -> list[KvPlace]:
        self._coming[move] = coming
        places = [KvPlace((*move, hop.giver, hop.first_layer), hop, *blocks, table) for hop in mine]
        coming.keys.update(place.key for place in places)
        return places

    def landed(
        self, at_s: float, giver: WorkerId, piece: Piece, *, delivered: bool
    ) -> list[KvReceived | Landed] | None:
        """Handle a completed or failed KV transfer. Returns None if the KV was not expected."""
        move, key = (piece.move, piece.sequence_id), key_of(piece, giver)
        coming = self._coming.get(move)
        if coming is None or key not in coming.keys:
            return None
        coming.keys.discard(key)
        if not delivered or coming.span not in (None, piece.span):
            return [*self._fail(move, coming)]
        coming.span = piece.span
        if not coming.exchanged:
            return [*self._end(move, coming)]
        self._end(move, coming)
        return [] if coming.failed else [KvReceived(at_s, coming.epoch, piece.sequence_id, giver)]

    def stop(self, stop: Stop) -> list[Landed]:
        found = [move for move in self._coming if move[0] == stop.migration_id]
        return [landed for move in found for landed in self._fail(move, self._coming[move])]

    def keep(self, keep: Keep, book: BlockBook) -> None:
        if keep.sequence_id in self._held:
            self._held.discard(keep.sequence_id)
            book.trim(keep.sequence_id, keep.token_count)

    def peer_lost(self, epoch: Epoch, peer: WorkerId) -> list[Landed]:
        return self._fail_all(lambda c: c.epoch == epoch and any(giver == peer for _, _, giver, _ in c.keys))

    def give_up(self) -> list[Landed]:
        """Cancel incoming migrations, because the layout is about to change. The leader decides when their blocks are
        freed.
        """
        return self._fail_all(lambda _: True)

    def _fail_all(self, which: Callable[[_Coming], bool]) -> list[Landed]:
        found = [(move, coming) for move, coming in self._coming.items() if which(coming)]
        return [landed for move, coming in found for landed in self._fail(move, coming)]

    def _fail(self, move: _Move, coming: _Coming) -> list[Landed]:
        """Record that incoming KV has failed. In a migration, cancel its writes and report the failure once none is
        under way; a failed exchange ends the whole group.
        """
        coming.failed = True
        if not coming.exchanged:
            coming.keys = {key for key in coming.keys if not self._withdraw(key)}
        return self._end(move, coming)

    def _end(self, move: _Move, coming: _Coming) -> list[Landed]:
        if coming.keys:
            return []
        del self._coming[move]
        return [] if coming.exchanged else [Landed(move[0], None if coming.failed else coming.span)]

    # ------------------------------------------------------------ outgoing: migrations

    def give(self, give: Give, stage: StageLayers, book: BlockBook) -> list[Send] | None:
        """Return the commands that send a span; None if the sequence is not here."""
        span, table = give.span, book.table(give.sequence_id)
        if len(table) < span.last_block:
            return None
        mode = Mode.LAST if span.last else Mode.AHEAD
        blocks, sends = table[span.first_block : span.last_block], list[Send]()
        for _, taker, first, last in hops((stage,), give.takers):
            piece = Piece(give.migration_id, give.sequence_id, first, last, span)
            sends.append(Send(taker, give.epoch, mode, (BlockRange(piece, blocks),)))
        return sends

    # ------------------------------------------------------------ outgoing: exchange

    def begin(self, book: BlockBook) -> None:
        """Begin a transition. `book`: block tables of the current layout."""
        self._is = _Exchange(book)

    def order(self, command: SendKv) -> int:
        """Register KV to send; it is sent once its receiver has requested it. Returns its size in bytes."""
        victim, is_ = command.victim, self._is
        end_block = blocks_for(victim.computed_tokens, self._block_tokens)
        span = KvRange(victim.donated_count, end_block, victim.computed_tokens, last=True)
        _, to, first_layer, last_layer = command.hop
        piece = Piece(command.epoch, victim.sequence_id, first_layer, last_layer, span)
        block_range = BlockRange(piece, self._blocks(piece))
        is_.given[victim.sequence_id] = None
        if (key := (victim.sequence_id, to)) in is_.asked:
            is_.to_begin.setdefault(to, []).append(block_range)
        else:
            is_.ordered[key] = block_range
        return self._size_of(block_range)

    def _blocks(self, piece: Piece) -> Table:
        book = self._is.book if self._is.retired is None else self._is.retired
        table, span = book.table(piece.sequence_id), piece.span
        if len(table) < span.last_block:
            raise InvariantViolation(f"{piece} is ordered, but its sequence has {len(table)} blocks")
        return table[span.first_block : span.last_block]

    def _size_of(self, block_range: BlockRange) -> int:
        return (
            len(block_range.blocks) * self._block_bytes * (block_range.piece.last_layer - block_range.piece.first_layer)
        )

    def asked(self, peer: WorkerId, sequence_ids: Iterable[SequenceId]) -> None:
        """Handle the request of a peer that has reserved blocks. It may arrive before this stage's own order to
        send.
        """
        for sequence_id in sequence_ids:
            if (block_range := self._is.ordered.pop((sequence_id, peer), None)) is not None:
                self._is.to_begin.setdefault(peer, []).append(block_range)
            else:
                self._is.asked.add((sequence_id, peer))

    def flush(self) -> list[KvRequest | Send]:
        """Return the commands that have become ready since the last call: requests for KV that this stage expects, and
        sends of KV that a peer has requested and this stage may send.
        """
        to_ask, self._is.to_ask = self._is.to_ask, {}
        to_begin, self._is.to_begin = self._is.to_begin, {}
        commands: list[KvRequest | Send] = [KvRequest(giver, tuple(ids)) for giver, ids in to_ask.items()]
        for to, block_ranges in to_begin.items():
            commands += self._together(
                to, sorted(block_ranges, key=lambda block_range: block_range.piece.span.token_count)
            )
        return commands

    def _together(self, to: WorkerId, block_ranges: Iterable[BlockRange]) -> list[Send]:
        groups, size_bytes = list[list[BlockRange]](), 0
        for block_range in block_ranges:
            size_bytes += self._size_of(block_range)
            if not groups or size_bytes > _TOGETHER_BYTES or len(groups[-1]) == _TOGETHER:
                groups.append([])
                size_bytes = self._size_of(block_range)
            groups[-1].append(block_range)
        return [Send(to, Epoch(g[0].piece.move), Mode.EXCHANGE, tuple(g)) for g in groups]

    def refused(self, send: Send) -> None:
        """Record that a link has no room for a transfer. In an exchange the transfer is retried later (`again`)."""
        if send.mode is Mode.EXCHANGE:
            self._is.waiting.setdefault(send.to, deque()).append(send)

    @property
    def waiting_to(self) -> tuple[WorkerId, ...]:
        return tuple(self._is.waiting)

    def again(self, to: WorkerId) -> Iterator[Send]:
        """Retry the refused transfers, one by one until one is refused again."""
        waiting = self._is.waiting.pop(to, deque[Send]())
        while waiting and to not in self._is.waiting:
            yield waiting.popleft()
        if waiting:
            self._is.waiting[to].extend(waiting)

    def sent(self, at_s: float, send: Send) -> list[KvSent]:
        """Return the events for a transfer that has reached its receiver."""
        return [KvSent(at_s, send.epoch, block_range.piece.sequence_id, send.to) for block_range in send.block_ranges]

    # ------------------------------------------------------------ dropped layers

    def retire(self) -> int:
        """Copy the block tables for the dropped layers, before the book changes to the new layout. Returns the number
        of blocks that these layers need.
        """
        self._is.retired = self._is.book.copy()
        self._is.retired.forget_numbers()
        return self._is.retired.used_end

    def forget(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Free blocks of sequences whose KV has been sent, or is not needed by any member."""
        if (book := self._is.retired) is not None:
            for sequence_id in sequence_ids:
                book.release(sequence_id)

    def compact(self) -> tuple[int, tuple[tuple[int, int], ...]]:
        """Compact the dropped layers after a wave, while no KV is being sent. Returns the number of blocks still
        needed, and the copies (from, to) that move them to the front.
        """
        given, self._is.given = self._is.given, {}
        self.forget(given)
        if (book := self._is.retired) is None:
            return 0, ()
        moves = book.compaction_plan(book.used_count)
        book.compacted(moves)
        book.shrink(book.used_count)
        return book.used_end, moves

    # ------------------------------------------------------------ end

    def abandon(self) -> None:
        """Drop all transfers, because the group is lost and its blocks are reused."""
        for coming in self._coming.values():
            for key in coming.keys:
                self._withdraw(key)
        self._coming.clear()
        self._held.clear()
        self.begin(self._is.book)

    def check(self, places: Iterable[Key]) -> None:
        """Raise InvariantViolation unless the bookkeeping matches the transfers under way.

        Args:
            places: Keys of the KV that may be written here.
        """
        is_, expected = self._is, {key for coming in self._coming.values() for key in coming.keys}
        if unknown := set(places) - expected:
            raise InvariantViolation(f"unexpected KV may be written: {sorted(unknown)}")
        if idle := [move for move, coming in self._coming.items() if not coming.keys]:
            raise InvariantViolation(f"{idle} are expected, but no piece is missing")
        held = {sequence_id for (_, sequence_id), coming in self._coming.items() if not coming.exchanged}
        if lost := held - self._held:
            raise InvariantViolation(f"KV of {sorted(lost)} is expected in blocks that are not reserved for it")
        if stuck := is_.ordered.keys() & is_.asked:
            raise InvariantViolation(f"{sorted(stuck)} was requested but is not being sent")
        if is_.retired is not None:
            is_.retired.check()
