import pytest

from services.worker.core.batch import Batch, Slice
from services.worker.pipeline.stage_clock import SPANS, StageClock
from services.worker.pipeline.wire import batch_from_bytes, batch_to_bytes


def batch(step_id: int, quiet_s: float = 0.0) -> Batch:
    return Batch(step_id, (), (), (Slice(1, 0, (5, 6, 7), False),), quiet_s)


def test_the_time_between_two_batches_is_a_bubble() -> None:
    clock = StageClock()
    clock.ran(batch(1), 4, 10.0, 13.0)
    clock.ran(batch(2), 4, 14.0, 16.0)
    times = clock.times
    assert (times.busy_s, times.idle_s, times.steps) == (5.0, 1.0, 2)
    assert times.bubble_fraction == pytest.approx(1 / 6)


def test_without_work_no_stage_counts_as_idle() -> None:
    leader, follower = StageClock(), StageClock()
    leader.note_work(0.0, has_work=True)
    leader.ran(batch(1, leader.take_quiet_s()), 4, 0.0, 1.0)
    follower.ran(batch(1), 4, 101.0, 102.0)
    leader.note_work(2.2, has_work=False)
    leader.note_work(2.5, has_work=False)
    leader.note_work(9.0, has_work=True)
    second = batch_from_bytes(batch_to_bytes(batch(2, leader.take_quiet_s())))
    assert second.quiet_s == pytest.approx(6.8)
    leader.ran(second, 4, 9.1, 10.0)
    follower.ran(second, 4, 110.0, 111.0)
    assert leader.times.idle_s == pytest.approx(9.1 - 1.0 - 6.8)
    assert follower.times.idle_s == pytest.approx(110.0 - 102.0 - 6.8)
    assert leader.take_quiet_s() == 0.0


def test_network_waits_count_only_while_the_stage_is_idle() -> None:
    clock = StageClock()
    clock.received(batch(1), 4, 3.0, 2.0)  # before the first batch, no waiting time is known
    clock.ran(batch(1), 4, 3.0, 5.0)
    clock.received(batch(2), 4, 4.0, 3.0)  # received while the stage was busy
    clock.ran(batch(2), 4, 5.0, 6.0)
    clock.received(batch(3), 4, 8.0, 3.0)
    clock.ran(batch(3), 4, 8.0, 9.0)
    assert clock.times.network_s == pytest.approx(2.0)
    assert clock.times.idle_s == pytest.approx(2.0)


def test_a_change_of_layout_is_not_a_bubble() -> None:
    clock = StageClock()
    clock.ran(batch(1), 4, 0.0, 1.0)
    clock.note_work(1.0, has_work=False)
    clock.begin_layout()
    clock.note_work(7.0, has_work=True)
    assert clock.take_quiet_s() == 0.0
    clock.note_transition(2.0, 5, "exchanging")
    clock.ran(batch(2), 5, 8.0, 9.0)
    assert clock.times.idle_s == 0.0


def test_the_window_is_bounded_and_records_events() -> None:
    clock = StageClock()
    for step in range(SPANS):
        clock.ran(batch(step), 4, float(step), step + 0.5)
    clock.sent(batch(7), 4, 1.0, 1.25)
    clock.note_transition(2.0, 5, "prepared")
    spans = clock.spans()
    assert len(spans) == SPANS
    assert [(s.kind, s.epoch, s.step_id, s.token_count, s.what) for s in spans[-3:]] == [
        ("run", 4, SPANS - 1, 3, ""),
        ("send", 4, 7, 3, ""),
        ("transition", 5, 0, 0, "prepared"),
    ]
    assert clock.times.send_s == 0.25
