"""A member's part in a restore: from the commit on it serves alone, while its old group drains."""

from collections.abc import Callable

import pytest

from ballast.common.ids import Epoch, GroupId, Incarnation, WorkerId
from ballast.common.layout import Group, Layout, Member
from ballast.common.transition import Phase, TransitionKind
from services.worker.core.draining import Draining
from services.worker.core.plan import Plan, Victim
from services.worker.core.spans import Hop
from services.worker.core.transition import Reception, Transition, reception
from services.worker.core.transition_messages import (
    AbortRequested,
    Broken,
    CloseSeat,
    Command,
    CommitRequested,
    ConnectLinks,
    Empty,
    EpochEnded,
    Event,
    ExpectKv,
    GrantRoom,
    GroupEnded,
    GroupLimited,
    HandoverReceived,
    KvReceived,
    LayersGivenUp,
    Lead,
    Led,
    LimitHeld,
    LinksUp,
    LoadLayers,
    MemoryReady,
    PeerLost,
    PreparationFailed,
    PrepareRequested,
    ReleaseLost,
    ReportRoom,
    Resume,
    RoomGranted,
    RosterReceived,
    SendEpochEnded,
    SendHandover,
    SendRoster,
    ShrinkGroup,
    TakenUp,
    TakeUp,
    WithdrawRoom,
)
from services.worker.policy.placement import MemberView

LAYERS, OLD, NEW = 6, Epoch(2), Epoch(3)
W0, W1, W2 = NAMES = tuple(WorkerId(f"w{i}") for i in range(3))


def member(name: WorkerId, first: int, last: int) -> Member:
    return Member(name, Incarnation(1), "", first, last)


PIPELINE = Group(GroupId("w0"), tuple(member(name, 2 * i, 2 * i + 2) for i, name in enumerate(NAMES)))
WHOLE = tuple(Group(GroupId(name), (member(name, 0, LAYERS),)) for name in NAMES)
PLAN = Plan(TransitionKind.RESTORE, Layout(OLD, LAYERS, (PIPELINE,), ""), Layout(NEW, LAYERS, WHOLE, ""))


def begun(me: WorkerId, room_blocks: int | None = None) -> Transition:
    transition = Transition(me, PLAN)
    others = tuple(name for name in NAMES if name != me)
    assert transition.handle(PrepareRequested(0.0, PLAN, room_blocks))[0] == ConnectLinks(NEW, others)
    assert transition.handle(PrepareRequested(0.0, PLAN)) == []
    return transition


def loading(me: WorkerId) -> Transition:
    """A transition that is loading layers. The leader limits its group before it grants room, and followers wait for
    the grant.
    """
    transition = begun(me)
    if me == W0:
        assert transition.handle(LinksUp(0.0, NEW)) + transition.handle(GroupLimited(0.0, NEW, 12)) == []
        assert transition.limits
        assert transition.handle(LimitHeld(0.0, NEW)) == [GrantRoom(NEW, 12), LoadLayers(NEW, 12)]
    else:
        assert transition.handle(LinksUp(0.0, NEW)) == []
        assert transition.handle(RoomGranted(0.0, NEW, 12)) == [LoadLayers(NEW, 12)]
    assert transition.phase is Phase.PREPARING
    return transition


def prepared(me: WorkerId) -> Transition:
    transition = loading(me)
    assert transition.handle(MemoryReady(0.0, NEW)) == []
    assert transition.phase is Phase.PREPARED
    return transition


def committed(me: WorkerId) -> Transition:
    transition = prepared(me)
    assert transition.handle(CommitRequested(0.0, NEW)) == [TakeUp(PLAN)]
    draining = Draining(me, 0.0, PIPELINE.members, [MemberView(w, 10, 4) for w in NAMES], 30)
    assert transition.handle(TakenUp(0.0, NEW, draining=draining)) == []
    assert transition.phase is Phase.EXCHANGING
    transition.check()
    return transition


