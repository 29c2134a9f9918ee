"""What a stage sends and receives, and the resulting events. Blocks have 16 tokens, each of one byte per layer."""

import random

import pytest

from ballast.common.errors import InvariantViolation
from ballast.common.ids import Epoch, WorkerId
from services.worker.core import mover as module
from services.worker.core.blocks import BlockBook, Table
from services.worker.core.migration_messages import Give, Keep, Landed, Stop, Take
from services.worker.core.mover import BlockRange, CopyOver, KvPlace, KvRequest, Mode, Mover, Send
from services.worker.core.plan import Victim
from services.worker.core.spans import Hop, Key, KvRange, Piece, StageLayers, hops, key_of
from services.worker.core.transition_messages import ExpectKv, KvReceived, KvSent, SendKv

W0, W1, W2, W3 = (WorkerId(f"w{i}") for i in range(4))
EPOCH, MIGRATION, SEQUENCE = Epoch(3), 77, 5
GIVERS = (StageLayers(W1, 0, 5), StageLayers(W2, 5, 8))
ALL = StageLayers(W0, 0, 8)


class Stands:
    """A mover, its block book, and the registered destinations that no link uses yet."""

    def __init__(self, block_count: int = 200) -> None:
        self.book = BlockBook(block_count, 16)
        self.places: set[Key] = set()
        self.mover = Mover(16, 1, self.withdraw)
        self.mover.begin(self.book)

    def withdraw(self, key: Key) -> bool:
        there = key in self.places
        self.places.discard(key)
        return there

    def expect(self, sequence_id: int, tokens: int, book: BlockBook | None = None) -> list[KvPlace | CopyOver]:
        command = ExpectKv(EPOCH, Victim(sequence_id, tokens, W1), tuple(hops(GIVERS, (ALL,))))
        commands = self.mover.expect(command, book or self.book)
        self.places |= {command.key for command in commands if isinstance(command, KvPlace)}
        return commands

    def take(self, last_block: int = 4) -> list[KvPlace] | None:
        take = Take(MIGRATION, SEQUENCE, EPOCH, 0, last_block, GIVERS)
        places = self.mover.take(take, hops(GIVERS, (ALL,)), self.book)
        self.places |= {place.key for place in places or ()}
        return places

    def lands(self, giver: WorkerId, piece: Piece, *, delivered: bool = True) -> list[KvReceived | Landed] | None:
        self.places.discard(key_of(piece, giver))
        return self.mover.landed(1.0, giver, piece, delivered=delivered)

    def order(self, sequence_id: int, tokens: int, to: WorkerId = W1) -> None:
        self.mover.order(SendKv(EPOCH, Victim(sequence_id, tokens, W0), Hop(W0, to, 0, 4)))

    def sends(self) -> list[Send]:
        return [command for command in self.mover.flush() if isinstance(command, Send)]


def piece(first: int, last: int, span: KvRange, move: int = MIGRATION) -> Piece:
    return Piece(move, SEQUENCE, first, last, span)


