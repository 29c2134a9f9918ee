"""Monitor and planner together in virtual time: what must hold whatever the network, the nodes and the store do."""

import itertools
import subprocess
import sys

import pytest

from ballast.common.ids import Incarnation, WorkerId
from services.monitor.policy.pressure import Overload
from tests.support.control_sim import LEASE_S, REPORT_S, TICK_S, ClusterModel, Faults, World, Written
from tests.support.pressure import RULES
from tests.support.reporting_worker import load_report

_ROUGH = Faults(lost=0.1, doubled=0.2, delay_s=0.3, answer_lost=0.1, stream_breaks_per_s=0.3)
_CALM = Faults()


def judge(history: list[Written]) -> None:
    """What every history of written layouts must satisfy."""
    newest: dict[WorkerId, Incarnation] = {}
    last_epoch = 0
    for written in history:
        layout = written.layout
        layout.check()
        assert layout.epoch > last_epoch, f"epoch {layout.epoch} was written after {last_epoch}"
        last_epoch = layout.epoch
        for member in (member for group in layout.groups for member in group.members):
            known = newest.get(member.worker_id, member.incarnation)
            assert member.incarnation >= known, f"{member.worker_id}: life {member.incarnation} after {known}"
            newest[member.worker_id] = member.incarnation


def members(written: Written) -> dict[WorkerId, Incarnation]:
    return {member.worker_id: member.incarnation for group in written.layout.groups for member in group.members}


def restless(seed: int, *, flush: bool) -> ClusterModel:
    """Twenty seconds of faults of every kind, then ten seconds of calm."""
    world = World(seed, _ROUGH)
    cluster = ClusterModel(world)
    rng = world.rng
    for _ in range(2):
        cluster.start_monitor()
        cluster.start_planner()
    lives = [cluster.start_worker(f"w{i}") for i in range(4)]

    def worker_fault() -> None:
        index = rng.randrange(len(lives))
        life = lives[index]
        if life.died_at_s is None:
            cluster.kill_worker(life)
        else:
            lives[index] = cluster.start_worker(life.instance.worker_id)

    def node_fault() -> None:
        if rng.random() < 0.5:
            rng.choice([n for n in cluster.monitors if n.alive]).alive = False
            cluster.start_monitor()
        elif not flush:
            # A planner that starts on an empty store knows no epoch: not together with flushes.
            rng.choice([n for n in cluster.planners if n.alive]).alive = False
            cluster.start_planner()

    def state_fault() -> None:
        state = cluster.state
        if state.up:
            state.up = False
            world.after(rng.uniform(0.1, 2.0), "state server is back", come_back)

    def come_back() -> None:
        if flush:
            cluster.state.flush()
        cluster.state.up = True

    def in_trouble() -> bool:
        return world.now_s < 20.0

    world.every(1.0, "worker fault", worker_fault, in_trouble)
    world.every(4.0, "node fault", node_fault, in_trouble)
    world.every(5.0, "state fault", state_fault, in_trouble)
    world.run(22.5)
    world.faults = _CALM
    world.run(33.0)
    return cluster


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("seed", range(15))
def test_whatever_happens_layouts_are_valid_epochs_grow_and_the_cluster_recovers(seed: int, flush: bool) -> None:
    cluster = restless(seed, flush=flush)
    history = cluster.state.history
    judge(history)
    assert len(history) > 5
    assert members(history[-1]) == cluster.living()
    assert cluster.state.stored is not None
    assert cluster.state.stored.layout == history[-1].layout
    for planner in cluster.planners:
        assert planner.seen_epochs == sorted(set(planner.seen_epochs)), "a watcher saw an epoch twice or go back"
    epochs = [written.layout.epoch for written in history]
    assert len(epochs) == len(set(epochs)), "two planners have both written an epoch"


