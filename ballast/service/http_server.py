"""Runs uvicorn inside a service that has its own event loop, signal handlers and shutdown."""

import asyncio
import socket
import ssl
from functools import partial
from pathlib import Path
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from ballast.common.errors import ConfigError
from ballast.rpc.tls import CERTIFICATE, KEY, TlsFolder
from ballast.service.http_connections import BoundedProtocol
from ballast.service.logs import get_logger

_BACKLOG = 4096
_LOOK_S = 1.0  # interval of checks for a new certificate


class HttpServer:
    """An HTTP(S) server on one port, which it binds when constructed.

    Raises:
        ConfigError: the port is taken, the host does not exist, or a file of `tls_dir` cannot be used.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str,
        port: int,
        shutdown_timeout_s: float,
        client_stall_timeout_s: float,
        tls_dir: Path | None = None,
    ) -> None:
        self._socket = _listen(host, port)
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app,
            interface="asgi3",
            http=cast(type[asyncio.Protocol], partial(BoundedProtocol, client_stall_timeout_s=client_stall_timeout_s)),
            ws="none",
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            ssl_certfile=None if tls_dir is None else tls_dir / CERTIFICATE,
            ssl_keyfile=None if tls_dir is None else tls_dir / KEY,
            proxy_headers=False,
            timeout_keep_alive=75,  # longer than most proxies', so that they close first
            timeout_graceful_shutdown=max(1, round(shutdown_timeout_s)),
        )
        self._server = uvicorn.Server(config)
        self._tls = None if tls_dir is None else TlsFolder(tls_dir)

    async def start(self) -> None:
        """Start accepting requests."""
        config = self._server.config
        config.load()
        self._server.lifespan = config.lifespan_class(config)
        await self._server.startup(sockets=[self._socket])

    async def serve(self, stopping: asyncio.Event) -> None:
        """Serve until `stopping` is set, then until running requests have ended, for at most `shutdown_timeout_s`."""
        ticking = asyncio.create_task(self._server.main_loop(), name="uvicorn")
        stop = asyncio.create_task(stopping.wait(), name="stopping")
        renewing = asyncio.create_task(self._follow_certificate(), name="certificate")
        try:
            await asyncio.wait({ticking, stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            renewing.cancel()
            self._server.should_exit = True
            await ticking
            await self._server.shutdown(sockets=[self._socket])

    async def _follow_certificate(self) -> None:
        """When the files of the TLS folder are replaced, use the new certificate for new connections."""
        if self._tls is None:
            return
        files, known = (self._tls.path / CERTIFICATE, self._tls.path / KEY), self._tls.stamps()
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                if (stamps := self._tls.stamps()) == known:
                    continue
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*files)  # fails while only one file is new
                context = self._server.config.ssl
                assert context is not None
                context.load_cert_chain(*files)
            except (OSError, ssl.SSLError):
                continue
            known = stamps
            get_logger().info("certificate read", path=str(files[0]))


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host.strip("[]") or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        raise ConfigError(
            "port", f"cannot listen on {host}:{port} ({error.strerror}); choose another with --port"
        ) from error
    listener.setblocking(False)
    return listener
