"""Stories of the planner's core: events in, commands out."""

from dataclasses import replace

import pytest

from ballast.common.ids import Epoch, Incarnation, WorkerId
from ballast.common.layout import Layout
from ballast.common.model import Adapter, ModelInfo
from services.planner.core import messages as p
from services.planner.core.machine import NO_LAYOUT, PlannerCore, PlannerRules
from tests.support.reporting_worker import model_info

TOKEN = 1_700_000_000_000
MODEL = model_info(4)


class Planner:
    """A core that is checked after each event, with a clock. `tell` returns the commands without timers."""

    def __init__(self) -> None:
        self.core = PlannerCore(PlannerRules(coalesce_s=0.1, verify_interval_s=100.0, retry_s=0.5, max_drains=2))
        self.now_s = 0.0
        self.timer_s: float | None = None

    def tell(self, event: p.Event) -> list[p.Command]:
        commands = self.core.handle(event)
        self.core.check()
        for command in commands:
            if isinstance(command, p.SetTimer):
                self.timer_s = command.at_s
        return [command for command in commands if not isinstance(command, p.SetTimer)]

    def lead(self, stored: p.StoredLayout | None = None, token: int = TOKEN) -> list[p.Command]:
        commands = self.tell(p.LeadershipChanged(self.now_s, "c", token))
        return commands + self.tell(p.LayoutLoaded(self.now_s, "c", stored))

    def up(
        self, worker: str, incarnation: int = 1, model: ModelInfo = MODEL, *, draining: bool = False
    ) -> list[p.Command]:
        event = p.InstanceUp(
            self.now_s, "c", WorkerId(worker), Incarnation(incarnation), f"{worker}:1", model, draining
        )
        return self.tell(event)

    def lose(self, worker: str, incarnation: int = 1, why: str = "silent", *, silent: bool = False) -> list[p.Command]:
        return self.tell(p.InstanceLost(self.now_s, "c", WorkerId(worker), Incarnation(incarnation), why, silent))

    def probed(self, worker: str, found: p.Probed, incarnation: int = 1) -> list[p.Command]:
        return self.tell(p.InstanceProbed(self.now_s, "c", WorkerId(worker), Incarnation(incarnation), found))

    def fire(self) -> list[p.Command]:
        """Advance the clock to the timer and fire it."""
        assert self.timer_s is not None, "no timer is set"
        self.now_s = max(self.now_s, self.timer_s)
        self.timer_s = None
        return self.tell(p.TimerFired(self.now_s, "c"))

    def settle(self, write: p.Command, outcome: p.WriteOutcome = p.WriteOutcome.WRITTEN) -> list[p.Command]:
        assert isinstance(write, p.WriteLayout)
        return self.tell(p.WriteSettled(self.now_s, "c", write, outcome))

    def settle_all(self) -> Layout:
        """Confirm writes until nothing is left to write; return the layout."""
        while self.core.in_flight is not None or (self.timer_s is not None and self.timer_s < self.now_s + 1.0):
            for command in self.fire() if self.core.in_flight is None else []:
                assert isinstance(command, p.WriteLayout)
            if self.core.store.writing is not None:
                self.tell(p.WriteSettled(self.now_s, "c", self.core.store.writing, p.WriteOutcome.WRITTEN))
        return self.core.layout


def leader(*workers: str) -> Planner:
    """A leader that has received the whole snapshot and whose layout holds these workers."""
    planner = Planner()
    planner.lead()
    planner.tell(p.SnapshotBegan(0.0, "c"))
    for worker in workers:
        planner.up(worker)
    planner.tell(p.SnapshotEnded(0.0, "c"))
    planner.settle_all()
    assert names(planner.core.layout) == set(workers)
    return planner


def names(layout: Layout) -> set[str]:
    return {member.worker_id for group in layout.groups for member in group.members}


def test_no_layout_is_written_before_an_instance_joins() -> None:
    planner = Planner()
    assert planner.tell(p.LeadershipChanged(0.0, "c", TOKEN)) == [p.FollowMonitor(), p.LoadLayout()]
    assert planner.tell(p.LayoutLoaded(0.0, "c", None)) == []
    assert planner.core.layout is NO_LAYOUT


