"""A child process with a log file, tethered to this process, and stopped by SIGTERM, or by SIGKILL after a timeout.

Services are started by the fork server, other commands are executed.

On Linux a child is killed when the thread that started it ends, so start it from a thread that lives long enough
(usually the main thread).
"""

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.local import tether
from tools.local.forkserver import Forked, server_for

_POLL_S = 0.02
_KILLED_WITHIN_S = 10.0
_TAIL_BYTES = 16 << 10
_TAIL_LINES, _LAST_WORDS_COUNT = 50, 15
_SETTINGS = "settings="  # marks a log's first line, which is long and does not explain failures


class ChildProcess:
    """A child process, started on construction. Its standard output and error are appended to `log_path`.

    It has a session of its own, so that Ctrl-C in the terminal reaches only the launcher, which then stops its children
    in order.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log_path: Path,
        environ: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.name = name
        self.command = tuple(command)
        self.log_path = log_path
        self._log_start = log_path.stat().st_size if log_path.exists() else 0
        with log_path.open("ab") as log:
            self._popen = self._forked(environ, cwd, log.fileno()) or subprocess.Popen(
                [sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=None if environ is None else dict(environ),
                cwd=cwd,
                start_new_session=True,
            )

    def _forked(self, environ: Mapping[str, str] | None, cwd: Path | None, log_fd: int) -> Forked | None:
        """Start the process through the fork server; None if the server cannot start it."""
        environ = os.environ if environ is None else environ
        if cwd is not None or self.command[:2] != (sys.executable, "-m") or not self.command[2].startswith("services."):
            return None
        with contextlib.suppress(OSError):
            server = server_for(environ)
            return server and server.start(self.command[2:], environ, log_fd)
        return None

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """Exit status; None while the process runs; negative if a signal killed it: -number."""
        return self._popen.poll()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal; do nothing if the process has ended."""
        self._popen.send_signal(number)

    def log(self) -> str:
        """The last 16 KiB that the process has written since its start."""
        with self.log_path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, size - _TAIL_BYTES))
            return file.read().decode(errors="replace")

    def rotate_log(self, most_bytes: int = 20 << 20, kept_count: int = 4) -> None:
        """If the log has at least `most_bytes`, copy it to FILE.1 and empty it; FILE.1 becomes FILE.2, and so on. The
        child keeps writing to the same file; a line that it writes meanwhile may be lost.
        """
        if not self.log_path.exists() or self.log_path.stat().st_size < most_bytes:
            return
        older = [self.log_path.with_name(f"{self.log_path.name}.{number}") for number in range(1, kept_count + 1)]
        for newer, old in reversed(list(itertools.pairwise(older))):
            if newer.exists():
                newer.replace(old)
        shutil.copyfile(self.log_path, older[0])
        os.truncate(self.log_path, 0)
        self._log_start = 0

    def log_tail(self, line_count: int = 15) -> str:
        return "\n".join(self.log().splitlines()[-line_count:])

    def find_line(self, prefix: str) -> str | None:
        """The first complete line since the start that begins with `prefix`; None if there is none."""
        with self.log_path.open("rb") as file:
            file.seek(self._log_start)
            for line in file:
                if line.startswith(prefix.encode()) and line.endswith(b"\n"):
                    return line.decode(errors="replace").rstrip("\n")
        return None

    @property
    def how_it_ended(self) -> str:
        """How the process ended, as the end of a sentence: "was killed by SIGKILL", "ended with status 1"."""
        code = self.returncode
        return f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with status {code}"

    def describe_end(self) -> str:
        """How the process ended, and the last lines of its log."""
        words = [line for line in self.log_tail(_TAIL_LINES).splitlines() if _SETTINGS not in line]
        if not words:
            return f"{self.how_it_ended} and wrote nothing"
        return f"{self.how_it_ended}; its log ends with\n" + "\n".join(words[-_LAST_WORDS_COUNT:])

    async def stop(self, timeout_s: float) -> None:
        """Send SIGTERM, then SIGKILL after `timeout_s`, and wait until the process has ended."""
        self.send_signal(signal.SIGTERM)
        if not await self.wait(timeout_s):
            self.kill()

    async def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the process, for at most `timeout_s`. Returns whether it has ended."""
        give_up_at_s = time.monotonic() + timeout_s
        while self.returncode is None:
            if time.monotonic() >= give_up_at_s:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    def kill(self) -> None:
        """Send SIGKILL, which also ends a stopped process, and wait until the process has ended."""
        self.send_signal(signal.SIGKILL)
        self._popen.wait(_KILLED_WITHIN_S)
