"""A black hole around a worker: what it sends, what is sent to it, or both, is lost, and no connection is reset.

It is made by iptables, which takes root, and a network of its own, lest this machine lose its own rules:

    unshare -n sh -c 'ip link set lo up; exec python -m benchmarks.pauses --faults in out both'

Each worker has an effective group of its own, by which the kernel knows the sockets that are the worker's.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence

import psutil

from ballast.common.errors import ConfigError
from tools.local.cluster import LocalCluster, Service, ServiceProcess

_FIRST_GROUP = 7000
_FIRST_DATA_PORT, _MOST_WORKERS = 20_000, 16
_RULE_S = 10.0
_MARK = "1"  # of the connections that the worker takes part in


class HoledCluster(LocalCluster):
    """A cluster around whose workers holes can be."""

    def _spawn(self, service: Service, flags: Sequence[str] = ()) -> ServiceProcess:
        if service != "worker":
            return super()._spawn(service, flags)
        before, worker = os.getegid(), self._started[service]
        os.setegid(_FIRST_GROUP + worker)
        try:
            return super()._spawn(service, [*flags, "--data-port", str(_FIRST_DATA_PORT + worker)])
        finally:
            os.setegid(before)


class Hole:
    """A hole around one worker, there from `open` to `close`; it has to be made before the worker connects to others.

    Args:
        worker: Its number in the cluster.
        lost: "in", what is sent to it; "out", what it sends; or "both".
        links: Only the links between workers; else everything.

    Raises:
        ConfigError: not root, no iptables, or a network that others use.
    """

    def __init__(self, worker: int, lost: str, *, links: bool) -> None:
        if os.geteuid() or shutil.which("iptables") is None:
            raise ConfigError("faults", "black holes take root and iptables; see benchmarks/holes.py")
        if any(stats.isup for name, stats in psutil.net_if_stats().items() if name != "lo"):
            raise ConfigError("faults", "this is no network of its own; `unshare -n` makes one: benchmarks/holes.py")
        group = str(_FIRST_GROUP + worker)
        self._owner = ["-m", "owner", "--gid-owner", group]
        self._others = ["-m", "owner", "!", "--gid-owner", group]
        self._lost, self._links = lost, links
        ports = f"{_FIRST_DATA_PORT}:{_FIRST_DATA_PORT + _MOST_WORKERS - 1}"
        self._only = ["-m", "multiport", "--ports", ports] if links else []
        _iptables("-F")
        _iptables("-t", "mangle", "-F")
        _iptables("-t", "mangle", "-A", "OUTPUT", "-p", "tcp", *self._owner, "-j", "CONNMARK", "--set-mark", _MARK)

    def open(self, process: ServiceProcess) -> None:
        if self._lost in ("out", "both"):
            self._drop(*self._owner, *self._only)
        if self._lost in ("in", "both"):
            self._drop(*self._others, "-m", "connmark", "--mark", _MARK, *self._only)
            if not self._links:  # connections that are new
                found = _family(process.child.pid)
                listening = {c.laddr.port for p in found for c in p.net_connections("tcp4") if c.status == "LISTEN"}
                for port in sorted(listening):
                    self._drop(*self._others, "--dport", str(port))

    def close(self) -> None:
        _iptables("-F")

    @staticmethod
    def _drop(*match: str) -> None:
        _iptables("-A", "OUTPUT", "-p", "tcp", *match, "-j", "DROP")


def _family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def _iptables(*words: str) -> None:
    subprocess.run(["iptables", "-w", *words], check=True, timeout=_RULE_S)
