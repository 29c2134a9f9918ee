"""Stories of handovers between leaders: the dispatcher resubmits the request, and the old leader sends its KV."""

from dataclasses import replace

import pytest

from ballast.common.errors import InvariantViolation
from ballast.common.ids import WorkerId
from ballast.common.sampling import FinishReason
from services.worker.core import events as w
from services.worker.core.blocks import BlockBook
from tests.support.leader import TEXT, W2, Leader, handed_over, reserved
from tests.support.worker_core import MEMORY, greedy

OUTPUT = (5, 5, 5)  # tokens that a request has after `handed_over(steps=3)`


def test_dispatchers_are_notified_of_moved_requests_and_the_others_stay() -> None:
    leader = Leader()
    keys = [leader.submit(f"r{number}") for number in range(3)]
    leader.step()
    first, second, third = leader.core.sequence_ids
    snapshots = leader.hand_over({first: WorkerId("w2"), third: WorkerId("w3"), 99: WorkerId("w3")})
    assert [s.sequence_id for s in snapshots] == [first, third]
    assert [leader.heard(key)[2] for key in keys] == [
        w.Ending(keys[0].handle, None, moved_to="w2"),
        None,
        w.Ending(keys[2].handle, None, moved_to="w3"),
    ]
    assert leader.core.sequence_ids == (second,)
    assert leader.book.table(first)  # its KV has yet to be sent
    assert leader.core.totals.moved == 2


def test_nothing_is_handed_over_during_a_step() -> None:
    _, snapshots = handed_over()
    leader = Leader()
    leader.submit()
    leader.batch()
    for event in (
        w.HandOver(0.0, W2),
        w.RoleChanged(0.0, leads=False),
        w.KvTravels(0.0, frozenset()),
        w.Adopted(0.0, snapshots),
    ):
        with pytest.raises(InvariantViolation, match="while step 1 runs"):
            leader.core.handle(event)


def test_nothing_is_handed_over_while_its_kv_is_in_transit() -> None:
    leader = Leader()
    leader.submit()
    leader.step()
    leader.feed(w.KvTravels(leader.at_s, frozenset(leader.core.sequence_ids)))
    with pytest.raises(InvariantViolation, match="handed over while its KV travels"):
        leader.core.handle(w.HandOver(leader.at_s, W2))


def test_removals_are_sent_before_a_handover() -> None:
    leader = Leader()
    gone = leader.submit("gone")
    leader.submit("stays")
    leader.step()
    leader.feed(w.Aborted(leader.at_s, gone))
    commands = leader.feed(w.HandOver(leader.at_s, WorkerId("w2")))
    assert [type(c) for c in commands] == [w.Emit, w.Removed, w.HandedOver]


def test_a_follower_refuses_new_requests_and_adopts_none() -> None:
    leader, snapshots = handed_over()
    leader.feed(w.RoleChanged(leader.at_s, leads=False))
    ending = leader.heard(leader.submit("new"))[2]
    assert ending is not None
    assert ending.refused
    with pytest.raises(InvariantViolation, match="sequences are handed over to a follower"):
        leader.core.handle(w.Adopted(leader.at_s, snapshots))


def test_a_leader_with_sequences_cannot_become_a_follower() -> None:
    leader = Leader()
    leader.submit()
    with pytest.raises(InvariantViolation, match="1 sequences that were not handed over"):
        leader.core.handle(w.RoleChanged(leader.at_s, leads=False))


# ---------------------------------------------------------------- the request and its KV arrive in either order


@pytest.mark.parametrize("travels", [True, False])
@pytest.mark.parametrize("first", ["KV", "request"])
def test_request_and_kv_may_arrive_in_either_order(first: str, travels: bool) -> None:
    _, snapshots = handed_over(steps=3)
    leader = Leader(ordinal=2)
    key = leader.submit("r", output=OUTPUT, expects=True) if first == "request" else None
    assert not leader.core.has_work
    leader.adopt(snapshots, travels=travels)
    assert leader.core.has_work == (key is not None and not travels)
    if key is None:
        assert (leader.core.kept_count, leader.core.sequence_ids, reserved(leader)) == (1, (), 2)
        key = leader.submit("r", output=OUTPUT, expects=True)
    assert leader.core.kept_count == 0
    if travels:
        assert not leader.core.has_work
        leader.feed(w.KvArrived(leader.at_s, snapshots[0].sequence_id))
    execute = leader.batch()
    assert execute is not None
    assert [s.first_position for s in execute.batch.slices] == [5]  # after the tokens that have KV
    leader.done(execute, 6)
    leader.step(7)
    assert leader.heard(key) == ([6, 7], TEXT * 2, None)
    assert leader.core.sequence_ids == (snapshots[0].sequence_id,)
    assert leader.core.totals.prompt_tokens == 0, "its prompt was computed elsewhere"


