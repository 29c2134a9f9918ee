"""Stories of the monitor's core: events in, commands out."""

import dataclasses

import pytest

from ballast.common.cost import CostModel
from ballast.common.ids import Epoch, GroupId, Incarnation, WorkerId
from ballast.common.layout import Group, Member, Place
from ballast.common.traffic import Pace
from ballast.rpc.border import MAX_GROUPS
from services.monitor.core import messages as m
from services.monitor.core.machine import MonitorCore, MonitorRules
from tests.support.pressure import RULES
from tests.support.reporting_worker import load_report, model_info

W1 = WorkerId("w1")


class Monitor:
    """A core whose invariants are checked after each event; `tell` returns the commands."""

    def __init__(self, *, active: bool = True, max_instances: int = 10) -> None:
        rules = MonitorRules(
            lease_s=3.0,
            warmup_s=4.0,
            max_instances=max_instances,
            history_length=5,
            pressure=RULES,
        )
        self.core = MonitorCore(rules)
        if active:
            assert self.tell(m.LeadershipChanged(0.0, "c", 7)) == [m.LoadRegistry()]

    def tell(self, event: m.Event) -> list[m.Command]:
        commands = self.core.handle(event)
        self.core.check()
        return commands

    def announce(self, at_s: float, stream_id: int, worker: str = "w1", incarnation: int = 1) -> list[m.Command]:
        return self.tell(m.Announced(at_s, "c", stream_id, instance(worker, incarnation)))

    def report(
        self, at_s: float, stream_id: int, *, draining: bool = False, step_age_s: float = 0.0
    ) -> list[m.Command]:
        load = dataclasses.replace(load_report(10, draining=draining), step_age_s=step_age_s)
        return self.tell(m.LoadReported(at_s, "c", stream_id, load))

    def tick_until(self, at_s: float, first_s: float = 0.0) -> list[m.Command]:
        """Tick every 0.5 s; return the commands other than writes of the registry."""
        commands: list[m.Command] = []
        for tick in range(int(first_s * 2), int(at_s * 2) + 1):
            commands += self.tell(m.Ticked(tick / 2, "c"))
        return [command for command in commands if not isinstance(command, m.WriteRegistry)]


def instance(worker: str = "w1", incarnation: int = 1) -> m.Instance:
    return m.Instance(WorkerId(worker), Incarnation(incarnation), f"{worker}:1", model_info())


def lost(commands: list[m.Command]) -> list[tuple[str, int]]:
    return [
        (c.change.worker_id, c.change.incarnation)
        for c in commands
        if isinstance(c, m.Publish) and isinstance(c.change, m.InstanceLost)
    ]


def test_an_announced_instance_is_up_and_stays_up_while_it_reports() -> None:
    monitor = Monitor()
    assert monitor.announce(1.0, 1) == [m.Publish(m.InstanceUp(instance(), draining=False), "c")]
    for second in range(2, 20):
        assert monitor.report(second, 1) == []
        assert lost(monitor.tick_until(second, second - 1)) == []
    assert len(monitor.core.entries[W1].history) == 5, "the history is bounded"


def test_the_cost_model_is_that_of_the_median_machine() -> None:
    monitor = Monitor(max_instances=20)
    assert monitor.core.pace() is None
    cost = CostModel(attention_s=1e-9, token_s=1e-5, chunk_s=1e-3, shared_s=5e-4)
    whole = [Pace(cost.scaled(factor), 8, 2048) for factor in (4.0, 1e12, 1.0, 2.0, 1.5)]
    half = [Pace(cost.scaled(3.0), 4, 2048)] * 6
    for i, pace in enumerate([*half, *whole]):
        monitor.announce(1.0, i, f"w{i}")
        monitor.tell(m.LoadReported(1.0, "c", i, load_report(10), pace=pace))
    monitor.announce(1.0, 99, "new")
    assert monitor.core.pace() == whole[3], "an outlier changes nothing, nor do instances with fewer layers"
    found = monitor.core.slowness()
    assert found.pop(WorkerId("w8")) == pytest.approx(0.5)
    assert found.pop(WorkerId("w6")) == pytest.approx(2.0)
    assert found.pop(WorkerId("w10")) == pytest.approx(0.75)
    assert list(found.values()) == pytest.approx([3.0] * 6), "stages are compared by their time per layer"
    assert WorkerId("w7") not in found, "it is an outlier"


def test_silence_for_longer_than_the_lease_is_a_loss_and_the_stream_is_closed() -> None:
    monitor = Monitor()
    monitor.announce(1.0, 1)
    assert lost(monitor.tick_until(4.0)) == []
    commands = monitor.tick_until(4.5, 4.5)
    assert m.CloseStream(1, m.CloseReason.SILENT) in commands
    assert lost(commands) == [("w1", 1)]
    assert monitor.report(5.0, 1) == [], "a late report on the closed stream is ignored"
    assert monitor.announce(5.0, 2) == [m.Publish(m.InstanceUp(instance(), draining=False), "c")], (
        "the instance was only silent"
    )


