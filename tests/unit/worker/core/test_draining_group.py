"""A worker serves alone while the group in which it was a stage drains."""

from dataclasses import replace

import pytest

from ballast.common.errors import InvariantViolation
from services.worker.core import events as w
from services.worker.core.batch import SequenceId
from services.worker.core.blocks import BlockBook
from services.worker.core.snapshot import SequenceSnapshot
from tests.support.leader import W2, Leader
from tests.support.worker_core import MEMORY

OWN_BLOCKS, FIRST_BLOCK = 16, 100


def open_group(leader: Leader) -> None:
    leader.feed(w.GroupOpened(leader.at_s, BlockBook(OWN_BLOCKS, 4, FIRST_BLOCK)))


def dissolving(*names: str, steps: int = 2, block_count: int = 32, stages: int = 2) -> Leader:
    """The leader of a draining pipeline in which each named request has had `steps` steps. Sequence ids start at 1."""
    leader = Leader(block_count, stages=stages, ordinal=0)
    for name in names:
        leader.submit(name)
    for _ in range(steps * len(names)):
        leader.step()
    open_group(leader)
    return leader


def snapshots_of(commands: list[w.Command]) -> list[SequenceSnapshot]:
    (handed_over,) = [c for c in commands if isinstance(c, w.HandedOver)]
    return [s for _, snapshots in handed_over.snapshots for s in snapshots]


def from_elsewhere(snapshot: SequenceSnapshot) -> SequenceSnapshot:
    """The sequence as another worker would hand it over, with that worker's id for it."""
    return replace(snapshot, sequence_id=(7 << 32) + snapshot.sequence_id)


def removed_of(commands: list[w.Command]) -> list[tuple[tuple[SequenceId, ...], bool]]:
    """The sequences in each Removed command, and whether the command goes to the stages of the draining group."""
    return [(c.batch.removed, c.leaving) for c in commands if isinstance(c, w.Removed)]


def ending_of(leader: Leader, prompt: tuple[int, ...]) -> w.Ending:
    found = ending(leader, leader.submit("one", prompt).handle)
    assert found is not None
    return found


def ending(leader: Leader, handle: int) -> w.Ending | None:
    return next((e for emit in leader.emits for e in emit.endings if e.handle == handle), None)


def test_new_requests_run_in_the_workers_own_lane_and_the_lanes_alternate() -> None:
    leader = dissolving("old")
    new = leader.submit("new")
    formed = [leader.batch() for _ in range(2)]
    assert [(e.leaving, e.block_tables[0][0] >= FIRST_BLOCK) for e in formed if e] == [(True, False), (False, True)]
    assert leader.batch() is None
    for execute in formed:
        leader.done(execute)
    assert [len(leader.heard(key)[0]) for key in (new._replace(handle=1), new)] == [3, 1]
    turns = list[bool]()
    for _ in range(6):
        execute = leader.batch()
        assert execute is not None
        turns.append(execute.leaving)
        leader.done(execute)
    assert turns == [True, False] * 3


def test_a_result_belongs_to_the_lane_of_its_batch_in_any_order() -> None:
    leader = dissolving("old")
    old, new = leader.submit("new")._replace(handle=1), leader.submit("too")._replace(handle=2)
    of_pipeline, own = leader.batch(), leader.batch()
    leader.done(own, token=9)
    assert leader.core.leaving is not None
    assert leader.core.leaving.in_flight_count == 1
    leader.done(of_pipeline, token=8)
    assert (leader.heard(old)[0][-1], leader.heard(new)[0]) == (8, [9])


def test_a_follower_has_only_its_own_lane() -> None:
    leader = Leader(stages=2)
    leader.feed(w.RoleChanged(leader.at_s, leads=False))
    open_group(leader)
    assert leader.core.leaving is None
    key = leader.submit("new")
    assert leader.step()
    assert leader.heard(key)[0] == [5]
    with pytest.raises(InvariantViolation, match="there is no draining group"):
        leader.core.handle(w.BatchesLost(leader.at_s))


