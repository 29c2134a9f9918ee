"""Stories of sequences that go from one leader to the next, and of their dispatchers."""

import pytest

from ballast.common.errors import InvariantViolation
from ballast.common.ids import RequestId, WorkerId
from ballast.common.sampling import FinishReason
from services.worker.core.events import (
    Aborted,
    Adopted,
    Emit,
    Ending,
    Event,
    HandedOver,
    HandOver,
    KvArrived,
    KvLost,
    KvTravels,
    Removed,
    RoleChanged,
    SequenceKey,
    StreamClosed,
    Submitted,
    Tick,
)
from tests.support.leader import TEXT, W2, Leader, handed_over, reserved
from tests.support.worker_core import greedy


def test_dispatchers_hear_where_their_requests_go_and_the_rest_stays() -> None:
    leader = Leader()
    keys = [leader.submit(f"r{number}") for number in range(3)]
    leader.step()
    first, second, third = leader.core.sequence_ids
    snapshots = leader.hand_over({first: WorkerId("w2"), third: WorkerId("w3"), 99: WorkerId("w3")})
    assert [s.sequence_id for s in snapshots] == [first, third]
    assert [leader.heard(key)[2] for key in keys] == [
        Ending(keys[0].handle, None, moved_to="w2"),
        None,
        Ending(keys[2].handle, None, moved_to="w3"),
    ]
    assert leader.core.sequence_ids == (second,)
    assert leader.book.table(first)  # its KV has yet to be sent
    assert leader.core.totals.moved == 2


def test_nothing_changes_hands_in_mid_step() -> None:
    leader = Leader()
    leader.submit()
    leader.batch()
    for event in (HandOver(0.0, W2), RoleChanged(0.0, leads=False), KvTravels(0.0, frozenset()), Adopted(0.0, ())):
        with pytest.raises(InvariantViolation, match="while step 1 runs"):
            leader.core.handle(event)


def test_what_was_removed_is_told_before_a_handover() -> None:
    leader = Leader()
    gone = leader.submit("gone")
    leader.submit("stays")
    leader.step()
    leader.feed(Aborted(leader.at_s, gone))
    commands = leader.feed(HandOver(leader.at_s, WorkerId("w2")))
    assert [type(c) for c in commands] == [Emit, Removed, HandedOver]


def test_a_follower_refuses_what_is_new_and_does_not_adopt() -> None:
    leader, snapshots = handed_over()
    leader.feed(RoleChanged(leader.at_s, leads=False))
    ending = leader.heard(leader.submit("new"))[2]
    assert ending is not None
    assert ending.refused
    with pytest.raises(InvariantViolation, match="a follower is handed sequences over"):
        leader.core.handle(Adopted(leader.at_s, snapshots))


def test_who_has_sequences_cannot_become_a_follower() -> None:
    leader = Leader()
    leader.submit()
    with pytest.raises(InvariantViolation, match="1 sequences that were not handed over"):
        leader.core.handle(RoleChanged(leader.at_s, leads=False))


@pytest.mark.parametrize("travels", [True, False])
def test_an_adopted_sequence_goes_on_and_its_dispatcher_misses_nothing(travels: bool) -> None:
    _, snapshots = handed_over(steps=3)
    leader = Leader(ordinal=2)
    leader.adopt(snapshots, travels=travels)
    if travels:
        assert leader.step() == []
        leader.feed(KvArrived(leader.at_s, snapshots[0].sequence_id))
    assert [leader.step(6), leader.step(7)] == [[snapshots[0].sequence_id]] * 2
    assert leader.emits == []
    key = leader.submit("r", output=(5, 5, 5))
    assert leader.heard(key) == ([6, 7], TEXT * 2, None)
    leader.step(8)
    assert leader.heard(key) == ([6, 7, 8], TEXT * 3, None)
    assert leader.core.orphan_count == 0


def test_a_dispatcher_that_is_faster_than_the_handover_waits_for_it() -> None:
    _, snapshots = handed_over(steps=3)
    leader = Leader(ordinal=2)
    key = leader.submit("r", output=(5, 5, 5), expects=True)
    assert not leader.core.has_work
    leader.adopt(snapshots)
    execute = leader.batch()
    assert execute is not None
    assert execute.batch.slices[0].first_position == 5  # with its KV
    leader.done(execute, 6)
    assert leader.heard(key) == ([6], TEXT, None)
    assert leader.core.sequence_ids == (snapshots[0].sequence_id,)


@pytest.mark.parametrize("how", ["last", "timeout"])
def test_who_waits_in_vain_is_resumed_without_kv(how: str) -> None:
    leader = Leader(ordinal=2)
    key = leader.submit("r", output=(5, 5), expects=True)
    if how == "last":
        leader.adopt((), last=True)
    else:
        due_at_s = leader.core.next_deadline_at_s
        assert due_at_s is not None
        assert due_at_s == leader.at_s + 10.0
        leader.at_s = due_at_s
        leader.feed(Tick(leader.at_s))
    execute = leader.batch()
    assert execute is not None
    assert execute.batch.slices[0].token_ids == (1, 2, 3, 5, 5)
    leader.done(execute, 6)
    assert leader.heard(key)[0] == [6]


