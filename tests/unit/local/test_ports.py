import socket
from pathlib import Path

import pytest

from tools.local import ports
from tools.local.ports import free_port, free_ports


def test_ports_are_free_distinct_and_not_given_to_other_processes() -> None:
    found = free_ports(20)
    assert len(set(found)) == 20
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if first_given > 20_000:
        assert max(found) < first_given
    for port in found:
        with socket.socket() as server:
            server.bind(("127.0.0.1", port))


def test_a_port_in_use_is_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", free_port()))
        taken = int(holder.getsockname()[1])
        monkeypatch.setattr(ports, "_FIRST_PORT", taken)
        monkeypatch.setattr(ports, "_PROCESSES", 1)
        monkeypatch.setattr(ports, "_given", set())
        limits = tmp_path / "range"
        limits.write_text(f"{taken + 1}\t60999\n")  # the taken port is the only one below the range
        monkeypatch.setattr(ports, "_RANGE", limits)
        assert taken not in free_ports(3)


def test_no_port_is_returned_twice_before_a_server_listens() -> None:
    found = [port for _ in range(100) for port in free_ports(3)]
    assert len(set(found)) == 300
