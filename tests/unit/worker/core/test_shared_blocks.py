"""Blocks that sequences share while their group changes are counted once, and sent once to each stage."""

import pytest

from ballast.common.errors import InvariantViolation
from ballast.common.ids import Epoch, WorkerId
from services.worker.core.blocks import BlockBook
from services.worker.core.events import CapacityChanged, KvAdmitted, KvArrived, KvTravels, RoleChanged
from services.worker.core.mover import CopyOver, KvPlace, Mover, Send
from services.worker.core.plan import Victim, shared_numbers
from services.worker.core.spans import Hop, KvRange
from services.worker.core.transition_messages import ExpectKv, SendKv
from services.worker.core.waves import MovedSequence, Waves
from tests.support.worker_core import Driver, greedy, limits

A, B = WorkerId("a"), WorkerId("b")
EPOCH = Epoch(3)


def victim(sequence_id: int, *blocks: int, leader: WorkerId = A, tokens: int = 64) -> Victim:
    return Victim(sequence_id, tokens, leader, blocks)


def test_numbers_identify_blocks_together_with_all_preceding_ones() -> None:
    found = shared_numbers(
        [victim(1, 5, 6), victim(2, 5, 6, 7), victim(3, 9, 6), victim(4, 5, leader=B), victim(5)], EPOCH
    )
    assert len(found[1]) == 2
    assert found[2] == found[1], "block 7 is not shared"
    assert found[3] == found[4] == found[5] == (), "the same id after another block, or in another book"
    later = shared_numbers([victim(1, 5), victim(2, 5)], Epoch(4))
    assert {*found[1], *later[1]} == {*found[1]} | {*later[1]}
    assert not {*found[1]} & {*later[1]}
    assert max(*found[1], *later[1]) < -(1 << 62) + 1


# ---------------------------------------------------------------- books


def test_a_table_gets_the_first_blocks_of_another() -> None:
    book = BlockBook(10, 16)
    first, own = book.hold(1, 48), book.hold(2, 64)
    book.share(2, 1, 2)
    assert book.table(2) == (*first[:2], *own[2:])
    assert book.free_count == 5, "two blocks that sequence 2 held are free"
    assert book.shared({1: 48, 2: 64, 7: 16}) == {1: first[:2], 2: first[:2], 7: ()}
    assert book.shared({2: 17}) == {2: first[:1]}, "the block of its last token is not shared"
    book.share(3, 1, 1)
    book.check()
    book.release(1)
    book.check()
    assert book.table(3) == first[:1]
    assert book.shared({2: 64}) == {2: first[:1]}
    with pytest.raises(InvariantViolation, match="are shared"):
        book.share(4, 3, 2)


def test_a_number_alone_does_not_make_a_block_shared() -> None:
    book = BlockBook(10, 16)
    first = book.hold(1, 48)
    book._name(1, 0, 100, 2)  # pyright: ignore[reportPrivateUsage]
    assert book.shared({1: 48}) == {1: ()}
    book._take(2, [100])  # pyright: ignore[reportPrivateUsage]
    assert book.shared({1: 48}) == {1: first[:1]}


# ---------------------------------------------------------------- transfers


def test_shared_blocks_are_expected_and_sent_once() -> None:
    """The second sequence shares two blocks with the first one, which is sent before it."""
    book = BlockBook(20, 16)
    mover = Mover(16, 1, lambda _: True)
    mover.begin(book)
    hop, first = Hop(A, B, 0, 4), Victim(1, 60, A)
    second = Victim(2, 60, A, donor=1, donated_count=2)
    [place] = mover.expect(ExpectKv(EPOCH, first, (hop,)), book)
    [other] = mover.expect(ExpectKv(EPOCH, second, (hop,)), book)
    assert isinstance(place, KvPlace)
    assert isinstance(other, KvPlace)
    assert (place.first_block, place.last_block) == (0, 4)
    assert (other.first_block, other.last_block, other.table[:2]) == (2, 4, place.table[:2])
    assert book.used_count == 6
    sizes = [mover.order(SendKv(EPOCH, one, hop)) for one in (first, second)]
    assert sizes == [4 * 4, 2 * 4]
    mover.asked(B, (1, 2))
    [send] = [command for command in mover.flush() if isinstance(command, Send)]
    ranges = {r.piece.sequence_id: r for r in send.block_ranges}
    assert ranges[2].piece.span == KvRange(2, 4, 60, last=True)
    assert ranges[2].blocks == book.table(2)[2:]


def test_shared_blocks_are_copied_once_into_the_book_of_a_restore() -> None:
    before, book = BlockBook(20, 16), BlockBook(20, 16, first_block=100)
    before.hold(1, 60)
    before.share(2, 1, 2)
    before.hold(2, 60)
    mover = Mover(16, 1, lambda _: True)
    mover.begin(before)
    [whole] = mover.expect(ExpectKv(EPOCH, Victim(1, 60, A), ()), book)
    [rest] = mover.expect(ExpectKv(EPOCH, Victim(2, 60, A, donor=1, donated_count=2), ()), book)
    assert isinstance(whole, CopyOver)
    assert isinstance(rest, CopyOver)
    assert (len(whole.moves), len(rest.moves)) == (4, 2)
    assert book.used_count == 6


