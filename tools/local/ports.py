"""Chooses ports that stay free until a process has been started to listen on them."""

import os
import random
import socket
from pathlib import Path

from ballast.common.addresses import is_ipv6

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT = 15_000
_TRIES = 200
_PROCESSES = 16  # number of disjoint sets of ports; a process uses the set that its process id selects
_given: set[int] = set()


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """`count` different ports on which no process listens.

    They are below the range from which the kernel chooses ports of connections and of servers that ask for any port. A
    port inside that range may be taken before it is used, even by a connection attempt to the server that has not
    started yet: the connection then connects to itself.

    No port is returned twice in a process, because the first server may take a while to listen. Concurrent processes
    choose from different ports.
    """
    below = _first_given_port()
    candidates = range(_FIRST_PORT + os.getpid() % _PROCESSES, below, _PROCESSES)
    found: list[int] = []
    for port in random.SystemRandom().sample(candidates, min(_TRIES, len(candidates))):
        if len(found) == count:
            break
        if port not in _given and _is_free(host, port):
            found.append(port)
            _given.add(port)
    while len(found) < count:  # no port is free below that range: let the kernel choose
        with socket.socket(socket.AF_INET6 if is_ipv6(host) else socket.AF_INET) as probe:
            probe.bind((host, 0))
            port = int(probe.getsockname()[1])
        if port not in found:
            found.append(port)
    return found


def free_port(host: str = "127.0.0.1") -> int:
    return free_ports(1, host)[0]


def _first_given_port() -> int:
    try:
        return int(_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):  # not Linux
        return 32_768


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if is_ipv6(host) else socket.AF_INET) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True
