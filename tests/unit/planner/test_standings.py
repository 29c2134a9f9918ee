"""Instances parked and woken by an operator, step by step in the planner's core."""

from ballast.common.ids import Incarnation, WorkerId
from ballast.common.layout import Standing
from services.planner.core import messages as p
from tests.support.planner_core import MODEL, Planner


def ask(planner: Planner, worker: str, *, away: bool, request: str = "") -> None:
    request = request or f"{worker} {away} {planner.now_s}"
    planner.tell(p.StandingRequested(planner.now_s, "c", request, WorkerId(worker), away))


def says(planner: Planner, worker: str, *, parked: bool) -> None:
    life = Incarnation(planner.lives[worker])
    address = f"{worker}:1"
    up = p.InstanceUp(planner.now_s, "c", WorkerId(worker), life, address, MODEL, False, f"{worker}:2", parked=parked)
    planner.tell(up)
    planner.now_s += 0.2
    planner.fire()


def standings(planner: Planner) -> dict[str, Standing]:
    assert planner.stored is not None
    return {m.worker_id: m.standing for group in planner.stored.layout.groups for m in group.members}


def orders(planner: Planner) -> list[tuple[WorkerId, bool]]:
    found = [(c.member.worker_id, c.park) for c in planner.said if isinstance(c, p.OrderStanding)]
    planner.said.clear()
    return found


def started(*workers: str) -> Planner:
    planner = Planner()
    planner.start(*workers)
    return planner


def test_park_and_wake_step_by_step() -> None:
    planner = started("w0", "w1")
    ask(planner, "w1", away=True, request="r")
    assert standings(planner) == {"w0": "serving", "w1": "leaving"}
    assert p.AnswerChange("r", planner.core.layout.epoch, ()) in planner.said
    assert planner.core.layout.reason == "leaving: w1"
    assert orders(planner) == [("w1", True)]
    planner.now_s += 0.3
    planner.fire()
    assert orders(planner) == [("w1", True)], "repeated until w1 reports that it is parked"
    says(planner, "w1", parked=True)
    assert standings(planner)["w1"] is Standing.PARKED
    orders(planner)
    planner.now_s += 1.0
    planner.fire()
    assert orders(planner) == []
    ask(planner, "w1", away=False)
    assert standings(planner)["w1"] is Standing.WAKING
    assert orders(planner) == [("w1", False)]
    says(planner, "w1", parked=False)
    assert standings(planner)["w1"] is Standing.SERVING


def test_a_leave_is_undone_in_one_step_and_a_late_park_is_followed_by_a_wake() -> None:
    planner = started("w0", "w1")
    ask(planner, "w1", away=True)
    ask(planner, "w1", away=False)
    assert standings(planner)["w1"] is Standing.SERVING
    says(planner, "w1", parked=True)  # w1 had already received the order to park
    assert standings(planner)["w1"] is Standing.WAKING


def test_an_instance_that_cannot_be_parked_serves_again() -> None:
    planner = started("w0", "w1")
    ask(planner, "w1", away=True)
    life = Incarnation(planner.lives["w1"])
    planner.tell(p.ParkRefused(planner.now_s, "c", WorkerId("w1"), Incarnation(life - 1)))
    assert standings(planner)["w1"] is Standing.LEAVING, "another process was asked"
    planner.tell(p.ParkRefused(planner.now_s, "c", WorkerId("w1"), life))
    assert standings(planner)["w1"] is Standing.SERVING
    orders(planner)
    planner.now_s += 1.0
    planner.fire()
    assert orders(planner) == []


def test_invalid_orders_are_refused() -> None:
    def refused(planner: Planner, worker: str) -> str:
        planner.said.clear()
        ask(planner, worker, away=True, request="x")
        [refusal] = [c for c in planner.said if isinstance(c, p.RefuseChange)]
        assert refusal.refusal is p.ChangeRefusal.NOT_POSSIBLE
        return refusal.why

    planner = started("w0", "w1", "w2")
    assert refused(planner, "w7") == "w7 is not in the layout; `ballast status` lists its instances"
    planner.tell(p.WorkerDrainRequested(planner.now_s, "c", "d", WorkerId("w2")))
    assert refused(planner, "w2") == "w2 is draining"
    ask(planner, "w1", away=True)
    assert refused(planner, "w0") == "no instance but w0 serves"
    standby = Planner()
    ask(standby, "w0", away=True)
    assert [c.refusal for c in standby.said if isinstance(c, p.RefuseChange)] == [p.ChangeRefusal.STANDBY]


def test_a_request_id_identifies_one_change() -> None:
    planner = started("w0", "w1", "w2")
    ask(planner, "w1", away=True, request="r")
    planner.said.clear()
    ask(planner, "w1", away=True, request="r")
    assert [c.request_id for c in planner.said if isinstance(c, p.AnswerChange)] == ["r"]


def test_a_new_leader_continues_from_the_layout() -> None:
    planner = started("w0", "w1", "w2")
    ask(planner, "w1", away=True)
    ask(planner, "w2", away=True)
    says(planner, "w2", parked=True)
    successor = Planner()
    successor.stored, successor.lives = planner.stored, dict(planner.lives)
    successor.token += 1000
    successor.tell(p.LeadershipChanged(successor.now_s, "c", successor.token))
    successor.tell(p.SnapshotBegan(successor.now_s, "c"))
    for worker in ("w0", "w1", "w2"):
        says(successor, worker, parked=worker == "w2")
    successor.tell(p.SnapshotEnded(successor.now_s, "c"))
    assert standings(successor) == {"w0": "serving", "w1": "leaving", "w2": "parked"}
    assert ("w1", True) in orders(successor)


def test_a_new_incarnation_of_a_parked_instance_serves() -> None:
    planner = started("w0", "w1")
    ask(planner, "w1", away=True)
    says(planner, "w1", parked=True)
    planner.up("w1")
    planner.now_s += 0.2
    planner.fire()
    assert standings(planner)["w1"] is Standing.SERVING


def test_a_leaving_instance_takes_part_in_no_drop() -> None:
    planner = started("w0", "w1", "w2")
    ask(planner, "w2", away=True)
    planner.drop("w1", "w2")
    [refusal] = [c for c in planner.said if isinstance(c, p.RefuseChange)]
    assert refusal.why == "not in service: w2 (leaving)"


def test_two_requests_at_once_do_not_park_the_last_instances() -> None:
    """The second request arrives before the layout contains the first one."""
    planner = started("w0", "w1")
    commands = [
        command
        for worker in ("w0", "w1")
        for command in planner.core.handle(p.StandingRequested(planner.now_s, "c", worker, WorkerId(worker), True))
    ]
    [refusal] = [command for command in commands if isinstance(command, p.RefuseChange)]
    assert (refusal.request_id, refusal.why) == ("w1", "no instance but w1 serves")


def test_another_instance_is_woken_if_the_first_one_does_not_wake() -> None:
    """No instance serves, and the woken one lacks memory because another process uses it, so another one is woken."""
    planner = started("w0", "w1", "w2")
    for worker in ("w1", "w2"):
        ask(planner, worker, away=True)
        says(planner, worker, parked=True)
    planner.lose("w0")
    assert standings(planner) == {"w1": "waking", "w2": "parked"}
    until_s = planner.now_s + 59.0
    while planner.now_s < until_s:
        planner.fire()
    assert standings(planner)["w2"] is Standing.PARKED
    while planner.now_s < until_s + 2.0:
        planner.fire()
    assert standings(planner)["w2"] is Standing.WAKING
