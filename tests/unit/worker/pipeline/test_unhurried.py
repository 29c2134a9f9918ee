"""Work in the background rests in proportion to what it does, and ends when it is not wanted any more."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from services.worker.pipeline.unhurried import Stopped, unhurried


def work(seconds: float) -> None:
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


def test_it_rests_nine_times_as_long_as_it_works() -> None:
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


def test_it_ends_between_two_pieces() -> None:
    wanted = [True]
    rest = unhurried(lambda: not wanted[0])
    rest()
    wanted[0] = False
    with pytest.raises(Stopped):
        rest()
