"""Ports that stay free from the moment they are chosen until a process has been started to listen there."""

import os
import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT = 15_000
_TRIES = 200
_PROCESSES = 16  # share the ports out among them, by process id
_given: set[int] = set()


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """So many different ports on which nobody listens.

    They lie below the range that the kernel gives to connections and to servers that ask for any port. One inside it
    may be gone by the time it is used: any connection can get it, even one that somebody keeps trying to make to the
    absent server, which then talks to itself.

    None is given twice by a process, since the first server may take a while to listen; and processes side by side
    look at different ones.
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
    while len(found) < count:  # there is no room below: the kernel's choice has to do
        with socket.socket() as probe:
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
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True