def test_kv_may_be_complete_before_its_request_arrives() -> None:
    _, snapshots = handed_over(steps=3)
    leader = Leader(ordinal=2)
    leader.adopt(snapshots, travels=True)
    leader.feed(w.KvArrived(leader.at_s, snapshots[0].sequence_id))
    assert leader.core.group_scheduler.suspended_ids == ()
    assert not leader.core.has_work
    leader.submit("r", output=OUTPUT, expects=True)
    assert leader.step(6) == [snapshots[0].sequence_id]


def test_a_client_that_resumes_through_another_dispatcher_finds_the_kv_too() -> None:
    _, snapshots = handed_over(steps=3)
    leader = Leader(ordinal=2)
    leader.adopt(snapshots)
    leader.submit("r", output=OUTPUT)  # this dispatcher does not know of the handover
    assert leader.step(6) == [snapshots[0].sequence_id]


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(
    ("prompt", "output"),
    [
        ((1, 2, 4), OUTPUT),  # another prompt
        ((1, 2, 3), (5, 9, 5)),  # other tokens
        ((1, 2, 3), (5,)),  # fewer than have KV
        ((1, 2, 3), (5, 5)),  # as many: nothing would be left to compute
    ],
)
def test_a_request_with_other_tokens_does_not_get_the_kv(
    prompt: tuple[int, ...], output: tuple[int, ...], early: bool
) -> None:
    _, snapshots = handed_over(steps=3)
    leader = Leader(ordinal=2)
    if not early:
        leader.adopt(snapshots)
    leader.submit("r", prompt, output, expects=early)
    if early:
        leader.adopt(snapshots)
    assert leader.core.kept_count == 0
    execute = leader.batch()
    assert execute is not None
    assert execute.batch.removed == (snapshots[0].sequence_id,)
    assert [s.token_ids for s in execute.batch.slices] == [(*prompt, *output)]


@pytest.mark.parametrize("first", ["snapshot", "request"])
def test_a_request_without_kv_waits_for_the_notice_that_there_is_none(first: str) -> None:
    old = Leader(max_running_count=1)
    old.submit("runs")
    old.submit("waits")
    old.step()
    snapshots = old.hand_over()
    assert [s.computed_tokens for s in snapshots] == [3, 0]
    leader = Leader(ordinal=2)
    if first == "snapshot":
        leader.adopt(snapshots[1:])
        assert reserved(leader) == 0
        leader.submit("waits", expects=True)
    else:
        leader.submit("waits", expects=True)
        assert not leader.core.has_work
        leader.adopt(snapshots[1:])
    execute = leader.batch()
    assert execute is not None
    assert [s.token_ids for s in execute.batch.slices] == [(1, 2, 3)]


@pytest.mark.parametrize("how", ["last", "timeout"])
def test_a_request_that_waits_in_vain_is_recomputed(how: str) -> None:
    leader = Leader(ordinal=2)
    key = leader.submit("r", output=(5, 5), expects=True)
    if how == "last":
        leader.adopt((), last=True)
    else:
        due_at_s = leader.core.next_deadline_at_s
        assert due_at_s is not None
        assert due_at_s == leader.at_s + 10.0
        leader.at_s = due_at_s
        leader.feed(w.Tick(leader.at_s))
    execute = leader.batch()
    assert execute is not None
    assert execute.batch.slices[0].token_ids == (1, 2, 3, 5, 5)
    leader.done(execute, 6)
    assert leader.heard(key)[0] == [6]


@pytest.mark.parametrize("first", ["KV", "request"])
@pytest.mark.parametrize("how", ["lost at once", "lost on its way"])
def test_kv_that_will_not_arrive_is_recomputed(how: str, first: str) -> None:
    _, snapshots = handed_over(steps=3)
    sequence_id = snapshots[0].sequence_id
    leader = Leader(ordinal=2)
    if first == "request":
        leader.submit("r", output=OUTPUT, expects=True)
    if how == "lost at once":
        told = leader.feed(w.Adopted(leader.at_s, snapshots, lost_ids=frozenset({sequence_id})))
    else:
        leader.adopt(snapshots, travels=True)
        told = leader.feed(w.KvLost(leader.at_s, sequence_id))
    removed = [i for command in told if isinstance(command, w.Removed) for i in command.batch.removed]
    if first == "KV":
        assert reserved(leader) == 0
        leader.submit("r", output=OUTPUT, expects=True)
    execute = leader.batch()
    assert execute is not None
    assert execute.batch.slices[0].token_ids == (1, 2, 3, *OUTPUT)
    assert sequence_id in (*execute.batch.removed, *removed)