@pytest.mark.parametrize("travels", [False, True], ids=["with its KV", "its KV travels"])
def test_a_request_that_is_ended_before_its_sequence_comes_leaves_no_orphan(travels: bool) -> None:
    _, snapshots = handed_over()
    leader = Leader(ordinal=2)
    key = leader.submit("r", output=(5, 5), expects=True)
    leader.feed(Aborted(leader.at_s, key))
    leader.adopt(snapshots, travels=travels, last=True)
    assert leader.core.orphan_count == 0
    assert not leader.core.sequence_ids
    if travels:
        leader.feed(KvArrived(leader.at_s, snapshots[0].sequence_id))
    assert reserved(leader) == 0
    assert not leader.core.has_work
    leader.core.check()


def test_that_a_request_was_ended_is_remembered_for_a_time() -> None:
    _, snapshots = handed_over()
    leader = Leader(ordinal=2)
    leader.feed(Aborted(leader.at_s, leader.submit("r", output=(5, 5), expects=True)))
    leader.at_s += 10.0
    leader.feed(Tick(leader.at_s))
    leader.adopt(snapshots, last=True)
    assert leader.core.orphan_count == 1


def test_who_waits_in_vain_at_a_follower_is_refused() -> None:
    follower = Leader()
    follower.feed(RoleChanged(follower.at_s, leads=False))
    key = follower.submit("r", output=(5,), expects=True)
    assert follower.heard(key)[2] is None
    follower.feed(Tick(follower.at_s + 10.0))
    ending = follower.heard(key)[2]
    assert ending is not None
    assert ending.refused


@pytest.mark.parametrize("way", ["abort", "deadline", "close", "move"])
def test_who_waits_can_leave(way: str) -> None:
    leader = Leader(ordinal=2)
    key = leader.submit("r", output=(5,), expects=True, deadline_at_s=leader.at_s + 1.0)
    leaving: dict[str, Event] = {
        "abort": Aborted(leader.at_s, key),
        "deadline": Tick(leader.at_s + 1.0),
        "close": StreamClosed(leader.at_s, 1),
        "move": HandOver(leader.at_s, WorkerId("w3")),
    }
    leader.feed(leaving[way])
    assert leader.core.sequence_ids == ()
    ending = leader.heard(key)[2]
    reasons = {"abort": FinishReason.CANCELLED, "deadline": FinishReason.DEADLINE}
    assert (ending is None) == (way == "close")
    if ending is not None:
        assert (ending.finish_reason, ending.moved_to) == (reasons.get(way), "w3" if way == "move" else "")


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(
    ("prompt", "output", "delivered_chars"),
    [
        ((1, 2, 4), (5, 5, 5), 6),  # another prompt
        ((1, 2, 3), (5, 5, 9), 6),  # other tokens
        ((1, 2, 3), (5,), 2),  # lacks what was sent
        ((1, 2, 3), (5, 5, 5), 4),  # lacks text that was sent
        ((1, 2, 3), (5, 5, 5), 7),  # has text that there never was
    ],
)
def test_a_request_that_disagrees_starts_anew_and_the_orphan_goes(
    prompt: tuple[int, ...], output: tuple[int, ...], delivered_chars: int, early: bool
) -> None:
    _, snapshots = handed_over(steps=3)
    leader = Leader(ordinal=2)
    if not early:
        leader.adopt(snapshots)
    leader.submit("r", prompt, output, delivered_chars=delivered_chars, expects=early)
    if early:
        leader.adopt(snapshots)
    assert leader.core.orphan_count == 0
    execute = leader.batch()
    assert execute is not None
    assert execute.batch.removed == (snapshots[0].sequence_id,)
    assert [s.token_ids for s in execute.batch.slices] == [(*prompt, *output)]


def test_a_request_without_text_and_logprobs_may_lack_tokens() -> None:
    old = Leader()
    old.feed(
        Submitted(
            at_s=old.at_s,
            key=SequenceKey(1, 1),
            request_id=RequestId("r"),
            attempt=1,
            prompt_token_ids=(1, 2, 3),
            sampling=greedy(20),
            wants_text=False,
        )
    )
    for _ in range(3):
        old.step()
    leader = Leader(ordinal=2)
    leader.adopt(old.hand_over())
    leader.feed(
        Submitted(
            at_s=leader.at_s,
            key=SequenceKey(1, 1),
            request_id=RequestId("r"),
            attempt=2,
            prompt_token_ids=(1, 2, 3),
            sampling=greedy(20),
            output_token_ids=(5,),
            wants_text=False,
        )
    )
    assert leader.heard(SequenceKey(1, 1)) == ([5, 5], "", None)


def test_an_orphan_that_has_ended_keeps_its_end_for_a_while() -> None:
    _, snapshots = handed_over(steps=3)
    leader = Leader(ordinal=2)
    leader.adopt(snapshots)
    while leader.core.has_work:
        leader.step(6)
    assert reserved(leader) == 0
    key = leader.submit("r", output=(5, 5, 5))
    assert leader.heard(key) == ([6] * 17, TEXT * 17, Ending(key.handle, FinishReason.LENGTH))