def is_done_when_led(transition: Transition, others: tuple[WorkerId, ...] = ()) -> bool:
    """Whether the transition is done after Led and a roster from each of `others`, without any KV to exchange."""
    commands = transition.handle(Led(0.0, NEW, ()))
    assert commands[0] == SendRoster(NEW, (), tuple(name for name in NAMES if name != transition.me), 0, True)
    for other in others:
        assert transition.phase is Phase.EXCHANGING
        commands += transition.handle(RosterReceived(0.0, NEW, other, ()))
    transition.check()
    return commands[1:] == [ReleaseLost(PLAN)] and transition.phase is Phase.DONE


def ends(me: WorkerId, *lost: WorkerId) -> list[Command]:
    return [CloseSeat(NEW), *(SendHandover(NEW, to) for to in NAMES if to != me and to not in lost)]


def test_a_leader_ends_the_group_when_nothing_runs_in_it() -> None:
    transition = committed(W0)
    assert transition.handle(GroupEnded(0.0, NEW)) == [SendEpochEnded(NEW, (W1, W2)), *ends(W0)]
    assert transition.handle(GroupEnded(0.0, NEW)) == []
    assert transition.handle(HandoverReceived(0.0, NEW, W1, ())) == []
    assert transition.handle(HandoverReceived(0.0, NEW, W2, ())) == [Lead(NEW, ())]
    assert is_done_when_led(transition, (W1, W2))


@pytest.mark.parametrize("before_the_plan", [True, False])
def test_room_may_be_granted_before_links_are_up(before_the_plan: bool) -> None:
    transition = begun(W1, 12 if before_the_plan else None)
    if not before_the_plan:
        assert transition.handle(RoomGranted(0.0, NEW, 12)) == []
    assert transition.handle(LinksUp(0.0, NEW)) == [LoadLayers(NEW, 12)]


def test_a_group_whose_leader_has_committed_grants_more_of_its_room() -> None:
    transition = loading(W2)
    assert transition.handle(RoomGranted(0.0, NEW, 9)) == [ShrinkGroup(NEW, 9)]
    transition.handle(MemoryReady(0.0, NEW))
    assert transition.handle(RoomGranted(0.0, NEW, 7)) == [ShrinkGroup(NEW, 7)]
    assert transition.phase is Phase.PREPARED


@pytest.mark.parametrize("me", [W0, W1])
@pytest.mark.parametrize("begin", [begun, loading, prepared])
def test_the_effects_of_an_aborted_preparation_are_undone(
    begin: Callable[[WorkerId], Transition], me: WorkerId
) -> None:
    transition = begin(me)
    assert transition.handle(AbortRequested(0.0, NEW, "demand")) == ([WithdrawRoom(NEW)] if me == W0 else [])
    assert (transition.phase, transition.why, transition.undoing) == (Phase.ABORTED, "demand", True)
    assert transition.handle(CommitRequested(0.0, NEW)) + transition.handle(RoomGranted(0.0, NEW, 12)) == []
    assert transition.handle(LayersGivenUp(0.0, NEW)) == [ReportRoom(NEW)]
    assert (transition.phase, transition.undoing) == (Phase.ABORTED, False)


@pytest.mark.parametrize("undone_first", [True, False])
def test_a_failed_preparation_is_undone_before_or_after_the_planner_learns_of_it(undone_first: bool) -> None:
    transition = loading(W1)
    assert transition.handle(PreparationFailed(0.0, NEW, "no source has layer 3")) == []
    assert (transition.phase, transition.undoing) == (Phase.FAILED, True)
    last: list[Event] = [AbortRequested(0.0, NEW, "one has failed"), LayersGivenUp(0.0, NEW)]
    for event in reversed(last) if undone_first else last:
        transition.handle(event)
    assert (transition.phase, transition.undoing) == (Phase.ABORTED, False)