def whole(sequence_id: int, tokens: int, book: BlockBook) -> BlockRange:
    blocks = -(-tokens // 16)
    return BlockRange(
        Piece(EPOCH, sequence_id, 0, 4, KvRange(0, blocks, tokens, last=True)), book.table(sequence_id)[:blocks]
    )


# ---------------------------------------------------------------- an exchange


@pytest.mark.parametrize("asked_first", [False, True])
def test_kv_is_sent_once_it_is_released_and_requested(asked_first: bool) -> None:
    stands = Stands()
    stands.book.hold(SEQUENCE, 70)
    steps = [lambda: stands.order(SEQUENCE, 60), lambda: stands.mover.asked(W1, (SEQUENCE,))]
    for step in steps[::-1] if asked_first else steps:
        assert stands.sends() == []
        step()
    (send,) = stands.sends()
    assert send == Send(W1, EPOCH, Mode.EXCHANGE, (whole(SEQUENCE, 60, stands.book),))
    assert stands.sends() == [], "the same KV must not be sent twice"
    assert stands.mover.sent(2.0, send) == [KvSent(2.0, EPOCH, SEQUENCE, W1)]


def test_requests_for_kv_are_answered_together_short_ones_first(monkeypatch: pytest.MonkeyPatch) -> None:
    stands = Stands()
    tokens = {1: 100, 2: 20, 3: 20, 4: 300, 5: 5}
    for sequence_id, count in tokens.items():
        stands.book.hold(sequence_id, count)
        stands.order(sequence_id, count)
    stands.order(1, 100, W2)
    monkeypatch.setattr(module, "_TOGETHER_BYTES", 40)
    stands.mover.asked(W1, tuple(tokens))
    stands.mover.asked(W2, (1,))
    sends = stands.sends()
    assert [(s.to, [p.piece.sequence_id for p in s.block_ranges]) for s in sends] == [
        (W1, [5, 2, 3]),  # 20 bytes in all; with sequence 1 it would be 48
        (W1, [1]),
        (W1, [4]),
        (W2, [1]),
    ]
    assert [send.rank for send in sends] == [5, 100, 300, 100]


def test_transfers_wait_in_order_if_a_link_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TOGETHER", 1)
    stands = Stands()
    for sequence_id in (1, 2, 3):
        stands.book.hold(sequence_id, 16)
        stands.order(sequence_id, 16)
    mover = stands.mover
    mover.asked(W1, (1, 2, 3))
    first, second, third = stands.sends()
    assert mover.waiting_to == ()
    for send in (first, second, third):
        mover.refused(send)
    tried: list[Send] = []
    for send in mover.again(W1):
        tried.append(send)
        if send is second:
            mover.refused(send)
    assert tried == [first, second]
    assert mover.waiting_to == (W1,)
    assert [*mover.again(W1)] == [second, third]
    assert mover.waiting_to == ()


def test_a_victim_has_blocks_before_its_senders_are_asked_and_each_arrival_is_reported() -> None:
    stands = Stands()
    places = stands.expect(SEQUENCE, 40)
    table = stands.book.table(SEQUENCE)
    assert places == [
        KvPlace((EPOCH, SEQUENCE, W1, 0), Hop(W1, W0, 0, 5), 0, 3, table),
        KvPlace((EPOCH, SEQUENCE, W2, 5), Hop(W2, W0, 5, 8), 0, 3, table),
    ]
    stands.expect(6, 20)
    assert stands.mover.flush() == [KvRequest(W1, (SEQUENCE, 6)), KvRequest(W2, (SEQUENCE, 6))]
    assert stands.mover.flush() == []
    span = KvRange(0, 3, 40, last=True)
    assert stands.lands(W2, piece(5, 8, span, EPOCH)) == [KvReceived(1.0, EPOCH, SEQUENCE, W2)]
    assert stands.lands(W2, piece(5, 8, span, EPOCH)) is None, "a duplicate"
    assert stands.lands(W1, piece(0, 5, span, EPOCH), delivered=False) == []
    assert not stands.mover.holds


def test_kv_in_blocks_of_the_previous_group_is_copied() -> None:
    stands, own = Stands(), BlockBook(10, 16, first_block=500)
    before = stands.book.hold(SEQUENCE, 70)
    command, *_ = stands.expect(SEQUENCE, 40, own)
    assert command == CopyOver(tuple(zip(before[:3], own.table(SEQUENCE), strict=True)))


# ---------------------------------------------------------------- a migration


def test_spans_are_sent_in_place_and_the_last_one_from_a_copy() -> None:
    stands = Stands()
    table = stands.book.hold(SEQUENCE, 70)
    for span, mode, rank in ((KvRange(1, 4, 66), Mode.AHEAD, 1 << 40), (KvRange(4, 5, 70, last=True), Mode.LAST, 0)):
        sends = stands.mover.give(Give(MIGRATION, SEQUENCE, EPOCH, span, GIVERS), ALL, stands.book)
        blocks = table[span.first_block : span.last_block]
        assert sends is not None
        assert sends == [
            Send(stage.worker_id, EPOCH, mode, (BlockRange(piece(stage.first_layer, stage.last_layer, span), blocks),))
            for stage in GIVERS
        ]
        assert {send.rank for send in sends} == {rank}
        for send in sends:
            stands.mover.refused(send)
    assert stands.mover.waiting_to == (), "the leader is notified of the refusal, and nothing is queued"
    assert stands.mover.give(Give(MIGRATION, SEQUENCE, EPOCH, KvRange(4, 6, 90), GIVERS), ALL, stands.book) is None


def test_a_span_has_arrived_when_all_senders_have_sent_it() -> None:
    stands, span = Stands(), KvRange(0, 3, 50)
    stands.take()
    assert stands.mover.holds
    assert stands.lands(W1, piece(0, 5, span)) == []
    assert stands.lands(W2, piece(5, 8, span)) == [Landed(MIGRATION, span)]
    stands.mover.keep(Keep(MIGRATION, SEQUENCE, 30), stands.book)
    assert len(stands.book.table(SEQUENCE)) == 2
    assert not stands.mover.holds


def test_different_spans_of_several_senders_do_not_count() -> None:
    stands = Stands()
    stands.take()
    assert stands.lands(W1, piece(0, 5, KvRange(0, 3, 50))) == []
    assert stands.lands(W2, piece(5, 8, KvRange(0, 2, 50))) == [Landed(MIGRATION, None)]


@pytest.mark.parametrize("how", ["stopped", "a giver is lost", "the layout changes"])
def test_withdrawn_transfers_end_and_active_writes_are_waited_for(how: str) -> None:
    stands = Stands()
    stands.take()
    stands.places.discard((MIGRATION, SEQUENCE, W1, 0))  # a link thread is writing into it
    mover = stands.mover
    ends = {
        "stopped": lambda: mover.stop(Stop(MIGRATION)),
        "a giver is lost": lambda: mover.peer_lost(EPOCH, W2),
        "the layout changes": mover.give_up,
    }
    assert mover.peer_lost(Epoch(2), W2) == [], "another epoch's link"
    assert ends[how]() == []
    assert stands.places == set()
    assert mover.holds
    assert stands.lands(W1, piece(0, 5, KvRange(0, 3, 50))) == [Landed(MIGRATION, None)]


def test_without_room_no_block_is_allocated() -> None:
    stands = Stands(block_count=3)
    assert stands.take() is None
    assert not stands.mover.holds
    assert stands.book.used_count == 0


def test_a_lost_group_waits_for_nothing() -> None:
    stands = Stands()
    stands.take()
    stands.expect(6, 20)
    stands.book.hold(7, 16)
    stands.order(7, 16)
    stands.mover.abandon()
    assert stands.places == set()
    assert not stands.mover.holds
    stands.mover.asked(W1, (7,))
    assert stands.mover.flush() == []
    assert stands.lands(W1, piece(0, 5, KvRange(0, 3, 50))) is None


# ---------------------------------------------------------------- dropped layers


def filled(rng: random.Random, sequences: int) -> BlockBook:
    """A block book whose sequences have interleaved blocks, with free ones between them."""
    book = BlockBook(200, 16)
    tokens = dict.fromkeys(range(sequences), 0)
    for _ in range(120):
        sequence_id = rng.randrange(sequences)
        tokens[sequence_id] += 16
        book.hold(sequence_id, tokens[sequence_id])
    for sequence_id in rng.sample(range(sequences), sequences // 4):
        book.release(sequence_id)
    return book


def retired(mover: Mover, sequence_id: int) -> Table:
    """The blocks of the dropped layers from which the sequence's KV would be sent."""
    assert mover._is.retired is not None
    return mover._is.retired.table(sequence_id)


def test_tables_of_dropped_layers_survive_changes_of_the_book() -> None:
    stands = Stands(block_count=8)
    before = stands.book.hold(1, 40)
    assert stands.mover.retire() == 3
    stands.book.release(1)
    stands.book.hold(2, 60)
    assert retired(stands.mover, 1) == before
    assert retired(stands.mover, 2) == ()
    stands.order(1, 40)
    stands.mover.asked(W1, (1,))
    (send,) = stands.sends()
    assert send.block_ranges[0].blocks == before
    with pytest.raises(InvariantViolation, match="0 blocks"):
        stands.order(2, 60)


def test_sent_kv_is_forgotten_between_two_waves() -> None:
    stands = Stands()
    for sequence_id in (1, 2, 3):
        stands.book.hold(sequence_id, 32)
    assert stands.mover.compact() == (0, ()), "no layer has been dropped"
    stands.mover.retire()
    stands.order(1, 32)
    assert stands.mover.compact() == (4, ((4, 0), (5, 1)))
    assert retired(stands.mover, 1) == ()
    assert stands.mover.compact() == (4, ())


@pytest.mark.parametrize("seed", range(10))
def test_compaction_makes_the_remaining_blocks_contiguous_and_unchanged(seed: int) -> None:
    rng, stands = random.Random(seed), Stands()
    book, mover = filled(rng, 12), stands.mover
    mover.begin(book)
    mover.retire()
    content = {block: block for block in range(200)}  # one layer: each block holds its old number
    left = set(book.sequence_ids)
    while left:
        gone = rng.sample(sorted(left), min(len(left), 3))
        left -= set(gone)
        mover.forget(gone)
        used_end, moves = mover.compact()
        mover.check(places=())
        assert not {source for source, _ in moves} & {to for _, to in moves}
        content.update({to: content[source] for source, to in moves})
        for sequence_id in left:
            assert tuple(content[block] for block in retired(mover, sequence_id)) == book.table(sequence_id)
        assert used_end == sum(len(book.table(sequence_id)) for sequence_id in left)


def test_a_destination_that_is_not_awaited_is_detected() -> None:
    """Otherwise KV for an abandoned exchange would be written into blocks that belong to another sequence by then."""
    stands = Stands()
    stands.expect(SEQUENCE, 70)
    stands.mover.check(stands.places)
    left = set(stands.places)
    stands.mover.abandon()
    stands.mover.check(stands.places)
    with pytest.raises(InvariantViolation, match="unexpected KV may be written"):
        stands.mover.check(left)