def test_requests_wait_for_memory_that_the_pipeline_releases_soon() -> None:
    leader = Leader(stages=2)
    leader.feed(w.GroupOpened(leader.at_s, BlockBook(2, 4, FIRST_BLOCK)))
    assert ending_of(leader, tuple(range(1, 20))).invalid
    leader.feed(w.CapacityChanged(leader.at_s, 2, before_block_count=OWN_BLOCKS))
    key = leader.submit("large", tuple(range(1, 20)))
    assert leader.batch() is None
    assert leader.core.load(leader.at_s, MEMORY).waiting_count == 1
    leader.core.group_scheduler.book.grow(OWN_BLOCKS - 2)
    leader.feed(w.CapacityChanged(leader.at_s, OWN_BLOCKS))
    while not leader.heard(key)[0]:
        assert leader.step()


def test_the_load_report_shows_the_room_for_new_requests() -> None:
    leader = dissolving("old", "other")
    home_blocks, place_count = 2 * OWN_BLOCKS, leader.core.group_scheduler.scheduler.max_running_count
    leader.feed(w.CapacityChanged(leader.at_s, OWN_BLOCKS, before_block_count=home_blocks))
    load = leader.core.load(leader.at_s, MEMORY)
    assert (load.block_count, load.used_block_count) == (home_blocks, OWN_BLOCKS), "the pipeline holds the other half"
    held_blocks = leader.core.leaving.reserved_block_count if leader.core.leaving else 0
    assert 0 < held_blocks < 32
    assert load.spare_block_count == 32 - held_blocks, "all blocks that no request of the pipeline holds"
    assert (load.running_count, load.max_running_count) == (2, place_count + 2)
    leader.submit("new")
    after = leader.core.load(leader.at_s, MEMORY)
    assert (after.block_count, after.used_block_count, after.running_count) == (home_blocks, OWN_BLOCKS + 1, 3)


def test_a_sequence_that_moves_over_is_recomputed_and_continues() -> None:
    leader = dissolving("old")
    commands = leader.feed(w.MovedOver(leader.at_s, frozenset({1})))
    assert removed_of(commands) == [((1,), True)]
    leader.feed(w.GroupClosed(leader.at_s))
    execute = leader.batch()
    assert execute is not None
    assert not execute.leaving
    (part,) = execute.batch.slices
    assert (part.sequence_id, part.first_position, part.token_ids) == (1, 0, (1, 2, 3, 5, 5))
    leader.done(execute, token=7)
    assert leader.heard(leader.submit("other")._replace(handle=1))[0] == [5, 5, 7]


def test_waiting_sequences_of_the_pipeline_move_over_despite_others_waiting() -> None:
    bound = 8
    leader = Leader(1, stages=2, ordinal=0, max_waiting_count=bound)
    for i in range(bound):
        leader.submit(f"old {i}", tuple(range(1, 4)))
    leader.feed(w.GroupOpened(leader.at_s, BlockBook(1, 4, FIRST_BLOCK)))
    for i in range(bound):
        leader.submit(f"new {i}", tuple(range(1, 4)))
    assert leader.core.leaving is not None
    waiting = [s.sequence_id for s in leader.core.leaving.scheduler.waiting]
    assert waiting
    assert leader.core.group_scheduler.scheduler.line.count + len(waiting) > bound
    leader.feed(w.MovedOver(leader.at_s, frozenset(waiting)))
    leader.core.check()


def test_no_sequence_moves_over_while_in_flight() -> None:
    leader = dissolving("old")
    leader.batch()
    with pytest.raises(InvariantViolation, match="given up while it is in flight"):
        leader.core.handle(w.MovedOver(leader.at_s, frozenset({1})))


def test_a_sequence_handed_over_as_tokens_frees_its_kv_and_others_stay() -> None:
    leader = dissolving("old", "other")
    leader.submit("new")
    event = w.HandOver(leader.at_s, {1: W2, 3: W2}, by_tokens=True)
    commands = leader.feed(w.OfLeaving(leader.at_s, event))
    (snapshot,) = snapshots_of(commands)
    assert (snapshot.sequence_id, snapshot.computed_tokens, snapshot.token_count) == (1, 0, 6)
    assert removed_of(commands) == [((1,), True)]
    assert ending(leader, 1) == w.Ending(1, None, moved_to=W2)
    assert leader.core.sequence_ids == (2, 3)

    heir = dissolving("own")
    heir.feed(w.Adopted(heir.at_s, (from_elsewhere(snapshot),)))
    assert heir.core.sequence_ids == (1,), "its request has not arrived yet"
    heir.submit("old", output=(5, 5, 5), expects=True)
    assert heir.core.kept_count == 0
    assert heir.core.sequence_ids == (1, 2), "the new worker assigns its own id to the sequence"
    assert heir.core.group_scheduler.sequence_ids == (2,)


