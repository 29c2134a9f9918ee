"""Stories of the planner's core with transitions: events in, commands out."""

from dataclasses import replace

import pytest

from ballast.common.ids import Epoch, Incarnation, WorkerId
from ballast.common.overload import OverloadPolicy
from ballast.common.transition import Phase, Status, TransitionKind
from services.planner.core import messages as p
from services.planner.core.stages import Stage
from tests.support.planner_core import EXTENT, LOAD, Planner, shape


def test_epochs_continue_above_those_known_to_instances() -> None:
    """All planners and the state server were lost, but instances remember their epoch and refuse a lower one."""
    planner = Planner()
    planner.load = replace(LOAD, newest_epoch=57)
    planner.start("w0", "w1")
    assert planner.core.layout.epoch == 1
    planner.drop("w0", "w1")
    planner.go_through("w0", "w1")
    assert planner.journal[-1] is Stage.DONE
    assert planner.core.layout.epoch == 58


def test_epochs_are_settled_only_at_rest() -> None:
    """Members that are still prepared for a settled epoch roll back, so an epoch that may yet be committed must never
    be settled.
    """
    planner = Planner()
    assert planner.core.settled_epoch == 0
    planner.start("w0", "w1")
    assert planner.core.settled_epoch == 1
    planner.drop("w0", "w1")
    assert planner.journal == [Stage.PREPARING]
    assert planner.core.settled_epoch == 0
    planner.answer(Phase.FAILED, "w0", why="no memory")
    planner.answer(Phase.ABORTED, "w0", "w1")
    assert planner.journal[-1] is Stage.ABORTED
    assert planner.core.settled_epoch == 2, "the layout is still that of epoch 1"
    planner.tell(p.LeadershipChanged(planner.now_s, "c", None))
    assert planner.core.settled_epoch == 0


def test_an_overload_is_planned_prepared_committed_and_exchanged() -> None:
    planner = Planner()
    planner.start("w0", "w1", "w2")
    planner.tell(p.OverloadRaised(planner.now_s, "o1", 16 * EXTENT))
    assert planner.journal == [Stage.PREPARING]
    members = sorted(planner.calls(p.WorkerCall.PREPARE))
    assert len(members) == 2
    assert planner.core.layout.epoch == 1, "the layout is unchanged"

    planner.answer(Phase.PREPARED, members[0])
    assert planner.journal == [Stage.PREPARING]
    planner.answer(Phase.PREPARED, members[1])
    assert planner.journal == [Stage.PREPARING, Stage.COMMITTING]
    assert planner.stored is not None
    assert planner.stored.layout.epoch == planner.core.layout.epoch == 2
    assert sorted(len(group.members) for group in planner.core.layout.groups) == [1, 2]
    assert sorted(planner.calls(p.WorkerCall.COMMIT)) == members

    planner.answer(Phase.EXCHANGING, *members)
    planner.answer(Phase.DONE, *members)
    assert planner.journal[2:] == [Stage.EXCHANGING, Stage.DONE]
    record = planner.core.conductor.records()[0]
    assert record.journal.stage is Stage.DONE
    assert record.by == "overload"
    assert not planner.core.conductor.busy


def test_data_addresses_reach_the_members() -> None:
    planner = Planner()
    planner.start("w0", "w1")
    planner.drop("w1", "w0")
    assert planner.shape == ["w0[0:4]", "w1[0:4]"]
    call = next(c for c in planner.said if isinstance(c, p.CallMember))
    assert shape(call.journal.target) == ["w1[0:2]+w0[2:4]"]
    assert [m.data_address for m in call.journal.target.groups[0].members] == ["w1:2", "w0:2"]


def test_a_manual_drop_is_answered_once_journaled_and_equally_when_repeated() -> None:
    planner = Planner()
    planner.start("w0", "w1")
    planner.outcomes = [p.WriteOutcome.UNAVAILABLE]
    planner.drop("w0", "w1")
    assert not planner.told(p.AnswerChange)
    planner.wait(0.6)
    assert [c.epoch for c in planner.told(p.AnswerChange) if isinstance(c, p.AnswerChange)] == [2]
    planner.drop("w0", "w1")
    assert [c.epoch for c in planner.told(p.AnswerChange) if isinstance(c, p.AnswerChange)] == [2]
    planner.drop("w1", "w0")
    planner.drop("w1", "w0", request_id="d2")
    refusals = [c.refusal for c in planner.told(p.RefuseChange) if isinstance(c, p.RefuseChange)]
    assert refusals == [p.ChangeRefusal.ID_REUSED, p.ChangeRefusal.BUSY]


