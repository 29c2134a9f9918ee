"""Serves the dashboard on its own port, within a process that does something else."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Generator

import uvicorn

from ballast.common.addresses import is_ipv6, join_address
from ballast.common.errors import ConfigError
from tools.dashboard.app import Dashboard, build_app

_PORTS = 100  # number of ports tried, from the wanted one on
_STOP_WITHIN_S = 2


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Do nothing: the surrounding process handles signals."""
        yield


@contextlib.asynccontextmanager
async def serving(dashboard: Dashboard, host: str, port: int, *, exact: bool = False) -> AsyncGenerator[str]:
    """Context manager that serves the dashboard and yields its URL. If the port is taken, the next free one is used,
    unless `exact` is set.

    Raises:
        ConfigError: no port is free.
    """
    listener = _listen(host, port, 1 if exact or port == 0 else _PORTS)
    hosts = (
        ["*"]
        if host in ("0.0.0.0", "::")
        else ["localhost", "127.0.0.1", "[::1]", f"[{host}]" if is_ipv6(host) else host]
    )
    config = uvicorn.Config(
        build_app(dashboard, hosts=hosts),
        log_config=None,
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=_STOP_WITHIN_S,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]), name="dashboard")
    try:
        shown = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
        yield f"http://{join_address(shown, listener.getsockname()[1])}/"
    finally:
        server.should_exit = True
        await task
        listener.close()


def _listen(host: str, port: int, tries: int) -> socket.socket:
    for number in range(port, port + tries):
        with contextlib.suppress(OSError):
            return socket.create_server((host, number), family=socket.AF_INET6 if is_ipv6(host) else socket.AF_INET)
    last = f" to {port + tries - 1}" if tries > 1 else ""
    raise ConfigError("--dashboard-port", f"cannot listen on {host}:{port}{last} (in use?)")
