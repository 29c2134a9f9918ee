"""The HTTP side of the gateway: routes, limits, disconnects, errors, metrics."""

import asyncio
import gzip
import re
import secrets
import time
import zlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self, cast

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ballast.common.errors import Unauthenticated
from ballast.common.targets import TARGET_HEADERS
from ballast.service.http_client import BrokenCall, HttpClient
from ballast.service.http_forward import ClientGone, forward
from ballast.service.logs import get_logger
from ballast.service.otlp import Context, Exporter, Span
from services.gateway import anthropic
from services.gateway.endpoints import Call, Events, HttpEndpoints, Reply
from services.gateway.errors import Failure, failure_of, invalid
from services.gateway.metrics import ClusterGauges, GatewayMetrics
from services.gateway.openai.writing import encoded, event

_CLIENT_GONE = 499  # nginx's status for a client that disconnected
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,96}")
_PASSED_ON = ("authorization", "traceparent", "tracestate", *TARGET_HEADERS)
_TRACED = ("chatcmpl", "cmpl", "resp", "msg")  # kinds of calls that have spans
_GZIP = re.compile(r"\bgzip\b(?!\s*;\s*q=0(\.0*)?\s*(,|$))")
_JSON, _SSE = b"application/json", b"text/event-stream; charset=utf-8"

_LARGE_BYTES = 16 << 10  # larger bodies are read after authentication of the caller, larger responses compressed
_MAX_HEADER_CHARS = {"authorization": 4096, "traceparent": 128, "tracestate": 512, **dict.fromkeys(TARGET_HEADERS, 32)}
# Paths of OpenAI and vLLM that need another kind of model -> output of that model.
_UNSERVED = {
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "ranks",
    "/v2/rerank": "ranks",
    "/rerank": "ranks",
    "/v1/score": "scores",
    "/score": "scores",
    "/pooling": "embeddings",
    "/classify": "classes",
    "/v1/audio/transcriptions": "transcripts",
    "/v1/audio/translations": "translations",
    "/v1/audio/speech": "speech",
    "/v1/images/generations": "pictures",
    "/v1/moderations": "moderation",
}