def test_a_member_that_cannot_prepare_aborts_the_transition() -> None:
    planner = Planner()
    planner.start("w0", "w1")
    planner.drop("w0", "w1")
    planner.answer(Phase.PREPARED, "w0")
    planner.answer(Phase.FAILED, "w1", why="too little memory")
    assert planner.journal == [Stage.PREPARING, Stage.ABORTING]
    assert planner.calls(p.WorkerCall.ABORT) == ["w0", "w1"]
    planner.answer(Phase.ABORTED, "w0", "w1")
    assert planner.journal[-1] is Stage.ABORTED
    assert planner.shape == ["w0[0:4]", "w1[0:4]"]
    assert "taken back: w1: too little memory" in planner.core.conductor.records()[0].summary


def test_silent_members_abort_the_transition_after_a_deadline() -> None:
    planner = Planner()
    planner.start("w0", "w1")
    planner.drop("w0", "w1")
    planner.wait(1.0)
    assert planner.calls(p.WorkerCall.PREPARE).count("w0") > 10, "asked repeatedly"
    planner.wait(9.5)
    assert planner.journal[-1] is Stage.ABORTING
    assert "not prepared within 10 s" in planner.core.conductor.records()[0].journal.failure


def test_joins_and_losses_wait_for_the_decision() -> None:
    planner = Planner()
    planner.start("w0", "w1", "w2")
    planner.drop("w0", "w1")
    planner.up("w3")
    planner.lose("w2")
    planner.wait(0.5)
    assert planner.shape == ["w0[0:4]", "w1[0:4]", "w2[0:4]"]
    planner.answer(Phase.PREPARED, "w0", "w1")
    assert planner.shape == ["w0[0:2]+w1[2:4]", "w3[0:4]"], "written right after the decision"
    assert planner.core.layout.epoch == 3
    planner.answer(Phase.DONE, "w0", "w1")
    assert planner.journal[-1] is Stage.DONE


def test_a_member_lost_before_the_decision_aborts() -> None:
    planner = Planner()
    planner.start("w0", "w1")
    planner.drop("w0", "w1")
    planner.answer(Phase.PREPARED, "w0")
    planner.lose("w1")
    assert planner.journal[-1] is Stage.ABORTING
    planner.answer(Phase.ABORTED, "w0")
    assert planner.journal[-1] is Stage.ABORTED
    assert planner.shape == ["w0[0:4]"]


def test_after_a_loss_following_the_decision_survivors_get_all_layers_again() -> None:
    planner = Planner()
    planner.start("w0", "w1", "w2")
    planner.drop("w0", "w1")
    planner.answer(Phase.PREPARED, "w0", "w1")
    planner.answer(Phase.EXCHANGING, "w0", "w1")
    planner.lose("w1")
    assert planner.shape == ["w2[0:4]"], "w0 holds only some layers"
    assert planner.core.partial == (("w0", 1),)
    planner.answer(Phase.FAILED, "w0", why="w1 is gone")
    assert planner.journal[-2:] == [Stage.DONE, Stage.PREPARING], "the survivor's restore begins at once"
    call = next(c for c in planner.said if isinstance(c, p.CallMember) and c.journal.kind is TransitionKind.RESTORE)
    assert call.member.worker_id == "w0"
    assert {holder for _, holder in call.sources} == {None}
    assert shape(call.journal.base) == ["w2[0:4]"]
    planner.tell(p.OverloadRaised(planner.now_s, "o", EXTENT))
    assert planner.journal[-1] is Stage.PREPARING, "it adds memory, so demand is no reason to stop it"
    planner.go_through("w0")
    assert planner.shape == ["w0[0:4]", "w2[0:4]"]
    assert planner.core.partial == ()


