"""Stops one thread of another process while its other threads continue."""

import platform
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from tools.local.wedge import StoppedThread

pytestmark = pytest.mark.skipif(platform.system() != "Linux", reason="threads are stopped on Linux only")
_PROGRAM = """
import sys, threading, time
def count(name):
    open(f"/proc/self/task/{threading.get_native_id()}/comm", "w").write(name)
    while True:
        print(name, flush=True)
        time.sleep(0.01)
threading.Thread(target=count, args=("hangs",), daemon=True).start()
count("goes-on")
"""


@pytest.fixture
def counting() -> "Generator[subprocess.Popen[str]]":
    with subprocess.Popen([sys.executable, "-c", _PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        seen: set[str] = set()
        while len(seen) < 2:
            seen.add(process.stdout.readline().strip())
        yield process
        process.kill()


def _switches(pid: int) -> dict[str, int]:
    """Voluntary context switches by thread name. The count of a thread that sleeps and wakes keeps rising."""
    found: dict[str, int] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        status = (task / "status").read_text()
        count = next(line for line in status.splitlines() if line.startswith("voluntary_ctxt_switches"))
        found[(task / "comm").read_text().strip()] = int(count.split()[1])
    return found


def test_a_thread_is_stopped_until_it_is_released(counting: "subprocess.Popen[str]") -> None:
    pid = counting.pid
    assert StoppedThread.named(pid, "nobody") is None
    stopped = StoppedThread.named(pid, "hangs")
    if stopped is None:
        pytest.skip("no right to stop threads here")
    before = _switches(pid)
    time.sleep(0.3)
    after = _switches(pid)
    assert after["hangs"] == before["hangs"]
    stopped.go_on()
    time.sleep(0.3)
    assert _switches(pid)["hangs"] > after["hangs"]


def test_a_process_killed_meanwhile_is_gone_once_its_thread_is_released(
    counting: "subprocess.Popen[str]",
) -> None:
    stopped = StoppedThread.named(counting.pid, "hangs")
    if stopped is None:
        pytest.skip("no right to stop threads here")
    counting.kill()
    time.sleep(0.1)
    stopped.go_on()
    assert counting.wait(10.0) < 0