def test_sequences_handed_over_as_tokens_may_arrive_during_a_batch() -> None:
    leader = dissolving("old")
    (snapshot,) = snapshots_of(leader.feed(w.OfLeaving(0.0, w.HandOver(0.0, {1: W2}, by_tokens=True))))
    heir = dissolving("own")
    heir.submit("new")
    flying = [heir.batch(), heir.batch()]
    heir.feed(w.Adopted(heir.at_s, (from_elsewhere(snapshot),)))
    heir.submit("old", output=(5, 5, 5), expects=True)
    for execute in flying:
        heir.done(execute)
    assert [heir.batch(), heir.batch()].count(None) == 0
    with pytest.raises(InvariantViolation, match="sequences are adopted while step"):
        heir.core.handle(w.Adopted(heir.at_s, (replace(from_elsewhere(snapshot), computed_tokens=1),)))


def test_the_leaving_lane_shrinks_and_preempted_sequences_wait_in_it() -> None:
    leader = dissolving("old", "other")
    leader.feed(w.OfLeaving(leader.at_s, w.CapacityChanged(leader.at_s, 2, before_block_count=32)))
    group_scheduler = leader.core.leaving
    assert group_scheduler is not None
    assert group_scheduler.settled
    assert [s.sequence_id for s in group_scheduler.may_leave(running=False)] == [2]
    assert [s.sequence_id for s in group_scheduler.may_leave(running=True)] == [2, 1]
    assert leader.core.group_scheduler.scheduler.block_count == OWN_BLOCKS


def test_a_sequence_in_flight_cannot_leave() -> None:
    leader = dissolving("old", "other")
    execute = leader.batch()
    assert execute is not None
    flying = {part.sequence_id for part in execute.batch.slices}
    group_scheduler = leader.core.leaving
    assert group_scheduler is not None
    assert {s.sequence_id for s in group_scheduler.may_leave(running=True)} == {1, 2} - flying


def test_lost_batches_have_no_results_and_all_sequences_continue() -> None:
    leader = dissolving("old", "other")
    leader.batch()
    assert leader.core.in_flight_count == 1
    leader.feed(w.BatchesLost(leader.at_s))
    assert leader.core.in_flight_count == 0
    commands = leader.feed(w.MovedOver(leader.at_s, frozenset({1, 2})))
    assert removed_of(commands) == [], "no stage is left to be notified"
    leader.feed(w.GroupClosed(leader.at_s))
    assert leader.core.leaving is None
    assert sorted(leader.step()) == [1, 2]


def test_an_empty_lane_is_closed_and_its_counts_are_kept() -> None:
    leader = dissolving("old", "other")
    with pytest.raises(InvariantViolation, match="a group is closed with 2 sequences"):
        leader.core.handle(w.GroupClosed(leader.at_s))
    with pytest.raises(InvariantViolation, match="opened while another one is draining"):
        leader.core.handle(w.GroupOpened(leader.at_s, BlockBook(4, 4)))


def test_the_counts_of_a_lane_outlive_it() -> None:
    leader = dissolving("old", "other")
    leader.feed(w.OfLeaving(leader.at_s, w.CapacityChanged(leader.at_s, 2, before_block_count=32)))
    before = leader.core.totals.preemptions
    assert before == 1
    leader.feed(w.MovedOver(leader.at_s, frozenset({1, 2})))
    leader.feed(w.GroupClosed(leader.at_s))
    assert leader.core.leaving is None
    assert leader.core.totals.preemptions >= before
    assert leader.core.load(leader.at_s, MEMORY).preemptions_total == leader.core.totals.preemptions


def test_nothing_is_predicted_while_two_lanes_alternate() -> None:
    leader = dissolving("old", stages=1)
    assert leader.core.plain_steps() is None


def test_losing_the_group_ends_both_lanes() -> None:
    leader = dissolving("old")
    leader.submit("new")
    leader.batch()
    assert isinstance(leader.feed(w.GroupLost(leader.at_s))[-1], w.StreamsLost)
    assert leader.core.sequence_ids == ()
    assert leader.core.leaving is None