def test_a_member_lost_at_rest_dissolves_its_group() -> None:
    planner = Planner()
    planner.start("w0", "w1", "w2")
    planner.drop("w0", "w1", "w2")
    planner.go_through("w0", "w1", "w2")
    assert planner.shape == ["w0[0:1]+w1[1:2]+w2[2:4]"]
    planner.lose("w0")
    assert planner.shape == []
    planner.go_through("w1", "w2")
    assert planner.shape == ["w1[0:4]", "w2[0:4]"]
    planner.up("w0")
    planner.wait(0.2)
    assert planner.shape == ["w0[0:4]", "w1[0:4]", "w2[0:4]"], "a new incarnation has all layers"


@pytest.mark.parametrize("phase", [Phase.FAILED, Phase.DONE])
def test_a_failed_link_between_living_members_restores_both(phase: Phase) -> None:
    """A member that has restored all layers before the planner asks reports DONE, with the reason why it left the
    group.
    """
    planner = Planner()
    planner.start("w0", "w1")
    planner.drop("w0", "w1")
    planner.answer(Phase.PREPARED, "w0", "w1")
    planner.answer(phase, "w0", "w1", why="link broke")
    assert planner.shape == []
    assert dict(planner.core.partial) == {"w0": 1, "w1": 1}
    planner.go_through("w0", "w1")
    assert planner.shape == ["w0[0:4]", "w1[0:4]"]
    planner.drop("w0", "w1", request_id="d2")
    planner.go_through("w0", "w1")
    assert planner.shape == ["w0[0:2]+w1[2:4]"], "past failures do not count"


def test_a_failed_restore_of_a_survivor_is_retried_later() -> None:
    planner = Planner()
    planner.start("w0", "w1")
    planner.drop("w0", "w1")
    planner.go_through("w0", "w1")
    planner.lose("w1")
    planner.answer(Phase.FAILED, "w0", why="disk")
    planner.answer(Phase.ABORTED, "w0")
    count = planner.journal.count(Stage.PREPARING)
    planner.wait(1.5)
    assert planner.journal.count(Stage.PREPARING) == count
    planner.wait(1.0)
    assert planner.journal.count(Stage.PREPARING) == count + 1


@pytest.mark.parametrize("stage", [Stage.PREPARING, Stage.COMMITTING, Stage.EXCHANGING])
def test_a_new_leader_continues_a_journaled_transition(stage: Stage) -> None:
    old = Planner()
    old.start("w0", "w1")
    old.drop("w0", "w1")
    if stage is not Stage.PREPARING:
        old.answer(Phase.PREPARED, "w0", "w1")
    if stage is Stage.EXCHANGING:
        old.answer(Phase.EXCHANGING, "w0", "w1")
    assert old.journal[-1] is stage
    new = Planner()
    new.stored, new.lives = old.stored, old.lives
    new.token += 1
    new.lead()
    if stage is Stage.PREPARING:
        assert new.journal == [Stage.ABORTING]
        new.answer(Phase.ABORTED, "w0", "w1")
        assert new.shape == ["w0[0:4]", "w1[0:4]"]
    else:
        assert new.shape == ["w0[0:2]+w1[2:4]"]
        new.answer(Phase.DONE, "w0", "w1")
        assert new.journal[-1] is Stage.DONE
        assert new.shape == ["w0[0:2]+w1[2:4]"]


def test_a_deposed_planner_stops_and_refuses() -> None:
    planner = Planner()
    planner.start("w0", "w1")
    planner.outcomes = [p.WriteOutcome.UNAVAILABLE]
    planner.drop("w0", "w1")
    planner.said.clear()
    planner.tell(p.LeadershipChanged(planner.now_s, "c", None))
    refused = planner.told(p.RefuseChange)
    assert [c.refusal for c in refused if isinstance(c, p.RefuseChange)] == [p.ChangeRefusal.STANDBY]
    assert not planner.core.conductor.busy


