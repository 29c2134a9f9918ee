"""The order in which chunks are sent."""

import pytest

from ballast.common.errors import InvariantViolation
from services.worker.links.pacing import BulkSchedule, Grant, Hold, Wire
from services.worker.links.traffic import TrafficClass

KV, CHECKPOINT, PARAMETERS = TrafficClass.KV, TrafficClass.CHECKPOINT, TrafficClass.PARAMETERS


def schedule(patience_chunks: int = 1000) -> BulkSchedule:
    return BulkSchedule(chunk_bytes=10, hold_s=0.005, patience_chunks=patience_chunks)


def send_next(s: BulkSchedule) -> int:
    grant = s.next(0.0, urgent=False)
    assert isinstance(grant, Grant)
    s.sent(grant.transfer, grant.limit_bytes)
    s.check()
    return grant.transfer


def test_higher_class_first_then_equals_alternate() -> None:
    s = schedule()
    s.add(1, PARAMETERS, 20)
    s.add(2, KV, 20)
    s.add(3, KV, 20)
    assert [send_next(s) for _ in range(6)] == [2, 3, 2, 3, 1, 1]
    assert s.next(0.0, urgent=False) is None


def test_a_new_transfer_shares_and_does_not_catch_up() -> None:
    s = schedule()
    s.add(1, KV, 1000)
    for _ in range(50):
        send_next(s)
    s.add(2, KV, 1000)
    turns = [send_next(s) for _ in range(10)]
    assert turns.count(2) == 5


def test_smaller_rank_goes_first_inside_a_class() -> None:
    s = schedule()
    s.add(1, KV, 20, rank=1)
    s.add(2, KV, 20, rank=0)
    assert [send_next(s) for _ in range(4)] == [2, 2, 1, 1]


def test_a_waiting_class_gets_a_chunk_in_the_end() -> None:
    s = schedule(patience_chunks=3)
    s.add(1, KV, 1000)
    s.add(2, PARAMETERS, 1000)
    assert [send_next(s) for _ in range(8)] == [1, 1, 1, 2, 1, 1, 1, 2]


def test_bulk_yields_but_not_forever() -> None:
    s = schedule()
    s.add(1, KV, 100)
    assert s.next(1.0, urgent=True) == Hold(1.005)
    assert s.next(1.004, urgent=True) == Hold(1.005)
    assert s.next(1.005, urgent=True) == Grant(1, 0, 10)
    s.sent(1, 10)
    assert s.next(1.006, urgent=True) == Hold(1.011), "after one chunk, bulk yields again"
    assert s.next(1.007, urgent=False) == Grant(1, 10, 10)


def test_part_of_a_grant_may_be_used() -> None:
    s = schedule()
    s.add(1, KV, 15)
    assert not s.sent(1, 7)
    assert s.next(0.0, urgent=False) == Grant(1, 7, 8)
    assert s.sent(1, 8)
    assert 1 not in s


def test_a_moved_transfer_continues_where_it_was() -> None:
    s = schedule()
    s.add(1, PARAMETERS, 30)
    send_next(s)
    s.add(2, CHECKPOINT, 10)
    assert s.reprioritise(1, KV)
    assert s.next(0.0, urgent=False) == Grant(1, 10, 10)
    assert not s.reprioritise(9, KV)
    s.check()


def test_more_bytes_than_queued_cannot_be_sent() -> None:
    s = schedule()
    s.add(1, KV, 5)
    with pytest.raises(InvariantViolation):
        s.sent(1, 6)
    with pytest.raises(InvariantViolation):
        s.add(1, KV, 5)


def bulk(wire: Wire, size_bytes: int, at_s: float, since_s: float | None = None) -> float | None:
    return wire.take(size_bytes, urgent=False, since_s=at_s if since_s is None else since_s, at_s=at_s)


def test_a_wire_passes_its_rate_and_accumulates_no_idle_time() -> None:
    wire = Wire(100.0)
    assert bulk(wire, 50, 10.0) == 10.5
    assert bulk(wire, 50, 10.1) is None, "the first chunk is still on the wire"
    assert bulk(wire, 50, 10.5) == 11.0
    assert bulk(wire, 100, 20.0) == 21.0


def test_a_wire_with_a_queue_does_not_pause_for_a_late_thread() -> None:
    wire = Wire(100.0)
    assert bulk(wire, 50, 10.0) == 10.5
    assert bulk(wire, 50, 10.52, since_s=10.1) == 11.0
    assert bulk(wire, 50, 19.0, since_s=10.1) == 19.45, "at most CATCH_UP_S of the delay is made up for"


def test_bulk_does_not_precede_a_waiting_urgent_message() -> None:
    wire = Wire(100.0)
    assert bulk(wire, 100, 10.0) == 11.0
    wire.urgent_waits()
    assert bulk(wire, 100, 11.0) is None
    assert wire.take(10, urgent=True, since_s=10.2, at_s=11.02) == 11.1
    assert bulk(wire, 100, 11.1) == 12.1


def test_outside_urgent_phases_bulk_takes_a_free_wire_before_a_message() -> None:
    wire = Wire(100.0, urgent_first=False)
    wire.urgent_waits()
    assert bulk(wire, 100, 10.0) == 11.0
    assert wire.take(10, urgent=True, since_s=10.0, at_s=10.5) is None
    assert wire.take(10, urgent=True, since_s=10.0, at_s=11.0) == 11.1


def test_an_urgent_message_that_stops_waiting_releases_bulk() -> None:
    wire = Wire(100.0)
    wire.urgent_waits()
    wire.urgent_goes()
    assert bulk(wire, 100, 10.0) == 11.0
    with pytest.raises(InvariantViolation):
        wire.urgent_goes()


def test_the_schedule_reports_classes_above_parameters() -> None:
    s = schedule()
    s.add(1, PARAMETERS, 30)
    assert not s.has_above_parameters
    s.add(2, CHECKPOINT, 10)
    assert s.has_above_parameters
    s.remove(2)
    assert not s.has_above_parameters
