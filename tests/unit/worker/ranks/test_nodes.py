"""The first host and the ranks on other hosts find each other, over real sockets on a loopback address per host."""

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from ballast.common.errors import ConfigError
from services.worker.engine.load import Engine
from services.worker.ranks import group as group_module
from services.worker.ranks import nodes as module
from services.worker.ranks.channel import RankChannel, RankLog, RankLost, Start
from services.worker.ranks.group import _store_at, meet, open_store
from services.worker.ranks.nodes import CONTROL, LANES, SILENT_S, FarRank, NodeListener, Nodes, call
from tools.local.ports import free_ports

SECRET = b"a secret of the cluster"
WITHIN_S = 10.0


@pytest.fixture
def nodes() -> Nodes:
    [port] = free_ports(1, "127.0.0.2")
    return Nodes(2, 4, f"127.0.0.2:{port}", SECRET, own_host="127.0.0.3")


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def load_nothing() -> Engine:
    raise AssertionError


def called(nodes: Nodes, rank: int, session: str, lanes: tuple[str, ...] = LANES) -> list[socket.socket]:
    stop = threading.Event()
    found = [call(nodes, rank, lane, session, f"cuda:{rank - 2}", stop) for lane in lanes]
    return [each for each in found if each is not None]


def test_ranks_of_a_host_are_distinguished(nodes: Nodes) -> None:
    assert [list(nodes.of(node)) for node in range(2)] == [[0, 1], [2, 3]]
    assert replace(nodes, address="[::1]:29500").host_port == ("::1", 29500)
    assert SECRET.decode() not in repr(nodes)


def test_the_first_host_may_have_an_ipv6_address(pool: ThreadPoolExecutor) -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as free:
            port = free.getsockname()[1]
    except OSError:
        pytest.skip("no IPv6 here")
    nodes = Nodes(2, 2, f"[::1]:{port}", SECRET)
    listener = NodeListener(nodes)
    calling = pool.submit(called, nodes, 1, "a")
    far = listener.gather(WITHIN_S)[1]
    store, meeting = open_store(far.from_host)
    assert (far.host, far.from_host, meeting.rpartition(":")[0]) == ("::1", "::1", "::1")
    store.set("met", "here")
    assert _store_at(Start(1, ["cpu"] * 2, 1, meeting, "::1", RankLog(), load_nothing)).get("met") == b"here"
    for each in (*calling.result(WITHIN_S), *far.lanes.values()):
        each.close()


def test_the_time_limit_of_tensors_is_for_silence_and_not_for_all_bytes() -> None:
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
    size = 40 << 10

    def read_slowly() -> int:
        found = 0
        while found < size:
            time.sleep(0.05)
            found += len(theirs.recv(2 << 10))
        return found

    with ours, theirs, ThreadPoolExecutor(1) as one:
        reading = one.submit(read_slowly)
        RankChannel(ours, "rank 1").send_tensors([torch.zeros(size, dtype=torch.uint8)], 0.5)
        assert reading.result(WITHIN_S) == size


def test_ranks_that_load_wait_for_each_other_as_long_as_loading_may_take(tmp_path: Path) -> None:
    """The self-test of a model sums over the ranks as soon as a rank has loaded its share."""

    def load_and_sum(rank: int) -> float:
        group = meet(Start(rank, ["cpu"] * 2, 2, str(tmp_path / "ranks"), "127.0.0.1", RankLog(), load_nothing))
        time.sleep(1.5 * rank)
        group.sum(told := torch.ones(1))
        group.loading = False
        if not rank:
            with pytest.raises(RankLost, match="left alone"):
                group.sum(told)
        return float(told)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as threads:
        patch.setattr(group_module, "_TOGETHER_S", 0.5)
        assert list(threads.map(load_and_sum, range(2))) == [2.0, 2.0]


