"""Stories of a leader with several batches in flight, changes of capacity, and KV in transit."""

import pytest

from ballast.common.errors import InvariantViolation
from ballast.common.sampling import FinishReason
from services.worker.core import events as w
from services.worker.policy.microbatching import Microbatching, PipelineView, Share
from tests.support.leader import Leader, reserved
from tests.support.worker_core import MEMORY, greedy

# ---------------------------------------------------------------- several batches in flight


def test_one_batch_per_stage_is_in_flight_and_no_sequence_is_in_two() -> None:
    leader = Leader(stages=3, max_running_count=4, max_batch_tokens=16)
    for number in range(6):
        leader.submit(f"r{number}")
    flying = [leader.batch() for _ in range(3)]
    assert leader.core.in_flight_count == 3
    assert not leader.core.has_work
    with pytest.raises(InvariantViolation, match="a batch is requested while step 1 runs"):
        leader.core.handle(w.BatchWanted(0.0))
    for execute in flying:
        leader.done(execute)
    for _ in range(4):  # from now on each batch takes a third of the sequences
        execute = leader.batch()
        assert execute is not None
        assert len(execute.batch.slices) == 2
        if leader.core.in_flight_count == 3:
            break
    assert leader.core.in_flight_count == 3


def test_while_sequences_wait_the_policy_may_allow_additional_batches_in_flight() -> None:
    views: list[PipelineView] = []

    def form(view: PipelineView) -> Share:
        views.append(view)
        ready = [i for i, c in enumerate(view.candidates) if c.step_id <= view.completed_step_id]
        return [(i, view.candidates[i].token_count - view.candidates[i].computed_tokens) for i in ready[:1]]

    leader = Leader(stages=2, max_running_count=2, max_batch_tokens=16, microbatching=Microbatching(form, ahead=1))
    keys = [leader.submit(f"r{number}") for number in range(5)]
    flying = [leader.batch() for _ in range(3)]
    assert all(flying)
    assert [(view.in_flight_count, view.waiting_count) for view in views] == [(0, 1), (1, 1), (2, 1)]
    assert not leader.core.has_work  # three batches are in flight
    leader.done(flying[0])
    leader.feed(w.Aborted(leader.at_s, keys[-1]))
    assert leader.core.in_flight_count == 2
    assert not leader.core.has_work  # no sequence waits: one batch for each stage


def test_microbatches_are_not_kept_small_for_sequences_that_wait_for_earlier_prompts() -> None:
    views: list[PipelineView] = []

    def form(view: PipelineView) -> Share:
        views.append(view)
        return [(0, view.max_batch_tokens)]

    prompt = tuple([1] * 16)
    policy = Microbatching(form)
    leader = Leader(stages=2, max_running_count=8, max_batch_tokens=8, block_count=64, microbatching=policy)
    for number in range(8):
        leader.submit(f"r{number}", prompt)
    leader.batch()
    load = leader.core.load(leader.at_s, MEMORY)
    assert load.waiting_count
    assert load.prompt_token_count >= load.max_prompt_token_count - 8
    assert not views[-1].lacks_room
    leader.feed(w.CapacityChanged(leader.at_s, leader.core.group_scheduler.reserved_block_count))
    leader.batch()
    assert views[-1].lacks_room


def test_results_arrive_in_the_order_of_the_batches() -> None:
    leader = Leader(stages=2, max_running_count=4, max_batch_tokens=4)
    leader.submit("a")
    leader.submit("b")
    leader.batch()
    second = leader.batch()
    with pytest.raises(InvariantViolation, match="step 2 is reported, but step 1 was running"):
        leader.done(second)


def test_a_sequence_that_needs_a_block_in_flight_skips_a_batch() -> None:
    leader = Leader(4, stages=2, block_tokens=4, max_running_count=2, max_batch_tokens=8)
    first = leader.submit("first", (1, 2, 3, 4, 5, 6, 7))
    leader.step()
    leader.submit("second", (1, 2, 3, 4, 5, 6, 7))
    leader.step()  # the batch has both sequences, although the blocks would suffice for one
    while leader.core.totals.preemptions == 0:
        flying = leader.batch()
        assert flying is not None
        follower = leader.batch() if leader.core.has_work else None
        leader.done(flying)
        if follower is not None:
            leader.done(follower)
    assert leader.heard(first)[2] is None
    assert leader.core.load(leader.at_s, MEMORY).waiting_count == 1  # the second was preempted, between two batches