def test_a_plan_on_an_outdated_layout_is_a_conflict_and_no_member_is_notified() -> None:
    planner = Planner()
    planner.start("w0", "w1")
    planner.outcomes = [p.WriteOutcome.CONFLICT]
    planner.drop("w0", "w1")
    assert planner.journal == []
    assert not planner.calls(p.WorkerCall.PREPARE)
    refused = [c for c in planner.said if isinstance(c, p.RefuseChange)]
    assert [c.refusal for c in refused] == [p.ChangeRefusal.NOT_POSSIBLE]


def test_a_conflict_at_the_decision_aborts() -> None:
    planner = Planner()
    planner.start("w0", "w1")
    planner.drop("w0", "w1")
    planner.outcomes = [p.WriteOutcome.CONFLICT]
    planner.answer(Phase.PREPARED, "w0", "w1")
    assert planner.journal == [Stage.PREPARING, Stage.ABORTING]
    planner.answer(Phase.ABORTED, "w0", "w1")
    assert planner.shape == ["w0[0:4]", "w1[0:4]"]


def test_a_burst_that_returns_aborts_the_restore() -> None:
    planner = Planner()
    planner.start("w0", "w1")
    planner.drop("w0", "w1")
    planner.go_through("w0", "w1")
    planner.load = replace(LOAD, used_block_count=0, running_count=0)
    planner.tell(p.ReliefRaised(planner.now_s, "r1"))
    assert planner.journal[-1] is Stage.PREPARING
    call = next(c for c in reversed(planner.said) if isinstance(c, p.CallMember) and c.call is p.WorkerCall.PREPARE)
    assert call.journal.kind is TransitionKind.RESTORE
    assert call.sources, "each missing layer has a holder"
    planner.tell(p.OverloadRaised(planner.now_s, "o2", EXTENT))
    assert planner.journal[-1] is Stage.ABORTING
    planner.answer(Phase.ABORTED, "w0", "w1")
    assert planner.shape == ["w0[0:2]+w1[2:4]"]
    assert "demand is back" in planner.core.conductor.records()[0].summary


def test_never_two_transitions_at_once() -> None:
    planner = Planner()
    planner.start("w0", "w1", "w2", "w3")
    planner.drop("w0", "w1")
    for number in range(3):
        planner.tell(p.OverloadRaised(planner.now_s, f"o{number}", EXTENT))
        planner.tell(p.ReliefRaised(planner.now_s, f"r{number}"))
    assert planner.journal == [Stage.PREPARING]
    planner.go_through("w0", "w1")
    assert planner.journal.count(Stage.PREPARING) == 1


def test_an_overload_with_nothing_left_to_merge_is_reported() -> None:
    planner = Planner()
    planner.start("w0")
    planner.tell(p.OverloadRaised(planner.now_s, "o1", EXTENT))
    [nothing] = planner.told(p.NothingDone)
    assert isinstance(nothing, p.NothingDone)
    assert nothing.shortfall_bytes == EXTENT
    assert planner.journal == []


def test_a_plan_that_falls_short_is_executed_and_reported() -> None:
    planner = Planner()
    planner.start("w0", "w1")
    planner.tell(p.OverloadRaised(planner.now_s, "o1", 1000 * EXTENT))
    nothing = [c for c in planner.said if isinstance(c, p.NothingDone)]
    assert [c.why for c in nothing] == ["the plan frees less than is needed"]
    assert planner.journal == [Stage.PREPARING]


def test_the_policy_recompute_only_counts_overloads() -> None:
    planner = Planner(policy=OverloadPolicy.RECOMPUTE)
    planner.start("w0", "w1")
    planner.tell(p.OverloadRaised(planner.now_s, "o1", EXTENT))
    assert len(planner.told(p.NothingDone)) == 1
    assert planner.journal == []


