"""The core's view of memory: which reports count, how large the un-dropped capacity is, and what dispatchers' backlogs
add.
"""

import dataclasses

import pytest

from ballast.common.ids import DispatcherId, Epoch, GroupId, Incarnation, WorkerId
from ballast.common.layout import Group, Layout, Member
from ballast.common.load import LoadReport, MemoryReport
from ballast.common.traffic import Traffic
from services.monitor.core import messages as m
from services.monitor.core.machine import LEAST_LOOK_S, MonitorCore, MonitorRules
from services.monitor.policy.pressure import Overload, Relief
from tests.support.pressure import RULES, W0, W1
from tests.support.reporting_worker import load_report, model_info

BLOCK_BYTES = 16 * 1024
D = DispatcherId("d")


class Cluster:
    """Two workers and a core that has warmed up; `pass_time` reports and ticks five times a second."""

    def __init__(self, layout: Layout | None, *, w0: LoadReport, w1: LoadReport, warmup_s: float = 0.5) -> None:
        rules = MonitorRules(
            lease_s=3.0,
            warmup_s=warmup_s,
            registry_interval_s=1000.0,
            max_instances=10,
            history_length=20,
            pressure=RULES,
            backlog_forget_s=10.0,
        )
        self.core = MonitorCore(rules)
        self.now_s = 0.0
        self.layout = layout
        self.loads = {"w0": w0, "w1": w1}
        self.backlogs: tuple[m.BacklogWord, ...] = ()
        self.is_state_server_up = True
        self.tell(m.LeadershipChanged(0.0, "c", 7))
        for stream_id, name in enumerate(self.loads, start=1):
            instance = m.Instance(WorkerId(name), Incarnation(1), f"{name}:1", model_info())
            self.tell(m.Announced(0.0, "c", stream_id, instance))

    def tell(self, event: m.Event) -> list[m.Command]:
        commands = self.core.handle(event)
        self.core.check()
        return commands

    def pass_time(self, for_s: float) -> list[m.Raised]:
        commands: list[m.Command] = []
        for _ in range(round(for_s / 0.2)):
            self.now_s += 0.2
            for stream_id, load in enumerate(self.loads.values(), start=1):
                self.tell(m.LoadReported(self.now_s, "c", stream_id, load))
            if self.is_state_server_up:
                commands += self.tell(m.SurroundingsRead(self.now_s, "c", self.layout, self.backlogs))
            commands += self.tell(m.Ticked(self.now_s, "c"))
        self.last = commands
        return [c.change for c in commands if isinstance(c, m.Publish) and isinstance(c.change, m.Raised)]


def load(
    used: int,
    *,
    blocks: int = 100,
    waiting: int = 0,
    generated: int = 0,
    parameter_bytes: int = 40,
    draining: bool = False,
) -> LoadReport:
    memory = MemoryReport(
        budget_bytes=100, parameter_bytes=parameter_bytes, kv_bytes=100 - parameter_bytes, free_bytes=0
    )
    report = load_report(used, draining=draining)
    return dataclasses.replace(
        report, block_count=blocks, waiting_block_count=waiting, generation_tokens_total=generated, memory=memory
    )


def member(worker_id: WorkerId, first: int, last: int, *, draining: bool = False) -> Member:
    return Member(worker_id, Incarnation(1), f"{worker_id}:1", first, last, draining)


def layout(epoch: int, *groups: tuple[Member, ...]) -> Layout:
    found = tuple(Group(GroupId(f"g{i}"), members) for i, members in enumerate(groups))
    result = Layout(Epoch(epoch), 4, found, "test")
    result.check()
    return result


ALONE = layout(1, (member(W0, 0, 4),), (member(W1, 0, 4),))
MERGED = layout(2, (member(W0, 0, 2), member(W1, 2, 4)))


def test_demand_is_that_of_running_and_waiting_requests_of_all_groups() -> None:
    cluster = Cluster(ALONE, w0=load(30, waiting=20), w1=load(10))
    cluster.pass_time(1.0)
    demand = cluster.core.cluster_demand(cluster.now_s)
    assert demand.wanted_bytes == 60 * BLOCK_BYTES
    assert demand.used_bytes == 40 * BLOCK_BYTES
    assert demand.capacity_bytes == demand.undropped_bytes == 200 * BLOCK_BYTES
    assert demand.complete


