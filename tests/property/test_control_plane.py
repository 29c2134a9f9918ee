"""Monitors and planners in virtual time, without requests: when workers enter or leave the layout, and when overload is
signalled.

Faults are covered by `test_cluster_faults`.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from ballast.common.ids import WorkerId
from ballast.common.layout import Layout
from ballast.common.load import LoadReport
from services.monitor.policy.pressure import Overload
from sim.faults import Fault, FaultKind
from sim.instance import SimInstance
from sim.troubles import Troubles
from sim.world import World
from tests.support.reporting_worker import load_report
from tests.support.simulated import options

_LATE_S = 0.1  # delay of a message, and of a write


@dataclass
class Watched:
    world: World
    written: list[tuple[float, Layout]]  # (time, layout as received by watchers)

    def run(self, until_s: float) -> None:
        clock = self.world.clock
        while clock.now_s < until_s:
            clock.step()
        self.world.check()

    def members(self) -> set[WorkerId]:
        return {member.worker_id for group in self.written[-1][1].groups for member in group.members}


def watched(worker_count: int, *, seed: int = 0, replicas: int = 1) -> Watched:
    made = options("recompute", cluster=f"{worker_count}xA100-40G", seed=seed)
    world = World(replace(made, monitor_count=replicas, planner_count=replicas), [])
    written: list[tuple[float, Layout]] = []
    world.state.watch(lambda layout: written.append((world.clock.now_s, layout)))
    return Watched(world, written)


@pytest.mark.parametrize("seed", range(5))
def test_a_dead_instance_leaves_within_its_lease(seed: int) -> None:
    cluster = watched(6, seed=seed)
    world, rng = cluster.world, random.Random(seed)
    rules, acts = world.options.rules, Troubles(world)
    names = sorted(world.instances)
    for name in names:
        acts.slow(name, world.monitor.name, rng.uniform(0.0, _LATE_S), 100.0)
    died_at_s = {name: world.zero_s + 2.0 * number + rng.random() for number, name in enumerate(names[:5])}
    for number, name in enumerate(died_at_s):
        fault = Fault(at_s=0.0, kind=FaultKind.CRASH, worker=number)
        world.clock.at(died_at_s[name], b"crash", lambda fault=fault: world.strike(fault))
    cluster.run(world.zero_s + 20.0)
    bound_s = rules.monitor.lease_s + rules.monitor_tick_s + rules.worker.report_interval_s + 2 * _LATE_S
    for name, died in died_at_s.items():
        without = next(at_s for at_s, layout in cluster.written if at_s > died and name not in str(layout.groups))
        assert without - died <= bound_s
    assert cluster.members() == {names[5]}


def test_simultaneous_joins_share_an_epoch() -> None:
    cluster = watched(50)
    cluster.run(cluster.world.zero_s)
    assert cluster.members() == set(cluster.world.instances)
    assert len(cluster.written) <= 6


def test_a_new_monitor_does_not_declare_all_instances_lost() -> None:
    cluster = watched(5, replicas=2)
    world = cluster.world
    cluster.run(world.zero_s + 6.0)
    before = cluster.written[-1]
    Troubles(world).replace(world.monitor, 0.5)
    cluster.run(world.zero_s + 20.0)
    assert cluster.written[-1] == before


def load_is(monkeypatch: pytest.MonkeyPatch, blocks: Callable[[], int]) -> None:
    """Makes every worker report a load of `blocks()`."""

    def load(_: SimInstance) -> LoadReport:
        return load_report(blocks())

    monkeypatch.setattr(SimInstance, "load", load)


def overloads(world: World) -> list[float]:
    told = [signal for node in world.monitors.values() for signal in node.signals]
    return sorted(at_s for at_s, signal in told if isinstance(signal, Overload))


@pytest.mark.parametrize("seed", range(10))
def test_an_oscillating_load_is_signalled_once_per_dwell_time_even_if_the_monitor_changes(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = watched(4, seed=seed, replicas=2)
    world, rng = cluster.world, random.Random(seed)
    period_s, acts = rng.uniform(0.4, 6.0), Troubles(world)
    load_is(monkeypatch, lambda: 97 if world.clock.now_s % period_s < period_s / 2 else 5)
    for _ in range(5):
        cluster.run(world.clock.now_s + 12.0)
        acts.replace(world.monitor, 0.5)
    told = overloads(world)
    dwell_s = world.options.rules.monitor.pressure.dwell_s
    assert len(told) > 3
    assert all(later - earlier >= dwell_s for earlier, later in itertools.pairwise(told))


def test_a_burst_is_signalled_within_a_report_and_a_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = watched(4)
    world = cluster.world
    began_s, rules = world.zero_s + 4.0, world.options.rules
    load_is(monkeypatch, lambda: 98 if world.clock.now_s >= began_s else 40)
    cluster.run(began_s + 2.0)
    latest_s = rules.worker.report_interval_s + 2 * rules.monitor_tick_s
    (told_s,) = overloads(world)
    assert 0.0 <= told_s - began_s <= latest_s + _LATE_S