def test_an_abort_after_the_commit_ends_the_group_early() -> None:
    transition = committed(W0)
    assert transition.handle(AbortRequested(0.0, NEW, "demand is back")) == []
    assert transition.draining is not None
    assert transition.draining.hurried
    assert transition.phase is Phase.EXCHANGING


def test_a_follower_is_done_when_the_group_has_ended_and_all_have_reported_it() -> None:
    transition = committed(W1)
    assert transition.handle(EpochEnded(0.0, NEW, W0)) == ends(W1)
    assert transition.handle(EpochEnded(0.0, NEW, W0)) == []
    assert transition.handle(HandoverReceived(0.0, NEW, W0, ())) == []
    assert transition.handle(HandoverReceived(0.0, NEW, W2, ())) == [Lead(NEW, ())]
    assert is_done_when_led(transition, (W0, W2))


def test_handed_over_sequences_wait_until_the_group_has_ended_here() -> None:
    """The engine, which was a stage of the group, may still hold the sequences that are handed over."""
    transition = committed(W2)
    for other in (W0, W1):
        assert transition.handle(HandoverReceived(0.0, NEW, other, ())) == []
    assert transition.handle(EpochEnded(0.0, NEW, W0)) == [*ends(W2), Lead(NEW, ())]
    assert is_done_when_led(transition, (W0, W1))


def test_the_group_may_end_before_a_follower_learns_of_the_commit() -> None:
    transition = prepared(W1)
    assert transition.handle(EpochEnded(0.0, NEW, W0)) == []
    for other in (W0, W2):
        assert transition.handle(HandoverReceived(0.0, NEW, other, ())) == []
    assert transition.phase is Phase.PREPARED
    assert transition.handle(CommitRequested(0.0, NEW)) == [TakeUp(PLAN)]
    assert transition.handle(TakenUp(0.0, NEW)) == [*ends(W1), Lead(NEW, ())]
    assert is_done_when_led(transition, (W0, W2))


def test_kv_of_the_remaining_requests_is_exchanged() -> None:
    """The middle member gets a victim, and each of the other two sends it the KV of its own layers."""
    transition, victim = committed(W1), Victim(7, 20, W0)
    transition.handle(EpochEnded(0.0, NEW, W0))
    transition.handle(HandoverReceived(0.0, NEW, W2, ()))
    assert transition.handle(HandoverReceived(0.0, NEW, W0, (victim,))) == [Lead(NEW, (victim,))]
    said = transition.handle(Led(0.0, NEW, (victim,)))
    assert said[1:] == [ExpectKv(NEW, victim, (Hop(W0, W1, 0, 2), Hop(W2, W1, 4, 6)))]
    for other in (W0, W2):
        transition.handle(RosterReceived(0.0, NEW, other, ()))
    assert transition.handle(KvReceived(0.0, NEW, 7, W0)) == []
    assert transition.handle(KvReceived(0.0, NEW, 7, W2)) == [Resume(NEW, 7), ReleaseLost(PLAN)]
    assert transition.phase is Phase.DONE


def test_a_sequence_resumes_when_its_shared_blocks_have_arrived() -> None:
    transition = committed(W1)
    first, second, third = Victim(7, 20, W0), Victim(8, 20, W0, (), 7, 1), Victim(9, 20, W0, (), 8, 1)
    transition.handle(EpochEnded(0.0, NEW, W0))
    transition.handle(HandoverReceived(0.0, NEW, W2, ()))
    transition.handle(HandoverReceived(0.0, NEW, W0, (first, second, third)))
    transition.handle(Led(0.0, NEW, (first, second, third)))
    for other in (W0, W2):
        transition.handle(RosterReceived(0.0, NEW, other, ()))
    for sequence_id in (9, 8):
        for giver in (W0, W2):
            assert transition.handle(KvReceived(0.0, NEW, sequence_id, giver)) == []
    assert transition.handle(KvReceived(0.0, NEW, 7, W0)) == []
    resumed = [Resume(NEW, 7), Resume(NEW, 8), Resume(NEW, 9)]
    assert transition.handle(KvReceived(0.0, NEW, 7, W2)) == [*resumed, ReleaseLost(PLAN)]


