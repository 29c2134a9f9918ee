"""The backlog's order and counts, its drain rate, and the heap of deadlines."""

import random
import sys
import threading
from dataclasses import replace

import pytest

from ballast.common.errors import InvariantViolation
from ballast.common.ids import RequestId
from ballast.common.sampling import PriorityClass
from services.dispatcher.core.backlog import Backlog, DrainRate, Order
from services.dispatcher.core.deadlines import Deadlines
from services.dispatcher.core.tracked import Tracked
from tests.support.dispatcher_core import request


def tracked(serial: int, priority: PriorityClass = PriorityClass.DEFAULT, prompt: int = 3) -> Tracked:
    wanted = request(f"r{serial}", prompt=prompt, priority=priority)
    return Tracked(request=wanted, serial=serial, arrived_at_s=0.0, queued_at_s=0.0)


def test_order_is_class_then_serial_in_any_history() -> None:
    rng, backlog = random.Random(1), Backlog()
    entries = [tracked(serial, rng.choice(list(PriorityClass))) for serial in range(200)]
    rng.shuffle(entries)
    for entry in entries:
        backlog.add(entry)
    gone = entries[:77]
    for entry in gone:
        backlog.remove(entry)
        backlog.check()
    order = [(entry.request.priority.rank, entry.serial) for entry in backlog]
    assert order == sorted(order)
    assert len(backlog) == 123
    assert backlog.token_count == 3 * 123
    assert backlog.slice(5, 3) == list(backlog)[5:8]


def test_removing_an_absent_request_is_a_bug() -> None:
    backlog = Backlog()
    backlog.add(tracked(1))
    with pytest.raises(InvariantViolation):
        backlog.remove(tracked(1))


def test_a_new_request_queues_behind_its_own_and_higher_classes() -> None:
    backlog = Backlog()
    for serial, priority in enumerate([PriorityClass.BATCH, PriorityClass.DEFAULT, PriorityClass.INTERACTIVE] * 2):
        backlog.add(tracked(serial, priority))
    assert [backlog.count_before(tracked(9, priority)) for priority in PriorityClass] == [2, 4, 6]


@pytest.mark.parametrize(
    ("order", "wanted"), [("first-come", [1, 2, 3]), ("shortest-first", [2, 3, 1]), ("deadline", [3, 1, 2])]
)
def test_requests_served_elsewhere_go_first_within_their_class(order: str, wanted: list[int]) -> None:
    backlog = Backlog(Order(order))
    for serial, prompt, deadline_at_s in ((1, 30, 5.0), (2, 10, 9.0), (3, 20, 1.0), (-4, 99, 99.0)):
        asked = request(f"r{serial}", prompt=prompt, deadline_at_s=deadline_at_s)
        backlog.add(Tracked(request=asked, serial=serial, arrived_at_s=0.0, queued_at_s=0.0))
    backlog.check()
    assert [entry.serial for entry in backlog] == [-4, *wanted]
    assert [backlog.count_before(entry) for entry in backlog] == [0, 1, 2, 3]
    backlog.remove(backlog.slice(2, 1)[0])
    backlog.check()


def test_the_drain_rate_is_exact_when_steady_and_decays() -> None:
    rate = DrainRate()
    for index in range(1000):
        rate.count(index * 0.1)
    assert rate.per_s(100.0) == pytest.approx(10.0, rel=0.05)
    assert rate.per_s(150.0) < 0.1


def test_deadlines_expire_once_and_in_order() -> None:
    deadlines = Deadlines()
    for serial, at_s in enumerate([5.0, 1.0, 3.0]):
        deadlines.add(at_s, serial, RequestId(f"r{serial}"))
    deadlines.forget(RequestId("r2"))
    assert deadlines.due(4.0) == ["r1"]
    assert deadlines.due(4.0) == []
    assert deadlines.next_s() == 5.0


def test_a_reused_id_has_only_its_new_deadline() -> None:
    deadlines = Deadlines()
    deadlines.add(1.0, 1, RequestId("r"))
    deadlines.forget(RequestId("r"))
    deadlines.add(9.0, 2, RequestId("r"))
    assert deadlines.due(5.0) == []
    assert deadlines.due(9.0) == ["r"]


def test_ended_requests_do_not_pile_up_until_their_deadline() -> None:
    deadlines = Deadlines()
    for serial in range(10_000):
        deadlines.add(1e6 + serial, serial, RequestId(f"r{serial}"))
        if serial >= 10:
            deadlines.forget(RequestId(f"r{serial}"))
    assert len(deadlines._heap) < 200
    assert len(deadlines.due(1e9)) == 10


def test_callers_can_be_counted_while_they_come_and_go() -> None:
    """Metrics are read in another thread."""
    backlog, done, switch_s = Backlog(), threading.Event(), sys.getswitchinterval()
    entries = [replace(tracked(serial), request=request("r", caller=f"caller {serial}")) for serial in range(300)]

    def come_and_go() -> None:
        while not done.is_set():
            for entry in entries:
                backlog.add(entry)
            for entry in entries:
                backlog.remove(entry)

    thread = threading.Thread(target=come_and_go)
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(300):
            assert len(backlog.most_of(10)) <= 10
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(switch_s)