def test_static_pipelines_are_formed_at_startup_and_are_permanent() -> None:
    planner = Planner(policy=OverloadPolicy.STATIC_PIPELINE, pipeline_degree=2)
    planner.start("w0", "w1", "w2")
    assert planner.journal == [Stage.PREPARING]
    planner.go_through("w0", "w1")
    assert planner.shape == ["w0[0:2]+w1[2:4]", "w2[0:4]"]
    planner.wait(10.0)
    planner.tell(p.OverloadRaised(planner.now_s, "o1", EXTENT))
    planner.tell(p.ReliefRaised(planner.now_s, "r1"))
    planner.tell(p.RestoreRequested(planner.now_s, "c", "x1"))
    assert [c.why for c in planner.said if isinstance(c, p.NothingDone)] == ["the policy is static-pipeline"]
    assert [c.refusal for c in planner.said if isinstance(c, p.RefuseChange)] == [p.ChangeRefusal.NOT_POSSIBLE]
    assert planner.journal[-1] is Stage.DONE, "w2 is left over, and there is nothing else to do"
    planner.up("w3")
    planner.wait(10.0)
    planner.go_through("w2", "w3")
    assert planner.shape == ["w0[0:2]+w1[2:4]", "w2[0:2]+w3[2:4]"]


def test_four_instances_become_two_pairs_or_one_pipeline_at_once() -> None:
    pairs = Planner(policy=OverloadPolicy.STATIC_PIPELINE)
    pairs.start("w0", "w1", "w2", "w3")
    pairs.go_through("w0", "w1", "w2", "w3")
    assert pairs.shape == ["w0[0:2]+w1[2:4]", "w2[0:2]+w3[2:4]"]
    one = Planner(policy=OverloadPolicy.STATIC_PIPELINE, pipeline_degree=4)
    one.start("w0", "w1", "w2", "w3")
    one.go_through("w0", "w1", "w2", "w3")
    assert one.shape == ["w0[0:1]+w1[1:2]+w2[2:3]+w3[3:4]"]


def test_a_failed_static_pipeline_is_retried() -> None:
    planner = Planner(policy=OverloadPolicy.STATIC_PIPELINE)
    planner.start("w0", "w1")
    planner.answer(Phase.FAILED, "w1", why="no link")
    assert planner.shape == ["w0[0:4]", "w1[0:4]"]
    planner.answer(Phase.ABORTED, "w0", "w1")
    planner.wait(10.0)
    planner.go_through("w0", "w1")
    assert planner.shape == ["w0[0:2]+w1[2:4]"]


def test_dropped_parameters_stay_dropped_if_restores_are_disabled() -> None:
    planner = Planner(restores=False)
    planner.start("w0", "w1")
    planner.drop("w0", "w1")
    planner.go_through("w0", "w1")
    planner.tell(p.ReliefRaised(planner.now_s, "r1"))
    planner.wait(10.0)
    assert planner.shape == ["w0[0:2]+w1[2:4]"]


def test_an_operators_drop_is_held_for_the_requested_time() -> None:
    planner = Planner()
    planner.start("w0", "w1")
    names = (WorkerId("w0"), WorkerId("w1"))
    planner.tell(p.DropRequested(planner.now_s, "c", "d1", worker_ids=names, hold_s=60.0))
    planner.go_through("w0", "w1")
    planner.load = replace(LOAD, used_block_count=0, running_count=0)
    assert planner.core.conductor.held_s(planner.now_s) == pytest.approx(60.0, abs=5.0)
    planner.tell(p.ReliefRaised(planner.now_s, "r1"))
    assert planner.journal[-1] is Stage.DONE, "nothing is restored while the drop is held"
    planner.wait(61.0)
    planner.tell(p.ReliefRaised(planner.now_s, "r2"))
    assert planner.journal[-1] is Stage.PREPARING


def test_another_manual_drop_does_not_shorten_the_hold() -> None:
    planner = Planner()
    planner.start("w0", "w1", "w2", "w3")
    first, second = (WorkerId("w0"), WorkerId("w1")), (WorkerId("w2"), WorkerId("w3"))
    planner.tell(p.DropRequested(planner.now_s, "c", "d1", worker_ids=first, hold_s=600.0))
    planner.go_through("w0", "w1")
    across = (WorkerId("w1"), WorkerId("w2"))
    planner.tell(p.DropRequested(planner.now_s, "c", "d2", worker_ids=across, hold_s=6000.0))
    assert planner.core.conductor.held_s(planner.now_s) == pytest.approx(600.0, abs=5.0), "the second drop is refused"
    planner.tell(p.DropRequested(planner.now_s, "c", "d3", worker_ids=second))
    planner.go_through("w2", "w3")
    assert planner.core.conductor.held_s(planner.now_s) == pytest.approx(600.0, abs=10.0)


