import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

from tools.local.process import ChildProcess

SLEEP = [sys.executable, "-S", "-c", "print('up', flush=True); import time; time.sleep(600)"]
DEAF = [
    sys.executable,
    "-S",
    "-c",
    "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)",
]


def until_up(child: ChildProcess) -> None:
    give_up_at_s = time.monotonic() + 10
    while child.find_line("up") is None:
        assert child.returncode is None, child.describe_end()
        assert time.monotonic() < give_up_at_s
        time.sleep(0.01)


def test_a_cooperative_child_ends_on_sigterm(tmp_path: Path) -> None:
    child = ChildProcess("polite", SLEEP, log_path=tmp_path / "log")
    until_up(child)
    asyncio.run(child.stop(10.0))
    assert child.returncode == -signal.SIGTERM
    assert "was killed by SIGTERM" in child.describe_end()


def test_a_child_that_ignores_sigterm_is_killed_after_its_timeout(tmp_path: Path) -> None:
    child = ChildProcess("deaf", DEAF, log_path=tmp_path / "log")
    until_up(child)
    asyncio.run(child.stop(0.2))
    assert child.returncode == -signal.SIGKILL


def test_the_exit_is_described_with_the_end_of_the_log(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("of an earlier life\n")
    child = ChildProcess(
        "brief", [sys.executable, "-S", "-c", "import sys; sys.exit('no such model')"], log_path=tmp_path / "log"
    )
    assert asyncio.run(child.wait(10.0))
    assert child.describe_end() == "ended with status 1; its log ends with\nno such model"


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    child = ChildProcess("missing", ["/no/such/command"], log_path=tmp_path / "log")
    assert asyncio.run(child.wait(10.0))
    assert "/no/such/command: No such file" in child.describe_end()


def test_a_child_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    script = f"""
import time
from pathlib import Path
from tools.local.process import ChildProcess
child = ChildProcess("orphan", {SLEEP!r}, log_path=Path({str(tmp_path / "log")!r}))
while child.find_line("up") is None: time.sleep(0.01)
print(child.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        parent.kill()
    give_up_at_s = time.monotonic() + 5
    while _running(pid):
        assert time.monotonic() < give_up_at_s, "the child is still there"
        time.sleep(0.01)


def _running(pid: int) -> bool:
    """Whether the process exists and is not a zombie (in a container, there may be no init process to reap it)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_growing_log_is_rotated_while_the_child_keeps_writing(tmp_path: Path) -> None:
    loud = "import time\nfor i in range(100000): print(f'line {i}', flush=True); time.sleep(0.001)"
    log = tmp_path / "loud.log"
    child = ChildProcess("loud", [sys.executable, "-S", "-c", loud], log_path=log)
    give_up_at_s = time.monotonic() + 20
    while not (tmp_path / "loud.log.3").exists():
        assert time.monotonic() < give_up_at_s
        child.rotate_log(most_bytes=200, kept_count=3)
        time.sleep(0.01)
    before = child.log()
    child.rotate_log(most_bytes=1 << 20)
    time.sleep(0.2)
    child.kill()
    assert len(child.log()) > len(before), "the child still writes to the same file"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["loud.log", *(f"loud.log.{i}" for i in (1, 2, 3))]
    assert (tmp_path / "loud.log.1").read_text().startswith("line ")
