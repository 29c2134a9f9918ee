"""Starts `python -m MODULE` by forking a process that has imported the module, which saves seconds and shares memory.

It is like `multiprocessing`'s fork server, but a child has its own arguments, environment, session, log file and title.
The server is a process without threads, tethered to the thread that started it; its children are tethered to it. It
runs only on Linux, because it waits for processes through pidfds.
"""

import ctypes
import errno
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any, cast

from tools.local import tether

_MAX_BYTES = 128 << 10  # limit of a request: arguments and environment
_TITLE_BYTES = 2 << 10
_REPLY_WITHIN_S = 60.0  # long enough for the first import of torch on a busy machine
_UNREAD = ("BALLAST_", "PYTEST_")  # prefixes of variables that no module reads at import
_WITH_TORCH = ("services.worker.engine.load", "services.worker.links.open", "services.worker.ranks.load")


class Forked:
    """A process that the server has started, with the interface of `subprocess.Popen`."""

    def __init__(self, server: "ForkServer", pid: int) -> None:
        self.pid = pid
        self._server = server
        self._fd = os.pidfd_open(pid)
        self._returncode: int | None = None

    def poll(self) -> int | None:
        if self._returncode is None and self._has_ended(0.0):
            self._returncode = self._server.status(self.pid)
            os.close(self._fd)
        return self._returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._fd, number)

    def wait(self, timeout_s: float) -> None:
        """Wait for the end of the process.

        Raises:
            TimeoutError: the process still runs after `timeout_s`.
        """
        if self._returncode is None and not self._has_ended(timeout_s):
            raise TimeoutError(f"process {self.pid} runs after {timeout_s:g} s")
        self.poll()

    def _has_ended(self, timeout_s: float) -> bool:
        waiting = select.poll()  # `select.select` does not accept descriptors above 1023
        waiting.register(self._fd, select.POLLIN)
        return bool(waiting.poll(timeout_s * 1000))


class ForkServer:
    """A running server and the connection to it, in the process that uses it."""

    def __init__(self) -> None:
        self._environ = dict(os.environ)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_REPLY_WITHIN_S)
        with theirs:
            command = [sys.executable, "-m", __name__, str(theirs.fileno()), " " * _TITLE_BYTES]
            self._popen = Popen(
                [sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), *command],
                stdin=DEVNULL,
                stdout=DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    @property
    def runs(self) -> bool:
        return self._popen.poll() is None

    def takes(self, environ: Mapping[str, str]) -> bool:
        """True if a child may have this environment: it differs from the server's only in variables of `_UNREAD`."""
        names = {name for name, _ in environ.items() ^ self._environ.items()}
        return all(name.startswith(_UNREAD) for name in names)

    def start(self, arguments: Sequence[str], environ: Mapping[str, str], log_fd: int) -> Forked:
        """Start a process. `arguments`: the module's name and its arguments; `log_fd`: file for its output.

        Raises:
            OSError: the server has ended or does not answer, or the request is too large.
        """
        request = {"arguments": arguments, "environ": dict(environ), "cwd": os.getcwd()}
        data = json.dumps(request).encode()
        if len(data) > _MAX_BYTES:
            raise OSError(errno.EMSGSIZE, f"arguments and environment take {len(data)} bytes, of {_MAX_BYTES}")
        socket.send_fds(self._socket, [data], [log_fd])
        return Forked(self, self._reply())

    def status(self, pid: int) -> int:
        """Exit status of a process that has ended; -SIGKILL if the server has ended, because its children are killed
        with it.
        """
        try:
            self._socket.send(json.dumps({"pid": pid}).encode())
            return self._reply()
        except OSError:
            return -signal.SIGKILL

    def close(self) -> None:
        """End the server and its children."""
        self._socket.close()
        self._popen.kill()
        self._popen.wait()

    def _reply(self) -> int:
        data = self._socket.recv(64)
        if not data:
            raise ConnectionResetError("the fork server has ended")
        return int(data)


_servers = threading.local()  # one server per thread, because it ends with the thread that started it


def server_for(environ: Mapping[str, str]) -> ForkServer | None:
    """This thread's server, started if necessary; None if it cannot start processes with this environment."""
    if sys.platform != "linux":
        return None
    server = cast("ForkServer | None", getattr(_servers, "server", None))
    if server is not None and not server.runs:
        server.close()
        server = None
    if server is None:
        _servers.server = server = ForkServer()
    return server if server.takes(environ) else None


# ---------------------------------------------------------------- the server's process


def _serve(connection: socket.socket) -> list[str] | None:
    """Answer requests until the other end is closed; then return None. In a child, return its module and arguments."""
    while True:
        data, fds, _, _ = socket.recv_fds(connection, _MAX_BYTES, 1)
        if not data:
            return None
        request: dict[str, Any] = json.loads(data)
        if "pid" in request:
            connection.send(str(os.waitstatus_to_exitcode(os.waitpid(request["pid"], 0)[1])).encode())
            continue
        _import(request["arguments"])
        gc.freeze()  # so that a child's garbage collections do not copy shared memory
        server_pid, pid = os.getpid(), os.fork()
        if not pid:
            connection.close()
            _change_state(request, fds[0], server_pid)
            return list(request["arguments"])
        os.close(fds[0])
        connection.send(str(pid).encode())


def _import(arguments: Sequence[str]) -> None:
    module = arguments[0]
    needed = [f"{module}.__main__"]
    if module == "services.worker" and "emulated" not in arguments:
        needed += _WITH_TORCH
    for name in needed:
        with suppress(Exception):  # the child will fail, too, and log the error
            importlib.import_module(name)
    sys.modules.pop(needed[0], None)  # executed again in the child, as `__main__`


def _change_state(request: Mapping[str, Any], log_fd: int, server_pid: int) -> None:
    os.setsid()
    tether.tie(server_pid)
    os.chdir(request["cwd"])
    for fd in (1, 2):
        os.dup2(log_fd, fd)
    os.close(log_fd)
    os.environ.clear()
    os.environ.update(request["environ"])
    _set_title(" ".join([sys.executable, "-m", *request["arguments"]]))


def _set_title(title: str) -> None:
    """Set the command line that `ps` shows, by overwriting that of the server."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, see proc(5)
    room = end - first - 2
    ctypes.memset(first, 0, room)
    ctypes.memmove(first, title.encode()[:room], min(len(title.encode()), room))
    ctypes.memmove(end - 1, b" ", 1)  # without a NUL at the end, the kernel reads all of it as a title


def main(fd: int) -> None:
    arguments = _serve(socket.socket(fileno=fd))
    if arguments is not None:
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