def test_only_the_leader_of_a_pipeline_counts() -> None:
    cluster = Cluster(MERGED, w0=load(90, blocks=400), w1=load(77, blocks=500, waiting=5))
    cluster.pass_time(1.0)
    demand = cluster.core.cluster_demand(cluster.now_s)
    assert (demand.used_bytes, demand.capacity_bytes) == (90 * BLOCK_BYTES, 400 * BLOCK_BYTES)
    groups = cluster.core.group_demands(cluster.now_s)
    assert [(g.leader_id, g.used_bytes, g.capacity_bytes) for g in groups] == [
        (W0, 90 * BLOCK_BYTES, 400 * BLOCK_BYTES)
    ]


def test_spare_blocks_of_a_dissolving_pipeline_do_not_count_as_demand() -> None:
    """The members cannot use these spare blocks yet, but no request needs them, and they become free when the pipeline
    ends.
    """
    keeping = dataclasses.replace(load(100), spare_block_count=130)  # spare blocks of the pipeline; some are w1's
    cluster = Cluster(ALONE, w0=keeping, w1=load(90))
    assert cluster.pass_time(4.0) == []
    demand = cluster.core.cluster_demand(cluster.now_s)
    assert demand.wanted_bytes == demand.engaged_bytes == demand.used_bytes == 60 * BLOCK_BYTES
    assert demand.capacity_bytes == 200 * BLOCK_BYTES


def test_a_drop_enlarges_the_capacity_and_not_the_undropped_one() -> None:
    cluster = Cluster(ALONE, w0=load(30), w1=load(30))
    cluster.pass_time(1.0)
    cluster.layout = MERGED
    cluster.loads = {"w0": load(60, blocks=350, parameter_bytes=20), "w1": load(60, blocks=350, parameter_bytes=20)}
    cluster.pass_time(1.0)
    demand = cluster.core.cluster_demand(cluster.now_s)
    assert (demand.capacity_bytes, demand.undropped_bytes) == (350 * BLOCK_BYTES, 200 * BLOCK_BYTES)


def test_a_new_monitor_during_a_drop_inherits_the_undropped_capacity() -> None:
    dropped = load(60, blocks=350, parameter_bytes=20)
    whole = m.WholeMemory(parameter_bytes=40, kv_bytes=100 * BLOCK_BYTES)
    lives = ((W0, Incarnation(1)), (W1, Incarnation(1)))
    cluster = Cluster(MERGED, w0=dropped, w1=dropped)
    cluster.pass_time(1.0)
    cluster.tell(m.RegistryLoaded(1.0, "c", lives, tuple((*life, whole) for life in lives)))
    cluster.pass_time(1.0)
    assert cluster.core.cluster_demand(cluster.now_s).undropped_bytes == 200 * BLOCK_BYTES
    early = MonitorCore(cluster.core.rules)
    early.handle(m.LeadershipChanged(0.0, "c", 8))
    early.handle(m.RegistryLoaded(0.1, "c", lives, tuple((*life, whole) for life in lives)))
    early.handle(m.Announced(0.2, "c", 1, m.Instance(W0, Incarnation(1), "w0:1", model_info())))
    assert early.entries[W0].whole == whole
    early.handle(m.Announced(0.3, "c", 2, m.Instance(W1, Incarnation(2), "w1:1", model_info())))
    assert early.entries[W1].whole is None, "a new incarnation may have another budget"


def test_workers_outside_the_layout_or_draining_do_not_count() -> None:
    only_w0 = layout(3, (member(W0, 0, 4),))
    cluster = Cluster(only_w0, w0=load(30), w1=load(99))
    cluster.pass_time(1.0)
    assert cluster.core.cluster_demand(cluster.now_s).capacity_bytes == 100 * BLOCK_BYTES
    draining = Cluster(ALONE, w0=load(30), w1=load(99, draining=True))
    draining.pass_time(1.0)
    assert draining.core.cluster_demand(draining.now_s).used_bytes == 30 * BLOCK_BYTES
    in_layout = Cluster(layout(4, (member(W0, 0, 4),), (member(W1, 0, 4, draining=True),)), w0=load(30), w1=load(99))
    in_layout.pass_time(1.0)
    assert in_layout.core.cluster_demand(in_layout.now_s).used_bytes == 30 * BLOCK_BYTES