Handler = Callable[[Call], Awaitable[Reply]]
Admit = Callable[[Mapping[str, str]], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    max_concurrent_requests: int
    max_body_bytes: int
    body_timeout_s: float


def build_app(
    endpoints: HttpEndpoints,
    metrics: GatewayMetrics,
    exposition: Collector,
    bounds: Bounds,
    is_stopping: Callable[[], bool],
    exporter: Exporter | None = None,
    jobs: HttpClient | None = None,
    cluster: ClusterGauges | None = None,
) -> Starlette:
    """Build the application. `exporter`: sends a span for each call that generates; None: no traces. `jobs`: client of
    the service for files and batches; None: these paths are refused. `cluster`: metrics of the whole cluster, served
    together with the gateway's own; None: only the gateway's own.
    """
    door = Door(metrics, bounds, is_stopping, exporter, endpoints.admit)
    served: list[tuple[str, str, str, Handler]] = [
        ("POST", "/v1/chat/completions", "chatcmpl", endpoints.chat),
        ("POST", "/v1/completions", "cmpl", endpoints.complete),
        ("POST", "/v1/responses", "resp", endpoints.respond),
        ("POST", "/v1/messages", "msg", endpoints.message),
        ("POST", "/v1/messages/count_tokens", "msg", endpoints.count_tokens),
        ("GET", "/v1/models", "models", endpoints.models),
        ("GET", "/v1/models/{name:path}", "models", endpoints.model),
        ("POST", "/tokenize", "tokenize", endpoints.tokenize),
        ("POST", "/detokenize", "detokenize", endpoints.detokenize),
        ("GET", "/health", "health", endpoints.health),
        ("GET", "/live", "live", endpoints.live),
        ("GET", "/version", "version", endpoints.version),
        ("GET", "/ping", "ping", endpoints.health),  # for SageMaker
        ("POST", "/ping", "ping", endpoints.health),
        ("GET", "/load", "load", door.load),
    ]
    served += [("POST", path, "refused", partial(_refuse, path, what)) for path, what in _UNSERVED.items()]
    routes = [Route(path, door.endpoint(path, kind, act), methods=[method]) for method, path, kind, act in served]

    registry = CollectorRegistry()
    registry.register(exposition)
    if cluster is not None:
        registry.register(cluster)

    async def show_metrics(_: Request) -> Response:
        if cluster is not None:
            await cluster.refresh()
        return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        why = f"{error.detail}: {request.method} {request.url.path}"
        failure = invalid(None, why, code="unknown_url" if error.status_code == 404 else "method_not_allowed")
        headers = {**(error.headers or {}), "content-type": "application/json"}
        return Response(encoded(failure.body()), error.status_code, headers)

    routes.append(Route("/metrics", show_metrics))
    for path in ("/v1/files", "/v1/batches"):
        handed_on = door.handing_on(path, jobs)
        routes += [Route(path, handed_on), Route(f"{path}/{{rest:path}}", handed_on)]
    pairs = zip(served, routes, strict=False)
    direct = {(method, path): route.endpoint for (method, path, _, _), route in pairs if "{" not in path}
    return _App(direct, routes=routes, exception_handlers={HTTPException: on_http_error})


async def _refuse(path: str, what: str, _: Call) -> Reply:
    why = f"{path}: this server generates text; for {what}, put another one behind the same router"
    raise invalid(None, why, code="unsupported_endpoint", status=404)


def allowing(app: ASGIApp, origins: str) -> ASGIApp:
    """Return the application with CORS headers for the given origins (comma-separated, or *); unchanged if there are
    none.
    """
    allowed = [origin.strip() for origin in origins.split(",") if origin.strip()]
    if not allowed:
        return app
    shown = ["x-request-id", "retry-after", "retry-after-ms", "x-ballast-schema-ignored"]
    return CORSMiddleware(app, allow_origins=allowed, allow_methods=["*"], allow_headers=["*"], expose_headers=shown)


class _App(Starlette):
    """Application that calls the endpoints of known (method, path) pairs directly, because each of Starlette's layers
    costs time for every event of a stream. Other requests pass through these layers.
    """

    # Any: Starlette's arguments.
    def __init__(self, direct: Mapping[tuple[str, str], ASGIApp], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._direct = direct

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:  # type: ignore[override]
        serve = self._direct.get((scope.get("method", ""), scope.get("path", "")))
        return super().__call__(scope, receive, send) if serve is None else serve(scope, receive, send)


@dataclass(frozen=True, slots=True)
class _Traced:
    at: Context  # the gateway's span
    parent_id: str  # id of the client's span; "" if there is none


class Door:
    """Serves HTTP requests: limits their number and size, detects disconnects, and converts failures to responses."""

    def __init__(
        self,
        metrics: GatewayMetrics,
        bounds: Bounds,
        is_stopping: Callable[[], bool],
        exporter: Exporter | None = None,
        admit: Admit | None = None,
    ) -> None:
        """`admit`: called before a large body is read; raises for callers that dispatchers would refuse."""
        self._exporter = exporter
        self._admit = admit
        self._metrics = metrics
        self._bounds = bounds
        self._is_stopping = is_stopping
        self._in_flight = 0

    def endpoint(self, route: str, kind: str, act: Handler) -> ASGIApp:
        """Return the endpoint that runs `act` for each call. `route`: its label in metrics; `kind`: prefix of request
        ids.
        """

        return _Asgi(partial(self._serve, route, kind, act))

    async def load(self, _: Call) -> Reply:
        """Handle vLLM's /load: the number of requests in progress."""
        return {"server_load": self._in_flight - 1}  # this call itself does not count

    async def _serve(self, route: str, kind: str, act: Handler, scope: Scope, receive: Receive, send: Send) -> None:
        began_s = time.perf_counter()
        headers = _headers(scope)
        traced = self._trace(kind, headers)
        request_id, shown_id = _ids(kind, headers.get("x-request-id"))
        answer = _ANSWERS.get(kind, HttpAnswer)(send, shown_id, headers.get("accept-encoding", ""))
        self._in_flight += 1
        self._metrics.in_flight.set(self._in_flight)
        try:
            self._check_room(route)
            metadata = passed_on(headers)
            if self._admit is not None and _may_be_large(headers):
                await self._admit(metadata)  # before reading the body
            body = await self._read_body(receive, headers)
            if traced is not None:
                metadata["traceparent"] = traced.at.traceparent
            path: Mapping[str, str] = scope.get("path_params", {})
            async with Watch(receive):
                call = Call(request_id=request_id, body=body, path=path, metadata=metadata)
                reply = await act(call)
                if isinstance(reply, Mapping):
                    await answer.send_json(200, reply, call.reply_headers)
                else:
                    self._metrics.ttft_s.labels(route).observe(time.perf_counter() - began_s)
                    await answer.send_events(reply, call.reply_headers)
        except ClientGone:
            answer.status = _CLIENT_GONE
        except Exception as error:  # noqa: BLE001 - every failure becomes a response here
            await self._fail(route, request_id, error, answer)
        finally:
            self._in_flight -= 1
            self._metrics.in_flight.set(self._in_flight)
            self._metrics.requests.labels(route, str(answer.status)).inc()
            took_s = time.perf_counter() - began_s
            self._metrics.duration_s.labels(route).observe(took_s)
            if traced is not None:
                self._tell(traced, route, request_id, answer.status, took_s)

    def handing_on(self, route: str, jobs: HttpClient | None) -> ASGIApp:
        """Return the endpoint that forwards calls to the jobs service. Bodies and responses of any length are streamed
        unchanged. `jobs`: None: calls are refused.
        """

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            began_s = time.perf_counter()
            answer = HttpAnswer(send, _ids("jobs", None)[0])
            self._in_flight += 1
            self._metrics.in_flight.set(self._in_flight)
            try:
                self._check_room(route)
                if jobs is None:
                    why = f"{scope['path']}: there is no jobs service; start one and pass its address as --jobs"
                    raise invalid(None, why, code="unknown_url", status=404)
                answer.status = await forward(jobs, scope, receive, answer.pass_on)
            except ClientGone:
                answer.status = _CLIENT_GONE
            except BrokenCall as error:
                answer.status = 502
                if not answer.has_begun:  # otherwise the connection is closed, which the client notices
                    failure = Failure(502, "server_error", "jobs_broke_off", f"the jobs service: {error}")
                    await self._fail(route, answer.request_id, failure, answer)
            except Exception as error:  # noqa: BLE001 - every failure becomes a response
                await self._fail(route, answer.request_id, error, answer)
            finally:
                self._in_flight -= 1
                self._metrics.in_flight.set(self._in_flight)
                self._metrics.requests.labels(route, str(answer.status)).inc()
                self._metrics.duration_s.labels(route).observe(time.perf_counter() - began_s)

        return _Asgi(serve)

    def _trace(self, kind: str, headers: Mapping[str, str]) -> "_Traced | None":
        """Return the reference to this call's span, which is in the client's trace or a new one; None if the call is
        not traced.
        """
        if self._exporter is None or kind not in _TRACED:
            return None
        parent = Context.read(headers.get("traceparent", "")) or Context.new()
        at = Context(parent.trace_id, secrets.token_hex(8), sampled=parent.sampled)
        return _Traced(at, parent.span_id) if at.sampled else None

    def _tell(self, traced: "_Traced", route: str, request_id: str, status: int, took_s: float) -> None:
        assert self._exporter is not None, "it is traced"
        now_s = time.time()
        what = {
            "http.request.method": "POST",
            "http.route": route,
            "http.response.status_code": status,
            "ballast.request_id": request_id,
        }
        error = "" if status < 500 else f"status {status}"
        at, parent_id = traced.at, traced.parent_id
        self._exporter.put(
            [Span(f"POST {route}", at, parent_id, now_s - took_s, now_s, what, is_server=True, error=error)]
        )

    async def _fail(self, route: str, request_id: str, error: Exception, answer: "HttpAnswer") -> None:
        failure = failure_of(error)
        if failure.status >= 500 and failure.code == "internal_error":
            get_logger().error("request failed", route=route, request_id=request_id, exc_info=error)
        try:
            await answer.send_failure(failure)
        except ClientGone:
            answer.status = _CLIENT_GONE

    def _check_room(self, route: str) -> None:
        if self._is_stopping() and route != "/live":
            raise Failure(503, "server_error", "stopping", "this gateway is stopping", headers={"retry-after": "1"})
        if self._in_flight > self._bounds.max_concurrent_requests and route.startswith("/v1/"):
            why = f"{self._bounds.max_concurrent_requests} requests are being served, which is this gateway's limit"
            raise Failure(503, "server_error", "overloaded", why, headers={"retry-after": "1"})

    async def _read_body(self, receive: Receive, headers: Mapping[str, str]) -> bytes:
        limit = self._bounds.max_body_bytes
        unpacked = Unpacked(headers.get("content-encoding", ""), limit)
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > limit:
            raise _too_large(limit)
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._bounds.body_timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    parts.append(unpacked.more(message.get("body", b"")))
                    size += len(parts[-1])
                    if size > limit:
                        raise _too_large(limit)
                    if not message.get("more_body", False):
                        unpacked.end()
                        return b"".join(parts)
        except TimeoutError as error:
            why = f"the body did not arrive within {self._bounds.body_timeout_s:g} s"
            raise Failure(408, "invalid_request_error", "body_timeout", why) from error


class Unpacked:
    """Decompresses a body while it is received.

    Args:
        encoding: Value of the content-encoding header.
        limit: Maximum number of bytes to decompress.

    Raises:
        Failure: the encoding is unknown (on construction), or the body is not valid in it (`more` and `end`).
    """

    def __init__(self, encoding: str, limit: int) -> None:
        encoding = encoding.strip().lower()
        if encoding not in ("", "identity", "gzip", "deflate"):
            why = f"content-encoding {encoding!r} is not supported; gzip, deflate and identity are"
            raise invalid(None, why, code="unsupported_encoding", status=415)
        self._limit = limit
        self._inflating = zlib.decompressobj(zlib.MAX_WBITS | 32) if encoding in ("gzip", "deflate") else None

    def more(self, data: bytes) -> bytes:
        if self._inflating is None:
            return data
        try:
            return self._inflating.decompress(data, self._limit + 1)
        except zlib.error as error:
            raise invalid(None, f"the body cannot be decompressed: {error}", code="invalid_encoding") from error

    def end(self) -> None:
        if self._inflating is not None and not self._inflating.eof:
            raise invalid(None, "the body cannot be decompressed: it is truncated", code="invalid_encoding")


class Watch:
    """Context manager that cancels the task of its block if the client disconnects, and then raises ClientGone.

    The request's body must have been read before, so that only a disconnect can be received.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._is_gone = False
        self._is_over = False

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None, "runs in a task"
        self._task = task
        self._watching = asyncio.create_task(self._watch(), name="watch for a disconnect")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over = True
        self._watching.cancel()
        if self._is_gone and self._task.uncancel() == 0 and isinstance(error, asyncio.CancelledError):
            raise ClientGone from error

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._is_over:
            self._is_gone = True
            self._task.cancel()


class HttpAnswer:
    """The response to one client."""

    def __init__(self, send: Send, request_id: str, accepted: str = "") -> None:
        """`accepted`: the client's accept-encoding header."""
        self.status = 500
        self._packs = _GZIP.search(accepted) is not None
        self._send = send
        self.request_id = request_id
        self.has_begun = False

    async def send_json(
        self, status: int, value: Mapping[str, object], headers: Mapping[str, str] | None = None
    ) -> None:
        body = encoded(value)
        more = [(name.encode(), text.encode()) for name, text in (headers or {}).items()]
        if len(body) > _LARGE_BYTES:
            more.append((b"vary", b"accept-encoding"))
            if self._packs:
                body = gzip.compress(body, compresslevel=1, mtime=0)
                more.append((b"content-encoding", b"gzip"))
        await self._begin(status, [(b"content-type", _JSON), (b"content-length", b"%d" % len(body)), *more])
        await self._write(body, more=False)

    async def send_events(self, events: Events, headers: Mapping[str, str]) -> None:
        more = [(name.encode(), text.encode()) for name, text in headers.items()]
        try:
            await self._begin(
                200, [(b"content-type", _SSE), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"), *more]
            )
            async for part in events:
                await self._write(part, more=True)
        finally:
            await events.aclose()
        await self._write(b"", more=False)

    async def send_failure(self, failure: Failure) -> None:
        """Send a failure as the whole response, or as the last event of a stream that has begun."""
        if self.has_begun:
            self.status = failure.status
            await self._write(self._failure_event(failure), more=False)
        else:
            await self.send_json(*self._failure(failure), failure.headers)

    def _failure(self, failure: Failure) -> tuple[int, Mapping[str, object]]:
        return failure.status, failure.body()

    def _failure_event(self, failure: Failure) -> bytes:
        return event(failure.body())

    async def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        headers = [*headers, (b"x-request-id", self.request_id.encode())]
        self.has_begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def pass_on(self, message: Message) -> None:
        """Forward a part of another server's response."""
        self.has_begun = True
        await self._send(message)

    def _write(self, body: bytes, *, more: bool) -> Awaitable[None]:
        return self._send({"type": "http.response.body", "body": body, "more_body": more})


class AnthropicAnswer(HttpAnswer):
    """`HttpAnswer` that writes failures in Anthropic's format."""

    def _failure(self, failure: Failure) -> tuple[int, Mapping[str, object]]:
        return anthropic.status_of(failure), anthropic.failure_form(failure, self.request_id)

    def _failure_event(self, failure: Failure) -> bytes:
        return event(anthropic.failure_form(failure, self.request_id), "error")


class ResponsesAnswer(HttpAnswer):
    """`HttpAnswer` that ends a failed stream of /v1/responses with an event of type `error`. The event also has the
    object `error`, because OpenAI's SDK raises an exception only for that.
    """

    def _failure_event(self, failure: Failure) -> bytes:
        error = cast(Mapping[str, object], failure.body()["error"])
        fields = {name: error.get(name) for name in ("code", "message", "param")}
        return event({"type": "error", **fields, "error": error}, "error")


_ANSWERS: Mapping[str, type[HttpAnswer]] = {"msg": AnthropicAnswer, "resp": ResponsesAnswer}  # by kind of call


class _Asgi:
    """Wraps a function as an ASGI application, because Starlette would pass a Request to a bare function."""

    def __init__(self, serve: ASGIApp) -> None:
        self._serve = serve

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        return self._serve(scope, receive, send)


def passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata for dispatchers from a request's headers. Invalid headers are omitted, except authorization.

    Raises:
        Unauthenticated: the header authorization (or x-api-key) is too long or has characters that are invalid in
            tokens.
    """
    found: dict[str, str] = {}
    for name in _PASSED_ON:
        value = headers.get(name)
        if value is not None and value.isascii() and value.isprintable() and len(value) <= _MAX_HEADER_CHARS[name]:
            found[name] = value
        elif value is not None and name == "authorization":
            raise Unauthenticated("the header authorization is longer than 4096 characters, or not ASCII")
    if "authorization" not in found and "x-api-key" in headers:  # Anthropic's clients send this header
        return passed_on({**headers, "authorization": f"Bearer {headers['x-api-key']}"})
    return found


def _may_be_large(headers: Mapping[str, str]) -> bool:
    length = headers.get("content-length", "0")
    return "transfer-encoding" in headers or not length.isdecimal() or int(length) > _LARGE_BYTES


def _headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def _ids(kind: str, given: str | None) -> tuple[str, str]:
    """Return (unique id of a request in dispatchers, id shown to the client). `given`: the client's x-request-id, if
    any.
    """
    if given is None or _REQUEST_ID.fullmatch(given) is None:
        minted = f"{kind}-{secrets.token_hex(16)}"
        return minted, minted
    return f"{kind}-{given}-{secrets.token_hex(4)}", given


def _too_large(limit: int) -> Failure:
    return invalid(None, f"the body has more than {limit} bytes", code="body_too_large", status=413)
