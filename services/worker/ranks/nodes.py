"""Ranks on other hosts ("nodes"). A process on each (`follow`) connects to the first host and starts its ranks.

    caller  hello      its rank and lane; what its instance is; a nonce
    host    challenge  a nonce
    caller  proof
    host    verdict    why it is refused, or nothing; with its proof

Proofs are those of `links.handshake`, over all lines so far. Both sides prove that they have the secret, because
messages are pickled. Silent hosts are noticed by the kernels, which probe idle connections.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import ballast
from ballast.common.addresses import is_ipv6, split_address
from ballast.common.errors import ConfigError
from ballast.service.logs import get_logger
from services.worker.links.handshake import (
    challenge_line,
    is_proof,
    left_s,
    parse_line,
    parse_proof,
    proof_line,
    proof_of,
    read_line,
)

CONTROL, MEMORY, LAYERS = LANES = ("control", "memory", "layers")
SILENT_S = 11.0  # silence of a host after which its connections break: the sum of the following
_IDLE_S, _PROBE_S, _PROBES = 5, 2, 3
_GREET_S = 5.0
_RETRY_S = 0.3
_SAY_EVERY_S = 20.0
_GATHER_S = 1800.0  # time limit for the other hosts to connect


@dataclass(frozen=True, slots=True)
class Nodes:
    """The hosts of one instance: equal numbers of ranks, in order."""

    count: int
    ranks: int  # number of ranks of all hosts together
    address: str  # HOST:PORT of the first host
    secret: bytes | None = field(default=None, repr=False)
    own_host: str | None = None  # address from which this host connects to the first one; None: the system chooses

    @property
    def share(self) -> int:
        """Number of ranks on each host."""
        return self.ranks // self.count

    def of(self, node: int) -> range:
        """Ranks of host `node`."""
        return range(node * self.share, (node + 1) * self.share)

    @property
    def host_port(self) -> tuple[str, int]:
        return split_address(self.address)


@dataclass(slots=True)
class FarRank:
    """A rank on another host, with its connections by lane."""

    session: str
    device: str
    lanes: dict[str, socket.socket] = field(default_factory=dict[str, socket.socket])

    @property
    def host(self) -> str:
        return str(self.lanes[CONTROL].getpeername()[0])

    @property
    def from_host(self) -> str:
        """Address of this host in the network between both."""
        return str(self.lanes[CONTROL].getsockname()[0])

    def close(self) -> None:
        for connection in self.lanes.values():
            connection.close()


@dataclass(frozen=True, slots=True)
class _RankHello:
    rank: int
    lane: str
    session: str  # identifies the calling process
    device: str
    ranks: int
    nodes: int
    version: str = ballast.__version__


class NodeListener:
    """Accepts the ranks of other hosts on the first host, while its instance starts."""

    def __init__(self, nodes: Nodes) -> None:
        """Listen on the first host's address.

        Raises:
            ConfigError: the address is not this host's, or in use.
        """
        self._nodes = nodes
        try:
            family = socket.AF_INET6 if is_ipv6(nodes.host_port[0]) else socket.AF_INET
            self._listener = socket.create_server(nodes.host_port, family=family, backlog=256)
        except OSError as error:
            why = f"cannot listen on {nodes.address}: {error.strerror or error}. It must be the first host's"
            raise ConfigError("worker.dist_init_addr", why) from error

    def gather(self, within_s: float = _GATHER_S) -> dict[int, FarRank]:
        """Wait for all ranks of other hosts.

        Raises:
            ConfigError: some ranks have not connected.
        """
        wanted = [rank for node in range(1, self._nodes.count) for rank in self._nodes.of(node)]
        found: dict[int, FarRank] = {}
        until_s = say_at_s = time.monotonic()
        until_s += within_s
        with self._listener, contextlib.ExitStack() as undo:
            undo.callback(lambda: [each.close() for each in found.values()])
            while missing := [r for r in wanted if r not in found or len(found[r].lanes) < len(LANES)]:
                now_s = time.monotonic()
                if now_s >= until_s:
                    raise ConfigError(
                        "worker.nnodes", f"ranks {missing} of other hosts have not connected within {within_s:.0f} s"
                    )
                if now_s >= say_at_s:
                    get_logger().info("waiting for the ranks of other hosts", ranks=missing, at=self._nodes.address)
                    say_at_s = now_s + _SAY_EVERY_S
                self._listener.settimeout(min(until_s, say_at_s) - now_s + 0.001)
                with contextlib.suppress(TimeoutError):
                    connection, _ = self._listener.accept()
                    self._greet(connection, found, wanted)
            undo.pop_all()
        return found

    def _greet(self, connection: socket.socket, found: dict[int, FarRank], wanted: list[int]) -> None:
        try:
            hello, refused = self._heard(connection, wanted)
        except (OSError, ValueError, TypeError) as error:  # a port scanner, or a caller without the secret
            get_logger().warning("a caller is no rank of this instance", why=str(error) or type(error).__name__)
            connection.close()
            return
        if refused:
            get_logger().warning("a rank of another host is refused", rank=hello.rank, why=refused)
            connection.close()
            return
        if hello.rank in found and found[hello.rank].session != hello.session:
            found.pop(hello.rank).close()  # the rank has been restarted
        far = found.setdefault(hello.rank, FarRank(hello.session, hello.device))
        far.lanes[hello.lane] = _probed(connection)

    def _heard(self, connection: socket.socket, wanted: list[int]) -> tuple[_RankHello, str]:
        until_s, secret = time.monotonic() + _GREET_S, self._nodes.secret
        said = [read_line(connection, until_s), challenge_line()]
        connection.settimeout(left_s(until_s))
        connection.sendall(said[1])
        proof = read_line(connection, until_s)
        hello = _RankHello(**cast(Any, parse_line(said[0]).get("hello")))  # a TypeError unless it is a dictionary
        refused = "another --cluster-secret-file, or none"
        if is_proof(parse_proof(proof), secret, "rank", *said):
            refused = self._why_refused(hello, wanted)
        said += [proof, _json_line({"refused": refused})]
        connection.sendall(said[-1] + proof_line(proof_of(secret, "first rank", *said)))
        return hello, refused

    def _why_refused(self, hello: _RankHello, wanted: list[int]) -> str:
        mine = {"version": ballast.__version__, "ranks": self._nodes.ranks, "nodes": self._nodes.count}
        flags = {"version": "version", "ranks": "--tensor-parallel-size", "nodes": "--nnodes"}
        for name, here in mine.items():
            if (there := getattr(hello, name)) != here:
                return f"{flags[name]} is {there} there, but {here} on the first host"
        if hello.rank not in wanted or hello.lane not in LANES:
            return f"rank {hello.rank} is not among those of other hosts ({wanted}): check --node-rank"
        return ""


def call(nodes: Nodes, rank: int, lane: str, session: str, device: str, stop: threading.Event) -> socket.socket | None:
    """Connect to the first host as soon as it listens. None: `stop` was set earlier.

    Raises:
        ConfigError: the first host has refused this rank, or does not have the cluster's secret.
    """
    hello = asdict(_RankHello(rank, lane, session, device, nodes.ranks, nodes.count))
    source = None if nodes.own_host is None else (nodes.own_host, 0)
    say_at_s = time.monotonic() + _SAY_EVERY_S
    while not stop.is_set():
        connection: socket.socket | None = None
        try:
            connection = socket.create_connection(nodes.host_port, _GREET_S, source)
            line = _json_line({"hello": hello, "nonce": secrets.token_hex(16)})
            return _introduced(connection, nodes.secret, line)
        except (OSError, ValueError) as error:
            if connection is not None:
                connection.close()
            if time.monotonic() >= say_at_s:
                get_logger().info("waiting for the first host", at=nodes.address, why=str(error))
                say_at_s = time.monotonic() + _SAY_EVERY_S
        except ConfigError:
            if connection is not None:
                connection.close()
            raise
        stop.wait(_RETRY_S)
    return None


def _introduced(connection: socket.socket, secret: bytes | None, hello: bytes) -> socket.socket:
    until_s = time.monotonic() + _GREET_S
    connection.sendall(hello)
    said = [hello, read_line(connection, until_s)]
    said.append(proof_line(proof_of(secret, "rank", *said)))
    connection.sendall(said[-1])
    said.append(read_line(connection, until_s))
    if not is_proof(parse_proof(read_line(connection, until_s)), secret, "first rank", *said):
        raise ConfigError("worker.cluster_secret_file", "the first host has another secret")
    if refused := parse_line(said[-1]).get("refused"):
        raise ConfigError("worker.node_rank", f"refused by the first host: {refused}")
    return _probed(connection)


def follow(nodes: Nodes, node: int, devices: Sequence[str], folder: Path, stop: threading.Event) -> None:
    """Run this host's ranks until `stop` is set. When their instance has ended, wait for its next start.

    Raises:
        ConfigError: the first host has refused them.
    """
    while not stop.is_set():
        session, ranks = secrets.token_hex(8), list[_FollowingRank]()
        try:
            for rank, device in zip(nodes.of(node), devices, strict=True):
                lanes = list[socket.socket]()
                for lane in LANES:
                    if (lane_to := call(nodes, rank, lane, session, device, stop)) is None:
                        return
                    lanes.append(lane_to)
                ranks.append(_FollowingRank(lanes, folder))
            get_logger().info("ranks started", ranks=list(nodes.of(node)), first_host=nodes.address)
            while not stop.wait(_RETRY_S) and all(rank.process.poll() is None for rank in ranks):
                pass
            if not stop.is_set():
                get_logger().info("the instance has ended: waiting for its next start", first_host=nodes.address)
        finally:
            for rank in ranks:
                rank.close()


class _FollowingRank:
    """The process of a rank on this host."""

    def __init__(self, lanes: Sequence[socket.socket], folder: Path) -> None:
        self._tether, theirs = socket.socketpair()
        files = [each.fileno() for each in (*lanes, theirs)]
        command = [sys.executable, "-m", "services.worker.ranks", *map(str, files), str(folder)]
        try:
            self.process = subprocess.Popen(command, pass_fds=files, stdin=subprocess.DEVNULL, stdout=sys.__stderr__)
        finally:
            for each in (*lanes, theirs):
                each.close()

    def close(self) -> None:
        self._tether.close()  # the rank exits when its tether closes
        try:
            self.process.wait(_GREET_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _probed(connection: socket.socket) -> socket.socket:
    """Set options with which the kernel breaks the connection once the other host has been silent for `SILENT_S`."""
    for option, value in (
        (socket.TCP_KEEPIDLE, _IDLE_S),
        (socket.TCP_KEEPINTVL, _PROBE_S),
        (socket.TCP_KEEPCNT, _PROBES),
        (socket.TCP_USER_TIMEOUT, int(SILENT_S * 1000)),
        (socket.TCP_NODELAY, 1),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.settimeout(None)
    return connection


def _json_line(said: Mapping[str, object]) -> bytes:
    return json.dumps(said).encode() + b"\n"