def test_an_aborted_sequence_is_removed_by_the_next_batch_while_others_are_in_flight() -> None:
    leader = Leader(stages=2, max_running_count=4, max_batch_tokens=4)
    gone = leader.submit("gone")
    leader.submit("stays")
    flying = leader.batch()
    leader.feed(w.Aborted(leader.at_s, gone))
    assert reserved(leader) == 1
    following = leader.batch()
    assert following is not None
    assert following.batch.removed == ((1 << 32) + 1,)
    leader.done(flying)
    leader.done(following)
    assert leader.heard(gone)[0] == []


def test_sequence_ids_continue_from_the_first_one() -> None:
    leader = Leader(ordinal=7)
    leader.submit()
    assert leader.core.sequence_ids == ((7 << 32) + 1,)


# ---------------------------------------------------------------- capacity


def test_a_smaller_group_preempts_the_latest_and_reports_when_it_has_settled() -> None:
    leader = Leader(8, block_tokens=4)
    for number in range(4):
        leader.submit(f"r{number}", (1, 2, 3, 4, 5))  # two blocks each
    leader.step()
    commands = leader.feed(w.CapacityChanged(leader.at_s, 5))
    assert [c.batch.removed for c in commands if isinstance(c, w.Removed)] == [((1 << 32) + 4, (1 << 32) + 3)]
    assert reserved(leader) == 4
    assert leader.core.group_scheduler.settled


def test_no_sequence_in_flight_is_preempted() -> None:
    leader = Leader(8, block_tokens=4)
    for number in range(4):
        leader.submit(f"r{number}", (1, 2, 3, 4))
    flying = leader.batch()
    leader.feed(w.CapacityChanged(leader.at_s, 5))
    assert not leader.core.group_scheduler.settled
    leader.done(flying)
    assert reserved(leader) == 4
    leader.feed(w.CapacityChanged(leader.at_s, 5))  # the stages are notified
    assert leader.core.group_scheduler.settled


def test_lent_blocks_are_not_allocated() -> None:
    leader = Leader(8, block_tokens=4)
    leader.feed(w.CapacityChanged(leader.at_s, 8, lent_block_count=7))
    key = leader.submit("r", (1, 2, 3, 4, 5))
    assert not leader.core.has_work
    leader.feed(w.CapacityChanged(leader.at_s, 8))
    assert leader.step()
    assert leader.heard(key)[0] == [5]


def test_a_sequence_too_large_for_the_smaller_group_ends() -> None:
    leader = Leader(8, block_tokens=4)
    key = leader.submit("r", tuple(range(1, 20)))
    leader.feed(w.CapacityChanged(leader.at_s, 4))
    ending = leader.heard(key)[2]
    assert ending is not None
    assert (ending.finish_reason, ending.invalid) == (FinishReason.ERROR, False)


def test_a_sequence_waits_for_blocks_that_return_soon() -> None:
    leader = Leader(8, block_tokens=4)
    key = leader.submit("r", tuple(range(1, 16)))
    leader.step()
    leader.feed(w.CapacityChanged(leader.at_s, 4, before_block_count=8))
    while leader.core.has_work:
        leader.step()
    assert leader.heard(key)[2] is None
    assert leader.core.group_scheduler.longest_token_count > 16
    leader.feed(w.CapacityChanged(leader.at_s, 8))
    assert leader.step()
    assert leader.heard(key)[2] is None


def test_above_the_limit_no_sequence_is_admitted_but_running_ones_grow() -> None:
    leader = Leader(12, block_tokens=1, max_batch_tokens=16)
    leader.submit("old")
    leader.step()
    leader.feed(w.AdmissionLimited(leader.at_s, 4))
    leader.submit("new", (1,))
    for _ in range(3):
        assert leader.step() == [(1 << 32) + 1]
    assert reserved(leader) > 4
    leader.feed(w.AdmissionLimited(leader.at_s, None))
    assert len(leader.step()) == 2


# ---------------------------------------------------------------- prompts alongside decodes


def _step(leader: Leader) -> dict[int, int]:
    """Runs one step. Returns the tokens of each sequence in it, by sequence number."""
    execute = leader.batch()
    leader.done(execute)
    assert execute is not None
    return {part.sequence_id & 0xFF: len(part.token_ids) for part in execute.batch.slices}