def test_simultaneous_joins_share_an_epoch() -> None:
    planner = Planner()
    planner.lead()
    for worker in ("w2", "w1", "w3"):
        assert planner.up(worker) == []
    (write,) = planner.fire()
    assert planner.now_s == pytest.approx(0.1)
    assert isinstance(write, p.WriteLayout)
    assert (write.layout.epoch, write.expected_epoch, write.token) == (1, None, TOKEN)
    assert [group.group_id for group in write.layout.groups] == ["w1", "w2", "w3"]
    assert write.layout.reason == "join: w1 w2 w3"
    assert planner.settle(write) == [p.Publish(write.layout, "c")]


def test_a_loss_is_planned_at_once_and_says_why() -> None:
    planner = leader("w1", "w2")
    (write,) = planner.lose("w2", why="silent for 3.1 s")
    assert isinstance(write, p.WriteLayout)
    assert write.layout.reason == "lost: w2 (silent for 3.1 s)"
    assert (write.layout.epoch, write.expected_epoch) == (2, 1)


def test_changes_during_a_write_go_into_the_next_layout() -> None:
    planner = leader("w1", "w2", "w3")
    (write,) = planner.lose("w1")
    assert planner.lose("w2") == []
    published, second = planner.settle(write)
    assert isinstance(published, p.Publish)
    assert isinstance(second, p.WriteLayout)
    assert names(second.layout) == {"w3"}
    assert second.layout.epoch == published.layout.epoch + 1


def test_a_restarted_worker_is_a_new_member_and_its_old_incarnation_is_ignored() -> None:
    planner = leader("w1")
    planner.up("w1", incarnation=3)
    assert planner.up("w1", incarnation=2) == [p.IgnoreStale(WorkerId("w1"), Incarnation(2), Incarnation(3), "c")]
    assert planner.lose("w1", incarnation=1) == []
    layout = planner.settle_all()
    assert [member.incarnation for group in layout.groups for member in group.members] == [3]
    assert layout.reason == "restart: w1"


def test_a_write_without_an_answer_is_read_back_and_its_epoch_is_not_used_again() -> None:
    planner = leader("w1", "w2")
    before = planner.core.layout
    (write,) = planner.lose("w2")
    assert planner.settle(write, p.WriteOutcome.UNAVAILABLE) == []
    assert planner.fire() == [p.LoadLayout()]
    assert planner.tell(p.LoadFailed(planner.now_s, "c")) == []
    assert planner.fire() == [p.LoadLayout()]
    (again,) = planner.tell(p.LayoutLoaded(planner.now_s, "c", p.StoredLayout(before, MODEL)))
    assert isinstance(again, p.WriteLayout)
    assert (again.layout.epoch, again.expected_epoch) == (3, 1)


def test_a_successful_write_whose_answer_was_lost_is_adopted() -> None:
    planner = leader("w1", "w2")
    (write,) = planner.lose("w2")
    assert isinstance(write, p.WriteLayout)
    planner.settle(write, p.WriteOutcome.UNAVAILABLE)
    planner.fire()
    assert planner.tell(p.LayoutLoaded(planner.now_s, "c", p.StoredLayout(write.layout, MODEL))) == [
        p.Publish(write.layout, "c")
    ]
    assert planner.core.layout == write.layout


def test_after_a_conflict_the_stored_layout_is_the_base_of_the_next_plan() -> None:
    planner = leader("w1", "w2")
    (write,) = planner.lose("w2")
    assert planner.settle(write, p.WriteOutcome.CONFLICT) == [p.LoadLayout()]
    other = Layout(Epoch(9), 4, planner.core.layout.groups, "operator")
    published, again = planner.tell(p.LayoutLoaded(planner.now_s, "c", p.StoredLayout(other, MODEL)))
    assert published == p.Publish(other, "c")
    assert isinstance(again, p.WriteLayout)
    assert (again.layout.epoch, again.expected_epoch) == (10, 9)


