import os
import signal
import sys
import time
from collections.abc import Generator
from pathlib import Path

import psutil
import pytest

from tools.local.forkserver import Forked, ForkServer
from tools.local.process import ChildProcess

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="services are forked on Linux only")


class Started:
    def __init__(self, server: ForkServer, folder: Path) -> None:
        self.server, self._log = server, folder / "log"

    def start(self, *arguments: str, **environ: str) -> Forked:
        with self._log.open("ab") as log:
            return self.server.start(arguments, os.environ | environ, log.fileno())

    def log(self) -> str:
        return self._log.read_text()


@pytest.fixture
def made(tmp_path: Path) -> Generator[Started]:
    started = Started(ForkServer(), tmp_path)
    yield started
    started.server.close()


def ended(process: Forked) -> int:
    give_up_at_s = time.monotonic() + 30
    while (status := process.poll()) is None:
        assert time.monotonic() < give_up_at_s
        time.sleep(0.01)
    return status


def test_a_child_has_its_own_arguments_environment_session_and_title(made: Started) -> None:
    process = made.start("http.server", "--bind", "127.0.0.1", "0", BALLAST_X="here")
    give_up_at_s = time.monotonic() + 30
    while "http.server 0" not in " ".join(seen := psutil.Process(process.pid).cmdline()).replace(
        "--bind 127.0.0.1 ", ""
    ):
        assert time.monotonic() < give_up_at_s, seen
    assert psutil.Process(process.pid).parent().pid != os.getpid()  # pyright: ignore[reportOptionalMemberAccess]
    assert os.getsid(process.pid) == process.pid
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert ended(process) == -signal.SIGTERM
    process.send_signal(signal.SIGTERM)  # has no effect: the process has ended


def test_a_childs_status_and_output_are_reported(made: Started) -> None:
    assert ended(made.start("platform")) == 0
    assert "Linux" in made.log()
    assert ended(made.start("http.server", "--no-such-flag")) == 2
    assert "unrecognized arguments: --no-such-flag" in made.log()
    assert ended(made.start("no.such.module")) == 1
    assert "No module named" in made.log()


def test_children_end_with_their_server(made: Started) -> None:
    process = made.start("http.server", "--bind", "127.0.0.1", "0")
    psutil.Process(made.server._popen.pid).kill()  # pyright: ignore[reportPrivateUsage]
    assert ended(process) == -signal.SIGKILL
    with pytest.raises(OSError, match=r"ended|[Bb]roken|reset"):
        made.start("platform")


def test_an_environment_that_is_too_large_is_refused_and_the_server_survives(made: Started) -> None:
    with pytest.raises(OSError, match="arguments and environment take"):
        made.start("platform", BALLAST_LARGE="x" * (150 << 10))
    assert ended(made.start("platform")) == 0


def test_other_environment_variables_prevent_forking(made: Started) -> None:
    assert made.server.takes(os.environ | {"BALLAST_WORKER__LOG_LEVEL": "debug"})
    assert not made.server.takes(os.environ | {"OMP_NUM_THREADS": "7"})


def test_a_service_is_forked_and_starts_without_its_server_too(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "services.monitor", "--help"]
    for environ in (None, os.environ | {"OMP_NUM_THREADS": "7"}):
        child = ChildProcess("monitor", words, log_path=tmp_path / "log", environ=environ)
        assert isinstance(child._popen, Forked) is (environ is None)  # pyright: ignore[reportPrivateUsage]
        while child.returncode is None:
            time.sleep(0.01)
        assert child.returncode == 0
        assert "--monitor-id" in child.log()