def test_a_request_whose_handover_never_reaches_a_follower_is_refused() -> None:
    follower = Leader()
    follower.feed(w.RoleChanged(follower.at_s, leads=False))
    key = follower.submit("r", output=(5,), expects=True)
    assert follower.heard(key)[2] is None
    follower.feed(w.Tick(follower.at_s + 10.0))
    ending = follower.heard(key)[2]
    assert ending is not None
    assert ending.refused


@pytest.mark.parametrize("way", ["abort", "deadline", "close", "move"])
def test_a_request_that_waits_for_its_kv_can_be_aborted(way: str) -> None:
    leader = Leader(ordinal=2)
    key = leader.submit("r", output=(5,), expects=True, deadline_at_s=leader.at_s + 1.0)
    leaving: dict[str, w.Event] = {
        "abort": w.Aborted(leader.at_s, key),
        "deadline": w.Tick(leader.at_s + 1.0),
        "close": w.StreamClosed(leader.at_s, 1),
        "move": w.HandOver(leader.at_s, WorkerId("w3")),
    }
    leader.feed(leaving[way])
    assert leader.core.sequence_ids == ()
    ending = leader.heard(key)[2]
    reasons = {"abort": FinishReason.CANCELLED, "deadline": FinishReason.DEADLINE}
    assert (ending is None) == (way == "close")
    if ending is not None:
        assert (ending.finish_reason, ending.moved_to) == (reasons.get(way), "w3" if way == "move" else "")


# ---------------------------------------------------------------- KV that no request claims


@pytest.mark.parametrize("travels", [False, True])
@pytest.mark.parametrize("aborted", [False, True])
def test_unclaimed_kv_is_freed_after_a_time(aborted: bool, travels: bool) -> None:
    _, snapshots = handed_over(steps=3)
    leader = Leader(ordinal=2)
    if aborted:
        leader.feed(w.Aborted(leader.at_s, leader.submit("r", output=OUTPUT, expects=True)))
    leader.adopt(snapshots, travels=travels)
    assert leader.core.next_deadline_at_s == leader.at_s + 10.0
    leader.at_s += 10.0
    leader.feed(w.Tick(leader.at_s))
    assert leader.core.kept_count == 0
    if travels:
        assert reserved(leader) == 2, "its blocks are being written"
        leader.feed(w.KvArrived(leader.at_s, snapshots[0].sequence_id))
    assert (reserved(leader), leader.book.used_count) == (0, 0)


@pytest.mark.parametrize("travels", [False, True])
def test_an_aborted_request_frees_its_kv(travels: bool) -> None:
    _, snapshots = handed_over(steps=3)
    leader = Leader(ordinal=2)
    leader.adopt(snapshots, travels=travels)
    leader.feed(w.Aborted(leader.at_s, leader.submit("r", output=OUTPUT, expects=True)))
    if travels:
        leader.feed(w.KvArrived(leader.at_s, snapshots[0].sequence_id))
    assert (leader.core.kept_count, reserved(leader)) == (0, 0)


def test_a_complete_request_frees_its_kv() -> None:
    _, snapshots = handed_over(steps=3)
    leader = Leader(ordinal=2)
    leader.adopt(snapshots)
    key = leader.submit("r", output=OUTPUT, sampling=greedy(3), expects=True)
    assert leader.heard(key)[2] == w.Ending(key.handle, FinishReason.LENGTH)
    assert (leader.core.kept_count, reserved(leader)) == (0, 0)


def test_unclaimed_kv_is_preempted_like_running_sequences() -> None:
    _, snapshots = handed_over(steps=3)
    leader = Leader(ordinal=2, block_count=4)
    leader.submit("old")
    leader.at_s += 1.0
    leader.step()
    leader.adopt(snapshots)  # it is the younger one, since it was submitted later
    for _ in range(10):
        leader.step()
    assert (leader.core.kept_count, leader.core.totals.preemptions) == (1, 1)
    leader.submit("r", output=OUTPUT, expects=True)
    assert leader.core.kept_count == 0
    assert leader.core.load(leader.at_s, MEMORY).waiting_count == 1


def test_a_second_drop_also_sends_kv_without_a_request() -> None:
    _, snapshots = handed_over(steps=3)
    leader = Leader(ordinal=2)
    leader.adopt(snapshots)
    leader.at_s += 1.0
    (moved,) = leader.hand_over(WorkerId("w3"))
    assert moved == replace(snapshots[0], age_s=snapshots[0].age_s + 1.0)
    assert (leader.core.kept_count, reserved(leader), leader.core.totals.moved) == (0, 0, 0)
    late = leader.submit("r", output=OUTPUT, expects=True)
    assert leader.heard(late)[2] == w.Ending(late.handle, None, moved_to="w3"), "its dispatcher is redirected"
    third = Leader(ordinal=3)
    third.adopt((moved,))
    third.submit("r", output=OUTPUT, expects=True)
    assert third.step() == [moved.sequence_id]