def test_a_deposed_planner_stops_planning_and_ignores_late_answers() -> None:
    planner = leader("w1", "w2")
    before = planner.core.layout
    (write,) = planner.lose("w2")
    commands = planner.tell(p.LeadershipChanged(planner.now_s, "c", None))
    assert p.LeaveMonitor() in commands
    assert planner.settle(write) == []
    assert planner.core.layout == before
    assert planner.up("w5") == []


def test_a_standby_follows_the_written_layouts() -> None:
    planner = Planner()
    stored = leader("w1").core.layout
    planner.tell(p.LeadershipChanged(0.0, "c", None))
    assert planner.tell(p.LayoutLoaded(0.0, "c", p.StoredLayout(stored, MODEL))) == [p.Publish(stored, "c")]


def test_a_new_leader_leaves_the_layout_unchanged_until_the_snapshot_is_complete() -> None:
    stored = p.StoredLayout(leader("w1", "w2").core.layout, MODEL)
    planner = Planner()
    planner.lead(stored)
    planner.tell(p.SnapshotBegan(0.0, "c"))
    planner.up("w1")
    assert planner.core.layout == stored.layout
    assert planner.tell(p.SnapshotEnded(0.0, "c")) == [p.ProbeInstance(WorkerId("w2"), Incarnation(1), "w2:1", "c")]
    (write,) = planner.probed("w2", p.Probed.GONE)
    assert isinstance(write, p.WriteLayout)
    assert names(write.layout) == {"w1"}
    assert write.layout.reason == "lost: w2 (the monitor does not know it; nobody listens at its address)"


def test_a_loss_reported_before_the_layout_is_read_counts() -> None:
    stored = p.StoredLayout(leader("w1", "w2").core.layout, MODEL)
    planner = Planner()
    planner.tell(p.LeadershipChanged(0.0, "c", TOKEN))
    planner.tell(p.SnapshotBegan(0.0, "c"))
    planner.up("w1")
    planner.up("w2")
    planner.lose("w2")
    commands = planner.tell(p.LayoutLoaded(0.0, "c", stored))
    write = commands[-1]
    assert isinstance(write, p.WriteLayout)
    assert names(write.layout) == {"w1"}


def test_a_planner_that_leads_again_presumes_the_former_members() -> None:
    planner = leader("w1", "w2")
    stored = p.StoredLayout(planner.core.layout, MODEL)
    planner.tell(p.LeadershipChanged(1.0, "c", None))
    planner.tell(p.LayoutLoaded(1.0, "c", stored))
    planner.now_s = 2.0
    assert not [c for c in planner.lead(stored, TOKEN + 9000) if isinstance(c, p.WriteLayout)]
    assert set(planner.core.membership.known) == {"w1", "w2"}


def test_a_broken_stream_to_the_monitor_says_nothing_about_instances() -> None:
    planner = leader("w1", "w2")
    before = planner.core.layout
    planner.tell(p.SnapshotBegan(1.0, "c"))
    planner.up("w1")
    planner.up("w2")
    assert planner.tell(p.SnapshotEnded(1.0, "c")) == []
    assert planner.settle_all() == before


def test_a_lost_layout_is_written_again_by_the_leader_under_the_next_epoch() -> None:
    planner = leader("w1")
    before = planner.core.layout
    planner.tell(p.LeadershipChanged(1.0, "c", TOKEN + 1))
    planner.now_s = 1.0
    commands = planner.tell(p.LayoutLoaded(1.0, "c", None))
    write = commands[-1]
    assert isinstance(write, p.WriteLayout)
    assert (write.layout.epoch, write.expected_epoch) == (before.epoch + 1, None)
    assert write.layout.groups == before.groups


