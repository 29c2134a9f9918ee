"""Background work pauses in proportion to the time it takes, and stops when it is no longer needed."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from services.worker.pipeline.background import Stopped, unhurried


def work(seconds: float) -> None:
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


def test_background_work_pauses_nine_times_as_long_as_it_runs() -> None:
    work(0.05)
    rest = unhurried(lambda: False)
    with ThreadPoolExecutor(1) as another:
        another.submit(pieces, rest).result()


def pieces(rest: Callable[[], None]) -> None:
    rest()
    for _ in range(20):
        work(0.002)
        began_s = time.monotonic()
        rest()
        assert time.monotonic() - began_s >= 0.0175


def test_background_work_stops_between_two_pieces() -> None:
    wanted = [True]
    rest = unhurried(lambda: not wanted[0])
    rest()
    wanted[0] = False
    with pytest.raises(Stopped):
        rest()


def test_background_work_does_not_pause_while_it_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    rests_s: list[float] = []
    monkeypatch.setattr(time, "sleep", rests_s.append)
    hurried = [True]
    rest = unhurried(lambda: False, lambda: hurried[0])
    for _ in range(3):
        rest()
        work(0.005)
    assert not rests_s
    hurried[0] = False
    rest()
    assert len(rests_s) == 1
    assert rests_s[0] >= 0.04