@pytest.mark.parametrize("stages", [1, 2])
def test_prompts_alongside_decodes_can_be_limited(stages: int) -> None:
    leader = Leader(64, stages=stages, block_tokens=4, max_batch_tokens=32)
    leader.submit("old")
    leader.step()
    leader.feed(w.PrefillLimited(leader.at_s, 3))
    leader.submit("new", tuple(range(1, 13)))
    chunks: list[int] = []
    while sum(chunks) < 12:
        chunks.append(_step(leader).get(2, 0))
    assert max(chunks) == 3
    leader.feed(w.PrefillLimited(leader.at_s, None))
    leader.submit("newer", tuple(range(1, 17)))
    assert _step(leader)[3] > 12


@pytest.mark.parametrize("stages", [1, 2])
def test_a_limit_does_not_delay_many_prompts_for_long(stages: int) -> None:
    leader = Leader(128, stages=stages, block_tokens=4, max_batch_tokens=64, max_running_count=8)
    leader.submit("old")
    leader.step()
    leader.feed(w.PrefillLimited(leader.at_s, 3))
    for number in range(4):
        leader.submit(f"new{number}", tuple(range(1, 41)))
    prompts, batches = 160, 0
    while prompts > 0:
        prompts -= sum(count for number, count in _step(leader).items() if number > 1)
        batches += 1
        assert batches <= 6, "each batch takes a quarter of the prompt tokens at the start, not of those left"


def test_prompts_fill_the_batch_if_there_are_no_decodes() -> None:
    leader = Leader(64, block_tokens=4, max_batch_tokens=32)
    leader.feed(w.PrefillLimited(leader.at_s, 0))
    leader.submit("a", tuple(range(1, 21)))
    assert _step(leader) == {1: 20}
    leader.submit("b", tuple(range(1, 21)))
    assert _step(leader) == {1: 1}
    leader.feed(w.RoleChanged(leader.at_s, leads=True))
    assert _step(leader) == {1: 1, 2: 20}


def test_prompts_are_limited_in_every_batch_while_another_group_decodes() -> None:
    leader = Leader(64, block_tokens=4, max_batch_tokens=32)
    leader.feed(w.PrefillLimited(leader.at_s, 3, always=True))
    leader.submit("a", tuple(range(1, 13)))
    assert [_step(leader) for _ in range(4)] == [{1: 3}] * 4
    leader.feed(w.PrefillLimited(leader.at_s, None))
    leader.submit("b", tuple(range(1, 21)))
    assert _step(leader) == {1: 1, 2: 20}


def test_a_limit_may_apply_to_a_number_of_batches_with_prompts() -> None:
    leader = Leader(64, block_tokens=4, max_batch_tokens=32)
    leader.submit("a")
    leader.step()
    leader.feed(w.PrefillLimited(leader.at_s, 3, always=True, batch_count=2))
    assert _step(leader) == {1: 1}
    leader.submit("b", tuple(range(1, 13)))
    assert [_step(leader) for _ in range(3)] == [{1: 1, 2: 3}, {1: 1, 2: 3}, {1: 1, 2: 6}]


def test_few_sequences_are_not_delayed_for_balance_while_a_transition_is_prepared() -> None:
    def form(view: PipelineView) -> Share:
        ready = [i for i, c in enumerate(view.candidates) if c.step_id <= view.completed_step_id]
        return [(i, view.candidates[i].token_count - view.candidates[i].computed_tokens) for i in ready[:put_in]]

    put_in = 5
    leader = Leader(64, stages=2, max_batch_tokens=16, microbatching=Microbatching(form))
    for number in range(5):
        leader.submit(f"r{number}")
    assert len(_step(leader)) == 5
    put_in = 4
    assert len(_step(leader)) == 4
    leader.feed(w.PrefillLimited(leader.at_s, 3))
    assert len(_step(leader)) == 5
    put_in = 3
    assert len(_step(leader)) == 3  # two leftover decodes are too many to add to the batch
    put_in = 0
    assert leader.batch() is None


# ---------------------------------------------------------------- KV in transit


def test_a_suspended_sequence_is_left_out_and_continues_where_it_was() -> None:
    leader = Leader()
    key = leader.submit()
    leader.step()
    (sequence_id,) = leader.core.sequence_ids
    leader.feed(w.KvTravels(leader.at_s, frozenset({sequence_id})))
    assert not leader.core.has_work
    assert leader.core.group_scheduler.suspended_ids == (sequence_id,)
    assert leader.core.group_scheduler.kv_tokens == {sequence_id: 3}
    leader.feed(w.KvArrived(leader.at_s, sequence_id))
    execute = leader.batch()
    assert execute is not None
    assert [(s.first_position, len(s.token_ids)) for s in execute.batch.slices] == [(3, 1)]
    leader.done(execute)
    assert leader.heard(key)[0] == [5, 5]