@pytest.mark.parametrize("seed", range(10))
def test_a_dead_instance_leaves_within_its_lease(seed: int) -> None:
    """Reports are lost, doubled and reordered; monitor, planner and store work. `bound_s`: ticks, delays, one write."""
    faults = Faults(lost=0.05, doubled=0.2, delay_s=0.2)
    world = World(seed, faults)
    cluster = ClusterModel(world)
    cluster.start_monitor()
    cluster.start_planner()
    lives = [cluster.start_worker(f"w{i}") for i in range(6)]
    for number, life in enumerate(lives[:5]):
        world.after(5.0 + 2.0 * number, "kill", lambda life=life: cluster.kill_worker(life))
    world.run(20.0)
    judge(cluster.state.history)
    bound_s = LEASE_S + TICK_S + REPORT_S + 2 * faults.delay_s + 0.2
    for life in lives[:5]:
        worker_id, died_at_s = life.instance.worker_id, life.died_at_s
        assert died_at_s is not None
        naming = [w for w in cluster.state.history if worker_id in members(w)]
        assert naming, "it was never there"
        after = cluster.state.history.index(naming[-1]) + 1
        assert after < len(cluster.state.history), f"{worker_id} is still in the layout"
        assert cluster.state.history[after].at_s - died_at_s <= bound_s
    assert members(cluster.state.history[-1]) == cluster.living()


def test_joins_that_come_together_share_an_epoch() -> None:
    world = World(1, _CALM)
    cluster = ClusterModel(world)
    cluster.start_monitor()
    cluster.start_planner()
    for number in range(50):
        cluster.start_worker(f"w{number:02}")
    world.run(5.0)
    assert members(cluster.state.history[-1]) == cluster.living()
    assert len(cluster.state.history) <= 6


def test_a_new_monitor_does_not_declare_everybody_lost() -> None:
    world = World(2, _CALM)
    cluster = ClusterModel(world)
    first = cluster.start_monitor()
    cluster.start_planner()
    for number in range(5):
        cluster.start_worker(f"w{number}")
    world.run(6.0)
    before = cluster.state.history[-1]
    first.alive = False
    cluster.start_monitor()
    world.run(16.0)
    assert cluster.state.history[-1] == before


@pytest.mark.parametrize("seed", range(20))
def test_an_oscillating_load_is_told_once_per_dwell_time_even_over_changes_of_the_monitor(seed: int) -> None:
    world = World(seed, _ROUGH)
    cluster = ClusterModel(world)
    for _ in range(2):
        cluster.start_monitor()
        cluster.start_planner()
    for number in range(4):
        cluster.start_worker(f"w{number}")
    period_s = world.rng.uniform(0.4, 6.0)
    cluster.load = lambda: load_report(97 if world.now_s % period_s < period_s / 2 else 5)

    def replace_monitor() -> None:
        world.rng.choice([n for n in cluster.monitors if n.alive]).alive = False
        cluster.start_monitor()

    world.every(9.0, "monitor fault", replace_monitor, lambda: True)
    world.run(60.0)
    told = [at_s for at_s, signal in cluster.raised if isinstance(signal, Overload)]
    assert len(told) > 3
    assert all(later - earlier >= RULES.dwell_s for earlier, later in itertools.pairwise(told))


def test_a_burst_is_told_within_a_report_a_tick_and_their_confirmation() -> None:
    world = World(5, _CALM)
    cluster = ClusterModel(world)
    cluster.start_monitor()
    cluster.start_planner()
    for number in range(4):
        cluster.start_worker(f"w{number}")
    cluster.load = lambda: load_report(98 if world.now_s >= 10.0 else 40)
    world.run(12.0)
    assert [type(signal) for _, signal in cluster.raised] == [Overload]
    latest_s = 10.0 + REPORT_S + TICK_S + _CALM.delay_s + RULES.overload_after_s + TICK_S
    assert 10.0 <= cluster.raised[0][0] <= latest_s


_TRACE = """
from tests.property.test_control_plane import restless
print(restless(3, flush=False).world.trace.hexdigest())
"""


def test_the_same_seed_gives_the_same_trace_in_every_process() -> None:
    hashes = {
        subprocess.run(
            [sys.executable, "-c", _TRACE],
            env={"PYTHONHASHSEED": str(seed), "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in (1, 2)
    }
    assert len(hashes) == 1
