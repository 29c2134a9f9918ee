"""The clock of an emulated GPU on a machine whose threads wake up late."""

import time

import pytest

from services.worker.emulation.clock import MOST_S, GpuClock


def test_a_late_start_is_compensated(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = machine(monkeypatch, late_s=0.004)
    clock = GpuClock()
    clock.run(0.1, now_s[0], None)
    for _ in range(9):
        clock.run(0.1, now_s[0], None)
    assert now_s[0] == pytest.approx(101.004), "only the last step may end late"
    assert clock.due_s == pytest.approx(1.0)
    assert clock.late_s == pytest.approx(0.036)
    assert not clock.lost_s


def test_a_step_begins_when_its_message_would_have_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = machine(monkeypatch, late_s=0.0)
    clock = GpuClock()
    clock.run(0.1, now_s[0], 99.99)
    assert now_s[0] == pytest.approx(100.09)
    now_s[0] = 100.11
    clock.heard(100.10)
    clock.run(0.1, now_s[0], None)
    assert now_s[0] == pytest.approx(100.20)


def test_long_delays_are_lost_time_and_pauses_are_not_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = machine(monkeypatch, late_s=0.05)
    clock = GpuClock()
    clock.run(0.1, now_s[0], None)
    assert clock.lost_s == pytest.approx(0.05 - MOST_S)
    now_s[0] += 10.0
    clock.run(0.1, now_s[0], None)
    assert now_s[0] == pytest.approx(110.3)
    assert not clock.late_s


def machine(monkeypatch: pytest.MonkeyPatch, late_s: float) -> list[float]:
    """Replaces time with a clock on which every sleep takes `late_s` too long. Returns a list that holds the current
    time.
    """
    now_s = [100.0]

    def sleep(seconds: float) -> None:
        now_s[0] += seconds + late_s

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    return now_s
