"""Planner stories in which a member that counts as lost is alive: stopped, cut off, or missing from an old journal."""

from dataclasses import replace

import pytest

from ballast.common.ids import GroupId, Incarnation, WorkerId
from ballast.common.layout import Group, Member
from ballast.common.transition import Phase
from services.planner.core import messages as p
from services.planner.core.stages import Stage
from tests.support.planner_core import Planner

LONE = {"w0[0:4]", "w1[0:4]", "w2[0:4]"}


def paired(*more: str) -> tuple[Planner, Group]:
    """A planner in whose layout w0 and w1 are a pair, as they report themselves; returns it and the pair's group."""
    planner = Planner()
    planner.start("w0", "w1", *more)
    planner.drop("w0", "w1")
    planner.go_through("w0", "w1")
    for worker in ("w0", "w1"):
        planner.says(worker)
    planner.said.clear()
    return planner, planner.core.layout.groups[0]


def alone(planner: Planner, worker: str, first: int = 0, last: int = 4) -> Group:
    member = Member(WorkerId(worker), Incarnation(planner.lives[worker]), "", first, last)
    return Group(GroupId(worker), (member,))


def lose(planner: Planner, worker: str, stand_in: str, *members: str) -> None:
    """Lose `worker`; `stand_in` is asked to replace it and fails."""
    planner.lose(worker)
    assert f"{stand_in} stands in for {worker}" in planner.core.conductor.records()[0].journal.why
    planner.answer(Phase.FAILED, stand_in, why="no link")
    planner.answer(Phase.ABORTED, stand_in, *members)
    planner.said.clear()
    planner.wait(0.2)


def prepared(planner: Planner) -> set[str]:
    """Workers that were asked to prepare. If the plan's base lacks their group, this orders them to leave it."""
    calls = [c for c in planner.said if isinstance(c, p.CallMember) and c.call is p.WorkerCall.PREPARE]
    return {c.member.worker_id for c in calls}


def test_a_returning_member_is_placed_with_the_layers_that_it_holds() -> None:
    planner, pair = paired("w2")
    lose(planner, "w1", "w2", "w0")
    planner.wait(3.0)
    assert planner.shape == ["w2[0:4]"]
    assert prepared(planner) == {"w0"}, "w0 must leave the group, though only the planner has lost w1"
    planner.go_through("w0")
    assert sorted(planner.shape) == ["w0[0:4]", "w2[0:4]"]

    planner.said.clear()
    planner.says("w1", pair, epoch=2)
    planner.wait(0.2)
    assert "w1[0:4]" not in planner.shape, "w1 holds only half of the layers"
    planner.wait(2.0)
    assert prepared(planner) == {"w1"}
    planner.go_through("w1")
    assert set(planner.shape) == LONE


def test_returning_while_a_layout_is_written_does_not_make_a_worker_whole() -> None:
    planner, pair = paired()
    execute, held = planner.execute, list[p.WriteLayout]()

    def hold(command: p.Command) -> None:
        if isinstance(command, p.WriteLayout):
            held.append(command)
        else:
            execute(command)

    planner.execute = hold
    planner.lose("w1")
    planner.wait(0.2)
    planner.says("w1", pair)
    planner.execute = execute
    [command] = held
    planner.stored = p.StoredLayout(command.layout, command.model, command.partial, None)
    planner.tell(p.WriteSettled(planner.now_s, "c", command, p.WriteOutcome.WRITTEN))
    planner.wait(3.0)
    assert planner.shape == []
    assert prepared(planner) == {"w0", "w1"}


def test_a_commit_missed_by_a_paused_member_ends() -> None:
    """w1 is lost between its PREPARED and the Commit, and w0 waits for it over an intact link."""
    planner = Planner()
    planner.start("w0", "w1", "w2")
    planner.drop("w0", "w1")
    planner.answer(Phase.PREPARED, "w0", "w1")
    planner.answer(Phase.EXCHANGING, "w0")
    pair = planner.core.layout.groups[0]
    planner.lose("w1")
    planner.wait(3.0)
    assert Stage.DONE in planner.journal
    assert prepared(planner) >= {"w0"}, "w0 leaves the group that never started"
    planner.says("w1", alone(planner, "w1"), epoch=1)
    planner.go_through("w0")
    planner.wait(3.0)
    assert set(planner.shape) == LONE
    assert pair not in planner.core.layout.groups


