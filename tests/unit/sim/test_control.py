"""Which reports a simulation's control plane receives, and when."""

from dataclasses import replace
from itertools import pairwise

import pytest

from ballast.common.ids import Incarnation, WorkerId
from ballast.common.load import HASTY_REPORT_S, LoadReport
from services.monitor.core.messages import Event, Instance, LoadReported
from sim.clock import Clock
from sim.jobs.simulation import WorkerSize, production_rules
from sim.lines import Lines
from sim.monitoring import MonitorNode, Monitors, Reporter
from sim.state import Delays, SimStateServer, Site
from tests.support.reporting_worker import load_report, model_info

DELAYS = Delays(rpc_s=0.001, state_s=0.001)
WORKER = WorkerId("w0")


def test_a_jump_of_the_demand_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports arrive as from a real worker: within the hasty interval, and no more often."""
    clock, loads, heard = Clock(), [load_report(10)], list[tuple[float, int]]()

    class Worker:
        crashed = paused = False

        def load(self) -> LoadReport:
            return loads[-1]

    def listens(worker_id: WorkerId, incarnation: Incarnation) -> bool:
        return True

    rules = production_rules(WorkerSize()).monitor
    lines = Lines(clock)
    site = Site(clock, DELAYS, lines, SimStateServer(clock, DELAYS, lines))
    monitor = MonitorNode(site, rules, 1.0, listens)
    feed = monitor.feed

    def listening(event: Event) -> None:
        if isinstance(event, LoadReported):
            heard.append((clock.now_s, event.load.waiting_block_count))
        feed(event)

    monkeypatch.setattr(monitor, "feed", listening)
    reporter = Reporter(
        site,
        Monitors(lambda: monitor, {monitor.name: monitor}),
        Instance(WORKER, Incarnation(1), "w0:1", model_info()),
        Worker(),
        interval_s=4.0,
        first_s=0.0,
    )

    def come(waiting_block_count: int) -> None:
        loads.append(replace(loads[-1], waiting_block_count=waiting_block_count))
        reporter.on_requests_arrived(loads[-1])

    clock.at(1.0, b"a little more", lambda: come(1))
    for number in range(10):
        clock.at(2.0 + 0.002 * number, b"a burst", lambda number=number: come(20 * (number + 1)))
    while clock.now_s < 3.0:
        clock.step()
    hasty = [(at_s, count) for at_s, count in heard if at_s > 1.0]
    assert hasty[0] == (pytest.approx(2.0 + DELAYS.rpc_s), 20)
    assert hasty[-1] == (pytest.approx(2.02 + DELAYS.rpc_s), 200)
    assert len(hasty) == 3
    assert all(later - sooner >= HASTY_REPORT_S - 1e-9 for (sooner, _), (later, _) in pairwise(hasty))
    monitor.core.check()


def test_a_large_cluster_reports_as_seldom_as_the_real_monitor_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 64 announced instances, each reports every 64/150 s instead of every 0.1 s."""
    clock, heard = Clock(), list[float]()

    class Worker:
        crashed = paused = False

        def load(self) -> LoadReport:
            return load_report(10)

    lines = Lines(clock)
    site = Site(clock, DELAYS, lines, SimStateServer(clock, DELAYS, lines))
    monitor = MonitorNode(site, production_rules(WorkerSize()).monitor, 1.0, lambda worker, life: True)
    feed = monitor.feed

    def listening(event: Event) -> None:
        if isinstance(event, LoadReported) and event.stream_id == 1:
            heard.append(clock.now_s)
        feed(event)

    monkeypatch.setattr(monitor, "feed", listening)
    for number in range(64):
        instance = Instance(WorkerId(f"w{number}"), Incarnation(1), f"w{number}:1", model_info())
        Reporter(site, Monitors(lambda: monitor, {}), instance, Worker(), interval_s=0.1, first_s=0.0)
    while clock.now_s < 5.0:
        clock.step()
    later = [at_s for at_s in heard if at_s > 1.0]
    assert [b - a for a, b in pairwise(later)] == pytest.approx([64 / 150] * (len(later) - 1))