def test_a_worker_that_signs_off_is_lost_at_once() -> None:
    monitor = Monitor()
    monitor.announce(1.0, 1)
    assert monitor.tell(m.StreamEnded(1.5, "c", 1, announced_exit=True)) == [
        m.Publish(m.InstanceLost(W1, Incarnation(1), "it left"), "c")
    ]


def test_a_broken_stream_is_probed_and_only_a_refused_connection_is_proof() -> None:
    monitor = Monitor()
    monitor.announce(1.0, 1)
    assert monitor.tell(m.StreamEnded(1.5, "c", 1, announced_exit=False)) == [m.ProbeAddress(instance(), "c")]
    assert lost(monitor.tell(m.ConnectionRefused(1.6, "c", W1, Incarnation(1)))) == [("w1", 1)]


def test_a_refused_connection_is_ignored_once_the_worker_is_back() -> None:
    monitor = Monitor()
    monitor.announce(1.0, 1)
    monitor.tell(m.StreamEnded(1.5, "c", 1, announced_exit=False))
    assert monitor.announce(1.6, 2) == [], "the same incarnation on a new stream is not published again"
    assert monitor.tell(m.ConnectionRefused(1.7, "c", W1, Incarnation(1))) == []
    monitor.announce(1.8, 3, incarnation=2)
    assert monitor.tell(m.ConnectionRefused(1.9, "c", W1, Incarnation(1))) == [], "it concerns the previous incarnation"


def test_a_newer_incarnation_replaces_an_older_one() -> None:
    monitor = Monitor()
    monitor.announce(1.0, 1, incarnation=1)
    commands = monitor.announce(2.0, 2, incarnation=2)
    assert commands[0] == m.CloseStream(1, m.CloseReason.SUPERSEDED)
    assert lost(commands) == [("w1", 1)]
    assert commands[-1] == m.Publish(m.InstanceUp(instance(incarnation=2), draining=False), "c")


def test_an_older_incarnation_is_refused_even_after_the_newer_one_is_lost() -> None:
    monitor = Monitor()
    monitor.announce(1.0, 1, incarnation=5)
    assert monitor.announce(1.1, 2, incarnation=4) == [m.CloseStream(2, m.CloseReason.STALE, have=4, want=5)]
    monitor.tell(m.StreamEnded(1.2, "c", 1, announced_exit=True))
    assert monitor.announce(1.3, 3, incarnation=4) == [m.CloseStream(3, m.CloseReason.STALE, have=4, want=5)]


def test_incarnations_recorded_by_the_previous_monitor_refuse_older_ones() -> None:
    monitor = Monitor()
    monitor.announce(0.1, 1, incarnation=4)
    commands = monitor.tell(m.RegistryLoaded(0.2, "c", ((W1, Incarnation(5)),)))
    assert lost(commands) == [("w1", 4)]
    assert monitor.announce(0.3, 2, incarnation=4) == [m.CloseStream(2, m.CloseReason.STALE, have=4, want=5)]


def test_draining_is_published_once_and_is_permanent() -> None:
    monitor = Monitor()
    monitor.announce(1.0, 1)
    assert monitor.report(1.1, 1, draining=True) == [m.Publish(m.InstanceDraining(W1, Incarnation(1)), "c")]
    assert monitor.report(1.2, 1, draining=True) == []
    assert monitor.report(1.3, 1, draining=False) == []
    assert monitor.core.snapshot() == [m.InstanceUp(instance(), draining=True)]


def test_a_new_active_monitor_warms_up_before_its_snapshot_is_complete() -> None:
    monitor = Monitor()
    monitor.announce(1.0, 1)
    assert monitor.core.snapshot() == [m.InstanceUp(instance(), draining=False)]
    assert monitor.tick_until(3.5) == []
    assert monitor.report(3.6, 1) == []
    assert monitor.tick_until(4.0, 4.0) == [m.Publish(m.SnapshotEnd(), "c")]
    assert monitor.core.snapshot()[-1] == m.SnapshotEnd()


def test_a_monitor_that_was_paused_declares_no_worker_lost() -> None:
    monitor = Monitor()
    monitor.announce(1.0, 1)
    monitor.tick_until(2.0)
    assert lost(monitor.tell(m.Ticked(60.0, "c"))) == []
    assert lost(monitor.tell(m.Ticked(61.0, "c"))) == []
    assert lost(monitor.tell(m.Ticked(62.5, "c"))) == [("w1", 1)]