# ---------------------------------------------------------------- waves


def standing(sequence_id: int, *shared: int, own: int = 3, home: WorkerId = A) -> MovedSequence:
    one = Victim(sequence_id, 1, home)
    return MovedSequence(one, 0, (0.0, sequence_id), own, own, frozenset({home}), frozenset(shared))


def test_sequences_that_share_blocks_fit_where_separate_ones_would_not() -> None:
    waves = Waves((A, B), [standing(n, -1, -2, -3, -4) for n in range(4)])
    first = waves.first({A: 16, B: 16}, 16)
    assert (len(first.admitted), first.lost, first.last) == (4, (), True)
    short = Waves((A, B), [standing(n, -1, -2, -3, -4) for n in range(4)]).first({A: 15, B: 15}, 15)
    assert (len(short.admitted), [v.sequence_id for v in short.lost]) == (3, [3])


def test_blocks_shared_by_waiting_sequences_count_on_every_stage() -> None:
    waves = Waves((A, B), [standing(n, -1, -2, own=4) for n in range(4)])
    first = waves.first({A: 22, B: 10}, 40)
    assert [v.sequence_id for v in first.admitted] == [0], "needs 2 shared blocks, 4 of its own, 1 in reserve"
    assert waves.lent_blocks({A: 22, B: 10}) == (10, 0), "the three waiting sequences hold 12 of the 22"
    # The admitted sequence has reserved 2 + 4.
    second = waves.next({A: 40, B: 20}, 6, ())
    assert [v.sequence_id for v in second.admitted] == [1, 2, 3]
    assert second.last


# ---------------------------------------------------------------- reservations of the leader


def two_alike() -> Driver:
    """Two running sequences that share two blocks of four tokens; each has three blocks."""
    wide = limits(max_model_len=4096, max_batch_tokens=4096, max_running_count=20, prefix_caching=True)
    driver = Driver(wide, 64)
    driver.open(1)
    for last in (1, 2):
        driver.submit((*range(8), last), greedy(30))
        driver.step()
    driver.step()
    return driver


def test_sharing_survives_the_change_of_a_group_and_ends_with_the_sequences() -> None:
    driver = two_alike()
    group = driver.core.group_scheduler
    scheduler, index = group.scheduler, group.scheduler.prefixes
    assert scheduler.reserved_block_count == 4
    victims = group.own_victims(A)
    driver.core.handle(RoleChanged(driver.at_s, leads=True))
    driver.engine.forget_all()
    assert scheduler.reserved_block_count == 4
    assert index.retained_count == 0
    first, second = (one.sequence_id for one in victims)
    shared = shared_numbers(victims, EPOCH)
    assert [len(numbers) for numbers in shared.values()] == [2, 2]
    driver.core.handle(KvTravels(driver.at_s, frozenset({first, second}), frozenset({second}), shared))
    driver.core.check()
    assert scheduler.reserved_block_count == 3, "the waiting sequence still holds the two shared blocks"
    assert group.with_donors(victims[:1]) == (victims[0],)
    driver.core.handle(KvAdmitted(driver.at_s, frozenset({second})))
    driver.core.check()
    assert scheduler.reserved_block_count == 4
    [told] = group.with_donors(victims[1:])
    assert (told.donor, told.donated_count) == (first, 2)
    for sequence_id in (first, second):
        driver.core.handle(KvArrived(driver.at_s, sequence_id))
    driver.core.check()
    driver.core.handle(CapacityChanged(driver.at_s, 64))
    driver.run_to_end()
    driver.core.check()
    assert index.shared_count == 0
    assert scheduler.reserved_block_count == 0
    assert index.retained_count > 0, "blocks computed since the change are cached again"


def test_a_waiting_sequence_holds_blocks_shared_with_an_ended_one() -> None:
    driver = two_alike()
    group = driver.core.group_scheduler
    victims = group.own_victims(A)
    driver.core.handle(RoleChanged(driver.at_s, leads=True))
    driver.engine.forget_all()
    first, second = (one.sequence_id for one in victims)
    driver.core.handle(
        KvTravels(driver.at_s, frozenset({first, second}), frozenset({second}), shared_numbers(victims, EPOCH))
    )
    driver.core.handle(KvArrived(driver.at_s, first))
    driver.run_to_end()
    driver.core.check()
    assert group.scheduler.reserved_block_count == 2
    driver.core.handle(KvAdmitted(driver.at_s, frozenset({second})))
    assert group.with_donors(victims[1:]) == (victims[1],), "no new stage has the first sequence's blocks"
