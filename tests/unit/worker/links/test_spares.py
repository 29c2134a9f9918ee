"""Spare links between two planes of one process: adopted by a plan, replaced when dead, given back when idle."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from ballast.common.errors import DeadlineExceeded
from services.worker.links.config import TransportConfig
from services.worker.links.link import Link, LinkState
from services.worker.links.plane import DataPlane
from services.worker.links.traffic import TrafficClass
from tests.unit.worker.links.processes import CONFIG
from tests.unit.worker.links.recorder import Recorder

_BOTH = (("w1", "w2"), ("w2", "w1"))


class Pair:
    """w1, in whose lobby they meet, and w2, who calls."""

    def __init__(self, stack: ExitStack, **settings: Any) -> None:
        self.recorders = {"w1": Recorder(), "w2": Recorder()}
        given: dict[str, Any] = {**CONFIG, "connect_timeout_s": 40.0, "close_timeout_s": 10.0, **settings}
        config = TransportConfig(**given)
        self.planes = {w: DataPlane(w, recorder, config, "127.0.0.1") for w, recorder in self.recorders.items()}
        for plane in self.planes.values():
            stack.callback(plane.close)

    def name(self) -> None:
        addresses = {w: plane.store_address for w, plane in self.planes.items()}
        for plane in self.planes.values():
            plane.name_partners(addresses)

    def spares(self) -> list[Link]:
        found = [self.planes[w]._spares.take(peer, 0.0) for w, peer in _BOTH]
        return [link for link in found if link is not None]

    def warm(self) -> list[Link]:
        self.name()
        return until(lambda: found if len(found := self.spares()) == 2 else None)

    def connect(self, epochs: tuple[int, int], timeout_s: float = 40.0) -> list[Link]:
        with ThreadPoolExecutor(2) as pool:
            asked = [
                pool.submit(self.planes[w].connect, peer, self.planes[peer].store_address, epoch, timeout_s)
                for (w, peer), epoch in zip(_BOTH, epochs, strict=True)
            ]
        return [future.result() for future in asked]


def until(found: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    deadline_s = time.monotonic() + timeout_s
    while not (value := found()):
        if time.monotonic() > deadline_s:
            raise TimeoutError
        time.sleep(0.01)
    return value


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_a_plan_takes_the_spare_and_what_is_said_on_it_belongs_to_the_plans_epoch(stack: ExitStack) -> None:
    pair = Pair(stack)
    spares = pair.warm()
    assert all(link.is_spare and link.epoch == 0 for link in spares)
    links = pair.connect((7, 7))
    assert links == spares
    assert [(link.epoch, link.is_spare) for link in links] == [(7, False)] * 2
    links[0].send(TrafficClass.CONTROL, 0, meta=b"hello")
    pair.recorders["w2"].wait("messages", 1)
    assert pair.planes["w1"].link("w2", 7) is links[0]
    assert pair.spares() == []
    pair.planes["w1"].retire(8)
    until(lambda: links[1].state is LinkState.CLOSED)


def test_named_again_there_is_a_spare_beside_the_link_in_force(stack: ExitStack) -> None:
    pair = Pair(stack)
    pair.warm()
    first = pair.connect((7, 7))
    second = pair.warm()
    assert not set(first) & set(second)
    assert pair.connect((8, 8)) == second


def test_naming_again_and_again_keeps_the_same_spare(stack: ExitStack) -> None:
    pair = Pair(stack)
    spares = pair.warm()
    for _ in range(5):
        pair.name()
    assert pair.warm() == spares


def test_a_plan_that_only_one_side_has_heard_of_does_not_spoil_the_spare_for_the_next(stack: ExitStack) -> None:
    pair = Pair(stack, adopt_timeout_s=20.0)
    spares = pair.warm()
    with ThreadPoolExecutor(1) as pool:
        lonely = pool.submit(pair.planes["w1"].connect, "w2", "", 7, 4.0)
        until(lambda: spares[0].asked_epoch == 7)
        assert pair.connect((8, 8)) == spares
        with pytest.raises(DeadlineExceeded):
            lonely.result()


def test_a_spare_that_comes_up_between_the_two_sides_looks_is_taken_by_both(stack: ExitStack) -> None:
    """w1 finds none and waits in its lobby; w2 finds the one that has come up since."""
    pair = Pair(stack)
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(pair.planes["w1"].connect, "w2", "", 7, 40.0)
        until(lambda: ("w2", 7) in pair.planes["w1"]._connecting)
        time.sleep(0.2)
        spares = pair.warm()
        late = pair.planes["w2"].connect("w1", pair.planes["w1"].store_address, 7, 40.0)
        assert [early.result(), late] == spares
    assert [(link.epoch, link.is_spare) for link in spares] == [(7, False)] * 2


def test_if_the_peer_does_not_take_the_spare_a_link_is_made_from_nothing(stack: ExitStack) -> None:
    pair = Pair(stack, adopt_timeout_s=0.2)
    spares = pair.warm()
    pair.planes["w2"]._spares.remove(spares[1])  # as if it had none
    links = pair.connect((7, 7))
    assert not set(links) & set(spares)
    assert [link.state for link in links] == [LinkState.UP] * 2
    until(lambda: spares[0].state is LinkState.CLOSED)
    spares[1].close()


def test_the_side_that_decides_gives_a_spare_up_and_the_other_one_does_not_take_it(stack: ExitStack) -> None:
    """However late it comes: here behind the end of the other's patience and before it has heard of that."""
    pair = Pair(stack)
    spares = pair.warm()
    assert not spares[0].adopt(7, 0.05, decides=True)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(spares[1].adopt, 7, 60.0, decides=False)
        until(lambda: spares[0]._peer_asked == 7)
        assert not late.done()
        spares[0].retire()
        spares[0].begin_close()
        assert not late.result()
    assert spares[1].is_spare  # so nobody misses it
    assert set(pair.connect((8, 8))).isdisjoint(spares)