def test_a_new_leader_without_a_layout_waits_for_the_monitor_and_exceeds_all_epochs() -> None:
    planner = Planner()
    planner.tell(p.LeadershipChanged(0.0, "c", None))
    planner.tell(p.LayoutLoaded(0.0, "c", p.StoredLayout(leader("w1", "w2").core.layout, MODEL)))
    assert not [c for c in planner.lead(None) if isinstance(c, p.WriteLayout)]
    planner.tell(p.SnapshotBegan(0.0, "c"))
    planner.up("w1")
    probe, write = planner.tell(p.SnapshotEnded(0.0, "c"))
    assert isinstance(probe, p.ProbeInstance)
    assert isinstance(write, p.WriteLayout)
    assert write.layout.epoch == TOKEN // 1000
    assert names(write.layout) == {"w1", "w2"}


def test_an_instance_with_another_model_stays_outside_until_it_is_the_only_one() -> None:
    planner = leader("w1")
    other = model_info(6)
    commands = planner.up("w2", model=other)
    assert commands == [p.RejectInstance(WorkerId("w2"), Incarnation(1), "layer_count is 6, the cluster has 4", "c")]
    assert planner.up("w2", model=other) == [], "reported once"
    assert planner.core.kept_out.why(0.0) == {
        WorkerId("w2"): "it serves another model: layer_count is 6, the cluster has 4"
    }
    assert names(planner.settle_all()) == {"w1"}
    planner.lose("w1")
    layout = planner.settle_all()
    assert names(layout) == {"w2"}
    assert layout.layer_count == 6


@pytest.mark.parametrize(
    "own",
    [
        replace(MODEL, layer_parameter_bytes=(999,) * 4, other_parameter_bytes=77),
        replace(MODEL, extent_bytes=4096),
        replace(MODEL, revision="abc"),
    ],
)
def test_another_memory_or_a_worker_of_another_version_serves_the_same_model(own: ModelInfo) -> None:
    planner = leader("w1")
    assert not [c for c in planner.up("w2", model=own) if isinstance(c, p.RejectInstance)]
    assert names(planner.settle_all()) == {"w1", "w2"}
    assert planner.core.membership.model == (own if own.revision else MODEL), (
        "a model reported with a revision takes precedence"
    )


def test_another_checkpoint_of_the_same_shape_is_another_model() -> None:
    planner = Planner()
    planner.lead()
    planner.up("w1", model=replace(MODEL, revision="abc"))
    [refused] = [c for c in planner.up("w2", model=replace(MODEL, revision="def")) if isinstance(c, p.RejectInstance)]
    assert refused.why == "revision is def, the cluster has abc"


def test_kv_in_another_format_is_that_of_another_model() -> None:
    narrow = replace(MODEL, kv_cache_dtype="fp8_e4m3")
    [refused] = [c for c in leader("w1").up("w2", model=narrow) if isinstance(c, p.RejectInstance)]
    assert refused.why == "kv_cache_dtype is fp8_e4m3, the cluster has none"


def test_other_adapters_are_those_of_another_model() -> None:
    adapted = replace(MODEL, adapters=(Adapter("poet", "1"),))
    [refused] = [c for c in leader("w1").up("w2", model=adapted) if isinstance(c, p.RejectInstance)]
    assert refused.why.startswith("adapters is (Adapter(name='poet'")


def test_a_layout_stored_by_an_older_version_remains_in_force() -> None:
    stored = p.StoredLayout(
        leader("w1", "w2").core.layout, replace(MODEL, extent_bytes=4096, other_parameter_bytes=4096)
    )
    planner = Planner()
    planner.lead(stored)
    for worker in ("w1", "w2"):
        commands = planner.up(worker, model=replace(MODEL, revision="abc"))
        assert not [c for c in commands if isinstance(c, (p.RejectInstance, p.WriteLayout))]
    assert planner.core.membership.model == replace(MODEL, revision="abc")
    assert planner.core.layout == stored.layout


def test_a_drain_takes_the_worker_out_of_routing_and_notifies_it() -> None:
    planner = leader("w1", "w2")
    ask, write = planner.tell(p.WorkerDrainRequested(planner.now_s, "c", "d1", WorkerId("w1")))
    assert ask == p.AskWorkerToDrain(WorkerId("w1"), Incarnation(1), "w1:1", "c")
    assert isinstance(write, p.WriteLayout)
    assert write.layout.reason == "drain: w1"
    assert planner.settle(write) == [p.Publish(write.layout, "c"), p.AnswerDrain("d1", Epoch(2))]
    assert planner.tell(p.WorkerDrainRequested(planner.now_s, "c", "d1", WorkerId("w1"))) == [
        p.AnswerDrain("d1", Epoch(2))
    ]


