"""HTTP/1.1 client for calls between services, with pooled connections, streamed bodies and time limits."""

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httptools

from ballast.common.errors import BallastError, ConfigError, Unavailable
from ballast.rpc.tls import CA

_PIECE_BYTES = 64 << 10
_KEEP_S = 30.0  # idle connections are closed after this; shorter than servers' keep-alive
_MAX_KEPT = 256

Headers = Sequence[tuple[str, str]]


class BrokenCall(BallastError):
    """The connection was lost during a call, which the server may or may not have executed."""


@dataclass(slots=True)
class _HttpConnection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    idle_since_s: float = 0.0
    is_clean: bool = True  # all requests were sent completely

    def close(self) -> None:
        self.writer.transport.abort()


class Response:
    """A response whose body is read piece by piece. `has_body`: False for the response to a HEAD."""

    def __init__(self, connection: _HttpConnection, *, has_body: bool = True) -> None:
        self.headers: list[tuple[str, str]] = []  # names in lower case
        self.status = 0
        self.is_over = False
        self.keeps = False  # whether the connection can serve another call afterwards
        self._connection = connection
        self._has_body = has_body
        self._parser = httptools.HttpResponseParser(self)
        self._has_head = False
        self._pieces: list[bytes] = []

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """The pieces of the body, as they arrive.

        Raises:
            BrokenCall: the body ended prematurely.
        """
        while True:
            pieces, self._pieces = self._pieces, []
            for piece in pieces:
                yield piece
            if self.is_over:
                return
            await self._more()

    async def read(self, most_bytes: int) -> bytes:
        """Read the whole body, of at most `most_bytes`.

        Raises:
            BrokenCall: the body ended prematurely, or exceeds the limit.
        """
        body = bytearray()
        async for piece in self.pieces():
            body += piece
            if len(body) > most_bytes:
                raise BrokenCall(f"the answer has more than {most_bytes} bytes")
        return bytes(body)

    async def read_head(self) -> None:
        while not self._has_head:
            await self._more()

    async def _more(self) -> None:
        try:
            data = await self._connection.reader.read(_PIECE_BYTES)
            if not data:
                raise BrokenCall("the connection was closed before the end of the answer")
            self._parser.feed_data(data)
        except (OSError, httptools.HttpParserError) as error:
            raise BrokenCall(f"the answer broke off: {error}") from error

    # The remaining methods are callbacks of the parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.decode("latin-1").lower(), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._has_head = self.status >= 200  # False for interim responses such as 100 Continue
        if not self._has_head:
            self.headers.clear()
        elif not self._has_body:
            self.is_over = True  # the parser would wait for the body that the headers describe

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        if self._has_head:
            self.is_over, self.keeps = True, self._parser.should_keep_alive()


