"""A child process with a log file: started tethered to this process, stopped by SIGTERM, or by SIGKILL after a timeout.

Services are forked by a process that has imported their modules, other commands executed.

Start it from a thread that lives as long as the child should (the main thread, as a rule): on Linux the child is
killed when the thread that started it ends.
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
_SETTINGS = "settings="  # in the first line of each log, which is long and explains nothing


class ChildProcess:
    """One child, started on construction. Its standard output and error go to the end of `log_path`.

    It has a session of its own: a Ctrl-C in the terminal reaches only the launcher, which then stops its children in
    order.
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
        """A service that the fork server can start; None: it has to be started anew."""
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
        """None while it runs; negative: the number of the signal that killed it."""
        return self._popen.poll()

    def send_signal(self, number: signal.Signals) -> None:
        """Does nothing if the process has ended."""
        self._popen.send_signal(number)

    def log(self) -> str:
        """What it has written since it was started (the last part, if that is much)."""
        with self.log_path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, size - _TAIL_BYTES))
            return file.read().decode(errors="replace")

    def rotate_log(self, most_bytes: int = 20 << 20, kept_count: int = 4) -> None:
        """Moves what it has written to FILE.1 if that is so much, and what was there to FILE.2 and so on, as in what
        compose does. The child goes on writing to the same file; a line that it writes just then may be lost.
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
        """The first complete line that it has written with this beginning."""
        with self.log_path.open("rb") as file:
            file.seek(self._log_start)
            for line in file:
                if line.startswith(prefix.encode()) and line.endswith(b"\n"):
                    return line.decode(errors="replace").rstrip("\n")
        return None

    @property
    def how_it_ended(self) -> str:
        """How it ended, in a few words, as in "worker-1 was killed by SIGKILL"."""
        code = self.returncode
        return f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with status {code}"

    def describe_end(self) -> str:
        """How it ended, for people: status or signal, and its last words."""
        words = [line for line in self.log_tail(_TAIL_LINES).splitlines() if _SETTINGS not in line]
        if not words:
            return f"{self.how_it_ended} and wrote nothing"
        return f"{self.how_it_ended}; its log ends with\n" + "\n".join(words[-_LAST_WORDS_COUNT:])

    async def stop(self, timeout_s: float) -> None:
        """SIGTERM, then SIGKILL after `timeout_s`. Returns when the process is gone."""
        self.send_signal(signal.SIGTERM)
        if not await self.wait(timeout_s):
            self.kill()

    async def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within that time."""
        give_up_at_s = time.monotonic() + timeout_s
        while self.returncode is None:
            if time.monotonic() >= give_up_at_s:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone (a stopped one dies, too)."""
        self.send_signal(signal.SIGKILL)
        self._popen.wait(_KILLED_WITHIN_S)