def test_drains_that_are_refused() -> None:
    planner = leader("w1", "w2", "w3")

    def drain(request_id: str, worker: str) -> list[p.Command]:
        return planner.tell(p.WorkerDrainRequested(planner.now_s, "c", request_id, WorkerId(worker)))

    assert drain("d1", "w9") == [p.RefuseDrain("d1", p.DrainRefusal.NO_SUCH_WORKER)]
    drain("d1", "w1")
    assert drain("d1", "w2") == [p.RefuseDrain("d1", p.DrainRefusal.ID_REUSED)]
    drain("d2", "w2")
    assert drain("d3", "w3") == [p.RefuseDrain("d3", p.DrainRefusal.FULL)]
    commands = planner.tell(p.LeadershipChanged(planner.now_s, "c", None))
    assert p.RefuseDrain("d1", p.DrainRefusal.STANDBY) in commands
    assert drain("d1", "w1") == [p.RefuseDrain("d1", p.DrainRefusal.STANDBY)]


def test_a_drain_right_after_taking_over_is_deferred_not_refused() -> None:
    planner = Planner()
    planner.lead()
    assert planner.tell(p.WorkerDrainRequested(0.0, "c", "d1", WorkerId("w1"))) == [
        p.RefuseDrain("d1", p.DrainRefusal.NOT_READY)
    ]


def test_a_drain_survives_the_planner_and_the_worker_is_asked_again() -> None:
    before = leader("w1", "w2")
    before.tell(p.WorkerDrainRequested(before.now_s, "c", "d1", WorkerId("w1")))
    stored = p.StoredLayout(before.settle_all(), MODEL)
    planner = Planner()
    planner.lead(stored)
    planner.tell(p.SnapshotBegan(0.0, "c"))
    assert planner.up("w1") == [p.AskWorkerToDrain(WorkerId("w1"), Incarnation(1), "w1:1", "c")]
    planner.up("w2")
    assert planner.tell(p.SnapshotEnded(0.0, "c")) == []
    assert planner.settle_all() == stored.layout


def test_a_drain_survives_an_apparent_loss_of_its_worker() -> None:
    planner = leader("w1", "w2")
    planner.tell(p.WorkerDrainRequested(planner.now_s, "c", "d1", WorkerId("w1")))
    planner.settle_all()
    planner.lose("w1")
    planner.settle_all()
    assert p.AskWorkerToDrain(WorkerId("w1"), Incarnation(1), "w1:1", "c") in planner.up("w1")
    assert [m.draining for g in planner.settle_all().groups for m in g.members if m.worker_id == "w1"] == [True]


def test_a_worker_that_drains_by_itself_is_marked_and_a_new_incarnation_serves_again() -> None:
    planner = leader("w1")
    (write,) = planner.tell(p.InstanceDraining(planner.now_s, "c", WorkerId("w1"), Incarnation(1)))
    planner.settle(write)
    assert planner.core.layout.groups[0].leader.draining
    planner.up("w1", incarnation=2)
    assert not planner.settle_all().groups[0].leader.draining


def test_a_fenced_write_is_not_repeated_with_the_same_token_at_once() -> None:
    planner = leader("w1", "w2")
    (write,) = planner.lose("w2")
    assert planner.settle(write, p.WriteOutcome.FENCED) == []
    before = p.StoredLayout(planner.core.layout, MODEL)
    planner.tell(p.LeadershipChanged(planner.now_s, "c", TOKEN + 1))
    commands = planner.tell(p.LayoutLoaded(planner.now_s, "c", before))
    write = commands[-1]
    assert isinstance(write, p.WriteLayout)
    assert write.token == TOKEN + 1
