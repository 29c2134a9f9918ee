"""KV on its way between members: what goes from this stage, what comes to it, and who has to hear of it (pure).

One account for all of it. What moves when, and who leads afterwards, is decided elsewhere: for an exchange by
`core.transition` and `core.waves`, for a live migration by `core.departures` and `core.arrivals`. Here it is pieces,
one for each hop (`core.spans`), and an executor carries out the commands (`pipeline.mover`).

Rule 1: nothing is sent that has no place. Blocks are taken before anybody is asked. The givers of an exchange are asked
by the stage itself, those of a migration by its leader.
Rule 2: what has a place comes, or is withdrawn; what may be being written is waited for.
Rule 3: what is known at one moment is said at once (`flush`): one question to each giver, small pieces in one transfer.

Layers given up have tables of their own until all that is in them has been sent. In the layers that a stage keeps,
its sequences go on and others come; in these they only go. What is left moves together when a wave is through.
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
from services.worker.core.spans import Hop, Key, Piece, Span, Stage, hops, key_of
from services.worker.core.transition_messages import ExpectKv, KvReceived, KvSent, SendKv

_TOGETHER_BYTES = 1 << 20  # of a transfer that has pieces of several sequences: a longer one holds up what is complete
_TOGETHER = 32  # pieces in such a transfer; they are named in its head
_BEHIND_EXCHANGE = 1 << 40  # rank among KV, behind every sequence that somebody waits for

_Move = tuple[int, SequenceId]  # see `Piece`
_Going = tuple[SequenceId, WorkerId]  # and to whom


class Mode(Enum):
    EXCHANGE = "exchange"  # the sequence stands still: what cannot be sent is missing for good, and ends the link
    AHEAD = "ahead"  # it goes on meanwhile, and stays if this cannot be sent
    LAST = "last"  # its blocks are free at once: what is sent is a copy


@dataclass(frozen=True, slots=True)
class BlockRange:
    piece: Piece
    blocks: Table  # that it lies in


@dataclass(frozen=True, slots=True)
class Send:
    """Parcels for one transfer. Answered with `refused`, or in an exchange with `sent`."""

    to: WorkerId
    epoch: Epoch  # of the link
    mode: Mode
    block_ranges: tuple[BlockRange, ...]

    @property
    def rank(self) -> int:
        """The order of sending: in an exchange the short ones first, since most of them go on soonest."""
        if self.mode is Mode.EXCHANGE:
            return self.block_ranges[0].piece.span.token_count
        return 0 if self.mode is Mode.LAST else _BEHIND_EXCHANGE


@dataclass(frozen=True, slots=True)
class Ask:
    """Blocks are ready for the KV of these sequences."""

    giver: WorkerId
    sequence_ids: tuple[SequenceId, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Blocks `[first_block, last_block)` of the table, into which the KV of this hop is written."""

    key: Key
    hop: Hop
    first_block: int
    last_block: int
    table: Table


@dataclass(frozen=True, slots=True)
class CopyOver:
    """From this worker's blocks in the group before to those in its own."""

    moves: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class _Coming:
    """The KV of a sequence that is to come in one move."""

    epoch: Epoch  # of the links
    exchanged: bool
    keys: set[Key] = field(default_factory=set[Key])  # what has neither landed nor been withdrawn
    span: Span | None = None
    failed: bool = False


@dataclass(slots=True)
class _Exchange:
    """The KV that goes in one transition."""

    book: BlockBook  # of the layout before; in a restore another one is in force when KV is expected
    retired: BlockBook | None = None  # of layers that this member has given up
    ordered: dict[_Going, BlockRange] = field(default_factory=dict[_Going, BlockRange])
    asked: set[_Going] = field(default_factory=set[_Going])
    to_begin: dict[WorkerId, list[BlockRange]] = field(
        default_factory=dict[WorkerId, list[BlockRange]]
    )  # at the next `flush`
    to_ask: dict[WorkerId, list[SequenceId]] = field(default_factory=dict[WorkerId, list[SequenceId]])  # likewise
    waiting: dict[WorkerId, deque[Send]] = field(default_factory=dict[WorkerId, deque[Send]])  # for room on the link
    given: dict[SequenceId, None] = field(default_factory=dict[SequenceId, None])  # in this wave


