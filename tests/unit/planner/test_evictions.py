"""Members that are silent to the monitor stay in the layout until there is evidence that they are gone."""

from collections.abc import Sequence

import pytest

from ballast.common.ids import Incarnation, WorkerId
from services.planner.core import messages as p
from tests.support.planner_core import Planner


def alone(*workers: str) -> list[str]:
    return [f"{worker}[0:4]" for worker in workers]


def cluster(*workers: str) -> Planner:
    planner = Planner()
    planner.start(*workers)
    assert planner.shape == alone(*workers)
    return planner


def silent(planner: Planner, *workers: str) -> None:
    for worker in workers:
        life = Incarnation(planner.lives[worker])
        planner.tell(p.InstanceLost(planner.now_s, "c", WorkerId(worker), life, "silent for 3.1 s", silent=True))


def asked(planner: Planner) -> list[str]:
    return [command.worker_id for command in planner.told(p.ProbeInstance) if isinstance(command, p.ProbeInstance)]


def find(planner: Planner, found: p.Probed, *workers: str) -> None:
    for worker in workers:
        life = Incarnation(planner.lives[worker])
        planner.tell(p.InstanceProbed(planner.now_s, "c", WorkerId(worker), life, found))


def new_monitor(planner: Planner, hears: Sequence[str] = ()) -> None:
    planner.tell(p.SnapshotBegan(planner.now_s, "c"))
    for worker in hears:
        planner.lives[worker] -= 1
        planner.up(worker)
    planner.tell(p.SnapshotEnded(planner.now_s, "c"))


def test_a_new_monitor_without_reports_removes_no_member() -> None:
    planner = cluster("w1", "w2", "w3")
    epoch = planner.core.layout.epoch
    new_monitor(planner)
    assert asked(planner) == ["w1", "w2", "w3"]
    find(planner, p.Probed.ALIVE, "w1", "w2", "w3")
    planner.wait(30.0)
    assert planner.shape == alone("w1", "w2", "w3")
    assert planner.core.layout.epoch == epoch


def test_a_member_that_answers_is_probed_while_it_is_silent_to_the_monitor() -> None:
    planner = cluster("w1", "w2")
    silent(planner, "w1")
    assert asked(planner) == ["w1"]
    planner.wait(5.0)
    assert asked(planner) == [], "one probe at a time"
    find(planner, p.Probed.ALIVE, "w1")
    planner.wait(1.1)
    assert asked(planner) == ["w1"]
    find(planner, p.Probed.GONE, "w1")
    assert planner.shape == alone("w2")
    assert planner.core.layout.reason == "lost: w1 (silent for 3.1 s; nobody listens at its address)"


def test_a_member_that_the_monitor_hears_again_is_not_probed() -> None:
    planner = cluster("w1", "w2")
    silent(planner, "w1")
    planner.lives["w1"] -= 1
    planner.up("w1")
    find(planner, p.Probed.SILENT, "w1")
    planner.said.clear()
    planner.wait(10.0)
    assert asked(planner) == []
    assert planner.shape == alone("w1", "w2")


@pytest.mark.parametrize(
    ("count", "silent_count", "left_count"), [(2, 1, 1), (3, 1, 2), (3, 2, 3), (4, 2, 2), (4, 4, 4), (1, 1, 1)]
)
def test_only_a_minority_of_silent_members_is_removed(count: int, silent_count: int, left_count: int) -> None:
    workers = [f"w{i}" for i in range(count)]
    planner = cluster(*workers)
    silent(planner, *workers[:silent_count])
    find(planner, p.Probed.SILENT, *workers[:silent_count])
    assert len(planner.shape) == left_count


def test_unprobed_members_count_as_possibly_cut_off() -> None:
    """Leases expire one after the other, so the first member probed must not count as a minority of one."""
    planner = cluster("w1", "w2", "w3")
    silent(planner, "w1", "w2", "w3")
    find(planner, p.Probed.SILENT, "w1")
    assert planner.shape == alone("w1", "w2", "w3")
    find(planner, p.Probed.ALIVE, "w2", "w3")
    assert planner.shape == alone("w2", "w3")


def test_silent_members_are_removed_if_the_answering_one_has_left_their_group() -> None:
    """Most of the group is silent, and the only member that answers reports that it no longer serves in the group."""
    planner = cluster("w1", "w2", "w3")
    planner.drop("w1", "w2", "w3")
    planner.go_through("w1", "w2", "w3")
    for worker in ("w1", "w2", "w3"):
        planner.says(worker)
    silent(planner, "w1", "w2")
    find(planner, p.Probed.SILENT, "w1", "w2")
    assert len(planner.shape) == 1
    planner.lives["w3"] -= 1
    planner.up("w3")
    assert planner.shape == []


def test_evidence_of_the_monitor_needs_no_probe() -> None:
    planner = cluster("w1", "w2")
    planner.lose("w1")
    assert planner.shape == alone("w2")
    assert asked(planner) == []


def test_a_deposed_planner_probes_no_members() -> None:
    planner = cluster("w1", "w2")
    silent(planner, "w1")
    planner.tell(p.LeadershipChanged(planner.now_s, "c", None))
    find(planner, p.Probed.GONE, "w1")
    assert planner.shape == alone("w1", "w2")
    assert not planner.core.suspects
