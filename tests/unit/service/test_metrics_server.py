"""The metrics server has few connection slots, and no client can hold one for long."""

import contextlib
import socket
import threading
import time
import urllib.request

import pytest

from ballast.service import metrics
from ballast.service.metrics import MetricsServer
from tools.local.ports import free_port


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        return page.read().decode()


def test_slow_connections_are_closed_to_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_SCRAPE_S", 0.3)
    port = free_port()
    server = MetricsServer("127.0.0.1", port)
    threads, idle = threading.active_count(), list[socket.socket]()
    with contextlib.closing(server), contextlib.ExitStack() as open_ones:
        assert "ballast_build_info" in scrape(port)
        for _ in range(100):
            idle.append(open_ones.enter_context(socket.create_connection(("127.0.0.1", port), 5)))
        give_up_s = time.monotonic() + 10
        while True:
            assert threading.active_count() <= threads + metrics._MAX_SCRAPES + 2  # pyright: ignore[reportPrivateUsage]
            for each in idle:
                with contextlib.suppress(OSError):
                    each.send(b"G")  # a byte at a time, and never a whole request
            with contextlib.suppress(OSError):
                assert "ballast_build_info" in scrape(port)
                break
            assert time.monotonic() < give_up_s
            time.sleep(0.05)
