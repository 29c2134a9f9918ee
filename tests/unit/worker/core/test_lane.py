"""A lane by itself: no streams, no dispatchers, no stop rules."""

import pytest

from ballast.common.errors import InvariantViolation
from ballast.common.ids import RequestId
from services.worker.core.batch import SequenceId, StepResult
from services.worker.core.events import CapacityChanged, Execute, KvArrived, KvTravels, RoleChanged, Submitted
from services.worker.core.handover import stop_rule
from services.worker.core.lane import Lane
from services.worker.core.sequence import NOBODY, Sequence, SequenceState
from tests.support.worker_core import greedy, limits

_LIMITS = limits(block_tokens=4)


class Owner:
    """The owner of sequences in one lane."""

    def __init__(self, block_count: int) -> None:
        self.ended: list[SequenceId] = []
        self.lane = Lane(_LIMITS, block_count, self._outgrown)

    def _outgrown(self, sequence: Sequence, at_s: float) -> None:
        self.end(sequence)

    def end(self, sequence: Sequence) -> None:
        self.ended.append(sequence.sequence_id)
        self.lane.end(sequence)
        sequence.move(SequenceState.ENDED, 0.0, "its owner says so")
        self.lane.check()

    def enter(self, sequence_id: int, token_count: int) -> Sequence:
        submitted = Submitted(
            at_s=float(sequence_id),
            key=NOBODY,
            request_id=RequestId(f"r{sequence_id}"),
            attempt=1,
            prompt_token_ids=(7,) * token_count,
            sampling=greedy(50),
        )
        sequence = Sequence(sequence_id, submitted, stop_rule(submitted, _LIMITS, ("", 0, 0)))
        self.lane.enter(sequence, 0.0)
        self.lane.check()
        return sequence

    def step(self) -> list[SequenceId]:
        """Sequences that took part."""
        self.lane.demand_place()
        formed = self.lane.form(0.0)
        self.lane.check()
        if not isinstance(formed, Execute):
            return []
        count = sum(part.samples for part in formed.batch.slices)
        flight = self.lane.land(StepResult(formed.batch.step_id, (5,) * count, (None,) * count, 0.0), count)
        for sequence, computed_tokens, samples in flight.shares:
            sequence.computed_tokens = computed_tokens
            if samples:
                sequence.append(5)
        self.lane.shed(0.0)
        self.lane.check()
        return [part.sequence_id for part in formed.batch.slices]


def test_what_enters_runs_until_its_owner_ends_it() -> None:
    owner = Owner(8)
    first, second = owner.enter(1, 3), owner.enter(2, 3)
    assert owner.lane.has_work
    assert [owner.step(), owner.step()] == [[1, 2], [1, 2]]
    assert owner.lane.kv_tokens == {1: 4, 2: 4}
    owner.end(first)
    assert owner.lane.sequence_ids == (2,)
    assert not owner.lane.settled, "the stages have yet to hear of it"
    assert owner.step() == [2]
    assert owner.lane.settled
    owner.end(second)
    assert not owner.lane.has_work
    assert owner.lane.sequences == []


def test_who_has_outgrown_the_cache_is_told_to_its_owner_and_others_go_on() -> None:
    owner = Owner(2)
    owner.enter(1, 5)
    owner.enter(2, 2)  # waits
    assert [owner.step() for _ in range(4)] == [[1]] * 4
    assert owner.ended == []
    assert owner.step() == [2]
    assert owner.ended == [1]


def test_in_a_cache_that_shrinks_who_is_too_big_ends_before_anybody_is_preempted() -> None:
    owner = Owner(8)
    large, small = owner.enter(1, 12), owner.enter(2, 3)
    owner.step()
    owner.lane.handle(CapacityChanged(0.0, 2))
    owner.lane.check()
    assert owner.ended == [large.sequence_id]
    assert small.state is SequenceState.RUNNING


def test_who_ends_while_its_kv_travels_keeps_its_blocks_until_that_is_over() -> None:
    owner = Owner(8)
    sequence = owner.enter(1, 3)
    owner.step()
    owner.lane.handle(KvTravels(0.0, frozenset({1})))
    owner.end(sequence)
    assert owner.lane.suspended_ids == (1,)
    assert owner.lane.sequence_ids == ()
    assert owner.lane.is_occupied
    assert owner.lane.reserved_block_count == 1
    owner.lane.handle(KvArrived(0.0, 1))
    owner.lane.check()
    assert not owner.lane.is_occupied
    assert owner.lane.reserved_block_count == 0


def test_a_group_of_more_stages_takes_more_batches_and_knows_nobody_yet() -> None:
    owner = Owner(16)
    one, two = owner.enter(1, 3), owner.enter(2, 3)
    owner.step()
    owner.lane.handle(RoleChanged(0.0, leads=True, stage_count=2))
    assert (one.in_engine, two.in_engine) == (False, False)
    formed = [owner.lane.form(0.0) for _ in range(2)]
    assert [len(f.batch.added) for f in formed if isinstance(f, Execute)] == [1, 1]
    assert not owner.lane.has_work
    with pytest.raises(InvariantViolation, match="a batch is wanted while step 2 runs"):
        owner.lane.demand_place()


def test_a_group_that_is_lost_leaves_nothing() -> None:
    owner = Owner(8)
    travelling, flying = owner.enter(1, 3), owner.enter(2, 3)
    owner.step()
    owner.lane.handle(KvTravels(0.0, frozenset({1})))
    assert isinstance(owner.lane.form(0.0), Execute)
    for sequence in (travelling, flying):
        owner.end(sequence)
    owner.lane.abandon()
    assert owner.lane.settled
    assert not owner.lane.is_occupied
    assert owner.lane.reserved_block_count == 0
