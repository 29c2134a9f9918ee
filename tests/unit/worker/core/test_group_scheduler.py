"""A group scheduler on its own: no streams, no dispatchers, no stop rules."""

import pytest

from ballast.common.errors import InvariantViolation
from ballast.common.ids import RequestId
from services.worker.core.batch import SequenceId, StepResult
from services.worker.core.events import CapacityChanged, Execute, KvArrived, KvTravels, RoleChanged, Submitted
from services.worker.core.group_scheduler import GroupScheduler
from services.worker.core.handover import stop_rule
from services.worker.core.sequence import NOBODY, Sequence, SequenceState
from tests.support.worker_core import greedy, limits

_LIMITS = limits(block_tokens=4)


class Owner:
    """Owns the sequences of one group scheduler, as the worker core does."""

    def __init__(self, block_count: int) -> None:
        self.ended: list[SequenceId] = []
        self.group_scheduler = GroupScheduler(_LIMITS, block_count, self._outgrown)

    def _outgrown(self, sequence: Sequence, at_s: float) -> None:
        self.end(sequence)

    def end(self, sequence: Sequence) -> None:
        self.ended.append(sequence.sequence_id)
        self.group_scheduler.end(sequence)
        sequence.move(SequenceState.ENDED, 0.0, "its owner says so")
        self.group_scheduler.check()

    def enter(self, sequence_id: int, token_count: int) -> Sequence:
        submitted = Submitted(
            at_s=float(sequence_id),
            key=NOBODY,
            request_id=RequestId(f"r{sequence_id}"),
            attempt=1,
            prompt_token_ids=(7,) * token_count,
            sampling=greedy(50),
        )
        sequence = Sequence(sequence_id, submitted, stop_rule(submitted, _LIMITS))
        self.group_scheduler.enter(sequence, 0.0)
        self.group_scheduler.check()
        return sequence

    def step(self) -> list[SequenceId]:
        """Runs one step. Returns the ids of the sequences in its batch."""
        self.group_scheduler.demand_place()
        formed = self.group_scheduler.form(0.0)
        self.group_scheduler.check()
        if not isinstance(formed, Execute):
            return []
        count = sum(part.samples for part in formed.batch.slices)
        in_flight_batch = self.group_scheduler.complete(
            StepResult(formed.batch.step_id, (5,) * count, (None,) * count, 0.0), count
        )
        for sequence, computed_tokens, samples in in_flight_batch.shares:
            sequence.computed_tokens = computed_tokens
            if samples:
                sequence.append(5)
        self.group_scheduler.shed(0.0)
        self.group_scheduler.check()
        return [part.sequence_id for part in formed.batch.slices]


def test_a_sequence_runs_until_its_owner_ends_it() -> None:
    owner = Owner(8)
    first, second = owner.enter(1, 3), owner.enter(2, 3)
    assert owner.group_scheduler.has_work
    assert [owner.step(), owner.step()] == [[1, 2], [1, 2]]
    assert owner.group_scheduler.kv_tokens == {1: 4, 2: 4}
    owner.end(first)
    assert owner.group_scheduler.sequence_ids == (2,)
    assert not owner.group_scheduler.settled, "the stages have not been notified yet"
    assert owner.step() == [2]
    assert owner.group_scheduler.settled
    owner.end(second)
    assert not owner.group_scheduler.has_work
    assert owner.group_scheduler.sequences == []


def test_the_owner_is_notified_of_a_sequence_that_outgrew_the_cache() -> None:
    owner = Owner(2)
    owner.enter(1, 5)
    owner.enter(2, 2)  # waits for blocks
    assert [owner.step() for _ in range(4)] == [[1]] * 4
    assert owner.ended == []
    assert owner.step() == [2]
    assert owner.ended == [1]


def test_in_a_shrinking_cache_oversized_sequences_end_before_any_preemption() -> None:
    owner = Owner(8)
    large, small = owner.enter(1, 12), owner.enter(2, 3)
    owner.step()
    owner.group_scheduler.handle(CapacityChanged(0.0, 2))
    owner.group_scheduler.check()
    assert owner.ended == [large.sequence_id]
    assert small.state is SequenceState.RUNNING


def test_an_ended_sequence_holds_its_blocks_until_its_kv_has_arrived() -> None:
    owner = Owner(8)
    sequence = owner.enter(1, 3)
    owner.step()
    owner.group_scheduler.handle(KvTravels(0.0, frozenset({1})))
    owner.end(sequence)
    assert owner.group_scheduler.suspended_ids == (1,)
    assert owner.group_scheduler.sequence_ids == ()
    assert owner.group_scheduler.is_occupied
    assert owner.group_scheduler.reserved_block_count == 1
    owner.group_scheduler.handle(KvArrived(0.0, 1))
    owner.group_scheduler.check()
    assert not owner.group_scheduler.is_occupied
    assert owner.group_scheduler.reserved_block_count == 0


def test_a_group_of_more_stages_takes_more_batches_and_has_no_sequences_yet() -> None:
    owner = Owner(16)
    one, two = owner.enter(1, 3), owner.enter(2, 3)
    owner.step()
    owner.group_scheduler.handle(RoleChanged(0.0, leads=True, stage_count=2))
    assert (one.in_engine, two.in_engine) == (False, False)
    formed = [owner.group_scheduler.form(0.0) for _ in range(2)]
    assert [len(f.batch.added) for f in formed if isinstance(f, Execute)] == [1, 1]
    assert not owner.group_scheduler.has_work
    with pytest.raises(InvariantViolation, match="a batch is requested while step 2 runs"):
        owner.group_scheduler.demand_place()


def test_a_lost_group_leaves_nothing() -> None:
    owner = Owner(8)
    travelling, flying = owner.enter(1, 3), owner.enter(2, 3)
    owner.step()
    owner.group_scheduler.handle(KvTravels(0.0, frozenset({1})))
    assert isinstance(owner.group_scheduler.form(0.0), Execute)
    for sequence in (travelling, flying):
        owner.end(sequence)
    owner.group_scheduler.abandon()
    assert owner.group_scheduler.settled
    assert not owner.group_scheduler.is_occupied
    assert owner.group_scheduler.reserved_block_count == 0
