"""Workers that are kept out of groups: those with another protocol version, and members of groups that broke up at
once.
"""

from ballast.common.ids import Incarnation, WorkerId
from ballast.common.protocol import PROTOCOL, may_be_dispatched_to
from services.planner.core.messages import InstanceUp, OverloadRaised, RefuseChange
from tests.support.planner_core import EXTENT, MODEL, Planner
from tests.unit.planner.test_lost_and_alive import alone


def planner_of(**protocols: int) -> Planner:
    planner = Planner()
    planner.start(*protocols)
    for worker, protocol in protocols.items():
        life, address = Incarnation(planner.lives[worker]), f"{worker}:1"
        planner.tell(
            InstanceUp(
                planner.now_s, "c", WorkerId(worker), life, address, MODEL, False, f"{worker}:2", protocol=protocol
            )
        )
    planner.said.clear()
    return planner


def groups(planner: Planner) -> list[list[str]]:
    return sorted([m.worker_id for m in group.members] for group in planner.core.layout.groups)


def test_an_overload_groups_workers_of_one_protocol_only() -> None:
    planner = planner_of(old=0, w1=1, w2=1)
    planner.tell(OverloadRaised(planner.now_s, "o1", 16 * EXTENT))
    planner.go_through("w1", "w2")
    assert groups(planner) == [["old"], ["w1", "w2"]]
    [(name, why)] = planner.core.kept_out.why(planner.now_s).items()
    assert name == "old"
    assert "protocol 0, but most workers use protocol 1" in why
    assert planner.core.kept_out.why(planner.now_s + 40.0)[WorkerId("old")] == f"{why} (for 40 s)"


def test_an_operator_can_group_old_workers_of_equal_protocol_only() -> None:
    planner = planner_of(a=0, b=0, c=1, d=1, e=1)
    planner.drop("a", "c")
    [refused] = planner.told(RefuseChange)
    assert isinstance(refused, RefuseChange)
    assert "do not use the same protocol: a 0, c 1" in refused.why
    planner.drop("a", "b", request_id="d2")
    planner.go_through("a", "b")
    assert ["a", "b"] in groups(planner)


def test_half_of_a_cluster_counts_as_upgraded() -> None:
    assert set(planner_of(a=1, b=2).core.kept_out.why(0.0)) == {"a"}


def breaks(planner: Planner) -> None:
    """Let both members report that they are alive but no longer in a group."""
    for worker in ("w0", "w1"):
        planner.says(worker, alone(planner, worker))
    planner.wait(3.0)
    planner.go_through("w0", "w1")  # a restore
    assert groups(planner) == [["w0"], ["w1"]]


def grouped(planner: Planner, request_id: str) -> None:
    planner.drop("w0", "w1", request_id=request_id)
    planner.go_through("w0", "w1")
    assert ["w0", "w1"] in groups(planner)


def test_a_group_that_broke_at_once_is_formed_again_after_growing_delays() -> None:
    planner = Planner()
    planner.start("w0", "w1")
    grouped(planner, "d1")
    breaks(planner)
    kept_out = planner.core.kept_out
    assert set(kept_out.why(planner.now_s)) == {"w0", "w1"}
    assert "broke soon after it was formed" in kept_out.why(planner.now_s)[WorkerId("w0")]
    stages = len(planner.journal)
    planner.tell(OverloadRaised(planner.now_s, "o1", 16 * EXTENT))
    assert len(planner.journal) == stages
    planner.wait(31.0)
    assert kept_out.why(planner.now_s) == {}
    grouped(planner, "d2")
    breaks(planner)
    planner.wait(31.0)
    assert set(kept_out.why(planner.now_s)) == {"w0", "w1"}, "kept out for a minute the second time"
    planner.wait(31.0)
    assert kept_out.why(planner.now_s) == {}


def test_members_of_a_group_that_lost_a_member_or_lasted_are_not_kept_out() -> None:
    planner = Planner()
    planner.start("w0", "w1")
    grouped(planner, "d1")
    planner.lose("w1")
    planner.wait(1.0)
    assert planner.core.kept_out.why(planner.now_s) == {}
    later = Planner()
    later.start("w0", "w1")
    grouped(later, "d1")
    later.wait(40.0)
    breaks(later)
    assert later.core.kept_out.why(later.now_s) == {}


def test_a_dispatcher_supports_the_previous_and_the_next_protocol_number() -> None:
    assert [n for n in range(PROTOCOL + 4) if may_be_dispatched_to(n)] == [PROTOCOL - 1, PROTOCOL, PROTOCOL + 1]