def test_an_operators_restore_ends_a_hold() -> None:
    planner = Planner()
    planner.start("w0", "w1")
    names = (WorkerId("w0"), WorkerId("w1"))
    planner.tell(p.DropRequested(planner.now_s, "c", "d1", worker_ids=names, hold_s=60.0))
    planner.go_through("w0", "w1")
    planner.tell(p.RestoreRequested(planner.now_s, "c", "x1"))
    assert planner.core.conductor.held_s(planner.now_s) == 0.0
    planner.go_through("w0", "w1")
    assert planner.shape == ["w0[0:4]", "w1[0:4]"]


def test_a_manual_drop_follows_the_plan_and_needs_a_shortage() -> None:
    planner = Planner()
    planner.start("w0", "w1")
    planner.load = replace(LOAD, used_block_count=0, running_count=0, waiting_count=0, waiting_block_count=0)
    planner.tell(p.DropRequested(planner.now_s, "c", "d1"))
    (refused,) = [c for c in planner.said if isinstance(c, p.RefuseChange)]
    assert "nothing lacks" in refused.why
    assert planner.journal == []


def test_a_change_is_refused_if_loads_are_unavailable() -> None:
    planner = Planner()
    planner.start("w0", "w1")
    planner.load = None
    planner.tell(p.DropRequested(planner.now_s, "c", "d1", required_bytes=1))
    [refused] = planner.told(p.RefuseChange)
    assert isinstance(refused, p.RefuseChange)
    assert refused.refusal is p.ChangeRefusal.NO_LOADS


def test_a_draining_member_dissolves_its_group_first() -> None:
    planner = Planner()
    planner.start("w0", "w1")
    planner.drop("w0", "w1")
    planner.go_through("w0", "w1")
    planner.tell(p.InstanceDraining(planner.now_s, "c", WorkerId("w1"), Incarnation(1)))
    planner.wait(3.0)
    assert planner.core.conductor.record is not None
    assert planner.core.conductor.record.by == "drain"
    planner.go_through("w0", "w1")
    assert planner.shape == ["w0[0:4]", "w1[0:4]"]
    assert [g.leader.draining for g in planner.core.layout.groups] == [False, True]


def test_an_overload_does_not_delay_a_draining_member() -> None:
    planner = Planner()
    planner.start("w0", "w1")
    planner.drop("w0", "w1")
    planner.go_through("w0", "w1")
    planner.tell(p.InstanceDraining(planner.now_s, "c", WorkerId("w1"), Incarnation(1)))
    planner.wait(3.0)
    planner.tell(p.OverloadRaised(planner.now_s, "c2", 4 * EXTENT))
    planner.go_through("w0", "w1")
    assert planner.journal[-1] is Stage.DONE
    assert planner.shape == ["w0[0:4]", "w1[0:4]"]
    planner.tell(p.DropRequested(planner.now_s, "c3", "x", worker_ids=(WorkerId("w0"), WorkerId("w1"))))
    assert [c.why for c in planner.said if isinstance(c, p.RefuseChange)] == ["about to leave: w1"]


def test_a_manual_restore_ignores_the_load() -> None:
    planner = Planner()
    planner.start("w0", "w1")
    planner.drop("w0", "w1")
    planner.go_through("w0", "w1")
    planner.load = replace(LOAD, block_count=96, used_block_count=56)
    planner.tell(p.ReliefRaised(planner.now_s, "r1"))
    assert planner.journal[-1] is Stage.DONE, "too much is in use for an automatic restore"
    planner.now_s += 41.0
    planner.tell(p.RestoreRequested(planner.now_s, "c", "x1"))
    planner.go_through("w0", "w1")
    assert planner.shape == ["w0[0:4]", "w1[0:4]"]
    assert "restored after 41 s" in planner.core.conductor.records()[0].summary


def restoring_by_itself() -> Planner:
    """A planner that is preparing an automatic restore."""
    planner = Planner()
    planner.start("w0", "w1")
    planner.drop("w0", "w1")
    planner.go_through("w0", "w1")
    planner.load = replace(LOAD, block_count=96, used_block_count=40)
    planner.tell(p.ReliefRaised(planner.now_s, "r1"))
    assert planner.journal[-1] is Stage.PREPARING
    return planner