@pytest.mark.parametrize("ended", [True, False])
def test_an_orphan_that_nobody_asks_for_is_dropped(ended: bool) -> None:
    _, snapshots = handed_over(steps=3)
    leader = Leader(ordinal=2)
    leader.adopt(snapshots)
    while ended and leader.core.has_work:
        leader.step(6)
    leader.at_s += 10.0
    leader.feed(Tick(leader.at_s))
    assert (leader.core.orphan_count, leader.core.sequence_ids, reserved(leader)) == (0, (), 0)
    key = leader.submit("r", output=(5, 5, 5))
    assert leader.heard(key)[0] == []


@pytest.mark.parametrize("ended", [True, False])
def test_an_orphan_that_moves_on_loses_nothing(ended: bool) -> None:
    _, snapshots = handed_over(steps=3)
    between = Leader(ordinal=2)
    between.adopt(snapshots)
    between.step(6)
    while ended and between.core.has_work:
        between.step(6)
    leader = Leader(ordinal=3)
    leader.adopt(between.hand_over(WorkerId("w3")))
    assert between.emits == []
    key = leader.submit("r", output=(5, 5, 5))
    tokens, text, ending = leader.heard(key)
    assert (tokens, text) == ([6] * (17 if ended else 1), TEXT * len(tokens))
    assert (ending is not None) == ended


def test_a_second_drop_finds_a_suspended_sequence_that_has_ended() -> None:
    _, snapshots = handed_over(steps=3)
    between = Leader(ordinal=2)
    key = between.submit("r", output=(5, 5, 5), expects=True)
    between.adopt(snapshots, travels=True)
    between.feed(Aborted(between.at_s, key))
    (gone,) = between.hand_over(WorkerId("w3"))
    assert (gone.gone, gone.suspended) == (True, True)
    leader = Leader(ordinal=3)
    leader.adopt((gone,), travels=True)
    assert (leader.core.sequence_ids, reserved(leader)) == ((), 2)
    leader.feed(KvLost(leader.at_s, gone.sequence_id))
    assert (reserved(leader), leader.book.used_count) == (0, 0)


def test_the_stop_matcher_goes_on_in_mid_word() -> None:
    old = Leader()
    old.submit(sampling=greedy(20, stop=("aba",)))  # the second token completes it
    old.step()
    (snapshot,) = old.hand_over()
    assert (snapshot.held_text, snapshot.emitted_chars) == ("ab", 0)
    leader = Leader(ordinal=2)
    leader.adopt((snapshot,))
    leader.step()
    key = leader.submit("r", output=(5,), sampling=greedy(20, stop=("aba",)), delivered_chars=0)
    assert leader.heard(key) == ([5], "", Ending(key.handle, FinishReason.STOP, "aba"))


def test_deadlines_and_seniority_are_told_in_seconds_not_in_instants() -> None:
    old = Leader(ordinal=5, max_running_count=1)
    old.submit("runs")
    old.submit("waits", deadline_at_s=old.at_s + 3.0)
    old.at_s += 2.0
    old.step()
    snapshots = old.hand_over()
    assert [s.age_s for s in snapshots] == [2.0, 2.0]
    assert snapshots[1].deadline_s == 1.0
    leader = Leader(ordinal=2, max_running_count=1)
    leader.submit("young", prompt=(1,))
    leader.at_s += 1.0
    leader.submit("younger")
    leader.adopt(snapshots)  # one place: the youngest of those that run has to wait again
    runs = leader.step()
    assert runs == [snapshots[0].sequence_id]
    assert leader.core.next_deadline_at_s == leader.at_s + 1.0
    leader.feed(Tick(leader.at_s + 1.0))
    assert snapshots[1].sequence_id not in leader.core.sequence_ids


def test_a_handover_that_comes_twice_is_taken_once() -> None:
    _, snapshots = handed_over()
    leader = Leader(ordinal=2)
    leader.adopt(snapshots)
    leader.adopt(snapshots)
    assert (leader.core.totals.adopted, leader.core.totals.stale_events) == (1, 1)


def test_kv_that_will_not_come_is_computed_again() -> None:
    _, snapshots = handed_over(steps=3)
    leader = Leader(ordinal=2)
    leader.feed(Adopted(leader.at_s, snapshots, lost_ids=frozenset({snapshots[0].sequence_id})))
    execute = leader.batch()
    assert execute is not None
    assert execute.batch.removed == (snapshots[0].sequence_id,)
    assert execute.batch.slices[0].token_ids == (1, 2, 3, 5, 5, 5)


def test_the_later_of_two_dispatchers_that_wait_for_one_sequence_gets_it() -> None:
    _, snapshots = handed_over(steps=3)
    leader = Leader(ordinal=2)
    earlier = leader.submit("r", output=(5,), expects=True)
    later = leader.submit("r", output=(5, 5, 5), expects=True)
    leader.adopt(snapshots)
    leader.step(6)
    assert leader.heard(later)[0] == [6]
    assert leader.heard(earlier)[0] == [6]  # resumed by itself: one token behind its own