class Mover:
    def __init__(self, block_tokens: int, block_bytes: int, withdraw: Callable[[Key], bool]) -> None:
        """`block_bytes`: of a block in one layer. `withdraw`: nothing is to come there; False: it may be coming now."""
        self._block_tokens = block_tokens
        self._block_bytes = block_bytes
        self._withdraw = withdraw
        self._coming: dict[_Move, _Coming] = {}
        self._held: set[SequenceId] = set()  # hold blocks here and are not this group's yet
        self._is = _Exchange(BlockBook(0, block_tokens))

    @property
    def holds(self) -> bool:
        """Blocks are kept here for a migration."""
        return bool(self._held)

    # ------------------------------------------------------------ coming

    def expect(self, command: ExpectKv, book: BlockBook) -> list[Place | CopyOver]:
        """`book` is in force."""
        sequence_id, token_count = command.victim.sequence_id, command.victim.computed_tokens
        table, end_block = book.hold(sequence_id, token_count), blocks_for(token_count, self._block_tokens)
        commands: list[Place | CopyOver] = []
        if book is not self._is.book:  # this stage's own layers have it in the other window
            before = self._is.book.table(sequence_id)[:end_block]
            commands.append(CopyOver(tuple(zip(before, table, strict=True))))
        if command.hops:
            move, coming = (command.epoch, sequence_id), _Coming(command.epoch, exchanged=True)
            commands += self._let_come(move, coming, command.hops, (0, end_block), table)
        for giver in sorted(hop.giver for hop in command.hops):
            self._is.to_ask.setdefault(giver, []).append(sequence_id)
        return commands

    def take(self, take: Take, coming_here: Sequence[Hop], book: BlockBook) -> list[Place] | None:
        """None: there is no room."""
        sequence_id = take.sequence_id
        if take.last_block - len(book.table(sequence_id)) > book.free_count:
            return None
        self._held.add(sequence_id)
        table = book.hold(sequence_id, take.last_block * self._block_tokens)
        move, coming = (take.migration_id, sequence_id), _Coming(take.epoch, exchanged=False)
        return self._let_come(move, coming, coming_here, (take.first_block, take.last_block), table)

    def _let_come(
        self, move: _Move, coming: _Coming, mine: Iterable[Hop], blocks: tuple[int, int], table: Table
    ) -> list[Place]:
        self._coming[move] = coming
        places = [Place((*move, hop.giver, hop.first_layer), hop, *blocks, table) for hop in mine]
        coming.keys.update(place.key for place in places)
        return places

    def landed(
        self, at_s: float, giver: WorkerId, piece: Piece, *, delivered: bool
    ) -> list[KvReceived | Landed] | None:
        """The news of a piece that has come, or has failed to. None: nobody waits for it."""
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
        """The layout is about to change: what comes is not let in any more. The leader says when blocks are free."""
        return self._fail_all(lambda _: True)

    def _fail_all(self, which: Callable[[_Coming], bool]) -> list[Landed]:
        found = [(move, coming) for move, coming in self._coming.items() if which(coming)]
        return [landed for move, coming in found for landed in self._fail(move, coming)]

    def _fail(self, move: _Move, coming: _Coming) -> list[Landed]:
        """Withdraws the places of a migration that fails, and reports it once nothing is being written into them.

        An exchange that fails takes its group with it.
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

    # ------------------------------------------------------------ going, in a migration

    def give(self, give: Give, stage: Stage, book: BlockBook) -> list[Send] | None:
        """None: it is not here any more."""
        span, table = give.span, book.table(give.sequence_id)
        if len(table) < span.last_block:
            return None
        mode = Mode.LAST if span.last else Mode.AHEAD
        blocks, sends = table[span.first_block : span.last_block], list[Send]()
        for _, taker, first, last in hops((stage,), give.takers):
            piece = Piece(give.migration_id, give.sequence_id, first, last, span)
            sends.append(Send(taker, give.epoch, mode, (BlockRange(piece, blocks),)))
        return sends

    # ------------------------------------------------------------ going, in an exchange

    def begin(self, book: BlockBook) -> None:
        """A transition begins. `book`: of the layout in force."""
        self._is = _Exchange(book)

    def order(self, command: SendKv) -> int:
        """It goes when its receiver asks, or has asked. Returns how many bytes it is."""
        victim, is_ = command.victim, self._is
        span = Span(0, blocks_for(victim.computed_tokens, self._block_tokens), victim.computed_tokens, last=True)
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
        blocks = book.table(piece.sequence_id)[: piece.span.last_block]
        if len(blocks) < piece.span.last_block:
            raise InvariantViolation(f"{piece} is to travel, and it is in {len(blocks)} blocks")
        return blocks

    def _size_of(self, block_range: BlockRange) -> int:
        return (
            len(block_range.blocks) * self._block_bytes * (block_range.piece.last_layer - block_range.piece.first_layer)
        )

    def asked(self, peer: WorkerId, sequence_ids: Iterable[SequenceId]) -> None:
        """A peer has its blocks ready, and may have before this stage hears what it is to give."""
        for sequence_id in sequence_ids:
            if (block_range := self._is.ordered.pop((sequence_id, peer), None)) is not None:
                self._is.to_begin.setdefault(peer, []).append(block_range)
            else:
                self._is.asked.add((sequence_id, peer))

    def flush(self) -> list[Ask | Send]:
        """Asks for what has been expected, and sends what has been asked for, since the last time."""
        to_ask, self._is.to_ask = self._is.to_ask, {}
        to_begin, self._is.to_begin = self._is.to_begin, {}
        commands: list[Ask | Send] = [Ask(giver, tuple(ids)) for giver, ids in to_ask.items()]
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
        """The link has no room for it: in an exchange again, when it has some."""
        if send.mode is Mode.EXCHANGE:
            self._is.waiting.setdefault(send.to, deque()).append(send)

    @property
    def waiting_to(self) -> tuple[WorkerId, ...]:
        return tuple(self._is.waiting)

    def again(self, to: WorkerId) -> Iterator[Send]:
        """The transfers that had been refused, one by one until one is refused again."""
        waiting = self._is.waiting.pop(to, deque[Send]())
        while waiting and to not in self._is.waiting:
            yield waiting.popleft()
        if waiting:
            self._is.waiting[to].extend(waiting)

    def sent(self, at_s: float, send: Send) -> list[KvSent]:
        """The receiver has it."""
        return [KvSent(at_s, send.epoch, block_range.piece.sequence_id, send.to) for block_range in send.block_ranges]

    # ------------------------------------------------------------ layers given up

    def retire(self) -> int:
        """The book is still that of the old layout. Returns how many blocks of the layers given up are needed."""
        self._is.retired = self._is.book.copy()
        self._is.retired.forget_numbers()
        return self._is.retired.used_end

    def forget(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Frees blocks of sequences whose KV has been sent, or is wanted by nobody."""
        if (book := self._is.retired) is not None:
            for sequence_id in sequence_ids:
                book.release(sequence_id)

    def compact(self) -> tuple[int, tuple[tuple[int, int], ...]]:
        """Nothing is being sent: how many blocks of the layers given up are needed from now on, and which have to be
        copied (from, to) so that these are the first ones.
        """
        given, self._is.given = self._is.given, {}
        self.forget(given)
        if (book := self._is.retired) is None:
            return 0, ()
        moves = book.compaction_plan(book.used_count)
        book.compacted(moves)
        book.shrink(book.used_count)
        return book.used_end, moves

    # ------------------------------------------------------------ its end

    def abandon(self) -> None:
        """The group is lost, and all blocks are somebody else's."""
        for coming in self._coming.values():
            for key in coming.keys:
                self._withdraw(key)
        self._coming.clear()
        self._held.clear()
        self.begin(self._is.book)

    def check(self, places: Iterable[Key]) -> None:
        """Raise InvariantViolation unless the account is about what is on its way.

        Args:
            places: In which KV may be written.
        """
        is_, expected = self._is, {key for coming in self._coming.values() for key in coming.keys}
        if unknown := set(places) - expected:
            raise InvariantViolation(f"KV may be written into {sorted(unknown)}, and nobody waits for it")
        if idle := [move for move, coming in self._coming.items() if not coming.keys]:
            raise InvariantViolation(f"{idle} are waited for, and nothing is to come")
        held = {sequence_id for (_, sequence_id), coming in self._coming.items() if not coming.exchanged}
        if lost := held - self._held:
            raise InvariantViolation(f"KV of {sorted(lost)} comes into blocks that are not kept for it")
        if stuck := is_.ordered.keys() & is_.asked:
            raise InvariantViolation(f"{sorted(stuck)} has been asked for and does not go")
        if is_.retired is not None:
            is_.retired.check()