def test_backlogs_are_demand_while_their_dispatcher_lives() -> None:
    cluster = Cluster(ALONE, w0=load(50), w1=load(50))
    cluster.backlogs = (
        m.BacklogWord(D, "1.1", Traffic(queued_count=10, queued_tokens=1600)),
        m.BacklogWord(DispatcherId("e"), "1.1", Traffic(queued_count=1, queued_tokens=7)),
    )
    cluster.pass_time(0.4)
    expected = 1600 + 10 * 9 + 7 + 9
    assert cluster.core.cluster_demand(cluster.now_s).wanted_bytes == 100 * BLOCK_BYTES + expected * 1024
    assert cluster.core.traffic(cluster.now_s)[1] is None, "all dispatchers report"
    cluster.pass_time(1.4)
    assert cluster.core.cluster_demand(cluster.now_s).wanted_bytes == 100 * BLOCK_BYTES, "the reports are stale"
    traffic, fresh = cluster.core.traffic(cluster.now_s)
    assert (traffic.queued_count, fresh) == (11, Traffic()), "the last reported traffic remains in use"
    cluster.backlogs = (m.BacklogWord(D, "1.9", Traffic(queued_count=10, queued_tokens=1600)),)
    cluster.pass_time(0.2)
    assert cluster.core.cluster_demand(cluster.now_s).wanted_bytes == 100 * BLOCK_BYTES + 1690 * 1024
    assert not any(isinstance(c, m.ForgetBacklogs) for c in cluster.last)
    cluster.pass_time(12.0)
    assert m.ForgetBacklogs((D,)) in cluster.last
    assert cluster.core.traffic(cluster.now_s) == (Traffic(), None)


def test_a_backlog_that_fits_nowhere_is_an_overload_with_its_cause_and_groups() -> None:
    cluster = Cluster(ALONE, w0=load(90), w1=load(85))
    assert cluster.pass_time(4.0) == []
    cluster.backlogs = (m.BacklogWord(D, "1.1", Traffic(queued_count=40, queued_tokens=4000)),)
    raised = cluster.pass_time(0.2)
    assert len(raised) == 1
    signal = raised[0].signal
    assert isinstance(signal, Overload)
    forecast = 175 * BLOCK_BYTES + (4000 + 40 * 9) * 1024
    assert signal.required_bytes >= forecast - 200 * BLOCK_BYTES > 0
    assert [g.leader_id for g in raised[0].groups] == [W0, W1]
    assert all(c.cause_id == "c" for c in cluster.last if isinstance(c, m.Publish))


def test_no_alarm_before_the_monitor_has_warmed_up_and_none_without_a_layout() -> None:
    cluster = Cluster(ALONE, w0=load(99), w1=load(99))
    assert cluster.pass_time(RULES.dwell_s - 0.2) == []
    assert [type(r.signal) for r in cluster.pass_time(0.4)] == [Overload]
    slow = Cluster(ALONE, warmup_s=RULES.dwell_s + 2.0, w0=load(99), w1=load(99))
    assert slow.pass_time(RULES.dwell_s + 1.8) == []
    assert [type(r.signal) for r in slow.pass_time(0.4)] == [Overload]
    nobody_serves = Cluster(None, w0=load(99), w1=load(99))
    assert nobody_serves.pass_time(10.0) == []


def test_relief_needs_the_state_server_because_backlogs_are_read_there() -> None:
    cluster = Cluster(ALONE, w0=load(20), w1=load(20))
    cluster.pass_time(1.0)
    cluster.layout = MERGED
    cluster.loads = {"w0": load(20, blocks=350, parameter_bytes=20), "w1": load(20, blocks=350, parameter_bytes=20)}
    cluster.pass_time(0.2)
    cluster.is_state_server_up = False
    assert cluster.pass_time(20.0) == []
    cluster.is_state_server_up = True
    raised = cluster.pass_time(RULES.relief_after_s + 0.4)
    assert [r.signal for r in raised] == [Relief(20 * BLOCK_BYTES, 200 * BLOCK_BYTES)]


