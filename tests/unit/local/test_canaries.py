"""The suite-wide search for secrets in logs detects a planted secret, even one that spans two chunks of a file, and
crashes.
"""

import subprocess
import sys
from pathlib import Path

from tests.support.canaries import PASSWORD, Canaries


def test_a_secret_in_a_log_is_found(tmp_path: Path) -> None:
    canaries = Canaries(tmp_path)
    (tmp_path / "good.log").write_text("nothing\n" * 200_000)
    assert canaries.seen() == []
    for name, before in (("first.log", 10), ("second.log", (1 << 20) - 5)):
        (tmp_path / name).write_text("x" * before + PASSWORD + "x" * 100)
    assert canaries.seen() == [f"'{PASSWORD}' in first.log", f"'{PASSWORD}' in second.log"]


def test_a_crash_in_a_log_is_found(tmp_path: Path) -> None:
    log = tmp_path / "dispatcher-0.log"
    command = [sys.executable, "-X", "faulthandler", "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"]
    with log.open("wb") as file:
        subprocess.run(command, stderr=file, check=False)
    assert Canaries(tmp_path).seen() == ["'Fatal Python error' in dispatcher-0.log"]