def test_a_leader_that_loses_a_follower_empties_the_group() -> None:
    transition = committed(W0)
    assert transition.handle(PeerLost(0.0, W1, "gone")) == [Empty(NEW)]
    assert transition.lost == {W1}
    assert transition.handle(GroupEnded(0.0, NEW))[1:] == ends(W0, W1)
    assert transition.handle(HandoverReceived(0.0, NEW, W2, ())) == [Lead(NEW, ())]
    assert is_done_when_led(transition, (W2,))


def test_followers_without_their_leader_continue_to_serve() -> None:
    transition = committed(W1)
    assert transition.handle(PeerLost(0.0, W0, "gone")) == ends(W1, W0)
    assert transition.handle(HandoverReceived(0.0, NEW, W2, ())) == [Lead(NEW, ())]
    assert is_done_when_led(transition, (W2,))
    assert transition.handle(PeerLost(0.0, W2, "gone, too")) == []


def test_losing_a_member_after_the_end_is_harmless_if_it_sends_no_kv() -> None:
    transition, victim = committed(W1), Victim(7, 20, W0)
    transition.handle(EpochEnded(0.0, NEW, W0))
    assert transition.handle(HandoverReceived(0.0, NEW, W0, (victim,))) == []
    assert transition.handle(PeerLost(0.0, W2, "gone")) == [Lead(NEW, (victim,))]
    assert transition.lost == {W2}, "nothing waits for the KV of a lost member"
    assert is_done_when_led(transition, (W0,))


def test_losing_a_member_that_sends_kv_fails_the_transition() -> None:
    transition, victim = committed(W1), Victim(7, 20, W0)
    transition.handle(EpochEnded(0.0, NEW, W0))
    transition.handle(HandoverReceived(0.0, NEW, W2, ()))
    transition.handle(HandoverReceived(0.0, NEW, W0, (victim,)))
    transition.handle(Led(0.0, NEW, (victim,)))
    assert transition.handle(PeerLost(0.0, W2, "gone")) == [Broken(W2, "gone")]
    assert transition.phase is Phase.FAILED


def test_losing_a_member_before_the_commit_fails_the_restore() -> None:
    transition = prepared(W0)
    said: list[Command] = transition.handle(PeerLost(0.0, W2, "gone"))
    assert [type(command).__name__ for command in said] == ["WithdrawRoom"]
    assert transition.phase is Phase.FAILED
    assert transition.handle(CommitRequested(0.0, NEW)) == []


ALONE = Plan(TransitionKind.RESTORE, Layout(NEW, LAYERS, (), ""), Layout(Epoch(4), LAYERS, WHOLE, ""))


@pytest.mark.parametrize(
    ("plan", "newest", "transition", "in_group", "is_whole", "expected"),
    [
        (PLAN, OLD, None, True, False, Reception.TAKE),
        (PLAN, NEW, None, True, False, Reception.IGNORE),
        (PLAN, OLD, committed(W0), True, False, Reception.IGNORE),
        (ALONE, NEW, None, True, False, Reception.LEAVE),
        (ALONE, NEW, committed(W0), False, False, Reception.LEAVE),
        (ALONE, NEW, prepared(W0), False, False, Reception.TAKE),
        (ALONE, NEW, None, False, True, Reception.CONFIRM),
        (ALONE, Epoch(4), None, False, True, Reception.IGNORE),
    ],
)
def test_a_plan_is_accepted_unless_it_is_old_or_already_in_force_or_its_group_is_lost(
    plan: Plan, newest: Epoch, transition: Transition | None, in_group: bool, is_whole: bool, expected: Reception
) -> None:
    assert reception(plan, W0, newest, transition, in_group=in_group, is_whole=is_whole) is expected
    assert reception(plan, WorkerId("w9"), OLD, None, in_group=False, is_whole=True) is Reception.IGNORE