def test_an_automatic_restore_yields_to_an_operator() -> None:
    planner = restoring_by_itself()
    planner.tell(p.RestoreRequested(planner.now_s, "c", "x1"))
    assert planner.journal[-1] is Stage.ABORTING
    planner.answer(Phase.ABORTED, "w0", "w1")
    assert planner.journal[-1] is Stage.PREPARING
    planner.tell(p.RestoreRequested(planner.now_s, "c", "x2"))
    refusals = [c.refusal for c in planner.told(p.RefuseChange) if isinstance(c, p.RefuseChange)]
    assert refusals == [p.ChangeRefusal.BUSY], "an operator's restore is not interrupted"
    planner.go_through("w0", "w1")
    assert planner.shape == ["w0[0:4]", "w1[0:4]"]


def test_an_automatic_restore_yields_to_leaving_and_joining_workers() -> None:
    planner = restoring_by_itself()
    planner.tell(p.InstanceDraining(planner.now_s, "c", WorkerId("w1"), Incarnation(1)))
    planner.wait(3.0)
    assert Stage.ABORTING in planner.journal[-2:]
    planner.answer(Phase.ABORTED, "w0", "w1")
    planner.wait(3.0)
    assert planner.core.conductor.record is not None
    assert planner.core.conductor.record.by == "drain"

    planner = restoring_by_itself()
    planner.up("w2")
    planner.wait(3.0)
    planner.answer(Phase.ABORTED, "w0", "w1")
    planner.wait(3.0)
    assert planner.shape == ["w0[0:2]+w1[2:4]", "w2[0:4]"]


def test_the_summary_names_layers_memory_victims_and_times() -> None:
    planner = Planner()
    planner.start("w0", "w1")
    planner.drop("w0", "w1")
    planner.answer(Phase.PREPARED, "w0", "w1")
    for worker, victims, sent in (("w0", 37, 5_000_000), ("w1", 0, 3_100_000)):
        status = Status(
            epoch=Epoch(0),
            block_count_before=32,
            block_count_after=96,
            victim_count=victims,
            kv_bytes_sent=sent,
            exchange_s=0.21,
            max_stall_s=0.3,
            waves=3 if worker == "w0" else 0,
        )
        planner.answer(Phase.DONE, worker, status=status)
    moved = [c for c in planner.said if isinstance(c, p.TransitionMoved)]
    assert moved[-1].record.summary == (
        "group {w0,w1}: dropped layers 2-3 of w0, 0-1 of w1, +32.0 KiB KV (1.0k -> 1.5k tokens),"
        " 37 requests moved, 7.7 MiB of KV exchanged in 0.21 s, in 3 waves, longest stall 0.30 s"
    )
    assert [c for c in planner.said if isinstance(c, p.Publish)]


def test_an_unknown_outcome_of_the_decision_is_written_again_until_it_is_known() -> None:
    planner = Planner()
    planner.start("w0", "w1")
    planner.drop("w0", "w1")
    planner.outcomes = [p.WriteOutcome.UNAVAILABLE, p.WriteOutcome.UNAVAILABLE]
    planner.answer(Phase.PREPARED, "w0", "w1")
    assert planner.shape == ["w0[0:4]", "w1[0:4]"]
    planner.tell(p.OverloadRaised(planner.now_s, "o", EXTENT))
    planner.wait(2.0)
    assert planner.journal == [Stage.PREPARING, Stage.COMMITTING]
    assert planner.shape == ["w0[0:2]+w1[2:4]"]


def test_epochs_of_aborted_transitions_are_not_reused() -> None:
    planner = Planner()
    planner.start("w0", "w1")
    planner.drop("w0", "w1")
    planner.answer(Phase.FAILED, "w0", why="x")
    planner.answer(Phase.ABORTED, "w0", "w1")
    new = Planner()
    new.stored, new.lives, new.token = planner.stored, planner.lives, planner.token + 1
    new.lead()
    for one in (planner, new):
        one.up("w2")
        one.wait(0.2)
        assert one.core.layout.epoch == 3