def test_an_exchange_without_progress_ends() -> None:
    planner = Planner()
    planner.start("w0", "w1")
    planner.drop("w0", "w1")
    planner.answer(Phase.PREPARED, "w0", "w1")
    planner.answer(Phase.EXCHANGING, "w0", "w1")
    for _ in range(59):
        planner.wait(1.0)
        planner.answer(Phase.EXCHANGING, "w0", "w1")
    assert planner.journal[-1] is Stage.EXCHANGING
    planner.said.clear()
    planner.wait(5.0)
    assert Stage.DONE in planner.journal
    assert prepared(planner) == {"w0", "w1"}
    planner.go_through("w0", "w1")
    assert planner.shape == ["w0[0:4]", "w1[0:4]"]


def test_a_step_that_never_ends_does_not_block_a_commit_forever() -> None:
    planner = Planner()
    planner.start("w0", "w1", "w2")
    planner.drop("w0", "w1")
    planner.answer(Phase.PREPARED, "w0", "w1")
    for _ in range(35):
        planner.wait(1.0)
        planner.answer(Phase.COMMITTING, "w0", "w1")
    assert Stage.DONE in planner.journal
    assert "w2[0:4]" in planner.shape


def test_an_unanswered_abort_ends() -> None:
    planner = Planner()
    planner.start("w0", "w1", "w2")
    planner.drop("w0", "w1")
    planner.answer(Phase.PREPARING, "w0")
    planner.answer(Phase.FAILED, "w1", why="no memory")
    for _ in range(11):
        planner.wait(1.0)
        planner.answer(Phase.PREPARING, "w0")
    assert planner.journal[-1] is Stage.ABORTED
    planner.wait(3.0)
    assert prepared(planner) >= {"w0"}, "it is unknown which layers w0 holds"


def gone_back(planner: Planner, old: p.StoredLayout | None) -> Planner:
    """Another planner that reads `old`, as if the state server had lost its latest writes."""
    later = Planner()
    later.stored, later.token, later.now_s = old, planner.token + 10_000, 100.0
    later.lives = dict(planner.lives)
    return later


def test_a_journal_rolled_back_before_a_commit_is_committed_again() -> None:
    planner = Planner()
    planner.start("w0", "w1", "w2")
    planner.drop("w0", "w1")
    old = planner.stored
    planner.go_through("w0", "w1")
    later = gone_back(planner, old)
    pair = planner.core.layout.groups[0]
    later.lead()
    later.tell(p.SnapshotBegan(later.now_s, "c"))
    later.says("w0", pair, epoch=2)
    later.says("w1", pair, epoch=2)
    later.says("w2", alone(later, "w2"), epoch=1)
    later.tell(p.SnapshotEnded(later.now_s, "c"))
    later.wait(0.2)
    later.answer(Phase.DONE, "w0", "w1")
    later.wait(0.2)
    later.answer(Phase.DONE, "w0", "w1")
    later.wait(1.0)
    assert sorted(later.shape) == ["w0[0:2]+w1[2:4]", "w2[0:4]"]
    assert not later.core.conductor.busy
    later.lose("w2")
    later.wait(1.0)
    assert later.shape == ["w0[0:2]+w1[2:4]"], "the layout can change again"


def test_a_layout_is_corrected_by_its_members_reports() -> None:
    """The planner believes that w1 holds all layers, but w1 keeps reporting only half of them."""
    planner = Planner()
    planner.start("w0", "w1", "w2")
    planner.says("w1", alone(planner, "w1", 0, 2))
    planner.wait(1.0)
    assert "w1[0:4]" in planner.shape, "the report may be of a change in progress"
    planner.wait(2.0)
    assert "w1[0:4]" not in planner.shape
    assert prepared(planner) == {"w1"}
    planner.go_through("w1")
    assert set(planner.shape) == LONE


def test_a_member_that_has_left_takes_its_pipeline_out_of_the_layout() -> None:
    """The member's links broke while its peer's links did not, or the peer's report is lost."""
    planner, _ = paired("w2")
    planner.says("w1", alone(planner, "w1", 2, 4))
    planner.wait(1.0)
    planner.says("w1", alone(planner, "w1"))
    planner.wait(3.0)
    assert planner.shape == ["w2[0:4]"]
    assert prepared(planner) == {"w0", "w1"}


def test_reports_of_members_that_left_count_despite_repeated_operator_requests() -> None:
    """The members refuse each restore, so it is aborted at once. That neither changes nor delays the outcome."""
    planner, _ = paired("w2")
    for worker in ("w0", "w1"):
        planner.says(worker, alone(planner, worker))
    began_s = planner.now_s
    for number in range(60):
        planner.tell(p.RestoreRequested(planner.now_s, "c", f"x{number}"))
        if planner.core.conductor.busy:
            planner.answer(Phase.FAILED, "w0", why="it is alone")
            planner.answer(Phase.ABORTED, "w0", "w1")
        planner.wait(0.05)
        if "w0[0:2]+w1[2:4]" not in planner.shape:
            break
    assert planner.now_s < began_s + 2.5
    assert "w0[0:2]+w1[2:4]" not in planner.shape