def test_kv_without_a_request_is_sent_to_other_stages_of_its_leader() -> None:
    _, snapshots = handed_over(steps=3)
    sequence_id = snapshots[0].sequence_id
    leader = Leader(ordinal=2)
    leader.adopt(snapshots)
    assert leader.core.group_scheduler.kv_tokens == {sequence_id: 5}
    leader.feed(w.KvTravels(leader.at_s, frozenset({sequence_id})))
    assert leader.core.group_scheduler.suspended_ids == (sequence_id,)
    leader.feed(w.KvArrived(leader.at_s, sequence_id))
    leader.submit("r", output=OUTPUT, expects=True)
    assert leader.step() == [sequence_id]


def test_a_dissolving_group_keeps_no_unclaimed_kv() -> None:
    _, snapshots = handed_over(steps=3)
    leader = Leader(ordinal=2, stages=2)
    leader.adopt(snapshots)
    leader.feed(w.GroupOpened(leader.at_s, BlockBook(8, 4)))
    assert leader.core.leaving is not None
    assert leader.core.leaving.sequences == []
    leader.submit("r", output=OUTPUT, expects=True)
    execute = leader.batch()
    assert execute is not None
    assert execute.batch.slices[0].token_ids == (1, 2, 3, *OUTPUT)


def test_a_lost_group_loses_all_kv() -> None:
    _, snapshots = handed_over(steps=3)
    leader = Leader(ordinal=2)
    leader.adopt(snapshots)
    leader.submit("other", expects=True)
    leader.core.handle(w.GroupLost(leader.at_s))
    leader.core.check()
    assert (leader.core.kept_count, leader.core.sequence_ids, reserved(leader)) == (0, (), 0)


# ---------------------------------------------------------------- state that must survive the handover


def test_a_stop_string_that_spans_the_move_is_found() -> None:
    old = Leader()
    before = old.submit(sampling=greedy(20, stop=("aba",)))  # the second token completes it
    old.step()
    snapshots = old.hand_over()
    assert old.heard(before)[:2] == ([5], ""), "its text may be the beginning of a stop string"
    leader = Leader(ordinal=2)
    leader.adopt(snapshots)
    key = leader.submit("r", output=(5,), sampling=greedy(20, stop=("aba",)), delivered_chars=0, expects=True)
    leader.step()
    assert leader.heard(key) == ([5], "", w.Ending(key.handle, FinishReason.STOP, "aba"))


def test_seniority_is_sent_in_seconds_not_as_an_instant() -> None:
    old = Leader(ordinal=5, max_running_count=1)
    old.submit("runs")
    old.submit("waits")
    old.at_s += 2.0
    old.step()
    snapshots = old.hand_over()
    assert [s.age_s for s in snapshots] == [2.0, 2.0]
    leader = Leader(ordinal=2, max_running_count=1)
    leader.submit("young", prompt=(1,))
    leader.at_s += 1.0
    leader.submit("younger")
    for name, output in (("runs", (5,)), ("waits", ())):
        leader.submit(name, output=output, expects=True)
    leader.adopt(snapshots)  # only one may run: the youngest running sequence is preempted
    assert leader.step() == [snapshots[0].sequence_id]


def test_a_repeated_handover_is_adopted_once() -> None:
    _, snapshots = handed_over()
    leader = Leader(ordinal=2)
    leader.adopt(snapshots)
    leader.adopt(snapshots)
    assert (leader.core.totals.adopted, leader.core.totals.stale_events) == (1, 1)


def test_the_later_of_two_dispatchers_that_wait_for_one_sequence_gets_it() -> None:
    _, snapshots = handed_over(steps=3)
    leader = Leader(ordinal=2)
    earlier = leader.submit("r", output=(5,), expects=True)
    later = leader.submit("r", output=OUTPUT, expects=True)
    leader.adopt(snapshots)
    leader.step(6)
    assert leader.heard(later)[0] == [6]
    assert leader.heard(earlier)[0] == [6]  # resumed without that KV, after its own single token


def test_the_later_of_two_leaders_that_send_kv_of_a_request_counts() -> None:
    _, earlier = handed_over(steps=2)
    _, later = handed_over(steps=3, ordinal=3)
    leader = Leader(ordinal=2)
    leader.adopt(earlier)
    leader.adopt(later)
    assert leader.core.kept_count == 1
    leader.submit("r", output=OUTPUT, expects=True)
    assert leader.step() == [later[0].sequence_id]
    assert leader.book.table(earlier[0].sequence_id) == ()
