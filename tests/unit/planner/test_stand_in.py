"""The planner's view of a lost follower and of the instance that replaces it."""

from dataclasses import replace

import pytest

from ballast.common.ids import Incarnation, WorkerId
from ballast.common.layout import Layout
from ballast.common.transition import Phase
from services.planner.core import messages as p
from services.planner.core.stages import Stage
from tests.support.planner_core import LOAD, Planner


def grouped(*outside: str) -> Planner:
    """A planner whose w0 to w2 form a pipeline."""
    planner = Planner()
    planner.start("w0", "w1", "w2", *outside)
    planner.drop("w0", "w1", "w2")
    planner.go_through("w0", "w1", "w2")
    assert planner.shape[0] == "w0[0:1]+w1[1:2]+w2[2:4]"
    planner.said.clear()
    planner.journal.clear()
    return planner


def written(planner: Planner) -> list[Layout]:
    return [command.layout for command in planner.said if isinstance(command, p.WriteLayout)]


@pytest.mark.parametrize(("lost", "shape"), [("w1", "w0[0:1]+w3[1:2]+w2[2:4]"), ("w2", "w0[0:1]+w1[1:2]+w3[2:4]")])
def test_an_instance_alone_takes_exactly_the_lost_layers(lost: str, shape: str) -> None:
    planner = grouped("w3")
    planner.lose(lost)
    survivors = [name for name in ("w0", "w1", "w2") if name != lost]
    assert not written(planner), "the group stays in the layout until the decision"
    planner.go_through(*survivors, "w3")
    assert planner.journal == [Stage.PREPARING, Stage.COMMITTING, Stage.EXCHANGING, Stage.DONE]
    assert planner.shape == [shape]
    assert planner.core.conductor.history[-1].by == "loss"
    planner.wait(2.0)
    assert not written(planner)


def test_the_least_used_one_is_chosen() -> None:
    planner = grouped("w3", "w4")
    loads = {"w3": 9, "w4": 8}
    execute = planner.execute

    def differ(command: p.Command) -> None:
        if isinstance(command, p.ReadLoads):
            read = {WorkerId(w): replace(LOAD, used_block_count=loads.get(w, 8)) for w in planner.lives}
            planner.events.append(p.LoadsRead(planner.now_s, "c", p.ClusterLoad(read)))
        else:
            execute(command)

    planner.execute = differ
    planner.lose("w1")
    assert planner.core.conductor.record is not None
    assert "w4 stands in for w1" in planner.core.conductor.record.journal.why


@pytest.mark.parametrize("lost", ["w0", "w1"])
def test_without_stand_in_or_leader_the_group_ends_at_once(lost: str) -> None:
    planner = grouped(*(["w3"] if lost == "w0" else []))
    planner.lose(lost)
    assert [len(group.members) for layout in written(planner) for group in layout.groups] == [1] * (lost == "w0")


def test_an_instance_with_too_little_room_is_not_chosen() -> None:
    planner = grouped("w3")
    planner.load = replace(LOAD, used_block_count=10_000)
    planner.lose("w1")
    assert written(planner)
    assert planner.shape == ["w3[0:4]"]


def test_a_failed_stand_in_is_not_tried_again() -> None:
    planner = grouped("w3")
    planner.lose("w2")
    planner.answer(Phase.FAILED, "w3", why="no link")
    planner.answer(Phase.ABORTED, "w0", "w1", "w3")
    planner.wait(0.1)
    assert planner.shape == ["w3[0:4]"]


def test_missing_loads_do_not_delay_the_choice() -> None:
    planner = grouped("w3")
    execute = planner.execute

    def silent(command: p.Command) -> None:
        if not isinstance(command, p.ReadLoads):
            execute(command)

    planner.execute = silent
    planner.lose("w2")
    assert planner.core.layout.groups
    assert not written(planner)
    planner.wait(1.1)
    assert planner.shape == ["w3[0:4]"]


def test_two_groups_that_lose_a_follower_each_get_one() -> None:
    planner = Planner()
    planner.start("w0", "w1", "w2", "w3", "w4", "w5")
    for n, pair in enumerate([("w0", "w1"), ("w2", "w3")]):
        planner.drop(*pair, request_id=f"d{n}")
        planner.go_through(*pair)
    planner.events.append(p.InstanceLost(planner.now_s, "c", WorkerId("w1"), Incarnation(1), "gone"))
    planner.lose("w3")
    planner.go_through("w0", "w4")
    planner.go_through("w2", "w5")
    assert planner.shape == ["w0[0:2]+w4[2:4]", "w2[0:2]+w5[2:4]"]