def test_a_link_of_one_epoch_is_none_for_another(stack: ExitStack) -> None:
    """The peer has come back from a plan that this side has taken up."""
    pair = Pair(stack)
    links = pair.warm()
    pair.connect((7, 7))
    assert not links[0].adopt(9, 0.1, decides=True)
    links[1]._adoption_asked(9)
    until(lambda: links[0].state is LinkState.BROKEN)


def test_a_spare_that_a_plan_is_taking_is_not_closed_for_a_newer_one(stack: ExitStack) -> None:
    """Its caller has taken it for the plan and been told to make the next one, before the other side heard of it."""
    pair = Pair(stack, adopt_timeout_s=20.0)
    old = pair.warm()
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(pair.planes["w2"].connect, "w1", pair.planes["w1"].store_address, 7, 40.0)
        until(lambda: old[0]._peer_asked == 7)
        pair.planes["w2"]._spares.remove(old[1])
        pair.planes["w2"].name_partners({"w1": pair.planes["w1"].store_address})
        until(lambda: pair.spares() and pair.spares()[0] is not old[0])
        assert old[0].adopt(7, 60.0, decides=True)
        assert early.result() is old[1]
    pair.planes["w1"]._links["w2", 7] = old[0]  # for it to be closed


def test_a_dead_spare_is_noticed_and_replaced(stack: ExitStack) -> None:
    pair = Pair(stack)
    spares = pair.warm()
    spares[0].give_up("dead")
    until(lambda: spares[1].state is not LinkState.UP)
    fresh = pair.warm()
    assert not set(fresh) & set(spares)
    assert pair.connect((7, 7)) == fresh


def test_a_spare_that_nobody_names_is_given_back_with_its_threads_and_sockets(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.worker.links.spares._SWEEP_S", 0.05)
    pair = Pair(stack, spare_idle_s=0.5)
    spares = pair.warm()
    until(lambda: all(link.state is LinkState.CLOSED for link in spares))
    until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("link-w")])
    assert pair.spares() == []


def test_no_more_spares_than_the_bound(stack: ExitStack) -> None:
    pair = Pair(stack, max_spares=0)
    pair.name()
    time.sleep(0.3)
    assert pair.spares() == []
    assert [link.state for link in pair.connect((7, 7))] == [LinkState.UP] * 2