def test_reports_from_before_a_transition_do_not_show_its_end() -> None:
    """The monitor is unreachable, so no new reports arrive. That alone must not dissolve a group."""
    planner, _ = paired("w2")
    planner.wait(30.0)
    assert sorted(planner.shape) == ["w0[0:2]+w1[2:4]", "w2[0:4]"]
    planner = Planner()
    planner.start("w0", "w1")
    planner.drop("w0", "w1")
    planner.go_through("w0", "w1")
    planner.wait(30.0)
    assert planner.shape == ["w0[0:2]+w1[2:4]"]


def test_a_member_that_is_already_whole_need_not_prepare() -> None:
    planner, _ = paired("w2")
    lose(planner, "w1", "w2", "w0")
    planner.wait(3.0)
    planner.answer(Phase.DONE, "w0")
    planner.answer(Phase.DONE, "w0")
    assert planner.journal[-1] is Stage.DONE
    assert sorted(planner.shape) == ["w0[0:4]", "w2[0:4]"]


@pytest.mark.parametrize("deposed", [False, True])
def test_members_of_a_failed_drop_are_not_evicted_again_after_an_unknown_write(deposed: bool) -> None:
    """The layout without them was stored, but the answer was lost. It is known only from the next read."""
    planner = Planner()
    planner.start("w0", "w1")
    planner.drop("w0", "w1")
    planner.answer(Phase.PREPARED, "w0", "w1")
    planner.outcomes = [p.WriteOutcome.WRITTEN, p.WriteOutcome.WRITTEN, p.WriteOutcome.UNAVAILABLE]
    planner.answer(Phase.FAILED, "w0", "w1", why="link broke")
    [write] = [c for c in planner.said if isinstance(c, p.WriteLayout)]
    assert planner.stored is not None
    planner.stored = replace(planner.stored, layout=write.layout, partial=write.partial)
    if deposed:  # meanwhile another planner has led, and w0 has a new incarnation
        planner.tell(p.LeadershipChanged(planner.now_s, "c", None))
        other = Planner()
        other.stored, other.token = planner.stored, planner.token + 1
        other.lives["w0"] = 1
        other.start("w0")
        planner.stored, planner.token, planner.lives["w0"] = other.stored, planner.token + 2, 1
        planner.start("w0")
        planner.wait(1.0)
        assert planner.shape == ["w0[0:4]"]
        return
    planner.wait(0.6)
    planner.tell(p.TimerFired(planner.now_s, "c"))
    planner.go_through("w0", "w1")
    assert planner.shape == ["w0[0:4]", "w1[0:4]"]
    assert planner.core.kept_out.why(planner.now_s), "their group broke soon after it was formed"


def test_a_merged_group_does_not_wait_for_a_member_that_does_not_answer_the_commit() -> None:
    planner = Planner()
    planner.start("w0", "w1")
    planner.drop("w0", "w1")
    planner.answer(Phase.PREPARED, "w0", "w1")
    planner.answer(Phase.EXCHANGING, "w0")
    planner.wait(29.0)
    assert planner.journal[-1] is Stage.COMMITTING
    planner.wait(2.0)
    assert planner.core.conductor.records()[-1].lost == ("w0", "w1")
    assert planner.shape == [], "w0 leaves the group at once, and both get all layers again"
    planner.go_through("w0", "w1")
    assert planner.shape == ["w0[0:4]", "w1[0:4]"]
    # In a restore, the others serve alone whether or not this member answers.
    planner.drop("w0", "w1", request_id="d2")
    planner.go_through("w0", "w1")
    planner.tell(p.RestoreRequested(planner.now_s, "c", "r1"))
    planner.answer(Phase.PREPARED, "w0", "w1")
    planner.answer(Phase.EXCHANGING, "w0")
    planner.wait(31.0)
    assert planner.journal[-1] is Stage.EXCHANGING
    planner.answer(Phase.DONE, "w0")
    assert planner.shape == ["w0[0:4]"]


def test_a_standby_follows_a_transition_that_is_committed_after_all() -> None:
    planner, standby = Planner(), Planner().core.conductor
    planner.start("w0", "w1")
    planner.drop("w0", "w1")
    assert planner.stored is not None
    assert planner.stored.journal is not None
    for stage in (Stage.PREPARING, Stage.ABORTING, Stage.COMMITTING):
        standby.observe(replace(planner.stored.journal, stage=stage))
        assert standby.newest is not None
        assert standby.newest.stage is stage