class HttpClient:
    """A client for one server, http://HOST:PORT or https://HOST:PORT.

    Args:
        tls_dir: Folder whose ca.crt must have signed the server's certificate. None: the system's CAs.
        server_name: Name required in the certificate. None: the host of the URL.

    Raises:
        ConfigError: the URL is invalid, or the CA cannot be read.
    """

    def __init__(
        self, url: str, *, tls_dir: Path | None = None, server_name: str | None = None, connect_timeout_s: float = 5.0
    ) -> None:
        self.url = url
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(url, f"is no URL: {error}") from error
        if parts.scheme not in ("http", "https") or host is None or parts.path.strip("/"):
            raise ConfigError(url, "must be http://HOST:PORT or https://HOST:PORT")
        self._host, self._port = host, port or (443 if parts.scheme == "https" else 80)
        self._authority = parts.netloc.rpartition("@")[2]
        self._tls = None
        if parts.scheme == "https":
            try:
                self._tls = ssl.create_default_context(cafile=None if tls_dir is None else tls_dir / CA)
            except OSError as error:
                raise ConfigError(str(tls_dir), f"holds no {CA} that can be read: {error}") from error
        self._server_name = (server_name or host) if self._tls is not None else None
        self._connect_timeout_s = connect_timeout_s
        self._idle: list[_HttpConnection] = []

    @asynccontextmanager
    async def call(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str] | Headers = (),
        body: bytes | AsyncIterable[bytes] = b"",
    ) -> AsyncGenerator[Response, None]:
        """Context manager that sends a request and yields the response once its head has arrived. A streamed body is
        sent in chunks unless the headers have its length. Leaving the context before the end of the body closes the
        connection.

        Raises:
            Unavailable: there is no connection, so nothing was sent.
            BrokenCall: the connection was lost during the call.
        """
        pairs = list(headers.items() if isinstance(headers, Mapping) else headers)
        connection, response = await self._send(method, path, pairs, body)
        try:
            yield response
        finally:
            if response.is_over and response.keeps and connection.is_clean and len(self._idle) < _MAX_KEPT:
                connection.idle_since_s = time.monotonic()
                self._idle.append(connection)
            else:
                connection.close()

    async def _send(
        self, method: str, path: str, headers: list[tuple[str, str]], body: bytes | AsyncIterable[bytes]
    ) -> tuple[_HttpConnection, Response]:
        is_whole = isinstance(body, bytes)
        while True:
            connection = self._kept() if is_whole else None
            is_fresh = connection is None
            connection = connection or await self._connect()
            response = Response(connection, has_body=method != "HEAD")
            try:
                await self._exchange(connection, response, method, path, headers, body)
            except BrokenCall:
                connection.close()
                if not is_fresh and not response.headers:
                    continue  # the server closed the pooled connection before this request
                raise
            except BaseException:
                connection.close()
                raise
            return connection, response

    async def _exchange(
        self,
        connection: _HttpConnection,
        response: Response,
        method: str,
        path: str,
        headers: list[tuple[str, str]],
        body: bytes | AsyncIterable[bytes],
    ) -> None:
        named = {name.lower() for name, _ in headers}
        head = [f"{method} {path} HTTP/1.1", f"Host: {self._authority}"]
        head += [f"{name}: {value}" for name, value in headers]
        chunked = not isinstance(body, bytes) and "content-length" not in named
        if chunked:
            head.append("Transfer-Encoding: chunked")
        elif isinstance(body, bytes) and (body or method not in ("GET", "DELETE")):
            head.append(f"Content-Length: {len(body)}")
        write = connection.writer
        try:
            write.write(("\r\n".join(head) + "\r\n\r\n").encode("latin-1"))
            if isinstance(body, bytes):
                write.write(body)
                await write.drain()
            else:
                await self._send_stream(connection, response, body, chunked=chunked)
        except OSError as error:
            # A server that refuses a body responds and closes; its response is more informative than the broken
            # connection.
            with contextlib.suppress(BrokenCall):
                return await response.read_head()
            raise BrokenCall(f"the request broke off: {error}") from error
        return await response.read_head()

    async def _send_stream(
        self, connection: _HttpConnection, response: Response, body: AsyncIterable[bytes], *, chunked: bool
    ) -> None:
        """Send the body until its end, or until the server responds early."""
        answered = asyncio.create_task(response.read_head(), name="early answer")
        try:
            async for piece in body:
                if not piece:
                    continue
                connection.writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
                await connection.writer.drain()
                if answered.done():
                    connection.is_clean = False
                    break
            else:
                if chunked:
                    connection.writer.write(b"0\r\n\r\n")
                await connection.writer.drain()
            await answered
        finally:
            answered.cancel()
            await asyncio.wait([answered])
            if not answered.cancelled():
                answered.exception()  # marks the exception as retrieved, so that asyncio does not log it

    def _kept(self) -> _HttpConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.reader.at_eof() and time.monotonic() - connection.idle_since_s < _KEEP_S:
                return connection
            connection.close()
        return None

    async def _connect(self) -> _HttpConnection:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                opening = asyncio.open_connection(
                    self._host, self._port, ssl=self._tls, server_hostname=self._server_name
                )
                return _HttpConnection(*await opening)
        except TimeoutError as error:
            raise Unavailable(self.url, f"no connection within {self._connect_timeout_s:g} s") from error
        except OSError as error:
            raise Unavailable(self.url, error.strerror or str(error)) from error

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
