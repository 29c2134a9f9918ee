"""Which victim gets blocks in which wave. Stages are represented by block counts only. Every victim must get its KV or
be recomputed, and no stage may ever hold more blocks than it has.
"""

import random
from collections.abc import Mapping

import pytest

from ballast.common.errors import InvariantViolation
from ballast.common.ids import WorkerId
from services.worker.core.plan import Victim
from services.worker.core.waves import MovedSequence, Wave, Waves

A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")


def standing(sequence_id: int, home: WorkerId, blocks: int, *, rank: int = 0, arrival_s: float = 0.0) -> MovedSequence:
    """A sequence that has run on one worker and whose next token needs no further block."""
    victim = Victim(sequence_id, blocks * 16 - 1, home)
    return MovedSequence(victim, rank, (arrival_s, sequence_id), blocks, blocks, frozenset({home}))


def ids(victims: tuple[Victim, ...]) -> list[int]:
    return [victim.sequence_id for victim in victims]


def test_there_is_one_wave_if_all_victims_fit() -> None:
    waves = Waves((A, B), [standing(1, A, 6), standing(2, B, 4)])
    assert waves.first({A: 10, B: 10}, 20) == Wave((Victim(1, 95, A), Victim(2, 63, B)), (), True)
    assert waves.lent_blocks({A: 10, B: 10}) == (10, 0)


def test_two_full_workers_exchange_as_much_as_their_spare_blocks_allow() -> None:
    """Each worker had 50 blocks, has 81 now, and 131 once all KV is sent; each holds five sequences of ten blocks."""
    waves = Waves((A, B), [standing(2 * i + (home == B), home, 10) for i in range(5) for home in (A, B)])
    counts = {A: 81, B: 81}
    first = waves.first(counts, 131)
    assert ids(first.admitted) == [0, 1, 2, 3]  # two sequences from each worker, with a reserve of one block for each
    assert (first.lost, first.last) == ((), False)
    assert waves.lent_blocks(counts) == (81, 30)  # each worker holds three waiting sequences
    second = waves.next({A: 101, B: 101}, reserved_blocks=40, gone=())
    assert ids(second.admitted) == [4, 5, 6, 7, 8, 9]  # all remaining sequences fit
    assert second.last
    assert waves.lent_blocks(counts) == (81, 0)


def test_the_latest_victims_of_the_lowest_class_are_recomputed() -> None:
    waves = Waves(
        (A, B),
        [
            standing(1, A, 5, rank=2, arrival_s=0.0),
            standing(2, A, 5, rank=0, arrival_s=3.0),
            standing(3, B, 5, rank=1, arrival_s=2.0),
            standing(4, B, 5, rank=1, arrival_s=1.0),
        ],
    )
    wave = waves.first({A: 15, B: 15}, 15)
    assert (ids(wave.admitted), ids(wave.lost), wave.last) == ([2, 3, 4], [1], True)


def test_without_spare_blocks_the_last_victim_in_the_queue_is_recomputed() -> None:
    waves = Waves((A, B), [standing(1, A, 4), standing(2, B, 4), standing(3, B, 1, rank=2)])
    first = waves.first({A: 4, B: 5}, 12)
    assert (first.admitted, first.lost, first.last) == ((), (), False)
    second = waves.next({A: 4, B: 5}, reserved_blocks=0, gone=())
    assert (ids(second.admitted), ids(second.lost), second.last) == ([], [3], False)
    third = waves.next({A: 4, B: 5}, reserved_blocks=0, gone=())
    assert (ids(third.admitted), ids(third.lost), third.last) == ([1], [2], True)


def test_victims_that_have_ended_are_dropped() -> None:
    waves = Waves((A, B), [standing(1, A, 4), standing(2, B, 4), standing(3, B, 4)])
    assert ids(waves.first({A: 8, B: 9}, 16).admitted) == [2]
    wave = waves.next({A: 8, B: 9}, reserved_blocks=4, gone={1})
    assert (ids(wave.admitted), ids(wave.lost), wave.last) == ([3], [1], True)


def test_holding_more_blocks_than_exist_is_detected() -> None:
    waves = Waves((A, B), [standing(1, A, 4), standing(2, B, 4)])
    waves.first({A: 4, B: 4}, 12)
    waves.check({A: 4, B: 4})
    with pytest.raises(InvariantViolation, match="a: 4 of 3 are held by waiting sequences"):
        waves.check({A: 3, B: 4})


class Stages:
    """Stages that drop `share` layers for each layer that they keep: KV sent in one wave makes room in the next."""

    def __init__(self, rng: random.Random) -> None:
        self.names = (A, B, C)[: rng.choice([2, 3])]
        before = rng.randrange(20, 200)
        self.more = rng.randrange(0, before)  # blocks from dropped parameters
        self.counts = dict.fromkeys(self.names, before + self.more)
        self.sequences: list[MovedSequence] = []
        fullness = rng.choice([0.5, 0.9, 1.0])
        for home in self.names:
            left = int(before * fullness)
            while left > 0:
                blocks = min(left, rng.randrange(1, rng.choice([4, 40])))
                left -= blocks
                number = len(self.sequences)
                self.sequences.append(
                    standing(number, home, blocks, rank=rng.randrange(3), arrival_s=float(rng.randrange(5)))
                )
        self.before = before
        self.share = len(self.names) - 1  # layers dropped for each one that stays

    @property
    def in_the_end(self) -> int:
        return self.before + self.more + self.share * self.before

    def send(self, wave: Wave, homes: Mapping[int, MovedSequence]) -> None:
        """Adds the blocks that become free once the wave's KV has been sent or discarded."""
        for victim in (*wave.admitted, *wave.lost):
            self.counts[homes[victim.sequence_id].victim.old_leader] += (
                self.share * homes[victim.sequence_id].held_blocks
            )


@pytest.mark.parametrize("seed", range(60))
def test_every_victim_gets_room_or_is_recomputed_and_no_block_is_promised_twice(seed: int) -> None:
    rng = random.Random(seed)
    stages = Stages(rng)
    homes = {s.victim.sequence_id: s for s in stages.sequences}
    waves = Waves(stages.names, stages.sequences)
    wave = waves.first(stages.counts, stages.in_the_end)
    admitted: list[int] = []
    lost: list[int] = []
    rounds = 0
    while True:
        admitted += ids(wave.admitted)
        lost += ids(wave.lost)
        taken = sum(homes[i].need_blocks for i in admitted)
        for stage in stages.names:
            waiting = [homes[i] for i in waves.waiting_ids]
            held = sum(s.held_blocks for s in waiting if stage in s.holders)
            assert taken + held <= stages.counts[stage]
        waves.check(stages.counts)
        if wave.last:
            break
        stages.send(wave, homes)
        wave = waves.next(stages.counts, taken, ())
        assert wave.admitted or wave.lost
        rounds += 1
    assert sorted(admitted + lost) == sorted(homes)
    assert rounds <= len(homes)
    largest = max(s.need_blocks for s in stages.sequences)
    if stages.more >= 2 * (largest + 1):  # room for the largest one between any waves
        assert not lost
