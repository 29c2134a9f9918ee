"""The likely partners of each worker, for opening links in advance."""

import time

from ballast.common.ids import Epoch, GroupId, Incarnation, WorkerId
from ballast.common.layout import Group, Layout, Member
from services.planner.policy.partners import likely_partners


def layout(*groups: str, draining: str = "") -> Layout:
    """A group for each string, with one member per letter; members with capital letters have no data address."""

    def member(name: str, i: int, count: int) -> Member:
        layers = (i * 12 // count, (i + 1) * 12 // count)
        address = f"at {name}" if name.islower() else ""
        return Member(WorkerId(name), Incarnation(1), "", *layers, draining=name in draining, data_address=address)

    made = [
        Group(GroupId(names), tuple(member(name, i, len(names)) for i, name in enumerate(names))) for names in groups
    ]
    return Layout(Epoch(1), 12, tuple(made), "test")


def named(layout: Layout, most: int) -> dict[str, str]:
    return {str(m.worker_id): "".join(p.worker_id for p in ps) for m, ps in likely_partners(layout, most)}


def test_in_a_small_cluster_all_workers_are_partners() -> None:
    assert named(layout("a", "b", "c"), 8) == {"a": "bc", "b": "ac", "c": "ba"}


def test_own_group_members_precede_neighbours() -> None:
    found = named(layout("a", "b", "ce", "d", "f"), 2)
    assert found["c"] == "eb"
    assert found["e"] == "cd"
    assert found["a"] == "bc"


def test_leaving_workers_are_no_partners_and_a_lone_worker_has_none() -> None:
    assert named(layout("a", "b", "c", draining="b"), 8) == {"a": "c", "c": "a"}
    assert named(layout("a", "b", "C"), 8) == {"a": "b", "b": "a"}
    assert named(layout("a"), 8) == {"a": ""}
    assert named(layout("a", "b", draining="b"), 8) == {"a": ""}


def test_thousands_of_workers_are_named_partners_at_once() -> None:
    many = [Member(WorkerId(f"w{i}"), Incarnation(1), "", 0, 12, data_address="there") for i in range(3000)]
    large = Layout(Epoch(1), 12, tuple(Group(GroupId(m.worker_id), (m,)) for m in many), "test")
    began_s = time.process_time()
    partners = {m.worker_id: ps for m, ps in likely_partners(large, 8, {WorkerId("w3")})}
    assert time.process_time() - began_s < 1.0, "the planner's lease is renewed each second by the same thread"
    assert [m.worker_id for m in partners[WorkerId("w5")]] == ["w4", "w6", "w2", "w7", "w1", "w8", "w0", "w9"]
    assert partners[WorkerId("w3")] == ()