@pytest.mark.parametrize("suspended", [True, False])
def test_lost_kv_is_recomputed(suspended: bool) -> None:
    leader = Leader()
    leader.submit()
    leader.step()
    (sequence_id,) = leader.core.sequence_ids
    if suspended:
        leader.feed(w.KvTravels(leader.at_s, frozenset({sequence_id})))
    leader.feed(w.KvLost(leader.at_s, sequence_id))
    execute = leader.batch()
    assert execute is not None
    assert execute.batch.slices[0].token_ids == (1, 2, 3, 5)
    assert [new.output_token_ids for new in execute.batch.added] == [(5,)]


def test_kv_of_a_sequence_in_flight_cannot_be_lost() -> None:
    leader = Leader()
    leader.submit()
    leader.batch()
    with pytest.raises(InvariantViolation, match="loses its KV while it is in flight"):
        leader.core.handle(w.KvLost(leader.at_s, leader.core.sequence_ids[0]))


@pytest.mark.parametrize("landed", [w.KvArrived, w.KvLost])
def test_blocks_that_receive_kv_stay_in_use_when_the_request_ends(landed: type[w.KvArrived | w.KvLost]) -> None:
    leader = Leader()
    key = leader.submit()
    leader.step()
    (sequence_id,) = leader.core.sequence_ids
    leader.feed(w.KvTravels(leader.at_s, frozenset({sequence_id})))
    commands = leader.feed(w.Aborted(leader.at_s, key))
    assert not any(isinstance(c, w.Removed) for c in commands)
    assert leader.heard(key)[2] == w.Ending(key.handle, FinishReason.CANCELLED)
    assert reserved(leader) == 1
    commands = leader.feed(landed(leader.at_s, sequence_id))
    assert [c.batch.removed for c in commands if isinstance(c, w.Removed)] == [(sequence_id,)]
    assert reserved(leader) == 0


@pytest.mark.parametrize("event", [w.KvArrived(0.0, 77), w.KvLost(0.0, 77)])
def test_reports_of_kv_that_is_not_awaited_are_stale(event: w.Event) -> None:
    leader = Leader()
    assert leader.feed(event) == []
    assert leader.core.totals.stale_events == 1


# ---------------------------------------------------------------- sequences that wait for room


def test_a_sequence_waiting_for_room_holds_no_blocks() -> None:
    leader = Leader(12, stages=2, block_tokens=4, max_running_count=4)
    for name in ("first", "second"):
        leader.submit(name, (1, 2, 3, 4, 5, 6, 7), sampling=greedy(9))
    while len(leader.core.group_scheduler.kv_tokens) < 2:
        leader.step()
    ids = leader.core.sequence_ids
    before = reserved(leader)
    leader.feed(w.KvTravels(leader.at_s, frozenset(ids), frozenset(ids[1:])))
    assert reserved(leader) == before / 2
    with pytest.raises(InvariantViolation, match="has its KV in no block"):
        leader.core.handle(w.KvArrived(leader.at_s, ids[1]))
    leader.feed(w.KvArrived(leader.at_s, ids[0]))
    assert leader.step() == [ids[0]]
    alone = reserved(leader)
    leader.feed(w.KvAdmitted(leader.at_s, frozenset(ids[1:])))
    assert reserved(leader) == alone + before / 2
    leader.feed(w.KvArrived(leader.at_s, ids[1]))
    while leader.step():
        pass
    assert leader.core.sequence_ids == ()


# ---------------------------------------------------------------- sequences of other leaders


def test_blocks_of_removed_sequences_are_not_reserved_before_the_next_batch() -> None:
    """A removed sequence's reservation is released at once, but its table only by the next batch. Only blocks that are
    free in both can be reserved.
    """
    leader = Leader(4, block_tokens=4, max_running_count=4)
    gone = leader.submit("gone", (1, 2, 3, 4, 5, 6, 7))
    leader.submit("stays", (1, 2, 3))
    leader.step()
    assert leader.book.free_count == 1
    leader.feed(w.Aborted(leader.at_s, gone))
    assert reserved(leader) == 1
    assert not leader.core.why_no_room(1, new=True)
    assert "1 blocks are free before the next batch, but 2 are needed" in leader.core.why_no_room(2, new=True)
    assert leader.core.why_no_room(2, new=False)
    leader.step()
    assert not leader.core.why_no_room(2, new=True)
    assert leader.book.hold(77, 8)