def test_only_the_active_monitor_accepts_streams() -> None:
    standby = Monitor(active=False)
    assert standby.announce(1.0, 1) == [m.CloseStream(1, m.CloseReason.STANDBY)]
    deposed = Monitor()
    deposed.announce(1.0, 1)
    deposed.announce(1.0, 2, worker="w2")
    assert deposed.tell(m.LeadershipChanged(2.0, "c", None)) == [
        m.CloseStream(1, m.CloseReason.STANDBY),
        m.CloseStream(2, m.CloseReason.STANDBY),
        m.DismissWatchers(),
    ]
    assert deposed.core.snapshot() == []


def test_a_new_token_for_the_same_monitor_changes_nothing() -> None:
    monitor = Monitor()
    monitor.announce(1.0, 1)
    assert monitor.tell(m.LeadershipChanged(2.0, "c", 8)) == []
    assert len(monitor.core.entries) == 1


def test_the_number_of_instances_is_bounded() -> None:
    monitor = Monitor(max_instances=1)
    monitor.announce(1.0, 1)
    assert monitor.announce(1.0, 2, worker="w2") == [m.CloseStream(2, m.CloseReason.FULL)]
    assert monitor.announce(1.0, 3, worker="w1", incarnation=2)[-1] == m.Publish(
        m.InstanceUp(instance(incarnation=2), draining=False), "c"
    )


def test_the_registry_is_written_at_intervals_and_forgets_the_lost() -> None:
    monitor = Monitor()
    monitor.announce(0.5, 1)
    assert monitor.tell(m.Ticked(1.0, "c")) == [m.WriteRegistry(())]
    monitor.tell(m.StreamEnded(1.2, "c", 1, announced_exit=True))
    assert monitor.tell(m.Ticked(1.5, "c")) == []
    assert monitor.tell(m.Ticked(2.0, "c")) == [m.WriteRegistry((W1,))]
    assert monitor.tell(m.Ticked(3.0, "c")) == [m.WriteRegistry(())]


def test_a_changed_address_of_the_same_incarnation_is_published() -> None:
    monitor = Monitor()
    monitor.announce(1.0, 1)
    moved = dataclasses.replace(instance(), address="elsewhere:1")
    commands = monitor.tell(m.Announced(1.1, "c", 2, moved))
    assert commands == [m.CloseStream(1, m.CloseReason.SUPERSEDED), m.Publish(m.InstanceUp(moved, draining=False), "c")]


def test_a_changed_place_of_an_instance_is_published() -> None:
    """The planner relies on these reports, because an instance may have left its group unnoticed by the others."""
    monitor = Monitor()
    monitor.announce(1.0, 1)
    assert monitor.report(1.1, 1) == []
    member = Member(W1, Incarnation(1), "", 0, 2)
    place = Place(Epoch(2), Group(GroupId("w1"), (member,)))
    told = monitor.tell(m.LoadReported(1.2, "c", 1, load_report(10), place))
    assert told == [m.Publish(m.InstanceUp(instance(), draining=False, place=place), "c")]
    assert monitor.tell(m.LoadReported(1.3, "c", 1, load_report(10), place)) == []


def test_an_instance_is_lost_while_its_engine_hangs() -> None:
    monitor = Monitor()
    monitor.announce(1.0, 1)
    for second in range(2, 6):
        assert monitor.report(second, 1, step_age_s=54.0 + second) == []
        monitor.tick_until(second, second - 1)
    assert lost(monitor.report(6.0, 1, step_age_s=60.5)) == [("w1", 1)]
    assert monitor.report(7.0, 1, step_age_s=61.5) == [], "the loss is reported once"
    assert monitor.core.snapshot() == [m.SnapshotEnd()], "new watchers are not notified that it is up"
    # The same incarnation returns with its first report after the step.
    assert monitor.report(8.0, 1) == [m.Publish(m.InstanceUp(instance(), draining=False), "c")]
    assert monitor.core.snapshot() == [m.InstanceUp(instance(), draining=False), m.SnapshotEnd()]


def test_an_instance_whose_engine_hangs_forever_is_lost_once() -> None:
    monitor = Monitor()
    monitor.announce(1.0, 1)
    assert lost(monitor.report(2.0, 1, step_age_s=100.0)) == [("w1", 1)]
    assert monitor.announce(3.0, 2) == [m.CloseStream(1, m.CloseReason.SUPERSEDED)], (
        "a new stream does not show that the engine works"
    )
    assert lost(monitor.tick_until(20.0, 2.0)) == []
    assert monitor.core.entries == {}


def test_each_admitted_instance_may_have_a_group_of_its_own() -> None:
    """A layout with more groups could be written, but not read."""
    assert MonitorRules(lease_s=3.0, pressure=RULES).max_instances <= MAX_GROUPS
