from collections.abc import Callable

import pytest

from ballast.common.errors import InvariantViolation
from sim.clock import Clock


def note(seen: list[str], what: str) -> Callable[[], None]:
    return lambda: seen.append(what)


def test_events_happen_in_order_of_time_then_of_scheduling() -> None:
    clock, seen = Clock(), list[str]()
    for at_s, what in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        clock.at(at_s, what.encode(), note(seen, what))
    while clock.step():
        pass
    assert seen == ["a", "b", "c"]
    assert (clock.now_s, clock.event_count) == (2.0, 3)


def test_scheduling_in_the_past_is_refused() -> None:
    clock = Clock()
    clock.at(1.0, b"x", lambda: None)
    clock.step()
    with pytest.raises(InvariantViolation, match=r"scheduled for 0\.5"):
        clock.at(0.5, b"late", lambda: None)


def test_the_hash_distinguishes_instants_and_labels() -> None:
    def run(*events: tuple[float, bytes]) -> str:
        clock = Clock()
        for at_s, label in events:
            clock.at(at_s, label, lambda: None)
        while clock.step():
            pass
        return clock.trace_hash

    same = run((1.0, b"a"), (2.0, b"b"))
    assert run((1.0, b"a"), (2.0, b"b")) == same
    assert len({same, run((1.0, b"b"), (2.0, b"a")), run((1.0, b"a"), (2.0000001, b"b")), run((1.0, b"a"))}) == 4


def test_every_starts_at_the_given_time_and_repeats() -> None:
    clock, seen = Clock(), list[float]()
    clock.every(0.5, b"tick", lambda: seen.append(clock.now_s), first_s=0.25)
    for _ in range(3):
        clock.step()
    assert seen == [0.25, 0.75, 1.25]
