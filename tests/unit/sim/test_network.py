"""Transfers at 100 bytes/s between hosts and 1,000 within one, with a latency of 0.5 s."""

import pytest

from sim.clock import Clock
from sim.network import Bulk, Network, NetworkEndpoint


class Net:
    def __init__(self, *, coordinated: bool = True) -> None:
        self.clock = Clock()
        self.network = Network(self.clock, latency_s=0.5, chunk_bytes=10.0, coordinated=coordinated)
        for name, host in (("a", 0), ("b", 1), ("c", 2), ("d", 2)):
            self.network.add(NetworkEndpoint(name, host, 100.0, 1000.0))
        self.network.add_source("disk", 50.0)
        self.seen: dict[str, float] = {}

    def transfer(self, source: str, to: str, size_bytes: int, kind: Bulk = Bulk.KV, name: str = "") -> None:
        key = name or f"{source}{to}"
        self.network.transfer(source, to, size_bytes, kind, lambda: self.arrived(key))

    def arrived(self, key: str) -> None:
        self.seen[key] = self.clock.now_s

    def run(self) -> dict[str, float]:
        while self.clock.step():
            pass
        return self.seen


def test_a_lone_transfer_has_the_cards_full_rate() -> None:
    net = Net()
    net.transfer("a", "b", 1000)
    assert net.run() == {"ab": pytest.approx(10.5)}


def test_both_directions_share_a_card() -> None:
    net = Net()
    net.transfer("a", "b", 1000)
    net.transfer("b", "a", 1000)
    assert net.run() == {"ab": pytest.approx(20.5), "ba": pytest.approx(20.5)}


def test_transfers_share_the_card_while_they_overlap() -> None:
    net = Net()
    net.transfer("a", "b", 1000)
    net.clock.at(5.0, b"later", lambda: net.transfer("c", "b", 250))
    # Alone until 5 s, then at half the rate: 250 bytes each until 10 s, and the last 250 alone.
    assert net.run() == {"cb": pytest.approx(10.5), "ab": pytest.approx(13.0)}


def test_within_a_host_directions_do_not_share_and_the_card_is_not_touched() -> None:
    net = Net()
    net.transfer("c", "d", 1000)
    net.transfer("d", "c", 1000)
    net.transfer("c", "a", 1000)
    assert net.run() == {"cd": pytest.approx(1.5), "dc": pytest.approx(1.5), "ca": pytest.approx(10.5)}


def test_kv_precedes_parameters_in_progress() -> None:
    net = Net()
    net.transfer("a", "b", 1000, Bulk.PARAMETERS, "layer")
    net.clock.at(4.0, b"kv", lambda: net.transfer("a", "b", 300, Bulk.KV, "kv"))
    assert net.run() == {"kv": pytest.approx(7.5), "layer": pytest.approx(13.5)}
    assert net.network.bulk_bytes == {Bulk.KV: 300, Bulk.PARAMETERS: 1000}


def test_transfers_of_a_pair_run_one_after_the_other() -> None:
    net = Net()
    net.transfer("a", "b", 100, name="first")
    net.transfer("a", "b", 100, name="second")
    assert net.run() == {"first": pytest.approx(1.5), "second": pytest.approx(2.5)}


def test_a_disk_is_shared() -> None:
    net = Net()
    net.transfer("disk", "a", 100)
    net.transfer("disk", "b", 100)
    assert net.run() == {"diska": pytest.approx(4.5), "diskb": pytest.approx(4.5)}


def test_an_urgent_message_waits_for_one_chunk_and_stays_in_order() -> None:
    net = Net()
    net.network.send("a", "b", 50, b"m", lambda: net.arrived("alone"))
    net.clock.at(10.0, b"x", lambda: net.transfer("a", "b", 10_000, name="bulk"))
    net.clock.at(11.0, b"x", lambda: net.network.send("a", "b", 50, b"m", lambda: net.arrived("behind")))
    net.clock.at(11.0, b"x", lambda: net.network.send("a", "b", 0, b"m", lambda: net.arrived("small")))
    seen = net.run()
    assert seen["alone"] == pytest.approx(1.0)
    assert seen["behind"] == pytest.approx(11.0 + 0.5 + 0.1 + 0.5)
    assert seen["small"] == seen["behind"]


def test_without_coordination_a_message_waits_for_all_that_is_ahead_of_it() -> None:
    net = Net(coordinated=False)
    net.transfer("a", "b", 1000)
    net.transfer("a", "b", 500, name="second")
    net.network.send("a", "b", 100, b"", lambda: net.arrived("message"))
    net.network.send("b", "a", 100, b"", lambda: net.arrived("other way"))
    seen = net.run()
    assert seen["message"] == pytest.approx(15.0 + 1.0 + 0.5)
    assert seen["other way"] == pytest.approx(1.0 + 0.5)