def test_a_lost_layout_stays_in_force() -> None:
    cluster = Cluster(MERGED, w0=load(20, blocks=350), w1=load(20))
    cluster.pass_time(1.0)
    cluster.layout = None
    cluster.pass_time(1.0)
    assert cluster.core.cluster_demand(cluster.now_s).merged == ((W0, W1),)


def test_growth_of_a_group_is_its_retained_output_since_it_was_formed() -> None:
    def first_group(used_per_report: int, generated_per_report: int) -> tuple[int, float]:
        cluster = Cluster(ALONE, w0=load(10), w1=load(10))
        for i in range(15):
            cluster.loads["w0"] = load(10 + used_per_report * i, generated=generated_per_report * i)
            cluster.pass_time(0.2)
        group = cluster.core.group_demands(cluster.now_s)[0]
        cluster.layout = MERGED
        cluster.pass_time(0.2)
        assert cluster.core.group_demands(cluster.now_s)[0].demand_growth_bytes_per_s == 0.0
        return group.demand_bytes - group.used_bytes, group.demand_growth_bytes_per_s

    tokens_per_s = 5 * 10
    growth_bytes, growth_per_s = first_group(2, 10)
    assert growth_bytes == pytest.approx(tokens_per_s * 1024, abs=2), "the rest was admitted, not generated"
    assert growth_per_s == pytest.approx(10 * BLOCK_BYTES)
    assert first_group(0, 1000)[0] == 0, "requests end as fast as tokens are generated"
    assert first_group(2, 1000)[0] == pytest.approx(10 * BLOCK_BYTES, abs=2)


def test_a_deposed_monitor_forgets_the_memory_reports() -> None:
    cluster = Cluster(ALONE, w0=load(99), w1=load(99))
    cluster.pass_time(5.0)
    cluster.tell(m.LeadershipChanged(cluster.now_s, "c", None))
    cluster.tell(m.SurroundingsRead(cluster.now_s, "c", ALONE, ()))
    assert cluster.core.groups.layout is None
    cluster.tell(m.LeadershipChanged(cluster.now_s + 1.0, "c", 9))
    assert not cluster.core.pressure.history


def test_a_jump_of_the_demand_is_evaluated_before_the_next_tick() -> None:
    cluster = Cluster(ALONE, w0=load(30), w1=load(30))
    assert cluster.pass_time(4.0) == []
    history = cluster.core.pressure.history
    looks = len(history)
    jump_at_s = cluster.now_s + 2 * LEAST_LOOK_S
    cluster.tell(m.LoadReported(jump_at_s, "c", 2, load(33)))
    assert len(history) == looks  # a small change waits for the next tick
    commands = cluster.tell(m.LoadReported(jump_at_s, "c", 1, load(50, waiting=250)))
    raised = [c.change for c in commands if isinstance(c, m.Publish) and isinstance(c.change, m.Raised)]
    assert [type(change.signal) for change in raised] == [Overload]
    looks = len(history)
    cluster.tell(m.LoadReported(jump_at_s + LEAST_LOOK_S / 2, "c", 1, load(50, waiting=400)))
    assert len(history) == looks  # evaluations over thousands of instances are costly, hence a minimum interval


def test_a_growing_backlog_is_evaluated_before_the_next_tick() -> None:
    cluster = Cluster(ALONE, w0=load(90), w1=load(85))
    assert cluster.pass_time(4.0) == []
    known_s = cluster.now_s + 2 * LEAST_LOOK_S
    waits = (m.BacklogWord(D, "1.1", Traffic(queued_count=40, queued_tokens=4000)),)
    commands = cluster.tell(m.SurroundingsRead(known_s, "c", ALONE, waits))
    assert [type(c.change) for c in commands if isinstance(c, m.Publish)] == [m.Raised]
    assert cluster.tell(m.SurroundingsRead(known_s + 2 * LEAST_LOOK_S, "c", ALONE, waits)) == []


def test_a_monitor_without_all_reports_ignores_jumps() -> None:
    cluster = Cluster(ALONE, w0=load(30), w1=load(30), warmup_s=100.0)
    cluster.pass_time(1.0)
    assert cluster.tell(m.LoadReported(cluster.now_s + 0.1, "c", 1, load(50, waiting=250))) == []
    assert not cluster.core.pressure.history