def test_all_ranks_of_other_hosts_are_found_in_any_order(nodes: Nodes, pool: ThreadPoolExecutor) -> None:
    calls = [pool.submit(called, nodes, rank, "a") for rank in (3, 2)]  # before the first host listens
    time.sleep(0.1)
    far = NodeListener(nodes).gather(WITHIN_S)
    assert {rank: (each.device, each.host, each.from_host, [*each.lanes]) for rank, each in far.items()} == {
        2: ("cuda:0", "127.0.0.3", "127.0.0.2", [*LANES]),
        3: ("cuda:1", "127.0.0.3", "127.0.0.2", [*LANES]),
    }
    for made in calls:
        lanes = made.result(WITHIN_S)
        assert len(lanes) == len(LANES)
        for lane in lanes:
            lane.close()
    channel = RankChannel(far[2].lanes[CONTROL], "rank 2")
    deadline_s = time.monotonic() + WITHIN_S
    while not channel.hung_up():  # the rank's process has ended
        assert time.monotonic() < deadline_s
    close(far)


def test_a_restarted_rank_replaces_itself(nodes: Nodes, pool: ThreadPoolExecutor) -> None:
    listener = pool.submit(NodeListener(nodes).gather, WITHIN_S)
    first = called(nodes, 2, "first", LANES[:2])  # this process ends before its last lane is connected
    again, other = called(nodes, 2, "again"), called(nodes, 3, "other")
    far = listener.result(WITHIN_S)
    assert far[2].session == "again"
    assert first[0].recv(1) == b""  # closed
    close(far)
    for each in (*first, *again, *other):
        each.close()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"secret": b"another secret"}, "secret"),
        ({"secret": None}, "secret"),
        ({"ranks": 8}, "--tensor-parallel-size is 8 there, but 4 on the first host"),
        ({"count": 4}, "--nnodes is 4 there, but 2 on the first host"),
    ],
)
def test_a_rank_of_another_instance_is_refused(nodes: Nodes, change: dict[str, object], why: str) -> None:
    other = replace(nodes, **change)  # pyright: ignore[reportArgumentType]
    with ThreadPoolExecutor(1) as pool:
        listener = pool.submit(NodeListener(nodes).gather, 1.0)
        with pytest.raises(ConfigError, match=why):
            called(other, 2, "a")
        with pytest.raises(ConfigError, match=r"ranks \[2, 3\] of other hosts have not connected"):
            listener.result(WITHIN_S)


@pytest.mark.parametrize(("rank", "version"), [(1, ""), (2, "0.0.1")])
def test_a_wrong_number_or_version_is_refused(
    nodes: Nodes, rank: int, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = "is not among those of other hosts" if not version else "version is 0.0.1 there"
    if version:
        monkeypatch.setattr(module, "_RankHello", partial(module._RankHello, version=version))
    with ThreadPoolExecutor(1) as pool:
        listener = pool.submit(NodeListener(nodes).gather, 1.0)
        with pytest.raises(ConfigError, match=why):
            called(nodes, rank, "a")
        with pytest.raises(ConfigError):
            listener.result(WITHIN_S)


def test_callers_with_another_protocol_delay_no_one(nodes: Nodes, pool: ThreadPoolExecutor) -> None:
    listener = pool.submit(NodeListener(nodes).gather, WITHIN_S)
    for said in (b"GET / HTTP/1.1\r\n\r\n", b'{"hello": 1}\n', b"[1]\n", b""):
        with socket.create_connection(nodes.host_port) as stranger:
            stranger.sendall(said)
    lanes = [*called(nodes, 2, "a"), *called(nodes, 3, "a")]
    close(listener.result(WITHIN_S))
    for each in lanes:
        each.close()


def test_listening_on_an_address_of_another_host_is_refused(nodes: Nodes) -> None:
    with pytest.raises(ConfigError, match=r"worker\.dist_init_addr.*first host"):
        NodeListener(replace(nodes, address="192.0.2.1:29500"))


def test_the_kernel_notices_a_silent_host(nodes: Nodes, pool: ThreadPoolExecutor) -> None:
    """The kernel probes the other host, which answers even if its process is busy; without an answer, it closes the
    connection.
    """
    listener = pool.submit(NodeListener(nodes).gather, WITHIN_S)
    lanes = [*called(nodes, 2, "a"), *called(nodes, 3, "a")]
    far = listener.result(WITHIN_S)
    for connection in (*far[2].lanes.values(), *lanes):
        told = [
            connection.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        ]
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert told[0] + told[1] * told[2] <= SILENT_S
        assert told[3] <= SILENT_S * 1000
    close(far)
    for each in lanes:
        each.close()


def close(far: dict[int, FarRank]) -> None:
    for each in far.values():
        each.close()
